"""Chats as tokens, with a mask of those that the assistant wrote: the only ones that are learned by default.

    template with {% generation %} ──────────────────────────────► transformers' mask
    template of a known family     ──► edited so that it marks ──► transformers' mask
    any other                      ──► prefix differences      ──► spans of characters ──► tokens

A prefix difference is what the assistant's message adds to the prompt that the model would have continued. It exists
where the prompt is a prefix of the chat, which is checked for each message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from offload.errors import ConfigError
from offload.finetune.corpus.documents import Chat
from offload.finetune.corpus.training_templates import marking_template

_REASONING = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
"""What some templates put at the end of a prompt, and what is the begin of the assistant's answer."""
_CURE = (
    "give a template with {% generation %}, write a chat for each answer that ends with it, or give --train-on all to "
    "offload train"
)


def encode_chat(chat: Chat, tokenizer: Any, whole: bool = False) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a chat, and for each whether it is learned.

    Args:
        chat: the chat.
        tokenizer: a transformers tokenizer; None for bytes, which have no chat template.
        whole: True to learn every token, False to learn what the assistant wrote.

    Raises:
        ConfigError: There is no chat template, it refuses the chat, or nothing tells the assistant's tokens apart.
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
        return marked["input_ids"], [bool(each) for each in marked["assistant_masks"]]
    text = _apply(chat, tokenizer, chat.messages, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begins, ends = np.asarray(encoded["offset_mapping"]).reshape(-1, 2).T
    learned = np.zeros(len(begins), bool)
    for start, stop in _assistant_spans(chat, tokenizer, text):
        learned |= (begins < stop) & (start < ends)
    return encoded["input_ids"], learned.tolist()


def learned_words(tokenizer: Any, whole: bool = False) -> str:
    """Returns a line that says which words of chats are learned, and what tells them apart."""
    if whole:
        return "chats: the words of all roles are learned, as --train-on all asks"
    marking = None
    with contextlib.suppress(ValueError):  # templates with names may have none for chats without tools
        marking = marking_template(tokenizer)
    by = "by what the assistant's message adds to its prompt"
    if marking is not None:
        by = f"by a training template of {marking.family}" if marking.family else "as the chat template marks them"
    return f"chats: the assistant's words are learned, {by}"


def encode_chat_prompt(chat: Chat, tokenizer: Any) -> list[int]:
    """Returns the tokens of a chat and of what opens the assistant's next turn.

    Raises:
        ConfigError: There is no chat template, or it refuses the chat.
    """
    _check_template(chat, tokenizer)
    found = _apply(chat, tokenizer, chat.messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    ids: list[int] = found["input_ids"]
    return ids


def _check_template(chat: Chat, tokenizer: Any) -> None:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"{chat.place} is a chat, and the model's tokenizer has no chat template; give a folder of a model "
            f'with one (chat_template.jinja), or write the file as {{"prompt": …, "completion": …}}'
        )


def _apply(chat: Chat, tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> Any:
    """Returns what the tokenizer's chat template makes of messages of a chat."""
    try:
        return tokenizer.apply_chat_template(messages, tools=chat.tools, **how)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"{chat.place}: the tokenizer's chat template refuses this chat: {error}") from error


def _assistant_spans(chat: Chat, tokenizer: Any, text: str) -> Iterator[tuple[int, int]]:
    """Yields begin and end of what the assistant wrote, in characters of the whole chat's text."""
    for at, message in enumerate(chat.messages):
        if message["role"] != "assistant":
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
    # No template takes an empty chat. The header of a first message is that of a second one.
    prompt = _apply(chat, tokenizer, chat.messages[:1], tokenize=False, add_generation_prompt=True)
    header = _REASONING.sub("", prompt.removeprefix(through))
    return through[: through.find(header) + len(header)] if header in through else through[:0]
