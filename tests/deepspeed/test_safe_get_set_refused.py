"""safe_get_* and safe_set_* with wrong arguments, or while the model runs, are an error that harms nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import BudgetError, UsageError
from tests.support import models
from tests.support.oracle import room_for, run, start, train_step
from tests.support.param_states import AREA, DISK


def _of_no_engine(module: nn.Module) -> None:
    offload.safe_get_full_fp32_param(nn.Parameter(torch.ones(3)))


def _no_parameter(module: nn.Module) -> None:
    offload.safe_get_full_grad(module.embedding.weight.data)


def _other_shape(module: nn.Module) -> None:
    offload.safe_set_full_fp32_param(module.embedding.weight, torch.ones(61 * 33))


def _other_dtype(module: nn.Module) -> None:
    offload.safe_set_full_optimizer_state(module.embedding.weight, torch.ones(61, 33, dtype=torch.float64), "exp_avg")


def _no_tensor(module: nn.Module) -> None:
    offload.safe_set_full_grad(module.scale, 1.0)  # type: ignore[arg-type]


def _unknown_state(module: nn.Module) -> None:
    offload.safe_get_full_optimizer_state(module.embedding.weight, "momentum")


def _frozen_state(module: nn.Module) -> None:
    weight = module.blocks[2][0].weight
    offload.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")


def _frozen_gradient(module: nn.Module) -> None:
    offload.safe_set_full_grad(module.blocks[2][0].weight, torch.zeros(70, 33))


def _part_of_another_length(module: nn.Module) -> None:
    offload.safe_set_local_optimizer_state(module.embedding.weight, torch.ones(61, 33), "exp_avg")


def _frozen_part(module: nn.Module) -> None:
    offload.safe_set_local_grad(module.blocks[2][0].weight, torch.zeros(70 * 33))


def _frozen_weight(module: nn.Module) -> None:
    offload.safe_set_full_fp32_param(module.blocks[2][0].weight, torch.zeros(70, 33))


def _gathered(module: nn.Module) -> None:
    with offload.gathered(module.embedding.weight):
        offload.safe_get_full_fp32_param(module.embedding.weight)


def _loss(module: nn.Module) -> torch.Tensor:
    ids = models.tokens(0, 0, (4, 16), 61)
    return models.token_loss(module(ids.to(module.embedding.weight.device)), ids)


def _in_forward(module: nn.Module) -> None:
    hook = module.blocks[0].register_forward_hook(
        lambda called, _, output: offload.safe_get_full_fp32_param(called[0].weight)  # bound
    )
    try:
        _loss(module)
    finally:
        hook.remove()


def _in_forward_of_another(module: nn.Module) -> None:
    hook = module.blocks[0].register_forward_hook(lambda *_: offload.safe_get_full_grad(module.unused.weight))
    try:
        _loss(module)
    finally:
        hook.remove()


def _in_backward(module: nn.Module) -> None:
    hook = module.scale.register_hook(lambda _: offload.safe_set_full_grad(module.scale, torch.ones(())))
    try:
        _loss(module).backward()
    finally:
        hook.remove()
        module.zero_grad()


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "of a parameter that no engine has": (_of_no_engine, "take the parameter from engine.module"),
    "of what is no parameter": (_no_parameter, "expects a parameter"),
    "of another shape": (_other_shape, r"shape \[61, 33\] in fp32, got shape \[2013\]"),
    "in float64": (_other_dtype, "convert it first"),
    "of a number": (_no_tensor, "must be a tensor of shape .* got float"),
    "of a state that the optimizer has not": (_unknown_state, '"exp_avg", "exp_avg_sq"'),
    "of a frozen parameter's states": (_frozen_state, "is frozen"),
    "of a frozen parameter's gradient": (_frozen_gradient, "is frozen"),
    "of a part that is not flat": (_part_of_another_length, r"this rank's shard of .* \[2013\] in fp32, got shape"),
    "of a frozen parameter's part": (_frozen_part, "is frozen"),
    "of a frozen weight": (_frozen_weight, "is frozen"),
    "inside of `gathered`": (_gathered, "is gathered"),
    "inside of a forward": (_in_forward, "not inside of a forward"),
    "inside of a forward, of a parameter of elsewhere": (_in_forward_of_another, "not inside of a forward"),
    "inside of a backward": (_in_backward, "not inside of a forward or a backward"),
}


@pytest.mark.works(AREA, "`safe_get_*` and `safe_set_*` with what cannot be, or while the model runs", "refused")
def test_refused_and_nothing_is_harmed(tmp_path: Path) -> None:
    job = models.MIXTURE
    engine = start(job, DISK, tmp_path / "refused", device_memory=room_for(job, 2))
    losses = [train_step(engine, job, 0)]
    for what, (action, message) in REFUSED.items():
        with pytest.raises(UsageError, match=message):
            action(engine.module)
            raise AssertionError(what)
    losses += [train_step(engine, job, step) for step in range(1, job.steps)]
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="its engine was destroyed"):
        offload.safe_get_full_fp32_param(engine.module.embedding.weight)
    assert losses == run(job, DISK, tmp_path / "plain").losses


def test_a_budget_error_where_the_ram_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    weight = engine.module.lm_head.weight
    testing.replace(monkeypatch, "memory.free", lambda: 4 * weight.numel() - 1)
    with pytest.raises(BudgetError, match=r"transformer\.wte\.weight takes .* of RAM"):
        offload.safe_get_full_optimizer_state(weight, "exp_avg")
    with pytest.raises(BudgetError, match="of RAM"):
        offload.safe_set_full_grad(weight, torch.zeros(weight.shape))
    monkeypatch.undo()
    engine.destroy(remove=True)
