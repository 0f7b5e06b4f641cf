"""Linear layers whose products are rounded to fp8 by torchao keep their bits on any tier."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offload
from tests.support import models
from tests.support.oracle import Job, assert_same, config, plain_loop, run, same_bits

IN_MEMORY, DISK = ("none", "none"), ("nvme", "nvme")


def converted() -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(
        models.llama(), config=Float8LinearConfig(emulate=True), module_filter_fn=lambda module, name: name != "lm_head"
    )
    assert sum(type(module).__name__ == "Float8Linear" for module in model.modules()) == 14
    return model


def job(dtype: str, accumulation: int = 2) -> Job:
    return Job(converted, models.language_loss, steps=3, accumulation=accumulation, dtype=dtype)


needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


@needs_torchao
@pytest.mark.works(
    "Modules", "linear layers in fp8 by `torchao.float8` (emulated; where torchao is installed)", "right"
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_same_bits_in_every_tier(dtype: str, tmp_path: Path) -> None:
    same_bits(job(dtype), tmp_path, [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])


def of_key(recipe: str = "tensorwise") -> Job:
    return job("bf16")._replace(model=models.llama, fp8=recipe)


@needs_torchao
@pytest.mark.works("Modules", 'the block "fp8" (emulated; where torchao is installed)', "right")
def test_the_block_fp8_is_the_conversion_by_hand(tmp_path: Path) -> None:
    by_hand = run(job("fp32"), IN_MEMORY, tmp_path / "hand")
    assert_same(by_hand, run(of_key()._replace(dtype="fp32"), DISK, tmp_path / "key"), "the block")
    assert by_hand.losses[0] == plain_loop(job("fp32")).losses[0]


@needs_torchao
def test_an_error_after_the_conversion_gives_the_layers_back(tmp_path: Path) -> None:
    model = models.llama()
    layers = list(model.modules())
    with pytest.raises(offload.BudgetError):
        offload.initialize(model=model, config=config(of_key(), DISK, tmp_path, device_memory=4096))
    assert all(now is before for now, before in zip(model.modules(), layers, strict=True))


FP8_REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "the device": (models.llama, {"emulate": False}, "needs a GPU with products in fp8 .* this run computes on cpu"),
    "the layers": (lambda: nn.Sequential(nn.Linear(8, 8)), {}, "finds no torch.nn.Linear in the blocks"),
}


@pytest.mark.works("Modules", 'the block "fp8" without torchao, on a CPU or without a layer that fits', "refused")
@pytest.mark.parametrize("name", FP8_REFUSED)
def test_fp8_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    build, block, message = FP8_REFUSED[name]
    if name == "the layers" and importlib.util.find_spec("torchao") is None:
        pytest.skip("needs torchao")
    content = config(of_key(), IN_MEMORY, tmp_path)
    content["fp8"] = {**content["fp8"], **block}
    with pytest.raises(offload.ConfigError, match=message):
        offload.initialize(model=build(), config=content)


def test_fp8_without_torchao_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(offload.ConfigError, match=r"needs torchao, .*pip install \"offload\[fp8\]\""):
        offload.initialize(model=models.llama(), config=config(of_key(), IN_MEMORY, tmp_path))
