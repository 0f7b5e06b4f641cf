"""The compute device: every copy between it and host memory goes through this object."""

from __future__ import annotations

import torch


class Device:
    """Copies on behalf of the pager and the updater.

    Copies are finished when a call returns. On a CPU device "device memory" is ordinary memory that
    kernels may work on in place (`host_addressable`).
    """

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.host_addressable = device.type == "cpu"

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """destination[:] = source, both (nbytes,) uint8, on either side."""
        destination.copy_(source)
