"""A block: its fields, and the keys beside them that it knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


def words_of(words: str) -> tuple[str, ...]:
    """Names of keys, in a readable form."""
    return tuple(words.split())


CHANGES_TRAINING = "would change what is learned and is not supported; remove it, or switch it off"


def missing(what: str, instead: str = "remove it, or switch it off") -> str:
    """Say what a key asks for that is not here, and what to do."""
    return f"{what}, which is not supported; {instead}"


class Block(BaseModel):
    """A block of the config; beside its fields it knows keys without effect and keys that it must refuse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    TUNING: ClassVar[tuple[str, ...]] = ()
    """Accepted: they tune what is decided here without them."""
    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()
    """Accepted: what they switch on is missing here, and the bits are the same without it."""
    REFUSED: ClassVar[dict[str, str]] = {}
    """Refused unless switched off, with what to say."""
    OLD_NAMES: ClassVar[dict[str, str]] = {}
    INSTEAD: ClassVar[Mapping[str, Any]] = {}
    """What to write where a value came in place of the block: the first key is that of the value."""
    OWN_AUTO: ClassVar[tuple[str, ...]] = ()
    """Fields in which "auto" is a value; in all others it means the default."""

    @classmethod
    def check(cls, content: Mapping[str, Any], path: str) -> None:
        """Raise `ConfigError` where the block as a whole asks for what is not here, before its keys are looked at."""


def inner_block(model: type[Block], name: str) -> type[Block] | None:
    """The block that the field is, if it is one."""
    annotation = model.model_fields[name].annotation
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Block)), None)


def all_blocks(model: type[Block], path: str) -> Iterator[tuple[str, type[Block]]]:
    """The block and all blocks in it, with their dotted names."""
    yield path, model
    for name in model.model_fields:
        if inner := inner_block(model, name):
            yield from all_blocks(inner, f"{path}.{name}" if path else name)
