"""Rates of the machine without a model: matrix products in a plain loop, the optimizer, copies, the drive."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from offload.bench.gpu.work import Save, Work
from offload.bench.measure import seconds_of
from offload.hardware.probe import Rates, drive_rates, measure_rates

_OF_A_COPY = 8
"""Bytes of the file on the drive, as a multiple of a copy's: more than the drive's own cache holds."""
_PRODUCTS = 20


def rates(work: Work, save: Save) -> None:
    """Measures matrix products in a plain loop, and all rates of `offload probe` for this device and this drive."""
    found = {"plain_matmul": plain_matmul(work.device, work.rounds), **_flat(measure_rates(work.device))}
    save(found)
    drive = drive_rates(str(work.folder), _OF_A_COPY * work.copy_nbytes)
    save(found | {"drive": {name: value for name, value in drive._asdict().items() if name != "path"}})


def _flat(measured: Rates) -> dict[str, Any]:
    """Returns the rates as one dict; of the rates by dtype only those of bf16, in which the benchmark trains."""
    found = measured._asdict()
    by_dtype = found.pop("by_dtype")
    return {**found, **by_dtype["bf16"]._asdict()}


def plain_matmul(device: torch.device, rounds: int) -> float:
    """Returns the floating-point operations a second of square products in bf16, the bound of those in a model."""
    width = 8192 if device.type == "cuda" else 256
    one, other = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(one, other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the products are measured, not their launch

    products()
    return 2 * width**3 * _PRODUCTS / statistics.median(seconds_of(products) for _ in range(rounds))
