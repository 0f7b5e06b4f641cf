"""A plan for a machine whose CPU computes fits if its peak does: both arenas, activations and torch's copies."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.errors import BudgetError
from offload.planner import memory, recommend
from offload.planner.activations import Load, head_copy
from offload.planner.hardware import described, parse_drive
from offload.planner.model_shape import from_name
from offload.sizes import MIB


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("name", ["gpt2-small", "llama-1b"])
def test_the_peak_of_a_plan_that_fits_is_within_the_ram(name: str, in_chunks: bool) -> None:
    on = replace(described("RTX 4090", 0, [parse_drive("7GB/s,5GB/s,4TB")]), gpu_memory=0)
    shape, load = from_name(name, 256, torch.bfloat16), Load(1, chunked_loss=in_chunks)
    content = memory.settings("nvme", "nvme")
    content["offload"]["device"] = "cpu"
    fitting = []
    for ram in range(512 * MIB, 12288 * MIB, 512 * MIB):
        machine = replace(on, ram=ram)
        try:
            planned = recommend.plan(shape, machine, load, content)
        except BudgetError:
            continue
        fitting.append(ram)
        assert planned.host_peak <= ram
    assert fitting and fitting[0] > 512 * MIB, "the sizes are on both sides of the least that fits"


def test_a_copy_of_the_head_is_gone_before_its_gradients_are_scaled() -> None:
    """So the loss in chunks takes the larger of both, and all logits at once take the copy too."""
    shape = from_name("llama-1b", 256, torch.bfloat16)
    whole = 2 * shape.layouts[shape.uses[-1].unit].numel
    assert head_copy(shape, Load(1)) == whole
    # Logits of 256 tokens, in fp32 and bf16, less the piece of a gradient that is scaled in fp32 at a time.
    logits, piece = 6 * 256 * 128256, 4 << 22
    assert head_copy(shape, Load(1, chunked_loss=True)) == logits - piece - 2 * 256 * 2048


@settings(max_examples=4)
@given(sizes=st.tuples(st.integers(9, 16), st.integers(9, 16)), sequence=st.sampled_from([256, 512]))
@example(sizes=(16, 18), sequence=256)
def test_a_plan_that_fits_a_machine_fits_one_with_more_memory(sizes: tuple[int, int], sequence: int) -> None:
    """Default budgets take whole units, so those of 4.5 GiB left less to the activations than those of 4 GiB."""
    less, more = sorted(sizes)
    assert fits(256 * MIB * less, sequence) <= fits(256 * MIB * more, sequence)


@cache
def fits(ram: int, sequence: int) -> bool:
    on = replace(described("RTX 4090", 0, [parse_drive("7GB/s,5GB/s,4TB")]), gpu_memory=0, ram=ram)
    shape, load = from_name("llama-1b", sequence, torch.bfloat16), Load(1, chunked_loss=True)
    try:
        planned = recommend.choose(shape, on, load, recompute=False, paths=("/swap",))
    except BudgetError:
        return False
    assert planned.host_peak <= ram, "the plan's own budgets keep it within the RAM"
    return True
