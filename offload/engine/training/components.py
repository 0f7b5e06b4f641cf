"""What an engine is made of: what `initialize` has built, and what the config says about a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from offload.aio.shared_queue import SharedQueue
from offload.config import Config
from offload.engine.distributed.agreement import Rounds
from offload.engine.distributed.process_group import Ranks
from offload.engine.gradients.accumulator import Gradients
from offload.engine.metrics.step_meter import Meter
from offload.engine.optim.update_worker import Updater
from offload.engine.params.local_shards import Held
from offload.engine.params.module_hooks import Hooks
from offload.engine.params.unit_views import Bindings
from offload.engine.params.weight_edits import Weights
from offload.engine.training.loss_scale import LossScaler
from offload.errors import UsageError
from offload.layout.device_need import DeviceNeed
from offload.layout.flat_layout import UnitLayout
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.pager import Pager
from offload.swapper.store import Store, Written
from offload.timeline import OFF, Timeline


class Choices(NamedTuple):
    """What the config says about a step."""

    micro_batch_size: int
    accumulation: int
    total_batch_size: int
    clip: float
    """The largest global norm of the gradient; 0 leaves it as it is."""
    skip_nonfinite: bool
    """Whether a norm that is inf or NaN skips the step, or raises."""
    seed: int
    overlap: bool
    """Whether updates run while the next forward does; off only to find faults."""
    config: Config
    """All else that it says."""
    scaler: LossScaler | None = None
    """In fp16."""
    device_need: DeviceNeed = DeviceNeed(least=0, most=0, unit=0, weights=0)


def resized(choices: Choices, total: int, ranks: int, gradients: torch.dtype | None) -> Choices:
    """The same for steps of `total` samples. Raises `UsageError` where these are no whole micro-batches.

    `gradients` is the dtype in which gradients are kept, unless the config names it.
    """
    samples = choices.micro_batch_size * ranks
    if isinstance(total, bool) or not isinstance(total, int) or total < 1 or total % samples:
        raise UsageError(
            f"train_batch_size must be a multiple of train_micro_batch_size_per_gpu * ranks, which is "
            f"{choices.micro_batch_size} * {ranks}, got {total!r}"
        )
    accumulation = total // samples
    if accumulation > 1 and gradients is not None and gradients.itemsize < 4:
        raise UsageError(
            f"a step of {total} samples has {accumulation} micro-batches, and gradients are kept in {gradients}, since "
            f"the config has one micro-batch a step: to add several up, set data_types.grad_accum_dtype to fp32"
        )
    return choices._replace(accumulation=accumulation, total_batch_size=total)


class Parts(NamedTuple):
    """What `initialize` has built, in the order in which it is closed."""

    hooks: Hooks
    weights: Weights
    bindings: Bindings
    updater: Updater | None
    """None where nothing trains."""
    pager: Pager
    gradients: Gradients
    ranks: Ranks | None
    """None where this process is alone; so are `rounds`."""
    rounds: Rounds | None
    store: Store | None
    queue: SharedQueue | None
    arena: HostArena
    layouts: tuple[UnitLayout, ...]
    trainable: tuple[range, ...]
    """The elements of each unit that this rank updates."""
    held: Held
    written: Written
    """What goes to each drive."""
    timeline: Timeline = OFF
    meter: Meter | None = None
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
            *(() if self.updater is None else (self.updater.close,)),
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
