"""Chats as tokens, with a mask of the assistant's tokens. By default only these are learned.

    template with {% generation %} ──────────────────────────────► transformers' mask
    template of a known family     ──► edited so that it marks ──► transformers' mask
    any other                      ──► prefix differences      ──► spans of characters ──► tokens

A prefix difference is the text that the assistant's message adds to the prompt that the model would have continued. It
exists only if the prompt is a prefix of the chat, which is checked for each message.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from offload.errors import ConfigError
from offload.finetune.corpus.documents import Chat

# -- training templates --------------------------------------------------------------------------------
#
# Chat templates of known families, edited so that they mark the assistant's turns with `{% generation %}`.
#
# Hugging Face's trl keeps a training template for each of these families. Prefix differences of the original would give
# another mask, or none: the template drops the reasoning of earlier turns, ends the last turn in another way, or writes
# the end of a turn with the next one. The edits give the tokens and the mask of trl's templates. An edit is a piece of
# the template and its replacement, so that a checkpoint with another system prompt or date belongs to its family too.


_GENERATION = re.compile(r"\{%-?\s*generation\b")


class TemplateEdit(NamedTuple):
    """A piece of a template, and what replaces it everywhere."""

    piece: str
    replacement: str
    counts: tuple[int, ...] = (1,)
    """How often the piece may occur in a template of the family."""


def _before(piece: str, text: str) -> TemplateEdit:
    return TemplateEdit(piece, text + piece)


def _after(piece: str, text: str) -> TemplateEdit:
    return TemplateEdit(piece, piece + text)


_BEGIN, _END = "{%- generation %}", "{%- endgeneration %}"
_CHATML_HEADER = r"'<|im_start|>' + message.role + '\n"

_QWEN_2_5 = (
    # An assistant without tool calls is rendered in the branch of the user, and moves into its own.
    TemplateEdit(' or (message.role == "assistant" and not message.tool_calls)', ""),
    TemplateEdit("{%- if message.content %}", "{%- if message.content or not message.tool_calls %}"),
    _after("{{- '<|im_start|>' + message.role }}", _BEGIN),
    _before('{%- elif message.role == "tool" %}', _END),
)
_QWEN_3 = (
    # Each turn shows its reasoning, not only those after the last question.
    TemplateEdit("loop.index0 > ns.last_query_index", "true"),
    TemplateEdit("loop.last or (not loop.last and reasoning_content)", "true", (0, 1)),
    _after('{%- elif message.role == "assistant" %}', f"{{{{- {_CHATML_HEADER}' }}}}{_BEGIN}"),
    TemplateEdit(rf"{_CHATML_HEADER}<think>\n' + ", r"'<think>\n' + "),
    TemplateEdit(f"{{{{- {_CHATML_HEADER}' + content }}}}", "{{- content }}", (1, 2)),
    _before('{%- elif message.role == "tool" %}', _END),
)
_NEMOTRON_3 = (
    _before("{%- set include_content = not (truncate_history_thinking", _BEGIN),
    TemplateEdit("\n                {{- '<|im_end|>\\n' }}\n", f"\n                {{{{- '<|im_end|>\\n' }}}}{_END}\n"),
    TemplateEdit(
        r"{{- '<|im_start|>assistant\n' ~ (content | default('', true) | string | trim) ~ '<|im_end|>\n' }}",
        r"{{- '<|im_start|>assistant\n' }}"
        + _BEGIN
        + r"{{- (content | default('', true) | string | trim) ~ '<|im_end|>\n' }}"
        + _END,
    ),
    TemplateEdit(
        r"{{- '<|im_start|>assistant\n' ~ c ~ '<|im_end|>\n' }}",
        r"{{- '<|im_start|>assistant\n' }}" + _BEGIN + r"{{- c ~ '<|im_end|>\n' }}" + _END,
    ),
    TemplateEdit(
        r"{{- '<|im_start|>assistant\n<|im_end|>\n' }}",
        r"{{- '<|im_start|>assistant\n' }}" + _BEGIN + r"{{- '<|im_end|>\n' }}" + _END,
    ),
)
_DEEPSEEK_CALLS_END = "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}"  # noqa: RUF001
_DEEPSEEK_ANSWER = "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}"  # noqa: RUF001
_ARGUMENTS = "tool['function']['arguments']"
_DEEPSEEK_V3 = (
    # Arguments may be an object, as transformers documents, where the original takes only a string.
    TemplateEdit(_ARGUMENTS, f"({_ARGUMENTS} if {_ARGUMENTS} is string else {_ARGUMENTS} | tojson)", (1, 2, 3)),
    _after("'tool_calls' in message %}{%- set ns.is_tool = false -%}", _BEGIN),
    _after(_DEEPSEEK_CALLS_END, _END),
    _after("'tool_calls' not in message %}", _BEGIN),
    _after(_DEEPSEEK_ANSWER, _END),
)
_DEEPSEEK_R1 = (
    # The original drops the reasoning from the answer, which would then not be learned.
    TemplateEdit("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}", ""),
    _after("message['content'] is none %}{%- set ns.is_tool = false -%}", _BEGIN),
    _after(f"{_DEEPSEEK_CALLS_END}{{%- endif %}}{{%- endfor %}}", _END),
    _after("message['content'] is not none %}", _BEGIN),
    _after(_DEEPSEEK_ANSWER, _END),
)
_GPT_OSS = (
    _after("{%- if message.role == 'assistant' -%}", _BEGIN),
    _before("{%- elif message.role == 'tool' -%}", _END),
)
_MUSE = (
    _after("{%- elif role == 'assistant' -%}", "{%- generation -%}"),
    TemplateEdit(
        "{{- ('<|eot|>' if end_turn else '<|eom|>') -}}\n        {%- endif -%}",
        "{{- ('<|eot|>' if end_turn else '<|eom|>') -}}\n        {%- endif -%}{%- endgeneration -%}",
    ),
)
_AFTER_ASSISTANT = "loop.first or messages[loop.index0 - 1].role != 'assistant'"
_GLM_4 = (
    # The model ends its turn with the role of the next one, so that role is learned, and rendered in this turn.
    TemplateEdit(
        "{%- if m.role == 'user' -%}<|user|>\n{{ visible_text(m.content) }}",
        f"{{%- if m.role == 'user' -%}}{{%- if {_AFTER_ASSISTANT} -%}}<|user|>{{%- endif -%}}"
        "{{ '\\n' + visible_text(m.content) }}",
    ),
    TemplateEdit(
        "{%- elif m.role == 'system' -%}\n<|system|>\n{{ visible_text(m.content) }}",
        f"{{%- elif m.role == 'system' -%}}{{%- if {_AFTER_ASSISTANT} -%}}<|system|>{{%- endif -%}}"
        "{{ '\\n' + visible_text(m.content) }}",
    ),
    TemplateEdit(
        "{%- if loop.first or (messages[loop.index0 - 1].role != \"tool\") %}\n    {{- '<|observation|>' }}\n"
        "{%- endif %}\n",
        "",
    ),
    TemplateEdit(
        "<|observation|>{% for tr in m.content %}",
        f"{{{{- '<|observation|>' if {_AFTER_ASSISTANT} }}}}{{% for tr in m.content %}}",
    ),
    _before("{%- if loop.index0 > ns.last_user_index and reasoning_content -%}", "{% generation %}\n"),
    TemplateEdit(
        "</tool_call>{% endfor %}\n{% endif %}\n",
        "</tool_call>{% endfor %}<|observation|>{%- else -%}{{- '<|system|>' if not loop.last and "
        "messages[loop.index0 + 1].role == 'system' else '<|user|>' }}{%- endif %}\n{% endgeneration %}\n",
    ),
)
FAMILIES: dict[str, tuple[TemplateEdit, ...]] = {
    "Qwen2.5": _QWEN_2_5,
    "Qwen3": _QWEN_3,
    "DeepSeek-V3": _DEEPSEEK_V3,
    "DeepSeek-R1": _DEEPSEEK_R1,
    "gpt-oss": _GPT_OSS,
    "GLM-4": _GLM_4,
    "Nemotron 3": _NEMOTRON_3,
    "Muse": _MUSE,
}
"""Edits for each family. A template belongs to a family if it contains all its pieces."""


class Marking(NamedTuple):
    """A chat template that marks the assistant's words."""

    template: str
    family: str | None
    """Key of `FAMILIES`; None if the tokenizer's own template has the marks."""


def marking_template(tokenizer: Any, tools: Any = None) -> Marking | None:
    """Returns the template by which transformers masks the assistant's tokens; None if there is none.

    A tokenizer may have a template of its own for chats with tools.
    """
    own: str = tokenizer.get_chat_template(None, tools)
    if _GENERATION.search(own):
        return Marking(own, None)
    edited = ((_edited(own, edits), family) for family, edits in FAMILIES.items())
    return next((Marking(template, family) for template, family in edited if template is not None), None)


def _edited(template: str, edits: tuple[TemplateEdit, ...]) -> str | None:
    if any(template.count(edit.piece) not in edit.counts for edit in edits):
        return None
    for edit in edits:
        template = template.replace(edit.piece, edit.replacement)
    return template


# -- chats ---------------------------------------------------------------------------------------------


_REASONING = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
"""Text that some templates put at the end of a prompt although the assistant's answer begins with it."""
_CURE = (
    "give a template with {% generation %}, write a chat for each answer that ends with it, or give --train-on all to "
    "offload train"
)


def encode_chat(chat: Chat, tokenizer: Any, whole: bool = False) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a chat, and for each whether it is learned: all with `whole`, else the assistant's.

    Bytes, whose tokenizer is None, have no chat template.
    """
    _check_template(chat, tokenizer)
    if whole:
        ids = _apply(chat, tokenizer, chat.messages, tokenize=True, return_dict=True)["input_ids"]
        return ids, [True] * len(ids)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{chat.place}: {type(tokenizer).__name__} does not tell the place of a token in the text, by which the "
            "assistant's tokens are found; convert the tokenizer to tokenizer.json, or give --train-on all to offload "
            "train"
        )
    try:
        marking = marking_template(tokenizer, chat.tools)
    except ValueError as error:  # templates with names, and none for this chat
        raise ConfigError(f"{chat.place}: the tokenizer's chat template refuses this chat: {error}") from error
    if marking is not None:
        marked = _apply(
            chat, tokenizer, chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            chat_template=marking.template,
        )  # fmt: skip
        return marked["input_ids"], _without_unlearned(chat, [bool(bit) for bit in marked["assistant_masks"]])
    text = _apply(chat, tokenizer, chat.messages, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begins, ends = np.asarray(encoded["offset_mapping"]).reshape(-1, 2).T
    learned = np.zeros(len(begins), bool)
    for start, stop in _assistant_spans(chat, tokenizer, text):
        learned |= (begins < stop) & (start < ends)
    return encoded["input_ids"], learned.tolist()


def _is_learned(message: dict[str, Any]) -> bool:
    """Returns False for an assistant's message with "weight": 0, as OpenAI has it, or "train": false, as axolotl."""
    return bool(message.get("weight", 1)) and bool(message.get("train", True))


def _without_unlearned(chat: Chat, mask: list[bool]) -> list[bool]:
    """Returns the mask of a template without the messages that are not to be learned."""
    answers = [message for message in chat.messages if message["role"] == "assistant"]
    if all(map(_is_learned, answers)):
        return mask
    runs = [[learned, len([*group])] for learned, group in itertools.groupby(mask)]
    if sum(learned for learned, _ in runs) != len(answers):
        raise ConfigError(
            f'{chat.place}: some messages have "weight": 0 or "train": false, and the chat template does not mark each '
            f"message of the assistant apart; {_CURE}"
        )
    numbered = iter(answers)
    return [bit for learned, count in runs for bit in [bool(learned) and _is_learned(next(numbered))] * count]


def learned_words(tokenizer: Any, whole: bool = False) -> str:
    """Returns a line on the learned words of chats and on the method that finds them."""
    if whole:
        return "chats: the words of all roles are learned, as --train-on all asks"
    marking = None
    with contextlib.suppress(ValueError):  # templates with names may have none for chats without tools
        marking = marking_template(tokenizer)
    by = "found as what each answer adds to its prompt"
    if marking is not None:
        by = f"by a training template of {marking.family}" if marking.family else "as the chat template marks them"
    return f"chats: only the assistant's words are learned, {by}"


def encode_chat_prompt(chat: Chat, tokenizer: Any) -> list[int]:
    """Returns the tokens of a chat and of the opening of the assistant's next turn."""
    _check_template(chat, tokenizer)
    encoded = _apply(chat, tokenizer, chat.messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def _check_template(chat: Chat, tokenizer: Any) -> None:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"{chat.place} is a chat, and the model's tokenizer has no chat template, as presets and base models have "
            "none; give a folder or hub name of a chat model, such as Qwen/Qwen3-8B, or write the file as "
            '{"prompt": …, "completion": …}'
        )


def _apply(chat: Chat, tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tools=chat.tools, **how)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"{chat.place}: the tokenizer's chat template refuses this chat: {error}") from error


def _assistant_spans(chat: Chat, tokenizer: Any, text: str) -> Iterator[tuple[int, int]]:
    for at, message in enumerate(chat.messages):
        if message["role"] != "assistant" or not _is_learned(message):
            continue
        through = text
        if at + 1 < len(chat.messages):
            through = _apply(chat, tokenizer, chat.messages[: at + 1], tokenize=False)
            # Some templates end a chat with the end-of-text token, which does not belong to the turn.
            if not text.startswith(through) and tokenizer.eos_token:
                through = through.removesuffix(tokenizer.eos_token)
        prompt = _prompt(chat, tokenizer, at, through)
        if not (text.startswith(through) and through.startswith(prompt)):
            raise ConfigError(
                f"{chat.place}: message {at + 1} is learned as the assistant's, and the chat template does not show "
                f"it behind its prompt as it shows it in the whole chat (reasoning may be dropped from earlier turns); "
                f"{_CURE}"
            )
        yield len(prompt), len(through)


def _prompt(chat: Chat, tokenizer: Any, at: int, through: str) -> str:
    """Returns the text that the model would have continued with message `at`."""
    if at:
        prompt = _apply(chat, tokenizer, chat.messages[:at], tokenize=False, add_generation_prompt=True)
        # An opened reasoning is the answer's first word, and an answer without reasoning has none.
        return _REASONING.sub("", prompt)
    # No template accepts an empty chat. A first message has the same header as a second one.
    prompt = _apply(chat, tokenizer, chat.messages[:1], tokenize=False, add_generation_prompt=True)
    header = _REASONING.sub("", prompt.removeprefix(through))
    return through[: through.find(header) + len(header)] if header in through else through[:0]


# -- example -------------------------------------------------------------------------------------------
#
# An example of the training data as text, with the learned tokens marked.


_LONGEST = 240
"""Characters up to which a part is shown whole. A longer part is shown by half as many characters from its beginning,
and a quarter as many from its end."""
_MOST = 24
"""Parts that are shown."""


class ExamplePart(NamedTuple):
    """Text of neighbouring tokens that are all learned, or all not learned."""

    text: str
    learned: bool


class Example(str):
    """A line of the start that shows what is learned: the text between [[ and ]]. `parts` are for a terminal."""

    parts: tuple[ExamplePart, ...]
    heading = "the first document"

    @classmethod
    def of(cls, ids: Sequence[int], learned: Sequence[bool], tokenizer: Any, whole: bool = False) -> Example:
        """Returns the example of a row of tokens. Long parts are shortened, unless it is to be shown `whole`."""
        parts = parts_of(ids, learned, tokenizer, whole)
        example = cls("".join(f"[[{part.text}]]" if part.learned else part.text for part in parts))
        example.parts = parts
        return example


def parts_of(
    ids: Sequence[int], learned: Sequence[bool], tokenizer: Any, whole: bool = False
) -> tuple[ExamplePart, ...]:
    """Returns the text of a document in parts, without characters that control a terminal; shortened if not `whole`."""
    runs = [
        (flag, [token for token, _ in tokens])
        for flag, tokens in itertools.groupby(zip(ids, learned, strict=True), key=lambda pair: bool(pair[1]))
    ]
    shown = [(visible_text(_text(tokens, tokenizer)), flag) for flag, tokens in (runs if whole else runs[:_MOST])]
    parts = [ExamplePart(text if whole else _shortened(text), flag) for text, flag in shown]
    return tuple(parts) if len(runs) == len(parts) else (*parts, ExamplePart(" [...]", False))


def visible_text(text: str) -> str:
    """Returns text with escapes for characters that control a terminal, or the direction of text.

    A line break stays, and is followed by two spaces, so that no line of the data looks like a line of the program.
    """

    def shown(character: str) -> str:
        if character == "\n":
            return "\n  "
        obeyed = unicodedata.category(character)[0] in "CZ" and character != " "
        return ascii(character)[1:-1] if obeyed else character

    return "".join(map(shown, text))


def _text(tokens: Sequence[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return bytes(tokens).decode(errors="replace")
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    begin, end = text[: _LONGEST // 2], text[-_LONGEST // 4 :]
    return f"{begin} [... {len(text) - len(begin) - len(end):,} characters ...] {end}"
