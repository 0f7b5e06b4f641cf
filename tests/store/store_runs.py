"""Runs of the store that write, commit, start over and remove, and the contents that each commit holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.states import State
from offload.swapper.store import Store, StoreSpec

PAGE = 4096

SPEC = StoreSpec(
    (
        {State.WEIGHT: 8192, State.EXP_AVG: 8192},
        {State.WEIGHT: 8192, State.EXP_AVG: 4096},  # the second half of the weight is frozen
        {State.WEIGHT: 4096},  # frozen
    ),
    2,
    {"model": "test"},
    frozen=(0, 4096, 4096),
)

TRAINABLE = {0: {State.WEIGHT: 8192, State.EXP_AVG: 8192}, 1: {State.WEIGHT: 4096, State.EXP_AVG: 4096}}

Contents = dict[tuple[int, State], bytes]
"""The newest copy of everything."""


def label_of(contents: dict[str, torch.Tensor]) -> str:
    return bytes(contents["text"].numpy()).partition(b":")[0].decode()


# -- what a run does ----------------------------------------------------------------------------------


class Run:
    """A run under `root`, and the contents of its commits; `note` receives those that may be found from now on."""

    def __init__(
        self,
        root: Path,
        drives: int,
        queue: Any,
        commits: dict[str, Contents],
        seed: int = 0,
        note: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.chance, self.commits, self._note, self._queue = random.Random(seed), commits, note, queue
        self.paths = [root / "drives" / str(drive) for drive in range(drives)]
        self.store = self._store()
        self.now: Contents = {}
        self.last: str | None = None
        self.before: str | None = None
        """The commit before, where it can still be gone back to."""

    def _store(self) -> Store:
        return Store(self.paths, "run", 0, SPEC, self._queue)

    def create(self, over: bool = False) -> None:
        self._note(self.last, None)
        self.store.create(over)
        self._note(None)
        self.last = self.before = None
        self.now = {(u, s): bytes(n) for u, row in enumerate(SPEC.partitions) for s, n in row.items()}
        for unit, numbers in ((0, (8192,)), (1, (4096, 4096)), (2, (4096,))):  # as the engine does, residuals left out
            writes, start = [], 0
            for nbytes in numbers:
                data = self.chance.randbytes(nbytes)
                writes.append((start, self.store.write(unit, State.WEIGHT, 0, start, _memory(data))))
                self._set(unit, State.WEIGHT, start, data)
                start += nbytes
            self.store.wrote(unit, 0, {State.WEIGHT: writes})

    def commit(self) -> None:
        label = f"commit {len(self.commits)}"
        self.commits[label] = dict(self.now)
        text = f"{label}:".encode() + self.chance.randbytes(self.chance.choice([10, 3000, 9000]) * len(self.commits))
        self._note(self.last, label)
        contents = {"text": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        self.store.commit(len(self.commits), contents)
        self._note(label)
        self.before, self.last = self.last, label

    def update(self, unit: int) -> None:
        """Reads the newest copy, write the new one, tile by tile, as the update worker does."""
        slot, tile = self.store.target(unit), self.chance.choice([1024, 2048, 4096])
        written: dict[State, list[Any]] = {}
        for state, nbytes in TRAINABLE[unit].items():
            for start in range(0, nbytes, tile):
                found = _memory(bytes(tile))
                self.store.read(unit, state, self.store.newest[unit], start, found).wait()
                assert bytes(found) == self.now[unit, state][start : start + tile]
                data = self.chance.randbytes(tile)
                written.setdefault(state, []).append((start, self.store.write(unit, state, slot, start, _memory(data))))
                self._set(unit, state, start, data)
        self.store.wrote(unit, slot, written)
        self.before = None

    def edit(self, unit: int) -> None:
        """Does as `update`, without the other processes of a grid: the commit before can still be gone back to."""
        before = self.before
        self.store.set_aside(unit)
        self.update(unit)
        self.before = before

    def _set(self, unit: int, state: State, start: int, data: bytes) -> None:
        old = self.now[unit, state]
        self.now[unit, state] = old[:start] + data + old[start + len(data) :]

    def restart(self) -> None:
        """Ends the process and begin another."""
        self.store.close()
        self.store = self._store()

    def resume(self) -> None:
        """Ends the process and go on from what is there."""
        self.restart()
        self.open()

    def open(self) -> None:
        """Opens what is there, as the engine does."""
        serial = self.store.newest_serial()
        assert serial is not None
        label = label_of(self.store.open(serial))
        self.last, self.now = label, dict(self.commits[label])
        self._note(label)

    def compare(self) -> None:
        """Asserts that all contents are those of the commit."""
        for (unit, state), expected in self.now.items():
            found = _memory(bytes(len(expected)))
            self.store.read(unit, state, self.store.newest[unit], 0, found).wait()
            assert found == expected, f"{state.value} of unit {unit} is not what {self.last} holds"

    def take_back(self) -> None:
        """Takes the last commit back, as after a rank that has not made it."""
        assert self.before is not None and self.store.durable is not None
        serial = self.store.durable.serial - 1
        self.restart()
        self._note(self.last, self.before)
        self.store.open(serial)
        self._note(self.before)
        self.last, self.now, self.before = self.before, dict(self.commits[self.before]), None

    def start_over(self) -> None:
        """Gives up the first commit, as after a rank that was killed before its own."""
        self.restart()
        self.create(over=True)

    def remove(self) -> None:
        self._note(self.last, None)
        self.store.note_end({"steps": 3})
        self.store.remove()
        self._note(None)

    def anything(self, steps: int) -> None:
        """Steps with random updates, commits not after each, a process that ends now and then."""
        for _ in range(steps):
            for unit in TRAINABLE:
                if self.chance.random() < 0.8:
                    self.update(unit)
            if self.chance.random() < 0.7:
                self.commit()
                if self.before is not None and self.chance.random() < 0.3:
                    for unit in self.chance.choices(list(TRAINABLE), k=self.chance.randrange(4)):
                        self.edit(unit)
                    self.take_back()
            if self.chance.random() < 0.3:
                self.resume()


def _memory(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


def everything_that_runs_do(run: Run) -> None:
    run.create()
    run.commit()
    for unit in (0, 1):
        run.update(unit)
    run.commit()
    run.update(0)
    run.commit()
    for unit in (0, 1, 0):  # the second was not updated in the last step
        run.edit(unit)
    run.take_back()
    run.update(0)
    run.update(1)
    run.resume()  # and what was not committed is gone
    for _ in range(3):  # a window
        run.update(1)
        run.update(0)
    run.commit()
    run.resume()
    run.update(1)  # an edit
    run.commit()
    run.commit()
