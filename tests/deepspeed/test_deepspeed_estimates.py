"""DeepSpeed's four estimators exist by its names, with the numbers of a run of this library."""

from __future__ import annotations

import torch
from torch import nn

import offload
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner import deepspeed_estimates as estimates


def model(layers: int = 8, width: int = 512) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def rows(text: str) -> dict[str, list[str]]:
    return {
        line.split("| offload_")[1].strip(): line.split("|")[:3] for line in text.splitlines() if "| offload_" in line
    }


def test_live_and_cold_agree(capsys) -> None:
    net = model()
    count = sum(p.numel() for p in net.parameters())
    offload.estimate_zero3_model_states_mem_needs_all_live(net)
    live = rows(capsys.readouterr().out)
    offload.estimate_zero3_model_states_mem_needs_all_cold(count, count // 8)
    assert live == rows(capsys.readouterr().out) and len(live) == 5
    assert next(net.parameters()).is_meta, "the model was only looked at"


def test_zero2_has_its_weights_on_the_gpu(capsys) -> None:
    offload.estimate_zero2_model_states_mem_needs_all_live(model(), num_gpus_per_node=2)
    found = rows(capsys.readouterr().out)
    assert found and all(name.startswith("param=none") for name in found)
    offload.estimate_zero2_model_states_mem_needs_all_cold(10**9)
    assert rows(capsys.readouterr().out).keys() == found.keys()


def test_estimates_count_what_a_run_holds() -> None:
    net = model()
    count = sum(p.numel() for p in net.parameters())
    found = {each[:2]: each for each in estimates.estimates(layouts_of(net, find_units(net)), 1, 1, estimates._ZERO_3)}
    padded = sum(layout.numel for layout in layouts_of(net, find_units(net)))
    assert count <= padded < 1.01 * count
    assert found["nvme", "nvme"].disk == 24 * padded and found["none", "none"].disk == 0
    tiles_and_staging = found["cpu", "cpu"].host - 14 * padded
    assert 0 < tiles_and_staging < 3 * (padded * 12), "12 of the states, 2 of the gradient, and what works on them"
    assert found["none", "none"].device >= 12 * padded
    assert found["nvme", "nvme"].device == 3 * 2 * max(each.numel for each in layouts_of(net, find_units(net)))


def test_more_ranks_hold_less_each() -> None:
    net = model()
    units = find_units(net)
    one = estimates.estimates(layouts_of(net, units, 1), 1, 1, [("none", "none")])[0]
    four = estimates.estimates(layouts_of(net, units, 4), 4, 1, [("none", "none")])[0]
    assert four.device < 0.6 * one.device
