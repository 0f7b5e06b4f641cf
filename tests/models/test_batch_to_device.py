"""A batch of any structure reaches the model with its tensors on the device, and keeps its type."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from offload.engine.data import other_dtype, to_device

META, BF16 = torch.device("meta"), torch.bfloat16


class Named(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Rows:
    x: torch.Tensor
    inner: dict[str, torch.Tensor]
    length: int = 3


def x() -> torch.Tensor:
    return torch.ones(2, 3)


class Frozen(collections.abc.Mapping[str, Any]):
    """A mapping whose items cannot be set."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Settable(Frozen, collections.abc.MutableMapping[str, Any]):
    """A mapping whose copies share their items, since it says nothing of copies."""

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]


class Slots(collections.abc.MutableMapping[str, Any]):
    """The same without a dict of attributes."""

    __slots__ = "_items"

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    __getitem__ = Settable.__getitem__
    __iter__ = Settable.__iter__
    __len__ = Settable.__len__
    __setitem__ = Settable.__setitem__
    __delitem__ = Settable.__delitem__


BATCHES: dict[str, Any] = {
    "a mapping that copies share": lambda: Settable({"x": x(), "inner": Settable({"y": x(), "name": "a"})}),
    "a mapping of slots": lambda: Slots({"x": x(), "name": "a"}),
    "a frozen mapping": lambda: Frozen({"x": x(), "inner": Frozen({"y": x(), "name": "a"})}),
    "a proxy of a mapping": lambda: types.MappingProxyType({"x": x(), "name": "a"}),
    "a dict in a list": lambda: [{"x": x()}],
    "a named tuple": lambda: Named(x(), "a"),
    "a BatchEncoding": lambda: BatchEncoding({"x": x(), "ids": torch.ones(2, dtype=torch.int64)}),
    "a mapping of one's own": lambda: collections.UserDict({"x": x(), "name": "a"}),
    "a dataclass": lambda: Rows(x(), {"y": x()}),
    "an output of transformers": lambda: BaseModelOutput(last_hidden_state=x()),
    "a dataclass in a mapping": lambda: {"rows": Rows(x(), {})},
}


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, collections.abc.Mapping):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, collections.abc.Mapping):
        batch = list(batch.values())
    return [tensor for inner in batch for tensor in tensors(inner)] if isinstance(batch, list | tuple) else []


def test_tensors_go_and_the_rest_stays() -> None:
    for name in BATCHES:
        print(name)
        given = BATCHES[name]()
        moved = to_device(given, META, BF16)
        assert type(moved) is type(given)
        leaves = tensors(moved)
        assert leaves and len(leaves) == len(tensors(given)) and all(each.is_meta for each in leaves)
        assert {each.dtype for each in leaves} <= {BF16, torch.int64}
        assert not any(tensor.is_meta for tensor in tensors(given)), "the given one is left alone"
        assert other_dtype(given, BF16) is torch.float32 and other_dtype(moved, BF16) is None


def test_a_packed_sequence() -> None:
    given = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    moved = to_device({"x": given}, META, BF16)["x"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta and moved.data.dtype is BF16
    assert torch.equal(moved.batch_sizes, given.batch_sizes) and moved.sorted_indices.is_meta
