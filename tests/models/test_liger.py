"""A model that Liger has patched trains with Liger's fused loss, which reads the head's weights by their addresses.

Liger's kernels are Triton's. Without a GPU Triton interprets them, which it does for the fused loss, not for the
kernels of norms: a test marked `gpu` has all of them. Both need `pip install liger-kernel triton`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.hf import OffloadTrainer
from offload.losses import chunk_loss_of
from tests import ROOT
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, plain_loop, run, same_bits
from tests.support.trainer_runs import FEW, MEMORY, Texts, arguments, assert_close, config, ended, result, seeded, stock

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton")),
    reason="needs liger-kernel and triton",
)

FUSED_LOSS_ALONE = {"rope": False, "rms_norm": False, "swiglu": False}


def interpreted(call: str) -> None:
    """Calls a function of this file in a new process: Triton reads the variable when it is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    program = [sys.executable, "-c", f"from tests.models.test_liger import *; {call}"]
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def patched(**kernels: bool) -> nn.Module:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model: Any = models.llama()
    apply_liger_kernel_to_llama(model=model, **kernels)
    return model  # type: ignore[no-any-return]


def fused_loss() -> nn.Module:
    return patched(**FUSED_LOSS_ALONE)


def train_in_every_tier(dtype: str) -> None:
    job = Job(fused_loss, models.language_loss, steps=3, accumulation=2, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        mine = same_bits(job, Path(folder), [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
    # The reference is the model without Liger: in 16 bits both losses round their logits.
    plain = plain_loop(job._replace(model=models.llama))
    if dtype == "fp32":
        rounding_bounds.same_training(mine, plain, job._replace(model=models.llama), reordered=True)
    else:
        rounding_bounds.same_losses(mine.losses, plain.losses, job._replace(model=models.llama))


@pytest.mark.works(
    "Graphs",
    "a model patched by Liger, with its fused loss (where it is installed; interpreted without a GPU)",
    "right",
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.numeric
def test_bits_do_not_depend_on_the_tier_and_losses_are_those_without_liger(dtype: str) -> None:
    interpreted(f"train_in_every_tier({dtype!r})")


def leave_alone() -> None:
    with pytest.raises(offload.UsageError, match="does not compute its loss from the output of lm_head itself"):
        chunk_loss_of(fused_loss())


def test_its_loss_is_not_replaced() -> None:
    interpreted("leave_alone()")


def train_by_the_trainer(patched_before: bool) -> None:
    """By the Trainer's argument, or by the script before."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offload").addHandler(handler)
    logging.getLogger("offload").setLevel(logging.INFO)
    kernels = {
        "use_liger_kernel": True,
        "liger_kernel_config": {**FUSED_LOSS_ALONE, "fused_linear_cross_entropy": True},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mine = OffloadTrainer(
            model=seeded(fused_loss if patched_before else models.llama),
            args=arguments(folder / "mine", **{} if patched_before else kernels),
            train_dataset=Texts(FEW),
            offload_config=config(folder, MEMORY),
        )
        with ended(mine):
            mine.train()
            assert_close(result(mine), stock(folder / "stock", model=models.llama), models.llama, reordered=True)
    (line,) = [each for each in lines if each.startswith("the loss is ")]
    assert ("LlamaForCausalLM does not compute" if patched_before else "use_liger_kernel brings a loss") in line


@pytest.mark.works(
    "Trainers",
    "`use_liger_kernel`, with Liger's fused loss (where it is installed; interpreted without a GPU)",
    "right",
)
@pytest.mark.parametrize("patched_before", [False, True], ids=["by the argument", "by the script"])
@pytest.mark.numeric
def test_a_trainer_uses_the_loss_of_liger(patched_before: bool) -> None:
    interpreted(f"train_by_the_trainer({patched_before})")


@pytest.mark.gpu
def test_all_kernels_of_liger_on_a_gpu(tmp_path: Path) -> None:
    job = Job(patched, models.language_loss, steps=3, accumulation=2, dtype="bf16")
    options = {"device": "cuda"}
    first, second = (run(job, tiers, tmp_path / tiers[0], **options) for tiers in (("cpu", "cpu"), ("nvme", "nvme")))
    assert first.losses == second.losses and first.norms == second.norms
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name
