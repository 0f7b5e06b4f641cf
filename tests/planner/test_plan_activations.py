"""What activations take of memory and time, where they wait, and the longest sequence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.config import load_config
from offload.errors import BudgetError, ConfigError
from offload.layout.flat_layout import lay_out
from offload.losses import chunked
from offload.planner import activations, memory, output, reach, recommend, request, step_time
from offload.planner.activations import (
    CHUNK_TOKENS,
    Load,
    Need,
    Room,
    Wish,
    auto_tile,
    fits,
    largest_batch,
    longest_sequence,
    moving,
    need,
    placed,
    room_of,
    wish_of,
    within,
)
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, Use, from_count, from_name
from offload.planner.recommend import advise
from offload.planner.simulation.simulate import Input
from offload.sizes import GIB
from tests import ROOT
from tests.support.sampling import examples

KEPT, DEVICE, CPU, NVME, AUTO = (Wish(tier) for tier in (None, "device", "cpu", "nvme", "auto"))
TOKENS, HIDDEN, WORDS = 4096, 1024, 30000
INPUT = 2 * TOKENS * HIDDEN
BLOCKS = 4
MACHINE = ("--gpu", "24GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
# Blocks of the size of 13B's, few enough to simulate a step at once.
COUNT = ("--parameters", "2.6B", "--layers", "8", "--seq-len", "2048")


def small() -> Shape:
    """Returns a decoder whose blocks save 20 inputs, 12 of them in the MLP, in round numbers."""
    block = Use(
        0, 1e9, 1e6, 20 * INPUT, INPUT, largest=2 * INPUT, mlp_flops=2.0 * TOKENS * 8 * HIDDEN**2,
        mlp_saved=12 * INPUT, mlp_largest=3 * INPUT,
    )  # fmt: skip
    logits = 4 * TOKENS * WORDS
    uses = (
        Use(0, 0.0, 1e6, 0, 8 * TOKENS, lookup=True),
        *(block._replace(unit=1 + index) for index in range(BLOCKS)),
        Use(BLOCKS + 1, 0.0, 1e6, 3 * INPUT, INPUT, largest=2 * INPUT),
        Use(BLOCKS + 2, 1e9, 1e6, INPUT + logits, INPUT, largest=logits),
    )
    names = ["embedding", *(f"layers.{index}" for index in range(BLOCKS)), "norm", "head"]
    sizes = [WORDS * HIDDEN, *[12 * HIDDEN**2] * BLOCKS, HIDDEN, WORDS * HIDDEN]
    layouts = tuple(
        lay_out(name, [(f"{name}.weight", nn.Parameter(torch.empty(size, device="meta")))], 1)
        for name, size in zip(names, sizes, strict=True)
    )
    return Shape("small", layouts, uses, logits, TOKENS)


def card(**changes: Any) -> Hardware:
    return replace(described("RTX 4090", 128 * GIB, [parse_drive("7GB/s,5GB/s,4TB")]), **changes)


def config(tier: str | None = None, tile: int | str | None = None, **options: Any) -> dict[str, Any]:
    return memory.settings("nvme", "nvme", activations=tier, tile_mlp=tile, **options)


def llama(folder: Path, **changes: int) -> str:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_hidden_layers": 3}
    text = transformers.LlamaConfig(**sizes | {"vocab_size": 512, "max_position_embeddings": 8192} | changes)
    text.save_pretrained(folder)
    return str(folder)


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
    assert moving(small(), load) == [Input(INPUT)] * 3 + [Input()]
    both = moving(small(), Load(1, recompute=True, on_disk=1, on_host=2))
    assert both == [Input(INPUT, True), *[Input(INPUT)] * 2, Input()], "the oldest is needed last"


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


def test_auto_takes_the_device_then_host_memory_then_disk() -> None:
    of, load = small(), Load(1, chunked_loss=True)
    least = need(of, Load(1, recompute=True, chunked_loss=True, on_host=3)).device

    def tiers(device: int, host: int, drives: bool = True) -> tuple[int, int]:
        got = placed(of, load, AUTO, Need(device, host, 1 << 50), drives)
        return got.on_disk, got.on_host

    # Two of the three that leave are on their way at the worst moment, so only the third frees device memory.
    assert need(of, Load(1, recompute=True, chunked_loss=True)).device == least + INPUT
    assert tiers(least + INPUT, 100 * INPUT) == (0, 0)
    assert tiers(least, 100 * INPUT) == (0, 3)
    assert tiers(least, 3 * INPUT, drives=False) == (0, 3)
    assert tiers(least, 2 * INPUT) == (3, 0), "host memory holds buffers alone"
    assert tiers(0, 0) == (3, 0) and tiers(0, 0, drives=False) == (0, 3)
    few = placed(of, load, CPU, Need(1 << 50, 6 * INPUT), True)
    assert (few.on_disk, few.on_host) == (0, 3), "cpu takes host memory even where the device has room"
    none = placed(of, load, CPU, Need(1 << 50, 0), True)
    assert (none.on_disk, none.on_host) == (3, 0), "and goes on to files"


def test_auto_leaves_a_quarter_of_the_device_to_all_but_inputs(shape: Shape) -> None:
    bounded = placed(small(), Load(1), AUTO, Need(1 << 50, 1 << 50), True, most_inputs=2 * INPUT)
    assert bounded.on_host == BLOCKS - 2 and bounded.on_disk == 0
    deep = from_count(13 * 10**9, 400, 2048)
    size = activations.input_nbytes(deep, Load(1), deep.blocks[0])
    room = Room(500 * size, 1 << 50, 0)
    load = within(deep, Load(1, chunked_loss=True), AUTO, room)
    assert 400 - load.on_host == 375, "three quarters, although there is room for all"
    assert need(deep, load._replace(on_host=0)).device < room.device


def test_one_memory_has_room_for_an_input_once(shape: Shape) -> None:
    """Where the CPU computes, inputs in host memory are inputs on the device."""
    alone, shared = (Room(20 * GIB, 20 * GIB, 0, one) for one in (False, True))
    load = Load(1, chunked_loss=True)
    assert longest_sequence(shape, load, CPU, shared) < longest_sequence(shape, load, CPU, alone)
    at = shape.at(longest_sequence(shape, load, AUTO, shared))
    assert within(at, load, AUTO, shared).on_host == 0


def test_the_budget_of_host_memory_bounds_inputs(shape: Shape) -> None:
    on, long = replace(card(ram=512 * GIB), drives=()), shape.at(30_000)
    content = memory.settings("cpu", "cpu", activations="cpu")
    content["offload"]["activation_memory"] = "10GiB"
    settled = recommend.settled(shape, on, Load(1), content)
    assert room_of(on, settled, wish_of(settled.config), long, Load(1)).host == 10 * GIB
    fitting = recommend.plan(shape.at(12_000), on, Load(1, chunked_loss=True), content)
    assert fitting.needed.host <= 10 * GIB and fitting.load.on_host == 39
    with pytest.raises(BudgetError, match="raise activation_memory"):
        recommend.plan(long, on, Load(1, chunked_loss=True), content)
    # With a folder the oldest go on to files.
    on_drives = {**content, "offload": content["offload"] | {"nvme_path": "/mnt/nvme"}}
    overflowing = recommend.plan(long, card(ram=512 * GIB), Load(1, chunked_loss=True), on_drives)
    assert overflowing.load.on_disk + overflowing.load.on_host == 39 and overflowing.load.on_disk > 0
    assert overflowing.needed.host <= 10 * GIB


def test_disk_has_room_for_swap_files_first(shape: Shape) -> None:
    tight = described("RTX 4090", 128 * GIB, [parse_drive("7GB/s,5GB/s,320GB")])
    settled = recommend.settled(shape, tight, Load(1), config("nvme"))
    left = room_of(tight, settled, NVME, shape, Load(1)).disk
    assert left == 320 * 10**9 - settled.stored - settled.spilled > 0
    with pytest.raises(BudgetError, match="beside the swap files"):
        recommend.plan(shape.at(40_000), tight, Load(1, chunked_loss=True), config("nvme"))


def test_files_of_inputs_need_a_folder(shape: Shape) -> None:
    content = memory.settings("cpu", "cpu")
    content["offload"]["activations"] = "nvme"
    with pytest.raises(ConfigError, match="needs a drive and a folder"):
        recommend.plan(shape, card(ram=512 * GIB), Load(1), content)


@pytest.mark.parametrize(
    ("block", "wish"),
    [
        ({}, KEPT),
        ({"activations": "auto", "tile_mlp": "auto"}, Wish("auto", tiles=None)),
        ({"activations": "device", "tile_mlp": 4}, Wish("device", tiles=4)),
        ({"activations": "cpu", "activation_memory": "16GiB", "tile_mlp": False}, Wish("cpu", 16 * GIB)),
    ],
)
def test_the_configs_keys_are_read(block: dict[str, Any], wish: Wish) -> None:
    content = {"offload": block}
    assert wish_of(load_config(content)) == wish


def test_deepspeeds_keys_are_read() -> None:
    for block, wish in (
        ({"cpu_checkpointing": True}, CPU),
        ({"number_checkpoints": 4}, DEVICE._replace(first=4)),
        ({"contiguous_memory_optimization": True}, DEVICE),
        ({"cpu_checkpointing": False}, KEPT),
    ):
        assert wish_of(load_config({"activation_checkpointing": block})) == wish


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
