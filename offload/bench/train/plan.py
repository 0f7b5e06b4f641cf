"""Settings of `offload bench train`: the model and its step, and the contenders that train it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import offload
from offload import precision
from offload.errors import ConfigError
from offload.kernels.settings import MOST_THREADS, available_cores
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
    model: str = "gpt2-small"
    batch_size: int = 1
    """Sequences of a micro-batch."""
    seq_len: int = 256
    micro_batches: int = 1
    dtype: str = "auto"
    """ "bf16" or "fp32"; "auto" before a plan is made, as the next defaults."""
    device: str = ""
    threads: int = 0
    contenders: tuple[Contender, ...] = ()
    rounds: int = 5
    steps: int = 3
    """Steps of a turn that count."""
    recompute: bool = False
    """True if the model of each contender computes its activations again in the backward."""
    gpu_memory: int | None = None
    """Bytes of GPU memory that each contender but plain PyTorch may take; None for all of it."""

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


def make_plan(folder: Path, *, threads: int | None = None, only: Sequence[str] = (), **settings: Any) -> TrainPlan:
    """Checks `settings`, fields of `TrainPlan`, before anything is measured, and fills in what depends on the machine.

    With several micro-batches, the order layer-major is a contender too. `only` are beginnings of the names of
    contenders; plain PyTorch always runs.
    """
    plan = TrainPlan(folder=folder, **settings)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder_to_make(folder)}")
    if plan.dtype not in DTYPES:
        raise ConfigError(f"there is no dtype {plan.dtype!r} here: expected {', '.join(DTYPES)}")
    for name in ("batch_size", "seq_len", "micro_batches", "rounds", "steps"):
        if getattr(plan, name) < 1:
            raise ConfigError(f"expected --{name.replace('_', '-')} of at least 1, got {getattr(plan, name)}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"expected --threads >= 1 and at most {MOST_THREADS}, got {threads}")
    device = compute_device("auto")
    if plan.gpu_memory is not None and device.type != "cuda":
        raise ConfigError(f"--gpu-memory limits a GPU, and this machine computes on {device.type}: leave it out")
    # Names first: transformers takes seconds to import.
    chosen = _chosen(only)
    check_name(plan.model)
    require_transformers()
    with offload.init():  # without memory
        check_positions(build(plan.model).config, plan.seq_len)
    return replace(
        plan,
        device=device.type,
        dtype=precision.choose(device).dtype if plan.dtype == "auto" else plan.dtype,
        threads=threads or available_cores(),
        contenders=tuple(contender for contender in chosen if plan.micro_batches > 1 or contender not in _LAYER_MAJOR),
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
