"""The layer-major schedule: all micro-batches of a step pass through one block before the next block is brought.

    forward     what precedes the blocks of mb 0, 1, …    block 0 of mb 0, 1, …    block 1 of mb 0, 1, …    …
    turn        head and loss of mb 0, and its backward as far as the last block; the same of mb 1; …
    backward    last block of mb 0, 1, …    …    block 0 of mb 0, 1, …

So the weights of a block cross each link twice a step, whatever the number of micro-batches; its gradients are complete
when the last micro-batch has left it; and the logits of one micro-batch exist at a time. Gradients are added up in the
order of the micro-batches, as in a loop: the sums have the same bits.

Each micro-batch waits at the border of a block, on a thread of its own (`micro_batch`), until all others have arrived
there. Hooks on the blocks are the borders: a forward waits before each block and after the last one of a list, a
backward waits before the node of autograd that has made a block's output, or the input of a list. Nothing else of the
model is known: what it computes between blocks runs with the block before. The micro-batch at the earliest border runs
next. So a micro-batch that leaves out a block waits for those that do not, and each block has its micro-batches in
their order.

In the first step the micro-batches pass one after the other while the modules are watched: a model that keeps values
on its modules between blocks (`module_state`) stays with that order. So does one with forward hooks of the user, unless
the config asks for turns by name.

Threads. A micro-batch's forward and backward run on its thread: `EngineCore.run_backward` asks torch for that, which
would run all backwards of a GPU on one thread. All but the hooks belong to the thread that runs the step. Ctrl-C is
obeyed when a micro-batch has reached its border.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

from offload.engine.schedule.generators import MicroBatchGenerators
from offload.engine.schedule.micro_batch import START, Border, MicroBatch, ThreadSettings
from offload.engine.schedule.module_state import ModuleState, foreign_hook
from offload.engine.schedule.passes import Passes
from offload.errors import UsageError
from offload.interrupts import let_deferred_in, uninterrupted
from offload.notices import announce
from offload.swapper.memory.device import Device
from offload.torch_internals import (
    inside_backward,
    outside_of_compiled_code,
    tensors_in,
    top_saved_tensor_hooks,
    under_modes,
)

_T = TypeVar("_T")

_END = 0.5
"""The border behind a block, in blocks after the border before it."""


class _Ends(NamedTuple):
    """Numbers of the first and the last block of a list."""

    first: int
    last: int


class _Local(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.micro_batch: MicroBatch[Any] | None = None
        """The micro-batch to which the thread belongs."""
        self.border = START
        """The last border of its forward."""


class LayerMajor:
    """The borders of one model's blocks, and the micro-batches that wait there."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        blocks: Sequence[str],
        passes: Passes,
        device: Device,
        wanted: bool,
    ) -> None:
        """Installs a border on each block, outside of all hooks that are installed so far, until `remove`.

        Args:
            modules: the modules of the model, by name.
            blocks: names of the repeated blocks, in the order of the model.
            passes: is told that micro-batches take turns.
            device: the compute device.
            wanted: True if the user asks for turns by name.
        """
        self._wanted = wanted
        self._passes, self._device, self._modules = passes, device, modules
        self._local = _Local()
        self._waiting: list[MicroBatch[Any]] = []
        """The micro-batches of the step under way."""
        self.turn = 0
        """Number of the micro-batch that runs, in the step under way; 0 outside of one."""
        self._watched = False
        """True if the first step has shown whether the model keeps values between blocks."""
        self._kept: str | None = None
        """Name of such a value."""
        self._removers: list[Callable[[], None]] = []
        lists = [list(each) for _, each in itertools.groupby(enumerate(blocks), lambda each: _list_of(each[1]))]
        for members in lists:
            for number, name in members:
                self._add_border(modules[name], number, _Ends(members[0][0], members[-1][0]))

    @property
    def takes_turns(self) -> bool:
        """False once a step has shown that the model, or a hook of the user, may keep values between blocks."""
        return self._kept is None

    @property
    def watched(self) -> bool:
        """True once micro-batches take turns from their beginning: an earlier call has shown that they may."""
        return self._watched

    @property
    def possible(self) -> bool:
        """False where micro-batches do not take turns.

        Also where the calling thread has hooks or modes of the user, which other threads would not have.
        """
        return self.takes_turns and top_saved_tensor_hooks() is None and not under_modes()

    @property
    def count(self) -> int:
        """Number of the micro-batches of the step under way."""
        return len(self._waiting)

    @property
    def on_this_thread(self) -> bool:
        """True on the thread of a micro-batch."""
        return self._local.micro_batch is not None

    def run(self, works: Sequence[Callable[[], _T]], generators: MicroBatchGenerators, trains: bool = True) -> list[_T]:
        """Runs the micro-batches of a step, and returns what each returns.

        Args:
            works: run the forward and the backward of a micro-batch each.
            generators: the random generators of each micro-batch.
            trains: False if no work runs a backward.

        Raises:
            UsageError: a signal's handler has entered the engine, which ends the micro-batches.
        """
        settings = ThreadSettings(self._device)
        with self._passes.turns(len(works), trains):
            self._waiting = waiting = [
                MicroBatch(self._as_mine(work), settings, f"offload-micro-batch-{number}")
                for number, work in enumerate(works)
            ]
            try:
                if not self._watched:
                    self._run_one_by_one(generators)
                    self._mind_hooks()
                while running := [each for each in enumerate(waiting) if not each[1].ended]:
                    number, micro_batch = min(running, key=lambda each: (each[1].border, each[0]))
                    self._resume(number, micro_batch, generators)
                return [each.result for each in waiting]
            finally:
                self.abandon()

    def _mind_hooks(self) -> None:
        """Reports a forward hook of the user, which may keep values where other micro-batches find them."""
        name = None if self._kept is not None else foreign_hook(self._modules)
        if name is None:
            return
        what = f"a forward hook of yours on {name} may keep values between two blocks, where another micro-batch finds"
        if self._wanted:
            announce(f'{what} them: if it does, set "schedule" to "micro_batch_major"')
        else:
            self._kept = "a hook"
            announce(
                f"micro-batches pass through the model one after the other: {what} them. If it keeps none, set "
                '"schedule" to "layer_major"'
            )

    def _run_one_by_one(self, generators: MicroBatchGenerators) -> None:
        """Runs the micro-batches one after the other, and watches the modules during the second one's forward."""
        state = ModuleState(self._modules)
        for number, micro_batch in enumerate(list(self._waiting)):
            with state.watching() if number == 1 else contextlib.nullcontext():
                while not micro_batch.ended and not micro_batch.border.backward:
                    self._resume(number, micro_batch, generators)
                    if number == 1 and not (micro_batch.ended or micro_batch.border.backward) and self._kept is None:
                        self._kept = state.changed()
            while not micro_batch.ended:
                self._resume(number, micro_batch, generators)
        self._watched = True
        if self._kept is not None:
            announce(
                f"micro-batches pass through the model one after the other: it keeps {self._kept} on a module between "
                "two blocks, where another micro-batch would find it"
            )

    @uninterrupted
    def _resume(self, number: int, micro_batch: MicroBatch[_T], generators: MicroBatchGenerators) -> None:
        """Runs one micro-batch up to its next border, after the handlers of signals that came meanwhile."""
        let_deferred_in()
        if not self._waiting:
            raise UsageError("the engine was called within a step of several micro-batches, which has ended them")
        self.turn = number
        with generators.of(number):
            micro_batch.resume()

    @uninterrupted
    def abandon(self) -> None:
        """Ends the micro-batches that wait at a border. Idempotent."""
        while self._waiting:
            self._waiting[-1].abandon()
            self._waiting.pop()
        self.turn = 0

    def abandon_on_entry(self) -> None:
        """Ends micro-batches that wait while the thread that runs them enters the engine, in a signal's handler."""
        if self._waiting and self._passes.thread is threading.current_thread():
            self.abandon()

    def remove(self) -> None:
        """Removes the borders. Idempotent."""
        self.abandon()
        while self._removers:
            self._removers.pop()()

    # -- the thread of a micro-batch ----------------------------------------------------------------

    def _as_mine(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Returns `work`, during which the calling thread belongs to its micro-batch."""

        def run() -> _T:
            self._local.micro_batch, self._local.border = self._waiting[self.turn], START
            return work()

        return run

    def _add_border(self, module: nn.Module, number: int, ends: _Ends) -> None:
        """Installs the hooks of a block.

        Args:
            module: the block.
            number: its number.
            ends: of its list.
        """

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is module:
                begins = self._local.border.block % 1 != 0 or self._local.border is START
                self._wait_in_forward(number)
                if begins:  # what precedes the blocks has its micro-batches in their order too
                    self._mark((args, kwargs), ends.first - _END)

        def after(called: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if called is module:
                self._mark(output, number)
                if number == ends.last:
                    self._wait_in_forward(number + _END)

        pre, post = outside_of_compiled_code(before), outside_of_compiled_code(after)
        self._removers.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(post).remove)

    def _wait_in_forward(self, block: float) -> None:
        """Waits at a border of the forward. A forward inside of a backward, a recomputation, does not wait."""
        local = self._local
        if local.micro_batch is None or inside_backward():
            return
        passed = local.border.passed + (block <= local.border.block)
        local.border = Border(False, max(passed, 0), block)
        local.micro_batch.pause(local.border)

    def _mark(self, tensors: Any, number: float) -> None:
        """Makes the backward wait before it enters what has made these tensors: the block with this number."""
        micro_batch = self._local.micro_batch
        if micro_batch is None or inside_backward():
            return
        border = Border(True, -self._local.border.passed, -number)
        for node in {leaf.grad_fn for leaf in tensors_in(tensors) if leaf.grad_fn is not None}:
            node.register_prehook(lambda grads: micro_batch.pause(border))


def _list_of(name: str) -> str:
    """Returns the name of the list of which a block is a member."""
    return name.rpartition(".")[0]
