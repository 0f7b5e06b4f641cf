"""Text about the machine and the figures of a benchmark."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch

import offload
from offload import kernels
from offload.bench.gpu.parts import DIRECTIONS, PARTS, figures_of, invalid
from offload.bench.gpu.training import PLACEMENTS
from offload.hardware.system import gpus, nvidia_smi, processor
from offload.sizes import GIB, format_size

_OF_A_DEVICE = ("name", "slice", "memory_bytes", "capability", "node", "link")


def machine(device: torch.device) -> dict[str, Any]:
    """Returns facts about the machine, and the versions of the measured software."""
    cuda = device.type == "cuda"
    seen = gpus()
    driver = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader") if cuda else None
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "gpu": properties.name if properties else None,
        "gpu_memory": properties.total_memory if properties else None,
        "driver": None if driver is None else driver.stdout.strip().partition("\n")[0] or None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        # The file is meant to be published, so UUID and PCI address of the user's card are left out.
        "devices": [{key: gpu[key] for key in _OF_A_DEVICE} for gpu in seen["devices"]] if cuda else [],
        "processor": processor(),
        "torch": torch.__version__,
        "offload": offload.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "cores": os.cpu_count(),
        "threads": kernels.thread_count(),
        "memory": psutil.virtual_memory().total,
        "kernel": os.uname().release,
    }


def words(report: Mapping[str, Any]) -> str:
    """Returns the report for people: one table for each kind of part, and a line for each part without figures."""
    parts = report["parts"]
    of_part = {"bits": _bits_words, "copies": _copies_words, "rates": _rates_words, "tests": _tests_words}
    blocks = [_machine_words(report["machine"])]
    blocks += [in_words(figures) for name, in_words in of_part.items() if (figures := figures_of(parts, name))]
    measured = dict(_measured(parts))
    blocks += _steps_words(measured, figures_of(parts, "rates").get("plain_matmul"))
    if profiled := _profiled_words(measured):
        blocks.append(profiled)
    ends = [f"{name} is INVALID: {why}" for name, why in invalid(parts).items()]
    ends += [f"{name}: {figures['fitted']}" for name, figures in measured.items() if "fitted" in figures]
    for name, part in parts.items():
        if why := figures_of(parts, name).get("skipped"):
            ends.append(f"{name} was skipped: {why}")
        if part["state"] == "stopped":
            had = "its figures are those so far" if part["figures"] else "it had no figures yet"
            ends.append(f"{name} was stopped when the budget was over; {had}")
        elif part["state"] == "failed":
            ends += [f"{name} FAILED with exit code {part['exit_code']}; its last lines:"]
            ends += [f"    {line}" for line in part["last_lines"]]
    left = [f"{name} ({part['needs_seconds']:.0f} s)" for name, part in parts.items() if part["state"] == "skipped"]
    if left:
        ends.append(f"not run, since the budget was over: {', '.join(left)}")
    return "\n\n".join([*blocks, *(["\n".join(ends)] if ends else [])])


def _machine_words(facts: Mapping[str, Any]) -> str:
    where = "the CPU"
    if facts["gpu"]:
        where = f"{facts['gpu']}, {format_size(facts['gpu_memory'])}, driver {facts['driver']}, CUDA {facts['cuda']}"
    memory = format_size(facts["memory"])
    return f"{where}; torch {facts['torch']}; {facts['cores']} cores, {memory} RAM, Linux {facts['kernel']}"


def _bits_words(figures: Mapping[str, Any]) -> str:
    lines = [f"bits: {figures['steps']} steps in each placement of weights/states against none/none"]
    for job, verdict in figures["jobs"].items():
        seen = [*verdict["equal"], *verdict["different"], *verdict["failed"]]
        absent = [name for name in PLACEMENTS if name not in seen]
        lines.append(f"  {job:12} equal: {', '.join(verdict['equal']) or 'none of them'}")
        lines += [f"  {'':12} DIFFERENT {name}: {'; '.join(how)}" for name, how in verdict["different"].items()]
        lines += [f"  {'':12} FAILED {name}: {error}" for name, error in verdict["failed"].items()]
        lines += [f"  {'':12} not compared: {', '.join(absent)}"] if absent else []
    return "\n".join(lines)


def _tests_words(figures: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{figures[how]} {how}" for how in ("passed", "failed", "error", "skipped") if how in figures)
    return "\n".join([f"tests that need a GPU: {counts or 'none'}", *(f"    {line}" for line in figures["last_lines"])])


def _copies_words(figures: Mapping[str, Any]) -> str:
    rows = [[f"copies of {format_size(figures['nbytes'])}", "GB/s", "pinned GB/s", "of pinned", ""]]
    for way in DIRECTIONS:
        if way in figures:
            row = figures[way]
            numbers = [row["gigabytes_per_second"], row["pinned_gigabytes_per_second"], row["fraction_of_pinned"]]
            rows.append([way, *(f"{number:.2f}" for number in numbers), "" if row["right"] else "WRONG BYTES"])
    pinned, host = format_size(figures["pinned_bytes"]), format_size(figures["host_bytes"])
    return f"{columns(rows)}\n{pinned} of the engine's {host} are pinned"


def _rates_words(figures: Mapping[str, Any]) -> str:
    line = (
        f"matrix products in a plain loop {figures['plain_matmul'] / 1e12:.1f} TFLOP/s, "
        f"AdamW on the host {figures['optimizer'] / 1e9:.2f} G parameters/s"
    )
    if drive := figures.get("drive"):
        read, write, both = (drive[way] / 1e9 for way in ("read", "write", "mixed"))
        line += f"; the drive reads {read:.2f}, writes {write:.2f}, does both at {both:.2f} GB/s"
    return line


def _measured(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the name and the figures of each part with timed steps; of another loop beside, with that loop's name."""
    for part in PARTS:
        figures = figures_of(parts, part.name)
        if "step_seconds" in figures:
            yield part.name, figures
        for loop, beside in figures.get("other_loops", {}).items():
            yield f"{part.name} by {loop}", beside


_WAITS = ("exposed_io_seconds", "read_wait_seconds", "update_wait_seconds")
_WAYS = ("read", "written", "uploaded", "downloaded")
_TITLES = (
    "weights/states|tokens/s|TFLOPS 6N|TFLOPS 8N|of matmul|step s|over none/none|I/O s|reads s|updates s|"
    "read B/p|written B/p|up B/p|down B/p|peak HBM|peak RSS|steps"
)


def _steps_words(measured: Mapping[str, Mapping[str, Any]], matmul: float | None) -> list[str]:
    """Returns one table for each model. The column "of matmul" counts 8N with recomputation, else 6N."""
    tables: dict[str, list[list[str]]] = {}
    for name, figures in measured.items():
        rows = tables.setdefault(_head(figures), [_TITLES.split("|")])
        over, peak = figures.get("exposed_seconds"), figures["peak_device_bytes"]
        done = figures["teraflops_8n" if figures["recompute"] else "teraflops_6n"] * 1e12
        row = [name, f"{figures['tokens_per_second']:,.0f}"]
        row += [f"{figures['teraflops_6n']:.1f}", f"{figures['teraflops_8n']:.1f}"]
        row += ["-" if matmul is None else f"{done / matmul:.0%}", f"{figures['step_seconds']:.3f}"]
        row += ["-" if over is None else f"{over:+.3f}", *(_cell(figures.get(wait), ".3f") for wait in _WAITS)]
        row += [_cell(figures.get(f"{way}_bytes_per_parameter"), ".1f") for way in _WAYS]
        row += ["-" if peak is None else f"{peak / GIB:.1f} GiB", f"{figures['peak_host_bytes'] / GIB:.1f} GiB"]
        rows.append([*row, str(figures["steps"])])
    return [f"{head}\n{columns(rows)}" for head, rows in tables.items()]


def _cell(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def _head(figures: Mapping[str, Any]) -> str:
    layers = "" if figures["layers"] is None else f"{figures['layers']} layers of "
    again = ", activations computed again" if figures["recompute"] else ""
    count = figures.get("micro_batches", 1)
    divided = f" in {count} micro-batches" if count > 1 else ""
    return (
        f"{layers}{figures['model']}, {figures['parameters']:,} parameters, bf16, a step is "
        f"{figures['tokens_per_step']:,} tokens{divided}{again}"
    )


def _profiled_words(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table with the profiled step of each part; empty if no step was profiled."""
    rows = [["one step, by the profiler", "step s", "kernels s", "copies s", "exposed copies", "idle"]]
    for name, figures in measured.items():
        if seen := figures.get("profiled"):
            shares = (f"{seen[key] / seen['seconds']:.1%}" for key in ("exposed_copies", "idle"))
            rows.append([name, *(f"{seen[key]:.3f}" for key in ("seconds", "kernels", "copies")), *shares])
    return columns(rows) if len(rows) > 1 else ""


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of equal length as lines: the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
