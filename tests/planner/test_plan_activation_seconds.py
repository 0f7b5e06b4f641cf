"""A plan counts the seconds that recomputation, tiles and the copies of inputs add to a step."""

from __future__ import annotations

import pytest

from offload.planner import recommend, step_time
from offload.planner.activations import Load
from offload.planner.model_shape import Shape, from_count
from tests.planner.activation_plans import card, config


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 40, 2048)


def test_copies_hide_behind_compute_while_the_link_keeps_up(shape: Shape) -> None:
    long = shape.at(8192)
    fast = card(upload=1e12, download=1e12)
    stays, leaves = (recommend.plan(long, fast, Load(1, chunked_loss=True), config(tier)) for tier in ("device", "cpu"))
    assert leaves.load.on_host == 39 and leaves.timing.seconds == pytest.approx(stays.timing.seconds, rel=0.03)
    assert leaves.timing.compute_seconds == stays.timing.compute_seconds


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_slow_link_takes_the_seconds_of_its_bytes(shape: Shape, tier: str) -> None:
    slow = card(matmul=1e18, elementwise=1e18, upload=1e9, download=1e9, handed_seconds=0.0)
    planned = recommend.plan(shape.at(8192), slow, Load(1, chunked_loss=True), config(tier))
    nbytes = 39 * 2 * 8192 * 5120
    # Each byte goes down in the forward and up in the backward, after which nothing of the step is left to hide it.
    assert planned.timing.seconds >= 2 * nbytes / 1e9
    assert planned.timing.busy["PCIe"] >= nbytes / 1e9


def test_inputs_on_drives_are_written_and_read_once_a_micro_batch(shape: Shape) -> None:
    nbytes = 39 * 2 * 2048 * 5120
    for accumulation in (1, 3):
        planned = recommend.plan(shape, card(), Load(1, accumulation, chunked_loss=True), config("nvme"))
        moved = planned.timing.moved
        assert moved.inputs_written == moved.inputs_read == accumulation * nbytes
        without = recommend.plan(shape, card(), Load(1, accumulation, chunked_loss=True), config("device")).timing
        assert moved.written == without.moved.written + accumulation * nbytes, "they wear the drive"
        assert planned.timing.seconds >= without.seconds


def test_a_tiled_mlp_is_computed_once_more(shape: Shape) -> None:
    on, load = card(handed_seconds=0.0), Load(2, recompute=True, tile=1024)
    plain, tiled = (step_time.forward(shape, on, each) for each in (load._replace(tile=0), load))
    use = shape.uses[3]
    numel = use.mlp_flops / (2 * shape.sequence)
    sums = 4 * numel * (2 * 4 + 2) / on.elementwise
    assert tiled[3].seconds == plain[3].seconds
    assert tiled[3].backward - plain[3].backward == pytest.approx(2 * use.mlp_flops / on.matmul + sums)
    assert tiled[-1] == plain[-1]


def test_the_loss_in_chunks_adds_sums_of_the_heads_gradient(shape: Shape) -> None:
    on = card(handed_seconds=0.0)
    plain, in_chunks = (step_time.forward(shape, on, Load(1, chunked_loss=each)) for each in (False, True))
    sums = 2 * shape.layouts[-1].numel * (2 * 4 + 2) / on.elementwise
    assert in_chunks[-1].backward - plain[-1].backward == pytest.approx(sums)
    assert in_chunks[:-1] == plain[:-1]


def test_the_head_is_not_recomputed(shape: Shape) -> None:
    on = card(handed_seconds=0.0)
    first = step_time.forward(shape, on, Load(1))
    plain, again = (step_time.backward(first, [0] * len(shape.layouts), on, each) for each in (False, True))
    assert again[0] == plain[0] and again[1].seconds == pytest.approx(plain[1].seconds + first[-2].seconds)
