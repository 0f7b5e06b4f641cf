"""Simulated seconds of steps on machines that need not exist: `python -m tests.planner.pinned_steps` pins them anew.

A machine is a row of rates written here, not those of `hardware/gpus.toml`: a better figure for a card changes no pin.
So only the schedule of a step, its bytes, and the formulas of its compute can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from offload.planner import memory, recommend
from offload.planner.activations import Load
from offload.planner.hardware import KERNEL_BYTES, Drive, Hardware
from offload.planner.model_shape import from_preset
from offload.sizes import GIB

PINS = Path(__file__).with_suffix(".json")
"""Seconds of a step by the name of its case."""
SEQUENCE = 2048
_FREE = 0.9
"""Fraction of both memories that a run may take."""
_HOST_SHARE = 0.7
"""Fraction of the host memory's rate that the optimizer and sums of gradients reach."""


class Machine(NamedTuple):
    """A machine with one GPU, in GiB, GB/s and Tflop/s."""

    gpu: int
    ram: int
    products: float
    device_rate: float
    """Rate of the GPU's memory, for all work but products."""
    link: float
    """Copies, each way."""
    host: float
    """Rate of host memory."""
    reads: float
    writes: float

    @property
    def hardware(self) -> Hardware:
        """Returns the machine as a plan takes it, with one drive."""
        device_rate, link, host, read, write = (1e9 * rate for rate in self[3:])
        return Hardware(
            name=f"{self.gpu} GiB",
            dtype="bf16",
            gpu_memory=int(_FREE * self.gpu * GIB),
            ram=int(_FREE * self.ram * GIB),
            matmul=1e12 * self.products,
            weights=device_rate,
            fresh=device_rate,
            elementwise=device_rate,
            upload=link,
            download=link,
            memory=host,
            optimizer=_HOST_SHARE * host / KERNEL_BYTES["bf16"],
            device_optimizer=device_rate / KERNEL_BYTES["bf16"],
            gradient=_HOST_SHARE * host / 4,
            handed_seconds=0.6e-3,
            drives=(Drive("drive", read, write, 2 / (1 / read + 1 / write)),),
            assumed=(),
        )


MACHINES = {
    "12 GiB": Machine(12, 32, 25, 250, 12, 35, 2, 1.5),
    "16 GiB": Machine(16, 64, 45, 200, 12, 40, 3.5, 3),
    "24 GiB": Machine(24, 64, 165, 700, 25, 60, 7, 5),
    "24 GiB, more RAM": Machine(24, 128, 165, 700, 25, 75, 7, 5),
    "32 GiB": Machine(32, 128, 210, 1250, 50, 75, 14, 10),
    "80 GiB": Machine(80, 256, 600, 2350, 50, 150, 7, 5),
    "80 GiB, more RAM": Machine(80, 512, 600, 2350, 50, 250, 14, 10),
}


def h200() -> Hardware:
    """Returns an H200 held to 24 GiB, with the rates that were measured on it, in November 2026.

    Products and other work have rates with which the kernels of 7B take 3.28 s and those of 13B 5.96 s; 3.29 and 5.96
    were measured.
    """
    measured = 1 / 0.8235
    return replace(
        Machine(24, 126, 680 * measured, 3360, 50, 195, 1.77, 2.74).hardware,
        gpu_memory=24 * GIB,
        ram=round(113.3 * GIB),
        elementwise=2.5e12 * measured,
        weights=3.36e12 * measured,
        download=49.6e9,
        optimizer=5.3e9,
        gradient=9.6e9,
        drives=(Drive("drive", 1.77e9, 2.74e9, 2.15e9),),
    )


class Case(NamedTuple):
    """A step of a preset; its micro-batches have 4 sequences of `SEQUENCE` tokens."""

    model: str
    machine: Hardware
    micro_batches: int
    tiers: str = "cpu/cpu"
    """Devices of weights and states."""
    host: int | None = None
    """GiB of the host budget; None for the default."""
    durability: str = "none"
    moments: str | None = None
    master: str | None = None
    schedule: str = "layer_major"
    """Order of several micro-batches."""

    def planned(self, **optimizer: Any) -> recommend.Planned:
        """Returns the plan. Gradients wait in bf16, and no step clips. `optimizer` are params of Adam."""
        shape = from_preset(self.model, SEQUENCE, 2)
        assert shape is not None
        several = self.micro_batches > 1
        load = Load(4, self.micro_batches, chunked_loss=True, schedule=self.schedule if several else "auto")
        content = memory.settings(
            *self.tiers.split("/"),
            activations="auto",
            batch=4,
            accumulation=self.micro_batches,
            durability=self.durability,
            host_memory=None if self.host is None else self.host * GIB,
            moments=self.moments,
            master=self.master,
        )
        content["optimizer"] = {"type": "Adam", "params": {"lr": 1e-5, "weight_decay": 0.1, **optimizer}}
        content["offload"]["activation_memory"] = 2 * GIB
        content["data_types"] = {"grad_accum_dtype": "bf16"}
        return recommend.plan(shape, self.machine, load, content)


IN_RAM = {
    "H200, 7B, 32k tokens": Case("llama-7b", h200(), 4, host=104),
    "H200, 7B, 8k tokens": Case("llama-7b", h200(), 1, host=104),
    "H200, 8B, 32k tokens": Case("llama-8b", h200(), 4, host=108),
    "H200, 13B in few bytes, 32k tokens": Case("llama-13b", h200(), 4, host=104, moments="int8", master="bf24"),
}
"""Steps that move no byte of a drive."""


def _cases() -> Iterator[tuple[str, Case]]:
    """Yields the steps on `MACHINES`, each with its name."""
    rows: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
        ("12 GiB", "1b", 1, {}),
        ("12 GiB", "3b", 2, {"tiers": "nvme/nvme", "durability": "step"}),
        ("12 GiB", "8b", 2, {"tiers": "nvme/nvme"}),
        ("16 GiB", "3b", 1, {"tiers": "nvme/nvme"}),
        ("16 GiB", "8b", 2, {"tiers": "nvme/nvme", "durability": "step"}),
        ("16 GiB", "13b", 4, {"tiers": "nvme/nvme", "moments": "int8"}),
        ("24 GiB", "3b", 1, {}),
        ("24 GiB", "8b", 4, {"tiers": "nvme/nvme", "schedule": "micro_batch_major"}),
        ("24 GiB", "13b", 4, {"tiers": "nvme/nvme", "durability": "step"}),
        ("24 GiB, more RAM", "7b", 2, {}),
        ("24 GiB, more RAM", "8b", 1, {"tiers": "nvme/nvme", "durability": "step"}),
        ("24 GiB, more RAM", "13b", 4, {"tiers": "nvme/nvme", "host": 96}),
        ("32 GiB", "3b", 2, {"tiers": "none/cpu", "schedule": "micro_batch_major"}),
        ("32 GiB", "13b", 4, {"tiers": "nvme/nvme", "durability": "step"}),
        ("32 GiB", "70b", 4, {"tiers": "nvme/nvme"}),
        ("80 GiB", "3b", 2, {"tiers": "none/none"}),
        ("80 GiB", "13b", 2, {}),
        ("80 GiB", "70b", 8, {"tiers": "nvme/nvme", "durability": "step"}),
        ("80 GiB, more RAM", "8b", 1, {"tiers": "none/cpu"}),
        ("80 GiB, more RAM", "70b", 4, {"tiers": "nvme/nvme", "host": 400}),
    )
    for name, model, micro_batches, more in rows:
        case = Case(f"llama-{model}", MACHINES[name].hardware, micro_batches, **more)
        yield f"{name}, {model.upper()}, {micro_batches} x 8k tokens, {case.tiers}", case


CASES = {**IN_RAM, **dict(_cases())}

if __name__ == "__main__":
    pins = {name: float(f"{case.planned().timing.seconds:.6g}") for name, case in CASES.items()}
    PINS.write_text(json.dumps(pins, indent=1) + "\n", encoding="utf-8")
