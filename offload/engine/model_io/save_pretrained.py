"""`engine.save_pretrained` and `save_16bit_model`: the weights of a moment as files that others load.

All ranks go through all partitions in the same order; whose it is reads it and tells the others, and rank 0 writes. An
adapter of peft is small: every rank gathers it, and rank 0 has peft write it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.aio.protocols import Future
from offload.engine.checkpoint.directory import told
from offload.engine.checkpoint.files import check_folder
from offload.engine.distributed.agreement import Kind
from offload.engine.distributed.all_or_nothing import Together, together
from offload.engine.model_io.output_folder import arriving, check_not_a_file, check_room
from offload.engine.model_io.weight_source import Reading
from offload.engine.model_io.weight_writer import Files, Sink, check_dtype, make_plan, notices, shard_size, stream
from offload.engine.training.components import Parts
from offload.engine.training.snapshot import persistent_buffers
from offload.errors import UsageError
from offload.layout.fingerprint import about, describe
from offload.states import State

logger = logging.getLogger("offload")

_ONE_FILE = 1 << 62


class Wanted(NamedTuple):
    """What is to be saved, as a user says it."""

    folder: Any
    max_shard_size: Any = "50GB"
    dtype: Any = None
    tokenizer: Any = None
    frozen: bool = True
    file_name: str | None = None
    """Of the one file that is written; None for all that a model's folder has."""

    def check(self) -> None:
        """Raise `UsageError`, `ConfigError` or `StoreError` where it cannot be."""
        check_not_a_file(check_folder(self.folder, "save_directory"))
        shard_size(self.max_shard_size)
        check_dtype(self.dtype)
        if self.tokenizer is not None and not hasattr(self.tokenizer, "save_pretrained"):
            raise UsageError(f"tokenizer must be one of transformers, with save_pretrained, got {self.tokenizer!r}")
        if self.file_name is not None and Path(self.file_name).name != self.file_name:
            raise UsageError(
                f"save_filename is {self.file_name!r}, a path, where the name of a file in save_directory is expected: "
                f"give the folder as save_directory"
            )
        if self.file_name is not None and not self.file_name.endswith(".safetensors"):
            raise UsageError(
                f"save_filename is {self.file_name!r}, and what is written is a safetensors file, never a pickle: give "
                f"a name that ends with .safetensors, such as model.safetensors"
            )


class EngineSource:
    """The weights of an engine between steps. Of several ranks all read the same, at the same time."""

    def __init__(
        self, module: nn.Module, parts: Parts, epoch: int, ranks: Together, check: Callable[[], None] = lambda: None
    ) -> None:
        """Describes the model.

        Args:
            module: the model.
            parts: the components of its engine.
            epoch: the number of the step.
            ranks: the processes that read together.
            check: raises if this rank has failed since the last read. Called where the other ranks learn of it.
        """
        self._parts, self._ranks, self._check = parts, ranks, check
        self.description: Mapping[str, Any] = describe(parts.layouts, parts.held.mode, ranks.size)
        self.about: Mapping[str, Any] = about(module)
        self.epoch, self.frozen = epoch, True
        self.buffers: Mapping[str, torch.Tensor] = {
            name: value.detach().to("cpu") for name, value in persistent_buffers(module).items()
        }
        self._over = False

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Reading:
        futures = self._parts.held.read(unit, state, start, buffer) if rank == self._ranks.rank else []
        return _Told(self, rank, buffer, futures)

    def tell(self, rank: int, buffer: memoryview, futures: list[Future]) -> None:
        """Give every rank what `rank` reads into its buffer. A failure is raised on all ranks, and once."""

        def mine() -> None:
            for future in futures:
                future.wait()
            self._check()

        if self._over:
            for future in futures:
                future.wait()
            return
        try:
            self._ranks.settle(mine)
        except BaseException:
            self._over = True
            raise
        if self._parts.ranks is not None:
            self._parts.ranks.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), rank)

    def close(self) -> None:
        """Nothing is open."""


class _Told(NamedTuple):
    """A read in flight on one rank, for which the others wait."""

    source: EngineSource
    rank: int
    buffer: memoryview
    futures: list[Future]

    def wait(self) -> int:
        self.source.tell(self.rank, self.buffer, self.futures)
        return len(self.buffer)


class _FirstFailure:
    """The first error of writing on this rank, kept until all ranks can learn of it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def record(self, error: Exception) -> None:
        """Keeps `error`. Writing must have stopped since the first."""
        self._error = error

    @property
    def failed(self) -> bool:
        """True after an error."""
        return self._error is not None

    def check(self) -> None:
        """Raises the error that was recorded, if any."""
        if self._error is not None:
            raise self._error


class _Forgiving:
    """A sink that passes data on to another until that fails, and records the failure instead of raising it."""

    def __init__(self, sink: Sink | None, failure: _FirstFailure) -> None:
        self._sink, self._failure = sink, failure

    def put(self, name: str, start: int, data: memoryview) -> None:
        if self._sink is None or self._failure.failed:
            return
        try:
            self._sink.put(name, start, data)
        except Exception as error:
            self._failure.record(error)


class Saving:
    """Writes an engine's model into folders. Between steps, when no update is under way."""

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        self._module, self._parts = module, parts

    def save(self, wanted: Wanted, epoch: int) -> None:
        """Write the whole model, or the adapter of a model of peft where no file is named. All ranks come here."""
        adapter = wanted.file_name is None and hasattr(self._module, "peft_config")
        gathered = adapter_state(self._module, self._parts) if adapter else {}  # before: others may serve it
        with together(self._parts.rounds, Kind.SAVE, "save the model") as ranks:
            ranks.settle(wanted.check)
            ranks.settle(lambda: self._parts.bindings.check_not_gathered("saved"))
            ranks.same({"folder": str(wanted.folder), "file": wanted.file_name, "dtype": str(wanted.dtype)})
            out = Path(wanted.folder).absolute()
            if adapter:
                ranks.by_first(lambda: self._write_adapter(wanted, out, gathered))
            else:
                self._write(wanted, out, epoch, ranks)

    def _write(self, wanted: Wanted, out: Path, epoch: int, ranks: Together) -> None:
        failure = _FirstFailure()
        source = EngineSource(self._module, self._parts, epoch, ranks, failure.check)
        shard_nbytes = _ONE_FILE if wanted.file_name else shard_size(wanted.max_shard_size)
        plan = make_plan(source, wanted.dtype, shard_nbytes, wanted.frozen, wanted.file_name)
        with contextlib.ExitStack() as folder_open, contextlib.ExitStack() as files_open:
            made: list[tuple[Path, Files]] = []  # on rank 0

            def begin() -> None:
                folder = folder_open.enter_context(arriving(out, logger.warning, wanted.file_name is None))
                check_room(folder, plan.nbytes, out)
                made.append((folder, files_open.enter_context(Files(folder, plan, source.buffers))))

            def end() -> None:
                failure.check()
                files_open.close()
                if wanted.tokenizer is not None:
                    _save_tokenizer(wanted.tokenizer, made[0][0])
                folder_open.close()

            ranks.by_first(begin)
            beyond = stream(source, plan, _Forgiving(made[0][1] if made else None, failure))
            ranks.by_first(end)
        for notice in notices(source, plan, beyond) if self._parts.rank == 0 else ():
            logger.warning("%s: %s", out, notice)

    def _write_adapter(self, wanted: Wanted, out: Path, state: dict[str, torch.Tensor]) -> None:
        module: Any = self._module
        with arriving(out, logger.warning, whole=False) as folder, told(folder, "write"):
            check_room(folder, sum(value.nbytes for value in state.values()), out)
            if (out / "README.md").is_file():
                shutil.copyfile(out / "README.md", folder / "README.md")  # peft adds to a model's card
            module.save_pretrained(str(folder), state_dict=state)
            if wanted.tokenizer is not None:
                _save_tokenizer(wanted.tokenizer, folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    with told(folder, "write"):
        tokenizer.save_pretrained(str(folder))


def adapter_state(module: Any, parts: Parts) -> dict[str, torch.Tensor]:
    """What of a model of peft its `save_pretrained` writes: CPU tensors by the model's names.

    It is asked with empty tensors in the place of all weights, and those that it takes are gathered.
    """
    from peft import get_peft_model_state_dict

    named = {**dict(module.named_parameters(remove_duplicate=False)), **persistent_buffers(module)}
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in named.items()}
    names = {id(value): name for name, value in empty.items()}
    taken: set[str] = set()
    for adapter in module.peft_config:
        for value in get_peft_model_state_dict(module, state_dict=dict(empty), adapter_name=adapter).values():
            if id(value) not in names:
                raise UsageError(
                    f"peft makes new weights of those of adapter {adapter} when it saves it, which needs all of them "
                    f"in the RAM: call engine.module.save_pretrained(folder)"
                )
            taken.add(names[id(value)])
    return {name: _gather(named[name], parts) for name in empty if name in taken}


def _gather(value: torch.Tensor, parts: Parts) -> torch.Tensor:
    place = parts.weights.place(value)
    return value.detach().to("cpu", copy=True) if place is None else parts.weights.weight(place.unit, place.position)
