"""The schedule of a run is the one that was asked for, or layer-major where it saves transfers and is known to fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR, SCHEDULES, ScheduleChoice, choose_schedule

GIB = 1 << 30
PAYS: dict[str, Any] = {
    "asked": "auto",
    "micro_batches": 8,
    "blocks": 40,
    "moves": True,
    "checkpointed": True,
    "activation_nbytes": 10 * GIB,
    "free_nbytes": 12 * GIB,
}
"""A run for which layer-major pays and fits."""


def chosen(**other: Any) -> ScheduleChoice:
    return choose_schedule(**{**PAYS, **other})


def test_layer_major_is_taken_where_it_saves_transfers_and_fits() -> None:
    assert chosen() == ScheduleChoice(LAYER_MAJOR, "each weight is fetched twice a step instead of 16 times")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"micro_batches": 1}, "a step has one micro-batch, so both orders are the same"),
        ({"blocks": 0}, "the model is no chain of repeated blocks"),
        ({"blocks": 1}, "the model is no chain of repeated blocks"),
        ({"moves": False}, "all weights stay on the device, so no transfer would be saved"),
        ({"free_nbytes": 9 * GIB}, "activations of 8 micro-batches take 10.0 GiB, and 9.0 GiB is free"),
        ({"free_nbytes": -1}, "activations of 8 micro-batches take 10.0 GiB, and 0 B is free"),
        (
            {"checkpointed": False, "activation_nbytes": None},
            "blocks keep all activations, and it is unknown whether those of 8 micro-batches fit",
        ),
        (
            {"activation_nbytes": None, "tied_nbytes": 7 * GIB},
            "gradients of tied weights of 8 micro-batches take 7.0 GiB, of 12.0 GiB that is free",
        ),
    ],
)
def test_a_reason_says_why_auto_takes_the_other_order(other: dict[str, Any], reason: str) -> None:
    assert chosen(**other) == ScheduleChoice(MICRO_BATCH_MAJOR, reason)


@pytest.mark.parametrize("unknown", ["activation_nbytes", "free_nbytes"])
def test_blocks_that_keep_their_inputs_alone_are_trusted_to_fit(unknown: str) -> None:
    assert chosen(**{unknown: None}).schedule == LAYER_MAJOR
    assert chosen(**{unknown: None, "checkpointed": False}).schedule == MICRO_BATCH_MAJOR


def test_tied_weights_may_take_half_of_what_is_free() -> None:
    assert chosen(activation_nbytes=None, tied_nbytes=6 * GIB).schedule == LAYER_MAJOR
    # Where the activations are known, these gradients are among them.
    assert chosen(tied_nbytes=7 * GIB).schedule == LAYER_MAJOR


def test_all_activations_that_fit_are_kept() -> None:
    assert chosen(checkpointed=False).schedule == LAYER_MAJOR


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 64),
    st.integers(0, 80),
    st.booleans(),
    st.booleans(),
    *(st.none() | st.integers(0, 1 << 40) for _ in range(2)),
)
def test_a_wish_is_granted_where_the_model_allows_it(
    asked: str,
    micro_batches: int,
    blocks: int,
    moves: bool,
    checkpointed: bool,
    activation_nbytes: int | None,
    free_nbytes: int | None,
) -> None:
    found = choose_schedule(
        asked=asked,
        micro_batches=micro_batches,
        blocks=blocks,
        moves=moves,
        checkpointed=checkpointed,
        activation_nbytes=activation_nbytes,
        free_nbytes=free_nbytes,
    )
    possible = micro_batches > 1 and blocks > 1
    if asked != "auto":
        assert found.schedule == (asked if possible else MICRO_BATCH_MAJOR)
    assert found.schedule == MICRO_BATCH_MAJOR or (possible and (moves or asked == LAYER_MAJOR))
    assert found.reason and not found.reason.endswith(".") and "\n" not in found.reason
