"""The longest sequence and the largest micro-batch that fit on a machine, by the tier of the blocks' inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from offload.config import load_config
from offload.errors import BudgetError, ConfigError
from offload.layout.placement import usable_host
from offload.planner.activations import Load, largest_batch, longest_sequence, room_of, wish_of
from offload.planner.hardware import Hardware
from offload.planner.memory import PATH, Memory
from offload.planner.model_shape import Shape
from offload.planner.recommend import Planned, plan, plan_if_it_fits, settled
from offload.sizes import PAGE, parse_size

_NEAR = 0.98
"""Fraction of the longest sequence from which a faster placement is preferred."""


class Way(NamedTuple):
    """A way to keep activations."""

    words: str
    tier: str | None
    """Tier of the blocks' inputs; None if blocks keep all activations."""
    tiled: bool = False
    """True if MLPs are computed in tiles."""


class Reach(NamedTuple):
    """A way, and its longest sequence and largest micro-batch with the tiers of a plan."""

    way: Way
    sequence: int
    """Tokens of the longest sequence at the plan's micro-batch, with all logits in memory; 0 if none fits."""
    sequence_chunked: int
    """The same with the loss in chunks."""
    batch: int
    """Sequences of the largest micro-batch at the plan's sequence and loss."""
    seconds: float | None
    """Seconds of the plan's step; None if it does not fit."""


class Longest(NamedTuple):
    """A way, and its longest sequence with any tiers of weights and states."""

    way: Way
    sequence: int
    """Tokens of the longest sequence with all logits in memory; 0 if none fits."""
    sequence_chunked: int
    """The same with the loss in chunks."""
    planned: Planned | None
    """The plan of the longer of the two sequences; None if no sequence fits."""


def ways(hardware: Hardware) -> Iterator[Way]:
    """Yields the ways to keep activations on a machine, from the fastest to the one with the least device memory."""
    yield Way("all kept", None)
    yield Way("on the device", "device")
    # Where device memory is host memory, a copy there would free nothing.
    if not (hardware.on_cpu or hardware.unified):
        yield Way("in host memory", "cpu")
    if hardware.drives:
        yield Way("on drives", "nvme")
    yield Way("anywhere, tiled MLPs", "auto", tiled=True)


def with_way(content: Mapping[str, Any], way: Way, hardware: Hardware) -> dict[str, Any]:
    """Returns a config whose keys on activations are replaced by those of a way.

    If the config names no drives, the drives of `hardware` are added.
    """
    changed = copy.deepcopy(dict(content))
    changed.pop("activation_checkpointing", None)
    block = changed.setdefault("offload", {})
    # Attention that is kept takes the room that a way makes.
    block.pop("keep_attention", None)
    for name, value in (("activations", way.tier), ("tile_mlp", "auto" if way.tiled else None)):
        block.pop(name, None)
        if value is not None:
            block[name] = value
    # The bytes for inputs are part of the host budget.
    if way.tier in (None, "device") and (inputs := block.pop("activation_memory", None)) and "host_memory" in block:
        block["host_memory"] = parse_size(block["host_memory"]) - parse_size(inputs)
    if way.tier in ("nvme", "auto") and hardware.drives and not load_config(changed).drives:
        block["nvme_path"] = [drive.name for drive in hardware.drives if drive.name.startswith("/")] or [PATH]
        # With a folder "auto" would mean durable steps, which the config did not have before.
        if block.get("durability", "auto") == "auto":
            block["durability"] = "none"
    return changed


def reach(planned: Planned) -> list[Reach]:
    """Returns the `Reach` of each way with the tiers and budgets of a plan."""
    reaches = []
    load = planned.given._replace(recompute=False)
    for way in ways(planned.hardware):
        content = with_way(planned.content, way, planned.hardware)
        memory = settled(planned.shape, planned.hardware, load, content)
        lengths = _lengths(planned.shape, planned.hardware, load, content, memory)
        wish = wish_of(memory.config)
        batch = largest_batch(planned.shape, load, wish, room_of(planned.hardware, memory, wish, planned.shape, load))
        step = plan_if_it_fits(planned.shape, planned.hardware, load, content)
        reaches.append(Reach(way, *lengths, batch, None if step is None else step.timing.seconds))
    return reaches


def search(
    shape: Shape, hardware: Hardware, load: Load, contents: Sequence[Mapping[str, Any]], chunked: bool | None = None
) -> list[Longest]:
    """Returns for each way the longest sequence with any of `contents`, configs in the order of their speed.

    With `chunked` None, the loss is the one with the longer sequence. If no config can be placed on the machine, the
    error comes from the last one.
    """
    placed, error = [], None
    for content in contents:
        try:
            placed += list(_budgets(shape, hardware, load, content))
        except (BudgetError, ConfigError) as refusal:
            error = refusal
    if not placed:
        assert error is not None
        raise error
    return [_longest(shape, hardware, load, placed, way, chunked) for way in ways(hardware)]


def _budgets(shape: Shape, hardware: Hardware, load: Load, content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a config, then the same with the least host memory for states, which leaves the most to inputs."""
    memory = settled(shape, hardware, load, content)
    yield content
    if memory.config.offload.host_memory is None and memory.placement.on_disk:
        left = hardware.ram - memory.least_host
        rest = usable_host(left, own_device_memory=memory.request.machine.own_device_memory) // PAGE * PAGE
        both = {"host_memory": memory.least_host + rest, "activation_memory": rest}
        yield {**content, "offload": {**content.get("offload", {}), **both}}


def _longest(
    shape: Shape, hardware: Hardware, load: Load, placed: Sequence[Mapping[str, Any]], way: Way, chunked: bool | None
) -> Longest:
    contents = [with_way(content, way, hardware) for content in placed]
    lengths = [
        _lengths(shape, hardware, load, content, settled(shape, hardware, load, content)) for content in contents
    ]
    plain, in_chunks = (max(pair[index] for pair in lengths) for index in (0, 1))
    with_chunks = in_chunks > plain if chunked is None else chunked
    most = in_chunks if with_chunks else plain
    if not most:
        return Longest(way, plain, in_chunks, None)
    # The configs are in the order of their speed. A faster one with a nearly as long sequence is preferred.
    position = next(index for index, pair in enumerate(lengths) if pair[with_chunks] >= _NEAR * most)
    at = shape.at(lengths[position][with_chunks])
    planned = plan(at, hardware, load._replace(chunked_loss=with_chunks), contents[position])
    return Longest(way, plain, in_chunks, planned)


def _lengths(
    shape: Shape, hardware: Hardware, load: Load, content: Mapping[str, Any], memory: Memory
) -> tuple[int, int]:
    wish, whole = wish_of(load_config(content)), load._replace(recompute=False)
    plain, chunked = (
        longest_sequence(shape, step, wish, room_of(hardware, memory, wish, shape, step))
        for step in (whole._replace(chunked_loss=False), whole._replace(chunked_loss=True))
    )
    return plain, chunked
