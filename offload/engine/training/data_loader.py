"""The loader of `training_data`: micro-batches in an order that the seed gives, each rank its rows, on the device.

The order of a pass over the data is a function of the seed and of the pass's number. So a position is two numbers, and
a resumed run goes on behind the last batch that was trained without loading those before it.

    a new run        each `iter` begins the next pass, as with any DataLoader
    a resumed run    until its first step, each `iter` goes on with the pass that was under way: one that looks at a
                     batch and is left changes nothing
    a load           as a resumed run; an iteration that is under way goes on from the checkpoint's position too
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from offload.engine.training.model_inputs import to_device
from offload.engine.training.snapshot import read_generators, write_generators
from offload.errors import ConfigError


def load(
    data: Dataset[Any],
    micro: int,
    rank: int,
    world_size: int,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    device: torch.device,
    drop_last: bool,
) -> Loader:
    """Micro-batches of `micro` samples of `data`, shuffled by the seed; `drop_last` leaves an incomplete one out.

    Raises `ConfigError` where there are none.
    """
    assert isinstance(data, Sized), "see check_data"
    batches = RankBatches(len(data), micro, rank, world_size, seed, drop_last)
    if not len(batches):
        advice = "; give more of them, smaller batches, or leave dataloader_drop_last out" if batches.length else ""
        raise ConfigError(
            f"the loader expects at least {batches.samples if batches.length else 1} samples for a batch of all ranks, "
            f"the data have {batches.length}{advice}"
        )
    return Loader(data, batches, collate_fn, device)


def check_data(data: Any, collate_fn: Any) -> None:
    """Raise `ConfigError` where `data`, unless None, cannot be shuffled, or `collate_fn` makes no batch."""
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(
            f"collate_fn= expects a function that makes a batch of a list of samples, got {type(collate_fn).__name__}; "
            f"leave it out for torch's"
        )
    if data is None:
        return
    if isinstance(data, DataLoader | Mapping | str | bytes):
        raise ConfigError(
            f"training_data= expects a data set, samples by their number, got {type(data).__name__}; give "
            f"DataLoader.dataset, or one split of a dict of data sets, and train_micro_batch_size_per_gpu makes the "
            f"batches; or loop over a DataLoader of your own and leave training_data out"
        )
    if not isinstance(data, Sized):
        raise ConfigError(
            f"training_data is a {type(data).__name__}, which has no length and cannot be shuffled; make a DataLoader "
            f"of it yourself and leave training_data out"
        )


class Position(NamedTuple):
    """So many whole passes, and so many batches of the next."""

    epoch: int
    batch: int


class Loader(DataLoader[Any]):
    """A DataLoader that moves each batch to the device and knows where it is."""

    def __init__(
        self,
        data: Dataset[Any],
        batches: RankBatches,
        collate_fn: Callable[[list[Any]], Any] | None,
        device: torch.device,
    ) -> None:
        self._draws = torch.Generator()  # else making an iterator would draw from torch's
        super().__init__(data, batch_sampler=batches, generator=self._draws, collate_fn=collate_fn)
        self._device, self._batches = device, batches
        self._next, self._handed_out = Position(0, 0), Position(0, 0)
        self._resuming = False
        """Whether this run was resumed, or loaded a checkpoint, and has made no step since."""
        self._loads = 0
        """How often `go_on` was called, so that an iteration notices it."""
        self.restored = False
        """Whether the generators are back that `go_on` was given, since a batch was loaded."""
        self.before_next: Mapping[str, torch.Tensor] | None = None
        """The generators as they were before the first batch since the last step was loaded; None if none was yet."""

    @property
    def epoch(self) -> int:
        """The number of the pass that the next `iter` gives, or the rest of it on a resumed run; from 0."""
        return self._next.epoch

    def __iter__(self) -> Any:
        return self._moved(*self._begin(), self._loads)

    def _begin(self) -> tuple[Iterator[Any], Position]:
        """The batches of the next pass or of its rest, and where that is."""
        at = self._next
        if not self._resuming:
            self._next = Position(at.epoch + 1, 0)
        self._batches.begin_at = at
        self._draws.manual_seed(_seed_of(self._batches.seed, at.epoch, "workers"))
        return super().__iter__(), at

    def _moved(self, batches: Iterator[Any], at: Position, loads: int) -> Iterator[Any]:
        begins = True
        while True:
            if loads != self._loads:
                loads, begins = self._loads, True
                batches, at = self._begin()
            if begins and self._resuming and self.before_next is not None:
                write_generators(self.before_next, self._device)  # a data set or a collate_fn may draw, as maskings do
                self.restored = True
            begins = False
            noted = self.before_next is None
            if noted:
                self.before_next = read_generators(self._device)
            try:
                batch = next(batches)
            except StopIteration:
                if noted:
                    self.before_next = None
                return
            at = self._handed_out = Position(at.epoch, at.batch + 1)
            yield to_device(batch, self._device)

    def trained(self) -> dict[str, int]:
        """A step ended, so all batches so far count: where that is, as JSON."""
        self.before_next = None
        if self._resuming and self._handed_out != self._next:
            self._next = Position(self._handed_out.epoch + 1, 0)
        self._resuming = False
        return self.where()

    def where(self) -> dict[str, int]:
        """The last batch handed out, and what its place depends on, as JSON."""
        batches = self._batches
        return {
            "epoch": self._handed_out.epoch,
            "batch": self._handed_out.batch,
            "samples": batches.length,
            "samples_of_a_batch": batches.samples,
            "drop_last": batches.drop_last,
            "seed": batches.seed,
        }

    def go_on(self, where: Mapping[str, int], generators: Mapping[str, torch.Tensor] | None) -> str | None:
        """Begin behind `where`, what `trained` returned in the run; a notice where the order is another one now.

        `generators` are those before the next batch was loaded; None before the first step, as in a new run.
        """
        epoch, batch, mine = where["epoch"], where["batch"], self.where()
        dropped = bool(where.get("drop_last", True))  # older versions always did
        its_length = batches_of(where["samples"], where["samples_of_a_batch"], dropped)
        notice = None
        if batch and any(where[key] != mine[key] for key in ("samples", "seed")):
            notice = (
                f"training_data has another order than in the run ({where['samples']} samples with seed "
                f"{where['seed']}, now {mine['samples']} with {mine['seed']}): pass {epoch} was at sample "
                f"{batch * where['samples_of_a_batch']} and is not gone on with, pass {epoch + 1} begins"
            )
            epoch, batch = epoch + 1, 0
        elif batch and batch >= its_length:
            epoch, batch = epoch + 1, 0
        elif batch and where["samples_of_a_batch"] != mine["samples_of_a_batch"]:
            seen, size = batch * where["samples_of_a_batch"], mine["samples_of_a_batch"]
            batch = seen // size  # rather some samples twice than some never
            notice = (
                f"training_data: {size} samples of all ranks are a batch, {where['samples_of_a_batch']} in the run; "
                f"pass {epoch} had seen {seen} and goes on at {batch * size}"
            )
        same = all(where[key] == mine[key] for key in ("samples", "samples_of_a_batch"))
        if same and its_length != len(self) and notice is None:
            notice = (
                f"training_data: a pass has {len(self)} batches, {its_length} in the run: the last incomplete one is "
                f"{'left out' if mine['drop_last'] else 'trained too'} (dataloader_drop_last)"
            )
        if batch >= len(self):
            epoch, batch = epoch + 1, 0
        self._next = self._handed_out = Position(epoch, batch)
        self.before_next, self._resuming, self.restored = generators, generators is not None, False
        self._loads += 1
        return notice


class RankBatches(Sampler[list[int]]):
    """One rank's micro-batches: all ranks shuffle alike, and each takes its rows of every batch of all.

    The last incomplete batch is left out by `drop_last`. Else all ranks have as many of its samples: those that are
    missing are the first of the pass once more, so that the mean over ranks is the mean over samples. `begin_at` says
    which pass the next `iter` gives, and from which batch on.
    """

    def __init__(self, length: int, micro: int, rank: int, world_size: int, seed: int, drop_last: bool) -> None:
        self.length, self.seed, self.drop_last = length, seed, drop_last
        self.samples = micro * world_size
        """Of a batch of all ranks."""
        self.begin_at = Position(0, 0)
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        return self._rows(self.begin_at)  # decided now, not when the first batch is asked for

    def _rows(self, at: Position) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(_seed_of(self.seed, at.epoch, "order"))
        order = torch.randperm(self.length, generator=generator).tolist()
        for batch in range(at.batch, len(self)):
            rows = order[batch * self.samples : (batch + 1) * self.samples]
            rows += list(itertools.islice(itertools.cycle(order), -len(rows) % self._world_size))
            mine = len(rows) // self._world_size
            yield rows[mine * self._rank : mine * (self._rank + 1)]

    def __len__(self) -> int:
        return batches_of(self.length, self.samples, self.drop_last)


def batches_of(length: int, samples: int, drop_last: bool) -> int:
    """How many batches of `samples` a pass over `length` samples has."""
    return length // samples if drop_last else math.ceil(length / samples)


def _seed_of(seed: int, epoch: int, what: str) -> int:
    """Another for each seed, pass and purpose, so that no run has the passes of another in a later order."""
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {what}".encode()).digest()[:8], "little")
