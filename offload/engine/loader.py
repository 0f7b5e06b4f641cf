"""The loader of `training_data`: micro-batches in an order that the seed gives, each rank its rows, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler

from offload.errors import ConfigError


def load(
    data: Dataset[Any],
    micro: int,
    rank: int,
    world_size: int,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    device: torch.device,
) -> DataLoader[Any]:
    """Micro-batches of `micro` samples of `data`, shuffled by the seed."""
    assert isinstance(data, Sized), "see check_length"
    generator = torch.Generator().manual_seed(seed)  # of the loader's workers; else it would draw from torch's own
    sampler = RankBatches(len(data), micro, rank, world_size, seed)
    return _DeviceLoader(device, data, batch_sampler=sampler, generator=generator, collate_fn=collate_fn)


def check_length(data: Any) -> None:
    """Raise `ConfigError` where `data` cannot be shuffled."""
    if not isinstance(data, Sized):
        raise ConfigError(
            f"training_data is a {type(data).__name__}, which has no length and cannot be shuffled; make a DataLoader "
            f"of it yourself and leave training_data out"
        )


class _DeviceLoader(DataLoader[Any]):
    """Moves each batch to the device."""

    def __init__(self, device: torch.device, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device = device

    def __iter__(self) -> Any:
        return self._moved(super().__iter__())

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield to_device(batch, self._device)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on `device`."""

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    return tree_map(move, batch)


class RankBatches(Sampler[list[int]]):
    """One rank's micro-batches: all ranks shuffle alike, and each takes its rows of every batch of all.

    The last incomplete batch is left out.
    """

    def __init__(self, length: int, micro: int, rank: int, world_size: int, seed: int) -> None:
        self._length, self._micro, self._rank, self._size = length, micro, rank, world_size
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._length, generator=self._generator).tolist()
        for batch in range(len(self)):
            start = (batch * self._size + self._rank) * self._micro
            yield order[start : start + self._micro]

    def __len__(self) -> int:
        return self._length // (self._micro * self._size)
