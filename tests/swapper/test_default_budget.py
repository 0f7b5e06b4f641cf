"""Without `host_memory` a run on the CPU leaves room for gradients and activations, in a small container too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offload
from bench.memory_limit import MemoryLimit
from offload.errors import BudgetError, ConfigError
from offload.layout.peak_memory import beside_budgets
from offload.layout.placement import MachineMemory, divide_device, host_needs, least_host, place, usable_host
from offload.layout.tiers import PlacementRequest, configured, demotions, with_tier
from offload.sizes import MIB
from offload.states import State, Tier
from tests.support.oracle import processes
from tests.support.processes.device_process import engine_device
from tests.support.processes.memory_limit import memory_limit
from tests.swapper.test_policy import MODE, parts_of

STEPS, WIDTH, LAYERS = 2, 1024, 4


def test_a_default_budget_without_room_names_the_way_out_once() -> None:
    request = PlacementRequest(weights=Tier.HOST, states=Tier.HOST)
    for drives in (False, True):
        machine = MachineMemory(free_host=64 * MIB, free_device=0, host_addressable=True, drives=drives)
        with pytest.raises(BudgetError, match="is used by default") as refused:
            place(parts_of([1 << 26]), MODE, request, machine)
        assert str(refused.value).count("nvme") == (not drives)
        assert str(refused.value).count('a larger "host_memory"') == 1


@given(
    numels=st.lists(st.integers(1 << 16, 1 << 24), min_size=1, max_size=12),
    free=st.integers(256 * MIB, 4096 * MIB),
    weights=st.sampled_from([Tier.HOST, Tier.DISK]),
)
def test_both_arenas_leave_room_for_a_backward(numels: list[int], free: int, weights: Tier) -> None:
    parts = parts_of(numels)
    request = PlacementRequest(weights=weights, states=Tier.DISK)
    machine = MachineMemory(free_host=free, free_device=0, host_addressable=True, drives=True)
    try:
        placement = place(parts, MODE, request, machine)
    except BudgetError as error:
        assert "suffice" not in str(error), "with smaller budgets it would fit, so these are not the defaults"
        return
    assert sum(placement.peak) <= free
    room = free - placement.device_nbytes - sum(beside_budgets(parts))
    # The least that works is taken all the same: a run that may be too large begins.
    least = sum(least_host(parts, MODE, request, machine))
    assert sum(placement.classes) <= max(usable_host(room, own_device_memory=False), least + MIB)


@pytest.mark.parametrize("early", [False, True])
def test_the_least_budget_is_that_of_the_best_move_to_disk(early: bool) -> None:
    """The needs after each move are counted from those before, and equal those of the tiers after it."""
    parts = parts_of([1 << 20, 3 << 20, 1 << 12, 5 << 20, 3 << 20, 1 << 18])
    request = PlacementRequest(weights=Tier.HOST, states=Tier.HOST, early=early)
    machine = MachineMemory(free_host=1 << 34, free_device=1 << 34, host_addressable=False, drives=True)
    tiers = configured(parts, request, MODE.weight_dtype.itemsize)
    ways = [
        with_tier(tiers, moves[:count], Tier.DISK)
        for moves in demotions(tiers, early)
        for count in range(len(moves) + 1)
    ]
    needs = [host_needs(parts, MODE, request, machine, way)[0] for way in ways]
    assert len({sum(need) for need in needs}) > 12
    assert least_host(parts, MODE, request, machine) == min(needs, key=sum)
    # Each budget between the least and the most is kept by the first way that fits.
    for need in needs[::3]:
        placement = place(parts, MODE, replace(request, host_memory=sum(need)), machine)
        assert sum(placement.classes) <= sum(need)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def train(folder: Path, tier: str) -> list[float]:
    """Returns the losses of a model of 34M parameters in fp32, whose gradients alone are 134 MB."""
    content = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": tier, "nvme_path": str(folder)},
            "offload_optimizer": {"device": tier, "nvme_path": str(folder)},
        },
        "offload": {"device": "cpu", "durability": "none"},
    }
    with offload.init(content):
        made = model()
    engine = offload.initialize(model=made, config=content)[0]
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(4, WIDTH, generator=generator)
        loss = (engine(inputs) - inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy(remove=True)
    return losses


def train_within(group: MemoryLimit, folder: Path) -> None:
    group.enter()
    (folder / "losses.json").write_text(json.dumps(train(folder, "nvme")))


def test_a_model_larger_than_its_container_trains_with_default_budgets(tmp_path: Path) -> None:
    """Weights, gradients and states take 540 MB. The container has 340 MB, and has paid for no library."""
    with memory_limit(320 * MIB) as group:
        process = processes().Process(target=train_within, args=(group, tmp_path))
        process.start()
        process.join()
    assert process.exitcode == 0, f"the run ended with {process.exitcode}"
    assert json.loads((tmp_path / "losses.json").read_text()) == train(tmp_path, "none")


@pytest.mark.parametrize(("share", "units"), [(0.01, 2.04), (0.25, 3), (0.5, 4), (1, 5)])
def test_a_percentage_of_the_weights_and_two_units_are_the_device_budget(share: float, units: float) -> None:
    """Four equal units of 1 MiB: the budget has their share and two units, at most all of them and one."""
    parts = parts_of([MIB // MODE.weight_dtype.itemsize] * 4)
    machine = MachineMemory(free_host=1 << 34, free_device=1 << 34, host_addressable=False, drives=True)
    request = PlacementRequest(weights=Tier.HOST, states=Tier.DISK, weights_on_device=share)
    placement = place(parts, MODE, request, machine)
    assert 0 <= placement.device_nbytes - units * MIB < 4096, "rounded to a page"
    assert placement.device_need.most == placement.device_nbytes, "as an explicit budget it does not grow"


def test_a_percentage_counts_weights_that_a_small_host_budget_moves_to_disk() -> None:
    """A CPU computes with weights in host memory where they are, and reads those on disk into its device arena."""
    parts = replace(parts_of([MIB] * 4), host_addressable=True)
    machine = MachineMemory(free_host=1 << 34, free_device=0, host_addressable=True, drives=True)
    request = PlacementRequest(weights=Tier.HOST, states=Tier.HOST, weights_on_device=0.5)
    least = sum(least_host(parts, MODE, request, machine))
    placement = place(parts, MODE, replace(request, host_memory=least), machine)
    assert any(row[State.WEIGHT] is Tier.DISK for row in placement.tiers)
    assert placement.device_nbytes >= placement.device_need.least > 0
    roomy = place(parts, MODE, replace(request, host_memory=1 << 30), machine)
    assert roomy.device_nbytes == 0, "all weights are in host memory"


def test_a_percentage_that_is_too_small_is_named_as_it_was_typed() -> None:
    parts = parts_of([MIB] * 4)
    machine = MachineMemory(free_host=1 << 34, free_device=1 << 34, host_addressable=False, drives=True)
    request = PlacementRequest(weights=Tier.HOST, states=Tier.HOST, weights_on_device=0.125, device_memory=0)
    tiers = configured(parts, request, MODE.weight_dtype.itemsize)
    with pytest.raises(BudgetError, match=r'^"device_memory" of 12\.5% is 0 B .*, the least that works is '):
        divide_device(parts, MODE, request, machine, tiers)


def test_a_percentage_of_weights_that_all_stay_is_refused() -> None:
    request = PlacementRequest(weights=Tier.DEVICE, states=Tier.HOST, weights_on_device=0.5)
    machine = MachineMemory(free_host=1 << 34, free_device=1 << 34, host_addressable=False, drives=True)
    with pytest.raises(ConfigError, match='set its "device" to cpu or nvme'):
        place(parts_of([MIB] * 4), MODE, request, machine)


def test_frozen_weights_are_copied_to_the_device_less_often_and_never_back() -> None:
    def copied(device_memory: str | None) -> tuple[float, float]:
        """Returns the bytes that the last of some steps copies to the device, and from it."""
        network = nn.Sequential(*model().requires_grad_(False), nn.Linear(WIDTH, 1, bias=False))
        content = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            },
            "offload": {"device": engine_device()} | ({"device_memory": device_memory} if device_memory else {}),
            "wall_clock_breakdown": True,
        }
        engine = offload.initialize(model=network, config=content).engine
        for _ in range(3):
            engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
            engine.step()
        numbers = dict(engine.measured)
        engine.destroy()
        return numbers["uploaded_bytes"], numbers["downloaded_bytes"]

    default, half, whole = (copied(device_memory) for device_memory in (None, "50%", "100%"))
    trains = 4 * WIDTH
    assert default[1] == half[1] == whole[1] == trains, "the gradient of what trains, at any percentage"
    if engine_device() == "cpu":
        assert default[0] == half[0] == whole[0] == 0, "the CPU computes with weights where they are"
    else:
        assert default[0] > half[0] > whole[0], "more of the frozen weights stay"
        assert trains <= whole[0] < 4 * trains, "all frozen weights stay; what was updated comes again, in whole pages"
