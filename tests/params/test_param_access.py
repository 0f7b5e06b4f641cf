"""Between steps a model under an engine is an ordinary model: reads are right, and changes are kept.

Each action runs between the second and the third of four steps: on an ordinary model, with all states in memory, with
all of them on disk and room for two units on the device. The same values come out, and training goes on the same.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload
from offload.engine.params import PagedParameter, PagedParameterView
from tests.params.param_actions import DISK, MEMORY, Action, edits, rows, sums
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, PlainEngine, room_for, start, train_step
from tests.support.param_states import GPT2


def norms(module: nn.Module) -> Any:
    with torch.no_grad():
        return [float(p.norm()) for p in module.parameters()] + [
            float(n) for n in torch._foreach_norm(list(module.parameters()))
        ]


def without_no_grad(module: nn.Module) -> Any:
    """What gives no gradient, and what does, if nobody asks for it."""
    weight = module.transformer.h[1].mlp.c_fc.weight
    assert not weight.isnan().any() and bool((weight == weight).all()) and torch.isfinite(weight).all()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.mul_(2)
    return [int(weight.argmax()), weight.norm().item(), float((weight * 2).sum().detach()), weight.tolist()[1][:3]]


def detached(module: nn.Module) -> Any:
    weight = module.transformer.h[1].mlp.c_fc.weight
    assert not weight.detach().requires_grad and not weight.data.requires_grad
    return [
        float(weight.detach().float().abs().max()),
        float(weight.data.float().mean()),
        weight.detach().tolist()[0][:4],
    ]


def as_array(module: nn.Module) -> Any:
    return module.transformer.ln_f.weight.detach().float().cpu().numpy().tolist()


def about_itself(module: nn.Module) -> Any:
    facts = []
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, nn.Parameter) and parameter.is_leaf and parameter.requires_grad
        other = [torch.zeros_like(parameter).sum(), parameter.new_ones(3).sum(), torch.ones(2).to(parameter).sum()]
        facts.append(
            (name, tuple(parameter.shape), parameter.numel(), parameter.dim(), len(parameter), *map(float, other))
        )
    return [*facts, sum(p.numel() for p in module.parameters()), len(list(module.named_parameters()))]


def by_state_dict(module: nn.Module) -> Any:
    state = module.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr(), "tied stays tied"
    assert not any(isinstance(value, PagedParameter | PagedParameterView) for value in state.values())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return [float(value.double().sum()) for value in torch.load(buffer, weights_only=True).values()]


def by_pickle(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(list(module.parameters()), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert all(type(value) is nn.Parameter for value in loaded)
    return [float(value.detach().double().sum()) for value in loaded]


def by_deepcopy(module: nn.Module) -> Any:
    """The copy is an ordinary model, whose use touches neither engine nor original."""
    other = copy.deepcopy(module)
    assert not any(isinstance(p, PagedParameter) for p in other.parameters())
    assert other.lm_head.weight is other.transformer.wte.weight
    ids = models.tokens(7, 0).to(other.lm_head.weight.device)
    loss = other(input_ids=ids, labels=ids).loss
    loss.backward()
    return [float(loss.detach()), *sums(other), float(other.lm_head.weight.grad.double().sum())]


def ema_by_hand(module: nn.Module) -> Any:
    average = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for mine, parameter in zip(average, module.parameters(), strict=True):
            mine.lerp_(parameter * 2, 0.25)
        for mine, parameter in zip(average, module.parameters(), strict=True):
            mine.mul_(0.9).add_(parameter.data, alpha=0.1)
    return [float(mine.double().sum()) for mine in average]


def ema_of_torch(module: nn.Module) -> Any:
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.01)
    average.update_parameters(module)
    return sums(average.module)


def shadow_weights(module: nn.Module) -> Any:
    """The EMA that many copy: apply the shadow, look, put the backup back. What `.data` gave stays what it was."""
    backup, found = {}, []
    shadow = {name: parameter.data.clone() * 0.5 for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        backup[name] = parameter.data
        parameter.data = shadow[name]
    found += sums(module)
    for name, parameter in module.named_parameters():
        parameter.data = backup[name]
    first, second = module.transformer.h[0].mlp.c_fc.weight, module.transformer.h[1].mlp.c_fc.weight
    old = first.data
    first.data, second.data = second.data, first.data
    return [*found, *sums(module), float(old.double().sum())]


def initialized(module: nn.Module) -> Any:
    """By torch's functions, with and without no_grad, by `apply` and `reset_parameters`."""

    def initialize(part: nn.Module) -> None:
        if isinstance(part, nn.LayerNorm):
            part.reset_parameters()

    torch.manual_seed(3)
    weight = module.transformer.h[1].mlp.c_fc.weight
    for function in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.xavier_normal_):
        function(weight)
    nn.init.constant_(module.transformer.h[1].mlp.c_fc.bias, 0.25)
    module.apply(initialize)
    return sums(module)


def loads(module: nn.Module) -> Any:
    """Back to a state of before, with half of it changed."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for index, value in enumerate(state.values()):
        if index % 2 and value.is_floating_point():
            value.mul_(0.5)
    result = module.load_state_dict(state)
    return [str(result), *sums(module)]


def loads_a_part(module: nn.Module) -> Any:
    block = module.transformer.h[0]
    block.load_state_dict({name: value * 0.5 for name, value in block.state_dict().items()})
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({"transformer.ln_f.bias": torch.zeros(3)}, strict=False)
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})
    return sums(module)


def gathers(module: nn.Module) -> Any:
    weight = module.transformer.h[1].attn.c_attn.weight
    with offload.gathered(module):
        seen = float(weight.view(-1)[:7].detach().double().sum())
    with offload.gathered([weight, module.lm_head.weight], modify=True), torch.no_grad():
        weight.view(-1)[5:9] = 0.5
        values = weight.detach().view(torch.int16 if weight.dtype is torch.bfloat16 else torch.int32)
        (values.numpy() if values.is_cpu else values)[2] = 0
        module.lm_head.weight[0].zero_()
    return [seen, *sums(module)]


def runs_gathered(module: nn.Module) -> Any:
    """Twice, since the first must leave the memory as it was; with a cache of keys and values as in generation."""
    ids = models.tokens(8, 0).to(module.lm_head.weight.device)
    with offload.gathered(module), torch.no_grad():
        losses = [float(module(input_ids=ids, labels=ids, use_cache=True).loss) for _ in range(2)]
    assert losses[0] == losses[1]
    with torch.no_grad():
        assert float(module(input_ids=ids, labels=ids).loss) == losses[0]
    return losses


def nothing_to_move(module: nn.Module) -> Any:
    dtype, device = module.transformer.ln_f.weight.dtype, module.transformer.ln_f.weight.device
    assert module.to(device) is module and module.to(dtype) is module
    assert device.type != "cpu" or module.cpu() is module
    return float(module.transformer.ln_f.weight.detach().to(torch.float64).sum())


def hooks_of_the_user(module: nn.Module) -> Any:
    """On a parameter: the gradient is seen and may be changed; after it was accumulated it can be looked at."""
    seen: list[float] = []
    weight = module.transformer.ln_f.weight
    first = weight.register_hook(lambda gradient: gradient * 0.5)
    second = weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.double().sum())))
    ids = models.tokens(8, 0).to(weight.device)
    loss = module(input_ids=ids, labels=ids).loss
    loss.backward()
    first.remove()
    second.remove()
    assert len(seen) == 1
    return seen


def gradients_asked_for(module: nn.Module) -> Any:
    ids = models.tokens(9, 0).to(module.lm_head.weight.device)
    loss = module(input_ids=ids, labels=ids).loss
    return [float(g.double().sum()) for g in torch.autograd.grad(loss, list(module.parameters()))]


ACTIONS: dict[str, Action] = {
    "`parameter.norm()`, `torch._foreach_norm` under no_grad": norms,
    "`parameter.norm().item()`, `isnan()`, `==` without no_grad": without_no_grad,
    "`detach()`, `.data`, `tolist()`": detached,
    "`detach().numpy()`": as_array,
    "`shape`, `numel()`, `dtype`, `zeros_like`, `parameters()`": about_itself,
    "`state_dict()`, `torch.save` of it": by_state_dict,
    "`torch.save` of parameters": by_pickle,
    "`copy.deepcopy(model)`, and training the copy": by_deepcopy,
    "an EMA by hand": ema_by_hand,
    "`AveragedModel`": ema_of_torch,
    "shadow weights put in and out by `.data`": shadow_weights,
    "`nn.init`, `module.apply`, `reset_parameters()`": initialized,
    "`load_state_dict`": loads,
    "`load_state_dict` of a submodule, with errors": loads_a_part,
    "weights edited in place under no_grad, by `.data`, by `nn.init`": edits,
    "`offload.gathered`": gathers,
    "running the whole model inside of `gathered` under no_grad": runs_gathered,
    "`model.to(...)` to where it is": nothing_to_move,
    "`torch.autograd.grad` of all parameters": gradients_asked_for,
}


def _train_round(engine: Any, job: Job, action: Action) -> tuple[list[float], Any]:
    losses = [train_step(engine, job, step) for step in range(2)]
    value = action(engine.module)
    losses += [train_step(engine, job, step) for step in range(2, 4)]
    losses.append(sum(sums(engine.module)))
    return losses, value


def _round(job: Job, action: Action, placement: tuple[str, str], folder: Path, **options: Any) -> Any:
    engine = start(job, placement, folder, **options)
    found = _train_round(engine, job, action)
    engine.destroy(remove=True)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", rows("Looking at weights and editing them, between steps", ACTIONS, "right"))
@pytest.mark.numeric
def test_the_same_as_of_an_ordinary_model(name: str, dtype: str, tmp_path: Path) -> None:
    job = GPT2._replace(dtype=dtype)
    action = ACTIONS[name]
    losses, value = _round(job, action, DISK, tmp_path / "disk", device_memory=room_for(job, 2))
    assert (losses, value) == _round(job, action, MEMORY, tmp_path / "memory")
    if dtype == "fp32":  # in bf16 an edit of the plain model would not reach its masters
        expected, theirs = _train_round(PlainEngine(job), job, action)
        # The last is a sum of all weights, of either sign: its error is that of the way that they all went.
        rounding_bounds.same_losses(losses[:-1], expected[:-1], job)
        apart = rounding_bounds.step_error(job) * job.lr * job.steps * sum(p.numel() for p in job.model().parameters())
        assert losses[-1] == pytest.approx(expected[-1], rel=0, abs=apart)
        assert _flat(value) == pytest.approx(_flat(theirs), rel=rounding_bounds.norm_error(job), abs=apart)


def _flat(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in _flat(item)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.works("Looking at weights and editing them, between steps", "hooks of the user on parameters", "right")
@pytest.mark.numeric
def test_hooks_on_parameters(tmp_path: Path) -> None:
    job = GPT2

    def action(engine: Any) -> Any:
        seen = hooks_of_the_user(engine.module)
        engine.zero_grad()
        return [*seen, train_step(engine, job, 0)]

    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 2))
    rounding_bounds.same_losses(action(engine), action(PlainEngine(job)), job)
    engine.destroy(remove=True)
