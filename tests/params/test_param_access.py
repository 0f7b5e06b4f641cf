"""Parameters are read and edited between steps, as views too, or a use is refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload
from offload import testing
from offload.engine.params import PagedParameter, PagedParameterView
from offload.errors import UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, PlainEngine, assert_same_tensors, room_for, run, start, train_step
from tests.support.param_states import GPT2

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")

Action = Callable[[nn.Module], Any]


def sums(module: nn.Module) -> list[float]:
    with torch.no_grad():
        return [float(parameter.double().sum()) for parameter in module.parameters()]


def edits(module: nn.Module) -> Any:
    with torch.no_grad():
        module.transformer.ln_f.weight.mul_(0.5).add_(0.25)
        module.transformer.ln_f.bias.data.fill_(0.125)
        module.transformer.h[0].mlp.c_fc.weight[3:5] = 0.0
        module.transformer.h[1].mlp.c_fc.weight.data *= 0.5
        module.transformer.h[1].mlp.c_proj.weight.data = module.transformer.h[1].mlp.c_proj.weight.data * 0.5
        torch._foreach_mul_(list(module.transformer.h[0].parameters()), 0.75)
    nn.init.ones_(module.transformer.ln_f.weight)
    return sums(module)


def rows(area: str, names: Any, outcome: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.works(area, name, outcome)) for name in names]


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
        sums = [torch.zeros_like(parameter).sum(), parameter.new_ones(3).sum(), torch.ones(2).to(parameter).sum()]
        facts.append(
            (name, tuple(parameter.shape), parameter.numel(), parameter.dim(), len(parameter), *map(float, sums))
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
    duplicate = copy.deepcopy(module)
    assert not any(isinstance(p, PagedParameter) for p in duplicate.parameters())
    assert duplicate.lm_head.weight is duplicate.transformer.wte.weight
    ids = models.tokens(7, 0).to(duplicate.lm_head.weight.device)
    loss = duplicate(input_ids=ids, labels=ids).loss
    loss.backward()
    return [float(loss.detach()), *sums(duplicate), float(duplicate.lm_head.weight.grad.double().sum())]


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
    backup, values = {}, []
    shadow = {name: parameter.data.clone() * 0.5 for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        backup[name] = parameter.data
        parameter.data = shadow[name]
    values += sums(module)
    for name, parameter in module.named_parameters():
        parameter.data = backup[name]
    first, second = module.transformer.h[0].mlp.c_fc.weight, module.transformer.h[1].mlp.c_fc.weight
    old = first.data
    first.data, second.data = second.data, first.data
    return [*values, *sums(module), float(old.double().sum())]


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
    losses += [train_step(engine, job, step) for step in range(2, job.steps)]
    losses.append(sum(sums(engine.module)))
    return losses, value


def _round(job: Job, action: Action, placement: tuple[str, str], folder: Path, **options: Any) -> Any:
    engine = start(job, placement, folder, **options)
    result = _train_round(engine, job, action)
    engine.destroy(remove=True)
    return result


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


def _other_order(module: nn.Module) -> None:
    module.to(memory_format=torch.channels_last)
    module.transformer.wte.weight.to(memory_format=torch.channels_last)


def _edit_while_gathered(module: nn.Module) -> None:
    with offload.gathered(module.transformer.ln_f.weight):
        module.transformer.h[0].mlp.c_fc.weight.data.mul_(2)


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
    engine = start(models.SHALLOW, ("nvme", "nvme"), tmp_path)
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
    engine = start(models.SHALLOW, ("nvme", "nvme"), tmp_path)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with monkeypatch.context() as patch:
        testing.replace(patch, "memory.free", lambda: 1024)
        with pytest.raises(offload.BudgetError, match=r"gathered parameters would take .*, 1\.0 KiB are free"):
            offload.gathered(engine.module).__enter__()
    assert_same_tensors(engine.module.state_dict(), before)
    engine.destroy(remove=True)


def _functional_gradient(module: nn.Module) -> None:
    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = models.tokens(0, 0)
        return torch.func.functional_call(module, values, (), {"input_ids": ids, "labels": ids}, tie_weights=False).loss

    torch.func.grad(loss)({name: value.clone() for name, value in module.state_dict().items()})


REFUSED: dict[str, tuple[Action, str]] = {
    "`model.half()`, `model.to(dtype)`": (lambda module: module.half(), "precision and device are set in the config"),
    "`model.to(other device)`": (lambda module: module.to("meta"), "precision and device are set in the config"),
    "a view of a weight between steps": (
        lambda module: module.transformer.ln_f.weight.data.view(-1),
        "offload.gathered",
    ),
    "`.data.t_()` and others that change the shape": (
        lambda module: module.transformer.wte.weight.data.t_(),
        "cannot become",
    ),
    "another memory format": (_other_order, "is stored contiguously"),
    "edits while a parameter is gathered": (_edit_while_gathered, "is gathered"),
    "`load_state_dict(assign=True)`": (
        lambda module: module.load_state_dict(module.state_dict(), assign=True),
        "leave assign out",
    ),
    "a gradient set by hand": (_set_gradient, "gradients are in the engine"),
    "training the model inside of `gathered`": (_gathered_and_run, "is gathered"),
    "changing weights inside of `gathered` without `modify=True`": (_gathered_and_changed, "modify=True"),
    "`gathered` of something else": (lambda module: offload.gathered(3).__enter__(), "parameters or a module"),
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


@pytest.mark.cpu_only("torch makes no array of an accelerator's tensor")
def test_arrays_and_state_dicts_are_copies_that_no_step_changes(tmp_path: Path) -> None:
    engine = start(GPT2, ("nvme", "nvme"), tmp_path)
    weight = engine.module.transformer.ln_f.weight
    array, state = weight.detach().numpy(), engine.module.state_dict()["transformer.ln_f.weight"]
    before = weight.clone()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 7.0
    state[0] = 7.0
    assert torch.equal(weight.clone(), before)
    train_step(engine, GPT2, 0)
    assert not torch.equal(weight.clone(), before) and torch.equal(torch.tensor(array), before)
    assert torch.equal(state[1:], before[1:])
    with pytest.raises(UsageError, match=r"view would give a view of transformer\.ln_f\.weight"):
        weight.view(-1)
    engine.destroy(remove=True)


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


# -- what an edit is ----------------------------------------------------------------------------------


def test_precision_of_a_loaded_state_is_kept(tmp_path: Path) -> None:
    """fp32 values become the masters of a bf16 model, not only its weights: the residual takes what bf16 has not."""
    job = GPT2._replace(dtype="bf16", steps=3)
    torch.manual_seed(1)
    exact = {name: value.clone() for name, value in job.model().state_dict().items()}
    engine = start(job, DISK, tmp_path / "loaded")
    engine.module.load_state_dict(exact)
    loaded = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert loaded == run(job._replace(seed=1), DISK, tmp_path / "built").losses


def test_edits_of_one_unit_are_written_together(tmp_path: Path) -> None:
    """A whole `load_state_dict` writes each state once, however many parameters a unit has."""
    engine = start(GPT2, DISK, tmp_path)
    state = {name: value * 0.5 for name, value in engine.module.state_dict().items()}
    before = engine.io_bytes().written
    engine.module.load_state_dict(state)
    written = engine.io_bytes().written - before
    states = 12 * sum(layout.numel for layout in testing.inspect(engine).layouts)
    assert states <= written <= 1.4 * states, "only tied names, which come last, may write their unit once more"
    engine.destroy(remove=True)


def test_an_edit_in_bf16_is_the_master_too(tmp_path: Path) -> None:
    """What changed has nothing beyond bf16 any more: the same as the same values given in fp32."""
    job = GPT2._replace(dtype="bf16")

    def losses(name: str, edit: Callable[[torch.Tensor], None]) -> list[float]:
        engine = start(job, DISK, tmp_path / name)
        losses = [train_step(engine, job, step) for step in range(2)]
        with torch.no_grad():
            for parameter in engine.module.parameters():
                edit(parameter)
        losses += [train_step(engine, job, step) for step in range(2, job.steps)]
        engine.destroy(remove=True)
        return losses

    in_place = losses("in place", lambda parameter: parameter.mul_(0.5))
    assert in_place == losses("given", lambda parameter: parameter.copy_(parameter.detach().float() * 0.5))


def test_what_an_edit_leaves_alone_keeps_its_master(tmp_path: Path) -> None:
    """In bf16: written back unchanged, nothing changes, the bits beyond bf16 neither."""
    job = GPT2._replace(dtype="bf16")
    engine = start(job, DISK, tmp_path / "same")
    losses = []
    for step in range(job.steps):
        with torch.no_grad():
            engine.module.transformer.h[1].mlp.c_fc.weight.mul_(1.0)
        engine.module.load_state_dict(engine.module.state_dict())
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "nvme"), ("none", "nvme")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.works(
    "Looking at weights and editing them, between steps", "an edit, then `destroy()` and resume", "right"
)
def test_an_edit_is_committed(dtype: str, placement: tuple[str, str], tmp_path: Path) -> None:
    """With the next step, or at the end: a run that was edited and resumed goes on as the unbroken one."""
    job = GPT2._replace(dtype=dtype)

    def edit(engine: offload.Engine) -> None:
        with torch.no_grad():
            for parameter in engine.module.transformer.h[1].parameters():
                parameter.mul_(0.5)

    unbroken = start(job, placement, tmp_path / "whole")
    cut = start(job, placement, tmp_path / "cut")
    expected, losses = [], []
    for step in range(2):
        expected.append(train_step(unbroken, job, step))
        losses.append(train_step(cut, job, step))
    edit(unbroken)
    edit(cut)
    cut.destroy()
    cut = start(job, placement, tmp_path / "cut", resume="must")
    assert cut.global_steps == 2
    for step in range(2, job.steps):
        expected.append(train_step(unbroken, job, step))
        losses.append(train_step(cut, job, step))
    assert losses == expected
    assert_same_tensors(cut.module.state_dict(), unbroken.module.state_dict())
    unbroken.destroy(remove=True)
    cut.destroy(remove=True)


@pytest.mark.numeric
def test_an_edit_in_the_middle_of_accumulation(tmp_path: Path) -> None:
    """Gradients that were added stay, as in torch."""
    job = GPT2._replace(accumulation=2)

    def loop(engine: Any) -> list[float]:
        losses = []
        for step in range(3):
            for micro in range(2):
                loss = job.loss(engine, step, micro)
                engine.backward(loss)
                losses.append(float(loss.detach()))
                if micro == 0:
                    with torch.no_grad():
                        engine.module.transformer.h[0].mlp.c_fc.weight.mul_(0.9)
                engine.step()
        return losses

    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 2))
    rounding_bounds.same_losses(loop(engine), loop(PlainEngine(job)), job)
    engine.destroy(remove=True)


AREA = "Looking at weights and editing them, between steps"

PLACEMENTS = pytest.mark.parametrize("placement", [DISK, MEMORY, ("cpu", "cpu")], ids=["disk", "memory", "cpu"])


def images() -> nn.Module:
    """Returns a model with a parameter of each number of dimensions from one to four."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(2), nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(272, 4)
    )


def loss(engine: Any, step: int, micro: int) -> torch.Tensor:
    ids = torch.Generator().manual_seed(step)
    return engine(torch.randn(2, 3, 8, 8, generator=ids).to(next(engine.module.parameters()).device)).square().mean()


JOB = Job(images, loss, accumulation=1)

INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        name: getattr(nn.init, name)
        for name in (
            "orthogonal_ dirac_ kaiming_normal_ kaiming_uniform_ xavier_normal_ xavier_uniform_ trunc_normal_ normal_ "
            "uniform_ ones_ zeros_"
        ).split()
    },
    "eye_": lambda weight: nn.init.eye_(weight) if weight.dim() == 2 else None,
    "sparse_": lambda weight: nn.init.sparse_(weight, 0.5) if weight.dim() == 2 else None,
}


@pytest.mark.sample(1)
@PLACEMENTS
@pytest.mark.works(AREA, "each function of `nn.init`, `orthogonal_` among them", "right")
def test_each_initializer_gives_the_values_of_torch(placement: tuple[str, str], tmp_path: Path) -> None:
    def initialized(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        for parameter in module.parameters():
            if parameter.dim() > 1 and not (name == "dirac_" and parameter.dim() == 2):
                INITIALIZERS[name](parameter)
        return {key: value.clone() for key, value in module.state_dict().items()}

    engine = start(JOB, placement, tmp_path)
    plain = images()
    plain.load_state_dict({name: value.cpu() for name, value in engine.state_dict().items()})
    for name in INITIALIZERS:
        weights = initialized(engine.module, name)
        if engine.device.type == "cpu":  # another device has a generator of its own
            assert_same_tensors(weights, initialized(plain, name), name)
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@PLACEMENTS
def test_a_view_in_another_shape_is_the_parameter(placement: tuple[str, str], tmp_path: Path) -> None:
    engine = start(JOB, placement, tmp_path)
    weight, flat = engine.module[0].weight, torch.zeros(8, 27, device=engine.device)
    with torch.no_grad():
        view = weight.view_as(flat)
        assert view.shape == flat.shape and not view.requires_grad and view.detach().shape == flat.shape
        assert torch.equal(view.clone(), weight.clone().view(8, 27))
        view.copy_(flat + 2)
        view.data.mul_(3)
        view[1] = 1.0
        expected = torch.full((8, 27), 6.0, device=engine.device)
        expected[1] = 1
        assert torch.equal(weight.clone().view(8, 27), expected) and torch.equal(view.clone(), expected)
        weight.reshape_as(weight).add_(1)
        assert torch.equal(view.clone(), expected + 1)
        # As in torch, a view keeps the memory of which it was made.
        weight.data = torch.zeros_like(weight)
        assert torch.equal(view.clone(), expected + 1)
        view.copy_(flat + 5)
        assert float(weight.abs().sum()) == 0 and torch.equal(view.clone(), flat + 5)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            weight.view_as(torch.zeros(5))
        with pytest.raises(UsageError, match=r"expand_as would give a view .* offload\.gathered"):
            weight.expand_as(torch.zeros(2, 8, 3, 3, 3, device=engine.device))
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)


@pytest.mark.sample(2)
@PLACEMENTS
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
@pytest.mark.works(AREA, "`register_multi_grad_hook`, `get_gradient_edge`, `p.expand_as(p).grad_fn`", "right")
def test_hooks_at_the_nodes_of_parameters_fire(placement: tuple[str, str], gathered: bool, tmp_path: Path) -> None:
    def seen(engine: Any, module: nn.Module) -> list[Any]:
        gradients: list[Any] = []
        parameters = list(module.parameters())
        nodes = [get_gradient_edge(parameters[0]).node, parameters[1].expand_as(parameters[1]).grad_fn]
        nodes[1] = nodes[1].next_functions[0][0]
        assert [node.name() for node in nodes] == ["torch::autograd::AccumulateGrad"] * 2
        handles = [node.register_prehook(lambda grads: gradients.append(grads[0].clone())) for node in nodes]
        handles.append(
            register_multi_grad_hook(parameters, lambda grads: gradients.append([each.clone() for each in grads]))
        )
        handles.append(register_multi_grad_hook(parameters, lambda grad: gradients.append("any"), mode="any"))
        loss(engine, 0, 0).backward()
        for handle in handles:
            handle.remove()
        return sorted(gradients, key=str)

    engine = start(JOB, placement, tmp_path)
    if gathered:
        with offload.gathered(engine.module):
            assert get_gradient_edge(engine.module[0].weight).node is not None
    mine = seen(engine, engine.module)
    engine.zero_grad()
    plain = PlainEngine(JOB)
    if engine.device.type == "cpu":
        plain.module.load_state_dict(engine.state_dict())
        assert str(mine) == str(seen(plain, plain.module))
    assert len(mine) == 4
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@PLACEMENTS
@pytest.mark.works(AREA, "values and hooks of a view that was made with a graph", "refused")
def test_a_view_with_a_graph_has_no_values(placement: tuple[str, str], tmp_path: Path) -> None:
    engine = start(JOB, placement, tmp_path)
    weight = engine.module[0].weight
    view = weight.view_as(weight)
    assert view.requires_grad and view.shape == weight.shape and not view.is_leaf and "no values" in repr(view)
    uses: list[Callable[[], Any]] = [
        lambda: view * 2,
        lambda: weight * view,
        lambda: view.detach(),
        lambda: view.register_hook(print),
        lambda: view.retain_grad(),
        lambda: view[0],
        lambda: view.data_ptr(),
    ]
    for use in uses:
        with pytest.raises(UsageError, match=r"of a view of 0\.weight .*offload\.gathered"):
            use()
    with torch.no_grad(), pytest.raises(UsageError, match=r"of a view of 0\.weight"):
        view.zero_()
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
