"""A benchmark of a GPU: `offload bench gpu FOLDER`, or `python -m bench.gpu --folder FOLDER` in a checkout.

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

Steps of several micro-batches are made by `engine.train_batch`, as Trainer and `offload train` make them. `--loop
micro_batches` calls engine, backward and step for each micro-batch, `--loop both` times one loop after the other.

If no sizes are given, a step has as many tokens as fit beside the model on the GPU, at most 8 x 4096: smaller steps of
a fast GPU wait for the host. `--only NAME` runs only parts whose names begin with NAME, and may repeat. `--part NAME`
runs one part alone, in this process. Without a GPU the command reports an error and writes nothing; `--device cpu` is a
rehearsal that measures nothing of interest. Other users of the GPU change the figures, so run the benchmark alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from offload.bench.child_process import run_child, terminable, write_json
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
from offload.bench.gpu.report import machine, words
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
_PASSED_ON = ("device", "model", "steps", "nbytes", "loop", "micro_batches", "moments", "grad_dtype")
"""Options that the command passes unchanged to the process of each part."""
BOTH = "both"
"""Value of `--loop` for all loops."""
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark, or one part of it; returns the exit code.

    Raises:
        ConfigError: there is no GPU, no such model or part, or transformers is not installed. Nothing was written.
    """
    given = _parser().parse_args(arguments)
    chosen_parts(given.only)
    check_name(given.model)
    check_machine(given.device)
    if given.part:
        _run_here(given)
        return 0
    return _run_all(given)


def check_machine(device: str) -> None:
    """Raises `ConfigError` if this machine or its packages cannot run the benchmark on `device`, "cuda" or "cpu"."""
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        raise ConfigError(
            f"there is no GPU to measure: torch {torch.__version__} "
            f"{'finds no CUDA device' if built else 'is built without CUDA'}; `offload info` says more"
        )
    require_transformers()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-minutes", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path(), help="for swap files: a folder on the drive to measure")
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"), help="file for all figures")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--batch-size", type=int, help="sequences of a step; by default as many as fit, 8 at most")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence; by default as many as fit, 4096 at most")
    parser.add_argument("--recompute", action="store_true", help="compute activations again, with given sizes")
    parser.add_argument("--micro-batches", type=int, help="micro-batches of a step; by default as the part says")
    parser.add_argument("--loop", choices=(*LOOPS, BOTH), default=TRAIN_BATCH, help="loop over the micro-batches")
    parser.add_argument("--moments", choices=("fp32", "bf16", "int8"), help="by default as the part says")
    parser.add_argument("--grad-dtype", choices=("fp32", "bf16"), help="dtype of sums of gradients")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a placement, fewer if time is short")
    parser.add_argument("--nbytes", default="256MiB", help="bytes of one copy")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only parts whose names begin with NAME; may repeat"
    )
    parser.add_argument("--print-json", action="store_true", help="print the figures in place of the tables")
    parser.add_argument("--part", choices=[part.name for part in PARTS], metavar="NAME", help="run this part alone")
    return parser


def _device(given: argparse.Namespace) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")


def step_size(given: argparse.Namespace, limit: int | None) -> StepSize:
    """Returns the size of a part's step: the given one, or else the largest that fits into the GPU.

    On a CPU, or if only one of the two sizes is given, the default takes the place of a missing one. `limit` are the
    bytes of GPU memory that the part may take.
    """
    if given.batch_size or given.seq_len or given.device == "cpu":
        usual = DEFAULT_STEP
        return StepSize(given.batch_size or usual.batch_size, given.seq_len or usual.seq_len, given.recompute)
    memory = torch.cuda.get_device_properties(_device(given)).total_memory
    return largest_step(given.model, memory if limit is None else min(limit, memory))


def _run_here(given: argparse.Namespace) -> None:
    seconds = 60 * given.budget_minutes - (time.time() - psutil.Process().create_time())  # imports take some of them
    part = next(part for part in PARTS if part.name == given.part)
    # Only parts that train the model of the command need the size of a step, which takes seconds to find.
    trains = (part.placement or part.name == "DeepSpeed") and "batch_size" not in part.changes
    size = step_size(given, part.changes.get("limit")) if trains else DEFAULT_STEP
    work = Work(
        _device(given),
        given.folder,
        given.model,
        batch_size=size.batch_size,
        seq_len=size.seq_len,
        recompute=size.recompute,
        steps=given.steps,
        seconds=seconds,
        copy_nbytes=parse_size(given.nbytes),
    )

    def save(figures: dict[str, Any]) -> None:
        write_json(given.json, figures)

    run_here(part, work._replace(**{**part.changes, **chosen_forms(part, given)}), save)
    print(given.json.read_text(), end="")


def chosen_forms(part: Part, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `Work` that options replace in a part that trains a preset."""
    if not part.placement:
        return {}
    fields: dict[str, Any] = {"loops": LOOPS if given.loop == BOTH else (given.loop,)}
    fields |= {"accumulation": given.micro_batches, "moments": given.moments, "grad_dtype": given.grad_dtype}
    return {name: value for name, value in fields.items() if value is not None}


_WORK = {"bits": bits, "copies": copies, "rates": rates, "tests": gpu_tests, "DeepSpeed": deepspeed_steps}


def run_here(part: Part, work: Work, save: Save) -> None:
    """Runs one part in this process."""
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


def chosen_parts(only: Sequence[str] | None) -> list[Part]:
    """Returns the parts whose names begin with one of `only`; all if there are none."""
    for name in only or ():
        if not any(part.name.startswith(name) for part in PARTS):
            raise ConfigError(f"no part's name begins with {name!r}; the parts are {', '.join(p.name for p in PARTS)}")
    return [part for part in PARTS if not only or part.name.startswith(tuple(only))]


def _run_all(given: argparse.Namespace) -> int:
    chosen = chosen_parts(given.only)
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "format": FORMAT,
        "machine": machine(torch.device(given.device)),
        "given": {key: getattr(given, key) for key in ("budget_minutes", "batch_size", "seq_len", *_PASSED_ON)},
        "parts": {},
    }
    with terminable(), tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=given.folder.resolve()) as folder:

        def run(part: Part, soft: float, hard: float) -> dict[str, Any]:
            print(f"{part.name} …", file=sys.stderr if given.print_json else sys.stdout, flush=True)
            return run_part(part, given, Path(folder), soft, hard)

        for name, result in run_parts(chosen, 60 * given.budget_minutes, run):
            parts = report["parts"]
            parts[name] = result
            add_exposure(parts)
            report |= {
                "correct": not judge(parts),
                "bounds": bounds(parts),
                "refused": refused(parts),
                "invalid": invalid(parts),
            }
            write_json(given.json, report)  # after each part, so that an early end loses no results
    print(json.dumps(report) if given.print_json else f"\n{words(report)}\n\nall figures: {given.json}")
    return judge(report["parts"])


def option_words(**options: Any) -> list[str]:
    """Returns options of this command as words; without those that are None or False."""
    found = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(option)
        elif value is not None and value is not False:
            found += [option, str(value)]
    return found


def run_part(part: Part, given: argparse.Namespace, folder: Path, soft: float, hard: float) -> dict[str, Any]:
    """Runs one part in a process of its own, which should end within `soft` seconds and is killed after `hard` seconds.

    Its swap files in `folder` are removed afterwards, also those of a part that was killed or has failed.
    """
    files = folder / "swap"
    files.mkdir()
    figures = folder / "figures.json"
    # Sizes that are not given are found by each part: a part in 24 GiB has room for fewer tokens.
    options = {key: getattr(given, key) for key in ("batch_size", "seq_len", "recompute", *_PASSED_ON)}
    words = option_words(part=part.name, json=figures, folder=files, budget_minutes=soft / 60, **options)
    command = [sys.executable, "-m", "offload.bench.gpu", *words]
    setting = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if part.name == "bits" else {}  # slower, so for this part only
    if _ALLOCATOR not in os.environ:
        setting[_ALLOCATOR] = "expandable_segments:True"  # an engine's own setting, but a part uses CUDA before it
    try:
        return run_child(command, figures, hard, HF_HUB_OFFLINE="1", **setting)
    finally:
        figures.unlink(missing_ok=True)
        shutil.rmtree(files)


def run(arguments: list[str] | None = None) -> int:
    """Runs `main` and returns the exit code. A `ConfigError` becomes one line on stderr and the exit code 2."""
    try:
        return main(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
