"""What a GPU gives, in one command: `python -m bench.gpu --budget-minutes 8 [--folder DIR] [--json FILE] [--model M]`.

Parts, most important first, each in a process of its own, as far as the budget goes:

    bits         tiny models in all placements: losses, norms and weights equal to those of none/none, bit for bit
    copies       to and from the engine's host memory, one way and both at once. Bound: the same bytes to and from
                 torch's own pinned memory
    rates        matrix products in a plain loop, the optimizer, the drive
    none/none    steps of the model, a part for each placement (weights/states). Bound of the time: the step of
    nvme/nvme    none/none, where both stay on the device. Bound of the bytes: 26 for each parameter and step
    …
    13B layers   four layers of the width of 13B, all on the drive, in 24 GiB of the GPU
    tests        those of tests/ that need a GPU
    … in 24 GiB  placements again, in so much of the GPU
    DeepSpeed    the step of cpu/cpu by DeepSpeed, where it is installed
    7B, 13B      in 24 GiB of the GPU, states over RAM and drive as they have room, or as many layers as fit

`--only NAME` runs those whose names begin with it, and may repeat. `--part NAME` runs one of them alone, in this
process. Without a CUDA device it says so in one line; `--device cpu` shows that it works, and measures nothing of
interest. A GPU's other users are seen in the figures, so run it alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from offload.bench.gpu.copies import copies
from offload.bench.gpu.correctness import bits
from offload.bench.gpu.deepspeed import deepspeed_steps
from offload.bench.gpu.gpu_tests import gpu_tests
from offload.bench.gpu.parts import PARTS, PLANNED, Part, add_exposure, judge, run_child, run_parts
from offload.bench.gpu.planned import fit, room_of
from offload.bench.gpu.rates import rates
from offload.bench.gpu.report import machine, words
from offload.bench.gpu.training import measure_steps
from offload.bench.gpu.work import Save, Work, config_for
from offload.sizes import parse_size

_PASSED_ON = ("device", "model", "batch_size", "seq_len", "steps", "nbytes")
"""Options of the command that are those of a part's process too."""


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        why = "finds no CUDA device" if torch.version.cuda else "is built without CUDA"
        print(f"bench.gpu is skipped: torch {torch.__version__} {why}")
        return 0
    if given.part:
        _run_here(given)
        return 0
    return _run_all(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-minutes", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path(), help="for swap files: a folder on the drive to measure")
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"), help="where all figures go")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a placement, fewer where time is short")
    parser.add_argument("--nbytes", default="256MiB", help="bytes of one copy")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", metavar="NAME", help="only parts whose names begin so; may repeat")
    parser.add_argument("--part", choices=[part.name for part in PARTS], metavar="NAME", help="run this part alone")
    return parser


def _run_here(given: argparse.Namespace) -> None:
    device = torch.device(given.device, torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    seconds = 60 * given.budget_minutes - (time.time() - psutil.Process().create_time())  # imports take some of them
    nbytes = parse_size(given.nbytes)
    work = Work(
        device,
        given.folder,
        given.model,
        batch_size=given.batch_size,
        seq_len=given.seq_len,
        steps=given.steps,
        seconds=seconds,
        copy_nbytes=nbytes,
    )

    def save(figures: dict[str, Any]) -> None:
        _write(given.json, figures)

    part = next(part for part in PARTS if part.name == given.part)
    run_here(part, work._replace(**part.changes), save)
    print(given.json.read_text(), end="")


_WORK = {"bits": bits, "copies": copies, "rates": rates, "tests": gpu_tests, "DeepSpeed": deepspeed_steps}


def run_here(part: Part, work: Work, save: Save) -> None:
    """Run one part in this process."""
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


def _run_all(given: argparse.Namespace) -> int:
    chosen = [part for part in PARTS if not given.only or part.name.startswith(tuple(given.only))]
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "machine": machine(torch.device(given.device)),
        "given": {key: getattr(given, key) for key in ("budget_minutes", *_PASSED_ON)},
        "parts": {},
    }
    with _terminable(), tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=given.folder.resolve()) as folder:

        def run(part: Part, soft: float, hard: float) -> dict[str, Any]:
            print(f"{part.name} …", flush=True)
            return run_part(part.name, given, Path(folder), soft, hard)

        for name, result in run_parts(chosen, 60 * given.budget_minutes, run):
            report["parts"][name] = result
            add_exposure(report["parts"])
            _write(given.json, report)  # after each part: who ends this process early has what was measured
    print(f"\n{words(report)}\n\nall figures: {given.json}")
    return judge(report["parts"])


def run_part(name: str, given: argparse.Namespace, folder: Path, soft: float, hard: float) -> dict[str, Any]:
    """Run one part in a process of its own, that ends by itself about `soft` seconds from now, and by force at `hard`.

    `folder` is empty again afterwards: a part that was stopped leaves its swap files, a part that failed may.
    """
    files = folder / "swap"
    files.mkdir()
    figures = folder / "figures.json"
    command = [sys.executable, "-m", "bench.gpu", "--part", name, "--json", str(figures), "--folder", str(files)]
    command += ["--budget-minutes", str(soft / 60)]
    for key in _PASSED_ON:
        command += [f"--{key.replace('_', '-')}", str(getattr(given, key))]
    setting = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if name == "bits" else {}  # costs speed, so for no other part
    try:
        return run_child(command, figures, hard, HF_HUB_OFFLINE="1", **setting)
    finally:
        figures.unlink(missing_ok=True)
        shutil.rmtree(files)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, so that the part under way ends too and its files are removed."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(path: Path, value: Any) -> None:
    """Replace the file at once: a reader, or whoever kills this process, never finds half of it."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(beside, path)


if __name__ == "__main__":
    sys.exit(main())
