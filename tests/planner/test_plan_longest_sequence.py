"""A plan says how long a sequence, and how large a micro-batch, each way to keep activations reaches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from offload.errors import BudgetError
from offload.planner import memory, output, reach, recommend
from offload.planner.activations import Load, Room, Wish, fits, largest_batch, longest_sequence, room_of
from offload.planner.hardware import described
from offload.planner.model_shape import Shape, from_count, from_name
from offload.sizes import GIB
from tests import ROOT
from tests.planner.activation_plans import AUTO, CPU, DEVICE, KEPT, NVME, card, config, llama


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 40, 2048)


@pytest.mark.sample(5)
@pytest.mark.parametrize("wish", [KEPT, DEVICE, CPU, NVME, AUTO, Wish("auto", tiles=None)])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_the_longest_sequence_is_the_last_that_fits(shape: Shape, wish: Wish, in_chunks: bool) -> None:
    load = Load(1, chunked_loss=in_chunks)
    room = Room(20 * GIB, 30 * GIB, 100 * GIB)
    longest = longest_sequence(shape, load, wish, room)
    assert longest > 0
    assert fits(shape.at(longest), load, wish, room) and not fits(shape.at(longest + 1), load, wish, room)
    batch = largest_batch(shape.at(256), load, wish, room)
    for sequences, has_room in ((batch, True), (batch + 1, False)):
        assert fits(shape.at(256), load._replace(batch=sequences), wish, room) is has_room


def test_each_way_reaches_further_than_the_one_before(shape: Shape) -> None:
    load, room = Load(1, chunked_loss=True), Room(20 * GIB, 1 << 50, 1 << 50)
    ladder = (KEPT, DEVICE, CPU, Wish("cpu", tiles=None))
    lengths = [longest_sequence(shape, load, wish, room) for wish in ladder]
    assert all(after > 1.2 * before for before, after in itertools.pairwise(lengths)), lengths
    # What the first and the second block keep: everything, or their input alone.
    assert lengths[1] > 5 * lengths[0]


LONGEST_8B = {"device": 65, "device, loss in chunks": 300, "cpu, loss in chunks": 650, "cpu, in chunks, tiles": 1200}
"""Thousands of tokens that ALST's recipes reach on one H200 for Llama-3.1-8B: ArcticTraining,
projects/sequence-parallelism/run-h200-sp1-llama-8b-*.yml."""


def test_the_longest_sequences_are_near_those_that_others_measured(tmp_path: Path) -> None:
    """All weights and states in RAM. Their modules are Liger's, whose norms and MLPs save less than those of a plan."""
    name = llama(
        tmp_path, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    of, on = from_name(name, 4096), described("H200", 2000 * GIB)
    content = memory.settings("cpu", "cpu", durability="none")
    room = room_of(on, recommend.settled(of, on, Load(1), content), KEPT, of, Load(1))
    page = (ROOT / "docs" / "concepts" / "cost-model.md").read_text(encoding="utf-8")
    ways = ((DEVICE, False), (DEVICE, True), (CPU, True), (Wish("cpu", tiles=None), True))
    for (wish, in_chunks), (words, measured) in zip(ways, LONGEST_8B.items(), strict=True):
        longest = longest_sequence(of, Load(1, chunked_loss=in_chunks), wish, room) / 1000
        assert 0.5 * measured < longest < 1.2 * measured, words
        assert f"| {measured:,}K | {longest:,.0f}K |" in page, f"{words}: {longest:,.0f}K"


def test_the_table_tells_what_fits_and_what_it_costs(shape: Shape) -> None:
    planned = recommend.plan(shape, card(), Load(2, chunked_loss=True), config("device"))
    rows = {row.way.tier: row for row in reach.reach(planned)}
    assert list(rows) == [None, "device", "cpu", "nvme", "auto"]
    assert rows["device"].seconds == planned.timing.seconds
    assert rows[None].seconds is None and rows[None].batch < planned.load.batch
    for tier, row in rows.items():
        if tier is None:
            continue
        content = reach.with_way(planned.content, row.way, card())
        load = planned.load._replace(recompute=False, batch=row.batch)
        recommend.plan(shape, card(), load, content)
        with pytest.raises(BudgetError):
            recommend.plan(shape, card(), load._replace(batch=row.batch + 1), content)
        longest = shape.at(row.sequence_chunked)
        recommend.plan(longest, card(), load._replace(batch=2), content)
        with pytest.raises(BudgetError):
            recommend.plan(shape.at(row.sequence_chunked + 1), card(), load._replace(batch=2), content)


def test_a_way_by_which_nothing_fits_is_a_line_and_no_row(shape: Shape) -> None:
    planned = recommend.plan(shape, card(), Load(1, chunked_loss=True), config("device"))
    kept = reach.Reach(reach.Way("all kept", None), 0, 0, 0, None)
    again = reach.Reach(reach.Way("on the device", "device"), 5, 9000, 0, planned.timing.seconds)
    assert output.reach_table(planned, [kept, again]) == [("on the device", "5", "9,000", "none", "1.00 x")]
    assert output.without_room([kept, again]) == ["no sequence fits: all kept"]
    assert output.without_room([again]) == []


def test_files_for_inputs_alone_make_no_step_durable() -> None:
    content = reach.with_way(memory.settings("cpu", "cpu"), reach.Way("", "nvme"), card())
    assert content["offload"]["nvme_path"] and content["offload"]["durability"] == "none"
    same = memory.settings("cpu", "cpu", activations="nvme")["offload"]
    assert same["nvme_path"] and same["durability"] == "none"
    durable = config()
    assert reach.with_way(durable, reach.Way("", "nvme"), card())["offload"]["durability"] == "auto"


@pytest.mark.slow
def test_the_longest_sequence_of_a_machine_is_one_that_plans_accept(shape: Shape) -> None:
    on, contents = card(), [memory.settings(*tiers) for tiers in recommend.PLACEMENTS]
    rows = reach.search(shape, on, Load(1), contents)
    lengths = [row.sequence_chunked for row in rows]
    assert lengths[0] < lengths[1] < lengths[2] <= max(lengths[3:])
    for row in rows:
        assert row.planned is not None
        assert row.planned.shape.sequence >= 0.98 * max(row.sequence, row.sequence_chunked)
        assert row.planned.load.chunked_loss is (row.sequence_chunked > row.sequence)
    plain = reach.search(shape, on, Load(1), contents, False)
    assert all(row.planned is not None and not row.planned.load.chunked_loss for row in plain)


def test_a_machine_of_one_memory_has_no_way_by_host_memory() -> None:
    unified = replace(described("GB10", 128 * GIB), drives=())
    assert [way.tier for way in reach.ways(unified)] == [None, "device", "auto"]
    cpu = card(gpu_memory=0)
    assert [way.tier for way in reach.ways(cpu)] == [None, "device", "nvme", "auto"]
