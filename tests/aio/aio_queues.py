"""Queues of each backend with few and many threads, and reproducible bytes for them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from offload.aio import IoQueue


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def queue(request: pytest.FixtureRequest, backend: str) -> Iterator[IoQueue]:
    with IoQueue(backend, threads=request.param, depth=6, block_bytes=64 << 10) as queue:
        yield queue


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)
