"""A plan says where activations are, what they take in each tier, and how long a sequence each way reaches."""

from __future__ import annotations

import itertools
import json
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
from offload.planner import config_file, memory, reach
from offload.planner import recommend as choice
from offload.planner.activations import formulas
from offload.planner.activations.formulas import CHUNK_TOKENS, Moving, Need, moving, need
from offload.planner.activations.kept import Wish, auto_tile, placed, wish_of
from offload.planner.activations.load import Load
from offload.planner.activations.room import Room, fits, largest_batch, longest_sequence, room_of, within
from offload.planner.advice import advise
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, Use, from_count, from_name
from offload.planner.report import reach as report
from offload.planner.step_time import passes, step_order
from offload.sizes import GIB
from tests.support.plan_command import found, run
from tests.support.sampling import examples

KEPT, DEVICE, CPU, NVME, AUTO = (Wish(tier) for tier in (None, "device", "cpu", "nvme", "auto"))
TOKENS, HIDDEN, WORDS = 4096, 1024, 30000
INPUT = 2 * TOKENS * HIDDEN
BLOCKS = 4
MACHINE = ("--gpu", "24GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
# Blocks of the size of 13B's, few enough to simulate a step at once.
COUNT = ("--parameters", "2.6B", "--layers", "8", "--seq-len", "2048")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 40, 2048)


def card(**changes: Any) -> Hardware:
    return replace(described("RTX 4090", 128 * GIB, [parse_drive("7GB/s,5GB/s,4TB")]), **changes)


def config(tier: str | None = None, tile: int | str | None = None, **options: Any) -> dict[str, Any]:
    return memory.settings("nvme", "nvme", activations=tier, tile_mlp=tile, **options)


# -- bytes --------------------------------------------------------------------------------------------

LOGITS = 4 * TOKENS * WORDS
PLAIN_HEAD = 3 * INPUT + INPUT + LOGITS + 2 * LOGITS
"""Saved by norm and head, and the logits with their gradient."""


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
    assert need(small(), load) == Need((1 + formulas.IN_FLIGHT) * INPUT + PLAIN_HEAD, 3 * INPUT)
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
    one = formulas.input_nbytes(of, load, of.blocks[0])
    # No more than those on their way: so many may be counted beside inputs that stay.
    assert needed.device <= stay.device + formulas.IN_FLIGHT * one
    assert needed.host + needed.disk >= sum(each.nbytes for each in moving(of, load))


# -- tiers for a machine ------------------------------------------------------------------------------


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


def test_auto_leaves_a_quarter_of_the_device_to_all_but_inputs(shape: Shape) -> None:
    bounded = placed(small(), Load(1), AUTO, Need(1 << 50, 1 << 50), True, most_inputs=2 * INPUT)
    assert bounded.on_host == BLOCKS - 2 and bounded.on_disk == 0
    deep = from_count(13 * 10**9, 400, 2048)
    size = formulas.input_nbytes(deep, Load(1), deep.blocks[0])
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
    settled = choice.settled(shape, on, Load(1), content)
    assert room_of(on, settled, wish_of(settled.config), long, Load(1)).host == 10 * GIB
    fitting = choice.plan(shape.at(12_000), on, Load(1, chunked_loss=True), content)
    assert fitting.needed.host <= 10 * GIB and fitting.load.on_host == 39
    with pytest.raises(BudgetError, match="raise activation_memory"):
        choice.plan(long, on, Load(1, chunked_loss=True), content)
    # With a folder the oldest go on to files.
    on_drives = {**content, "offload": content["offload"] | {"nvme_path": "/mnt/nvme"}}
    overflowing = choice.plan(long, card(ram=512 * GIB), Load(1, chunked_loss=True), on_drives)
    assert overflowing.load.on_disk + overflowing.load.on_host == 39 and overflowing.load.on_disk > 0
    assert overflowing.needed.host <= 10 * GIB


def test_disk_has_room_for_swap_files_first(shape: Shape) -> None:
    tight = described("RTX 4090", 128 * GIB, [parse_drive("7GB/s,5GB/s,320GB")])
    settled = choice.settled(shape, tight, Load(1), config("nvme"))
    left = room_of(tight, settled, NVME, shape, Load(1)).disk
    assert left == 320 * 10**9 - settled.stored - settled.spilled > 0
    with pytest.raises(BudgetError, match="beside the swap files"):
        choice.plan(shape.at(40_000), tight, Load(1, chunked_loss=True), config("nvme"))


def test_files_of_inputs_need_a_folder(shape: Shape) -> None:
    content = memory.settings("cpu", "cpu")
    content["offload"]["activations"] = "nvme"
    with pytest.raises(ConfigError, match="needs a drive and a folder"):
        choice.plan(shape, card(ram=512 * GIB), Load(1), content)


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


# -- seconds ------------------------------------------------------------------------------------------


def test_copies_hide_behind_compute_while_the_link_keeps_up(shape: Shape) -> None:
    long = shape.at(8192)
    fast = card(upload=1e12, download=1e12)
    stays, leaves = (choice.plan(long, fast, Load(1, chunked_loss=True), config(tier)) for tier in ("device", "cpu"))
    assert leaves.load.on_host == 39 and leaves.timing.seconds == pytest.approx(stays.timing.seconds, rel=0.03)
    assert leaves.timing.compute_seconds == stays.timing.compute_seconds


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_slow_link_takes_the_seconds_of_its_bytes(shape: Shape, tier: str) -> None:
    slow = card(matmul=1e18, elementwise=1e18, upload=1e9, download=1e9, handed_seconds=0.0)
    planned = choice.plan(shape.at(8192), slow, Load(1, chunked_loss=True), config(tier))
    nbytes = 39 * 2 * 8192 * 5120
    # Each byte goes down in the forward and up in the backward, after which nothing of the step is left to hide it.
    assert planned.timing.seconds >= 2 * nbytes / 1e9
    assert planned.timing.busy["PCIe"] >= nbytes / 1e9


def test_inputs_on_drives_are_written_and_read_once_a_micro_batch(shape: Shape) -> None:
    nbytes = 39 * 2 * 2048 * 5120
    for accumulation in (1, 3):
        planned = choice.plan(shape, card(), Load(1, accumulation, chunked_loss=True), config("nvme"))
        moved = planned.timing.moved
        assert moved.inputs_written == moved.inputs_read == accumulation * nbytes
        without = choice.plan(shape, card(), Load(1, accumulation, chunked_loss=True), config("device")).timing
        assert moved.written == without.moved.written + accumulation * nbytes, "they wear the drive"
        assert planned.timing.seconds >= without.seconds


def test_a_tiled_mlp_is_computed_once_more(shape: Shape) -> None:
    on, load = card(handed_seconds=0.0), Load(2, recompute=True, tile=1024)
    plain, tiled = (passes.forward(shape, on, each) for each in (load._replace(tile=0), load))
    use = shape.uses[3]
    numel = use.mlp_flops / (2 * shape.sequence)
    sums = 4 * numel * (2 * 4 + 2) / on.elementwise
    assert tiled[3].seconds == plain[3].seconds
    assert tiled[3].backward - plain[3].backward == pytest.approx(2 * use.mlp_flops / on.matmul + sums)
    assert tiled[-1] == plain[-1]


def test_the_loss_in_chunks_adds_sums_of_the_heads_gradient(shape: Shape) -> None:
    on = card(handed_seconds=0.0)
    plain, in_chunks = (passes.forward(shape, on, Load(1, chunked_loss=each)) for each in (False, True))
    sums = 2 * shape.layouts[-1].numel * (2 * 4 + 2) / on.elementwise
    assert in_chunks[-1].backward - plain[-1].backward == pytest.approx(sums)
    assert in_chunks[:-1] == plain[:-1]


def test_the_head_is_not_recomputed(shape: Shape) -> None:
    on = card(handed_seconds=0.0)
    first = passes.forward(shape, on, Load(1))
    plain, again = (step_order.backward(first, [0] * len(shape.layouts), on, each) for each in (False, True))
    assert again[0] == plain[0] and again[1].seconds == pytest.approx(plain[1].seconds + first[-2].seconds)


# -- the shape of a model -----------------------------------------------------------------------------


def test_a_shape_of_another_length_is_that_of_a_count_of_it() -> None:
    counted, scaled = from_count(10**9, 16, 2048), from_count(10**9, 16, 512).at(2048)
    assert counted._replace(uses=()) == scaled._replace(uses=())
    for one, other in zip(counted.uses, scaled.uses, strict=True):
        assert other.choice == one.choice
        assert other[:-1] == pytest.approx(one[:-1])


def llama(folder: Path, **changes: int) -> str:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_hidden_layers": 3}
    text = transformers.LlamaConfig(**sizes | {"vocab_size": 512, "max_position_embeddings": 8192} | changes)
    text.save_pretrained(folder)
    return str(folder)


def test_a_model_shows_its_blocks_its_mlps_and_its_attention(tmp_path: Path) -> None:
    """No matrix of tokens times tokens is counted: bytes grow with the tokens."""
    short, long = (from_name(llama(tmp_path), tokens) for tokens in (512, 2048))
    assert [block.name for block in short.blocks] == [f"model.layers.{index}" for index in range(3)]
    assert short.positions == 8192 and short.itemsize == 2
    for one, four in zip(short.uses[2:], long.uses[2:], strict=True):
        assert four.saved == pytest.approx(4 * one.saved, rel=1e-3)
    layer, tokens = short.uses[2], 512
    assert layer.attention == 4 * tokens * tokens * 256 and long.uses[2].attention == 16 * layer.attention
    assert layer.mlp_flops == 2 * tokens * 3 * 256 * 768
    assert layer.mlp_saved == 2 * tokens * (256 + 4 * 768), "its input, and four tensors of its width"
    assert layer.mlp_largest == 2 * tokens * 768 and layer.largest == 4 * tokens * 256, "of a norm, in fp32"


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
    room = room_of(on, choice.settled(of, on, Load(1), content), KEPT, of, Load(1))
    page = (Path(__file__).parents[1] / "docs" / "concepts" / "cost-model.md").read_text(encoding="utf-8")
    ways = ((DEVICE, False), (DEVICE, True), (CPU, True), (Wish("cpu", tiles=None), True))
    for (wish, in_chunks), (words, measured) in zip(ways, LONGEST_8B.items(), strict=True):
        longest = longest_sequence(of, Load(1, chunked_loss=in_chunks), wish, room) / 1000
        assert 0.5 * measured < longest < 1.2 * measured, words
        assert f"| {measured:,}K | {longest:,.0f}K |" in page, f"{words}: {longest:,.0f}K"


# -- the choice ---------------------------------------------------------------------------------------


def test_a_plan_that_chooses_says_so_in_its_config(shape: Shape) -> None:
    for tokens, tier, recompute in ((1024, None, False), (4096, "device", True), (48_000, "cpu", True)):
        planned = choice.choose(shape.at(tokens), card(), Load(1, chunked_loss=True), None)
        assert planned.content["offload"].get("activations") == tier and planned.load.recompute is recompute
        assert choice.plan(shape.at(tokens), card(), planned.load, planned.content).needed == planned.needed
    theirs = choice.choose(shape.at(4096), card(), Load(1, chunked_loss=True), True)
    assert "activations" not in theirs.content["offload"], "the model recomputes by itself"


def test_no_recomputation_is_advised_where_it_is_faster_and_fits(shape: Shape) -> None:
    on = card(gpu_memory=1 << 40, matmul=1e12)
    planned = choice.plan(shape, on, Load(1), config("device"))
    changes = {change.words: change for change in advise(planned).changes}
    assert changes["no recomputation"].gain > 1.1


def test_the_table_tells_what_fits_and_what_it_costs(shape: Shape) -> None:
    planned = choice.plan(shape, card(), Load(2, chunked_loss=True), config("device"))
    rows = {row.way.tier: row for row in reach.reach(planned)}
    assert list(rows) == [None, "device", "cpu", "nvme", "auto"]
    assert rows["device"].seconds == planned.timing.seconds
    assert rows[None].seconds is None and rows[None].batch < planned.load.batch
    for tier, row in rows.items():
        if tier is None:
            continue
        content = reach.with_way(planned.content, row.way, card())
        load = planned.load._replace(recompute=False, batch=row.batch)
        choice.plan(shape, card(), load, content)
        with pytest.raises(BudgetError):
            choice.plan(shape, card(), load._replace(batch=row.batch + 1), content)
        longest = shape.at(row.sequence_chunked)
        choice.plan(longest, card(), load._replace(batch=2), content)
        with pytest.raises(BudgetError):
            choice.plan(shape.at(row.sequence_chunked + 1), card(), load._replace(batch=2), content)


def test_a_way_by_which_nothing_fits_is_a_line_and_no_row(shape: Shape) -> None:
    planned = choice.plan(shape, card(), Load(1, chunked_loss=True), config("device"))
    kept = reach.Reach(reach.Way("all kept", None), 0, 0, 0, None)
    again = reach.Reach(reach.Way("on the device", "device"), 5, 9000, 0, planned.timing.seconds)
    assert report.reach_table(planned, [kept, again]) == [("on the device", "5", "9,000", "none", "1.00 x")]
    assert report.without_room([kept, again]) == ["no sequence fits: all kept"]
    assert report.without_room([again]) == []


def test_files_for_inputs_alone_make_no_step_durable() -> None:
    content = reach.with_way(memory.settings("cpu", "cpu"), reach.Way("", "nvme"), card())
    assert content["offload"]["nvme_path"] and content["offload"]["durability"] == "none"
    same = memory.settings("cpu", "cpu", activations="nvme")["offload"]
    assert same["nvme_path"] and same["durability"] == "none"
    durable = config()
    assert reach.with_way(durable, reach.Way("", "nvme"), card())["offload"]["durability"] == "auto"


@pytest.mark.slow
def test_the_longest_sequence_of_a_machine_is_one_that_plans_accept(shape: Shape) -> None:
    on, contents = card(), [memory.settings(*tiers) for tiers in choice.PLACEMENTS]
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


# -- the command --------------------------------------------------------------------------------------


def test_the_report_says_where_inputs_are() -> None:
    report = found(*COUNT, *MACHINE, "--activations", "auto", "--chunked-loss", "--batch-size", "24")
    tiers = report["activation_tiers"]
    assert sum(tiers["inputs"].values()) == 8 and tiers["inputs"]["device"] >= 1
    assert tiers["host"] > 24 * 2 * 2048 * 5120 and tiers["device"] == report["activations"]
    assert report["step"]["recompute"] and report["step"]["chunked_loss"] and report["step"]["tile_tokens"] == 24 * 2048
    assert report["config"]["offload"]["activations"] == "auto"
    ways = {row["activations"]: row for row in report["ways"]}
    assert ways["auto"]["batch"] >= 24 > ways["device"]["batch"] and ways["device"]["seconds"] is None
    done = run(*COUNT, *MACHINE, "--activations", "cpu", "--chunked-loss", "--tile-mlp", "16", "--batch-size", "8")
    for words in ("inputs of 8 blocks: 1 on the device, 7 in host memory", "loss in chunks", "tiles of 1024 tokens"):
        assert words in done.stdout, done.stdout
    assert "longest sequence with 8 in a micro-batch" in done.stdout and "does not fit" in done.stdout


def test_a_config_with_activations_is_planned_and_written(tmp_path: Path) -> None:
    file, target = tmp_path / "config.json", tmp_path / "written.json"
    file.write_text(json.dumps(config("cpu", 4)))
    report = found(*COUNT, *MACHINE, "--config", str(file), "--chunked-loss", "--batch-size", "2")
    assert report["activation_tiers"]["inputs"] == {"device": 1, "host": 7, "disk": 0}
    assert report["step"]["tile_tokens"] == 2 * 2048 // 4
    found(*COUNT, *MACHINE, "--activations", "cpu", "--tile-mlp", "8", "--write", str(target))
    written = json.loads(target.read_text())["offload"]
    assert written["activations"] == "cpu" and written["tile_mlp"] == 8
    done = run(*COUNT, *MACHINE, "--config", str(file), "--activations", "cpu")
    assert done.exit_code == 2 and "cannot be given beside --config" in done.output


def test_the_search_prints_lengths_and_what_to_set(tmp_path: Path) -> None:
    rows = found(*COUNT, *MACHINE, "--longest-sequence")["longest"]
    assert [row["sequence_chunked"] > 0 for row in rows] == [True] * 5
    best = max(rows, key=lambda row: row["sequence_chunked"])
    file = tmp_path / "best.json"
    file.write_text(json.dumps(best["config"]))
    length = str(best["sequence_chunked"])
    report = found(*COUNT[:4], *MACHINE, "--config", str(file), "--chunked-loss", "--seq-len", length)
    assert report["activation_tiers"] == best["activation_tiers"]
    done = run(*COUNT, *MACHINE, "--longest-sequence")
    assert f"for {best['sequence_chunked']:,} tokens set" in done.stdout and "chunk_loss_of" in done.stdout
    with_file = found(*COUNT, *MACHINE, "--longest-sequence", "--config", str(file), "--no-chunked-loss")["longest"]
    assert all(not row["chunked_loss"] for row in with_file)


def test_the_search_names_the_positions_of_a_model(tmp_path: Path) -> None:
    done = run("--model", llama(tmp_path), *MACHINE, "--longest-sequence", "--seq-len", "128")
    assert done.exit_code == 0 and "allows 8,192 positions" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--activations", "ram"), "expected --activations of device, cpu, nvme, auto"),
        (("--tile-mlp", "0"), "expected --tile-mlp of auto, off or a number"),
        (("--activations", "cpu", "--no-gradient-checkpointing"), "leave one of them out"),
        (("--longest-sequence", "--measure"), "writes and measures nothing"),
        (("--batch-size", "4000", "--no-chunked-loss"), "--chunked-loss"),
        (("--activations", "device", "--batch-size", "4000"), "--activations cpu"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*COUNT, *MACHINE, *arguments)
    assert done.exit_code == 2 and message in done.output, done.output


def test_a_micro_batch_that_is_too_large_is_told_with_one_that_fits() -> None:
    done = run(*COUNT, *MACHINE, "--activations", "device", "--batch-size", "400")
    batch = int(done.output.partition("--batch-size ")[2].split()[0])
    assert batch > 8 and run(*COUNT, *MACHINE, "--activations", "device", "--batch-size", str(batch)).exit_code == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", ["cpu", "nvme", "auto"])
def test_the_budgets_of_a_plans_config_have_the_planned_room_for_inputs(shape: Shape, tier: str) -> None:
    on, load = card(), Load(4)
    planned = choice.with_host_budget(choice.plan(shape, on, load, config(tier)))
    inputs = need(shape, planned.load).host
    again = choice.plan(shape, on, load, config_file.ready(planned))
    assert bool(inputs) == (tier != "auto")  # there all of them stay on the device
    assert again.memory.placement.inputs_nbytes is not None
    assert again.memory.placement.inputs_nbytes >= inputs
    assert again.load == planned.load
    assert again.memory.placement.classes == planned.memory.placement.classes
