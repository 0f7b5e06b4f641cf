"""SinkGD steps matrices without a state, as its paper has it, and AdamW the rest, in any placement and across kills."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from offload.config import load_config
from offload.errors import ConfigError
from offload.optimizers.matrices import balance
from tests.optim.narrow_states import JOB, bytes_of_a_parameter
from tests.optim.resuming import assert_resumes_and_loads
from tests.support.modules.matrix_models import SINKGD
from tests.support.oracle import (
    assert_same,
    assert_same_tensors,
    kill_and_resume,
    least_host_memory,
    plain_loop,
    run,
    same_bits,
    start,
    train_step,
)
from tests.support.rounding_bounds import sum_error

DISK = ("nvme", "nvme")


@pytest.mark.sample(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_it_does_what_its_paper_has_bit_for_bit(dtype: str, accumulation: int, tmp_path: Path) -> None:
    job = SINKGD._replace(dtype=dtype, accumulation=accumulation)
    mine, plain = run(job, DISK, tmp_path), plain_loop(job)
    assert mine.losses == plain.losses
    assert_same_tensors(mine.weights, plain.weights)


def test_its_iterations_are_those_of_the_config(tmp_path: Path) -> None:
    job = SINKGD._replace(params=(*SINKGD.params, ("iterations", 1)))
    mine, plain = run(job, DISK, tmp_path), plain_loop(job)
    assert_same_tensors(mine.weights, plain.weights)
    other = run(SINKGD, DISK, tmp_path / "other")
    assert not torch.equal(mine.weights["blocks.0.1.weight"], other.weights["blocks.0.1.weight"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_placements_have_the_same_bits(accumulation: int, dtype: str, tmp_path: Path) -> None:
    same_bits(SINKGD._replace(dtype=dtype, accumulation=accumulation, clip=0.1), tmp_path)


def test_a_small_budget_has_the_same_bits(tmp_path: Path) -> None:
    job = SINKGD._replace(dtype="bf16")
    least = least_host_memory(job, tmp_path / "least")
    assert_same(run(job, DISK, tmp_path / "small", host_memory=least), run(job, ("none", "none"), tmp_path / "large"))


def test_a_run_is_resumed_and_saved_with_its_states(tmp_path: Path) -> None:
    assert_resumes_and_loads(SINKGD._replace(dtype="bf16"), tmp_path, units=["blocks.0", "embed"])


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    job = SINKGD._replace(steps=20, dtype="bf16")
    assert_same(kill_and_resume(job, DISK, tmp_path / "killed", 8), run(job, DISK, tmp_path / "whole"))


def test_the_bytes_of_a_parameter_and_step(tmp_path: Path) -> None:
    """No state is read or written: a weight and its low bits each way, and 2 as the backward reads weights.

    Of a matrix that begins within a page, the page is read whole for its checksum.
    """
    found = bytes_of_a_parameter(tmp_path, JOB._replace(optimizer="SinkGD"))
    assert found.moved <= 10.35 and 8 < found.stored <= 8.4


def test_a_matrix_has_no_state(tmp_path: Path) -> None:
    engine = start(SINKGD, DISK, tmp_path)
    train_step(engine, SINKGD, 0)
    found = engine.optimizer.state_dict()
    matrices, others = (len(group["params"]) for group in engine.optimizer.param_groups)
    engine.destroy(remove=True)
    # The number of updates alone, as of SGD without a momentum.
    kept = [set(state) for state in found["state"].values()]
    assert kept == [{"step"}] * 9 + [{"step", "exp_avg", "exp_avg_sq"}] * others and matrices == 9


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (2, 2), (1, 5)])
def test_rows_and_columns_get_their_norms(shape: tuple[int, int]) -> None:
    """After the last pass the columns have their norm but for roundings, and the rows nearly, by convergence."""
    torch.manual_seed(0)
    gradient = torch.randn(shape) * torch.logspace(-6, 3, shape[0]).view(-1, 1)
    balance(gradient, 50)
    rows, columns = shape
    norms = gradient.norm(dim=0)
    assert torch.allclose(norms, torch.tensor(math.sqrt(rows)), rtol=2 * sum_error(rows), atol=0)
    assert torch.allclose(gradient.norm(dim=1), torch.tensor(math.sqrt(columns)), rtol=1e-3, atol=0)


def test_rows_without_a_gradient_stay_where_they_are() -> None:
    gradient = torch.zeros(3, 4)
    gradient[1] = torch.tensor([1.0, -2.0, 0.0, 1e-30])
    balance(gradient, 5)
    assert gradient.isfinite().all() and not gradient[0].any() and not gradient[2].any() and gradient[1].any()


def test_a_param_of_muon_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"contains params\.momentum, and SinkGD takes lr, sinkgd_lr, adam_lr"):
        load_config({"optimizer": {"type": "sinkgd", "params": {"lr": 1e-3, "momentum": 0.9}}})
