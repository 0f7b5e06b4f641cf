"""What the tests of DeepSpeed's names have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _leaves_no_group() -> Iterator[None]:
    """`deepspeed.initialize` makes torch's process group of one, as DeepSpeed does; other files must not find it."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
