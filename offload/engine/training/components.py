"""What an engine is made of: what `initialize` has built, and what the config says about a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.aio.shared_queue import SharedQueue
from offload.engine.distributed.agreement import Agreement
from offload.engine.distributed.process_group import Ranks
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.metrics.step_meter import StepMeter
from offload.engine.optim.update_worker import UpdateWorker
from offload.engine.params.local_shards import LocalShards
from offload.engine.params.module_hooks import ModuleHooks
from offload.engine.params.unit_views import UnitViews
from offload.engine.params.weight_edits import WeightEdits
from offload.layout.flat_layout import UnitLayout
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.pager import Pager
from offload.swapper.store import Store, Written
from offload.timeline import OFF, Timeline


@dataclass(frozen=True, kw_only=True)
class EngineComponents:
    """What `initialize` has built, in the order in which it is closed."""

    hooks: ModuleHooks
    weights: WeightEdits
    unit_views: UnitViews
    update_worker: UpdateWorker | None
    """None where nothing trains."""
    pager: Pager
    gradients: GradientAccumulator
    ranks: Ranks | None
    """None where this process is alone; so are `rounds`."""
    agreement: Agreement | None
    store: Store | None
    queue: SharedQueue | None
    arena: HostArena
    layouts: tuple[UnitLayout, ...]
    trainable: tuple[range, ...]
    """The elements of each unit that this rank updates."""
    shards: LocalShards
    written: Written
    """What goes to each drive."""
    timeline: Timeline = OFF
    meter: StepMeter | None = None
    """None where nobody wants to know."""

    @property
    def rank(self) -> int:
        """The number of this process among those that train together."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return 1 if self.ranks is None else self.ranks.size

    def closing(self) -> list[Callable[[], object]]:
        """What gives everything back but ranks, store and time line, in this order; each may be called again."""
        return [
            self.hooks.remove,
            self.weights.remove,
            *(() if self.update_worker is None else (self.update_worker.close,)),
            self.gradients.close,
            self.pager.close,
            *(() if self.queue is None else (self.queue.close,)),
            self.arena.close,  # raises after a GPU's fault
        ]


def close_all(*closing: Callable[[], object]) -> None:
    """Call all, whatever one of them raises, and raise the first error. A Ctrl-C ends it: it can be called again."""
    first: Exception | None = None
    for close in closing:
        try:
            close()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
