"""A program whose backward gets Ctrl-C: `python -m tests.failures.slow_backward DEVICE FOLDER STEP:UNIT:SECONDS ...`.

A Ctrl-C comes so many seconds after the backward of a unit begins, in the first backward of a step. The program prints
how many units have begun after it (`obeyed`), each step that went through, and `closed` with the threads that are left.
The step that the first Ctrl-C interrupts is begun again; the second ends the program.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.oracle import Job, start

STEPS, UNITS, WIDTH, ROWS = 2, 6, 256, 512


class Signals:
    """The signals to come, and the time of each unit's backward."""

    def __init__(self, moments: list[str]) -> None:
        self.moments = [(int(step), int(unit), float(delay)) for step, unit, delay in (m.split(":") for m in moments)]
        self.step = 0
        self.began: list[float] = []
        self.sent = 0.0
        self.waiting = False
        self.timer = threading.Timer(0, self._send)

    def unit_begins(self, unit: int) -> None:
        self.began.append(time.monotonic())
        if self.moments and self.moments[0][:2] == (self.step, unit):
            self.waiting = True
            self.timer = threading.Timer(self.moments.pop(0)[2], self._send)
            self.timer.start()
        if unit == 0 and self.waiting:  # the machine may be slow to run the timer's thread
            time.sleep(60)

    def _send(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.sent, self.waiting = time.monotonic(), False

    def obeyed(self) -> int:
        """Returns the number of units that began after the last signal."""
        self.timer.join()
        return sum(began > self.sent for began in self.began)


class Mark(torch.autograd.Function):
    """Notices that the backward of a unit begins."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, signals: Signals, unit: int) -> torch.Tensor:
        ctx.signals, ctx.unit = signals, unit
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.signals.unit_begins(ctx.unit)
        return gradient.clone(), None, None


class Net(nn.Module):
    signals: Signals

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for unit, block in enumerate(self.blocks):
            hidden = Mark.apply(block(hidden), self.signals, unit)
        return hidden


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    return model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()


def main(device: str, folder: str, moments: list[str]) -> None:
    """Trains two steps."""
    if device == "test":
        from offload.swapper.memory import device as device_choice
        from tests import device as test_device
        from tests.device.host_side import DeviceHostSide

        test_device.load()
        device_choice.HOST_SIDES[test_device.NAME] = DeviceHostSide
    before = set(threading.enumerate())
    room = 4 * 4 * WIDTH * (WIDTH + 64)
    engine = start(Job(Net, loss), ("nvme", "nvme"), Path(folder), device=device, device_memory=room)
    signals = engine.module.signals = Signals(moments)
    interrupted = False
    while signals.step < STEPS:
        try:
            value = loss(engine, signals.step, 0)
            engine.backward(value)
            time.sleep(0.02)  # a signal that came in the last unit is taken here, and not in step()
        except KeyboardInterrupt:
            print(f"obeyed {signals.obeyed()}", flush=True)
            if interrupted:
                raise
            interrupted = True
            engine.zero_grad()
            continue
        engine.step()
        print(f"step {signals.step} {float(value.detach())!r} {engine.get_global_grad_norm()!r}", flush=True)
        signals.step += 1
    engine.destroy(remove=True)
    left = sorted(each.name for each in set(threading.enumerate()) - before)
    print(f"closed {left}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
