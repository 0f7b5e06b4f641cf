"""TFLOPS and MFU are the model's operations over a step's seconds, whatever the placement."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.deepspeed.flops_profiler import FlopsProfiler, get_model_profile
from offload.errors import UsageError
from offload.hardware.gpus import peak_products
from offload.metrics import flops
from offload.metrics.flops import Peak, Profile, rates
from offload.planner.predict_run import step_of
from offload.report.figures import figures
from offload.report.log import read_log
from offload.report.page import page
from offload.torch_internals import fake_tensors
from tests.support import models
from tests.support.modules import mixtures
from tests.support.oracle import accumulated_step, assert_same_tensors, config, start, weights_of

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
JOB = models.SHALLOW._replace(accumulation=2)


class Small(nn.Module):
    """A linear layer that trains behind one that does not, and attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 16, bias=False).requires_grad_(False), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(x)
        return self.trained(nn.functional.scaled_dot_product_attention(hidden, hidden, hidden))


FROZEN, ATTENTION, TRAINED = 2 * 3 * 5 * 8 * 16, 2 * 3 * 5 * 5 * (16 + 16), 2 * 3 * 5 * 16 * 4
"""Operations of `Small` for (3, 5, 8) inputs: two for each product and sum."""


def profiled(placement: tuple[str, str], folder: Path, **offload_block: Any) -> tuple[list[float], Any]:
    """Returns the operations of two steps, and the weights afterwards."""
    content = config(JOB, placement, folder, **offload_block) | {"flops_profiler": {"enabled": True}}
    torch.manual_seed(JOB.seed)
    engine = offload.initialize(model=JOB.model(), config=content).engine
    counted = []
    for step in range(2):
        accumulated_step(engine, JOB, step)
        counted.append(engine.measured["tflops"] * engine.measured["seconds"] * 1e12)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return counted, weights


def test_a_rate_is_operations_over_seconds_and_over_the_peak() -> None:
    assert rates(6e12, 2.0, None) == {"tflops": 3.0}
    assert rates(6e12, 2.0, Peak(12e12, "a data sheet")) == {"tflops": 3.0, "mfu": 0.25}
    assert rates(6e12, 0.0, None) == {}


def test_the_peak_is_that_of_the_same_card_alone() -> None:
    assert peak_products("NVIDIA H200") == {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}
    assert peak_products("NVIDIA A100-SXM4-80GB") == peak_products("A100 40GB") is not None
    assert peak_products("NVIDIA H100 80GB HBM3") == peak_products("H100")
    for card in ("NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA GeForce RTX 4090 Laptop GPU", ""):
        assert peak_products(card) is None, card


def test_a_backward_counts_twice_and_once_without_weights_that_train(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = FlopsProfiler(model := Small())
    profiler.start_profile()
    model(torch.randn(3, 5, 8)).sum().backward()
    profiler.stop_profile()
    model(torch.randn(3, 5, 8))  # counts nothing
    assert profiler.get_total_flops() == FROZEN + ATTENTION + TRAINED == 2 * profiler.get_total_macs()
    assert profiler.profile.training == 2 * FROZEN + 3 * (ATTENTION + TRAINED)
    assert dict((name, (numel, flops)) for name, numel, flops in profiler.profile.rows()) == {
        "": (128 + 68, FROZEN + ATTENTION + TRAINED),
        "frozen": (128, FROZEN),
        "trained": (68, TRAINED),
    }
    profiler.print_model_profile(profile_step=7, detailed=False)
    assert "operations of step 7: " in (text := capsys.readouterr().out) and "frozen" in text and "trained" not in text
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_a_frozen_tied_head_counts_as_frozen_and_its_weights_once() -> None:
    table, head = nn.Embedding(32, 8).requires_grad_(False), nn.Linear(8, 32, bias=False)
    head.weight = table.weight
    model = nn.ModuleDict({"table": table, "head": head})
    profile = Profile({"head": 100.0}, flops.weights_of(model))
    assert profile.training == 200
    assert {name: numel for name, numel, _ in profile.rows()} == {"": 256, "table": 256, "head": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_of_experts_count_as_a_loop_over_the_experts_does(dtype: torch.dtype) -> None:
    counts = []
    for implementation in ("eager", "grouped_mm"):
        torch.manual_seed(3)
        model: Any = mixtures.mixtral().to(dtype)
        model.set_experts_implementation(implementation)
        counter = flops.FlopCounter(model)
        counter.install()
        model(input_ids=torch.arange(24).view(2, 12))
        counter.remove()
        counts.append(counter.flops)
    assert counts[0] == counts[1]
    assert counts[0]["model.layers.0.mlp.experts"]


class Shaped(nn.Linear):
    """Computes a shape without values first, as each operation of a DTensor does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fake_tensors():
            assert (torch.empty(3, 8) @ torch.empty(8, 4)).detach().shape == (3, 4)
        return super().forward(x)


def test_operations_without_values_count_nothing() -> None:
    counter = flops.FlopCounter(model := Shaped(8, 4))
    counter.install()
    model(torch.randn(3, 8))
    counter.remove()
    assert counter.flops == {"": 2 * 3 * 8 * 4}


def test_get_model_profile_has_deepspeeds_numbers_and_says_what_it_lacks(tmp_path: Path) -> None:
    numbers = get_model_profile(Small(), (3, 5, 8), print_profile=False, as_string=False)
    assert numbers == (FROZEN + ATTENTION + TRAINED, (FROZEN + ATTENTION + TRAINED) / 2, 196)
    texts = get_model_profile(Small(), kwargs={"x": torch.ones(3, 5, 8)}, output_file=str(tmp_path / "table"))
    assert texts[2] == "196" and "trained" in (tmp_path / "table").read_text()
    for wrong, message in (
        ({"mode": "train"}, "mode"),
        ({"ignore_modules": [nn.Linear]}, "ignore_list"),
        ({}, "input_shape"),
    ):
        with pytest.raises(UsageError, match=message):
            get_model_profile(Small(), args=() if wrong == {} else [torch.ones(3, 5, 8)], **wrong)


def test_a_step_has_the_operations_that_a_plan_counts_in_every_placement_and_changes_no_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = start(JOB, MEMORY, tmp_path / "plain")
    for step in range(2):
        accumulated_step(plain, JOB, step)
    expected = weights_of(plain)
    plain.destroy()
    rows, length = models.tokens(0, 0).shape
    content = config(JOB, MEMORY, tmp_path / "plan") | {"train_micro_batch_size_per_gpu": rows}
    planned = step_of(JOB.model(), content, length, {}).operations
    for place, schedule in ((MEMORY, "micro_batch_major"), (DISK, "micro_batch_major"), (DISK, "layer_major")):
        counted, weights = profiled(place, tmp_path / f"{place[0]}-{schedule}", schedule=schedule)
        assert counted == pytest.approx([planned, planned], rel=1e-9), (place, schedule)
        assert_same_tensors(weights, expected)
    assert capsys.readouterr().err.count("operations of step 1 of this process, on this rank: ") == 3


def test_the_line_the_log_and_the_report_have_the_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    block = {"enabled": True, "profile_step": 2, "detailed": False, "output_file": str(tmp_path / "table")}
    content = config(JOB, MEMORY, tmp_path / "run", log=str(log)) | {"flops_profiler": block, "steps_per_print": 1}
    engine = offload.initialize(model=JOB.model(), config=content).engine
    for step in range(3):
        accumulated_step(engine, JOB, step)
    engine.destroy(remove=True)
    first, *later = re.findall(r"^step \d: .*", capsys.readouterr().err, re.MULTILINE)
    assert "TFLOPS" not in first and len(later) == 2 and all(" TFLOPS, " in line for line in later)
    steps = read_log(log).steps
    assert "tflops" not in steps[0] and steps[1]["tflops"] > 0 and steps[2]["tflops"] > 0
    report = figures(read_log(log))
    assert report["tflops"] == pytest.approx((steps[1]["tflops"] + steps[2]["tflops"]) / 2)
    assert f"{report['tflops']:.4g} TFLOPS" in page(read_log(log), report, None)
    assert len((tmp_path / "table").read_text().splitlines()) == 2


def test_compiled_blocks_are_not_counted_as_a_line_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = config(JOB, MEMORY, tmp_path) | {"flops_profiler": {"enabled": True}}
    model = Small()
    model.trained.compile(backend="eager")
    engine = offload.initialize(model=model, config=content).engine
    for _ in range(2):
        for _ in range(JOB.accumulation):
            engine.backward(engine(torch.randn(1, 5, 8)).sum())
            engine.step()
    assert "tflops" not in engine.measured and "seconds" in engine.measured
    engine.destroy(remove=True)
    assert caplog.text.count("flops_profiler counts nothing: blocks are compiled") == 1
