"""What cannot be done with parameters under an engine is a clear error, and training goes on unharmed."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import UsageError
from tests.params.param_actions import DISK, Action, rows
from tests.support import models
from tests.support.oracle import assert_same_tensors, room_for, run, start, train_step
from tests.support.param_states import GPT2


def _a_view(module: nn.Module) -> None:
    module.transformer.ln_f.weight.data.view(-1)


def _turned(module: nn.Module) -> None:
    module.transformer.wte.weight.data.t_()


def _other_order(module: nn.Module) -> None:
    module.to(memory_format=torch.channels_last)
    module.transformer.wte.weight.to(memory_format=torch.channels_last)


def _edit_while_gathered(module: nn.Module) -> None:
    with offload.gathered(module.transformer.ln_f.weight):
        module.transformer.h[0].mlp.c_fc.weight.data.mul_(2)


def _assign(module: nn.Module) -> None:
    module.load_state_dict(module.state_dict(), assign=True)


def _set_gradient(module: nn.Module) -> None:
    module.transformer.ln_f.weight.grad = torch.zeros(32)


def _gathered_and_run(module: nn.Module) -> None:
    with offload.gathered(module):
        module(input_ids=models.tokens(0, 0))


def _gathered_and_changed(module: nn.Module) -> None:
    with offload.gathered(module.transformer.ln_f.weight), torch.no_grad():
        module.transformer.ln_f.weight.zero_()


@pytest.mark.parametrize("modify", [False, True])
def test_an_exception_inside_of_gathered_is_the_users_own(modify: bool, tmp_path: Path) -> None:
    """Also where a parameter has lost its shape by then, which is an error of its own without the exception."""
    engine = start(models.GPT2, ("nvme", "nvme"), tmp_path)
    norm = engine.module.transformer.ln_f
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    for error in (ZeroDivisionError, UsageError):
        with pytest.raises(error), offload.gathered(norm, modify=modify):
            norm.weight.data = torch.zeros(3, device=norm.weight.device)
            norm.bias.data.fill_(7.0)
            if error is ZeroDivisionError:
                raise ZeroDivisionError
        assert_same_tensors(norm.state_dict(), before, "the changes are dropped")
    engine.destroy(remove=True)


@pytest.mark.cpu_only("an accelerator has memory of its own, and says itself that there is none")
def test_weights_that_have_no_room_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(models.GPT2, ("nvme", "nvme"), tmp_path)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with monkeypatch.context() as patch:
        testing.replace(patch, "memory.free", lambda: 1024)
        with pytest.raises(offload.BudgetError, match=r"gathered parameters would take .*, 1\.0 KiB are free"):
            offload.gathered(engine.module).__enter__()
    assert_same_tensors(engine.module.state_dict(), before)
    engine.destroy(remove=True)


def _to_nothing(module: nn.Module) -> None:
    offload.gathered(3).__enter__()


def _functional_gradient(module: nn.Module) -> None:
    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = models.tokens(0, 0)
        return torch.func.functional_call(module, values, (), {"input_ids": ids, "labels": ids}, tie_weights=False).loss

    torch.func.grad(loss)({name: value.clone() for name, value in module.state_dict().items()})


REFUSED: dict[str, tuple[Action, str]] = {
    "`model.half()`, `model.to(dtype)`": (lambda module: module.half(), "precision and device are set in the config"),
    "`model.to(other device)`": (lambda module: module.to("meta"), "precision and device are set in the config"),
    "a view of a weight between steps": (_a_view, "offload.gathered"),
    "`.data.t_()` and others that change the shape": (_turned, "cannot become"),
    "another memory format": (_other_order, "is stored contiguously"),
    "edits while a parameter is gathered": (_edit_while_gathered, "is gathered"),
    "`load_state_dict(assign=True)`": (_assign, "leave assign out"),
    "a gradient set by hand": (_set_gradient, "gradients are in the engine"),
    "training the model inside of `gathered`": (_gathered_and_run, "is gathered"),
    "changing weights inside of `gathered` without `modify=True`": (_gathered_and_changed, "modify=True"),
    "`gathered` of something else": (_to_nothing, "parameters or a module"),
    "`torch.func.grad` over the model": (_functional_gradient, r"torch\.autograd\.grad instead"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", rows("Looking at weights and editing them, between steps", REFUSED, "refused"))
def test_refused_and_nothing_is_harmed(name: str, tmp_path: Path) -> None:
    job = GPT2._replace(steps=3)
    action, message = REFUSED[name]
    engine = start(job, DISK, tmp_path / "refused", device_memory=room_for(job, 2))
    losses = []
    for step in range(job.steps):
        with pytest.raises(UsageError, match=message):
            action(engine.module)
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


@pytest.mark.works("Looking at weights and editing them, between steps", "a weight after `destroy()`", "refused")
def test_no_weights_after_the_end(tmp_path: Path) -> None:
    engine = start(GPT2, DISK, tmp_path)
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="its engine was destroyed"):
        engine.module(input_ids=models.tokens(0, 0))
    with pytest.raises(UsageError, match="its engine was destroyed"):
        copy.deepcopy(engine.module)
    with pytest.raises(UsageError, match="its engine was destroyed"):
        torch.save(engine.module.state_dict(), io.BytesIO())


@pytest.mark.works(
    "Looking at weights and editing them, between steps", "a frozen weight changed by `load_state_dict`", "refused"
)
def test_frozen_weights_are_never_written(tmp_path: Path) -> None:
    job = models.MIXTURE
    engine = start(job, DISK, tmp_path)
    state = engine.module.state_dict()
    engine.module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.0\.weight is frozen"):  # torch gathers what copies raise
        engine.module.load_state_dict({name: value + 1 for name, value in state.items()})
    with pytest.raises(UsageError, match="set requires_grad before"):
        engine.module.requires_grad_(True)
    engine.destroy(remove=True)
