"""Little work for the GPU benchmark on a CPU, and the figures of a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from offload.bench.gpu.training import Work


def small(folder: Path) -> Work:
    sizes: dict[str, Any] = {"batch_size": 1, "seq_len": 16, "steps": 2, "copy_nbytes": 1 << 16, "rounds": 1}
    return Work(torch.device("cpu"), folder, "gpt2-tiny", seconds=20, **sizes)


def numel_of(work: Work) -> int:
    return sum(parameter.numel() for parameter in work.build().parameters())


def placed(seconds: float, **more: Any) -> dict[str, Any]:
    work = {"model": "m", "layers": None, "parameters": 9, "tokens_per_step": 64, "recompute": False}
    return {"state": "done", "figures": work | {"step_seconds": seconds, "no_device_kernels": None} | more}
