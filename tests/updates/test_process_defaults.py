"""A training has the same bits whatever the default dtype and the default device of the process are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.losses import causal_lm
from tests.support.oracle import Job, Result, assert_same, start, trained
from tests.support.trainer_runs import FEW, ended, offloaded, result, trainer
from tests.support.trainer_runs import assert_same as assert_same_runs

DISK = ("nvme", "nvme")
DEFAULTS: dict[str, tuple[torch.dtype, str]] = {
    "bf16": (torch.bfloat16, "cpu"),
    "float64": (torch.float64, "cpu"),
    "another device": (torch.float32, "meta"),
}
"""Of the process. A tensor on the device meta has no values, so that any of ours there would be an error."""


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Changes the defaults of the process inside of the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device) if device != "cpu" else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


class Layers(nn.Module):
    """Layers whose forward makes no tensor of a default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values + layer(values)
        return values


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + micro)
    values = torch.randn(4, 16, generator=generator, dtype=torch.float32, device="cpu")
    return model(values.to(next(model.parameters()).dtype)).float().square().mean()  # type: ignore[no-any-return]


def run(job: Job, folder: Path) -> tuple[Result, dict[str, torch.Tensor]]:
    """Trains, saves, loads, and reads the optimizer's states."""
    engine = start(job, DISK, folder / "swap")
    try:
        result = trained(engine, job)
        engine.save_checkpoint(folder / "saved")
        engine.load_checkpoint(folder / "saved")
        states = engine.optimizer.state_dict()["state"]
        return result, {f"{number}.{name}": value for number, own in states.items() for name, value in own.items()}
    finally:
        engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.works(
    "Engines and processes", "`torch.set_default_dtype` and `torch.set_default_device` change no bit", "right"
)
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("AdamW", "fp16"), ("Lamb", "fp32"), ("Muon", "bf16"), ("Lion", "fp32"), ("torch.optim.RAdam", "bf16")],
)
def test_a_training_has_the_same_bits(optimizer: str, dtype: str, tmp_path: Path) -> None:
    job = Job(Layers, loss, steps=2, accumulation=2, optimizer=optimizer, dtype=dtype)
    torch.manual_seed(job.seed)
    model = Layers()  # a model has the dtypes and the devices with which its script builds it
    job = job._replace(model=lambda: copy.deepcopy(model))
    expected, states = run(job, tmp_path / "expected")
    assert states and {tensor.dtype for tensor in states.values()} == {torch.float32}
    for name, (default, device) in DEFAULTS.items():
        with defaults(default, device):
            result, states_of_another = run(job, tmp_path / name)
        assert_same(result, expected, name)
        assert states.keys() == states_of_another.keys()
        for key, value in states.items():
            # torch's own code counts in the default dtype of the process.
            assert torch.equal(value, states_of_another[key]) and (
                value.dtype == states_of_another[key].dtype or default.itemsize == 8
            )


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_trainer_logs_and_trains_the_same_bits(precision: str, tmp_path: Path) -> None:
    """The loss in chunks of tokens included, and the sums of losses that are logged."""
    changed: dict[str, Any] = {} if precision == "fp32" else {precision: True}
    expected = offloaded(tmp_path / "expected", rows=FEW, num_train_epochs=1, **changed)
    with ended(trainer(tmp_path / "bf16", rows=FEW, num_train_epochs=1, **changed)) as mine:
        with defaults(torch.bfloat16, "cpu"):
            mine.train()
        assert_same_runs(result(mine), expected)


@pytest.mark.parametrize(("dtype", "items"), [(torch.bfloat16, None), (torch.float32, torch.tensor(5))])
def test_the_loss_in_chunks_has_the_same_bits(dtype: torch.dtype, items: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(count, 16, generator=draw).to(dtype) for count in (9, 24))
    labels = torch.randint(0, 24, (9,), generator=draw)
    results = []
    for default in (torch.float32, torch.bfloat16, torch.float64):
        mine = [each.clone().requires_grad_() for each in (hidden, weight)]
        with defaults(default, "cpu"):
            value = causal_lm(*mine, labels, num_items_in_batch=items, label_smoothing=0.1, z_loss=1e-3, chunk_tokens=4)
            value.backward()
        assert value.dtype is torch.float32
        results.append([value.detach(), *(each.grad for each in mine)])
    for gradients in results[1:]:
        assert all(map(torch.equal, results[0], gradients))
