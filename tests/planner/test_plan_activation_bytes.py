"""A plan counts the bytes that activations take in each tier, with recomputation, chunks and tiles or without."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.losses import chunked
from offload.planner import activations
from offload.planner.activations import CHUNK_TOKENS, Load, Moving, Need, Wish, auto_tile, moving, need, placed
from offload.planner.model_shape import Shape, from_count
from tests.planner.activation_plans import BLOCKS, HIDDEN, INPUT, TOKENS, WORDS, small
from tests.support.sampling import examples

LOGITS = 4 * TOKENS * WORDS
PLAIN_HEAD = 3 * INPUT + INPUT + LOGITS + 2 * LOGITS
"""Saved by norm and head, and the logits with their gradient."""


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 40, 2048)


def test_without_recomputation_every_block_keeps_all() -> None:
    assert need(small(), Load(1)) == Need(BLOCKS * 20 * INPUT + PLAIN_HEAD)
    assert need(small(), Load(3)) == Need(3 * (BLOCKS * 20 * INPUT + PLAIN_HEAD))


def test_recomputation_keeps_inputs_and_the_larger_of_head_and_one_block() -> None:
    one_block = 20 * INPUT + INPUT + 2 * 3 * INPUT
    assert PLAIN_HEAD > one_block
    assert need(small(), Load(1, recompute=True)) == Need(BLOCKS * INPUT + PLAIN_HEAD)
    in_chunks = Load(1, recompute=True, chunked_loss=True)
    assert need(small(), in_chunks) == Need(BLOCKS * INPUT + max(one_block, chunked_head()))


def chunked_head() -> int:
    """Returns the bytes of the norm, and of what the docstring of `offload.losses.chunked` counts."""
    numel = small().layouts[-1].numel
    summed = INPUT + 4 * numel
    return 3 * INPUT + INPUT + summed + max(CHUNK_TOKENS * WORDS * 6 + 2 * numel, summed + 2 * numel)


def test_inputs_leave_the_device_but_for_those_on_their_way() -> None:
    load = Load(1, recompute=True, on_host=BLOCKS - 1)
    assert need(small(), load) == Need((1 + activations.IN_FLIGHT) * INPUT + PLAIN_HEAD, 3 * INPUT)
    on_disk = need(small(), Load(2, recompute=True, on_disk=BLOCKS - 1))
    assert on_disk.disk == 2 * 3 * INPUT and on_disk.host == 2 * 3 * INPUT, "of buffers as many as there are inputs"
    assert moving(small(), load) == [Moving(INPUT)] * 3 + [Moving()]
    both = moving(small(), Load(1, recompute=True, on_disk=1, on_host=2))
    assert both == [Moving(INPUT, True), *[Moving(INPUT)] * 2, Moving()], "the oldest is needed last"


def test_tiles_bound_what_an_mlp_makes() -> None:
    tile, numel = 1024, 8 * HIDDEN**2
    load = Load(1, recompute=True, chunked_loss=True, tile=tile)
    in_tile = (12 * INPUT + 2 * 3 * INPUT) * tile // TOKENS
    one_block = (20 - 12 + 1) * INPUT + INPUT + max(INPUT + in_tile + numel * (4 + 2), 4 * 2 * INPUT)
    assert need(small(), load).device == BLOCKS * INPUT + max(one_block, chunked_head())
    assert need(small(), load._replace(tile=TOKENS)) == need(small(), load._replace(tile=0)), "one tile is the whole"
    assert need(small(), load._replace(tile=0, tiles=4)) == need(small(), load), "a quarter of the sequence"


def test_the_first_blocks_alone_are_recomputed_on_request() -> None:
    """As DeepSpeed's `number_checkpoints` asks."""
    for count in (1, 3):
        load = Load(1, recompute=True, first=count)
        kept = (BLOCKS - count) * 20 * INPUT + PLAIN_HEAD
        assert need(small(), load) == Need(count * INPUT + kept)
        of_tier = placed(small(), Load(1), Wish("nvme", first=count), Need(0), True)
        assert of_tier.on_disk == count - 1
    assert need(small(), load._replace(first=BLOCKS)) == need(small(), load._replace(first=0))


def test_chunks_and_tiles_are_those_of_the_engine(shape: Shape) -> None:
    assert chunked.CHUNK_TOKENS == CHUNK_TOKENS
    assert auto_tile(shape) == 5120, "the hidden size" and auto_tile(small()) == 1024


loads = st.builds(
    Load,
    st.integers(1, 8),
    st.just(1),
    st.booleans(),
    st.booleans(),
    st.sampled_from((0, 1, 1000, 1024, 5000)),
    st.sampled_from((0, 0, 1, 3, 100)),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from((0, 0, 1, 4)),
)


@settings(max_examples=examples(200), deadline=None)
@given(loads, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 3))
def test_more_tokens_never_need_less(load: Load, sequence: int, more: int, sequences: int) -> None:
    of = small()
    less = need(of.at(sequence), load)
    longer = need(of.at(sequence + more), load._replace(batch=load.batch + sequences))
    assert all(small_ <= large for small_, large in zip(less, longer, strict=True))


@settings(max_examples=examples(100), deadline=None)
@given(loads, st.integers(1, 10**5))
def test_inputs_that_leave_never_need_more_of_the_device(load: Load, sequence: int) -> None:
    of = small().at(sequence)
    stay, needed = need(of, load._replace(on_disk=0, on_host=0)), need(of, load)
    one = activations.input_nbytes(of, load, of.blocks[0])
    # No more than those on their way: so many may be counted beside inputs that stay.
    assert needed.device <= stay.device + activations.IN_FLIGHT * one
    assert needed.host + needed.disk >= sum(each.nbytes for each in moving(of, load))
