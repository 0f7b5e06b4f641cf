"""Units that stay on the device, their views, and memory that others look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import offload
from offload import testing
from offload.errors import UsageError
from offload.sizes import PAGE
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena, ViewedMemory, ViewPlaces
from offload.torch_internals import StorageUsers, top_saved_tensor_hooks
from tests.models.test_autograd import LAYERS
from tests.models.test_module_kinds import MEMORY
from tests.support import models
from tests.support.modules.autograd_modules import KeepsViews
from tests.support.modules.module_kinds import Layers
from tests.support.oracle import assert_same, config, room_for, run, start, train_step

PAGED = ("nvme", "cpu")


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    engine = start(LAYERS, MEMORY, tmp_path)
    yield engine
    engine.destroy(remove=True)


def test_a_graph_from_before_an_edit_is_refused(engine: offload.Engine) -> None:
    old = LAYERS.loss(engine, 9, 0)
    with torch.no_grad():
        engine.module.layers[1].weight.mul_(0.5)
    LAYERS.loss(engine, 0, 0)  # the edit is written now
    with pytest.raises(UsageError, match=r"made before step\(\)"):
        engine.backward(old)


def test_a_graph_from_before_a_load_is_refused(engine: offload.Engine, tmp_path: Path) -> None:
    train_step(engine, LAYERS, 0)
    engine.save_checkpoint(str(tmp_path / "saved"), tag="one")
    old = LAYERS.loss(engine, 9, 0)
    engine.load_checkpoint(str(tmp_path / "saved"), tag="one")
    with pytest.raises(UsageError, match=r"made before step\(\)"):
        engine.backward(old)


@pytest.mark.works("Graphs", "the same, of a unit that never leaves the device", "right")
@pytest.mark.skipif(not StorageUsers.counted(), reason="this build of torch does not count")
def test_a_view_that_outlives_its_engine_in_host_memory_keeps_its_values(tmp_path: Path) -> None:
    engine = start(LAYERS, ("cpu", "cpu"), tmp_path)
    held: list[torch.Tensor] = []
    layer: Any = engine.module.layers[1]
    hook = layer.register_forward_hook(lambda module, *_: held.append(module.weight.detach()[1:]) and None)
    train_step(engine, LAYERS, 0)
    hook.remove()
    engine.synchronize()
    values = [view.clone() for view in held]
    engine.destroy(remove=True)
    run(LAYERS, ("cpu", "cpu"), tmp_path / "next")
    assert held and all(map(torch.equal, held, values))


def test_a_view_held_across_a_step_shows_the_new_weights_as_in_torch(engine: offload.Engine) -> None:
    kept: list[torch.Tensor] = []
    layer: Any = engine.module.layers[1]
    handle = layer.register_forward_hook(lambda m, i, o: kept.append(m.weight.detach()) and None)
    engine.backward(LAYERS.loss(engine, 0, 0))
    handle.remove()
    before = kept[0].clone()
    engine.step()
    now = layer.weight.clone()  # waits for the update
    assert torch.equal(kept[0], now) and not torch.equal(now, before)


def test_a_graph_that_holds_views_may_outlive_the_step(tmp_path: Path) -> None:
    job = LAYERS._replace(model=KeepsViews)
    engine = start(job, MEMORY, tmp_path)
    losses = []
    for step in range(2):
        loss = job.loss(engine, step, 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy(remove=True)
    assert losses == run(job, MEMORY, tmp_path / "other").losses[:2]


def test_an_evaluation_in_inference_mode_may_come_first(engine: offload.Engine, tmp_path: Path) -> None:
    with torch.inference_mode():
        LAYERS.loss(engine, 9, 0)
    losses = [train_step(engine, LAYERS, step) for step in range(LAYERS.steps)]
    assert losses == run(LAYERS, MEMORY, tmp_path / "plain").losses


def test_a_graph_outlives_gathered(engine: offload.Engine, tmp_path: Path) -> None:
    loss = LAYERS.loss(engine, 0, 0)
    with offload.gathered(engine.module):
        assert all(bool(torch.isfinite(parameter).all()) for parameter in engine.module.parameters())
    engine.backward(loss)
    engine.step()
    losses = [loss.item(), *(train_step(engine, LAYERS, step) for step in range(1, LAYERS.steps))]
    assert losses == run(LAYERS, MEMORY, tmp_path / "plain").losses


class Looks(Layers):
    """Notes whether hooks for saved tensors are active, and what hooks of the user receive."""

    def __init__(self) -> None:
        super().__init__()
        self.active: list[bool] = []

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.active.append(top_saved_tensor_hooks() is not None)
        return super().through(hidden, ids)


@pytest.mark.parametrize(("placement", "active"), [(MEMORY, False), (PAGED, True)])
def test_saved_tensors_have_hooks_only_where_units_come_and_go(
    placement: tuple[str, str], active: bool, tmp_path: Path
) -> None:
    job = LAYERS._replace(model=Looks)
    engine = start(job, placement, tmp_path)
    train_step(engine, job, 0)
    assert engine.module.active == [active]
    engine.destroy(remove=True)


def test_hooks_of_the_user_around_the_model_receive_no_weights(engine: offload.Engine, tmp_path: Path) -> None:
    """`save_on_cpu` would copy each to the host."""
    shapes: list[torch.Size] = []
    weights = {parameter.shape for parameter in engine.module.parameters()}
    weights |= {shape[::-1] for shape in weights}
    with saved_tensors_hooks(lambda tensor: (shapes.append(tensor.shape), tensor)[1], lambda tensor: tensor):
        loss = LAYERS.loss(engine, 0, 0)
    engine.backward(loss)
    engine.step()
    assert shapes and not weights & set(shapes)
    losses = [loss.item(), *(train_step(engine, LAYERS, step) for step in range(1, LAYERS.steps))]
    assert losses == run(LAYERS, MEMORY, tmp_path / "plain").losses


def test_beside_units_that_come_and_go_every_bit_is_the_same(tmp_path: Path) -> None:
    """`stage3_param_persistence_threshold` keeps the small units of a model on the device."""
    job = models.MIXTURE._replace(accumulation=1)
    expected = run(job, PAGED, tmp_path / "all")
    settings = config(job, PAGED, tmp_path / "some", device_memory=160 << 10)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 6144
    torch.manual_seed(job.seed)
    engine = offload.initialize(model=job.model(), config=settings)[0]
    pager = testing.inspect(engine).pager
    assert {pager.device_resident(unit) for unit in range(len(pager.sizes))} == {True, False}
    old = job.loss(engine, 9, 0)
    losses = [train_step(engine, job, 0)]
    with pytest.raises(UsageError, match=r"made before step\(\)"):
        engine.backward(old)
    engine.zero_grad()
    losses += [train_step(engine, job, step) for step in range(1, job.steps)]
    engine.destroy(remove=True)
    assert losses == expected.losses


PLACES = ViewPlaces(dtype=torch.bfloat16, tensors=(((2, 3), (3, 1), 0), ((4,), (1,), 8)))
counts = pytest.mark.skipif(not StorageUsers.counted(), reason="this build of torch does not count")


@pytest.fixture(params=[pytest.param(True, marks=counts, id="counts"), pytest.param(False, id="does-not-count")])
def counting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A torch that counts the users of a storage, and one that does not, as some builds of 2.6."""
    if not request.param:
        testing.replace(monkeypatch, "storage.users", None)
    return bool(request.param)


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[0],
        lambda tensor: tensor.t(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.view(torch.int16).numpy(),
        lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
        lambda tensor: (torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True) * tensor).grad_fn,
    ],
    ids=["alias", "row", "transposed", "storage", "numpy", "dlpack", "graph"],
)
def test_what_holds_the_memory_is_noticed_until_it_ends(counting: bool, hold: Callable[[torch.Tensor], Any]) -> None:
    memory = ViewedMemory(torch.zeros(PAGE, dtype=torch.uint8), PLACES)
    parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    parameter.data = memory.views[0]  # as a unit is bound, and released
    held = hold(parameter.detach())
    parameter.data = torch.empty(0, dtype=torch.bfloat16)
    memory.let_go()
    assert memory.viewed
    del held
    assert not memory.viewed


def test_an_arena_keeps_a_bounded_number_of_views(counting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond, all are made again; a view that somebody holds stays his."""
    testing.replace(monkeypatch, "size.device_views", 3)
    arena = DeviceArena(8 * PAGE, Device(torch.device("cpu")))
    held = [arena.viewed(arena.view(arena.take_at(place * PAGE, PAGE)), PLACES) for place in range(8)]
    assert len(arena._views) <= 3 and len(arena._viewed) <= 3
    assert [each.address - held[0].address for each in held] == [place * PAGE for place in range(8)]


def test_every_bit_is_the_same_where_torch_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2
    expected = run(job, PAGED, tmp_path / "counts", device_memory=room_for(job, 2))
    testing.replace(monkeypatch, "storage.users", None)
    assert_same(run(job, PAGED, tmp_path / "not", device_memory=room_for(job, 2)), expected)
