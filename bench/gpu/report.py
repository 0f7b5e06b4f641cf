"""What was measured, and on what, in words."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch

import offload
from bench.gpu.parts import figures_of
from bench.gpu.work import PLACEMENTS
from offload import kernels
from offload.sizes import GIB, format_size


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "gpu": properties.name if properties else None,
        "gpu_memory": properties.total_memory if properties else None,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "offload": offload.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "cores": os.cpu_count(),
        "threads": kernels.thread_count(),
        "memory": psutil.virtual_memory().total,
        "kernel": os.uname().release,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip().partition("\n")[0] or None


def words(report: Mapping[str, Any]) -> str:
    """The report for people: one table for each kind of part, and a line for each part without figures."""
    parts = report["parts"]
    blocks = [_machine_words(report["machine"])]
    if figures_of(parts, "bits"):
        blocks.append(_bits_words(figures_of(parts, "bits")))
    if figures_of(parts, "copies"):
        blocks.append(_copies_words(figures_of(parts, "copies")))
    if measured := {name: figures_of(parts, name) for name in PLACEMENTS if figures_of(parts, name)}:
        blocks.append(_steps_words(report, measured))
    ends = []
    for name, part in parts.items():
        if part["state"] == "stopped":
            had = "its figures are those so far" if part["figures"] else "it had no figures yet"
            ends.append(f"{name} was stopped when the budget was over; {had}")
        elif part["state"] == "failed":
            ends += [f"{name} FAILED with exit code {part['exit_code']}; its last lines:"]
            ends += [f"    {line}" for line in part["last_lines"]]
    if skipped := [name for name, part in parts.items() if part["state"] == "skipped"]:
        ends.append(f"not run, since the budget was over: {', '.join(skipped)}")
    return "\n\n".join([*blocks, *(["\n".join(ends)] if ends else [])])


def _machine_words(facts: Mapping[str, Any]) -> str:
    where = "the CPU"
    if facts["gpu"]:
        where = f"{facts['gpu']}, {format_size(facts['gpu_memory'])}, driver {facts['driver']}, CUDA {facts['cuda']}"
    memory = format_size(facts["memory"])
    return f"{where}; torch {facts['torch']}; {facts['cores']} cores, {memory} RAM, Linux {facts['kernel']}"


def _bits_words(figures: Mapping[str, Any]) -> str:
    lines = [f"bits: {figures['steps']} steps in each placement of weights/states against none/none"]
    for job, found in figures["jobs"].items():
        seen = [*found["equal"], *found["different"], *found["failed"]]
        absent = [name for name in PLACEMENTS if name not in seen]
        lines.append(f"  {job:12} equal: {', '.join(found['equal']) or 'none of them'}")
        lines += [f"  {'':12} DIFFERENT {name}: {'; '.join(how)}" for name, how in found["different"].items()]
        lines += [f"  {'':12} FAILED {name}: {error}" for name, error in found["failed"].items()]
        lines += [f"  {'':12} not compared: {', '.join(absent)}"] if absent else []
    return "\n".join(lines)


def _copies_words(figures: Mapping[str, Any]) -> str:
    rows = [[f"copies of {format_size(figures['nbytes'])}", "GB/s", "pinned GB/s", "of pinned", ""]]
    for way in ("upload", "download"):
        if way in figures:
            row = figures[way]
            numbers = [row["gigabytes_per_second"], row["pinned_gigabytes_per_second"], row["fraction_of_pinned"]]
            rows.append([way, *(f"{number:.2f}" for number in numbers), "" if row["right"] else "WRONG BYTES"])
    pinned, host = format_size(figures["pinned_bytes"]), format_size(figures["host_bytes"])
    return f"{columns(rows)}\n{pinned} of the engine's {host} are pinned"


def _steps_words(report: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> str:
    given, some = report["given"], next(iter(measured.values()))
    head = (
        f"{given['model']}, {some['parameters']:,} parameters, bf16, a step is {given['batch_size']} x "
        f"{given['seq_len']} tokens"
    )
    titles = "weights/states|tokens/s|step s|over none/none|copies s|I/O s|reads s|updates s"
    rows = [f"{titles}|read B/p|written B/p|peak HBM|peak RSS|steps".split("|")]
    for name, figures in measured.items():
        over, peak = figures.get("exposed_seconds"), figures["peak_device_bytes"]
        waits = ("exposed_copy_seconds", "exposed_io_seconds", "read_wait_seconds", "update_wait_seconds")
        row = [name, f"{figures['tokens_per_second']:,.0f}", f"{figures['step_seconds']:.3f}"]
        row += ["-" if over is None else f"{over:+.3f}", *(f"{figures[wait]:.3f}" for wait in waits)]
        row += [f"{figures[f'{way}_bytes_per_parameter']:.1f}" for way in ("read", "written")]
        row += ["-" if peak is None else f"{peak / GIB:.1f} GiB", f"{figures['peak_host_bytes'] / GIB:.1f} GiB"]
        rows.append([*row, str(figures["steps"])])
    return f"{head}\n{columns(rows)}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
