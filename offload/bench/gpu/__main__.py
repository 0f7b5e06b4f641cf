"""A benchmark of a GPU, `offload bench gpu FOLDER`, and the process of each of its parts.

The command runs those of these parts that fit into the budget of minutes, the most important first, each in a process
of its own:

    bits         tiny models in all placements: losses, norms and weights equal to those of none/none, bit for bit
    copies       to and from the engine's host memory, in each direction and both at once. Bound: the same bytes to and
                 from torch's own pinned memory
    rates        matrix products in a plain loop, the optimizer, the drive
    none/none    steps of the model, one part for each placement (weights/states). Bound of the time: the step of
    nvme/nvme    none/none, where both stay on the device. Bound of the bytes: 26 for each parameter and step
    …
    13B layers   four layers as wide as those of the 13B model, all states on the drive, in 24 GiB of GPU memory
    tests        the tests in tests/ that need a GPU, in a checkout
    … in 24 GiB  three of the placements again, in 24 GiB of GPU memory
    DeepSpeed    the step of cpu/cpu by DeepSpeed, if DeepSpeed is installed
    7B, 8B, 13B  steps in 24 GiB of GPU memory, with states in RAM as far as they fit and otherwise on the drive; with
                 fewer layers if not all fit; `13B in few bytes` has int8 moments and bf24 masters

Steps of several micro-batches are made by `engine.train_batch`, as Trainer and `offload train` make them. The loop
"micro_batches" calls engine, backward and step for each micro-batch, and "both" times one loop after the other.

If no sizes are given, a step has as many tokens as fit beside the model on the GPU, at most 8 x 4096: smaller steps of
a fast GPU wait for the host. Other users of the GPU change the figures, so run the benchmark alone. On a CPU it is a
rehearsal that measures nothing of interest.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from offload.bench.child_process import growing_segments, run_child, terminable, write_json
from offload.bench.gpu.parts import (
    PARTS,
    PLANNED,
    Part,
    add_exposure,
    bits,
    bounds,
    copies,
    deepspeed_steps,
    gpu_tests,
    invalid,
    judge,
    rates,
    refused,
    run_parts,
)
from offload.bench.gpu.report import machine
from offload.bench.gpu.training import (
    DEFAULT_STEP,
    LOOPS,
    TRAIN_BATCH,
    Save,
    StepSize,
    Work,
    config_for,
    fit,
    largest_step,
    measure_steps,
    room_of,
)
from offload.errors import ConfigError
from offload.presets import check_name, require_transformers
from offload.sizes import parse_size

FORMAT = 1
"""Version of the JSON file's keys."""
BOTH = "both"
"""Value of `loop` for all loops."""


class GpuSettings(NamedTuple):
    """Settings of all parts. None leaves a value to each part: a part in 24 GiB has room for fewer tokens."""

    device: str = "cuda"
    """ "cuda" or "cpu"."""
    model: str = "llama-1b"
    """Preset whose steps are timed."""
    batch_size: int | None = None
    seq_len: int | None = None
    steps: int = 8
    """Timed steps of a placement, fewer if time is short."""
    nbytes: str = "256MiB"
    """Bytes of one copy."""
    loop: str = TRAIN_BATCH
    """One of `LOOPS`, or `BOTH`."""
    micro_batches: int | None = None
    moments: str | None = None
    grad_dtype: str | None = None

    def check(self, only: Sequence[str] = ()) -> None:
        """Raises `ConfigError` if there is no such part, model or GPU, or if transformers is not installed."""
        chosen_parts(only)
        check_name(self.model)
        if self.device == "cuda" and not torch.cuda.is_available():
            built = torch.version.cuda is not None or torch.version.hip is not None
            raise ConfigError(
                f"there is no GPU to measure: torch {torch.__version__} "
                f"{'finds no CUDA device' if built else 'is built without CUDA'}; `offload info` says more"
            )
        require_transformers()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


# -- work of a process ---------------------------------------------------------------------------------


def step_size(settings: GpuSettings, limit: int | None) -> StepSize:
    """Returns the size of a part's step: the given one, or else the largest that fits into the GPU.

    On a CPU, or if only one of the two sizes is given, the default takes the place of a missing one. `limit` are the
    bytes of GPU memory that the part may take.
    """
    if settings.batch_size or settings.seq_len or settings.device == "cpu":
        usual = DEFAULT_STEP
        return StepSize(settings.batch_size or usual.batch_size, settings.seq_len or usual.seq_len)
    memory = torch.cuda.get_device_properties(settings.torch_device).total_memory
    return largest_step(settings.model, memory if limit is None else min(limit, memory))


def work(job: Mapping[str, Any], save: Save) -> None:
    """Runs one part in this process."""
    settings = GpuSettings(**job["settings"])
    seconds = job["seconds"] - (time.time() - psutil.Process().create_time())  # imports take some of them
    part = next(part for part in PARTS if part.name == job["part"])
    # Only parts that train the model of the command need the size of a step, which takes seconds to find.
    trains = (part.placement or part.name == "DeepSpeed") and "batch_size" not in part.changes
    size = step_size(settings, part.changes.get("limit")) if trains else DEFAULT_STEP
    of_part = Work(
        settings.torch_device,
        Path(job["folder"]),
        settings.model,
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        recompute=size.recompute,
        steps=settings.steps,
        seconds=seconds,
        copy_nbytes=parse_size(settings.nbytes),
    )
    run_here(part, of_part._replace(**{**part.changes, **chosen_forms(part, settings)}), save)


def chosen_forms(part: Part, settings: GpuSettings) -> dict[str, Any]:
    """Returns the fields of `Work` that settings replace in a part that trains a preset."""
    if not part.placement:
        return {}
    fields: dict[str, Any] = {"loops": LOOPS if settings.loop == BOTH else (settings.loop,)}
    fields |= {"accumulation": settings.micro_batches, "moments": settings.moments, "grad_dtype": settings.grad_dtype}
    return {name: value for name, value in fields.items() if value is not None}


_WORK = {"bits": bits, "copies": copies, "rates": rates, "tests": gpu_tests, "DeepSpeed": deepspeed_steps}


def run_here(part: Part, work: Work, save: Save) -> None:
    """Does the work of a part."""
    if not part.placement:
        _WORK[part.name](work, save)
    elif part.placement != PLANNED:
        measure_steps(work, config_for(part.placement, work, "bf16", work.accumulation), save)
    else:
        work.keep_limit()
        fitted = fit(work, room_of(work))
        if not fitted.layers:
            save({"skipped": fitted.words})
            return
        work = work._replace(layers=fitted.layers)
        measure_steps(work, fitted.settings, lambda figures: save(figures | {"fitted": fitted.words}))


# -- command -------------------------------------------------------------------------------------------


def chosen_parts(only: Sequence[str]) -> list[Part]:
    """Returns the parts whose names begin with one of `only`; all if there are none."""
    for name in only:
        if not any(part.name.startswith(name) for part in PARTS):
            raise ConfigError(f"no part's name begins with {name!r}; the parts are {', '.join(p.name for p in PARTS)}")
    return [part for part in PARTS if not only or part.name.startswith(tuple(only))]


def measure(
    settings: GpuSettings,
    folder: Path,
    minutes: float,
    output: Path,
    only: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs the parts that fit into the minutes, and returns all figures, which `output` has after each part."""
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "format": FORMAT,
        "machine": machine(torch.device(settings.device)),
        "given": {"budget_minutes": minutes, **settings._asdict()},
        "parts": {},
    }
    with terminable(), tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=folder.resolve()) as parent:

        def run(part: Part, soft: float, hard: float) -> dict[str, Any]:
            tell(f"{part.name} …")
            return run_part(part, settings, Path(parent), soft, hard)

        for name, result in run_parts(chosen_parts(only), 60 * minutes, run):
            parts = report["parts"]
            parts[name] = result
            add_exposure(parts)
            report |= {
                "correct": not judge(parts),
                "bounds": bounds(parts),
                "refused": refused(parts),
                "invalid": invalid(parts),
            }
            write_json(output, report)  # after each part, so that an early end loses no results
    return report


def run_part(part: Part, settings: GpuSettings, folder: Path, soft: float, hard: float) -> dict[str, Any]:
    """Runs one part in a process of its own, which should end within `soft` seconds and is killed after `hard` seconds.

    Its swap files in `folder` are removed afterwards, also those of a part that was killed or has failed.
    """
    files, figures = folder / "swap", folder / "figures.json"
    files.mkdir()
    job = {"part": part.name, "folder": str(files), "seconds": soft, "settings": settings._asdict()}
    environment = growing_segments()
    if part.name == "bits":
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # slower, so for this part only
    try:
        return run_child("offload.bench.gpu", job, figures, hard, **environment)
    finally:
        figures.unlink(missing_ok=True)
        shutil.rmtree(files)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), lambda figures: write_json(Path(sys.argv[2]), figures))
