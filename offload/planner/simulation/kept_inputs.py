"""The inputs of repeated blocks in a simulation: they leave the device in the forward and return for the backward.

    forward     device ──download──► host ──write──► drive     from the start of the next block on
    backward    device ◄──upload─── host ◄──read──── drive     one block ahead, reads two more

An input waits for the download of the one before, and for a buffer if it goes to a drive. A CPU makes no copies: its
device memory is host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from offload.aio import Priority
from offload.planner.simulation.clock import Work
from offload.planner.simulation.machine import Acting, Machine, until

_BUFFERS = 4
"""Inputs that may be on their way to a drive at a time."""
_READ_AHEAD = 2
"""Inputs that are read before the backward needs them, beside the one that is uploaded."""


class Input(NamedTuple):
    """Bytes of a block's input, and where they wait for the backward."""

    nbytes: int = 0
    on_disk: bool = False


class _Leaving(NamedTuple):
    """An input on its way to a drive."""

    unit: int
    nbytes: int
    copied: Work | None
    """Copy to the host buffer; None if there is none to make."""


class SimulatedInputs:
    """Moves of the inputs, in the order of the uses of one step."""

    def __init__(self, uses: Sequence[tuple[int, Input, Input]], machine: Machine) -> None:
        self._uses, self._machine = uses, machine
        self._next = _following(uses)
        self._reads: dict[int, Work] = {}
        self._uploads: dict[int, Work] = {}
        """Reads and copies that were started, by the position of the use that needs them."""
        self._download: Work | None = None
        self._unwritten: deque[_Leaving] = deque()
        self._writes: deque[Work] = deque()

    def before(self, position: int) -> Acting[None]:
        """Starts the moves that begin with a use, and waits for those that it needs."""
        unit, sends, receives = self._uses[position]
        self._write_copied()
        if sends.nbytes:
            yield from self._send(unit, sends)
        if receives.nbytes:
            yield from self._receive(position)

    def _send(self, unit: int, input_: Input) -> Acting[None]:
        """Starts the move of an input from the device, once there is room for it."""
        if not self._machine.on_cpu:
            yield from self._machine.counted("upload", until(self._download))
            self._download = self._machine.download("input download", unit, input_.nbytes)
        if input_.on_disk:
            self._unwritten.append(_Leaving(unit, input_.nbytes, self._download))
            self._write_copied()
            while len(self._writes) >= _BUFFERS:
                yield from self._machine.counted("read", until(self._writes.popleft()))

    def _write_copied(self) -> None:
        while self._unwritten and (self._unwritten[0].copied is None or self._unwritten[0].copied.done):
            each = self._unwritten.popleft()
            self._writes.append(self._machine.write("input write", "inputs_written", each.unit, each.nbytes))
        while self._writes and self._writes[0].done:
            self._writes.popleft()

    def _receive(self, position: int) -> Acting[None]:
        if position not in self._uploads:
            self._read(position)
            yield from self._machine.counted("read", until(self._reads.get(position)))
            self._upload(position)
        ahead: int | None = position
        for count in range(1 + _READ_AHEAD):
            ahead = self._next.get(ahead) if ahead is not None else None
            if ahead is not None:
                self._read(ahead)
                work = self._reads.get(ahead)
                if count == 0 and (work is None or work.done):
                    self._upload(ahead)
        yield from self._machine.counted("upload", until(self._uploads.pop(position)))
        self._reads.pop(position, None)

    def _read(self, position: int) -> None:
        """Starts to read an input that waits on a drive, unless it is read already."""
        unit, _, input_ = self._uses[position]
        if input_.on_disk and position not in self._reads:
            self._reads[position] = self._machine.read(
                "input read", "inputs_read", unit, input_.nbytes, Priority.NORMAL
            )

    def _upload(self, position: int) -> None:
        """Starts to copy an input to the device, unless it is on its way already. A CPU has nothing to copy."""
        unit, _, input_ = self._uses[position]
        if position not in self._uploads:
            nbytes = 0 if self._machine.on_cpu else input_.nbytes
            self._uploads[position] = self._machine.upload(unit, nbytes, "input upload")


def _following(uses: Sequence[tuple[int, Input, Input]]) -> dict[int, int]:
    """Returns for each use that needs an input the next one of the same backward."""
    found: dict[int, int] = {}
    before: int | None = None
    for position, (_, sends, receives) in enumerate(uses):
        if sends.nbytes:  # another forward, whose inputs do not exist yet
            before = None
        if receives.nbytes:
            if before is not None:
                found[before] = position
            before = position
    return found
