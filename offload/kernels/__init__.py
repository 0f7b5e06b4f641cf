"""The arithmetic of the optimizer on the CPU: fused steps, split master weights, sums of gradients.

Every function takes flat contiguous CPU tensors of one length, owned by the caller, and works in place with the GIL
released. A tensor of a wrong dtype is a `TypeError`; one of a wrong shape, stride or device is a `ValueError`. Tensors
must not overlap. Autograd does not see the writes. Results have the same bits for every instruction
set, number of threads and division of the tensors into calls.

Two environment variables are read at import and by `leave_cores`: OFFLOAD_THREADS (default: the cores that this process
may use) and OFFLOAD_ISA (scalar, avx2, avx512 or neon; default: the best that the processor supports).
"""

from __future__ import annotations

import os

from offload.kernels import _native
from offload.kernels.lamb import LambSegment, lamb, lamb_moments, lamb_move, lamb_ratio
from offload.kernels.optimizer import CPUAdamW
from offload.kernels.settings import available_cores, isa_from, threads_beside_device, threads_from
from offload.kernels.sums import accumulate, join_master, split_master, sum_squares
from offload.kernels.update import (
    AdagradStep,
    AdamWStep,
    LambStep,
    LionStep,
    Noise,
    Partition,
    PlainSGDStep,
    Segment,
    SGDStep,
    Step,
    Writes,
    adamw,
    has_two_passes,
    noise_stream,
    probe,
    update,
)

__all__ = [
    "AdagradStep",
    "AdamWStep",
    "CPUAdamW",
    "LambSegment",
    "LambStep",
    "LionStep",
    "Noise",
    "Partition",
    "PlainSGDStep",
    "SGDStep",
    "Segment",
    "Step",
    "Writes",
    "accumulate",
    "adamw",
    "has_two_passes",
    "join_master",
    "lamb",
    "lamb_moments",
    "lamb_move",
    "lamb_ratio",
    "leave_cores",
    "noise_stream",
    "probe",
    "split_master",
    "sum_squares",
    "thread_count",
    "update",
]

_native.configure(isa_from(os.environ, _native.supported_isas()), threads_from(os.environ))


def leave_cores() -> None:
    """Leaves a core or two to the threads that give work to another device than the CPU; see `threads_beside_device`.

    Applies to the entire process, from the next call of a kernel on. Does nothing if OFFLOAD_THREADS is set. Results
    keep their bits.
    """
    isa = isa_from(os.environ, _native.supported_isas())
    _native.configure(isa, threads_beside_device(os.environ, available_cores()))


def thread_count() -> int:
    """Returns the number of threads that one call may use, the calling thread included."""
    return _native.thread_count()
