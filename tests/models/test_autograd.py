"""Whatever users do with graphs: the bits of memory and of ordinary PyTorch, or an error before anything is harmed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import UsageError
from tests.models.test_module_kinds import DISK, MEMORY
from tests.support import models, rounding_bounds
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.modules.autograd_modules import (
    Borrowing,
    BorrowingData,
    Customs,
    HooksInside,
    KeepsParameters,
    KeepsViews,
    Launching,
    Mapped,
    PenaltyInside,
    Pushed,
    ReadingAddresses,
    SavedOnCpuInside,
    Selective,
    Sparse,
    Wrapping,
)
from tests.support.modules.module_kinds import Layers
from tests.support.oracle import Job, PlainEngine, room_for, run, start, train_step

Loop = Callable[[Any, Job], list[float]]


def _sum(engine: Any) -> float:
    return sum(float(value.double().sum()) for value in engine.module.state_dict().values())


def each_step(run_step: Callable[[Any, Job, int], float]) -> Loop:
    """Returns the loop of four steps: the value of each, and the sum of the weights."""
    return lambda engine, job: [run_step(engine, job, step) for step in range(4)] + [_sum(engine)]


def stepped(engine: Any, loss: torch.Tensor) -> float:
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _two(engine: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = engine(models.tokens(step, 0, (4, 16), 61)).float().flatten(0, 1)
    return logits.logsumexp(1).mean(), logits.square().mean()


@each_step
def two_losses(engine: Any, job: Job, step: int) -> float:
    """Of one forward, with the accumulation that counts both."""
    first, second = _two(engine, step)
    engine.backward(first, retain_graph=True)
    engine.step()
    return float(first.detach()) + stepped(engine, second)


@each_step
def two_losses_at_once(engine: Any, job: Job, step: int) -> float:
    """Without accumulation: both before one step."""
    first, second = _two(engine, step)
    engine.backward(first, retain_graph=True)
    return float(first.detach()) + stepped(engine, second)


@each_step
def forgotten(engine: Any, job: Job, step: int) -> float:
    """`model.zero_grad()` in the middle of accumulation."""
    engine.backward(job.loss(engine, step, 0) * 1000)
    engine.module.zero_grad()
    if isinstance(engine, PlainEngine):
        engine.zero_grad()
    return train_step(engine, job, step)


@each_step
def twice_through_a_graph(engine: Any, job: Job, step: int) -> float:
    loss = job.loss(engine, step, 0)
    engine.backward(loss, retain_graph=True)
    engine.step()
    return stepped(engine, loss)


@each_step
def plain_backward(engine: Any, job: Job, step: int) -> float:
    """`loss.backward()` instead of `engine.backward(loss)`: never divided."""
    loss = job.loss(engine, step, 0)
    if isinstance(engine, PlainEngine):
        engine.backward(loss)
    else:
        loss.backward()
    engine.step()
    return float(loss.detach())


@each_step
def penalty_on_inputs(engine: Any, job: Job, step: int) -> float:
    """The norm of the gradient at an inner activation is part of the loss: a double backward."""
    seen: list[torch.Tensor] = []
    handle = engine.module.embedding.register_forward_hook(lambda m, i, output: seen.append(output) and None)
    loss = job.loss(engine, step, 0)
    handle.remove()
    (slope,) = torch.autograd.grad(loss, seen, create_graph=True)
    return stepped(engine, loss + 10 * slope.float().square().sum())


@each_step
def penalty_on_weights(engine: Any, job: Job, step: int) -> float:
    """The same with the gradients of weights."""
    loss = job.loss(engine, step, 0)
    slopes = torch.autograd.grad(loss, list(engine.module.layers.parameters()), create_graph=True)
    return stepped(engine, loss + sum(slope.float().square().sum() for slope in slopes))


@each_step
def penalty_outside(engine: Any, job: Job, step: int) -> float:
    """An L2 penalty over all parameters, computed while no module runs; the embedding is used by the model as well."""
    penalty = sum(parameter.float().square().sum() for parameter in engine.module.parameters())
    return stepped(engine, job.loss(engine, step, 0) + 0.01 * penalty)


@each_step
def gradients_between(engine: Any, job: Job, step: int) -> float:
    """`torch.autograd.grad` in the middle of accumulation changes nothing that accumulates."""
    stepped(engine, job.loss(engine, step, 0))
    asked = torch.autograd.grad(job.loss(engine, step, 1), list(engine.module.parameters()))
    stepped(engine, job.loss(engine, step, 2))
    return sum(float(gradient.double().norm()) for gradient in asked)


@each_step
def evaluated_between(engine: Any, job: Job, step: int) -> float:
    """eval(), no_grad and inference_mode in the middle of accumulation."""
    stepped(engine, job.loss(engine, step, 0))
    engine.module.eval()
    with torch.no_grad():
        loss = float(job.loss(engine, step, 5))
    with torch.inference_mode():
        loss += float(job.loss(engine, step, 6))
    engine.module.train()
    stepped(engine, job.loss(engine, step, 1))
    return loss


def hooked_modules(engine: Any, job: Job) -> list[float]:
    """Hooks of the user that see and change inputs, outputs and gradients."""
    layer = engine.module.layers[1]
    norms: list[float] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,)),
        layer.register_forward_hook(lambda module, inputs, output: output + module.bias),
        layer.register_full_backward_hook(lambda module, inner, outer: norms.append(float(outer[0].norm())) and None),
        layer.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 2,)),
        engine.module.register_forward_hook(lambda module, inputs, output: output * 1.5),
    ]
    losses = each_step(lambda engine, job, step: stepped(engine, job.loss(engine, step, 0)) + norms[-1])(engine, job)
    for handle in handles:
        handle.remove()
    return losses


def _with_saved(hooks: Callable[[], Any]) -> Loop:
    @each_step
    def loop(engine: Any, job: Job, step: int) -> float:
        with hooks():
            loss = job.loss(engine, step, 0)
        return stepped(engine, loss)

    return loop


@contextmanager
def counting() -> Iterator[None]:
    """The user's own pack hook, which must get what is not a weight."""
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        packed.append(tensor.numel())
        return (tensor.clone(),)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value[0]):
        yield
    assert packed, "the hooks of the user were asked"


@each_step
def in_place(engine: Any, job: Job, step: int) -> float:
    """A tensor that backward needs is changed: torch's own check is still there."""

    def squash(module: nn.Module, inputs: Any) -> Any:
        seen.append(torch.tanh(inputs[0]))
        return (seen[-1],)

    seen: list[torch.Tensor] = []
    handle = engine.module.head.register_forward_pre_hook(squash)
    loss = job.loss(engine, step, 0)
    handle.remove()
    with torch.no_grad():
        seen.pop().add_(1)
    with pytest.raises(RuntimeError, match=r"inplace|in place"):
        engine.backward(loss)
    engine.zero_grad()
    return stepped(engine, job.loss(engine, step, 0))


# -- functions of the user ----------------------------------------------------------------------------


@each_step
def drops_the_loss(engine: Any, job: Job, step: int) -> float:
    """The graph, and with it what a function keeps in `ctx`, is gone before the step."""
    loss = job.loss(engine, step, 0)
    engine.backward(loss)
    value = float(loss.detach())
    del loss
    engine.step()
    return value


trains = each_step(train_step)

LAYERS = Job(Layers, models.mixture_loss)

TWO = LAYERS._replace(accumulation=2)

LOOPS: dict[str, tuple[Loop, Job, int]] = {
    "two losses of one forward before a step": (two_losses, TWO, 2),
    "two losses before a step, without accumulation": (two_losses_at_once, LAYERS, 2),
    "`model.zero_grad()` in the middle of accumulation": (forgotten, TWO, 2),
    "`torch.vmap` over a part of the model": (trains, LAYERS._replace(model=Mapped), 2),
    "`torch.func.jvp` inside of a forward": (trains, LAYERS._replace(model=Pushed), 2),
    "selective checkpointing": (trains, LAYERS._replace(model=Selective), 2),
    "`retain_graph`: twice through one graph": (twice_through_a_graph, TWO, 2),
    "`loss.backward()` instead of `engine.backward(loss)`": (plain_backward, LAYERS, 2),
    "double backward: a penalty on a gradient at activations": (penalty_on_inputs, LAYERS, 6),
    "double backward: a penalty on gradients of weights": (penalty_on_weights, LAYERS, 6),
    "double backward inside of a forward": (trains, LAYERS._replace(model=PenaltyInside), 6),
    "an L2 penalty over `model.parameters()`, outside of the model": (penalty_outside, LAYERS, 2),
    "`torch.autograd.grad` in the middle of accumulation": (gradients_between, TWO, 2),
    "`eval()`, `no_grad`, `inference_mode` in the middle of accumulation": (evaluated_between, TWO, 2),
    "hooks of the user on modules, forward and backward": (hooked_modules, LAYERS, 2),
    "the user's `saved_tensors_hooks` round the model": (_with_saved(counting), LAYERS, 2),
    "`save_on_cpu` round the model": (_with_saved(torch.autograd.graph.save_on_cpu), LAYERS, 2),
    "the user's `saved_tensors_hooks` inside of the model": (trains, LAYERS._replace(model=HooksInside), 3),
    "`save_on_cpu` inside of the model": (trains, LAYERS._replace(model=SavedOnCpuInside), 5),
    "a tensor that backward needs, changed in place: torch's error": (in_place, LAYERS, 2),
    "an `autograd.Function` that saves a weight": (trains, LAYERS._replace(model=Customs), 2),
    "an `autograd.Function` that keeps a parameter in `ctx`": (trains, LAYERS._replace(model=KeepsParameters), 2),
    "an `autograd.Function` that keeps a view of a weight in `ctx`, the loss dropped before `step()`": (
        drops_the_loss,
        LAYERS._replace(model=KeepsViews),
        5,
    ),
    "an `autograd.Function` that is given the weight of a module that does not run": (
        trains,
        LAYERS._replace(model=Borrowing),
        3,
    ),
    "an `autograd.Function` that is given the `.data` of such a weight": (
        trains,
        LAYERS._replace(model=BorrowingData),
        3,
    ),
    "`data_ptr()` of the weight of a module that does not run": (trains, LAYERS._replace(model=ReadingAddresses), 3),
    "address and strides of such a weight, as Triton kernels of a fused loss read them (Liger)": (
        trains,
        LAYERS._replace(model=Launching),
        3,
    ),
    "activations of a subclass that wraps other tensors (`TwoTensor`)": (trains, LAYERS._replace(model=Wrapping), 2),
}

ROWS = [pytest.param(name, marks=pytest.mark.works("Graphs", name, "right")) for name in LOOPS]


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its jvp
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.numeric
def test_same_bits_and_as_pytorch(name: str, dtype: str, tmp_path: Path) -> None:
    loop, job, units = LOOPS[name]
    job = job._replace(dtype=dtype)

    def found(placement: tuple[str, str], **options: Any) -> list[float]:
        engine = start(job, placement, tmp_path / placement[0], **options)
        values = loop(engine, job)
        assert not any(testing.inspect(engine).pins)
        engine.destroy(remove=True)
        return values

    in_memory = found(MEMORY)
    assert found(DISK, device_memory=room_for(job, units)) == in_memory
    expected = loop(PlainEngine(job), job)
    rounding_bounds.same_norms(in_memory, expected, job)


@pytest.mark.works("Modules", "`nn.Embedding(sparse=True)`: as if it were dense", "right")
@pytest.mark.numeric
def test_sparse_gradients_train_with_the_same_bits(tmp_path: Path) -> None:
    sparse = run(LAYERS._replace(model=Sparse), DISK, tmp_path / "sparse")
    rounding_bounds.same_training(sparse, run(LAYERS, DISK, tmp_path / "dense"), LAYERS, reordered=True)


@pytest.mark.works("Graphs", "`state_dict()` in the middle of a forward", "right")
def test_a_state_dict_in_the_middle_of_a_forward(tmp_path: Path) -> None:
    job = models.SHALLOW
    engine = start(job, DISK, tmp_path / "asked", device_memory=room_for(job, 3))
    engine.module.transformer.h[1].register_forward_pre_hook(lambda *_: engine.module.state_dict() and None)
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


@pytest.mark.works("Graphs", "the same, with the loss still there at `step()`", "refused")
def test_a_view_in_a_graph_across_a_step_is_refused(tmp_path: Path) -> None:
    job = LAYERS._replace(model=KeepsViews)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 5))
    loss = LAYERS.loss(engine, 0, 0)
    engine.backward(loss)
    with pytest.raises(UsageError, match="save_for_backward"):
        engine.step()
    del loss
    engine.step()
    engine.destroy(remove=True)


@pytest.mark.works("Graphs", "a graph that needs more weights at a time than the device has room for", "refused")
def test_views_that_take_all_the_room_are_refused(tmp_path: Path) -> None:
    job = LAYERS._replace(model=KeepsViews)
    engine = start(job, DISK, tmp_path / "tight", device_memory=room_for(job, 2))
    with pytest.raises(offload.BudgetError, match="device_memory"):
        train_step(engine, job, 0)
    engine.destroy(remove=True)


@pytest.mark.works("Graphs", "backward after `step()` through a graph made before it", "refused")
@pytest.mark.parametrize("placement", [DISK, MEMORY])
def test_a_graph_of_old_weights_is_refused(placement: tuple[str, str], tmp_path: Path) -> None:
    options = {"device_memory": room_for(LAYERS, 2)} if placement == DISK else {}
    engine = start(LAYERS, placement, tmp_path / "old", **options)
    old = LAYERS.loss(engine, 9, 0)
    losses = [train_step(engine, LAYERS, 0)]
    with pytest.raises(UsageError, match=r"made before step\(\)") as refused:
        engine.backward(old)
    assert placement == DISK or "modified by an inplace operation" in str(refused.value.__cause__)
    engine.zero_grad()
    losses += [train_step(engine, LAYERS, step) for step in range(1, LAYERS.steps)]
    engine.destroy(remove=True)
    assert losses == run(LAYERS, placement, tmp_path / "plain").losses


@pytest.mark.works("Graphs", "the same through a penalty on weights of before", "refused")
def test_a_penalty_on_old_weights_is_refused(tmp_path: Path) -> None:
    engine = start(LAYERS, DISK, tmp_path)
    penalty = engine.module.head.weight.square().sum()
    train_step(engine, LAYERS, 0)
    with pytest.raises(UsageError, match=r"made before step\(\): the weights of head\.weight"):
        engine.backward(penalty)
    engine.destroy(remove=True)


class Table(nn.Module):
    """Its backward needs no weights, so a graph from before a step could add to a gradient that is being read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


@pytest.mark.works("Graphs", "the same, where the backward needs no weights (an embedding)", "right")
def test_an_old_graph_that_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows it; the gradient waits until the update before has read the last."""

    def losses(placement: tuple[str, str]) -> list[float]:
        engine = start(job, placement, tmp_path / placement[0])
        old = job.loss(engine, 9, 0)
        losses = [train_step(engine, job, 0)]
        engine.backward(old)
        engine.step()
        losses += [train_step(engine, job, step) for step in range(1, job.steps)]
        engine.destroy(remove=True)
        return losses

    job = Job(Table, models.mixture_loss)
    expected = losses(MEMORY)
    use_queue(monkeypatch, lambda: LateQueue(0, 0.2))
    assert losses(DISK) == expected


@pytest.mark.works("Graphs", "a view of a weight kept across `step()`", "refused")
def test_a_view_across_a_step_is_refused(tmp_path: Path) -> None:
    engine = start(LAYERS, DISK, tmp_path / "kept")
    kept: list[torch.Tensor] = []
    handle = engine.module.layers[1].register_forward_hook(lambda m, i, o: kept.append(m.weight[0].detach()) and None)
    engine.backward(LAYERS.loss(engine, 0, 0))
    handle.remove()
    with pytest.raises(UsageError, match=r"layers\.1"):
        engine.step()
    kept.clear()
    engine.step()  # nothing was lost by asking
    losses = [train_step(engine, LAYERS, step) for step in range(1, LAYERS.steps)]
    engine.destroy(remove=True)
    assert losses == run(LAYERS, DISK, tmp_path / "plain").losses[1:]


class ShowsItsHead(Layers):
    def forward(self, ids: torch.Tensor) -> Any:
        return super().forward(ids), self.head.weight


@pytest.mark.works("Graphs", "a weight among the model's outputs, kept across `step()`", "right")
@pytest.mark.parametrize("placement", [DISK, MEMORY])
def test_an_output_that_is_a_weight(placement: tuple[str, str], tmp_path: Path) -> None:
    """It is a copy: what it was when the model ran."""
    job = LAYERS._replace(model=ShowsItsHead)
    engine = start(job, placement, tmp_path)
    seen = []
    for step in range(3):
        logits, weight = engine(models.tokens(step, 0, (4, 16), 61))
        engine.backward(logits.square().mean() + weight.square().mean())
        engine.step()
        seen.append(weight)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert torch.isfinite(torch.stack(seen)).all()
    engine.destroy(remove=True)


class Stacked(Layers):
    """One operation needs the weights of all layers."""

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.stack([layer.weight for layer in self.layers]).sum(0)


@pytest.mark.works("Graphs", "one operation over parameters of several modules, with too little room", "refused")
def test_an_operation_that_needs_too_much_at_a_time(tmp_path: Path) -> None:
    job = LAYERS._replace(model=Stacked)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 2))
    with pytest.raises(offload.BudgetError, match="at one time"):
        job.loss(engine, 0, 0)
    engine.destroy(remove=True)


@pytest.mark.works("Engines and processes", "weights read by another thread while the model runs", "refused")
def test_another_thread_may_not_disturb_a_forward(tmp_path: Path) -> None:
    messages: list[str] = []

    def look() -> None:
        try:
            engine.module.head.weight.detach().clone()
        except UsageError as error:
            messages.append(str(error))

    def look_from_elsewhere(*_: object) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    engine = start(LAYERS, DISK, tmp_path / "looked at")
    hook = engine.module.layers[1].register_forward_pre_hook(look_from_elsewhere)
    losses = [train_step(engine, LAYERS, step) for step in range(LAYERS.steps)]
    hook.remove()
    look_from_elsewhere()
    assert len(messages) == LAYERS.steps and "the model runs on thread MainThread" in messages[0]
    engine.destroy(remove=True)
    assert losses == run(LAYERS, DISK, tmp_path / "plain").losses
