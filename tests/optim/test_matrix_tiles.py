"""Updates of Muon and SinkGD are cut at borders of matrices: tiles overlap within a unit, and need less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import testing
from offload.layout.flat_layout import UnitLayout, lay_out
from offload.layout.modes import make_mode
from offload.layout.optimizer_states import cuts, whole_sizes
from offload.planner import step_time
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import Shape, from_training
from offload.states import State
from tests.support.models import gpt2
from tests.support.modules.matrix_models import MUON, SINKGD
from tests.support.oracle import assert_same, kill_and_resume, run, start, train_step

DISK = ("nvme", "nvme")
MODE = make_mode("bf16", "muon")


def layout_of(ranks: int, others: int, *shapes: tuple[int, int]) -> UnitLayout:
    """A unit of a vector and matrices."""
    made = {f"{n}.weight": nn.Parameter(torch.empty(shape, device="meta")) for n, shape in enumerate(shapes)}
    vector = nn.Parameter(torch.empty(others, device="meta"))
    return lay_out("unit", [("vector", vector), *made.items()], ranks, matrices=made.keys())


def borders(layout: UnitLayout) -> set[int]:
    return {segment.start for segment in layout.segments if layout.is_matrix(segment)} | {layout.trainable_stop}


@pytest.mark.parametrize("tile_numel", [2048, 6144, 10**9])
@pytest.mark.parametrize("others", [1, 9000])
def test_tiles_cover_a_unit_in_order_and_end_at_borders_of_matrices(others: int, tile_numel: int) -> None:
    layout = layout_of(1, others, (64, 64), (64, 96), (24, 24), (24, 24), (96, 64))
    part = layout.trainable(0, 1)
    found = cuts(layout, MODE, part, True, tile_numel)
    assert [each for tile in found for each in tile] == list(part)
    assert all(tile.stop in borders(layout) for tile in found if tile.stop > layout.rest_stop)
    assert all(tile.stop <= layout.rest_stop or tile.start >= layout.rest_stop for tile in found)
    assert all(len(tile) <= max(tile_numel, whole_sizes([layout], MODE, 0, 1).tile) for tile in found)
    # Small matrices share a tile, and a larger one has its own.
    if tile_numel == 6144:
        inside = [sum(layout.segments[n].start in tile for n in range(1, 6)) for tile in found]
        assert [count for count in inside if count] == [1, 1, 2, 1]


def test_of_several_ranks_each_has_its_parts_of_matrices_in_one_tile() -> None:
    layout = layout_of(2, 6000, (64, 64), (64, 96))
    for rank in range(2):
        part = layout.trainable(rank, 2)
        found = cuts(layout, MODE, part, False, 4096)
        assert [each for tile in found for each in tile] == list(range(len(part)))
        of_matrices = [tile for tile in found if tile.stop > len(layout.rest(rank, 2))]
        assert of_matrices == [range(len(layout.rest(rank, 2)), len(part))]


def _plan(optimizer: str) -> tuple[Memory, Shape]:
    shape = from_training(gpt2(), 16, torch.bfloat16, (), {})
    content = settings() | {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    return settle(shape.layouts, content, Room(host=8 << 30, device=0, disk=None), matrices=shape.matrices), shape


def test_a_plan_plays_the_tiles_of_the_run() -> None:
    memory, shape = _plan("Muon")
    for layout, cost in zip(memory.layouts, step_time._costs(memory, shape), strict=True):
        assert cost is not None
        tiles = cuts(layout, memory.mode, layout.trainable(0, 1), True, step_time._tile_numel(memory))
        assert cost.stops == tuple(tile.stop for tile in tiles) and cost.stops[-1] == layout.trainable_stop


def test_states_of_elements_in_no_matrix_alone_are_read_with_their_tiles(tmp_path: Path) -> None:
    """Of a matrix nothing of the second moment is read, or written."""
    engine = start(MUON._replace(dtype="bf16"), DISK, tmp_path)
    inspected = testing.inspect(engine)
    train_step(engine, MUON, 0)
    testing.settle(engine, commit=False)
    seen: list[tuple[int, State, int, int]] = []
    real = inspected.store.write  # type: ignore[union-attr]

    def write(unit: int, state: State, slot: int, first: int, buffer: Any) -> Any:
        seen.append((unit, state, first, first + len(buffer)))
        return real(unit, state, slot, first, buffer)

    inspected.store.write = write  # type: ignore[method-assign, union-attr]
    train_step(engine, MUON, 1)
    testing.settle(engine, commit=False)
    engine.destroy(remove=True)
    for unit, layout in enumerate(inspected.layouts):
        for state, limit in ((State.EXP_AVG, layout.trainable_stop), (State.EXP_AVG_SQ, layout.rest_stop)):
            written = sorted((first, stop) for number, each, first, stop in seen if (number, each) == (unit, state))
            assert [first for first, _ in written] == [0, *(stop for _, stop in written)][: len(written)]
            assert (written[-1][1] if written else 0) == 4 * limit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Muon", "Muon, bf16 moments", "SinkGD"])
def test_twenty_kills_leave_the_same_bits(name: str, tmp_path: Path) -> None:
    job = (SINKGD if name == "SinkGD" else MUON)._replace(steps=300, dtype="bf16")
    options = {"moments": "bf16"} if "moments" in name else {}
    killed = kill_and_resume(job, DISK, tmp_path / "killed", 20, late=0.005, **options)
    assert_same(killed, run(job, DISK, tmp_path / "whole", **options))
