"""A micro-batch that runs until the next border of a block and waits there until it is resumed.

    owner's thread     resume ─► waits ─────────────────────► resume ─► …       one of all these threads runs at a time
    micro-batch's      ........ ► forward up to a border: pause ....... ► …

A micro-batch has a thread of its own because its place between two blocks is a stack: of the model's Python code in a
forward, of autograd's engine in a backward. So masks, positions and whatever else a model passes to its blocks stay
where the model keeps them, and no code of the model is known or changed. A border is a border of the forward or of the
backward alike.

torch keeps settings by thread: a micro-batch's thread takes over those of its owner (`ThreadSettings`).
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch

from offload.engine.schedule.openmp import end_team
from offload.errors import UsageError
from offload.swapper.memory.device import Device

_T = TypeVar("_T")


class Abandoned(Exception):
    """Ends a micro-batch at a border: its step will not be completed.

    An `Exception`, since torch runs the last hooks of a module after no other `BaseException`.
    """


class ThreadSettings:
    """Settings of torch that belong to a thread, as those of the thread that constructs the object."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        kinds = dict.fromkeys(("cpu", device.torch.type))
        self._autocasts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._stream = None
        if device.torch.type not in ("cpu", "meta"):
            self._stream = torch.accelerator.current_stream(device.torch)

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Applies the settings to the calling thread, which is a new one."""
        self._device.enter_thread(computes=True)
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        with contextlib.ExitStack() as entered:
            entered.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocasts:
                entered.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            yield


class Border(NamedTuple):
    """A place in a micro-batch's forward or backward; borders are in the order in which they are reached."""

    backward: bool
    passed: float
    """How often the model has gone back to an earlier block; in the backward the negative of it."""
    block: float
    """Number of the block that comes next, or its negative in the backward; the end of a list is half a block later."""


START = Border(False, -1, -1)


class MicroBatch(Generic[_T]):
    """One micro-batch in flight. `resume` and `abandon` belong to the owner's thread, `pause` to the micro-batch's."""

    def __init__(self, work: Callable[[], _T], settings: ThreadSettings, name: str) -> None:
        """Starts nothing before the first `resume`.

        Args:
            work: runs the forward and the backward.
            settings: of the owner's thread.
            name: name of the thread.
        """
        self._work, self._settings = work, settings
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False
        self.border = START
        """Where it waits."""
        self.ended = False
        self._result: list[_T] = []
        self._error: BaseException | None = None
        # Variables of a context, such as those in which transformers collects outputs, are each micro-batch's own.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._started = False

    @property
    def result(self) -> _T:
        """What the work has returned. The micro-batch must have ended without an error."""
        return self._result[0]

    def resume(self) -> None:
        """Runs the micro-batch up to its next border, or to its end. Raises what the work has raised."""
        if not self._started:
            self._thread.start()
            self._started = True
        end_team()
        self._may_run.release()
        self._has_stopped.acquire()
        if self.ended:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # a cycle of this frame and the error's would hold the graph until Python looks for cycles

    def abandon(self) -> None:
        """Ends the micro-batch where it waits, and joins its thread. Idempotent. Errors of the end are ignored."""
        self._abandoned = True
        while self._started and not self.ended:
            with contextlib.suppress(BaseException):  # the step has failed already, by another error
                self.resume()

    def pause(self, border: Border) -> None:
        """Waits at a border until `resume`.

        Raises:
            Abandoned: the micro-batch must end here.
            UsageError: the calling thread is another micro-batch's, whose backward has come into this one's graph.
        """
        if threading.current_thread() is not self._thread:
            raise UsageError(
                "the backward of one micro-batch has come to a block of another, whose values it uses: something, such "
                "as a forward hook of yours, keeps values where other micro-batches find them. Set "
                '"schedule": "micro_batch_major" in the "offload" block, or keep them by thread (threading.local)'
            )
        self.border = border
        if not self._abandoned:
            end_team()
            self._has_stopped.release()
            self._may_run.acquire()
        if self._abandoned:
            raise Abandoned

    def _run(self) -> None:
        """Runs the work on the micro-batch's thread."""
        self._may_run.acquire()
        try:
            with self._settings.on_this_thread():
                self._result.append(self._work())
        except BaseException as error:
            self._error = error
        self.ended = True
        self._has_stopped.release()
