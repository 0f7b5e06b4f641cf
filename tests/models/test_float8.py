"""Linear layers whose products torchao does in fp8 train from the disk; their weights stay in the model's dtype.

Without a GPU torchao emulates the products. Needs `pip install torchao`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torch import nn

from tests.support import models
from tests.support.oracle import Job, assert_same, plain_loop, same_bits

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def converted() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(
        models.llama(),
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: name != "lm_head",
    )
    assert sum(type(module).__name__ == "Float8Linear" for module in model.modules()) == 14
    return model


def job(dtype: str, accumulation: int = 2) -> Job:
    return Job(converted, models.language_loss, steps=3, accumulation=accumulation, dtype=dtype)


@pytest.mark.works(
    "Modules", "linear layers in fp8 by `torchao.float8` (emulated; where torchao is installed)", "right"
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_same_bits_in_every_tier(dtype: str, tmp_path: Path) -> None:
    same_bits(job(dtype), tmp_path, [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])


def test_blocks_that_are_computed_again_keep_the_bits(tmp_path: Path) -> None:
    kept = same_bits(job("fp32"), tmp_path / "kept", [("nvme", "nvme")])
    again = same_bits(job("fp32"), tmp_path / "again", [("nvme", "nvme")], activations="nvme")
    assert_same(kept, again, "activations kept and computed again")


def test_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    """One micro-batch and no clip, so that nothing is added up in another order."""
    plain = job("fp32", accumulation=1)._replace(clip=0.0)
    assert plain_loop(plain).losses == same_bits(plain, tmp_path, [("nvme", "nvme")]).losses
