"""Tiles of an update: every pass covers the unit once, and the update has ended when the last write has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from offload.engine.callbacks import Edit
from offload.engine.update import UnitJob
from offload.engine.update_strategy import EditSteps, TileContent, UnitUpdate
from offload.layout.modes import MODES
from offload.states import State


class Passes:
    """Steps of so many passes, without arithmetic."""

    in_place = False
    drafts: Sequence[State] = ()

    def __init__(self, passes: int, cuts: Sequence[range] = ()) -> None:
        self.passes, self.cuts = passes, cuts

    def run(self, tile: TileContent, last: bool) -> None:
        raise AssertionError("nothing is run here")


def job_of(numel: int, passes: int, tile_numel: int) -> UnitJob:
    update = UnitUpdate(unit=0, numel=numel)
    return UnitJob(update=update, steps=Passes(passes), host_buffer=None, delivered=False, tile_numel=tile_numel)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize(("numel", "tile_numel"), [(10, 4), (8, 4), (3, 4), (1, 1)])
def test_every_pass_covers_the_unit_in_order(numel: int, tile_numel: int, passes: int) -> None:
    job = job_of(numel, passes, tile_numel)
    tiles = []
    while not job.all_begun:
        tiles.append(job.begin_tile())
    elements = [(passed, element) for tile, passed in tiles for element in tile]
    assert elements == [(passed, element) for passed in range(passes) for element in range(numel)]
    assert all(len(tile) <= tile_numel for tile, _ in tiles)


@pytest.mark.parametrize("passes", [1, 2])
def test_an_update_has_ended_when_all_that_is_kept_is_written(passes: int) -> None:
    job = job_of(numel=6, passes=passes, tile_numel=2)
    while not job.all_begun:
        job.begin_tile()
    assert [job.end_writes({}) for _ in range(2)] == [False, False], "not computed, and one tile is unwritten"
    job.computed = True
    assert job.end_writes({})


def test_writes_that_ended_before_the_last_tile_was_computed_do_not_end_an_update() -> None:
    job = job_of(numel=4, passes=1, tile_numel=2)
    job.begin_tile()
    assert not job.end_writes({}), "the other tile was not even begun"
    job.begin_tile()
    job.computed = True
    assert job.end_writes({})


def test_a_later_edit_of_the_same_elements_counts_and_others_stay() -> None:
    mode = MODES["fp32"]
    states = {state: torch.zeros(4, dtype=dtype) for state, dtype in mode.states.items()}
    edits = [
        Edit(start=0, stop=6, values=torch.arange(6.0)),
        Edit(start=5, stop=7, values=torch.tensor([50.0, 60.0])),
        Edit(start=4, stop=5, values=torch.tensor([7.0]), state=State.EXP_AVG),
        Edit(start=0, stop=4, values=torch.full((4,), -1.0)),  # of the tile before
    ]
    EditSteps(edits, mode).run(TileContent(start=4, stop=8, states=states, gradient=None), last=True)
    assert states[State.WEIGHT].tolist() == [4, 50, 60, 0]
    assert states[State.EXP_AVG].tolist() == [7, 0, 0, 0]
    assert not states[State.EXP_AVG_SQ].any()
