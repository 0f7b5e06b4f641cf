"""Host memory is one number: the peak RSS of a run follows a formula of the sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offload
from offload.presets import build
from offload.sizes import MIB
from tests.support.oracle import Job, config, least_host_memory
from tests.support.processes.process_measures import DiskBytes, resident
from tests.swapper.test_memory import forked

ALLOWANCE = 512 * MIB
BATCH, LENGTH = 1, 4


def middle() -> torch.nn.Module:
    """About 29M parameters, most of them in blocks."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_embd=768, n_head=12, vocab_size=512, n_positions=128, use_cache=False)
    )


def narrow() -> torch.nn.Module:
    """3M parameters in many blocks, so that few of them are on the device or in a lease at a time."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=16, n_embd=128, n_head=4, vocab_size=512, n_positions=64, use_cache=False)
    )


def gpt2_small() -> torch.nn.Module:
    """124M parameters, 31 % of them in the tied embedding."""
    return build("gpt2-small")


def loss(model: torch.nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = torch.randint(512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return model(input_ids=ids, labels=ids).loss


def _plain_forward_and_backward(job: Job) -> int:
    """The same loop on the plain model without an optimizer."""
    net = job.model().to(torch.bfloat16)
    for step in range(job.steps):
        loss(net, step, 0).backward()
        net.zero_grad()
    return sum(parameter.numel() for parameter in net.parameters())


def _train(job: Job, folder: str) -> dict[str, float]:
    with offload.init(None):
        net = job.model()
    engine = offload.initialize(model=net, config=config(job, ("nvme", "nvme"), Path(folder)))[0]
    disk, own, on_drive = DiskBytes(), [], []
    for step in range(job.steps):
        # By the end of a backward the updates of the step before are done, however busy the machine was.
        engine.backward(job.loss(engine, step, 0))
        moved = engine.io_bytes()
        own.append(moved.read + moved.written)
        on_drive.append(disk.read + disk.written)
        engine.step()
    engine.destroy(remove=True)
    return {
        "parameters": engine.parameter_count,
        "host": engine.host_memory,
        "device": engine.device_memory,
        "own_bytes": (own[-1] - own[1]) / (job.steps - 2),
        "disk_bytes": (on_drive[-1] - on_drive[1]) / (job.steps - 2),
    }


@pytest.mark.parametrize("model", [middle, pytest.param(gpt2_small, marks=pytest.mark.slow)])
def test_peak_and_bytes_are_the_formula(model: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    """Peak: the plain loop less its weights and gradients, plus both budgets, plus 512 MiB. Bytes: 26 a parameter."""
    job = Job(model, loss, steps=3, dtype="bf16")
    parameters, plain = forked(_plain_forward_and_backward, job)
    mine, peak = forked(_train, job, str(tmp_path))
    assert mine["parameters"] == parameters
    # The plain model was fp32 for a moment: its peak has at least 4 bytes for each parameter.
    base = plain - 4 * parameters
    assert peak <= base + mine["host"] + mine["device"] + ALLOWANCE
    assert mine["host"] + mine["device"] < 12 * parameters, "budgets smaller than the states, or this shows nothing"
    print(f"peak {peak / MIB:.0f} MiB, formula {(base + mine['host'] + mine['device'] + ALLOWANCE) / MIB:.0f} MiB")
    print(
        f"bytes a parameter: {mine['own_bytes'] / parameters:.2f}, on the drive {mine['disk_bytes'] / parameters:.2f}"
    )
    # An update reads 12 and writes 12, the backward reads 2: less what stays on the device, and less the 2 of old
    # weights that an update finds in a lease.
    assert 22 <= mine["own_bytes"] / parameters <= 26.1
    assert mine["disk_bytes"] >= 0.98 * mine["own_bytes"], "the page cache did not do it"


def _initialized(job: Job, folder: str) -> int:
    """Returns the bytes by which RAM has grown when there is an engine, of whose budgets no step has touched a page."""
    with offload.init(None):
        net = job.model()
    before = resident()
    engine = offload.initialize(model=net, config=config(job, ("nvme", "nvme"), Path(folder)))[0]
    grown = resident() - before
    engine.destroy(remove=True)
    return grown


def test_memory_of_the_first_weights_is_given_back(tmp_path: Path) -> None:
    """They are made and freed unit by unit, and malloc would keep 120 MiB of them."""
    grown, _ = forked(_initialized, Job(middle, loss, dtype="bf16"), str(tmp_path))
    assert grown < 48 * MIB


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("weights", "options", "expected"),
    [
        pytest.param("nvme", {}, 26, id="everything on disk"),
        pytest.param("nvme", {"host_memory": "least"}, 30, id="gradients spill"),
        pytest.param("cpu", {}, 22, id="weights in host memory"),
        pytest.param("cpu", {"durability": "none"}, 20, id="and nothing written through"),
    ],
)
def test_a_step_moves_the_bytes_of_the_formula(
    weights: str, options: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    """By the kernel's own count of what this process has read and written, for each parameter."""
    job = Job(narrow, loss, steps=3, dtype="bf16")
    if options.get("host_memory") == "least":
        options = {"host_memory": least_host_memory(job, tmp_path), "device_memory": "1MiB"}
    with offload.init(None):
        net = job.model()
    engine = offload.initialize(model=net, config=config(job, (weights, "nvme"), tmp_path, **options))[0]
    disk, after = DiskBytes(), []
    for step in range(job.steps):
        engine.backward(job.loss(engine, step, 0))  # by its end the updates of the step before are done
        after.append(disk.read + disk.written)
        engine.step()
    moved = (after[-1] - after[1]) / engine.parameter_count / (job.steps - 2)
    spilled = "gradient of " in "\n".join(engine.notices)
    engine.destroy(remove=True)
    print(f"bytes for each parameter: {moved:.2f}")
    assert spilled == ("host_memory" in options)
    assert moved <= 1.02 * expected
    assert moved >= 0.85 * expected, "less than that is not this case"
