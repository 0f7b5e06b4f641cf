"""Weights of modules that need fp32 are named, and those of `keep_in_fp32` are fp32 under bf16 and fp16."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.config import load_config
from offload.errors import ConfigError, StoreError, UsageError
from offload.layout.flat_layout import layouts_of
from offload.layout.memory_plan import divide, division_of
from offload.planner.memory import Room, settle
from offload.swapper.memory.limits import free_host_memory
from tests.support import models, rounding_bounds
from tests.support.oracle import (
    PLACEMENTS,
    Job,
    accumulated_step,
    assert_same,
    config,
    plain_loop,
    run,
    same_bits,
    start,
    train_step,
    weights_of,
)
from tests.support.ranks.rank_jobs import my_rows
from tests.support.ranks.rank_pool import RankPool, train


class Gate(nn.Module):
    """Scores of three experts, which are computed in fp32 whatever the model's dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(3, 12, dtype=torch.float32) / 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(values.device.type, enabled=False):
            return nn.functional.linear(values.float(), self.scores).softmax(-1)


class Routed(nn.Module):
    def __init__(self, gate: Callable[[], nn.Module] = Gate) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(nn.Linear(12, 12) for _ in range(3)), gate()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weights = self.gate(values).to(values.dtype)
        return sum(weights[:, [number]] * expert(values) for number, expert in enumerate(self.experts))


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(step))
    return (model(rows).float() - 1).square().mean()


@pytest.mark.works("Precision", "a module that needs its weight in fp32 (a router) under `bf16`", "refused")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_module_that_needs_fp32_is_named(dtype: str, tmp_path: Path) -> None:
    job = Job(Routed, loss, dtype=dtype)
    engine = start(job, ("none", "cpu"), tmp_path)
    with pytest.raises(
        UsageError, match=rf"^gate computes in fp32 with a weight or an input in {dtype}: .*torch_autocast"
    ):
        job.loss(engine, 0, 0)
    engine.destroy(remove=True)


@pytest.mark.numeric
def test_the_advice_trains_as_pytorch_does(tmp_path: Path) -> None:
    job = Job(Routed, loss, steps=3, lr=1e-2, clip=0)
    torch.manual_seed(job.seed)
    plain = Routed()
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=job.lr, weight_decay=job.weight_decay), []
    for step in range(job.steps):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            value = loss(plain, step, 0)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    content = config(job, ("nvme", "nvme"), tmp_path) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    torch.manual_seed(job.seed)
    engine = offload.initialize(model=Routed(), config=content)[0]
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert losses[0] == expected[0] and torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=1e-3)


def test_an_error_about_something_else_stays_torchs(tmp_path: Path) -> None:
    job = Job(lambda: Routed(lambda: nn.Linear(13, 3)), loss, dtype="bf16")
    engine = start(job, ("none", "cpu"), tmp_path)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        job.loss(engine, 0, 0)
    assert not isinstance(error.value, UsageError)
    engine.destroy(remove=True)


class Marked(nn.Module):
    """Marks weights as classes of transformers do."""

    _keep_in_fp32_modules_strict = ("gate.scores", "rates")

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.separates = Routed(lambda: nn.Sequential(nn.Linear(12, 3))), nn.Parameter(torch.ones(12))
        self.gate, self.rates = Gate(), nn.ParameterList([torch.ones(2)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values) * self.separates


def test_weights_that_transformers_would_load_in_fp32_are_told(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, logger="offload")
    start(Job(Marked, loss, dtype="bf16"), ("none", "cpu"), tmp_path).destroy(remove=True)
    assert (
        "computes with 2 weights in bf16 that transformers would load in fp32, the first is gate.scores" in caplog.text
    )
    caplog.clear()
    start(Job(Marked, loss), ("none", "cpu"), tmp_path).destroy(remove=True)
    assert "would load in fp32" not in caplog.text


class LimitedGate(nn.Module):
    """Scores of four experts, which are computed in fp32 whatever the model's dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 16) / 4), nn.Parameter(torch.zeros(4))
        self.limits = nn.Parameter(torch.linspace(0.9, 1.1, 4), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype == self.limits.dtype
        scores = nn.functional.linear(values.to(self.weight.dtype), self.weight, self.bias)
        return (scores * self.limits).softmax(-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate, self.experts = nn.Linear(16, 16), LimitedGate(), nn.Linear(16, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(values))
        shares = self.gate(hidden).to(values.dtype)
        experts = self.experts(hidden).unflatten(-1, (4, 16))
        return values + (shares.unsqueeze(-1) * experts).sum(-2)


class KeptRouted(nn.Module):
    """Gradients of a gate come amid those of its layer, which is a unit; the scale is a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(12, 16), nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.rand(16) + 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values.to(self.first.weight.dtype))
        for layer in self.layers:
            values = layer(values)
        return values.to(self.scale.dtype) * self.scale


def loss_kept(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + micro))
    return (model(my_rows(rows)).float() - 1).square().mean()


JOB = Job(KeptRouted, loss_kept, dtype="bf16", lr=1e-2, keep_in_fp32=("gate", "scale"))


@pytest.mark.works("Precision", "a router that stays in fp32 under `bf16`, by `keep_in_fp32`", "right")
@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_it_trains_as_pytorch_does(dtype: str, accumulation: int, tmp_path: Path) -> None:
    job = JOB._replace(dtype=dtype, accumulation=accumulation)
    mine, plain = same_bits(job, tmp_path), plain_loop(job)
    rounding_bounds.same_training(mine, plain, job)
    kept = {name for name, value in mine.weights.items() if value.dtype is torch.float32}
    assert kept == {name for name in mine.weights if "gate" in name or name == "scale"}


def test_gradients_wait_for_their_update_in_fp32(tmp_path: Path) -> None:
    engine = start(JOB, PLACEMENTS[-1], tmp_path)
    engine.backward(loss_kept(engine, 0, 0))
    gradients = [
        offload.safe_get_full_grad(engine.module.get_parameter(f"layers.1.{name}.weight")) for name in ("gate", "inner")
    ]
    assert [torch.equal(each, each.bfloat16().float()) for each in gradients if each is not None] == [False, True]
    engine.destroy(remove=True)


def test_both_orders_of_micro_batches_give_the_same_bits(tmp_path: Path) -> None:
    job = JOB._replace(accumulation=3)
    result = run(job, PLACEMENTS[0], tmp_path / "one", accumulated_step, schedule="micro_batch_major")
    options: dict[str, Any] = {"schedule": "layer_major", "activations": "nvme", "device_memory": 48 << 10}
    assert_same(result, run(job, PLACEMENTS[-1], tmp_path / "other", accumulated_step, **options))


OPTIMIZERS = {
    "moments in 8 bits": ("AdamW", {"moments": "int8"}),
    "masters of 24 bits": ("AdamW", {"master": "bf24", "moments": "bf16"}),
    "Lamb": ("Lamb", {}),
    "Muon": ("Muon", {}),
    "an optimizer of torch": ("NAdam", {}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_form_of_states_has_the_same_bits_on_disk_and_in_memory(name: str, tmp_path: Path) -> None:
    optimizer, options = OPTIMIZERS[name]
    job = JOB._replace(optimizer=optimizer)
    same_bits(job, tmp_path, (PLACEMENTS[0], PLACEMENTS[-1]), **options)


def loss_of_all_rows(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + micro))
    return (model(rows).float() - 1).square().mean()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_with_the_same_rows_have_the_bits_of_one(stage: int, ranks: RankPool, tmp_path: Path) -> None:
    """The mean of two equal gradients is either of them, unless one is rounded on its way."""
    job = JOB._replace(loss=loss_of_all_rows, accumulation=2, stage=stage, clip=0.0)
    alone = train(job, PLACEMENTS[-1], tmp_path / "one")
    for result in ranks.run(train, job, PLACEMENTS[0], tmp_path / "two"):
        assert_same(result._replace(norms=alone.norms), alone)


def after(steps: int, job: Job, folder: Path, checkpoint: Path | None = None) -> offload.Engine:
    """Returns an engine that has trained up to a step, the first of them by the one that wrote `checkpoint`."""
    engine = start(job, PLACEMENTS[-1], folder)
    if checkpoint is not None:
        engine.load_checkpoint(checkpoint)
    for step in range(engine.global_steps, steps):
        train_step(engine, job, step)
    return engine


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = after(2, JOB, tmp_path / "first")
    first.save_checkpoint(tmp_path / "saved")
    train_step(first, JOB, 2)
    second = after(3, JOB, tmp_path / "second", tmp_path / "saved")
    left, right = weights_of(first), weights_of(second)
    assert all(torch.equal(left[name], right[name]) and left[name].dtype is right[name].dtype for name in left)
    for engine in (first, second):
        engine.destroy(remove=True)


def test_a_checkpoint_with_all_weights_in_bf16_is_loaded_and_the_reverse_is_refused(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain = JOB._replace(keep_in_fp32=())
    before = after(2, plain, tmp_path / "before")
    before.save_checkpoint(tmp_path / "saved")
    kept = after(2, JOB, tmp_path / "kept", tmp_path / "saved")
    for mine, theirs in zip(kept.module.parameters(), before.module.parameters(), strict=True):
        values = [offload.safe_get_full_fp32_param(each) for each in (mine, theirs)]
        assert torch.equal(*values)
    assert '"keep_in_fp32" kept 0 weights in fp32 and keeps 10 now' in caplog.text
    kept.save_checkpoint(tmp_path / "saved again")
    with pytest.raises(StoreError, match=r'in fp32 and .* in bf16, which have one dtype here: .*"keep_in_fp32"'):
        before.load_checkpoint(tmp_path / "saved again")
    for engine in (before, kept):
        engine.destroy(remove=True)


def test_files_of_weights_have_the_dtype_of_each(tmp_path: Path) -> None:
    engine = after(2, JOB, tmp_path / "swap")
    own = weights_of(engine)
    engine.save_pretrained(tmp_path / "saved")
    engine.save_pretrained(tmp_path / "all", dtype="fp32")
    engine.destroy()
    assert CliRunner().invoke(app, ["export", str(tmp_path / "swap" / "default"), str(tmp_path / "out")]).exit_code == 0
    for folder in ("saved", "out"):
        tensors = safetensors.torch.load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(own[name], value) and own[name].dtype is value.dtype for name, value in tensors.items())
    tensors = safetensors.torch.load_file(tmp_path / "all" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert tensors.keys() == own.keys() and torch.equal(tensors["scale"], own["scale"])


def test_names_are_those_of_modules_classes_and_parameters(tmp_path: Path) -> None:
    def kept(*names: str) -> set[str]:
        engine = start(JOB._replace(keep_in_fp32=names), PLACEMENTS[0], tmp_path)
        fp32_names = {name for name, each in engine.module.named_parameters() if each.dtype is torch.float32}
        engine.destroy(remove=True)
        return fp32_names

    gates = {f"layers.{layer}.gate.{name}" for layer in range(3) for name in ("weight", "bias", "limits")}
    assert kept("LimitedGate") == kept("gate") == kept("layers.*.gate") == gates
    assert kept("gate.b*", "first") == {
        *(f"layers.{layer}.gate.bias" for layer in range(3)),
        "first.weight",
        "first.bias",
    }
    with pytest.raises(ConfigError, match=r'^"keep_in_fp32" names router, ate: the model'):
        kept("router", "gate", "ate")


class Listed(KeptRouted):
    _keep_in_fp32_modules_strict = ("gate",)


def test_what_transformers_keeps_in_fp32_stays_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO", logger="offload")

    def loaded() -> nn.Module:  # as by from_pretrained(dtype=torch.bfloat16)
        model = Listed().bfloat16()
        for layer in model.layers:
            layer.gate.float()
        return model

    job = JOB._replace(model=loaded, keep_in_fp32=())
    engine = start(job, PLACEMENTS[0], tmp_path)
    assert engine.module.get_parameter("layers.1.gate.bias").dtype is torch.float32
    assert "9 weights stay in fp32, as the model's class says, the first is layers.0.gate.bias" in caplog.text
    engine.destroy(remove=True)
    engine = start(job, PLACEMENTS[0], tmp_path, keep_in_fp32=[])
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.bfloat16}
    engine.destroy(remove=True)


def test_from_pretrained_and_load_pretrained_agree(tmp_path: Path) -> None:
    models.t5().save_pretrained(tmp_path)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    content = config(JOB._replace(dtype="fp16", keep_in_fp32=()), PLACEMENTS[0], tmp_path)
    mine = offload.load_pretrained(transformers.T5ForConditionalGeneration, tmp_path, content)
    dtypes = {name: each.dtype for name, each in mine.named_parameters()}
    assert dtypes == {name: each.dtype for name, each in theirs.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {n for n in dtypes if ".wo." in n}


def test_a_resume_with_other_names_says_which_key_differs(tmp_path: Path) -> None:
    after(1, JOB, tmp_path).destroy()
    with pytest.raises(StoreError, match=r'"keep_in_fp32" kept 10 weights in fp32 in the run and keeps 9 weights here'):
        start(JOB._replace(keep_in_fp32=("gate",)), PLACEMENTS[-1], tmp_path, resume="must")


def test_a_module_in_fp32_that_does_not_cast_is_named(tmp_path: Path) -> None:
    engine = start(JOB._replace(keep_in_fp32=("layers.1.inner",)), PLACEMENTS[0], tmp_path)
    with pytest.raises(
        UsageError, match=r'^layers.1.inner has its weights in fp32, by "keep_in_fp32", and an input in'
    ):
        loss_kept(engine, 0, 0)
    engine.destroy(remove=True)


def test_experts_that_are_units_are_refused(tmp_path: Path) -> None:
    job = Job(models.mixtral, models.language_loss, dtype="bf16", keep_in_fp32=("experts",))
    with pytest.raises(ConfigError, match=r'"keep_in_fp32" names .*experts.*, whose experts are units of their own'):
        start(job, PLACEMENTS[0], tmp_path)
    engine = start(job._replace(keep_in_fp32=("gate",)), PLACEMENTS[0], tmp_path)
    assert {n for n, each in engine.module.named_parameters() if each.dtype is torch.float32} == {
        n for n, _ in engine.module.named_parameters() if n.endswith("mlp.gate.weight")
    }
    engine.destroy(remove=True)


def test_the_plan_has_the_bytes_of_the_run(tmp_path: Path) -> None:
    content = config(JOB, PLACEMENTS[-1], tmp_path)
    units = divide(KeptRouted(), division_of(load_config(content))).units
    memory = settle(layouts_of(KeptRouted(), units), content, Room(free_host_memory(), 0, None))
    engine = start(JOB, PLACEMENTS[-1], tmp_path)
    parts = testing.inspect(engine)
    assert parts.store is not None and parts.store.spec.nbytes == memory.stored
    assert (engine.host_memory, engine.device_memory) == (memory.host, memory.device)
    engine.destroy(remove=True)
