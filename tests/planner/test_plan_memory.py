"""The bytes of a plan add up, and are those that a run holds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from offload import testing
from offload.errors import BudgetError, ConfigError
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner import memory as planning
from offload.planner.memory import Memory, Room, settle
from offload.sizes import GIB, MIB
from offload.states import State, Tier
from offload.swapper.memory.limits import free_host_memory
from tests.support.sampling import examples


class Net(nn.Module):
    def __init__(self, widths: list[int], frozen: list[str]) -> None:
        super().__init__()
        sizes = zip(widths, [*widths[1:], 8], strict=True)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in sizes)
        for layer, still in zip(self.layers, frozen, strict=False):
            layer.requires_grad_(still != "all")
            if still == "weight":
                layer.weight.requires_grad_(False)


class Case(NamedTuple):
    widths: list[int]
    frozen: list[str]
    """What of each layer: "all", "weight" or "nothing"."""
    content: dict[str, Any]
    share: float | None
    """Of what lies between the least host memory and the default; None for the default."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Net(self.widths, self.frozen)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    alike = st.integers(20, 40).map(lambda count: [100] * count)  # so many that gradients spill with little memory
    widths = draw(alike | st.lists(st.sampled_from((3, 64, 200, 500)), min_size=1, max_size=6))
    frozen = [draw(st.sampled_from(("all", "weight", "nothing", "nothing", "nothing"))) for _ in widths]
    frozen[0] = "nothing"
    tiers = st.sampled_from(("none", "cpu", "nvme"))
    content = planning.settings(
        draw(tiers),
        draw(tiers),
        dtype=draw(st.sampled_from(("bf16", "fp32", "fp16"))),
        durability=draw(st.sampled_from(("auto", "none", "step"))),
        accumulation=draw(st.integers(1, 2)),
    )
    content["offload"]["device"] = "cpu"
    content["optimizer"]["type"] = draw(st.sampled_from(("AdamW", "SGD", "Lion")))
    return Case(widths, frozen, content, draw(st.sampled_from((None, 0.0, 0.1, 0.6, 3.0))))


def plan(case: Case) -> Memory:
    model = case.model()
    layouts, accumulation = layouts_of(model, find_units(model)), case.content["gradient_accumulation_steps"]
    memory = settle(layouts, case.content, Room(free_host_memory(), 0, None), accumulation)
    if case.share is not None:
        budget = memory.least_host + int(case.share * (memory.host - memory.least_host))
        case.content["offload"]["host_memory"] = budget
        memory = settle(layouts, case.content, Room(free_host_memory(), 0, None), accumulation)
    return memory


@settings(max_examples=examples(50), deadline=None)
@given(cases())
def test_bytes_add_up_and_are_those_of_the_run(case: Case) -> None:
    folder = Path(tempfile.mkdtemp(prefix="offload-plan"))
    case.content["offload"]["nvme_path"] = [str(folder)]
    try:
        memory = plan(case)
        total = memory.total
        assert (total.host, total.device, total.disk) == (memory.host, memory.device, memory.stored + memory.spilled)
        assert memory.least_host <= memory.host
        engine = offload.initialize(model=case.model(), config=case.content)[0]
        parts = testing.inspect(engine)
        try:
            assert parts.host_arena.classes == memory.placement.classes
            assert engine.host_memory == memory.host and engine.device_memory == memory.device
            assert (parts.store.spec.nbytes if parts.store else 0) == memory.stored
            assert (parts.store.spec.slots if parts.store else 0) == memory.slots
            spill = parts.gradients.spill
            files = [] if spill is None else spill.scratch._files
            assert sum(Path(f"/proc/self/fd/{_number(each)}").stat().st_size for each in files) == memory.spilled
            taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if parts.store is not None and memory.slots == 1:  # whose files have no name
                taken += parts.store._files.states.size()
            assert memory.stored <= taken <= memory.stored + 8 * MIB, "and little beside: records, checksums"
        finally:
            engine.destroy(remove=True)
    finally:
        shutil.rmtree(folder)


def _number(file: Any) -> int:
    return int(file.descriptors.buffered)


def blocks(count: int, numel: int) -> Any:
    net = nn.Module()
    net.layers = nn.ModuleList(
        nn.ParameterList([nn.Parameter(torch.empty(numel, device="meta"))]) for _ in range(count)
    )
    return layouts_of(net, find_units(net))


def test_twelve_bytes_a_parameter_in_each_slot() -> None:
    layouts, count = blocks(8, 1 << 20), 8 << 20
    for durability, slots in (("auto", 2), ("none", 1)):
        memory = settle(layouts, planning.settings(durability=durability), Room(GIB, GIB, None))
        assert memory.slots == slots and memory.stored == 12 * count * slots and memory.export == 2 * count
        assert memory.total.disk == 12 * count * slots
        states = {row.name: row for row in memory.rows}
        assert states["grad"].host == 2 * count and states["grad"].disk == 0


def test_two_more_where_gradients_spill() -> None:
    layouts, count = blocks(8, 1 << 20), 8 << 20
    roomy = settle(layouts, planning.settings(), Room(GIB, GIB, None))
    tight = settle(layouts, planning.settings(host_memory=roomy.least_host), Room(GIB, GIB, None))
    assert tight.spilled == 2 * count == tight.total.disk - roomy.total.disk
    assert tight.host == roomy.least_host
    with pytest.raises(BudgetError, match=rf"\({roomy.least_host} bytes\)"):  # the least that a run would name
        settle(layouts, planning.settings(host_memory=roomy.least_host - 4096), Room(GIB, GIB, None))


@pytest.mark.parametrize("weights", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("room", [None, 10, 30, 50, 100])
def test_totals_of_gradients_are_in_the_devices_column(weights: str, room: int | None) -> None:
    """As far as there is room beyond weights; without a number there is none before a first step."""
    layouts, count = blocks(8, 1 << 20), 8 << 20
    budget = None if room is None else room * MIB
    if weights == "none" and room == 10:
        budget = 2 * count
    content = planning.settings(weights, "cpu", device_memory=budget, accumulation=2)
    memory = settle(layouts, content, Room(GIB, GIB, None), 2)
    rows, added = {row.name: row for row in memory.rows}, dict(memory.placement.added)
    assert memory.total.device == memory.device and memory.device == (budget or memory.device)
    assert rows["grad"].device == sum(added.values()) == 4 * MIB * len(added) and rows["grad"].host == 4 * count
    moving = 0 if weights == "none" else 2 * count + 2 * MIB
    fixed = 2 * count if weights == "none" else 0
    assert len(added) == (0 if budget is None else min(8, max(0, budget - fixed - moving) // (4 * MIB)))
    grown = memory.placement.grown(memory.placement.device_need.most - memory.device)
    assert len(grown.added) == (8 if budget is None else len(added))


def test_a_drive_without_room_for_two_slots_takes_one() -> None:
    layouts, count = blocks(8, 1 << 20), 8 << 20
    memory = settle(layouts, planning.settings(), Room(GIB, GIB, 20 * count))
    assert memory.slots == 1 and memory.stored == 12 * count and "durability none" in memory.notices[-1]


def test_what_a_run_refuses_is_refused_by_the_plan() -> None:
    """In the same words: durable steps need a drive, and a drive that has not the room is no drive."""
    layouts, count = blocks(8, 1 << 20), 8 << 20
    content = planning.settings("cpu", "cpu", durability={"every": 2})
    with pytest.raises(ConfigError, match='needs a store, but no "nvme_path" is given') as planned:
        settle(layouts, content, Room(GIB, GIB, None))
    with pytest.raises(ConfigError) as ran:
        offload.initialize(model=nn.Linear(8, 8), config=content)
    assert str(planned.value) == str(ran.value)
    with pytest.raises(ConfigError, match='"durability" needs'):
        settle(layouts, planning.settings(durability="step"), Room(GIB, GIB, 20 * count))


def test_states_kept_in_memory_have_their_slots_too() -> None:
    layouts, count = blocks(8, 1 << 20), 8 << 20
    memory = settle(layouts, planning.settings(host_memory=256 * MIB), Room(GIB, GIB, None))
    rows = {row.name: row for row in memory.rows}
    assert memory.placement.promoted and rows["exp_avg"].host == 4 * count and rows["exp_avg"].disk == 8 * count
    tiers = memory.placement.tiers[0]
    assert tiers[State.EXP_AVG] is Tier.HOST and memory.host <= 256 * MIB
