"""Invalid input is a ConfigError or UsageError before anything is touched; later errors lose nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import BudgetError, ConfigError, NumericsError, StoreError, UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import assert_same_tensors, config, run, start, train_step

DISK = ("nvme", "nvme")


def begin(folder: Path, model: nn.Module | None = None, **changes: Any) -> offload.Engine:
    content = config(models.SHALLOW, DISK, folder)
    for key, value in changes.items():
        content[key] = value
    return offload.initialize(model=model or models.shallow(), config=content)[0]


def untouched(folder: Path, model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """No files, and a model as it was."""
    assert not any(path.is_file() for path in folder.rglob("*"))
    assert_same_tensors(before, model.state_dict())


CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no optimizer": ({"optimizer": None}, ConfigError, '"optimizer": {"type": "AdamW"'),
    "no learning rate": ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, ConfigError, "learning rate"),
    "a host budget": (
        {"offload": {"nvme_path": "PATH", "host_memory": "100KiB"}},
        BudgetError,
        r'"host_memory" is 100\.0 KiB.*least that works is .*update pipeline.*gradients',
    ),
    "more host memory than there is": (
        {"offload": {"nvme_path": "PATH", "host_memory": "900TiB"}},
        BudgetError,
        r'"host_memory" leaves 900\.0 TiB for this engine, but only .* is free',
    ),
    "a device budget": (
        {"offload": {"nvme_path": "PATH", "device_memory": "4KiB"}},
        BudgetError,
        r'"device_memory" is 4\.0 KiB.*least that works',
    ),
    "a unit": ({"offload": {"nvme_path": "PATH", "units": ["Nothing"]}}, ConfigError, "Nothing"),
    "a device": ({"offload": {"nvme_path": "PATH", "device": "cuda"}}, ConfigError, "no CUDA device"),
}


def test_before_anything_is_touched(tmp_path: Path) -> None:
    model = models.shallow()
    before = copy.deepcopy(model.state_dict())
    for case, (given, error, message) in CASES.items():
        if case == "a device" and torch.cuda.is_available():
            continue
        print(case)
        with pytest.raises(error, match=message):
            begin(tmp_path, model, **json.loads(json.dumps(given).replace("PATH", str(tmp_path))))
        untouched(tmp_path, model, before)
    begin(tmp_path, model).destroy(remove=True)  # and the same model and folder work


def test_a_path_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot use .*inside: Not a directory; .*nvme_path"):
        begin(tmp_path / "file" / "inside")


def test_a_full_disk_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said with both numbers where step was asked for; with one slot and a notice where it was not."""
    import shutil

    real = shutil.disk_usage(tmp_path)
    two_slots = 24 * sum(p.numel() for p in models.shallow().parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=two_slots * 3 // 4))
    with pytest.raises(StoreError, match=r"need .* free.*durability"):
        begin(tmp_path, offload={"nvme_path": str(tmp_path), "durability": "step"})
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    engine = begin(tmp_path)
    assert any("durability none" in notice for notice in engine.notices)
    engine.destroy()
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "what cannot be resumed is not kept"


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS has no kernel"),
        (lambda p: torch.optim.AdamW(list(p)[:2]), "in no group"),
        (lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.zeros(1))]), "not the model's"),
    ],
)
def test_an_optimizer_that_does_not_fit(optimizer: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        offload.initialize(
            model=models.shallow(), optimizer=optimizer, config=config(models.SHALLOW, DISK, tmp_path, device="cpu")
        )
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_schedule_that_needs_a_metric(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        offload.initialize(
            model=models.shallow(),
            lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
            config=config(models.SHALLOW, DISK, tmp_path),
        )
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_arguments_of_initialize(tmp_path: Path) -> None:
    content = config(models.SHALLOW, DISK, tmp_path)
    with pytest.raises(ConfigError, match=r"model, a torch\.nn\.Module, got dict"):
        offload.initialize(model={}, config=content)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one of config, config_params"):
        offload.initialize(model=models.shallow())
    with pytest.raises(ConfigError, match="one of config, config_params"):
        offload.initialize(model=models.shallow(), config=content, config_params=content)
    quantized = models.Mixture()
    quantized.packed = nn.Parameter(torch.zeros(4))
    quantized.packed.quant_state = object()
    with pytest.raises(ConfigError, match="shall train is quantized, the first is packed"):
        offload.initialize(model=quantized, config=content)


def test_a_loss_that_is_nan_loses_nothing(tmp_path: Path) -> None:
    """The step is refused, the weights are those before, and training goes on with the right bits."""
    job = models.SHALLOW
    unbroken = run(job, DISK, tmp_path / "whole")
    engine = start(job, DISK, tmp_path / "nan")
    losses = []
    for step in range(job.steps):
        bad = job.loss(engine, step, 0) * float("nan")
        engine.backward(bad)
        with pytest.raises(
            NumericsError, match=rf"step {step + 1} is nan.*not applied.*weights are those of step {step}"
        ):
            engine.step()
        assert engine.global_steps == step
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == unbroken.losses


def test_backwards_that_may_be_one_micro_batch_or_two(tmp_path: Path) -> None:
    """With accumulation, step() is called after each; `optimizer.step()` once after all of them is right as well."""
    job = models.SHALLOW._replace(accumulation=2)
    expected = run(job, DISK, tmp_path / "each")
    engine = start(job, DISK, tmp_path / "once")
    for micro in range(2):
        engine.backward(job.loss(engine, 0, micro))
    with pytest.raises(UsageError, match="2 backwards ran since the last step"):
        engine.step()
    engine.zero_grad()
    for step in range(job.steps):
        for micro in range(2):
            engine.backward(job.loss(engine, step, micro))
        engine.optimizer.step()
    weights = engine.module.state_dict()
    engine.destroy(remove=True)
    assert_same_tensors(weights, expected.weights)


def test_groups_cannot_be_added_later(tmp_path: Path) -> None:
    engine = start(models.SHALLOW, DISK, tmp_path)
    with pytest.raises(UsageError, match=r"after offload\.initialize"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    engine.destroy(remove=True)


def test_calls_that_cannot_be_right(tmp_path: Path) -> None:
    engine = start(models.SHALLOW, DISK, tmp_path)
    with pytest.raises(UsageError, match="shape"):
        engine.backward(torch.ones(3))
    with pytest.raises(UsageError, match="float"):
        engine.backward(1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not depend"):
        engine.backward(torch.ones(()))
    with pytest.raises(UsageError, match="under an engine already"):
        offload.initialize(model=engine.module, config=config(models.SHALLOW, DISK, tmp_path, run="other"))
    loss = models.SHALLOW.loss(engine, 0, 0)
    engine.backward(loss)
    engine.step()
    with pytest.raises((UsageError, RuntimeError)):
        loss.backward()
    engine.destroy(remove=True)
    engine.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        models.SHALLOW.loss(engine, 1, 0)


@pytest.mark.cpu_only("kernels of other devices take statistics in fp32")
def test_statistics_that_torch_cannot_use_are_named(tmp_path: Path) -> None:
    job = models.SHALLOW._replace(model=models.resnet, dtype="bf16")
    with pytest.raises(ConfigError, match=r'normalization is a BatchNorm.*"buffer_dtype": "bf16"'):
        start(job, DISK, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.numeric
def test_the_users_own_optimizer_and_schedule(tmp_path: Path) -> None:
    """Groups with their own numbers, a schedule bound to the user's object: both act, as in the plain loop."""
    job = models.MIXTURE._replace(accumulation=1, steps=5)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        return [
            {"params": [p for n, p in trainable if "bias" not in n], "weight_decay": 0.2},
            {"params": [p for n, p in trainable if "bias" in n], "weight_decay": 0.0, "lr": 3e-3},
        ]

    def loop(model: Any, optimizer: torch.optim.Optimizer, step: Any, backward: Any) -> list[float]:
        losses = []
        for index in range(job.steps):
            loss = job.loss(model, index, 0)
            backward(loss)
            losses.append(float(loss.detach()))
            step()
        return losses

    torch.manual_seed(0)
    plain = job.model()
    mine = torch.optim.AdamW(groups(plain), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(mine, 5)

    def plain_step() -> None:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), job.clip)
        mine.step()
        schedule.step()
        mine.zero_grad()

    expected = loop(plain, mine, plain_step, lambda loss: loss.backward())
    torch.manual_seed(0)
    model = job.model()
    theirs = torch.optim.AdamW(groups(model), lr=1e-3)
    content = config(job, DISK, tmp_path)
    del content["optimizer"]
    engine, optimizer, _, scheduler = offload.initialize(
        model=model,
        optimizer=theirs,
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 5),
        config=content,
    )
    actual = loop(engine, optimizer, engine.step, engine.backward)
    assert engine.get_lr() == [group["lr"] for group in mine.param_groups]
    assert scheduler.last_epoch == 5
    engine.destroy(remove=True)
    rounding_bounds.same_losses(actual, expected, job)


ARGUMENTS: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], str]] = {
    "lr_scheduler": (lambda _: {"lr_scheduler": "cosine"}, r"object with step\(\).*got str; .*block \"scheduler\""),
    "names": (lambda model: {"model_parameters": model.named_parameters()}, r"contains a tuple; .*parameters\(\)"),
    "names in a group": (
        lambda model: {"model_parameters": [{"params": model.named_parameters()}]},
        "contains a tuple",
    ),
    "no parameters": (
        lambda model: {"model_parameters": model.parameters},
        "contains a method; leave this argument out",
    ),
    "a DataLoader": (
        lambda _: {"training_data": torch.utils.data.DataLoader([1, 2, 3])},
        "expects a data set .*got DataLoader; give DataLoader.dataset",
    ),
    "a dict": (lambda _: {"training_data": {"train": [1]}}, "got dict; .*one split of a dict"),
    "collate_fn": (
        lambda _: {"collate_fn": 3},
        "expects a function that makes a batch .*got int; leave collate_fn out",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_other_kinds(case: str, tmp_path: Path) -> None:
    arguments, message = ARGUMENTS[case]
    model = models.shallow()
    with pytest.raises(ConfigError, match=message):
        offload.initialize(model=model, config=config(models.SHALLOW, DISK, tmp_path), **arguments(model))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("path", ["LONG", "LONG/b", "a/LONG"])
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_name_that_is_too_long_is_an_error_of_its_key(
    path: str, resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also below a folder that is missing, where the system looks at no name."""
    monkeypatch.chdir(tmp_path)
    path = path.replace("LONG", "L" * 300)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f'"nvme_path" {path} cannot be used: File name too long'):
        offload.initialize(model, optimizer=optimizer, states="nvme", path=path, config={"offload": {"resume": resume}})
