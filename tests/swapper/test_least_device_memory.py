"""A device budget that a start accepts is enough for every later step, whatever came and went before."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from offload.errors import BudgetError
from offload.layout import flat_layout
from offload.layout.flat_layout import IN_FILES, UnitLayout, lay_out
from offload.layout.memory_plan import unit_sizes
from offload.layout.tiers import units_together
from offload.layout.units import Stack, Table, Units, external_parameters, find_units
from offload.planner.memory import Memory, Room, settle
from offload.sizes import PAGE
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.pager import Pager
from offload.swapper.policy import Limits, PassKind
from tests.support.sampling import examples

NUMEL = 2048
"""Elements of the smallest unit: two pages."""


@dataclass(frozen=True)
class Layer:
    """A layer of a model; sizes count units of `NUMEL`, and 0 is no unit."""

    rest: int
    adapters: int = 0
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shape:
    """A model of layers, between an embedding and a head, with weights of its own."""

    layers: tuple[Layer, ...]
    ends: tuple[int, int]
    own: int = 0


def unit(name: str, size: int, trains: bool = False, rows: range | None = None) -> UnitLayout:
    parameter = nn.Parameter(torch.empty(1 if rows is None else rows.stop, size * NUMEL, device="meta"), trains)
    return lay_out(name, [(f"{name.partition('[')[0]}.weight", parameter)], 1, rows=rows)


def layouts_of(shape: Shape) -> Iterator[UnitLayout]:
    yield unit("embedding", shape.ends[0])
    if shape.own:
        yield unit("", shape.own, trains=True)
    for index, layer in enumerate(shape.layers):
        name = f"layers.{index}"
        if layer.adapters:
            yield unit(name, layer.adapters, trains=True)
        yield unit(name, layer.rest)._replace(in_files=True, name=f"{name} {IN_FILES}")
        for row, size in enumerate(layer.groups):
            yield unit(f"{name}.experts[{row}:{row + 1}]", size, rows=range(row, row + 1))
    yield unit("head", shape.ends[1])


def planned(layouts: Sequence[UnitLayout], device_memory: int) -> Memory:
    disk = {"device": "nvme", "nvme_path": "/nowhere"}
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
        "offload": {"device": "cpu", "device_memory": device_memory},
    }
    return settle(tuple(layouts), content, Room(1 << 40, 0, None))


def least_of(layouts: Sequence[UnitLayout]) -> int:
    with pytest.raises(BudgetError) as refused:
        planned(layouts, 1)
    return named_least(refused.value)


def named_least(error: BudgetError) -> int:
    named = re.search(r"the least that works is .*?\((\d+) bytes\)", str(error))
    assert named is not None
    return int(named[1])


class Late:
    """Reads that end when somebody waits for them, or at a random look."""

    committed = False

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: object) -> Any:
        return _LateRead(self._chance, unit, buffer)


class _LateRead:
    def __init__(self, chance: random.Random, unit: int, buffer: memoryview) -> None:
        self._chance, self._unit, self._buffer = chance, unit, buffer
        self._ended = False

    def add_done_callback(self, act: Any) -> None:
        return

    def done(self) -> bool:
        self._ended = self._ended or self._chance.random() < 0.5
        return self._ended

    def wait(self, timeout: float | None = None) -> int:
        self._ended = True
        self._buffer[:] = bytes([self._unit % 251]) * len(self._buffer)
        return len(self._buffer)


class Run:
    """Steps over a model as the engine makes them: what a module needs is pinned until it ends."""

    def __init__(self, memory: Memory, device_nbytes: int, host_nbytes: int, chance: random.Random) -> None:
        cpu = Device(torch.device("cpu"))
        self.chance = chance
        shares = [(layout.trainable(0, 1), layout.frozen(0, 1)) for layout in memory.request.layouts]
        sizes = unit_sizes(
            memory.request.layouts, memory.placement, shares, memory.mode, memory.request.in_place_layouts
        )
        self.pager = Pager(
            sizes,
            HostArena(HostBudget(0, host_nbytes, 0, 0), cpu),
            DeviceArena(device_nbytes, cpu),
            cpu,
            Late(chance),
            Limits(),
        )
        self.modules: dict[str, list[int]] = {}
        for index, layout in enumerate(memory.request.layouts):
            self.modules.setdefault(layout.module, []).append(index)

    def use(self, units: Sequence[int]) -> None:
        for index in units:
            weights = self.pager.acquire(index)
            assert bool((weights == index % 251).all())

    def release(self, units: Sequence[int]) -> None:
        for index in reversed(units):
            self.pager.release(index)

    def layer(self, name: str, backward: bool) -> None:
        own = self.modules[name]
        groups = [units[0] for module, units in self.modules.items() if module.startswith(f"{name}.experts")]
        visited = sorted(self.chance.sample(groups, self.chance.randint(0, len(groups))))
        self.use(own)
        with self.pager.lock:
            self.pager.table.access_order.expect(visited, groups, at_once=backward)
        self.pager.prefetch()
        for index in visited:
            self.use([index])
            self.release([index])
        self.release(own)
        if backward:  # saved weights, of one unit after the other
            for index in [*reversed(visited), *own]:
                self.use([index])
                self.release([index])

    def passes(self, kind: PassKind) -> None:
        names = [name for name in self.modules if name.startswith("layers.") and name.count(".") == 1]
        root = self.modules.get("", [])
        self.pager.begin(kind)
        self.use(root)
        for name in ["embedding", *names, "head"]:
            if name in names:
                self.layer(name, backward=False)
            else:
                self.use(self.modules[name])
                self.release(self.modules[name])
        self.release(root)
        self.pager.end_forward()
        if kind is PassKind.TRAIN:
            for name in reversed(names):
                self.layer(name, backward=True)


def check(shape: Shape, more: int, small_host: bool, seed: int, steps: int = 4) -> None:
    layouts = list(layouts_of(shape))
    device_memory = least_of(layouts) + more * PAGE
    memory = planned(layouts, device_memory)
    largest = max(layout.device_numel * 4 for layout in layouts)
    # Units that fit twice into the host buffers are copied; others are read in place.
    run = Run(memory, memory.placement.device_nbytes, PAGE * 2 if small_host else 8 * largest, random.Random(seed))
    assert memory.placement.device_nbytes <= device_memory
    for step in range(steps):
        if step == 2:
            run.passes(PassKind.EVAL)
        run.passes(PassKind.TRAIN)
        run.pager.end_step()
        run.pager.prefetch()
    run.pager.close()


LAYERS = st.builds(
    Layer,
    rest=st.integers(1, 6),
    adapters=st.integers(0, 4),
    groups=st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda pair: (pair[1],) * pair[0]),
)
SHAPES = st.builds(
    Shape,
    layers=st.lists(LAYERS, min_size=1, max_size=5).map(tuple),
    ends=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    own=st.integers(0, 2),
)


@settings(max_examples=examples(800), deadline=None)
@given(shape=SHAPES, more=st.integers(0, 40), small_host=st.booleans(), seed=st.integers(0, 999))
def test_no_step_lacks_device_memory(shape: Shape, more: int, small_host: bool, seed: int) -> None:
    check(shape, more, small_host, seed)


@pytest.mark.parametrize("small_host", [False, True], ids=["copied", "read in place"])
def test_adapters_leave_room_for_a_group_and_the_rest_of_its_layer(small_host: bool) -> None:
    """From the least budget upward, with adapters that fit anywhere between the other two."""
    shape = Shape((Layer(3, 1, (3,) * 4),) * 4, (4, 4))
    for more in range(0, 24, 3):
        check(shape, more, small_host, seed=more)


# -- units that a module needs at the same time --------------------------------------------------------


class Node(nn.Module):
    """A module of a random model, which calls the modules inside of it one after the other."""

    def __init__(self, chance: random.Random, depth: int, made: list[nn.Parameter]) -> None:
        super().__init__()
        for index in range(chance.randint(0, 2)):
            # A weight of this module alone, or one that an earlier module owns too.
            own = nn.Parameter(torch.empty(chance.randint(1, 4), 64), requires_grad=chance.random() < 0.7)
            weight = chance.choice([own, *made]) if chance.random() < 0.4 else own
            made.append(weight)
            self.register_parameter(f"weight{index}", weight)
        children = [Node(chance, depth - 1, made) for _ in range(chance.randint(0, 3) if depth else 0)]
        if children and chance.random() < 0.2:
            children.append(chance.choice(children))  # a module in two places
        self.inside = nn.ModuleList(children) if chance.random() < 0.3 else nn.Sequential(*children)
        if made and chance.random() < 0.15:
            offload.register_external_parameter(self, chance.choice(made))

    def forward(self, number: int) -> int:
        for child in self.inside:
            number = child(number)
        return number


def needed_at_once(model: nn.Module, units: Units) -> Iterator[set[int]]:
    """Yields the units that each call of a module needs, with those of the calls around it, as hooks find them."""
    names = {id(module): name for name, module in model.named_modules()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    parts: dict[str, list[int]] = {}
    for index, unit in enumerate(units.units):
        for name in unit.parameters if unit.row is not None or unit.rows is not None else ():
            parts.setdefault(name, []).append(index)
    whole = [(index, unit) for index, unit in enumerate(units.units) if unit.row is None and unit.rows is None]
    unit_of = {name: index for index, unit in whole for name in unit.parameters}
    calls: list[set[int]] = []
    parts_at_once: list[set[int]] = []

    def before(module: nn.Module, _: object) -> None:
        needed = set(units.sites.get(names[id(module)], ()))
        external = [first[id(value)] for value in external_parameters(module)]
        needed |= {unit_of[name] for name in external if name in unit_of}
        calls.append(needed)
        now = set().union(*calls)
        parts_at_once.append(now)
        used = [first[id(value)] for value in module._parameters.values()] + external
        parts_at_once.extend({part, *now} for name in used for part in parts.get(name, ()))

    hooks = [
        hook
        for module in model.modules()
        for hook in (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(lambda *_: calls.pop() and None),
        )
    ]
    model(0)
    for hook in hooks:
        hook.remove()
    yield from parts_at_once


@settings(max_examples=examples(400), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_what_a_module_needs_at_once_is_counted(seed: int) -> None:
    """Weights that several modules own or use, weights in fp32 and in files, pieces, experts, modules around."""
    chance = random.Random(seed)
    model = Node(chance, 3, [])
    names = [name for name, _ in model.named_parameters()]
    if not names:
        return
    in_fp32, in_files = ([name for name in names if chance.random() < 0.2] for _ in range(2))
    cut = [name for name in names if chance.random() < 0.2 and model.get_parameter(name).shape[0] > 1]
    sizes = {name: model.get_parameter(name).shape[0] for name in cut}
    tables = [Table(name, (range(1), range(1, sizes[name])), False) for name in cut if chance.random() < 0.5]
    of_tables = {table.parameter for table in tables}
    stacks = [Stack(name.rpartition(".")[0], (name,), sizes[name]) for name in cut if name not in of_tables]
    units = find_units(model, stacks=stacks, in_fp32=in_fp32, tables=tables, in_files=in_files)
    layouts = [
        layout._replace(in_files=True, name=f"{layout.name} {IN_FILES}")
        if {*unit.parameters} <= {*in_files}
        else layout
        for unit, layout in zip(units.units, flat_layout.layouts_of(model, units), strict=True)
    ]
    counted = units_together(layouts)
    for needed in needed_at_once(model, units):
        sets = [({*together.units}, {*together.others}) for together in counted]
        assert len(needed) < 2 or any(
            needed <= own or (len(needed - own) == 1 and needed - own <= others) for own, others in sets
        ), (needed, counted)


class TiedHead(nn.Module):
    """A head whose weight is the embedding's, and whose bias is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, 16)
        self.head = nn.Linear(16, 3000)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)).logsumexp(-1).mean()


@pytest.mark.parametrize("vocabulary", ["whole", "pieces"])
def test_the_start_counts_a_weight_that_two_modules_own_beside_what_each_has_alone(
    vocabulary: str, tmp_path: Path
) -> None:
    def start(device_memory: int) -> offload.Engine:
        disk = {"device": "nvme", "nvme_path": str(tmp_path)}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": disk,
                "offload_optimizer": disk,
                "stage3_param_persistence_threshold": 0,
            },
            "offload": {"device": "cpu", "device_memory": device_memory, "vocabulary": vocabulary},
        }
        return offload.initialize(model=TiedHead(), config=config)[0]

    with pytest.raises(BudgetError) as refused:
        start(1)
    engine = start(named_least(refused.value))
    for _ in range(3):
        engine.backward(engine(torch.arange(8)[None]))
        engine.step()
    engine.destroy(remove=True)
