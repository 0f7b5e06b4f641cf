"""Handles of DeepNVMe, and the dtypes and bytes that tests move through them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.deepnvme import aio_handle

DTYPES = [
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.fixture
def handle() -> Iterator[aio_handle]:
    with aio_handle(block_size=64 << 10) as handle:
        yield handle


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Returns `nbytes` reproducible random bytes as a uint8 tensor."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def content(path: str | Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
