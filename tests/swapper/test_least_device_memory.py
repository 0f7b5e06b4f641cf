"""A device budget that a start accepts is enough for every later step, whatever came and went before."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.errors import BudgetError
from offload.layout.flat_layout import IN_FILES, UnitLayout, lay_out
from offload.layout.memory_plan import unit_sizes
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
    named = re.search(r"the least that works is .*?\((\d+) bytes\)", str(refused.value))
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
        shares = [(layout.trainable(0, 1), layout.frozen(0, 1)) for layout in memory.layouts]
        sizes = unit_sizes(memory.layouts, memory.placement, shares, memory.mode, memory.in_place_layouts)
        self.pager = Pager(
            sizes,
            HostArena(HostBudget(0, host_nbytes, 0, 0), cpu),
            DeviceArena(device_nbytes, cpu),
            cpu,
            Late(chance),
            Limits(),
        )
        self.modules: dict[str, list[int]] = {}
        for index, layout in enumerate(memory.layouts):
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
