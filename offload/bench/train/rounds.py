"""The rounds of `offload bench train`: contenders take turns, and the drive is measured between the rounds."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from offload.bench.child_process import run_child
from offload.bench.drive import Rates, drive_rates, median_rates
from offload.bench.train.plan import Contender, Job, Plan, reason_to_skip
from offload.bench.train.trainer import model_of
from offload.launch.commands import module_command
from offload.sizes import MIB

_PROBE_BYTES = 256 * MIB
_LONGEST = 900.0
"""Seconds after which a turn is ended. The first of DeepSpeed compiles its operators, for minutes."""


class Result(NamedTuple):
    """What the rounds have shown."""

    rates: Rates
    """Medians of the drive's rates before, between and after the rounds."""
    turns: dict[str, list[dict[str, Any]]]
    """Figures of each turn by the contender's name; none for one that did not train."""
    refused: dict[str, str]
    """Contenders that did not train, or failed in a later round, each with the reason."""


def measure(plan: Plan, tell: Callable[[str], None] = lambda _: None) -> Result:
    """Runs all rounds. What is written into the plan's folder is removed afterwards.

    Each turn is a process of its own, so no contender holds memory while another is measured. One that fails takes no
    further turns.

    Args:
        plan: the settings.
        tell: receives a line about the progress.

    Raises:
        OffloadError: the drive fails.
    """
    rates: list[Rates] = []
    turns: dict[str, list[dict[str, Any]]] = {each.name: [] for each in plan.contenders}
    refused: dict[str, str] = {}
    for each in plan.contenders:
        if reason := reason_to_skip(each, plan.device):
            refused[each.name] = f"skipped: {reason}"
    with tempfile.TemporaryDirectory(prefix="bench-train-", dir=plan.folder) as name:
        folder = Path(name)
        tell("the weights with which all begin")
        _write_weights(plan, folder / "model.safetensors")
        # Rates drift with time as steps do, so they are measured before, between and after the rounds.
        with drive_rates([folder / "probe"], _PROBE_BYTES) as drive:
            for number in range(plan.rounds):
                tell(f"round {number + 1} of {plan.rounds}: the drive")
                rates.append(drive())
                for each in plan.contenders:
                    if each.name in refused:
                        continue
                    tell(f"round {number + 1} of {plan.rounds}: {each.name}")
                    figures = _turn(plan, each, folder)
                    if "error" in figures:
                        refused[each.name] = figures["error"]
                    else:
                        turns[each.name].append(figures)
            rates.append(drive())
    return Result(median_rates(rates), turns, refused)


def _write_weights(plan: Plan, path: Path) -> None:
    from safetensors.torch import save_model

    save_model(model_of(plan.model), str(path))


def _turn(plan: Plan, contender: Contender, folder: Path) -> dict[str, Any]:
    """Runs one turn in a process of its own and returns its figures; of one that failed the "error"."""
    files, written = folder / "swap", folder / "figures.json"
    files.mkdir()
    job = Job(
        contender=contender.name,
        folder=str(files),
        weights=str(folder / "model.safetensors"),
        device=plan.device,
        model=plan.model,
        batch_size=plan.batch_size,
        seq_len=plan.seq_len,
        micro_batches=plan.micro_batches,
        dtype=plan.dtype,
        steps=plan.steps,
    )
    command = [*module_command(sys.executable, "offload.bench.train"), json.dumps(job._asdict()), str(written)]
    threads = str(plan.threads)
    try:
        result = run_child(
            command, written, _LONGEST, OMP_NUM_THREADS=threads, OFFLOAD_THREADS=threads, HF_HUB_OFFLINE="1"
        )
    finally:
        shutil.rmtree(files)
        written.unlink(missing_ok=True)
    figures: dict[str, Any] | None = result["figures"]
    # A process that is stopped, or killed by the system, has written no error.
    if result["state"] == "stopped":
        return {"error": f"stopped after {_LONGEST / 60:.0f} minutes"}
    if figures is None:
        last = (result["last_lines"] or ["no words"])[-1]
        return {"error": f"ended with exit code {result['exit_code']}: {last}"}
    # A process that fails while it ends, after its figures, has trained all the same.
    return figures
