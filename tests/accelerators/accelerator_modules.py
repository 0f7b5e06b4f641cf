"""Modules of torch for an accelerator, as torch.cuda is one, that note what is asked of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.swapper.memory.device import AcceleratorDevice, TorchHostSide

PAGE = 4096
XPU, CUDA = torch.device("xpu", 0), torch.device("cuda", 0)


class Stream:
    """A stream that notes in which order it was told what."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.told: list[Any] = []

    def record_event(self) -> Event:
        self.told.append("record")
        return Event()

    def wait_event(self, event: Any) -> None:
        self.told.append(event)


class Event:
    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True


class Torch:
    """`torch.accelerator` on a machine with `count` devices of one type."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: str | None, count: int = 1) -> None:
        self.index = 0
        self.stream: Any = "compute"
        self.history: list[Any] = []
        for name, value in {
            "is_available": lambda: of is not None,
            "current_accelerator": lambda: torch.device(of or "nothing, as torch 2.6, which raises"),
            "device_count": lambda: count,
            "current_device_index": lambda: self.index,
            "set_device_index": self.set_index,
            "current_stream": lambda _: self.stream,
            "set_stream": self.set_stream,
            "synchronize": lambda device: self.history.append(("synchronize", device)),
        }.items():
            monkeypatch.setattr(torch.accelerator, name, value)
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    def set_index(self, index: int) -> None:
        self.index = index
        self.history.append(index)

    def set_stream(self, stream: Any) -> None:
        """As torch does, which makes the stream's device the current one too."""
        self.stream = stream
        self.index = 0 if stream == "compute" else stream.device.index


def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[AcceleratorDevice, Torch]:
    machine = Torch(monkeypatch, "xpu", 2)
    return AcceleratorDevice(torch.device("xpu", 1), TorchHostSide(XPU)), machine
