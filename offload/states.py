"""Names of a parameter's states and of the tiers. Imports no torch; dtypes are those of `offload.layout.modes`."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """A value that is stored for each trainable element. WEIGHT is the copy that compute uses. GRAD lives for one step.

    A store lists its checksums in this order, so a new state must be added after the others, before GRAD.
    """

    WEIGHT = "weight"
    MASTER_LOW_BITS = "residual"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MASTER = "master"
    SUM = "sum"
    MOMENTUM_BUFFER = "momentum_buffer"
    PACKED = "packed"
    """All states of an optimizer whose states differ between parameters, in as many words of four bytes as it needs."""
    SCALES = "moment_scales"
    """Scales of moments in 8 bits: for each block of elements one scale per moment, in the order of the moments."""
    WORKER_ERROR = "worker_error"
    """What this rank's last compression of its momentum has lost. Each rank has values of its own."""
    SERVER_ERROR = "server_error"
    """What the last compression of the mean has lost, of the elements that this rank averages for all ranks."""
    EXP_AVG_SQ_FRESH = "exp_avg_sq_fresh"
    """The second moment of 1-bit LAMB after its warm-up, of gradients that are rebuilt from the momentum."""
    GRAD = "grad"

    # The hash of `Enum` runs Python code, and a plan looks states up millions of times. Members are singletons.
    __hash__ = object.__hash__

    @property
    def title(self) -> str:
        return _TITLES.get(self, self.value)


_TITLES = {
    State.MASTER_LOW_BITS: "low bits of masters",
    State.EXP_AVG: "first moment",
    State.EXP_AVG_SQ: "second moment",
    State.SCALES: "scales of moments",
    State.WORKER_ERROR: "error of momenta",
    State.SERVER_ERROR: "error of means",
    State.EXP_AVG_SQ_FRESH: "fresh second moment",
    State.GRAD: "gradient",
}
"""Titles of states whose value, the name in files and arguments, is no everyday word."""


class Tier(enum.Enum):
    """The place where a partition is stored between uses."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    __hash__ = object.__hash__  # as that of `State`
