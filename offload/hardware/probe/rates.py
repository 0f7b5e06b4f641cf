"""What is measured of a machine. All rates are of a second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""In which a model may train. A machine may multiply in one of them twenty times slower than in another."""


class DriveRates(NamedTuple):
    """One drive by itself, in bytes."""

    path: str
    device: str
    read: float
    write: float
    mixed: float
    """Half of the bytes read and half written, both at once."""


class DtypeRates(NamedTuple):
    """What depends on the dtype of the weights."""

    matmul: float
    """Floating-point operations of matrix products, where the tokens are many."""
    weights: float
    """Bytes of weights that a matrix product takes in, or makes a gradient of, beside its operations."""
    elementwise: float
    """Bytes that norms, activations, softmax, products and sums between the matrix products read and write."""
    optimizer: float
    """Parameters that AdamW steps on the host."""
    gradient: float
    """Parameters whose gradient is stored on the host and its squares summed."""


class Rates(NamedTuple):
    """What the processor, the memory and the compute device do."""

    memory: float
    """Bytes that all threads move together, read and written: the bound of the optimizer."""
    copy: float
    """Bytes that are copied within host memory."""
    upload: float
    """Bytes copied to the device; where that is the CPU, into its arena."""
    download: float
    fresh: float
    """Bytes of a large tensor that are filled in new memory."""
    by_dtype: Mapping[str, DtypeRates]
    """Of each of `DTYPES`."""


class Probed(NamedTuple):
    """What was measured, of which machine and when."""

    machine: dict[str, Any]
    rates: Rates
    drives: tuple[DriveRates, ...]
    date: str
    seconds: float
    doubts: tuple[str, ...] = ()
    """Sentences: what says that something else ran meanwhile."""
