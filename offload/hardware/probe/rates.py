"""Results of a probe. All rates are per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes in which a model may train. A machine may multiply one of them twenty times slower than another."""


class DriveRates(NamedTuple):
    """Bandwidths of one drive by itself, in bytes."""

    path: str
    device: str
    read: float
    write: float
    mixed: float
    """Half of the bytes read and half written, concurrently."""


class DtypeRates(NamedTuple):
    """Rates that depend on the dtype of the weights."""

    matmul: float
    """Floating-point operations of matrix products with many tokens."""
    weights: float
    """Bytes of weights that a matrix product reads, or writes as a gradient, beside its operations."""
    elementwise: float
    """Bytes that norms, activations, softmax, products and sums between matrix products read and write."""
    optimizer: float
    """Parameters that AdamW updates on the host."""
    gradient: float
    """Elements of a gradient that is stored on the host while its squares are summed."""


class Rates(NamedTuple):
    """Rates of the processor, the memory and the compute device."""

    memory: float
    """Bytes that all threads together read and write: the bound of the optimizer."""
    copy: float
    """Bytes copied within host memory."""
    upload: float
    """Bytes copied to the device; on a CPU, into its arena."""
    download: float
    """Bytes copied from the device."""
    fresh: float
    """Bytes of a large tensor filled in newly allocated memory."""
    by_dtype: Mapping[str, DtypeRates]
    """Rates of each of `DTYPES`."""


class Probed(NamedTuple):
    """A measurement, with the machine and the date."""

    machine: dict[str, Any]
    rates: Rates
    drives: tuple[DriveRates, ...]
    date: str
    seconds: float
    doubts: tuple[str, ...] = ()
    """Sentences about signs of other work on the machine during the probe."""
    spread: float = 1.0
    """Largest ratio between two measurements of one rate, at the beginning of the probe and at its end."""
