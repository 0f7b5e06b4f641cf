"""What a placement asks of a machine, and sizes of host buffers that planner and engine share."""

from __future__ import annotations

from dataclasses import dataclass

STAGING_BUFFERS = 3
"""Host buffers through which gradients leave the device."""
WINDOWS = 3
"""Host buffers of gradients that spill to disk: one is filled while the others are written."""
CHUNK = 1 << 22
"""Elements of a gradient that one call adds or whose squares it sums: one number for all callers, for equal bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memory and devices of the machine on which states are placed; sizes in bytes."""

    free_host: int
    free_device: int
    """0 if the compute device is the host itself."""
    host_addressable: bool
    """True if the host can compute on the device's memory."""
    drives: bool
    """True if the run has a disk to which partitions may be moved."""
    other_engines: int = 0
    """Bytes of the host budget that other engines of this process take already."""
    device_kernels: bool = False
    """True if the device has its own kernels for AdamW and for sums of squares."""
