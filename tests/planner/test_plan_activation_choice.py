"""A plan that chooses where activations are writes its choice, and the budgets for it, into its config."""

from __future__ import annotations

import pytest

from offload.planner import recommend, request
from offload.planner.activations import Load, need
from offload.planner.model_shape import Shape, from_count
from offload.planner.recommend import advise
from tests.planner.activation_plans import card, config


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 40, 2048)


def test_a_plan_that_chooses_says_so_in_its_config(shape: Shape) -> None:
    for tokens, tier, recompute in ((1024, None, False), (4096, "device", True), (48_000, "cpu", True)):
        planned = recommend.choose(shape.at(tokens), card(), Load(1, chunked_loss=True), None)
        assert planned.content["offload"].get("activations") == tier and planned.load.recompute is recompute
        assert recommend.plan(shape.at(tokens), card(), planned.load, planned.content).needed == planned.needed
    theirs = recommend.choose(shape.at(4096), card(), Load(1, chunked_loss=True), True)
    assert "activations" not in theirs.content["offload"], "the model recomputes by itself"


def test_no_recomputation_is_advised_where_it_is_faster_and_fits(shape: Shape) -> None:
    on = card(gpu_memory=1 << 40, matmul=1e12)
    planned = recommend.plan(shape, on, Load(1), config("device"))
    changes = {change.words: change for change in advise(planned).changes}
    assert changes["no recomputation"].gain > 1.1


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", ["cpu", "nvme", "auto"])
def test_the_budgets_of_a_plans_config_have_the_planned_room_for_inputs(shape: Shape, tier: str) -> None:
    on, load = card(), Load(4)
    planned = recommend.with_host_budget(recommend.plan(shape, on, load, config(tier)))
    inputs = need(shape, planned.load).host
    again = recommend.plan(shape, on, load, request.ready(planned))
    assert bool(inputs) == (tier != "auto")  # there all of them stay on the device
    assert again.memory.placement.inputs_nbytes is not None
    assert again.memory.placement.inputs_nbytes >= inputs
    assert again.load == planned.load
    assert again.memory.placement.classes == planned.memory.placement.classes
