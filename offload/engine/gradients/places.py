"""Memory in which gradients wait for their updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload.engine.gradients.device_to_host import DeviceToHost
from offload.engine.gradients.disk_spill import DiskSpill


@dataclass(frozen=True, kw_only=True)
class GradientPlaces:
    """Memory in which gradients wait for their updates, other than host buffers of the HOST tier."""

    spill: DiskSpill | None
    """Gradients of units that wait on DISK."""
    on_device: Mapping[int, torch.Tensor]
    """(numel,) of the gradients' dtype for each unit whose gradients stay on the device."""
    totals: Mapping[int, torch.Tensor]
    """The same for units whose gradients are summed on the device over micro-batches and then copied to the host."""
    downloads: DeviceToHost | None
    """Copies from a device whose memory the host cannot address; None if the host can."""
