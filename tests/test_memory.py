"""Host memory is one number: the peak RSS of a run is a formula of the sizes, not of luck."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import offload
from offload.sizes import MIB
from tests.oracle import Job, config, peak_memory, train_step

ALLOWANCE = 512 * MIB
BATCH, LENGTH = 1, 64


def model() -> torch.nn.Module:
    """About 57M parameters, most of them in blocks."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=8, n_embd=768, n_head=12, vocab_size=512, n_positions=128, use_cache=False)
    )


def loss(model: torch.nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = torch.randint(512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return model(input_ids=ids, labels=ids).loss


JOB = Job(model, loss, steps=3, dtype="bf16")


def _plain_forward_and_backward() -> int:
    """What the same loop takes without any states: its parameters are counted out by the caller."""
    net = model().to(torch.bfloat16)
    for step in range(JOB.steps):
        loss(net, step, 0).backward()
        net.zero_grad()
    return sum(parameter.numel() for parameter in net.parameters())


def _train(folder: str) -> tuple[int, int, int]:
    with offload.init(None):
        net = model()
    engine = offload.initialize(model=net, config=config(JOB, ("nvme", "nvme"), Path(folder)))[0]
    for step in range(JOB.steps):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    return engine.parameter_count, engine.host_memory, engine.device_memory


def test_peak_rss_is_the_formula(tmp_path: Path) -> None:
    """Peak of the plain loop, less its weights and gradients, plus both budgets, plus 512 MiB."""
    parameters, plain = peak_memory(_plain_forward_and_backward)
    (counted, host, device), mine = peak_memory(_train, str(tmp_path))
    assert counted == parameters
    # The plain model was fp32 for a moment: its peak has at least 4 bytes for each parameter.
    base = plain - 4 * parameters
    assert mine <= base + host + device + ALLOWANCE
    states = 12 * parameters
    assert host + device < states, "the budgets are smaller than the states, or the test shows nothing"
