"""Loaders, ours and such with a state, go on with the next batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import offload
from offload.engine.data import Loader, Position, RankBatches, check_data, load
from offload.engine.snapshot import read_generators
from offload.engine.state import RegisteredObjects
from offload.errors import ConfigError, UsageError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("length", "micro", "size"), [(103, 4, 2), (64, 2, 3), (7, 4, 2)])
@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_of_all_ranks_are_those_of_one(length: int, micro: int, size: int, drop_last: bool) -> None:
    ranks = [RankBatches(length, micro, rank, size, 3, drop_last) for rank in range(size)]
    single = RankBatches(length, 1, 0, 1, 3, drop_last)
    for epoch in range(2):
        for batches in (*ranks, single):
            batches.begin_at = Position(epoch, 0)
        order = [row for rows in single for row in rows]
        assert sorted(order) == list(range(length))
        together = [[row for each in rows for row in each] for rows in zip(*ranks, strict=True)]
        expected = [order[i : i + micro * size] for i in range(0, len(order), micro * size)]
        if drop_last:
            expected = expected[: length // (micro * size)]
        else:
            expected[-1] += order[: -length % size]
        assert together == expected and {len(rank) for rank in ranks} == {len(expected)}


def test_batches_come_on_the_device() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = load(data, 2, 0, 1, 0, None, torch.device("meta"), drop_last=False)
    batches = list(loader)
    assert isinstance(loader, DataLoader) and len(loader) == len(batches) == 5
    assert all(tensor.is_meta and tensor.shape == (2,) for batch in batches for tensor in batch)


ROWS = TensorDataset(torch.arange(30))


def rank_loader(rank: int, seed: int = 2) -> Loader:
    """Five batches of three samples on each of two ranks."""
    return load(ROWS, 3, rank, 2, seed, None, torch.device("cpu"), drop_last=False)


def rows_of(loader: Loader) -> list[list[int]]:
    return [rows.tolist() for (rows,) in loader]


def test_a_pass_depends_on_its_number_alone() -> None:
    """Not on how far others went, nor on iterators that are under way."""
    loader, other_loader = rank_loader(0), rank_loader(0)
    passes = [rows_of(loader) for _ in range(3)]
    left = iter(other_loader)
    next(left)
    second = iter(other_loader)
    assert [rows.tolist() for (rows,) in left] == passes[0][1:]
    assert [rows.tolist() for (rows,) in second] == passes[1] and rows_of(other_loader) == passes[2]
    assert rows_of(rank_loader(0, seed=3)) not in passes


@pytest.mark.parametrize("trained", [1, 4, 5, 6, 10, 11])
def test_every_rank_goes_on_behind_its_last_batch(trained: int) -> None:
    states = {"torch": torch.get_rng_state(), "python": read_generators(torch.device("cpu"))["python"]}
    for rank in range(2):
        single = rank_loader(rank)
        expected = [rows_of(single) for _ in range(4)]
        loader, where = rank_loader(rank), {}
        batches = (rows for _ in range(3) for rows in loader)
        for _ in range(trained):
            next(batches)
            where = loader.trained()
        next(batches)  # fetched, and not trained
        resumed = rank_loader(rank)
        assert resumed.go_on(json.loads(json.dumps(where)), states) is None
        assert (resumed.epoch, len(resumed)) == (trained // 5, 5)
        assert rows_of(resumed) == rows_of(resumed) == expected[trained // 5][trained % 5 :], "until the first step"
        resumed.trained()
        assert rows_of(resumed) == expected[trained // 5 + 1]
        fresh = rank_loader(rank)
        [rows_of(fresh) for _ in range(trained // 5 + 2)]
        assert torch.equal(resumed.generator.get_state(), fresh.generator.get_state()), "which seeds workers"


def test_generators_are_noted_before_the_next_batch_is_loaded() -> None:
    """Not at the end of a pass, after which an evaluation may draw before there is a next one."""
    torch.manual_seed(0)
    loader = rank_loader(0)
    for _ in loader:
        loader.trained()
        assert loader.before_next is None
    assert loader.before_next is None
    torch.rand(1)
    expected = torch.get_rng_state()
    batches = iter(loader)
    next(batches)
    torch.rand(1)
    next(batches)
    assert torch.equal(loader.before_next["torch"], expected)


class Stream(IterableDataset[int]):
    """Data without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_data_without_a_length_is_an_error() -> None:
    with pytest.raises(ConfigError, match="training_data is a Stream, which has no length"):
        check_data(Stream(), None)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4] * 8 + [1]), (True, [4] * 8)])
def test_the_last_incomplete_batch_is_trained_unless_it_is_dropped(drop_last: bool, sizes: list[int]) -> None:
    loader = load(TensorDataset(torch.arange(33)), 4, 0, 1, 0, None, torch.device("cpu"), drop_last)
    assert len(loader) == len(sizes) and [len(rows) for rows in rows_of(loader)] == sizes


@pytest.mark.parametrize(("length", "drop_last"), [(0, False), (0, True), (7, True)])
def test_data_of_no_batch_are_an_error(length: int, drop_last: bool) -> None:
    words = "contains no samples" if not length else "contains 7 samples, and a batch takes 8.*gpu is 4 on 2 ranks"
    with pytest.raises(ConfigError, match=rf"training_data= {words}"):
        load(TensorDataset(torch.arange(length)), 4, 0, 2, 0, None, torch.device("cpu"), drop_last)


class Rows(Dataset[Any]):
    """Samples of the given fields, row by row."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


def test_samples_that_make_no_batch_are_an_error_with_the_way_out() -> None:
    texts = Rows(*({"input_ids": torch.arange(length)} for length in (3, 5)))
    with pytest.raises(UsageError, match=r"samples of training_data: stack expects .*DataCollatorWithPadding"):
        next(iter(load(texts, 2, 0, 1, 0, None, CPU, False)))
    padded = load(texts, 2, 0, 1, 0, lambda rows: torch.tensor([len(row["input_ids"]) for row in rows]), CPU, False)
    assert sorted(next(iter(padded)).tolist()) == [3, 5], "one's own collate_fn may know how"


def test_lists_of_numbers_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """torch takes the positions of a list apart, so a model receives a list of tensors."""
    rows = [{"input_ids": [1, 2, 3], "labels": torch.tensor(1), "name": "one"}] * 4
    loader = load(Rows(*rows), 2, 0, 1, 0, None, CPU, False)
    assert [len(batch["input_ids"]) for batch in loader] == [3, 3]
    (told,) = [each.getMessage() for each in caplog.records]
    assert "training_data: 'input_ids' of a sample is a list of numbers" in told and "default_data_collator" in told
    list(load(Rows(*({**row, "input_ids": torch.arange(3)} for row in rows)), 2, 0, 1, 0, None, CPU, False))
    assert len(caplog.records) == 1, "tensors are what it expects"


@pytest.mark.parametrize(
    ("trained", "then", "now", "place"),
    [(3, True, False, (0, 3)), (8, True, False, (1, 0)), (3, False, True, (0, 3)), (8, False, True, (1, 0))],
)
def test_a_resume_that_trains_rows_dropped_before_is_reported(
    trained: int, then: bool, now: bool, place: tuple[int, int]
) -> None:
    """Its pass is over where it was over in the run, which kept no `drop_last` in older versions."""
    data = TensorDataset(torch.arange(33))
    loader, resumed = (load(data, 4, 0, 1, 0, None, torch.device("cpu"), drop) for drop in (then, now))
    batches = iter(loader)
    for _ in range(trained):
        next(batches)
    where = loader.trained()
    if then:
        del where["drop_last"]
    notice = resumed.go_on(where, None)
    assert (resumed.where()["epoch"], resumed.where()["batch"]) == place
    assert notice is not None and f"contains {len(resumed)} batches, {len(loader)} in the resumed run" in notice


STEPS = 11
LOADER_ROWS = TensorDataset(torch.arange(64.0).view(32, 2) / 64)


class Shuffled:
    """A loader with a state, of which a tensor is a part; it draws each pass by its own generator."""

    def __init__(self, size: int) -> None:
        self.size, self.given, self.generator = size, 0, torch.Generator().manual_seed(5)
        self.before = self.generator.get_state()

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        self.before = self.generator.get_state()
        batches = torch.randperm(len(LOADER_ROWS), generator=self.generator).split(self.size)
        while self.given < len(batches):
            self.given += 1
            yield list(LOADER_ROWS[batches[self.given - 1]])
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.generator.set_state(state["generator"])


def stateful(workers: int) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    # A generator that the loader does not share: it draws a seed for each iterator that it makes, so one more where a
    # run resumes at the end of a pass.
    order = module.sampler.RandomSampler(LOADER_ROWS, generator=torch.Generator().manual_seed(5))
    return module.StatefulDataLoader(LOADER_ROWS, 4, sampler=order, num_workers=workers)


LOADERS = {"own": lambda: Shuffled(4), "torchdata": lambda: stateful(0), "torchdata, workers": lambda: stateful(2)}


def train(folder: Path, loader: Any, until: int) -> list[float]:
    """Trains until a batch has been drawn for step `until`, which is not made."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(folder), "device": "cpu", "resume": "auto"},
    }
    torch.manual_seed(0)
    engine = offload.initialize(model=nn.Linear(2, 1), config=config).engine
    engine.register_for_checkpointing(loader)
    losses: list[float] = []
    while True:
        for (rows,) in loader:
            if engine.global_steps == until:
                engine.destroy()
                return losses
            loss = engine(rows).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))


@pytest.mark.works("Recovery", "a registered loader that has a state, torchdata's StatefulDataLoader too", "right")
@pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata 0.11 calls what torch 2.13 deprecates
@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_loop_goes_on_behind_the_last_batch_that_was_trained(name: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", LOADERS[name](), STEPS)
    parts = [train(tmp_path / "parts", LOADERS[name](), until) for until in (3, 8, 10, STEPS)]
    assert [loss for part in parts for loss in part] == whole


def test_a_tensor_that_is_large_is_refused_when_it_is_registered() -> None:
    class Large(Shuffled):
        def state_dict(self) -> dict[str, Any]:
            return {"rows": torch.zeros(20_000)}

    with pytest.raises(UsageError, match=r"\['rows'\] is a torch.Tensor; .* at most 64 KiB"):
        RegisteredObjects().add([Large(4)])
