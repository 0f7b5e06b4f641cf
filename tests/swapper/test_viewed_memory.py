"""A unit's device memory keeps its storage from use to use, and whatever holds a part of it is noticed all the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import testing
from offload.sizes import PAGE
from offload.swapper.memory.device import DONE, Device
from offload.swapper.memory.device_arena import DeviceArena, ViewedMemory, ViewPlaces
from offload.torch_internals import StorageUsers
from tests.support import models
from tests.support.oracle import assert_same, room_for, run

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


def test_a_unit_that_returns_to_its_place_finds_its_storage(counting: bool) -> None:
    arena = DeviceArena(4 * PAGE, Device(torch.device("cpu")))
    buffer = arena.take_at(PAGE, PAGE)
    first = arena.viewed(arena.view(buffer), PLACES)
    arena.give(buffer, DONE, DONE)
    again = arena.viewed(arena.view(arena.take_at(PAGE, PAGE)), PLACES)
    assert (again is first) == counting and again.address == first.address
    other = ViewPlaces(dtype=torch.bfloat16, tensors=PLACES.tensors[:1])
    assert len(arena.viewed(again.memory, other).views) == 1, "another unit has other parameters"


def test_an_arena_keeps_a_bounded_number_of_views(counting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond, all are made again; a view that somebody holds stays his."""
    testing.replace(monkeypatch, "size.device_views", 3)
    arena = DeviceArena(8 * PAGE, Device(torch.device("cpu")))
    held = [arena.viewed(arena.view(arena.take_at(place * PAGE, PAGE)), PLACES) for place in range(8)]
    assert len(arena._views) <= 3 and len(arena._viewed) <= 3
    assert [each.address - held[0].address for each in held] == [place * PAGE for place in range(8)]


def test_grown_memory_is_free_once_it_is_given_back(counting: bool) -> None:
    arena = DeviceArena(PAGE, Device(torch.device("cpu")))
    start, _ = arena.grow(PAGE)
    buffer = arena.take_at(start, PAGE)
    viewed = arena.viewed(arena.view(buffer), PLACES)
    viewed.let_go()
    grown = weakref.ref(viewed)
    arena.give(buffer, DONE, DONE)
    del viewed
    assert arena.shrink() == PAGE and grown() is None


def test_every_bit_is_the_same_where_torch_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2
    expected = run(job, ("cpu", "cpu"), tmp_path / "counts", device_memory=room_for(job, 2))
    testing.replace(monkeypatch, "storage.users", None)
    assert_same(run(job, ("cpu", "cpu"), tmp_path / "not", device_memory=room_for(job, 2)), expected)
