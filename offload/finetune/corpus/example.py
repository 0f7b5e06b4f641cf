"""An example of the training data as text, with the learned tokens marked."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

_LONGEST = 240
"""Characters of a part up to which it is shown whole. Of a longer one a half of that from its begin, a quarter from its
end."""
_MOST = 24
"""Parts that are shown."""


class Part(NamedTuple):
    """Text of neighbouring tokens, which are all learned or all not."""

    text: str
    learned: bool


class Example(str):
    """A line of the start that shows what is learned: the text between [[ and ]]. `parts` are for a terminal."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, ids: Sequence[int], learned: Sequence[bool], tokenizer: Any) -> Example:
        """Returns the example of a document.

        Args:
            ids: tokens of the document.
            learned: for each token whether it is learned.
            tokenizer: a transformers tokenizer; None for bytes.
        """
        parts = parts_of(ids, learned, tokenizer)
        example = cls("".join(f"[[{part.text}]]" if part.learned else part.text for part in parts))
        example.parts = parts
        return example


def parts_of(ids: Sequence[int], learned: Sequence[bool], tokenizer: Any) -> tuple[Part, ...]:
    """Returns the text of a document in parts, shortened, and with nothing in it that a terminal would obey.

    Args:
        ids: tokens of the document.
        learned: for each token whether it is learned.
        tokenizer: a transformers tokenizer; None for bytes.
    """
    runs = [
        (flag, [token for token, _ in tokens])
        for flag, tokens in itertools.groupby(zip(ids, learned, strict=True), key=lambda each: bool(each[1]))
    ]
    parts = [Part(_shortened(visible_text(_text(tokens, tokenizer))), flag) for flag, tokens in runs[:_MOST]]
    return tuple(parts) if len(runs) <= _MOST else (*parts, Part(" [...]", False))


def visible_text(text: str) -> str:
    """Returns text in which characters that control a terminal, or the direction of text, are written as escapes.

    A line break stays, and is followed by two spaces, so that no line of the data looks like a line of the program.
    """
    return "".join(
        "\n  " if each == "\n" else ascii(each)[1:-1] if unicodedata.category(each)[0] in "CZ" and each != " " else each
        for each in text
    )


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
