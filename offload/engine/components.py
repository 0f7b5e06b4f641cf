"""Components of an engine, as `initialize` has built them, and their shutdown order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    """The order of a step's micro-batches; one of `extensions`."""
    world: World
    """All processes that train together, and this one's place among them."""
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
    """Counter of the bytes that go to each drive."""
    read_only: contextlib.ExitStack
    """Closes files of weights that are only read."""
    timeline: Timeline
    meter: Meter
    shows_dtensors: bool
    """True if modules see DTensors in the place of their parameters."""
    extensions: tuple[Extension, ...]
    """Features on the model, in the order of their installation."""

    @property
    def divides_parameters(self) -> bool:
        """True if modules hold parts of parameters, or DTensors. Files still use the names of whole parameters."""
        return self.world.divides_model or self.shows_dtensors

    def refuse_shards(self, call: str) -> None:
        """Raises `UsageError` for a call that would save or load the part of one process as if it were all."""
        if self.world.divides_model:
            raise UsageError(
                f"{call} knows nothing of {self.world.kind}, and each process has a part of the weights: "
                "call save_checkpoint, which saves all parts, or save_pretrained or save_16bit_model(folder, "
                '"model.safetensors"), which put the weights together; other weights are loaded before '
                "offload.initialize"
            )

    def closing(self) -> list[Callable[[], object]]:
        """Returns calls that close all but ranks, store, timeline and meter, in order; each may be repeated.

        A component is closed before those that it uses: the worker before the pager, all I/O before the host arena.
        """
        return [
            *(extension.remove for extension in reversed(self.extensions)),
            self.hooks.remove,
            self.weights.remove,
            self.update_worker.close,
            self.gradients.close,
            self.activations.close,
            self.pager.close,
            self.shards.residents.clear,  # on the device they would stay until Python finds the engine's cycles
            *(() if self.queue is None else (self.queue.close,)),
            self.read_only.close,
            self.arena.close,  # raises after a GPU's fault
        ]


def close_all(*closing: Callable[[], object]) -> None:
    """Makes all calls, even if some raise, and raises the first error.

    A Ctrl-C skips the remaining calls; then `close_all` may be called with all of them again.
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
    """Yields this process's side of work of all processes that train together, once ZeRO's ranks have met for it."""
    with components.agreement.meeting(kind):
        yield AllOrNothing(components.world.everyone, what)
