"""`engine.save_pretrained` and `save_16bit_model`: save the weights, between steps, for other libraries to load.

All ranks iterate over all partitions in the same order. The rank that owns a partition reads it and broadcasts it, and
rank 0 writes. A peft adapter is small: every rank gathers the whole adapter, and rank 0 calls peft to write it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import nn

from offload.aio.protocols import Future, Pending, wait_for_all
from offload.checkpoint.directory import naming_errors
from offload.checkpoint.files import check_folder
from offload.checkpoint.save import own_or_shared
from offload.distributed.agreement import AllOrNothing, Collective
from offload.engine.model_io.grid.of_engine import whole_of_engine
from offload.engine.model_io.output_folder import arriving, check_not_a_file, check_room
from offload.engine.model_io.safetensors_folder import SINGLE
from offload.engine.model_io.saved_names import SavedNames, saved_names
from offload.engine.model_io.weight_plan import check_dtype, make_plan, shard_size
from offload.engine.model_io.weight_source import Reading
from offload.engine.model_io.weight_stream import Sink, stream
from offload.engine.model_io.weight_writer import Files, notices
from offload.engine.training.components import EngineComponents, together
from offload.engine.training.snapshot import all_persistent_buffers, persistent_buffers
from offload.errors import BudgetError, ConfigError, UsageError
from offload.layout.fingerprint import about, describe
from offload.layout.modes import dtype_name
from offload.states import State

logger = logging.getLogger("offload")

_ONE_FILE = 1 << 62
"""Limit of a file's size in bytes that no model reaches, so that all weights are in one file."""


class SaveOptions(NamedTuple):
    """Arguments of a save as a user gives them."""

    folder: Any
    max_shard_size: Any = "50GB"
    dtype: Any = None
    tokenizer: Any = None
    frozen: bool = True
    file_name: str | None = None
    """Name of the only file to write; None to write all files of a model's folder."""

    def check(self) -> None:
        """Raises `UsageError`, `ConfigError` or `StoreError` if an argument is not valid."""
        check_not_a_file(check_folder(self.folder, "save_directory"))
        shard_size(self.max_shard_size)
        check_dtype(self.dtype)
        if self.tokenizer is not None and not hasattr(self.tokenizer, "save_pretrained"):
            raise UsageError(
                f"tokenizer must be a tokenizer of transformers, with save_pretrained, got {self.tokenizer!r}"
            )
        if self.file_name is not None and Path(self.file_name).name != self.file_name:
            raise UsageError(
                f"save_filename is {self.file_name!r}, a path; expected the name of a file in save_directory: give "
                "the folder as save_directory"
            )
        if self.file_name is not None and not self.file_name.endswith(".safetensors"):
            raise UsageError(
                f"save_filename is {self.file_name!r}, but only safetensors files are written, never pickles: give a "
                "name that ends with .safetensors, such as model.safetensors"
            )


class EngineSource:
    """The weights of an engine between steps, as a `Source`. All ranks must read the same bytes in the same order."""

    def __init__(
        self,
        module: nn.Module,
        components: EngineComponents,
        step: int,
        ranks: AllOrNothing,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes the description and the buffers of the model.

        Args:
            module: The model.
            components: The components of its engine.
            step: Number of the step.
            ranks: The ranks that read together.
            check: Raises if this rank has failed. Called at each read, when the error can be raised on all ranks.
        """
        self._components, self._ranks, self._check = components, ranks, check
        self.description: Mapping[str, Any] = describe(
            components.layouts, components.shards.mode, components.mesh.shards
        )
        self.about: Mapping[str, Any] = about(module)
        self.step, self.frozen = step, True
        self.buffers: Mapping[str, torch.Tensor] = {
            name: value.detach().to("cpu") for name, value in persistent_buffers(module).items()
        }
        self._over = False

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Reading:
        """Begins to read bytes of a rank's partition, on the rank that owns it; see `Source.read`."""
        # Only the owner in the first replica reads. The others receive the bytes in `wait`, in the same order of reads.
        futures = self._components.shards.read(unit, state, start, buffer) if rank == self._ranks.rank else []
        return _NotifyingFuture(self, rank, buffer, futures)

    def completed(self, rank: int, buffer: memoryview, futures: list[Future]) -> None:
        """Waits for a read of `rank` and broadcasts its bytes. Collective.

        The first failure is raised on all ranks; later calls raise nothing and broadcast nothing.

        Args:
            rank: The rank that owns the bytes.
            buffer: Filled on all ranks.
            futures: Pending reads of the owner; [] on the other ranks.
        """

        def mine() -> None:
            for future in futures:
                future.wait()
            self._check()

        # After a failure, pending reads are still waited for, because their buffers are about to be freed. The other
        # ranks are not contacted again.
        if self._over:
            wait_for_all(futures)
            return
        try:
            self._ranks.settle(mine)
        except BaseException:
            self._over = True
            raise
        # The broadcast is reached only if no rank has failed, so all ranks take part in it.
        if self._components.everyone is not None:
            self._components.everyone.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), rank)

    def close(self) -> None:
        """Does nothing: no file is open."""


class _NotifyingFuture(NamedTuple):
    """A read in flight on one rank, for which all ranks wait."""

    source: EngineSource
    rank: int
    buffer: memoryview
    futures: list[Future]

    def done(self) -> bool:
        """Returns True if this rank has nothing to read any more."""
        return all(future.done() for future in self.futures)

    def wait(self) -> int:
        """Waits for the bytes and returns their number; collective."""
        self.source.completed(self.rank, self.buffer, self.futures)
        return len(self.buffer)


class _FirstFailure:
    """The first error of writing on this rank, kept until all ranks can learn of it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def record(self, error: Exception) -> None:
        """Stores `error`, unless there was one before. The caller must not write after the first error."""
        self._error = self._error or error

    @property
    def failed(self) -> bool:
        """True after an error."""
        return self._error is not None

    def check(self) -> None:
        """Raises the recorded error, if any."""
        if self._error is not None:
            raise self._error


class _Forgiving:
    """A sink that forwards data to another sink, if there is one, and records its first failure without raising it.

    Rank 0 must take part in every broadcast: an exception in the middle would leave the other ranks waiting.
    """

    def __init__(self, sink: Sink | None, failure: _FirstFailure) -> None:
        self._sink, self._failure = sink, failure

    def put(self, file: str, offset: int, data: memoryview) -> Sequence[Pending]:
        """Begins to write bytes of a file, unless an earlier write failed."""
        if self._sink is None or self._failure.failed:
            return ()
        try:
            return [_ForgivingFuture(write, self._failure) for write in self._sink.put(file, offset, data)]
        except Exception as error:
            self._failure.record(error)
            return ()


class _ForgivingFuture(NamedTuple):
    """A write in flight whose failure is recorded and not raised."""

    write: Pending
    failure: _FirstFailure

    def done(self) -> bool:
        """Returns True if the write has ended."""
        return self.write.done()

    def wait(self) -> int:
        """Waits for the write and returns its bytes, 0 if it has failed."""
        try:
            return self.write.wait()
        except Exception as error:
            self.failure.record(error)
            return 0


class PretrainedWriter:
    """Writes an engine's model into folders. Only between steps, when no update is in progress."""

    def __init__(self, module: nn.Module, components: EngineComponents) -> None:
        self._module, self._components = module, components

    def save(self, wanted: SaveOptions, step: int) -> None:
        """Writes the whole model, or the adapter of a peft model if no file is named. Collective.

        Args:
            wanted: Arguments of the user.
            step: Number of the step.
        """
        adapter = wanted.file_name is None and hasattr(self._module, "peft_config")
        if adapter:
            self._components.refuse_shards("save_pretrained of adapters")
        # DeepSpeed's file of weights, and parts that are put together, have the names of the parameters.
        own_names = wanted.file_name is None and not adapter and not self._components.divides_parameters
        saved = saved_names(self._module) if own_names else None
        # Gathered before the meeting below begins: a rank that is in the meeting cannot serve another rank's gather.
        gathered = gather_adapter(self._module, self._components) if adapter else Adapter({}, {})
        whole: dict[str, Any] = {}
        if saved is not None and saved.computed:
            _check_own_dtype(wanted.dtype, self._components.shards.mode.weight_dtype, saved.computed)
            whole = self._module.state_dict()
        elif saved is not None and saved.unconverted and wanted.dtype is None and self._components.everyone is None:
            with contextlib.suppress(BudgetError):  # a larger model has the names of memory, and a notice says so
                whole = self._module.state_dict()
        with together(self._components, Collective.SAVE, "save the model") as ranks:
            ranks.settle(wanted.check)
            ranks.settle(lambda: self._components.unit_views.check_not_gathered("saved"))
            names = {"folder": str(wanted.folder), "file": wanted.file_name}
            ranks.same({**names, "dtype": str(wanted.dtype), "frozen": wanted.frozen})
            out = Path(wanted.folder).absolute()
            if adapter:
                ranks.by_first(lambda: self._write_adapter(wanted, out, gathered))
            elif whole:
                ranks.by_first(lambda: self._write_whole(wanted, out, whole))
            else:
                self._write(wanted, out, step, ranks, saved)

    def _write(self, wanted: SaveOptions, out: Path, step: int, ranks: AllOrNothing, saved: SavedNames | None) -> None:
        """Writes the model; only rank 0 opens files. Collective.

        Args:
            wanted: Arguments of the user.
            out: The output folder.
            step: Number of the step.
            ranks: All ranks.
            saved: What the model's class makes of its weights in files; None for each under its own name.
        """
        failure = _FirstFailure()
        # A failed write on rank 0 is raised on all ranks at the next read, by `check`.
        own = EngineSource(self._module, self._components, step, ranks, failure.check)
        grid = self._components.tensor_parallel
        source = own if grid is None else whole_of_engine(self._module, self._components, grid, own)
        shard_nbytes = _ONE_FILE if wanted.file_name else shard_size(wanted.max_shard_size)
        plan = make_plan(source, wanted.dtype, shard_nbytes, wanted.frozen, wanted.file_name, saved)
        buffers = {**source.buffers, **({} if saved is None else saved.values)}
        # Two stacks, because the files must be durable and closed before the folder is renamed.
        with (
            own_or_shared(self._components.queue) as queue,
            contextlib.ExitStack() as folder_open,
            contextlib.ExitStack() as files_open,
        ):
            made: list[tuple[Path, Files]] = []  # filled on rank 0 only

            def begin() -> None:
                folder = folder_open.enter_context(arriving(out, logger.warning, wanted.file_name is None))
                check_room(folder, plan.nbytes, out)
                made.append((folder, files_open.enter_context(Files(folder, plan, buffers, queue))))

            def end() -> None:
                failure.check()
                files_open.close()
                if wanted.tokenizer is not None:
                    _save_tokenizer(wanted.tokenizer, made[0][0])
                folder_open.close()

            # Only rank 0 opens the staging folder; the other ranks iterate over the same bytes and write nothing.
            ranks.by_first(begin)
            beyond = stream(source, plan, _Forgiving(made[0][1] if made else None, failure))
            ranks.by_first(end)
        for notice in notices(source, plan, beyond) if ranks.rank == 0 else ():
            logger.warning("%s: %s", out, notice)

    def _write_whole(self, wanted: SaveOptions, out: Path, state: dict[str, Any]) -> None:
        """Lets the model's own code write the weights `state`, which are in memory. Runs on rank 0."""
        module: Any = self._module
        with arriving(out, logger.warning) as folder, naming_errors(folder, "write"):
            check_room(folder, sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor)), out)
            if hasattr(module, "save_pretrained"):
                module.save_pretrained(str(folder), state_dict=state, max_shard_size=wanted.max_shard_size)
            else:
                first: dict[tuple[int, torch.Size], str] = {}
                tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
                names = {
                    name: first.setdefault((value.data_ptr(), value.shape), name) for name, value in tensors.items()
                }
                own = {name: tensors[name].contiguous() for name, other in names.items() if name == other}
                ties = {name: other for name, other in names.items() if name != other}
                safetensors.torch.save_file(own, folder / SINGLE, {"format": "pt", **ties})
            if wanted.tokenizer is not None:
                _save_tokenizer(wanted.tokenizer, folder)

    def _write_adapter(self, wanted: SaveOptions, out: Path, adapter: Adapter) -> None:
        """Calls peft to write the adapter into `out`. Runs on rank 0."""
        module: Any = self._module
        with arriving(out, logger.warning, whole=False) as folder, naming_errors(folder, "write"):
            check_room(folder, sum(value.nbytes for value in adapter.state.values()), out)
            if (out / "README.md").is_file():
                # peft extends an existing model card, so the staging folder must contain that of `out`.
                shutil.copyfile(out / "README.md", folder / "README.md")
            with _in_place(module, adapter.encoders):
                module.save_pretrained(str(folder), state_dict=adapter.state)
            if wanted.tokenizer is not None:
                _save_tokenizer(wanted.tokenizer, folder)


def _check_own_dtype(wanted: Any, dtype: torch.dtype, why: str) -> None:
    """Raises `ConfigError` if weights that a model's own code writes shall have another dtype than they have."""
    if (check_dtype(wanted) or dtype) is not dtype:
        raise ConfigError(
            f"{why}, so the model's own code writes the files, in {dtype_name(dtype)}: leave dtype out, and convert "
            "the saved model by transformers"
        )


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer's files."""
    with naming_errors(folder, "write"):
        tokenizer.save_pretrained(str(folder))


class Adapter(NamedTuple):
    """What peft needs in order to save the adapters of a model: all on the CPU, or on the device that computes."""

    state: dict[str, torch.Tensor]
    """Tensors by the model's names, on the CPU."""
    encoders: dict[str, nn.Module]
    """Copies of the prompt encoders by adapter: peft computes prompts by them, from no state."""


def gather_adapter(module: Any, components: EngineComponents) -> Adapter:
    """Returns what peft's `save_pretrained` needs of a model.

    To find the tensors, peft selects from ones on the meta device, one for each weight. Only selected weights are
    gathered; where peft computes from them, all of that adapter.
    """
    from peft import get_peft_model_state_dict

    # A copy of a module under an engine is an ordinary module, with weights of its own.
    encoders = {name: copy.deepcopy(encoder) for name, encoder in getattr(module, "prompt_encoder", {}).items()}
    named = {**dict(module.named_parameters(remove_duplicate=False)), **all_persistent_buffers(module)}
    # Values on meta cost no memory: a model larger than the RAM still has a small adapter.
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in named.items()}
    names = {id(value): name for name, value in empty.items()}
    taken: set[str] = set()
    with _in_place(module, encoders):
        for adapter in module.peft_config:
            selected = get_peft_model_state_dict(module, state_dict=dict(empty), adapter_name=adapter).values()
            taken |= {names[id(value)] for value in selected if id(value) in names}
            # Where a value is not on meta, peft has it from elsewhere, as from a copy in `encoders`.
            if any(value.is_meta and id(value) not in names for value in selected):
                taken |= {name for name in empty if f".{adapter}." in f"{name}."}
    return Adapter({name: _gather(named[name], components) for name in empty if name in taken}, encoders)


@contextlib.contextmanager
def _in_place(module: Any, encoders: Mapping[str, nn.Module]) -> Iterator[None]:
    """Puts copies of prompt encoders in the place of the model's while the context is open."""
    own = {name: module.prompt_encoder[name] for name in encoders}
    for name, encoder in encoders.items():
        module.prompt_encoder[name] = encoder
    try:
        yield
    finally:
        for name, encoder in own.items():
            module.prompt_encoder[name] = encoder


def _gather(value: torch.Tensor, components: EngineComponents) -> torch.Tensor:
    """Returns a CPU copy of a parameter or buffer."""
    place = components.weights.handle(value)
    return (
        value.detach().to("cpu", copy=True) if place is None else components.weights.weight(place.unit, place.position)
    )
