"""The loader of `training_data`: micro-batches of this rank's samples, on the device, in an order given by the seed.

The order of a pass over the data is a function of the seed and the pass's number. A position is therefore two numbers,
and a resumed run continues after the last trained batch without loading the earlier ones.

    a new run        each `iter` begins the next pass, as with any DataLoader
    a resumed run    until its first step, each `iter` continues the interrupted pass, so a loop that stops after a
                     look at one batch has no effect on the order
    after a load     as in a resumed run; an iteration in progress also continues at the checkpoint's position
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from offload.engine.training.model_inputs import to_device
from offload.engine.training.snapshot import read_generators, write_generators
from offload.errors import ConfigError, UsageError
from offload.notices import announce
from offload.sizes import count_of


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
    """Returns a loader of `training_data`.

    Args:
        data: the samples; must have a length.
        micro: samples of a micro-batch of one rank.
        rank: this rank.
        world_size: number of ranks.
        seed: seed of the order.
        collate_fn: makes a batch of a list of samples; None stands for torch's.
        device: device of the batches.
        drop_last: True to leave out an incomplete last batch.

    Raises:
        ConfigError: a pass over the data has no batch.
    """
    assert isinstance(data, Sized), "see check_data"
    batches = RankBatches(len(data), micro, rank, world_size, seed, drop_last)
    if not len(batches):
        if not batches.length:
            raise ConfigError("training_data= contains no samples: give a data set that has some")
        raise ConfigError(
            f"training_data= contains {count_of(batches.length, 'sample')}, and a batch takes {batches.samples}: "
            f"train_micro_batch_size_per_gpu is {micro} on {count_of(world_size, 'rank')}. Give more samples, a "
            "smaller train_micro_batch_size_per_gpu, or leave dataloader_drop_last out, which drops an incomplete batch"
        )
    return Loader(data, batches, _DefaultCollate() if collate_fn is None else collate_fn, device)


def check_data(data: Any, collate_fn: Any) -> None:
    """Raises `ConfigError` if `data` is no data set with a length, or `collate_fn` no function; both may be None."""
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(
            "collate_fn= expects a function that makes a batch from a list of samples, got "
            f"{type(collate_fn).__name__}; leave collate_fn out to use torch's"
        )
    if data is None:
        return
    if isinstance(data, DataLoader | Mapping | str | bytes):
        raise ConfigError(
            f"training_data= expects a data set that returns samples by number, got {type(data).__name__}; give "
            "DataLoader.dataset, or one split of a dict of data sets (train_micro_batch_size_per_gpu sets the size of "
            "batches); or loop over a DataLoader of your own and leave training_data out"
        )
    if not isinstance(data, Sized):
        raise ConfigError(
            f"training_data is a {type(data).__name__}, which has no length and cannot be shuffled; make a DataLoader "
            "from the data set yourself and leave training_data out"
        )


class _DefaultCollate:
    """torch's `collate_fn`, with words for a user whose samples it does not make a batch of."""

    def __init__(self) -> None:
        self._reported = False

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch; raises `UsageError` for samples that cannot be put together."""
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise UsageError(
                f"torch's default collate_fn cannot make a batch of the samples of training_data: {error}. Give "
                "collate_fn= to the call, such as transformers.DataCollatorWithPadding(tokenizer) for texts of several "
                "lengths, or samples of tensors of one shape"
            ) from error
        if not self._reported and (names := _lists_in(samples[0])):
            self._reported = True
            lists = "is a list" if len(names) == 1 else "are lists"
            announce(
                f"training_data: {' and '.join(map(repr, names))} of a sample {lists} of numbers, and torch's default "
                'collate_fn makes one tensor for each position: give tensors, as dataset.with_format("torch") does, '
                "or collate_fn=transformers.default_data_collator"
            )
        return batch


def _lists_in(sample: Any) -> list[str]:
    """Returns the names in a sample whose values are lists of numbers."""
    if not isinstance(sample, Mapping):
        return []
    lists = {str(name): value for name, value in sample.items() if isinstance(value, list) and value}
    return [name for name, value in lists.items() if isinstance(value[0], int | float)]


class Position(NamedTuple):
    """Position in the data: the number of completed passes, and of completed batches in the pass after them."""

    epoch: int
    batch: int


class Loader(DataLoader[Any]):
    """A DataLoader that moves each batch to the device and records the position in the data."""

    def __init__(
        self,
        data: Dataset[Any],
        batches: RankBatches,
        collate_fn: Callable[[list[Any]], Any] | None,
        device: torch.device,
    ) -> None:
        """Starts at the first pass.

        Args:
            data: the samples.
            batches: the order, and this rank's rows.
            collate_fn: makes a batch of a list of samples; None stands for torch's.
            device: device of the batches.
        """
        self._draws = torch.Generator()  # otherwise each new iterator would draw from torch's global generator
        super().__init__(data, batch_sampler=batches, generator=self._draws, collate_fn=collate_fn)
        self._device, self._batches = device, batches
        self._next, self._handed_out = Position(0, 0), Position(0, 0)
        self._resuming = False
        """True if this run was resumed, or loaded a checkpoint, and has made no step since."""
        self._loads = 0
        """Number of calls of `go_on`; an iteration in progress compares it to notice a new call."""
        self.restored: Mapping[str, torch.Tensor] | None = None
        """The generators' states that were last restored before the load of a batch, as `go_on` got them, or None."""
        self.before_next: Mapping[str, torch.Tensor] | None = None
        """The generators' states before the first load of a batch since the last step, or `go_on`'s; or None."""

    @property
    def epoch(self) -> int:
        """Number of the pass, from 0, that the next `iter` begins or, after a resume, continues."""
        return self._next.epoch

    def __iter__(self) -> Any:
        """Returns the micro-batches of the next pass, or of the rest of an interrupted one."""
        return self._moved(*self._begin(), self._loads)

    def _begin(self) -> tuple[Iterator[Any], Position]:
        """Returns the batches of the next pass, or the rest of a resumed pass, and the first batch's position."""
        at = self._next
        if not self._resuming:
            self._next = Position(at.epoch + 1, 0)
        self._batches.begin_at = at
        # Workers of a DataLoader are seeded from this generator: a resumed pass seeds them as the interrupted run did.
        self._draws.manual_seed(_seed_of(self._batches.seed, at.epoch, "workers"))
        # DataLoader draws from its generator, on the CPU, into a tensor on the default device: that must be the CPU.
        elsewhere = torch.get_default_device().type != "cpu"
        with torch.device("cpu") if elsewhere else contextlib.nullcontext():
            return super().__iter__(), at

    def _moved(self, batches: Iterator[Any], at: Position, loads: int) -> Iterator[Any]:
        """Yields the batches on the device, and updates the position before each.

        Args:
            batches: batches on the CPU.
            at: position of the first batch.
            loads: number of calls of `go_on` before this iteration.
        """
        begins = True
        while True:
            # If a checkpoint was loaded during the iteration, the iteration continues at the checkpoint's position.
            if loads != self._loads:
                loads, begins = self._loads, True
                batches, at = self._begin()
            # A data set or a `collate_fn` may draw random numbers, for example to mask tokens. Before the first batch
            # of a resumed run, the generators are therefore restored as they were when that batch was first loaded.
            if begins and self._resuming and self.before_next is not None:
                write_generators(self.before_next, self._device)
                self.restored = self.before_next
            begins = False
            noted = self.before_next is None
            # Read only before the first batch since the last step: a run that resumes after that step loads this and
            # all later batches again.
            if noted:
                self.before_next = read_generators(self._device)
            try:
                batch = next(batches)
            except StopIteration:
                if noted:
                    self.before_next = None
                return
            # Set before the yield: the batch counts as handed out while the model runs on it.
            at = self._handed_out = Position(at.epoch, at.batch + 1)
            yield to_device(batch, self._device)

    def trained(self) -> dict[str, int]:
        """Marks all batches handed out so far as trained, at the end of a step; returns the result of `where`."""
        self.before_next = None
        # From now on the resumed pass counts as begun, so the next `iter` begins the pass after it.
        if self._resuming and self._handed_out != self._next:
            self._next = Position(self._handed_out.epoch + 1, 0)
        self._resuming = False
        return self.where()

    def where(self) -> dict[str, int]:
        """Returns the position after the last batch handed out, and the settings that define it, as a JSON object."""
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
        """Continues at a resumed run's position; returns a notice if that run's order, batch or pass size was another.

        Args:
            where: the result of `trained` in the run that is resumed.
            generators: states of the random generators before the next batch was loaded; None before the first step, as
                in a new run.
        """
        epoch, batch, mine = where["epoch"], where["batch"], self.where()
        dropped = bool(where.get("drop_last", True))  # older versions always left out the last batch and wrote no key
        its_length = batches_of(where["samples"], where["samples_of_a_batch"], dropped)
        notice = None
        # Another order would repeat some samples of the pass and skip others, so the pass is given up.
        if batch and any(where[key] != mine[key] for key in ("samples", "seed")):
            notice = (
                f"the order of training_data differs from the run's ({where['samples']} samples with seed "
                f"{where['seed']}, now {mine['samples']} with {mine['seed']}): pass {epoch} was at sample "
                f"{batch * where['samples_of_a_batch']} and is not resumed, pass {epoch + 1} begins"
            )
            epoch, batch = epoch + 1, 0
        elif batch and batch >= its_length:
            epoch, batch = epoch + 1, 0
        elif batch and where["samples_of_a_batch"] != mine["samples_of_a_batch"]:
            seen, size = batch * where["samples_of_a_batch"], mine["samples_of_a_batch"]
            batch = seen // size  # rounded down: better some samples twice than some never
            notice = (
                f"training_data: a batch is {size} samples of all ranks, {where['samples_of_a_batch']} in the resumed "
                f"run; pass {epoch} had seen {seen} and resumes at {batch * size}"
            )
        same = all(where[key] == mine[key] for key in ("samples", "samples_of_a_batch"))
        if same and its_length != len(self) and notice is None:
            notice = (
                f"training_data: a pass contains {len(self)} batches, {its_length} in the resumed run: the last "
                f"incomplete one is {'left out' if mine['drop_last'] else 'trained too'} (dataloader_drop_last)"
            )
        # The end of a pass is the start of the next one.
        if batch >= len(self):
            epoch, batch = epoch + 1, 0
        self._next = self._handed_out = Position(epoch, batch)
        self.before_next, self._resuming = generators, generators is not None
        self._loads += 1
        return notice


class RankBatches(Sampler[list[int]]):
    """Sampler of one rank's micro-batches: all ranks shuffle alike, and each takes its rows of every global batch.

    `drop_last` leaves out an incomplete last batch. Otherwise the first samples of the pass are added to it until
    every rank has equally many rows, so that the mean over ranks is the mean over samples. `begin_at` sets the pass and
    the first batch of the next `iter`.
    """

    def __init__(self, length: int, micro: int, rank: int, world_size: int, seed: int, drop_last: bool) -> None:
        """Sets the order and this rank's rows.

        Args:
            length: number of samples.
            micro: samples of a micro-batch of one rank.
            rank: this rank.
            world_size: number of ranks.
            seed: seed of the order.
            drop_last: True to leave out an incomplete last batch.
        """
        self.length, self.seed, self.drop_last = length, seed, drop_last
        self.samples = micro * world_size
        """Samples of a batch over all ranks."""
        self.begin_at = Position(0, 0)
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        """Returns the lists of sample numbers of this rank's batches."""
        return self._rows(self.begin_at)  # read now: `begin_at` may change before the generator starts

    def _rows(self, at: Position) -> Iterator[list[int]]:
        """Yields the sample numbers of this rank's batches, from position `at` to the end of the pass."""
        generator = torch.Generator().manual_seed(_seed_of(self.seed, at.epoch, "order"))
        # On the CPU, as the generator is: the user may have set another default device.
        order = torch.randperm(self.length, generator=generator, device="cpu").tolist()
        for batch in range(at.batch, len(self)):
            rows = order[batch * self.samples : (batch + 1) * self.samples]
            rows += list(itertools.islice(itertools.cycle(order), -len(rows) % self._world_size))
            mine = len(rows) // self._world_size
            yield rows[mine * self._rank : mine * (self._rank + 1)]

    def __len__(self) -> int:
        """Returns the number of batches of a pass."""
        return batches_of(self.length, self.samples, self.drop_last)


def batches_of(length: int, samples: int, drop_last: bool) -> int:
    """Returns the number of batches of `samples` samples in a pass over `length` samples."""
    return length // samples if drop_last else math.ceil(length / samples)


def _seed_of(seed: int, epoch: int, what: str) -> int:
    """Returns a seed for each combination of seed, pass and purpose.

    A hash, and not a sum: otherwise a run with seed 1 would begin with the second pass of a run with seed 0.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {what}".encode()).digest()[:8], "little")
