"""A plan gives the inputs of blocks the tier that was asked for, within the room that each tier of the machine has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offload.config import load_config
from offload.errors import BudgetError, ConfigError
from offload.planner import activations, memory, recommend
from offload.planner.activations import Load, Need, Room, Wish, longest_sequence, need, placed, room_of, wish_of, within
from offload.planner.hardware import described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.sizes import GIB
from tests.planner.activation_plans import AUTO, BLOCKS, CPU, DEVICE, INPUT, KEPT, NVME, card, config, small


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 40, 2048)


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
