"""The layer-major schedule: all micro-batches of a step pass through one block before the next block is brought.

    forward     what precedes the blocks of mb 0, 1, …    block 0 of mb 0, 1, …    block 1 of mb 0, 1, …    …
    turn        head and loss of mb 0, and its backward as far as the last block; the same of mb 1; …
    backward    last block of mb 0, 1, …    …    block 0 of mb 0, 1, …

So the weights of a block cross each link twice a step, whatever the number of micro-batches; its gradients are complete
when the last micro-batch has left it; and the logits of one micro-batch exist at a time. Gradients are added up in the
order of the micro-batches, as in a loop: the sums have the same bits.

Each micro-batch waits at the border of a block, on a thread of its own (`micro_batch`), until all others have arrived
there. Hooks on the blocks are the borders: a forward waits before each block and after the last one of a list, a
backward waits before the node of autograd that has made a block's output. Nothing else of the model is known: what it
computes between blocks runs with the block before. A model that calls its blocks in another order for some micro-batch
stays right; its micro-batches then meet at other borders.

Threads. All but the hooks belong to the thread that runs the step. Ctrl-C is obeyed when a micro-batch has reached its
border.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from offload.engine.schedule.generators import MicroBatchGenerators
from offload.engine.schedule.micro_batch import MicroBatch, ThreadSettings
from offload.engine.schedule.passes import Passes
from offload.errors import UsageError
from offload.interrupts import uninterrupted
from offload.swapper.memory.device import Device
from offload.torch_internals import (
    inside_backward,
    outside_of_compiled_code,
    tensors_in,
    top_saved_tensor_hooks,
    under_modes,
)

_T = TypeVar("_T")


class _Local(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.micro_batch: MicroBatch[Any] | None = None
        """The micro-batch to which the thread belongs."""


class LayerMajor:
    """The borders of one model's blocks, and the micro-batches that wait there."""

    def __init__(self, modules: Mapping[str, nn.Module], blocks: Sequence[str], passes: Passes, device: Device) -> None:
        """Installs a border on each block, outside of all hooks that are installed so far, until `remove`.

        Args:
            modules: the modules of the model, by name.
            blocks: names of the repeated blocks, in the order of the model.
            passes: is told that micro-batches take turns.
            device: the compute device.
        """
        self._passes, self._device = passes, device
        self._local = _Local()
        self._waiting: list[MicroBatch[Any]] = []
        """The micro-batches of the step under way."""
        self.turn = 0
        """Number of the micro-batch that runs, in the step under way; 0 outside of one."""
        self._removers: list[Callable[[], None]] = []
        for name, following in zip(blocks, [*blocks[1:], ""], strict=True):
            self._add_border(modules[name], last=_list_of(name) != _list_of(following))

    @property
    def possible(self) -> bool:
        """False where the calling thread has hooks or modes of the user, which other threads would not have."""
        return top_saved_tensor_hooks() is None and not under_modes()

    @property
    def on_this_thread(self) -> bool:
        """True on the thread of a micro-batch."""
        return self._local.micro_batch is not None

    def run(self, works: Sequence[Callable[[], _T]], generators: MicroBatchGenerators) -> list[_T]:
        """Runs the micro-batches of a step, and returns what each returns.

        Args:
            works: run the forward and the backward of a micro-batch each.
            generators: the random generators of each micro-batch.

        Raises:
            UsageError: a signal's handler has entered the engine, which ends the micro-batches.
        """
        settings = ThreadSettings(self._device)
        with self._passes.turns(len(works)):
            self._waiting = [
                MicroBatch(self._as_mine(work), settings, f"offload-micro-batch-{number}")
                for number, work in enumerate(works)
            ]
            try:
                rounds = list(enumerate(self._waiting))
                while rounds:
                    for number, micro_batch in rounds:
                        self._resume(number, micro_batch, generators)
                    rounds = [each for each in rounds if not each[1].ended]
                results = [each.result for each in self._waiting]
            finally:
                self.abandon()
            return results

    @uninterrupted
    def _resume(self, number: int, micro_batch: MicroBatch[_T], generators: MicroBatchGenerators) -> None:
        """Runs one micro-batch up to its next border."""
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
            self._local.micro_batch = self._waiting[self.turn]
            return work()

        return run

    def _add_border(self, module: nn.Module, last: bool) -> None:
        """Installs the hooks of a block; `last` if the block that follows it belongs to another list."""

        def before(called: nn.Module, args: tuple[Any, ...]) -> None:
            if called is module:
                self._wait_in_forward()

        def after(called: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if called is module:
                self._mark(output)
                if last:
                    self._wait_in_forward()

        pre, post = outside_of_compiled_code(before), outside_of_compiled_code(after)
        self._removers.append(module.register_forward_pre_hook(pre, prepend=True).remove)
        self._removers.append(module.register_forward_hook(post).remove)

    def _wait_in_forward(self) -> None:
        """Waits at a border of the forward. A forward inside of a backward, a recomputation, does not wait."""
        micro_batch = self._local.micro_batch
        if micro_batch is not None and not inside_backward():
            micro_batch.pause()

    def _mark(self, output: Any) -> None:
        """Makes the backward wait before it enters the block with this output."""
        micro_batch = self._local.micro_batch
        if micro_batch is None or inside_backward():
            return
        for node in {leaf.grad_fn for leaf in tensors_in(output) if leaf.grad_fn is not None}:
            node.register_prehook(lambda grads: micro_batch.pause())


def _list_of(name: str) -> str:
    """Returns the name of the list of which a block is a member."""
    return name.rpartition(".")[0]
