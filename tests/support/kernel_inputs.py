"""Inputs and settings of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload.kernels import _native, settings

ISAS = _native.supported_isas()


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    """Restores the best instruction set and all cores after each test."""
    yield
    _native.configure(ISAS[-1], settings.available_cores())


def normal(numel: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Returns `numel` reproducible normal numbers of the deviation `scale`."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale
