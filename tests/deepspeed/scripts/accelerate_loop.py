"""accelerate's loop with a `DeepSpeedPlugin`, as its documentation has it, beside the loop of torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from torch import nn

from tests.support import rounding_bounds

FOLDER, ACCUMULATION = Path(sys.argv[1]), 2
DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(row)), torch.ones(1)) for row in range(8)]


def made() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    return model, optimizer, torch.utils.data.DataLoader(DATA, batch_size=2), schedule


def plain() -> list[float]:
    model, optimizer, loader, schedule = made()
    losses = []
    for number, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        (loss / ACCUMULATION).backward()
        if number % ACCUMULATION == ACCUMULATION - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accelerated(resume: bool = False) -> list[float]:
    """Trains, and saves after half of the steps; or resumes there."""
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        gradient_accumulation_steps=ACCUMULATION,
        gradient_clipping=1.0,
        offload_optimizer_device="nvme",
        offload_param_device="nvme",
        offload_optimizer_nvme_path=str(FOLDER / "drive"),
        offload_param_nvme_path=str(FOLDER / "drive"),
        zero3_save_16bit_model=True,
    )
    AcceleratorState._reset_state(reset_partial_state=True)  # of an accelerator before this one
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model, optimizer, loader, schedule = accelerator.prepare(*made())
    assert accelerator.distributed_type.name == "DEEPSPEED" and type(model).__name__ == "DeepSpeedEngine"
    losses = []
    if resume:
        accelerator.load_state(str(FOLDER / "saved"))
    for number, (x, y) in enumerate(loader):
        if resume and number < len(loader) // 2:
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if not resume and number == len(loader) // 2 - 1:
            accelerator.save_state(str(FOLDER / "saved"))
    assert accelerator.get_state_dict(model)["0.weight"].shape == (8, 4)
    assert accelerator.unwrap_model(model) is model.module
    accelerator.end_training()
    model.destroy()
    return losses


(FOLDER / "drive").mkdir(exist_ok=True)
wanted, actual = plain(), accelerated()
# Each step adds the roundings of its sums, and the square of the loss doubles what they come to.
error = 2 * len(wanted) * rounding_bounds.sum_error(rounding_bounds.roundings(made()[0]))
rounding_bounds.same_numbers(actual, wanted, error)
resumed = accelerated(resume=True)
assert resumed == actual[len(actual) // 2 :], (resumed, actual)
