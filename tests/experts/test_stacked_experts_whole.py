"""A stack stays one unit where something needs it whole; the loop over experts replaces what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from offload import testing
from offload.errors import StoreError
from offload.layout.experts import find_stacks
from tests.experts.stacked_experts import DISK, SIXTEEN, adapted
from tests.support import models
from tests.support.modules.mixtures import mixtral, stacks_of
from tests.support.oracle import Job, start
from tests.support.trainer_runs import seeded


def test_the_loop_takes_the_place_of_an_implementation_that_needs_all(tmp_path: Path) -> None:
    """Until the engine ends, and of no other model with the same config."""
    model = mixtral()
    model.set_experts_implementation("grouped_mm")
    engine = start(Job(lambda: model, models.language_loss), DISK, tmp_path)
    assert any('16 experts are units of their own, in a loop in place of "grouped_mm"' in n for n in engine.notices)
    stacks = stacks_of(model).values()
    assert {stack.config._experts_implementation for stack in stacks} == {"eager"}
    assert model.config._experts_implementation == "grouped_mm"
    engine.destroy(remove=True)
    assert all(stack.config is model.config for stack in stacks)


def halved(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An implementation of the user's that computes something else."""
    return grouped_mm_experts_forward(module, *args, **kwargs) / 2


def test_an_implementation_of_the_users_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one of transformers' by a loop of the user's. The stacks stay whole, and a line says why."""
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "halved", halved)
    losses = []
    for name in ("grouped_mm", "halved"):
        model = seeded(mixtral)
        model.set_experts_implementation(name)
        plain = models.language_loss(model, 0, 0).item()
        engine = start(Job(lambda model=model: model, models.language_loss), DISK, tmp_path / name)
        losses.append(models.language_loss(engine, 0, 0).item())
        assert losses[-1] == pytest.approx(plain, rel=1e-6)
        whole = not any(layout.name.endswith("]") for layout in testing.inspect(engine).layouts)
        assert whole is (name == "halved")
        assert any('"halved" is halved' in notice for notice in engine.notices) is whole
        engine.destroy(remove=True)
    assert losses[0] != losses[1]


class Centred(nn.Module):
    """An activation that reads all its tokens at once: those of one expert in a loop, of all experts without one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(hidden - hidden.mean(0, keepdim=True))


@pytest.mark.parametrize("change", ["activation", "gate", "hook"])
def test_what_mixes_the_tokens_of_experts_is_not_put_into_a_loop(change: str, tmp_path: Path) -> None:
    model = seeded(mixtral)
    model.set_experts_implementation("grouped_mm")
    stacks = stacks_of(model).values()
    before = models.language_loss(model, 0, 0).item()
    for stack in stacks:
        if change == "activation":
            stack.act_fn = Centred()
        elif change == "gate":
            stack._apply_gate = lambda hidden: Centred()(hidden.chunk(2, -1)[0])
        else:
            stack.act_fn.register_forward_hook(lambda _, args, output: output - output.mean(0))
    plain = models.language_loss(model, 0, 0).item()
    assert plain != pytest.approx(before, rel=1e-6)
    engine = start(Job(lambda: model, models.language_loss), DISK, tmp_path)
    assert models.language_loss(engine, 0, 0).item() == pytest.approx(plain, rel=1e-6)
    assert any("which a loop over the experts may not replace" in notice for notice in engine.notices)
    engine.destroy(remove=True)


@pytest.mark.parametrize("rule", ["LAMB", "Muon"])
def test_stacks_stay_whole_for_an_optimizer_that_looks_at_whole_parameters(rule: str, tmp_path: Path) -> None:
    engine = start(Job(mixtral, models.language_loss, optimizer=rule), DISK, tmp_path)
    assert any("the optimizer's rule looks at whole parameters" in notice for notice in engine.notices)
    assert not any(layout.name.endswith("]") for layout in testing.inspect(engine).layouts)
    engine.destroy(remove=True)


def test_a_module_that_is_one_unit_by_name_contains_its_experts(tmp_path: Path) -> None:
    engine = start(Job(mixtral, models.language_loss), DISK, tmp_path, units=["MixtralDecoderLayer"])
    assert not any(layout.name.endswith("]") for layout in testing.inspect(engine).layouts)
    engine.destroy(remove=True)


def test_a_run_resumes_with_the_experts_that_it_had(tmp_path: Path) -> None:
    """Experts that are skipped, and that are not, have the same swap files."""
    start(SIXTEEN, DISK, tmp_path).destroy()
    with pytest.raises(StoreError, match='resume with the "units" and "experts" that the run had'):
        start(SIXTEEN, DISK, tmp_path, resume="must", experts="whole")
    start(SIXTEEN, DISK, tmp_path, resume="must", experts="visited").destroy(remove=True)


def test_a_stack_with_an_adapter_of_its_own_stays_whole() -> None:
    """peft adds the adapter's product to the whole parameter."""
    assert len(find_stacks(adapted())) == 2
    assert find_stacks(adapted(target_parameters=["mlp.experts.down_proj"])) == ()
