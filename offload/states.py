"""The states of a parameter. Needs no torch; what dtypes they have is `modes`."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """What there is of each trainable element. The compute copy is WEIGHT; GRAD lives for one step, the others stay.

    Checksums in a store count them in this order, so a new one comes behind the others, before GRAD.
    """

    WEIGHT = "weight"
    RESIDUAL = "residual"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MASTER = "master"
    SUM = "sum"
    MOMENTUM_BUFFER = "momentum_buffer"
    PACKED = "packed"
    """All that an optimizer of torch keeps, in words of four bytes: as many as it needs, not one for each element."""
    GRAD = "grad"


class Tier(enum.Enum):
    """Where a partition lives between uses: its home."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
