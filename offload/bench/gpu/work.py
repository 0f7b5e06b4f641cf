"""Sizes, placements and configs of the parts, and their functions for measuring times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.finetune.model import make_ready
from offload.presets import build
from offload.sizes import MIB

Save = Callable[[dict[str, Any]], None]
"""Receives all figures so far, so that the figures of a part that is stopped are not lost."""

PLACEMENTS = (
    "none/none",
    "nvme/nvme",
    "cpu/cpu",
    "cpu/nvme",
    "none/nvme",
    "nvme/cpu",
    "none/cpu",
    "cpu/none",
    "nvme/none",
)
"""All nine placements, as weights/states, the most important first."""


class StepSize(NamedTuple):
    """The size of a step of one micro-batch."""

    batch_size: int
    seq_len: int
    recompute: bool = False


DEFAULT_STEP = StepSize(8, 512)


class Work(NamedTuple):
    """The work of a part."""

    device: torch.device
    folder: Path
    """An empty folder for swap files."""
    model: str = "llama-1b"
    layers: int | None = None
    """Layers of the model; None for all of them."""
    batch_size: int = 8
    seq_len: int = 512
    accumulation: int = 1
    recompute: bool = False
    """True if activations are computed again in the backward."""
    limit: int | None = None
    """Bytes of GPU memory that may be taken; None for all of it."""
    steps: int = 8
    """Timed steps; fewer if they would take longer than `seconds`."""
    seconds: float = 60.0
    copy_nbytes: int = 256 * MIB
    rounds: int = 15

    @property
    def tokens(self) -> int:
        """Returns the tokens of a step."""
        return self.batch_size * self.seq_len * self.accumulation

    def keep_limit(self) -> None:
        """Limits this process to `limit` bytes of GPU memory from now on."""
        if self.limit is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(self.limit / total, 1.0), self.device)

    def build(self) -> nn.Module:
        """Returns the model. Inside of `offload.init` it takes no memory."""
        model = build(self.model, self.layers)
        make_ready(model, self.recompute)
        return model


def config_for(placement: str, work: Work, dtype: str, accumulation: int = 1, clip: float = 0.0) -> dict[str, Any]:
    """Returns the config of a placement, written as weights/states."""
    weights, states = placement.split("/")
    return {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": weights},
            "offload_optimizer": {"device": states},
        },
        "offload": {"nvme_path": str(work.folder), "device": work.device.type},
    }


def seconds_of(action: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each of two calls, measured alternately after one round that does not count."""
    one(), other()
    pairs = [(seconds_of(one), seconds_of(other)) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the median of the ratios of paired measurements."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def random_ids(shape: tuple[int, int], vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Returns random tokens on the CPU, the same ones for the same seed."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def peak_resident() -> int:
    """Returns the peak bytes of this process in RAM so far; `ru_maxrss` would include the peak of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
