"""Ranks that compute on an accelerator: on the test device, each on its own; on one GPU together, or each on its own.

Between them is NCCL where each has a GPU, otherwise `device_transport`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from offload.distributed import process_group
from tests import device
from tests.ranks import device_transport
from tests.support.processes import device_process
from tests.support.ranks.rank_pool import RankPool, meet, serve


def _serve(device_type: str, rank: int, size: int, port: int, pipe: Any) -> None:
    meet(rank, size, port)
    device_process.compute_on(device_type)
    if device_type == device.NAME:
        device.seed(rank)
    own = device_type == "cuda" and torch.cuda.device_count() >= size
    if own:
        torch.cuda.set_device(rank)
    else:
        device_transport.register(device_type)
        process_group.device_backend = lambda _: device_transport.NAME
    dist.init_process_group("gloo")
    serve(pipe)


class DeviceRankPool(RankPool):
    """`size` ranks whose engines compute on a device of this type."""

    def __init__(self, size: int, device_type: str) -> None:
        self.target = functools.partial(_serve, device_type)
        super().__init__(size)


@contextmanager
def device_pool(size: int, device_type: str) -> Iterator[RankPool]:
    """Lends ranks of their own."""
    ranks = DeviceRankPool(size, device_type)
    try:
        yield ranks
    finally:
        ranks.close()
