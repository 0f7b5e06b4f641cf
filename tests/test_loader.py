"""The loader of `training_data`: every rank its rows of the same batches, moved to the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from offload.engine.loader import RankBatches, check_length, load
from offload.errors import ConfigError


@pytest.mark.parametrize(("length", "micro", "size"), [(103, 4, 2), (64, 2, 3), (7, 4, 2)])
def test_batches_of_all_ranks_are_those_of_one(length: int, micro: int, size: int) -> None:
    ranks = [RankBatches(length, micro, rank, size, seed=3) for rank in range(size)]
    for epoch in range(2):
        alone = torch.Generator().manual_seed(3)
        order = [torch.randperm(length, generator=alone).tolist() for _ in range(epoch + 1)][-1]
        together = [[row for each in rows for row in each] for rows in zip(*ranks, strict=True)]
        assert together == [order[i : i + micro * size] for i in range(0, len(order), micro * size)][: len(ranks[0])]
        assert len(together) == len(ranks[0]) == length // (micro * size)


def test_batches_come_on_the_device() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = load(data, 2, 0, 1, 0, None, torch.device("meta"))
    batches = list(loader)
    assert isinstance(loader, DataLoader) and len(loader) == len(batches) == 5
    assert all(tensor.is_meta and tensor.shape == (2,) for batch in batches for tensor in batch)


def test_each_epoch_has_another_order_and_torch_draws_nothing() -> None:
    loader = load(TensorDataset(torch.arange(64)), 8, 0, 1, 5, None, torch.device("cpu"))
    state = torch.get_rng_state()
    first, second = (torch.cat([rows for (rows,) in loader]).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(64)) and first != second
    assert torch.equal(state, torch.get_rng_state())


class Stream(IterableDataset[int]):
    """Data without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_data_without_a_length_is_an_error() -> None:
    with pytest.raises(ConfigError, match="training_data is a Stream, which has no length"):
        check_length(Stream())
