"""The GPU benchmark takes as many layers and tokens as fit in device memory, RAM and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload.bench.gpu import __main__ as command
from offload.bench.gpu.parts import PLANNED, Part
from offload.bench.gpu.training import Fitted, StepSize, fit, largest_step
from offload.planner.memory import Room
from offload.sizes import GIB, MIB
from tests.bench.gpu_bench import small


@pytest.mark.slow
def test_a_step_has_as_many_tokens_as_fit_beside_the_model() -> None:
    """8 x 4096 where there is room: on a fast GPU smaller steps wait for the host and say nothing of copies."""
    found = [largest_step("llama-1b", memory * GIB) for memory in (140, 80, 48, 24, 1)]
    assert found[0] == StepSize(8, 4096) and found[1] == StepSize(8, 4096, recompute=True)
    tokens = [size.batch_size * size.seq_len for size in found]
    assert tokens == sorted(tokens, reverse=True) and tokens[3] > tokens[4] > 0
    assert all(size.recompute for size in found[1:])


def test_given_sizes_are_taken_as_they_are() -> None:
    given = command._parser().parse_args(["--batch-size", "2", "--device", "cpu"])
    assert command.step_size(given, GIB) == StepSize(2, 512)
    given = command._parser().parse_args(["--seq-len", "64", "--recompute"])
    assert command.step_size(given, GIB) == StepSize(8, 64, recompute=True), "without a look at the GPU"


GPU = 1 << 30
"""Bytes of the device, which has room enough."""


def placement_of(fitted: Fitted) -> tuple[str, str]:
    zero = fitted.settings["zero_optimization"]
    return zero["offload_param"]["device"], zero["offload_optimizer"]["device"]


def test_all_layers_are_in_ram_where_they_fit(tmp_path: Path) -> None:
    fitted = fit(small(tmp_path), Room(GIB, GPU, GIB))
    assert fitted.layers == 4 and fitted.words.startswith("all 4 layers of gpt2-tiny") and "0 B of disk" in fitted.words
    assert placement_of(fitted) == ("cpu", "cpu")


def test_what_ram_has_no_room_for_goes_to_disk(tmp_path: Path) -> None:
    fitted = fit(small(tmp_path), Room(72 * MIB, GPU, GIB))
    assert fitted.layers == 4 and "nvme" in placement_of(fitted)
    assert fitted.settings["offload"]["host_memory"] == 72 * MIB


def test_where_both_are_too_small_the_model_has_fewer_layers_and_a_note_says_so(tmp_path: Path) -> None:
    disks = (GIB, 28 * MIB, 0)
    found = [fit(small(tmp_path), Room(81 * MIB, GPU, disk)) for disk in disks]
    assert found[0].layers == 4 > found[1].layers > found[2].layers > 0
    assert f"{found[1].layers} of 4 layers" in found[1].words
    none = fit(small(tmp_path), Room(MIB, GPU, 0))
    assert none.layers == 0 and "not one layer of gpt2-tiny fits" in none.words


def test_a_planned_part_trains_what_fits_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, seen = Part("13B", 1, PLANNED), list[dict[str, Any]]()
    command.run_here(part, small(tmp_path), seen.append)
    assert seen[-1]["layers"] == 4 and "all 4 layers" in seen[-1]["fitted"]
    monkeypatch.setattr(command, "room_of", lambda work: Room(1 << 16, 0, 0))
    command.run_here(part, small(tmp_path), seen.append)
    assert seen[-1].keys() == {"skipped"}
