"""The page of `offload bench card` as text: tables, and bars that add up to a step. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.bench.card import MODELS, OTHER, READS, UPDATES
from offload.bench.gpu.report import columns
from offload.hardware.probe import from_json
from offload.sizes import format_size

_WIDTH = 50
"""Characters of the longest bar."""
_MARKS = {"kernels": "#", "compute": "#", UPDATES: "u", READS: "r", "copies": "c", "receiver": "g", OTHER: "."}
"""Characters of a bar by what the time goes to."""


def page(report: Mapping[str, Any]) -> str:
    """Returns the page as text."""
    blocks, rows = [_heading(report)], in_order(report["rows"])
    if rows:
        blocks += [_rows(report), *_bars(rows)]
    if "peers" in report:
        blocks.append(_peers(report["peers"]))
    if "text" in report:
        blocks.append(_text(report["text"]))
    ends = [f"{name}: {why}" for name, why in report["left_out"].items()]
    ends += [f"{name} FAILED: {why}" for name, why in report["failed"].items()]
    ends += [
        f"{row['model']} does not fit: {row['does_not_fit']}"
        for row in in_order(report["rows"])
        if "does_not_fit" in row
    ]
    ends += [f"the probe: {doubt}" for doubt in report.get("probe", {}).get("doubts", ())]
    return "\n\n".join([*blocks, *(["\n".join(ends)] if ends else [])])


def in_order(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows from the smallest model to the largest; the largest is planned first."""
    return sorted(rows, key=lambda row: MODELS.index(row["model"]))


def _heading(report: Mapping[str, Any]) -> str:
    facts, limit = report["machine"], report["given"]["gpu_memory"]
    where = facts["processor"]
    if facts["gpu"]:
        held = "" if limit is None else f", held to {format_size(limit)}"
        where = f"{facts['gpu']}, {format_size(facts['gpu_memory'])}{held}; {where}"
    software = f"torch {facts['torch']}, offload {facts['offload']}"
    lines = [f"{where}, {facts['cores']} cores, {format_size(facts['memory'])} of RAM; {software}"]
    if "probe" in report:
        probed = from_json(report["probe"])
        (drive,), rates = probed.drives, probed.rates
        of = rates.by_dtype["bf16"]
        copies = f"copies {rates.upload / 1e9:.1f} and {rates.download / 1e9:.1f} GB/s, " if facts["gpu"] else ""
        drives = f"the drive reads {drive.read / 1e9:.2f} and writes {drive.write / 1e9:.2f} GB/s"
        host = f"AdamW {of.optimizer / 1e9:.2f} G parameters/s, host memory {rates.memory / 1e9:.0f} GB/s"
        lines.append(f"measured before: products in bf16 {of.matmul / 1e12:.3g} Tflop/s, {copies}{host}, {drives}")
    return "\n".join(lines)


def _rows(report: Mapping[str, Any]) -> str:
    rows = in_order(report["rows"])
    names = next((list(row["resources"]) for row in rows if "resources" in row), [])
    gpu = "copies up" in names
    titles = ["model", "weights/states", "step", "tokens/s", *(f"{name} s" for name in names), "of bound"]
    titles += ["predicted/measured", *(["GPU peak"] if gpu else []), "RAM peak", "on the drive"]
    table = [titles]
    for row in rows:
        cells = [row["model"]]
        if "resources" not in row:
            model = row["model"]
            known = "does not fit" if "does_not_fit" in row else "left out" if model in report["left_out"] else "FAILED"
            if "planned" in row:
                known += f" ({row['planned']['seconds']:.3g} s predicted)"
            table.append(
                [*cells, row["planned"]["tiers"] if "planned" in row else "", known, *[""] * (len(titles) - 3)]
            )
            continue
        planned, figures = row["planned"], row["figures"]
        step = figures["step_seconds"]
        cells += [planned["tiers"], f"{step:.3f} s", f"{figures['tokens_per_second']:,.0f}"]
        cells += [f"{seconds:.3f}" for seconds in row["resources"].values()]
        cells += [f"{row['bound_seconds'] / step:.0%}", f"{planned['seconds'] / step:.2f}"]
        cells += [format_size(figures["peak_device_bytes"])] if gpu else []
        table.append([*cells, format_size(figures["peak_host_bytes"]), format_size(figures["disk_bytes"])])
    notes = [
        'Seconds of a resource are the least for its part of a step, measured in this run. "of bound" is the largest '
        "over the step."
    ]
    if names and not gpu:
        notes.append("Products and AdamW share the cores, so both together are one resource.")
    return "\n".join([columns(table), *notes])


def bar(divided: Mapping[str, float], width: int) -> str:
    """Returns a bar of `width` characters; the first characters of each layer are its share, rounded cumulatively."""
    whole, done, drawn = sum(divided.values()), 0.0, ""
    for name, seconds in divided.items():
        done += seconds
        drawn += _MARKS[name] * (round(width * done / whole) - len(drawn))
    return drawn


def _bars(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns where the time of one further step of each row goes, as bars that add up to the step."""
    shown = [(row["model"], row["figures"]["divided"]) for row in rows if "figures" in row]
    if not shown:
        return []
    table = [["one further step", "s", *(f"{_MARKS[name]} {name}" for name in shown[0][1])]]
    for model, divided in shown:
        table.append([model, f"{sum(divided.values()):.3f}", *(f"{seconds:.3f}" for seconds in divided.values())])
    width = max(len(model) for model, _ in shown)
    return [columns(table), "\n".join(f"{model:{width}}  {bar(divided, _WIDTH)}" for model, divided in shown)]


def _peers(peers: Mapping[str, Any]) -> str:
    shape = f"{peers['micro_batches']} x {peers['batch_size']} x {peers['seq_len']} tokens"
    table = [[f"{peers['model']}, {shape}", "step", "tokens/s", "over plain", "RAM peak", "GPU peak", "losses"]]
    for row in peers["rows"]:
        if row["step_seconds"] is None:
            table.append([row["name"], in_short(row["refused"]), *[""] * 5])
            continue
        difference = row["loss_difference"]
        losses = "" if difference is None else f"{difference:.0e}" if difference else "equal"
        gpu = "" if row["peak_device_bytes"] is None else format_size(row["peak_device_bytes"])
        over = "" if row["over_plain"] is None else f"{row['over_plain']:.2f}"
        cells = [f"{row['step_seconds']:.3f} s", f"{row['tokens_per_second']:,.0f}", over]
        table.append([row["name"], *cells, format_size(row["peak_host_bytes"]), gpu, losses])
    return columns(table)


_NO_ROOM = ("OutOfMemory", "out of memory", "BudgetError", "MemoryError", "exit code -9")
"""Words in the error of a contender that lacks memory; the system ends some by a SIGKILL."""


def in_short(reason: str | None) -> str:
    """Returns why a contender has no figures, as a cell."""
    if reason is None:
        return "no turn"
    if "is not installed" in reason or "No module named" in reason:
        return "not installed"
    if any(words in reason for words in _NO_ROOM):
        return "does not fit"
    return reason if "for time" in reason or "stopped after" in reason else f"failed: {reason}"


def _text(text: Mapping[str, Any]) -> str:
    plain, ours = text["last_ten"]
    how = "equal bits" if text["equal_bits"] else "OTHER BITS"
    steps = text["steps"]
    apart = max(steps // 6, 1)
    chosen = list(dict.fromkeys((1, *range(apart, steps + 1, apart))))
    table = [["loss after step", *map(str, chosen)]]
    for name, run in (("plain PyTorch", "plain"), ("offload", "whole")):
        table.append([name, *(f"{text['runs'][run]['losses'][step - 1]:.4f}" for step in chosen)])
    return "\n".join(
        [
            f"{text['model']}, {steps} steps on the source of Python's standard library",
            columns(table),
            f"largest difference {text['largest_difference']:.0e}; mean of the last ten {plain:.4f} and {ours:.4f}",
            f"a SIGKILL after step {text['killed_after']} with all states in files, a resume after step "
            f"{text['resumed_after']}: {how} of losses and weights, beside a run in memory that nobody killed",
        ]
    )
