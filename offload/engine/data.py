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
import copy
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sized
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from offload.engine.snapshot import read_generators, write_generators
from offload.errors import ConfigError, UsageError
from offload.layout.modes import dtype_name
from offload.notices import announce
from offload.sizes import count_of
from offload.torch_internals import tree_map

# -- model inputs --------------------------------------------------------------------------------------
#
# Inputs of a forward: moved to the engine's device, and cast to the dtype of the weights.


class InputCast:
    """Callable that moves and casts the inputs of one engine's model, as the config's `auto_cast` says."""

    def __init__(self, device: torch.device, dtype: torch.dtype, casts: bool | None) -> None:
        """Sets device and dtype of the inputs. `casts` is `auto_cast`; None casts and reports the first cast."""
        self._device, self._dtype, self._casts = device, dtype, casts
        self._reported = False

    def __call__(self, inputs: Any) -> Any:
        """Returns the same structure on the device, cast if configured."""
        if self._casts is None and not self._reported and (dtype := other_dtype(inputs, self._dtype)) is not None:
            self._reported = True
            name = dtype_name(self._dtype)
            announce(
                f'inputs of {dtype_name(dtype)} are cast to {name}, the dtype of the weights; "auto_cast": true in '
                f'the block "{name}" silences this message, false turns the cast off'
            )
        return to_device(inputs, self._device, None if self._casts is False else self._dtype)

    def explain(self, error: RuntimeError, inputs: Any) -> UsageError | None:
        """Returns an error to raise in place of torch's if the dtype of an input is the cause, else None."""
        dtype = other_dtype(inputs, self._dtype) if self._dtype is not torch.float32 else None
        # torch has no class of its own for errors about dtypes; only the message identifies them.
        if dtype is None or "dtype" not in str(error):
            return None
        name = dtype_name(self._dtype)
        return UsageError(
            f"the model cannot compute with inputs of {dtype_name(dtype)} ({error}): its weights are {name}; set "
            f'"auto_cast": true in the block "{name}", or leave that key out, or cast the inputs'
        )


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Returns the same structure with its tensors on `device`; other objects stay as they are.

    Lists, tuples, mappings of any kind (a tokenizer's `BatchEncoding`), dataclasses, named tuples and packed sequences
    are searched for tensors. The batch is not changed, and its memory is not read after the return. Floating-point
    tensors are cast to `dtype`; None keeps their dtypes.
    """

    def move(value: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        if device.type in ("cpu", "meta") or value.device.type != "cpu":
            return value.to(device, wanted, non_blocking=True)
        if value.layout is not torch.strided:
            return value.to(device, wanted)
        # A copy from pageable memory is synchronous: the thread would wait for all compute before it. A copy from
        # pinned memory of the caller would still read it when the caller has put the next batch there. So the values
        # go through pinned memory of ours, which torch does not use again before the copy out of it has ended.
        staged = torch.empty_like(value, dtype=wanted, pin_memory=True).copy_(value)
        return staged.to(device, non_blocking=True)

    return map_tensors(move, batch)


def other_dtype(batch: Any, dtype: torch.dtype) -> torch.dtype | None:
    """Returns the dtype of the first floating-point tensor whose dtype is not `dtype`, or None."""
    dtypes: list[torch.dtype] = []

    def look(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and value.dtype != dtype:
            dtypes.append(value.dtype)
        return value

    map_tensors(look, batch)
    return dtypes[0] if dtypes else None


def map_tensors(do: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Returns the structure of `batch` with each tensor replaced by the result of `do`."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return do(value)
        if isinstance(value, PackedSequence):
            data = do(value.data)  # batch sizes stay on the CPU, as cuDNN requires
            places = (tensor if tensor is None else tensor.to(data.device) for tensor in value[2:])
            return PackedSequence(data, value.batch_sizes, *places)
        if isinstance(value, MutableMapping):
            moved = _copied(value)
            for key, inner in value.items():
                moved[key] = map_tensors(do, inner)
            return moved
        if isinstance(value, Mapping):
            items = {key: map_tensors(do, inner) for key, inner in value.items()}
            # Made anew only where it must be: not every class of mappings can be made from a dict.
            return value if all(items[key] is value[key] for key in items) else type(value)(items)  # type: ignore[call-arg]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            rows: Any = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(rows, field.name, map_tensors(do, getattr(value, field.name)))  # frozen ones too
            return rows
        return value

    # `tree_map` knows lists, tuples and dicts; the leaf function searches all other classes.
    return tree_map(leaf, batch, is_leaf=lambda value: isinstance(value, PackedSequence))


def _copied(batch: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Returns a copy whose items can be set without a change of `batch`; it keeps the class (a `BatchEncoding`)."""
    copied = copy.copy(batch)
    declared = [vars(kind).get("__slots__", ()) for kind in type(batch).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    for name in (*getattr(copied, "__dict__", ()), *slots):
        value = getattr(copied, name, None)
        # A class without a `__copy__` of its own shares the container of its items with its copies.
        if isinstance(value, list | MutableMapping) and value is getattr(batch, name, None):
            object.__setattr__(copied, name, copy.copy(value))
    return copied


# -- data loader ---------------------------------------------------------------------------------------


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
    """Returns a loader of `training_data`, in micro-batches of `micro` samples of this rank.

    Raises `ConfigError` if a pass over the data has no batch.
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
    """torch's `collate_fn`, with a clear error for samples that it cannot put into a batch."""

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
        self._draws = torch.Generator()  # otherwise each new iterator would draw from torch's global generator
        super().__init__(data, batch_sampler=batches, generator=self._draws, collate_fn=collate_fn)
        self._device, self._batches = device, batches
        self._next, self._handed_out = Position(0, 0), Position(0, 0)
        self._resuming = False
        """True if this run was resumed, or loaded a checkpoint, and has made no step since."""
        self._loads = 0
        """Number of calls of `go_on`; an iteration in progress compares it to notice a new call."""
        self.restored: Mapping[str, torch.Tensor] | None = None
        """The generators' states that were last restored before a batch was loaded, as passed to `go_on`; or None."""
        self.before_next: Mapping[str, torch.Tensor] | None = None
        """The generators' states before the first batch since the last step, or as passed to `go_on`; or None."""

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
        """Yields the batches on the device, and updates the position before each."""
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
        """Continues at a resumed run's position; returns a notice if that run's order, batch or pass size differed.

        `where` is the result of `trained` in that run. `generators` are the states of the random generators before the
        next batch was loaded; None before the first step, as in a new run.
        """
        epoch, batch, now = where["epoch"], where["batch"], self.where()
        dropped = bool(where.get("drop_last", True))  # older versions always left out the last batch and wrote no key
        its_length = batches_of(where["samples"], where["samples_of_a_batch"], dropped)
        notice = None
        # Another order would repeat some samples of the pass and skip others, so the pass is given up.
        if batch and any(where[key] != now[key] for key in ("samples", "seed")):
            notice = (
                f"the order of training_data differs from the run's ({where['samples']} samples with seed "
                f"{where['seed']}, now {now['samples']} with {now['seed']}): pass {epoch} was at sample "
                f"{batch * where['samples_of_a_batch']} and is not resumed, pass {epoch + 1} begins"
            )
            epoch, batch = epoch + 1, 0
        elif batch and batch >= its_length:
            epoch, batch = epoch + 1, 0
        elif batch and where["samples_of_a_batch"] != now["samples_of_a_batch"]:
            seen, size = batch * where["samples_of_a_batch"], now["samples_of_a_batch"]
            batch = seen // size  # rounded down: better some samples twice than some never
            notice = (
                f"training_data: a batch is {size} samples of all ranks, {where['samples_of_a_batch']} in the resumed "
                f"run; pass {epoch} had seen {seen} and resumes at {batch * size}"
            )
        same = all(where[key] == now[key] for key in ("samples", "samples_of_a_batch"))
        if same and its_length != len(self) and notice is None:
            notice = (
                f"training_data: a pass contains {len(self)} batches, {its_length} in the resumed run: the last "
                f"incomplete one is {'left out' if now['drop_last'] else 'trained too'} (dataloader_drop_last)"
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
        self.length, self.seed, self.drop_last = length, seed, drop_last
        self.samples = micro * world_size
        """Samples of a batch over all ranks."""
        self.begin_at = Position(0, 0)
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        """Returns the lists of sample numbers of this rank's batches."""
        return self._rows(self.begin_at)  # read now: `begin_at` may change before the generator starts

    def _rows(self, at: Position) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(_seed_of(self.seed, at.epoch, "order"))
        # On the CPU, as the generator is: the user may have set another default device.
        order = torch.randperm(self.length, generator=generator, device="cpu").tolist()
        for batch in range(at.batch, len(self)):
            rows = order[batch * self.samples : (batch + 1) * self.samples]
            rows += list(itertools.islice(itertools.cycle(order), -len(rows) % self._world_size))
            share = len(rows) // self._world_size
            yield rows[share * self._rank : share * (self._rank + 1)]

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
