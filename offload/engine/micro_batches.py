"""The micro-batches of a step: their order through the model, and their random generators.

`PassSchedule` runs them one after the other. Features replace it, and the assembly of an engine chooses:

    `passes.layer_major`     all micro-batches pass through one block before the next block is fetched
    `parallel.stage_run`     a schedule of `torch.distributed.pipelining` runs them through the stages of a pipeline
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from offload.engine.callbacks import Extension
from offload.errors import UsageError
from offload.layout.pass_order import MICRO_BATCH_MAJOR, Schedule

if TYPE_CHECKING:
    from offload.engine.access import ParamAccess

_T = TypeVar("_T")

Turns = Callable[[int], AbstractContextManager[None]]
"""Makes the forwards and backwards of so many micro-batches, within the context, one forward and one backward."""

# -- schedule ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageCalls:
    """The engine as the stages of a pipeline see it."""

    accumulation: Callable[[], int]
    """Returns the number of micro-batches of a step."""
    divided: Callable[[torch.Tensor], torch.Tensor]
    """Returns the loss of a micro-batch as its backward begins with it: divided, and scaled in fp16."""
    run_backward: Callable[[Callable[[], None]], None]
    """Runs the backward of a stage, which its argument begins."""
    count_micro_batch: Callable[[], None]
    """Counts a micro-batch whose backwards all stages have run."""


class PassSchedule(Extension):
    """Runs micro-batches one after the other, each with its forward and its backward.

    `run` belongs to the thread that runs the step. A forward's and a backward's threads read the properties.
    """

    counts_backwards = True
    """True if each backward of the user is a micro-batch, or one of several of a micro-batch."""

    @property
    def name(self) -> Schedule:
        """Name of the order, as the config spells it."""
        return MICRO_BATCH_MAJOR

    @property
    def interleaves(self) -> bool:
        """True while several micro-batches take turns at each block."""
        return False

    @property
    def micro_batch(self) -> int:
        """Number of the running micro-batch among those that take turns; 0 if none do."""
        return 0

    @property
    def leaves_block(self) -> bool:
        """True if no other micro-batch that is under way comes to the block of the running one."""
        return True

    @property
    def on_this_thread(self) -> bool:
        """True on a thread that belongs to one of several micro-batches that take turns."""
        return False

    @property
    def trial(self) -> int:
        """Number of micro-batches that run one by one to show whether further ones may take turns; 0 for none."""
        return 0

    def run(self, works: Iterable[Callable[[], _T]], generators: MicroBatchGenerators, turns: Turns) -> list[_T]:
        """Runs the forward and the backward of every micro-batch, and returns their results.

        A schedule that lets micro-batches take turns enters `turns`.
        """
        return [generators.run(number, work) for number, work in enumerate(works)]

    def check_backward(self) -> None:
        """Raises `UsageError` if a schedule runs the backwards, and not the user."""

    def begin_step(self, count: int, micro_batches: int, access: ParamAccess) -> None:
        """Completes the gradients of a step of `micro_batches` before they are read; `count` of them have run."""

    def forget(self) -> None:
        """Forgets the micro-batches since the last step, whose gradients are dropped."""

    def pipeline_stages(self, device: torch.device, calls: StageCalls) -> list[Any]:
        """Returns the stages of a pipeline in this process; see `Engine.pipeline_stages`."""
        raise UsageError(
            "pipeline_stages() needs an engine over stages of a pipeline: give initialize "
            "model=offload.PipelineStages({index: module}, num_stages, group)"
        )

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        """Installs hooks on the modules of the model, by name, outside of all that are installed so far."""

    def remove(self) -> None:
        """Removes the hooks of `install`. Idempotent."""


# -- generators ----------------------------------------------------------------------------------------
#
# Every micro-batch of a step has its random generators. Dropout then draws the same masks in whatever order
# micro-batches pass through the units. The first micro-batch continues torch's generators as they are; each further one
# begins with a seed that torch's CPU generator draws before. Afterwards torch's generators are where the first
# micro-batch has left them. A step of one micro-batch draws no seed.


_States = tuple[torch.Tensor, torch.Tensor | None]
"""States of torch's generators: that of the CPU, and that of the device; None where the two are one."""


class MicroBatchGenerators:
    """The generators of one step's micro-batches. Belongs to the thread that runs the step."""

    def __init__(self, device: torch.device, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        """Number of micro-batches, or more."""
        self._device = None if device.type in ("cpu", "meta") else device
        self._seeds = torch.randint(1 << 62, (micro_batches - 1,), dtype=torch.int64, device="cpu").tolist()
        self._states: list[_States | None] = [None] * micro_batches

    @contextlib.contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Makes torch's generators those of a micro-batch; may be entered again, to continue where it ended."""
        outside = self._read()
        states = self._states[micro_batch]
        if states is not None:
            self._put(states)
        elif micro_batch:
            torch.manual_seed(self._seeds[micro_batch - 1])
        try:
            yield
        finally:
            self._states[micro_batch] = self._read()
            if micro_batch:
                self._put(outside)

    def run(self, micro_batch: int, work: Callable[[], _T]) -> _T:
        """Returns the result of `work`, during which torch's generators are those of a micro-batch."""
        with self.of(micro_batch):
            return work()

    def _read(self) -> _States:
        if self._device is None:
            return torch.get_rng_state(), None
        return torch.get_rng_state(), torch.get_device_module(self._device).get_rng_state(self._device)

    def _put(self, states: _States) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)
