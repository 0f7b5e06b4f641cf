"""Chat templates of known families, edited so that they mark the assistant's turns with `{% generation %}`.

Hugging Face's trl keeps a training template for each of these families. Prefix differences of the original would give
another mask, or none: the template drops the reasoning of earlier turns, ends the last turn in another way, or writes
the end of a turn with the next one. The edits give the tokens and the mask of trl's templates. An edit is a piece of
the template and its replacement, so that a checkpoint with another system prompt or date belongs to its family too.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_GENERATION = re.compile(r"\{%-?\s*generation\b")


class Edit(NamedTuple):
    """A piece of a template, and what replaces it everywhere."""

    piece: str
    replacement: str
    counts: tuple[int, ...] = (1,)
    """How often the piece may occur in a template of the family."""


def _before(piece: str, text: str) -> Edit:
    return Edit(piece, text + piece)


def _after(piece: str, text: str) -> Edit:
    return Edit(piece, piece + text)


_BEGIN, _END = "{%- generation %}", "{%- endgeneration %}"
_CHATML_HEADER = r"'<|im_start|>' + message.role + '\n"

_QWEN_2_5 = (
    # An assistant without tool calls is rendered in the branch of the user, and moves into its own.
    Edit(' or (message.role == "assistant" and not message.tool_calls)', ""),
    Edit("{%- if message.content %}", "{%- if message.content or not message.tool_calls %}"),
    _after("{{- '<|im_start|>' + message.role }}", _BEGIN),
    _before('{%- elif message.role == "tool" %}', _END),
)
_QWEN_3 = (
    # Each turn shows its reasoning, not only those after the last question.
    Edit("loop.index0 > ns.last_query_index", "true"),
    Edit("loop.last or (not loop.last and reasoning_content)", "true", (0, 1)),
    _after('{%- elif message.role == "assistant" %}', f"{{{{- {_CHATML_HEADER}' }}}}{_BEGIN}"),
    Edit(rf"{_CHATML_HEADER}<think>\n' + ", r"'<think>\n' + "),
    Edit(f"{{{{- {_CHATML_HEADER}' + content }}}}", "{{- content }}", (1, 2)),
    _before('{%- elif message.role == "tool" %}', _END),
)
_NEMOTRON_3 = (
    _before("{%- set include_content = not (truncate_history_thinking", _BEGIN),
    Edit("\n                {{- '<|im_end|>\\n' }}\n", f"\n                {{{{- '<|im_end|>\\n' }}}}{_END}\n"),
    Edit(
        r"{{- '<|im_start|>assistant\n' ~ (content | default('', true) | string | trim) ~ '<|im_end|>\n' }}",
        r"{{- '<|im_start|>assistant\n' }}"
        + _BEGIN
        + r"{{- (content | default('', true) | string | trim) ~ '<|im_end|>\n' }}"
        + _END,
    ),
    Edit(
        r"{{- '<|im_start|>assistant\n' ~ c ~ '<|im_end|>\n' }}",
        r"{{- '<|im_start|>assistant\n' }}" + _BEGIN + r"{{- c ~ '<|im_end|>\n' }}" + _END,
    ),
    Edit(
        r"{{- '<|im_start|>assistant\n<|im_end|>\n' }}",
        r"{{- '<|im_start|>assistant\n' }}" + _BEGIN + r"{{- '<|im_end|>\n' }}" + _END,
    ),
)
_DEEPSEEK_CALLS_END = "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}"  # noqa: RUF001
_DEEPSEEK_ANSWER = "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}"  # noqa: RUF001
_ARGUMENTS = "tool['function']['arguments']"
_DEEPSEEK_V3 = (
    # Arguments may be an object, as transformers documents, where the original takes only a string.
    Edit(_ARGUMENTS, f"({_ARGUMENTS} if {_ARGUMENTS} is string else {_ARGUMENTS} | tojson)", (1, 2, 3)),
    _after("'tool_calls' in message %}{%- set ns.is_tool = false -%}", _BEGIN),
    _after(_DEEPSEEK_CALLS_END, _END),
    _after("'tool_calls' not in message %}", _BEGIN),
    _after(_DEEPSEEK_ANSWER, _END),
)
_DEEPSEEK_R1 = (
    # The original drops the reasoning from the answer, which would then not be learned.
    Edit("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}", ""),
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
    Edit(
        "{{- ('<|eot|>' if end_turn else '<|eom|>') -}}\n        {%- endif -%}",
        "{{- ('<|eot|>' if end_turn else '<|eom|>') -}}\n        {%- endif -%}{%- endgeneration -%}",
    ),
)
_AFTER_ASSISTANT = "loop.first or messages[loop.index0 - 1].role != 'assistant'"
_GLM_4 = (
    # The model ends its turn with the role of the next one, so that role is learned, and rendered in this turn.
    Edit(
        "{%- if m.role == 'user' -%}<|user|>\n{{ visible_text(m.content) }}",
        f"{{%- if m.role == 'user' -%}}{{%- if {_AFTER_ASSISTANT} -%}}<|user|>{{%- endif -%}}"
        "{{ '\\n' + visible_text(m.content) }}",
    ),
    Edit(
        "{%- elif m.role == 'system' -%}\n<|system|>\n{{ visible_text(m.content) }}",
        f"{{%- elif m.role == 'system' -%}}{{%- if {_AFTER_ASSISTANT} -%}}<|system|>{{%- endif -%}}"
        "{{ '\\n' + visible_text(m.content) }}",
    ),
    Edit(
        "{%- if loop.first or (messages[loop.index0 - 1].role != \"tool\") %}\n    {{- '<|observation|>' }}\n"
        "{%- endif %}\n",
        "",
    ),
    Edit(
        "<|observation|>{% for tr in m.content %}",
        f"{{{{- '<|observation|>' if {_AFTER_ASSISTANT} }}}}{{% for tr in m.content %}}",
    ),
    _before("{%- if loop.index0 > ns.last_user_index and reasoning_content -%}", "{% generation %}\n"),
    Edit(
        "</tool_call>{% endfor %}\n{% endif %}\n",
        "</tool_call>{% endfor %}<|observation|>{%- else -%}{{- '<|system|>' if not loop.last and "
        "messages[loop.index0 + 1].role == 'system' else '<|user|>' }}{%- endif %}\n{% endgeneration %}\n",
    ),
)
FAMILIES: dict[str, tuple[Edit, ...]] = {
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
    """A chat template that marks what the assistant writes."""

    template: str
    family: str | None
    """Key of `FAMILIES`; None if the tokenizer's own template has the marks."""


def marking_template(tokenizer: Any, tools: Any = None) -> Marking | None:
    """Returns the template by which transformers masks the assistant's tokens.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tools: the tools of a chat, for which a tokenizer may have a template of its own.

    Returns:
        The template; None if the tokenizer's marks nothing and is of no known family.
    """
    own: str = tokenizer.get_chat_template(None, tools)
    if _GENERATION.search(own):
        return Marking(own, None)
    edited = ((_edited(own, edits), family) for family, edits in FAMILIES.items())
    return next((Marking(template, family) for template, family in edited if template is not None), None)


def _edited(template: str, edits: tuple[Edit, ...]) -> str | None:
    if any(template.count(edit.piece) not in edit.counts for edit in edits):
        return None
    for edit in edits:
        template = template.replace(edit.piece, edit.replacement)
    return template
