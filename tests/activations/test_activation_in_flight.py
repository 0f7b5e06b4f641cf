"""Memory of inputs is no one else's while a request to a drive uses it, however the call that waits for it ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.aio import File
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.modules.checkpointed import JOB, gives_back, running, small_inputs_move, square_loss, stack
from tests.support.oracle import train_step

DEEP = JOB._replace(model=stack(14))
PATIENCE = 0.5
"""Seconds after which a request goes on though nothing else has begun: somebody waits for it."""


@pytest.fixture(autouse=True)
def _handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small_inputs_move(monkeypatch)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with running(DEEP, tmp_path_factory.mktemp("plain")) as engine:
        return [train_step(engine, DEEP, step) for step in range(DEEP.steps)]


class Stuck:
    """Holds one request for an input until so many others have begun after it; a Ctrl-C comes meanwhile if told to."""

    def __init__(self, operation: str, index: int, others: int, interrupts: bool) -> None:
        self._operation, self._index, self._others, self._interrupts = operation, index, others, interrupts
        self._lock = threading.Lock()
        self._free = threading.Event()
        self.armed = self.reached = False

    def __call__(self, operation: str, file: File, offset: int) -> bool:
        if not self.armed or ".offload-spill" not in str(file.path):
            return False
        with self._lock:
            if self.reached:
                self._others -= 1
                if self._others <= 0:
                    self._free.set()
                return False
            self._index -= operation == self._operation
            if operation != self._operation or self._index >= 0:
                return False
            self.reached = True
        if self._interrupts:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        self._free.wait(PATIENCE)
        return False


@pytest.mark.sample(1)
@pytest.mark.parametrize("others", [2, 3, 5, 7, 9, 12, 15])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_ctrl_c_at_a_wait_leaves_the_memory_to_the_request(
    operation: str, others: int, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(operation, 4, others, interrupts=True)
    use_queue(monkeypatch, lambda: LateQueue(0, 0.0, stuck))
    with running(DEEP, tmp_path, activations="nvme") as engine:
        assert train_step(engine, DEEP, 0) == expected[0]
        stuck.armed = True
        with pytest.raises(KeyboardInterrupt):
            engine.backward(square_loss(engine, 1, 0))
            time.sleep(10)
        engine.zero_grad()
        gc.collect()
        assert stuck.reached
        assert [train_step(engine, DEEP, step) for step in (1, 2)] == expected[1:]
        gives_back(engine)


@pytest.mark.sample(1)
@pytest.mark.parametrize("others", [2, 5, 9, 12, 15])
def test_a_graph_that_is_dropped_leaves_the_memory_to_its_requests(
    others: int, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck("write", 11, others, interrupts=False)
    use_queue(monkeypatch, lambda: LateQueue(0, 0.0, stuck))
    with running(DEEP, tmp_path, activations="nvme") as engine:
        assert train_step(engine, DEEP, 0) == expected[0]
        stuck.armed = True
        square_loss(engine, 9, 0)
        assert [train_step(engine, DEEP, step) for step in (1, 2)] == expected[1:]
        assert stuck.reached
        gives_back(engine)
