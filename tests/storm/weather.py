"""What disturbs a life: drives that are late, fail, rot, are full or lose power, kills and Ctrl-C.

Moments are counted, not timed: each request to a drive and each deed of the loop is a tick, and a fault comes with the
tick of its number, in whichever thread that is. A delay behind it lets it fall between two ticks.

A power cut needs everything that was written to the drives: the life then runs under `write_recorder`, and the cut
leaves an image in a file, which the trial puts in the place of the run's folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload.aio import File, IoFuture
from offload.errors import IoError
from tests.storm.plan import Fault, Plan
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.drives.power_cut import Cut, Disk, Event, everything, nothing, some, some_events
from tests.support.drives.rot import KINDS as ROT
from tests.support.drives.rot import Rot
from tests.support.drives.write_recorder import Recorder

IMAGE = "image.pickle"
"""What a power cut has left."""


class Weather:
    """The weather of one life. `tick` is called by any thread; all else by the one that made it."""

    def __init__(self, plan: Plan, number: int, folder: Path, *, spared: bool = False) -> None:
        """Prepares the weather of life `number`, whose drives are under `folder`; `spared` leaves its fault out."""
        self.fault: Fault | None = plan.faults[number] if number < len(plan.faults) and not spared else None
        self.device = None if plan.late_device is None else LateDevice(plan.seed + number, plan.late_device)
        self._plan, self._number, self._folder = plan, number, folder
        self._lock, self._ticks = threading.Lock(), 0
        self._failed = False
        self._recorder: _SharedRecorder | None = None
        self.rot: Rot | None = None
        if self.fault is not None and self.fault.what in ROT:
            self.rot = Rot(self.fault.what, plan.seed, self._is_rotten, folder)

    @contextlib.contextmanager
    def over(self, patches: pytest.MonkeyPatch) -> Iterator[None]:
        """Lets the engine that is made inside meet this weather."""
        with contextlib.ExitStack() as stack:
            if self.fault is not None and self.fault.what == "power":
                self._folder.mkdir(parents=True, exist_ok=True)
                self._recorder = _SharedRecorder(self._folder)
                stack.enter_context(self._recorder.recording())
            use_queue(patches, lambda: _StormQueue(self, self._plan, self._number, self._recorder))
            if self.device is not None:
                use_device(patches, self.device)
            yield

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which operations of torch are compute of the device, once the engine is there."""
        return contextlib.nullcontext() if self.device is None else Ticks(self.device)

    def tick(self) -> None:
        """Counts a moment, and lets the fault come with its own."""
        with self._lock:
            self._ticks += 1
            due = self.fault is not None and self._ticks == self.fault.after
        if due:
            assert self.fault is not None
            if self.fault.delay:
                threading.Timer(self.fault.delay, self._strike).start()
            else:
                self._strike()

    def refuses(self, operation: str) -> int:
        """Returns the error number of a request of this kind, once; 0 if it may go on."""
        if self.fault is None or self.fault.what not in ("error", "full"):
            return 0
        if self.fault.what == "full" and operation != "write":
            return 0
        with self._lock:
            if self._failed or self._ticks < self.fault.after:
                return 0
            # A full drive stays full.
            self._failed = self.fault.what == "error"
            return errno.EIO if self.fault.what == "error" else errno.ENOSPC

    def _is_rotten(self, _operation: str) -> bool:
        """Returns True once the drive may change what it has."""
        return self.fault is not None and self._ticks >= self.fault.after

    def _strike(self) -> None:
        assert self.fault is not None
        if self.fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault.what == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif self._recorder is not None:
            # The process goes on until it is killed, and may end steps that the image cannot have. Only runs of one
            # rank meet a power cut.
            with (self._folder.parent / "log.0.jsonl").open("a") as log:
                print(json.dumps(["cut", -1]), file=log)
            image = self._recorder.image(_cut(random.Random(f"{self._plan.seed} {self._number}")))
            part = self._folder.parent / f"{IMAGE}.part"
            part.write_bytes(pickle.dumps(image))
            part.rename(self._folder.parent / IMAGE)
            os.kill(os.getpid(), signal.SIGKILL)


def _cut(chance: random.Random) -> Cut:
    share = chance.choice([0.1, 0.5, 0.9])
    return chance.choice([everything, nothing, some(chance, share), some_events(chance, share)])


class _StormQueue(LateQueue):
    """A queue whose requests are late, are counted, and fail as the weather says."""

    def __init__(self, weather: Weather, plan: Plan, number: int, recorder: _SharedRecorder | None) -> None:
        super().__init__(plan.seed + number, plan.late_io)
        self._weather, self._recorder = weather, recorder

    def _carry_out(self, operation: str, file: File, offset: int, buffer: memoryview) -> IoFuture:
        self._weather.tick()
        number = self._weather.refuses(operation)
        if number:
            raise IoError(str(file.path), offset, len(buffer), number, operation)
        if self._weather.rot is not None:
            return self._weather.rot.carry_out(self._inner, operation, file, offset, buffer)
        if self._recorder is None or operation == "read":
            return super()._carry_out(operation, file, offset, buffer)
        with self._recorder.writing(file, offset, buffer):
            return super()._carry_out(operation, file, offset, buffer)


class _SharedRecorder(Recorder):
    """A recorder that several threads reach, and from which an image can be taken at any moment.

    A write is recorded when it has ended, since a sync before that does not cover it. One that is under way at a cut
    may have reached the drive in part.
    """

    def __init__(self, root: Path) -> None:
        self._guard = threading.RLock()
        self._under_way: dict[int, list[tuple[int, int, bytes]]] = {}
        super().__init__(root)

    def add(self, what: str, *arguments: Any) -> None:
        with self._guard:
            super().add(what, *arguments)

    @contextlib.contextmanager
    def writing(self, file: File, offset: int, buffer: memoryview) -> Iterator[None]:
        """Records a write that is carried out inside."""
        pieces, at = [], 0
        for piece in file.pieces(offset, len(buffer)):
            number = self._open.get(piece.buffered)
            if number is not None:
                pieces.append((number, piece.offset, bytes(buffer[at : at + piece.nbytes])))
            at += piece.nbytes
        with self._guard:
            self._under_way[id(pieces)] = pieces
        yield
        with self._guard:
            for number, start, data in self._under_way.pop(id(pieces)):
                self.add("write", number, start, data)

    def image(self, cut: Cut) -> Any:
        """Returns what a power cut leaves now."""
        with self._guard:
            disk = Disk()
            for event in self.log:
                disk.carry_out(event)
            for pieces in self._under_way.values():
                for number, start, data in pieces:
                    disk.carry_out(Event("write", (number, start, data), ""))
            return disk.image(cut)
