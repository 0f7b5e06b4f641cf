"""The host's side of the test device, as the engine asks for it: pinned memory by the rules of CUDA's runtime."""

from __future__ import annotations

import torch

from offload.aio import aligned_empty
from offload.sizes import align_up
from offload.swapper.memory.device import HostBlock
from tests import device


class DeviceHostSide:
    """Pins memory of our own piece by piece, within `device.set_pin_limit`."""

    def __init__(self, where: torch.device) -> None:
        self._type = where.type

    def allocate(self, nbytes: int) -> HostBlock:
        return HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)

    def pin(self, memory: torch.Tensor) -> str | None:
        return self._refusal(device.register(memory.data_ptr(), align_up(memory.nbytes)))

    def unpin(self, address: int) -> str | None:
        return self._refusal(device.unregister(address))

    def wait(self, event: torch.Event) -> None:
        event.synchronize()

    def _refusal(self, error: int) -> str | None:
        return None if error == 0 else f"error {error} of {self._type}"
