"""The micro-batches of a step: their order through the model, and their random generators.

`PassSchedule` runs the micro-batches one after the other. `engine/assembly.py` may choose one of two other schedules:

    `passes.layer_major`     all micro-batches pass through one block before the next block is fetched
    `parallel.stage_run`     `torch.distributed.pipelining` runs the micro-batches through the stages of a pipeline
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
"""Takes a number of micro-batches that take turns. Within the context all their forwards count as one, and all their
backwards as one."""

# -- schedule ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageCalls:
    """The functions of the engine that the stages of a pipeline call."""

    accumulation: Callable[[], int]
    """Returns the number of micro-batches of a step."""
    divided: Callable[[torch.Tensor], torch.Tensor]
    """Takes the loss of a micro-batch. Returns it divided by the accumulation and, in fp16, times the loss scale."""
    run_backward: Callable[[Callable[[], None]], None]
    """Runs the backward of a stage. The argument is the function that starts this backward."""
    count_micro_batch: Callable[[], None]
    """Counts one micro-batch. Called when all stages of this process have run its backward."""


class PassSchedule(Extension):
    """Runs micro-batches one after the other, each with its forward and its backward.

    Only the thread that runs the step calls `run`. Threads of a forward or a backward read the properties.
    """

    counts_backwards = True
    """True if the engine counts micro-batches by the user's backwards. False if a schedule runs the backwards."""
    allows_turns: bool | None = None
    """What the first step of the run has shown: whether micro-batches may take turns. None before.

    Commits contain it, since turns decide in which order ranks add gradients.
    """

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
        """Index of the running micro-batch in the step; 0 if no micro-batches take turns."""
        return 0

    @property
    def leaves_block(self) -> bool:
        """True if the running micro-batch is the last one to pass its block, or if no micro-batches take turns."""
        return True

    @property
    def on_this_thread(self) -> bool:
        """True on the thread of a micro-batch that takes turns with others."""
        return False

    @property
    def trial(self) -> bool:
        """True if the next step runs micro-batches one by one to learn whether they may take turns."""
        return False

    def run(self, works: Iterable[Callable[[], _T]], generators: MicroBatchGenerators, turns: Turns) -> list[_T]:
        """Runs the forward and the backward of every micro-batch, and returns their results.

        A schedule that lets micro-batches take turns enters `turns`.
        """
        return [generators.run(number, work) for number, work in enumerate(works)]

    def go_on(self, allows_turns: bool | None) -> list[str]:
        """Receives what the first step of a resumed run has shown. Returns notices for the user."""
        self.allows_turns = allows_turns
        return []

    def ran_by_itself(self) -> None:
        """Receives that the user's loop has run one of several micro-batches of a step by itself."""

    def begin_backward(self) -> None:
        """Receives that a backward begins. Raises `UsageError` if this schedule runs the backwards itself."""

    def begin_step(self, count: int, micro_batches: int, access: ParamAccess) -> None:
        """Completes the gradients of a step before `step()` reads them.

        The step has `micro_batches` micro-batches, of which `count` have run.
        """

    def forget(self) -> None:
        """Forgets the micro-batches since the last step. The caller drops their gradients."""

    def end_step(self) -> None:
        """Receives that a step has been applied."""

    def pipeline_stages(self, device: torch.device, calls: StageCalls) -> list[Any]:
        """Returns the stages of a pipeline in this process; see `Engine.pipeline_stages`."""
        raise UsageError(
            "pipeline_stages() needs an engine over stages of a pipeline: give initialize "
            "model=offload.PipelineStages({index: module}, num_stages, group)"
        )

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        """Installs hooks on `modules`, given by name. The hooks run outside of all hooks that are installed so far."""

    def remove(self) -> None:
        """Removes the hooks of `install`. Idempotent."""


# -- generators ----------------------------------------------------------------------------------------
#
# Every micro-batch of a step has random generators of its own, so dropout draws the same masks in every order of the
# micro-batches. The first micro-batch continues torch's generators. Each further micro-batch begins with a seed, and
# torch's CPU generator draws all seeds before the step. After the step, torch's generators are where the first
# micro-batch has left them. A step of one micro-batch draws no seed.


_States = tuple[torch.Tensor, torch.Tensor | None]
"""State of torch's CPU generator, and state of the device's generator. The latter is None if the device is the CPU."""


class MicroBatchGenerators:
    """The generators of one step's micro-batches. Belongs to the thread that runs the step."""

    def __init__(self, device: torch.device, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        """Upper bound on the number of micro-batches."""
        self._device = None if device.type in ("cpu", "meta") else device
        self._seeds = torch.randint(1 << 62, (micro_batches - 1,), dtype=torch.int64, device="cpu").tolist()
        self._states: list[_States | None] = [None] * micro_batches

    @contextlib.contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Sets torch's generators to the states of a micro-batch within the context.

        A further context of the same micro-batch continues where the last one ended.
        """
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
        """Runs `work` with the generators of a micro-batch, and returns its result."""
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
