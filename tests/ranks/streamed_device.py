"""A device that notes which of its streams receives work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from offload.swapper.memory.device import Device


class Streamed(Device):
    """A device that notes which stream receives work."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.uploads, self.end = False, Streamed.uploaded

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        self.uploads = True
        yield
        self.uploads = False

    def uploaded(self) -> Any:
        return self.end
