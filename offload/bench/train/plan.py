"""Settings of `offload bench train`: the model and its step, and the contenders that train it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import offload
from offload import precision
from offload.errors import ConfigError
from offload.kernels import settings
from offload.notices import folder_to_make
from offload.presets import build, check_name, check_positions, require_transformers
from offload.swapper.memory.device import compute_device

DTYPES = ("auto", "bf16", "fp32")
PLAIN = "plain"
"""The contender with which the others are compared: plain PyTorch with everything in memory."""


class Contender(NamedTuple):
    """A way to train the model."""

    name: str
    kind: str
    """The library that trains: plain, offload, deepspeed, fsdp2 or torchao."""
    placement: str = ""
    """Tiers of weights and states, as weights/states."""
    schedule: str = "micro_batch_major"
    """Order of a step's micro-batches; only for this package."""


_LAYER_MAJOR = tuple(
    Contender(f"offload {tiers} layer-major", "offload", tiers, "layer_major") for tiers in ("cpu/cpu", "nvme/nvme")
)
CONTENDERS = (
    Contender(PLAIN, "plain"),
    *(Contender(f"offload {tiers}", "offload", tiers) for tiers in ("none/none", "cpu/cpu", "cpu/nvme", "nvme/nvme")),
    *_LAYER_MAJOR,
    *(Contender(f"deepspeed {tiers}", "deepspeed", tiers) for tiers in ("cpu/cpu", "cpu/nvme", "nvme/nvme")),
    Contender("fsdp2 cpu", "fsdp2", "cpu/cpu"),
    Contender("torchao cpu", "torchao", "none/cpu"),
)
"""All contenders, in the order of their turns."""

_PACKAGES = {"deepspeed": "DeepSpeed", "torchao": "torchao"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """Settings that have been checked."""

    folder: Path
    """A folder on the drive that is measured."""
    device: str
    model: str
    batch_size: int
    """Sequences of a micro-batch."""
    seq_len: int
    micro_batches: int
    dtype: str
    """"bf16" or "fp32"."""
    rounds: int
    steps: int
    """Steps of a turn that count."""
    recompute: bool
    """True if the model of each contender computes its activations again in the backward."""
    gpu_memory: int | None
    """Bytes of GPU memory that each contender but plain PyTorch may take; None for all of it."""
    threads: int
    contenders: tuple[Contender, ...]

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len * self.micro_batches


class TrainJob(NamedTuple):
    """The work of one turn, for the process that does it."""

    contender: str
    folder: str
    """An empty folder for swap files."""
    weights: str
    """A safetensors file with the model's initial values."""
    device: str
    model: str
    batch_size: int
    seq_len: int
    micro_batches: int
    dtype: str
    steps: int
    recompute: bool
    gpu_memory: int | None


def make_plan(
    folder: Path,
    *,
    model: str = "gpt2-small",
    batch_size: int = 1,
    seq_len: int = 256,
    micro_batches: int = 1,
    dtype: str = "auto",
    rounds: int = 5,
    steps: int = 3,
    recompute: bool = False,
    gpu_memory: int | None = None,
    threads: int | None = None,
    only: Sequence[str] = (),
) -> TrainPlan:
    """Checks settings before anything is measured, and fills in the settings that depend on the machine.

    With several micro-batches, the order layer-major is a contender too. `only` are beginnings of the names of
    contenders; plain PyTorch always runs.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder_to_make(folder)}")
    if dtype not in DTYPES:
        raise ConfigError(f"there is no dtype {dtype!r} here: expected {', '.join(DTYPES)}")
    numbers = {"batch-size": batch_size, "seq-len": seq_len, "micro-batches": micro_batches}
    for name, value in {**numbers, "rounds": rounds, "steps": steps}.items():
        if value < 1:
            raise ConfigError(f"expected {name} of at least 1, got {value}")
    if threads is not None and not 1 <= threads <= settings.MOST_THREADS:
        raise ConfigError(f"expected threads >= 1 and at most {settings.MOST_THREADS}, got {threads}")
    device = compute_device("auto")
    if gpu_memory is not None and device.type != "cuda":
        raise ConfigError(f"--gpu-memory limits a GPU, and this machine computes on {device.type}: leave it out")
    # Names first: transformers takes seconds to import.
    chosen = _chosen(only)
    check_name(model)
    require_transformers()
    with offload.init():  # without memory
        check_positions(build(model).config, seq_len)
    return TrainPlan(
        folder=folder,
        device=device.type,
        model=model,
        batch_size=batch_size,
        seq_len=seq_len,
        micro_batches=micro_batches,
        dtype=precision.choose(device).dtype if dtype == "auto" else dtype,
        rounds=rounds,
        steps=steps,
        recompute=recompute,
        gpu_memory=gpu_memory,
        threads=threads or settings.available_cores(),
        contenders=tuple(contender for contender in chosen if micro_batches > 1 or contender not in _LAYER_MAJOR),
    )


def _chosen(only: Sequence[str]) -> list[Contender]:
    """Returns the contenders whose names begin with one of `only`, and plain PyTorch."""
    for name in only:
        if not any(contender.name.startswith(name) for contender in CONTENDERS):
            names = ", ".join(contender.name for contender in CONTENDERS)
            raise ConfigError(f"no contender's name begins with {name!r}; the contenders are {names}")
    return [contender for contender in CONTENDERS if not only or contender.name.startswith((PLAIN, *only))]


def reason_to_skip(contender: Contender, device: str) -> str | None:
    """Returns the reason why a contender cannot run on this machine; None if no reason is known before the start."""
    package = _PACKAGES.get(contender.kind)
    # The package is only searched, not imported: an import would take seconds and start the package's own log.
    if package is not None and importlib.util.find_spec(contender.kind) is None:
        return f"{package} is not installed"
    if contender.kind == "torchao" and device == "cpu":
        return f"torchao's CPUOffloadOptimizer needs a GPU, and torch {torch.__version__} finds none"
    return None
