"""A view of a whole parameter between steps: writes through it are edits, and its graph leads to the parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import offload
from offload.errors import UsageError
from tests.params.param_actions import DISK, MEMORY
from tests.support.oracle import Job, PlainEngine, assert_same_tensors, start, train_step

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


@PLACEMENTS
@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.works(AREA, "each function of `nn.init`, `orthogonal_` among them", "right")
def test_each_initializer_gives_the_values_of_torch(name: str, placement: tuple[str, str], tmp_path: Path) -> None:
    def initialized(module: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        for parameter in module.parameters():
            if parameter.dim() > 1 and not (name == "dirac_" and parameter.dim() == 2):
                INITIALIZERS[name](parameter)
        return {key: value.clone() for key, value in module.state_dict().items()}

    engine = start(JOB, placement, tmp_path)
    plain = images()
    if engine.device.type == "cpu":
        plain.load_state_dict(engine.state_dict())
        assert_same_tensors(initialized(engine.module), initialized(plain))
    else:
        initialized(engine.module)  # a device has a generator of its own
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)


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


@PLACEMENTS
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
@pytest.mark.works(AREA, "`register_multi_grad_hook`, `get_gradient_edge`, `p.expand_as(p).grad_fn`", "right")
def test_hooks_at_the_nodes_of_parameters_fire(placement: tuple[str, str], gathered: bool, tmp_path: Path) -> None:
    def seen(engine: Any, module: nn.Module) -> list[Any]:
        found: list[Any] = []
        parameters = list(module.parameters())
        nodes = [get_gradient_edge(parameters[0]).node, parameters[1].expand_as(parameters[1]).grad_fn]
        nodes[1] = nodes[1].next_functions[0][0]
        assert [node.name() for node in nodes] == ["torch::autograd::AccumulateGrad"] * 2
        handles = [node.register_prehook(lambda grads: found.append(grads[0].clone())) for node in nodes]
        handles.append(
            register_multi_grad_hook(parameters, lambda grads: found.append([each.clone() for each in grads]))
        )
        handles.append(register_multi_grad_hook(parameters, lambda grad: found.append("any"), mode="any"))
        loss(engine, 0, 0).backward()
        for handle in handles:
            handle.remove()
        return sorted(found, key=str)

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
