"""A backend of torch.distributed between ranks that compute on one accelerator: through the host, behind streams.

    register("test")      before the engine's groups are made: `device_backend` finds the backend then

NCCL wants an accelerator for each rank, and none knows the test device. This backend keeps NCCL's promises to streams,
and no more, so that an engine that relies on more shows other bits:

* A collective reads once the work that its thread's stream had at the call is done, and not before. It reads late: the
  input may not change until a stream waits for the collective.
* It fills the output by work of a stream of its own. `Work.wait()` makes the current stream wait for that, not the host
  (but for the time that the messages themselves take, since they are gloo's).
* Collectives of a group are carried out one after the other, in the order of the calls.
"""

from __future__ import annotations

import datetime
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

NAME = "hosted"
LATEST = 0.002
"""Seconds that a collective begins after its call, at most: drawn for each."""


class HostedWork(dist.distributed_c10d.Work):  # type: ignore[misc]
    """A collective under way."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._ended = threading.Event()
        self._filled = torch.Event(device)
        self._error: BaseException | None = None

    def run(self, act: Callable[[], None], stream: torch.Stream) -> None:
        """Carries the collective out, on the group's thread."""
        try:
            act()
            self._filled.record(stream)
        except BaseException as error:
            self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set() and (self._error is not None or bool(self._filled.query()))

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Makes the current stream wait; raises RuntimeError after the timeout, or if the collective has failed."""
        # torch's own code says zero for no limit.
        if not self._ended.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError(f"the collective has not ended within {timeout}")
        if self._error is not None:
            raise RuntimeError(f"the collective has failed: {self._error}") from self._error
        torch.accelerator.current_stream(self._device).wait_event(self._filled)
        return True


class Hosted(dist.ProcessGroup):
    """A group of ranks, with those collectives that an engine has between devices."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._messages = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._draw = random.Random(rank)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.Stream] = {}
        threading.Thread(target=self._serve, name="collectives", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _start(
        self, sent: torch.Tensor, filled: torch.Tensor, messages: Callable[[torch.Tensor, torch.Tensor], Any]
    ) -> HostedWork:
        """Starts a collective that sends `sent` and fills `filled`; `messages` are gloo's, between copies of both."""
        device = filled.device
        work, ready = HostedWork(device), torch.Event(device)
        ready.record(torch.accelerator.current_stream(device))
        stream = self._streams.setdefault(device, torch.Stream(device))
        late = self._draw.random() * LATEST

        def act() -> None:
            time.sleep(late)
            with stream:
                stream.wait_event(ready)
                mine = sent.to("cpu")  # waits for the stream
                out = mine if filled is sent else torch.empty(filled.shape, dtype=filled.dtype)
                messages(out, mine).wait()
                if out.numel():
                    filled.copy_(out)

        self._calls.put(lambda: work.run(act, stream))
        return work

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> HostedWork:  # type: ignore[override]
        (values,) = tensors
        return self._start(values, values, lambda out, _: self._messages.allreduce([out], options))

    def _allgather_base(self, filled: torch.Tensor, mine: torch.Tensor, options: Any = None) -> HostedWork:  # type: ignore[override]
        return self._start(mine, filled, lambda out, part: self._messages._allgather_base(out, part))

    all_gather_single = _allgather_base

    def alltoall_base(  # type: ignore[override]
        self, filled: torch.Tensor, sent: torch.Tensor, outs: list[int], ins: list[int], options: Any = None
    ) -> HostedWork:
        return self._start(sent, filled, lambda out, part: self._messages.alltoall_base(out, part, outs, ins))

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        self._calls.put(None)

    abort = shutdown


def register(device_type: str) -> None:
    """Makes this the backend of torch for tensors on that type of device, for good."""
    dist.Backend.register_backend(NAME, Hosted, devices=[device_type])
