"""A unit's flat layout: aligned, trainable first, padded, and cut evenly for any number of ranks."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.layout.flat_layout import lay_out

parameters = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=1, max_size=12)


def _parameters(sizes: list[tuple[int, bool]]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.empty(n, device="meta"), g)) for i, (n, g) in enumerate(sizes)]


@given(parameters, st.integers(1, 8))
@settings(deadline=None)
def test_segments_are_aligned_disjoint_and_inside(sizes: list[tuple[int, bool]], world_size: int) -> None:
    layout = lay_out("unit", _parameters(sizes), world_size)
    assert sorted(s.name for s in layout.segments) == sorted(f"p{i}" for i in range(len(sizes)))
    end = 0
    for segment in layout.segments:
        assert segment.start % 32 == 0 and segment.start >= end
        end = segment.stop
    assert end <= layout.numel
    assert layout.numel % (world_size * 2048) == 0


@given(parameters, st.integers(1, 8))
@settings(deadline=None)
def test_the_trainable_segments_are_a_prefix(sizes: list[tuple[int, bool]], world_size: int) -> None:
    layout = lay_out("unit", _parameters(sizes), world_size)
    assert layout.trainable_stop % 2048 == 0
    assert (layout.trainable_stop > 0) == any(n and g for n, g in sizes)
    for segment in layout.segments:
        if segment.trainable:
            assert segment.stop <= layout.trainable_stop


@given(parameters, st.integers(1, 8))
@settings(deadline=None)
def test_partitions_cover_the_unit_once(sizes: list[tuple[int, bool]], world_size: int) -> None:
    layout = lay_out("unit", _parameters(sizes), world_size)
    trained = [layout.trainable(rank, world_size) for rank in range(world_size)]
    frozen = [layout.frozen(rank, world_size) for rank in range(world_size)]
    assert trained[0].start == 0 and trained[-1].stop == frozen[0].start == layout.trainable_stop
    assert frozen[-1].stop == layout.numel
    for parts in (trained, frozen):
        assert all(left.stop == right.start for left, right in itertools.pairwise(parts))
        assert len({len(part) for part in parts}) == 1 and len(parts[0]) % 2048 == 0


def test_a_tied_or_empty_parameter_takes_no_room_twice() -> None:
    layout = lay_out("unit", _parameters([(0, True), (1, True)]), 1)
    assert layout.numel == 2048
