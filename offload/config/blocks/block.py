"""The base class of all config blocks: fields, and the other keys that a block recognizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


def split_names(words: str) -> tuple[str, ...]:
    """Returns the words of a string, one key name each."""
    return tuple(words.split())


CHANGES_TRAINING = "changes the training and is not supported; remove it, or switch it off"


def missing(request: str, instead: str = "remove it, or switch it off") -> str:
    """Returns the reason for refusing a key: what the key asks for, and what to do instead."""
    return f"{request}, which is not supported; {instead}"


class Block(BaseModel):
    """A block of the config. Beside its fields, a block recognizes keys without effect and keys that it must refuse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    TUNING: ClassVar[tuple[str, ...]] = ()
    """Keys accepted without effect: they tune something that this library decides by itself."""
    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()
    """Keys accepted without effect: the feature is missing, and the results have the same bits without it."""
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {}
    """For keys of `TUNING` and `UNSUPPORTED` the reason, as a clause for the reference, where users ask for it."""
    REFUSED: ClassVar[dict[str, str]] = {}
    """Keys refused unless switched off, each with the part of the error message that follows the key."""
    OLD_NAMES: ClassVar[dict[str, str]] = {}
    """Older names of keys, with the names of the fields."""
    SUGGESTION: ClassVar[Mapping[str, Any]] = {}
    """Content to suggest if a plain value was given in place of the block; the value replaces that of the first key."""
    OWN_AUTO: ClassVar[tuple[str, ...]] = ()
    """Fields that accept "auto" as a value; in all others "auto" means the default."""

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Returns the keys of a file that have an effect."""
        return tuple(name for name, field in cls.model_fields.items() if not field.exclude)

    @classmethod
    def arranged(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the content of the block with the keys that stand for others replaced."""
        return content

    @classmethod
    def check(cls, content: Mapping[str, Any], path: str) -> None:
        """Raises `ConfigError` if the block asks for something unsupported. Single keys are checked later."""


def inner_block(model: type[Block], name: str) -> type[Block] | None:
    """Returns the block class of the field `name`, or None if the field is no block."""
    annotation = model.model_fields[name].annotation
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Block)), None)


def all_blocks(model: type[Block], path: str) -> Iterator[tuple[str, type[Block]]]:
    """Yields the block and all blocks inside, each with its dotted name."""
    yield path, model
    for name in model.model_fields:
        if inner := inner_block(model, name):
            yield from all_blocks(inner, f"{path}.{name}" if path else name)
