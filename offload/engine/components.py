"""Components of an engine, as `initialize` has built them, and their shutdown order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.aio.shared_queue import SharedQueue
from offload.distributed.agreement import Agreement, AllOrNothing, Collective
from offload.distributed.world import World
from offload.engine.callbacks import ActivationPolicy, Extension
from offload.engine.edits import WeightEdits
from offload.engine.gradients import GradientAccumulator
from offload.engine.hooks import ModuleHooks
from offload.engine.micro_batches import PassSchedule
from offload.engine.shards import LocalShards
from offload.engine.unit_views import UnitViews
from offload.engine.update import Updates
from offload.errors import UsageError
from offload.layout.flat_layout import UnitLayout
from offload.layout.peak_memory import PeakMemory
from offload.metrics.meter import Meter
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.pager import Pager
from offload.swapper.store import DriveByteCounter, Store
from offload.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class EngineComponents:
    """Components of an engine. `closing` gives the order of closing."""

    hooks: ModuleHooks
    weights: WeightEdits
    unit_views: UnitViews
    update_worker: Updates
    pager: Pager
    gradients: GradientAccumulator
    activations: ActivationPolicy
    schedule: PassSchedule
    """Runs the micro-batches of a step in its order. It is also one of `extensions`."""
    world: World
    """All processes that train together, and the position of this process among them."""
    agreement: Agreement
    """The agreement of the ranks among which ZeRO partitions states."""
    store: Store
    queue: SharedQueue | None
    arena: HostArena
    layouts: tuple[UnitLayout, ...]
    trainable: tuple[range, ...]
    """Elements of each unit that this rank updates."""
    shards: LocalShards
    written: DriveByteCounter
    """Counts the bytes that are written to each drive."""
    read_only: contextlib.ExitStack
    """Closes the model's own files, from which weights are only read."""
    timeline: Timeline
    meter: Meter
    shows_dtensors: bool
    """True if modules see DTensors in the place of their parameters."""
    extensions: tuple[Extension, ...]
    """Features that are installed on the model, in the order of installation."""
    base_files: Sequence[Mapping[str, Any]]
    """The files of frozen weights under adapters; see `model_io.base_files`."""
    peak: PeakMemory
    """The sum that the start has compared with the limits of host memory."""

    @property
    def divides_parameters(self) -> bool:
        """True if modules hold parts of parameters, or DTensors. Files still use the names of whole parameters."""
        return self.world.divides_model or self.shows_dtensors

    def refuse_shards(self, call: str) -> None:
        """Raises `UsageError` if each process holds only a part of the model, which `call` does not support."""
        if self.world.divides_model:
            raise UsageError(
                f"{call} knows nothing of {self.world.kind}, and each process has a part of the weights: "
                "call save_checkpoint, which saves all parts, or save_pretrained or save_16bit_model(folder, "
                '"model.safetensors"), which put the weights together; other weights are loaded before '
                "offload.initialize"
            )

    def closing(self) -> list[Callable[[], object]]:
        """Returns, in order, the calls that close all components but ranks, store, timeline and meter.

        Each call may be repeated. A component is closed before the components that it uses: the worker before the
        pager, all I/O before the host arena.
        """
        return [
            *(extension.remove for extension in reversed(self.extensions)),
            self.hooks.remove,
            self.weights.remove,
            self.update_worker.close,
            self.gradients.close,
            self.activations.close,
            self.pager.close,
            self.shards.residents.clear,  # else device memory stays taken until Python collects the engine's cycles
            *(() if self.queue is None else (self.queue.close,)),
            self.read_only.close,
            self.arena.close,  # raises if the GPU has failed
        ]


def close_all(*closing: Callable[[], object]) -> None:
    """Makes all calls, even if some raise, and raises the first error.

    A Ctrl-C skips the remaining calls. The caller may then call `close_all` again with all calls.
    """
    first: Exception | None = None
    for close in closing:
        try:
            close()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


@contextlib.contextmanager
def together(components: EngineComponents, kind: Collective, what: str) -> Iterator[AllOrNothing]:
    """Waits until ZeRO's ranks have met for `kind`. Then yields an `AllOrNothing` over all processes that train."""
    with components.agreement.meeting(kind):
        yield AllOrNothing(components.world.everyone, what)
