"""Backwards on a thread of their own, as torch runs those of a GPU, while the caller waits inside of C++.

torch gives the nodes of a CPU to the thread that calls `backward`, and those of a GPU to a thread of its own, one for
each device: hooks, unpacking of saved tensors and recomputations run there, and no handler of a signal runs meanwhile,
since the main thread executes no Python. Here one raw thread per process stands for torch's.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from offload.torch_internals import top_saved_tensor_hooks

_RUN = autograd._engine_run_backward
"""torch's own, also where a test has replaced it already."""
_Work = Callable[[], None]
_queues: dict[int, queue.SimpleQueue[_Work]] = {}
"""What the thread shall run, by process: a forked child has no such thread."""


def use_backward_thread(
    monkeypatch: pytest.MonkeyPatch, always: bool = True, hand_over: Callable[[_Work], None] | None = None
) -> None:
    """Runs backwards on another thread than their callers'.

    Args:
        monkeypatch: ends it.
        always: False leaves a backward on the caller's thread where the caller has asked torch for that, by
            `torch.autograd.set_multithreading_enabled(False)`.
        hand_over: runs what it is given on another thread, and returns when it has ended; None for that of all tests.
    """
    run = on_another_thread(_RUN, always, hand_over or _hand_over)
    monkeypatch.setattr(autograd, "_engine_run_backward", run)


def on_another_thread(run: Callable[..., Any], always: bool, hand_over: Callable[[_Work], None]) -> Callable[..., Any]:
    """Returns torch's `run`, which starts a graph task, on another thread; see `use_backward_thread`."""

    def start(*args: Any, **kwargs: Any) -> Any:
        # A backward within a backward, as of a reentrant checkpoint, stays on the device's thread.
        if torch._C._current_graph_task_id() != -1 or not (always or torch._C._is_multithreading_enabled()):
            return run(*args, **kwargs)
        modes = _get_current_dispatch_mode_stack()
        hooks = top_saved_tensor_hooks()
        result: list[Any] = []
        error: list[BaseException] = []

        def work() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    # torch hands these on to its thread as well.
                    for mode in modes:
                        stack.enter_context(mode)
                    if hooks is not None:
                        stack.enter_context(saved_tensors_hooks(*hooks))
                    result.append(run(*args, **kwargs))
            except BaseException as caught:
                error.append(caught)

        hand_over(work)
        if error:
            raise error.pop()
        return result.pop()

    return start


def _hand_over(work: _Work) -> None:
    """Runs `work` on this process's thread, and waits for its end."""
    done: torch.futures.Future[None] = torch.futures.Future()

    def run() -> None:
        work()
        done.set_result(None)

    interrupts: list[KeyboardInterrupt] = []
    _queue().put(run)
    while not done.done():
        try:
            done.wait()  # in C++, as torch's own wait: Ctrl-C is handled when it returns
        except KeyboardInterrupt as caught:  # it came before the wait began, or as it ended
            interrupts.append(caught)
    if interrupts:
        raise interrupts.pop()


def _queue() -> queue.SimpleQueue[_Work]:
    """Returns the queue of this process's thread, which is started with its first use."""
    if os.getpid() not in _queues:
        mine = _queues[os.getpid()] = queue.SimpleQueue[_Work]()

        def serve() -> None:
            while True:
                mine.get()()

        # A raw thread, as torch's: `threading` does not count it, and nothing joins it.
        _thread.start_new_thread(serve, ())
    return _queues[os.getpid()]
