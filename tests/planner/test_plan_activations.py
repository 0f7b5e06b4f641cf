"""What activations take of memory and time, where they wait, and the longest sequence."""

from __future__ import annotations

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
from offload.layout.peak_memory import CHUNK_TOKENS
from offload.losses import chunked
from offload.planner import memory, output, reach, recommend, request
from offload.planner.activations import (
    Load,
    Need,
    Room,
    Wish,
    auto_tile,
    fits,
    largest_batch,
    longest_sequence,
    need,
    placed,
    room_of,
    wish_of,
)
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, Use, from_count
from offload.planner.recommend import advise
from offload.sizes import GIB
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


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 40, 2048)


@pytest.fixture(scope="module")
def shallow() -> Shape:
    """Returns 8 blocks: a step of them is simulated in a fifth of the time."""
    return from_count(26 * 10**8, 8, 2048)


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
    in_flight=st.integers(1, 4),
)


@settings(max_examples=examples(200), deadline=None)
@given(loads, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 3))
def test_more_tokens_never_need_less(load: Load, sequence: int, more: int, sequences: int) -> None:
    of = small()
    less = need(of.at(sequence), load)
    longer = need(of.at(sequence + more), load._replace(batch=load.batch + sequences))
    assert all(small_ <= large for small_, large in zip(less, longer, strict=True))


def test_no_recomputation_is_advised_where_it_is_faster_and_fits(shallow: Shape) -> None:
    on = card(gpu_memory=1 << 40, matmul=1e12)
    planned = recommend.plan(shallow, on, Load(1), config("device"))
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


def test_room_for_inputs_that_nobody_has_named_costs_no_states() -> None:
    """8B of 8 x 4 x 2048 tokens in RAM that holds its states: a step computes, as with the exact room for inputs."""
    on = described("RTX 4090", 128 * GIB, [parse_drive("2GB/s,2GB/s")])
    load, of = Load(4, 8, chunked_loss=True), from_count(8 * 10**9, 32, 2048)
    content = memory.settings("cpu", "cpu", activations="auto", host_memory=106 * GIB, durability="none")
    content["data_types"] = {"grad_accum_dtype": "bf16"}
    planned = recommend.plan(of, on, load, content)
    content["offload"]["activation_memory"] = max(planned.needed.host, 4096)
    exact = recommend.plan(of, on, load, content)
    assert planned.timing.seconds < 1.05 * exact.timing.seconds < 1.1 * planned.timing.compute_seconds


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_slow_link_takes_the_seconds_of_its_bytes(shape: Shape, tier: str) -> None:
    slow = card(matmul=1e18, elementwise=1e18, upload=1e9, download=1e9, handed_seconds=0.0)
    planned = recommend.plan(shape.at(8192), slow, Load(1, chunked_loss=True), config(tier))
    nbytes = 39 * 2 * 8192 * 5120
    # Each byte goes down in the forward and up in the backward, after which nothing of the step is left to hide it.
    assert planned.timing.seconds >= 2 * nbytes / 1e9
    assert planned.timing.busy["PCIe"] >= nbytes / 1e9


def test_inputs_on_drives_are_written_and_read_once_a_micro_batch(shallow: Shape) -> None:
    nbytes = 7 * 2 * 2048 * 4864
    for accumulation in (1, 3):
        planned = recommend.plan(shallow, card(), Load(1, accumulation, chunked_loss=True), config("nvme"))
        moved = planned.timing.moved
        assert moved.inputs_written == moved.inputs_read == accumulation * nbytes
        without = recommend.plan(shallow, card(), Load(1, accumulation, chunked_loss=True), config("device")).timing
        assert moved.written == without.moved.written + accumulation * nbytes, "they wear the drive"
        assert planned.timing.seconds >= without.seconds


def test_auto_takes_the_device_then_host_memory_then_disk() -> None:
    of, load = small(), Load(1, chunked_loss=True)
    least = need(of, Load(1, recompute=True, chunked_loss=True, on_host=3)).device

    def tiers(device: int, host: int, drives: bool = True) -> tuple[int, int]:
        placement = placed(of, load, AUTO, Need(device, host, 1 << 50), drives)
        return placement.on_disk, placement.on_host

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
        ({"activations": "cpu", "activation_memory": "16GiB", "tile_mlp": False}, Wish("cpu")),
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


@pytest.mark.sample(3)
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


def test_a_way_by_which_nothing_fits_is_a_line_and_no_row(shape: Shape) -> None:
    planned = recommend.plan(shape, card(), Load(1, chunked_loss=True), config("device"))
    kept = reach.Reach(reach.Way("all kept", None), 0, 0, 0, None)
    again = reach.Reach(reach.Way("on the device", "device"), 5, 9000, 0, planned.timing.seconds)
    assert output.reach_table(planned, [kept, again]) == [("on the device", "5", "9,000", "none", "1.00 x")]
    assert output.without_room([kept, again]) == ["no sequence fits: all kept"]
    assert output.without_room([again]) == []


def test_a_machine_of_one_memory_has_no_way_by_host_memory() -> None:
    unified = replace(described("GB10", 128 * GIB), drives=())
    assert [way.tier for way in reach.ways(unified)] == [None, "device", "auto"]
    cpu = card(gpu_memory=0)
    assert [way.tier for way in reach.ways(cpu)] == [None, "device", "nvme", "auto"]
