"""Every optimizer with a kernel is that of torch; a rule of one's own trains too."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import offload
from offload import kernels, testing
from offload.engine.optimizer import Optimizer, Rule
from offload.engine.update_strategy import TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.errors import ConfigError, StoreError
from offload.layout import modes
from offload.optimizers.fused import segments_in
from offload.states import State
from tests.support import rounding_bounds
from tests.support.oracle import (
    Job,
    assert_same_tensors,
    config,
    plain_loop,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
    weights_of,
)
from tests.support.param_states import MIXTURE as THREE_BLOCKS

DISK = ("nvme", "nvme")
SAVED = 2
"""The step that is saved."""


def assert_resumes_and_loads(job: Job, folder: Path, **elsewhere: Any) -> None:
    """Asserts the bits of `job` after a resume, and after a load into an engine with other tiers that has trained.

    Args:
        job: the job.
        folder: an empty folder.
        elsewhere: options of the engine that loads.
    """
    unbroken = run(job, DISK, folder / "whole")
    engine = start(job, DISK, folder / "run")
    losses = [train_step(engine, job, step) for step in range(SAVED)]
    engine.save_checkpoint(folder / "saved")
    engine.destroy()
    engine = start(job, DISK, folder / "run", resume="must")
    resumed = losses + [train_step(engine, job, step) for step in range(SAVED, job.steps)]
    weights = weights_of(engine)
    engine.destroy(remove=True)
    assert resumed == unbroken.losses
    assert_same_tensors(weights, unbroken.weights)
    engine = start(job, ("cpu", "none"), folder / "other", **elsewhere)
    train_step(engine, job, job.steps + 1)  # states to be replaced
    engine.load_checkpoint(folder / "saved")
    assert losses + [train_step(engine, job, step) for step in range(SAVED, job.steps)] == unbroken.losses
    assert_same_tensors(weights_of(engine), unbroken.weights)
    engine.destroy(remove=True)


SOME = (DISK, ("cpu", "cpu"), ("none", "nvme"), ("none", "none"))
MIXTURE = THREE_BLOCKS
JOBS = {
    "AdamW": MIXTURE,
    "Adam": MIXTURE._replace(optimizer="Adam", weight_decay=0.0, params=(("betas", (0.8, 0.95)),)),
    "Lamb": MIXTURE._replace(optimizer="Lamb", lr=1e-2),
    "Adagrad": MIXTURE._replace(optimizer="Adagrad", lr=1e-2, params=(("lr_decay", 0.1),)),
    "Lion": MIXTURE._replace(optimizer="Lion", lr=1e-4),
    "SGD": MIXTURE._replace(optimizer="SGD", lr=0.1, weight_decay=0.01),
    "momentum": MIXTURE._replace(
        optimizer="SGD", lr=0.1, weight_decay=0.01, params=(("momentum", 0.9), ("nesterov", True))
    ),
}


@pytest.mark.numeric
@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", JOBS)
def test_it_is_the_optimizer_of_torch(name: str, dtype: str, tmp_path: Path) -> None:
    job = JOBS[name]._replace(dtype=dtype)
    plain, mine = plain_loop(job), run(job, DISK, tmp_path)
    rounding_bounds.same_training(mine, plain, job)


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in JOBS if name != "AdamW"])
def test_placements_have_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    same_bits(JOBS[name]._replace(dtype=dtype), tmp_path, SOME)


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_lamb_has_the_same_bits_in_tiles_of_any_size(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a unit is several tiles, norms come first and moments are made twice."""
    job = Job(_wide, _square, steps=3, dtype=dtype, optimizer="Lamb", lr=1e-2)
    unbroken = run(job, DISK, tmp_path / "whole")
    small_pieces(monkeypatch)
    for placement in SOME:
        settings = config(job, placement, tmp_path / "-".join(placement))
        settings["zero_optimization"]["sub_group_size"] = 4096
        torch.manual_seed(job.seed)
        engine = offload.initialize(model=job.model(), config=settings)[0]
        assert 0 < testing.inspect(engine).tile_numel < 3 * 4096
        for step in range(job.steps):
            train_step(engine, job, step)
        states = engine.module.state_dict()
        assert_same_tensors(states, unbroken.weights, str(placement))
        engine.destroy(remove=True)


def _wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(100, 201), torch.nn.ReLU(), torch.nn.Linear(201, 7))


def _square(model: Any, step: int, micro: int) -> torch.Tensor:
    dtype = next(iter(model.module.parameters())).dtype if hasattr(model, "module") else torch.float32
    rows = torch.randn(4, 100, generator=torch.Generator().manual_seed(step)).to(dtype)
    return model(rows).float().square().mean()


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Lamb", "Adagrad", "Lion", "SGD", "momentum"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_run_is_resumed_and_saved_with_its_states(name: str, dtype: str, tmp_path: Path) -> None:
    assert_resumes_and_loads(JOBS[name]._replace(dtype=dtype), tmp_path)


@pytest.mark.numeric
def test_a_run_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    job = JOBS["Lion"]
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    with pytest.raises(
        StoreError, match=r'mode is "fp32 lion" in the run and "fp32" here; resume with the optimizer that the run had'
    ):
        start(MIXTURE, DISK, tmp_path, resume="must")
    with pytest.raises(StoreError, match="here; resume in the dtype and with the optimizer that the run had"):
        start(MIXTURE._replace(dtype="bf16"), DISK, tmp_path, resume="must")
    with pytest.raises(StoreError, match="here; resume in the dtype that the run had"):
        start(job._replace(dtype="bf16"), DISK, tmp_path, resume="must")
    engine = start(MIXTURE, DISK, tmp_path / "other")
    with pytest.raises(StoreError, match="in mode fp32 lion, this engine is in mode fp32"):
        engine.load_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
    train_step(engine, MIXTURE, 1)
    engine.destroy(remove=True)


# -- optimizers of torch ------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1), "Adagrad"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01), "SGD"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, momentum=0.9, nesterov=True), "momentum"),
    ],
)
def test_an_optimizer_that_is_passed_is_that_of_the_config(make: Any, name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    torch.manual_seed(job.seed)
    model = job.model()
    settings = {key: value for key, value in config(job, DISK, tmp_path / "mine").items() if key != "optimizer"}
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    engine = offload.initialize(model=model, optimizer=optimizer, config=settings)[0]
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "other").losses


@pytest.mark.numeric
def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="contains states already"):
        offload.initialize(model=model, optimizer=optimizer, config={})


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_momentum_of_one_group_leaves_the_other_as_torch_does(dampening: float, dtype: str, tmp_path: Path) -> None:
    """Bit for bit: without momentum nothing is dampened, and the buffer of before waits.

    All products are by powers of two, so that torch, which may fuse them with a sum, rounds as the kernel does.
    """

    def make(model: torch.nn.Sequential) -> torch.optim.Optimizer:
        groups = [{"params": list(part.parameters())} for part in model]
        groups[0] |= {"momentum": 0.0}
        return torch.optim.SGD(groups, lr=0.125, momentum=0.5, dampening=dampening)

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    settings = config(Job(_wide, _square, clip=0.0, dtype=dtype), DISK, tmp_path)
    del settings["optimizer"]
    optimizer, theirs = make(model), make(plain)
    engine = offload.initialize(model=model, optimizer=optimizer, config=settings)[0]
    for step in range(6):
        for stepped in (optimizer, theirs):
            stepped.param_groups[1]["momentum"] = 0.0 if step in (2, 3) else 0.5
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(rows.to(next(model.parameters()).dtype)).float().square().mean())
        # The engine's own gradients, which a matrix product of 16 bits rounds otherwise than one of 32.
        for name, parameter in plain.named_parameters():
            parameter.grad = offload.safe_get_full_grad(engine.module.get_parameter(name))
        engine.step()
        theirs.step()
        for name, parameter in plain.named_parameters():
            master = offload.safe_get_full_fp32_param(engine.module.get_parameter(name))
            assert torch.equal(master, parameter.detach()), (step, name)
    engine.destroy(remove=True)


LR, BETA = 2.0**-7, 0.75
STEPS = 3


def moved(momentum: torch.Tensor, gradient: torch.Tensor, lr: float) -> torch.Tensor:
    """Steps a momentum in place, and returns the move of the weights: the momentum's signs."""
    momentum.copy_(momentum * BETA + gradient * (1 - BETA))
    return momentum.sign() * -lr


class SignStep(NamedTuple):
    lr: float
    grad_scale: float


class SignRule(Rule):
    """Descent along the signs of a momentum."""

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> SignStep:
        return SignStep(float(group["lr"]), grad_scale)

    def strategy(self, setting: UpdateSetting) -> SignUpdates:
        return SignUpdates()


class SignUpdates:
    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        return range(start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        return SignSteps(update)

    def begin_part(self, update: UnitUpdate, writes: kernels.Writes) -> UnitSteps | None:
        return None


class SignSteps:
    passes, in_place = 1, False
    cuts: Sequence[range] = ()
    drafts: Sequence[State] = ()

    def __init__(self, update: UnitUpdate) -> None:
        self._update = update

    def run(self, tile: TileContent, last: bool) -> None:
        assert tile.gradient is not None
        for _, segment in segments_in(self._update, tile):
            part, step = slice(segment.start, segment.stop), segment.step
            gradient = tile.gradient[part] * step.grad_scale
            tile.states[State.WEIGHT][part] += moved(tile.states[State.EXP_AVG][part], gradient, step.lr)


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3))


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(step))


def plain() -> dict[str, torch.Tensor]:
    trained = model()
    momenta = {name: torch.zeros_like(parameter) for name, parameter in trained.named_parameters()}
    for step in range(STEPS):
        trained(rows(step)).square().mean().backward()
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                assert parameter.grad is not None
                parameter += moved(momenta[name], parameter.grad, LR * (step + 1))
                parameter.grad = None
    return trained.state_dict()


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_a_rule_of_ones_own_trains_from_any_tier(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modes.RULE_LAYOUTS, "sign", modes.RuleLayout((State.EXP_AVG,)))
    trained, rule = model(), SignRule(name="sign", scheduled=("lr",))
    optimizer = Optimizer([{"params": list(trained.parameters())}], {"lr": LR}, rule)
    tier = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier},
        "offload": {"device": "cpu"},
    }
    engine = offload.initialize(model=trained, optimizer=optimizer, config=config)[0]
    assert engine.optimizer is optimizer
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (step + 1)  # as a schedule does
        engine.backward(engine(rows(step)).square().mean())
        engine.step()
    assert_same_tensors(engine.state_dict(), plain())
    engine.destroy(remove=True)
