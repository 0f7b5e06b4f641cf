"""Simulated seconds of a step at two machines: a change of the schedule that costs time is seen without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from offload.planner import memory, recommend, step_time
from offload.planner.activations import Load
from offload.planner.hardware import Drive, Hardware, described, parse_drive
from offload.planner.model_shape import from_preset
from offload.sizes import GIB
from offload.states import State, Tier


def h200() -> Hardware:
    """An H200 held to 24 GiB, with the rates that were measured on it, in November 2026.

    Products and other work have rates with which the kernels of 7B take 3.28 s and those of 13B 5.96 s; 3.29 and 5.96
    were measured.
    """
    drive = Drive("vda", 1.77e9, 2.74e9, 2.15e9)
    found = described("H200", round(125.9 * GIB), [drive])
    measured = 1 / 0.8235
    return replace(
        found,
        gpu_memory=24 * GIB,
        ram=round(113.3 * GIB),
        matmul=6.8e14 * measured,
        elementwise=2.5e12 * measured,
        weights=found.weights * measured,
        upload=50e9,
        download=49.6e9,
        memory=195e9,
        optimizer=5.3e9,
        gradient=9.6e9,
    )


def rtx_4090(ram: int) -> Hardware:
    return described("RTX 4090", ram * GIB, [parse_drive("7GB/s,5GB/s")], 75e9)


class Case(NamedTuple):
    model: str
    machine: Hardware
    micro_batches: int
    """Of 4 x 2,048 tokens."""
    host: int | None
    """GiB of the host budget; None for the recommended one."""
    seconds: float
    """The most that a step may take."""
    moments: str | None = None
    master: str | None = None

    def planned(self, **optimizer: Any) -> recommend.Planned:
        """Gradients wait in bf16, nothing is durable, and no step clips. `optimizer` are params of Adam."""
        shape = from_preset(self.model, 2048, 2)
        assert shape is not None
        several = self.micro_batches > 1
        load = Load(4, self.micro_batches, chunked_loss=True, schedule="layer_major" if several else "auto")
        content = memory.settings(
            "cpu",
            "cpu",
            activations="auto",
            batch=4,
            accumulation=self.micro_batches,
            durability="none",
            host_memory=None if self.host is None else self.host * GIB,
            moments=self.moments,
            master=self.master,
        )
        content["optimizer"] = {"type": "Adam", "params": {"lr": 1e-5, "weight_decay": 0.1, **optimizer}}
        content["offload"]["activation_memory"] = 2 * GIB
        content["data_types"] = {"grad_accum_dtype": "bf16"}
        return recommend.plan(shape, self.machine, load, content)


IN_RAM = {
    "H200, 7B, 32k tokens": Case("llama-7b", h200(), 4, 104, 3.6),
    "H200, 7B, 8k tokens": Case("llama-7b", h200(), 1, 104, 1.85),
    "H200, 8B, 32k tokens": Case("llama-8b", h200(), 4, 108, 4.2),
    "H200, 13B in few bytes, 32k tokens": Case("llama-13b", h200(), 4, 104, 6.6, "int8", "bf24"),
}
PARTLY_ON_DRIVES = {
    "RTX 4090, 13B, 128 GiB, 32k tokens": Case("llama-13b", rtx_4090(128), 4, None, 47.0),
    "RTX 4090, 7B, 64 GiB, 32k tokens": Case("llama-7b", rtx_4090(64), 4, None, 26.0),
}
CASES = IN_RAM | PARTLY_ON_DRIVES


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_little_more_than_its_slowest_link(name: str) -> None:
    planned = CASES[name].planned()
    assert planned.timing.formula_seconds <= planned.timing.seconds <= CASES[name].seconds
    on_disk = any(Tier.DISK in tiers.values() for tiers in planned.memory.placement.tiers)
    assert on_disk == (name in PARTLY_ON_DRIVES)


@pytest.mark.parametrize("name", IN_RAM)
def test_weights_before_moments_make_it_shorter(name: str) -> None:
    """A decay that is added to the gradient needs the old weight, so Adam's update takes one pass with it."""
    two_passes, one_pass = (CASES[name].planned(adam_w_mode=decoupled) for decoupled in (True, False))
    assert one_pass.timing.seconds > 1.04 * two_passes.timing.seconds


def test_a_pass_moves_eighteen_of_twenty_six_bytes() -> None:
    planned = CASES["H200, 7B, 32k tokens"].planned()
    assert step_time.passes_of(planned.memory.mode, 2) == (18 / 26, 18 / 26)
    numel = sum(planned.memory.parts.trainable_numel)
    assert sum(row[State.GRAD] for row in planned.memory.parts.nbytes) == 2 * numel
