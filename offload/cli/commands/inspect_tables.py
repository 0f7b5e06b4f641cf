"""Tables of `offload inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from offload.errors import printable
from offload.sizes import count_of, format_decimal, format_size

ONE_SLOT = (
    ": written in place, nothing is committed; the files have no name, and their space is freed when the process ends"
)


def tables(content: Mapping[str, Any]) -> list[Table | str]:
    """Returns the tables and lines for a folder, by its kind: nvme path, run, checkpoint, or several checkpoints."""
    content = printable_in(content)
    kind = content["kind"]
    if kind == "nvme_path":
        none = escape(f"there are no runs in {content['path']}")
        return [_runs_table(content["runs"]) if content["runs"] else none]
    if kind == "checkpoints":
        return [_checkpoints_table(content)]
    if kind == "checkpoint":
        return [_checkpoint_table(content)]
    return [_run_table(content), *(_rank_table(rank) for rank in content["ranks"])]


def printable_in(value: Any) -> Any:
    """Returns JSON with all texts printable: those of files of others too."""
    if isinstance(value, Mapping):
        return {printable(str(key), lines=False): printable_in(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [printable_in(inner) for inner in value]
    return printable(value, lines=False) if isinstance(value, str) else value


def _runs_table(runs: list[dict[str, Any]]) -> Table:
    # A narrow terminal must not cut the name of a run short, which `offload rm` asks for.
    run_name, mode = (Column(title, overflow="fold") for title in ("run", "mode"))
    table = Table(run_name, "model", mode, "ranks", "last commit", "on disk", "used by", "", box=None)
    for run in runs:
        model = run["model"]
        newest = [rank["commits"][0] for rank in run["ranks"] if rank["commits"]]
        # A run resumes at a step that all ranks have committed: the oldest of the ranks' newest commits.
        last = min(newest, key=lambda commit: int(commit["serial"]), default=None)
        table.add_row(
            escape(run["run"]),
            "" if model is None else escape(f"{model['class']}, {model['parameters']:,}"),
            escape(run["mode"] or ""),
            str(run["world_size"] or ""),
            "" if last is None else f"step {last['epoch']}, {_age(last['age_seconds'])} ago",
            format_size(run["allocated_bytes"]),
            escape(", ".join(sorted({rank["holder"] for rank in run["ranks"] if rank["holder"]}))),
            escape(_state(run)),
        )
    return table


def _state(run: Mapping[str, Any]) -> str:
    words = []
    if run["finished"] is not None:
        # The note is a JSON file that people may edit: absent keys must not fail the command.
        words.append(f"finished at step {run['finished'].get('steps', '?')}")
    words += sorted(
        {f"format {r['other_format'].split(',')[0].split()[-1]}" for r in run["ranks"] if r["other_format"]}
    )
    if any(rank["damaged"] for rank in run["ranks"]):
        words.append("damaged")
    if run["leftovers"]:
        words.append("leftovers")
    return ", ".join(words)


def _run_table(run: Mapping[str, Any]) -> Table:
    model = run["model"]
    rows: list[tuple[str, str]] = [("run", run["path"])]
    if model is not None:
        rows += [
            ("model", _model(model)),
            ("mode", run["mode"] or "unknown"),
            ("ranks", str(run["world_size"])),
            ("slots", f"{run['slots']}{'' if run['slots'] == 2 else ONE_SLOT}"),
            ("drives", ", ".join(run["drives"])),
            ("made by", f"offload {run['made_by']}"),
        ]
        if run["forked_from"] is not None:
            rows.append(("forked from", f"{run['forked_from']['run']}, step {run['forked_from']['step']}"))
    if run["model_files"]:
        rows.append(("frozen weights", f"read from {', '.join(run['model_files'])}"))
    rows.append(("on disk", format_size(run["allocated_bytes"])))
    if run["finished"] is not None:
        note = run["finished"]
        rows += [
            ("finished", f"at step {note.get('steps', '?')}, {note.get('date', 'date unknown')}"),
            (
                "",
                "finished.json notes it: --resume auto does not train the run again, and needs none of its swap files",
            ),
        ]
    if run["missing_ranks"]:
        # Each machine of a run across machines shows only the ranks on its own drives.
        rows.append(("missing", f"rank {', '.join(map(str, run['missing_ranks']))}: lost, or on another machine"))
    rows += [("left over", path) for path in run["leftovers"]]
    return _filled(rows)


def _rank_table(rank: Mapping[str, Any]) -> Table:
    rows = [("used by", rank["holder"] or "nobody")]
    if rank["run_id"]:
        rows.append(("run id", f"{rank['run_id']}, made {rank['created']}"))
    if rank["other_format"]:
        rows.append(("other format", rank["other_format"]))
    if rank["drive"]:
        # A drive after the first contains a part of the rank's states, but no commits.
        rows.append(("drive", f"number {rank['drive']} of the run; the commits are stored on the first"))
    for commit in rank["commits"]:
        words = f"step {commit['epoch']}, {commit['time']}, {_age(commit['age_seconds'])} ago, blob {commit['blob']}"
        rows.append((f"commit {commit['serial']}", f"{words} ({format_size(commit['blob_bytes'])})"))
    if not rank["commits"] and not rank["drive"] and not rank["other_format"]:
        rows.append(("commits", "none"))
    if rank["states"]:
        rows.append(("states", ", ".join(rank["states"])))
    rows += [(("on drive"), f"{format_size(d['allocated_bytes'])} in {d['path']}") for d in rank["drives"]]
    # Without a commit the list of written bytes is empty.
    for drive, nbytes in zip(rank["drives"], rank["written_bytes"], strict=False):
        rated = rank["rated_bytes"]
        share = "" if rated is None else f", {nbytes / rated:.2%} of the {format_decimal(rated)} that it is rated for"
        rows.append(("written", f"{format_decimal(nbytes)} to {drive['path']} in the life of the run{share}"))
    rows += [("damaged", f"{wrong['path']}: {wrong['reason']}") for wrong in rank["damaged"]]
    return _filled(rows, f"rank {rank['rank']}")


def _filled(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Returns a table with a row for each name and value. Values are plain text: a "[" in them is no markup."""
    table = Table(show_header=False, box=None, title=title, title_justify="left")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _checkpoints_table(content: Mapping[str, Any]) -> Table:
    """Returns one row per checkpoint of a folder, then the leftovers of interrupted saves."""
    table = Table("checkpoint", "step", "model", "mode", "ranks", "size", "saved", "", box=None)
    for checkpoint in content["checkpoints"]:
        words = ["latest"] if checkpoint["tag"] == content["latest"] else []
        words += ["damaged"] if checkpoint["damaged"] else []
        table.add_row(
            escape(checkpoint["tag"]),
            "" if checkpoint["epoch"] is None else str(checkpoint["epoch"]),
            ""
            if checkpoint["model"] is None
            else escape(f"{checkpoint['model']['class']}, {checkpoint['model']['parameters']:,}"),
            escape(checkpoint["mode"] or ""),
            str(checkpoint["world_size"] or ""),
            format_size(checkpoint["bytes"]),
            "" if checkpoint["age_seconds"] is None else f"{_age(checkpoint['age_seconds'])} ago",
            ", ".join(words),
        )
    by = content["saved_to_by"]
    for kind, then in (("leftovers", "the next save removes it"), ("set_aside", "the next save gives it its name")):
        for path in content[kind]:
            said = f"left over; {then}" if by is None else f"of a save that is under way, or left over: {by}"
            table.add_row(escape(Path(path).name), *[""] * 6, escape(said))
    return table


def _checkpoint_table(content: Mapping[str, Any]) -> Table:
    rows = [("checkpoint", content["path"])]
    if content["model"] is not None:
        frozen = "" if content["frozen_weights"] else ", without those that are frozen"
        rows += [
            ("step", str(content["epoch"])),
            ("saved", f"{content['created']}, {_age(content['age_seconds'])} ago"),
            ("model", f"{_model(content['model'])}{frozen}"),
            ("mode", content["mode"]),
            ("ranks", str(content["world_size"])),
            ("made by", f"offload {content['made_by']}"),
        ]
    rows.append(("size", format_size(content["bytes"])))
    rows += [("damaged", f"{wrong['path']}: {wrong['reason']}") for wrong in content["damaged"]]
    return _filled(rows)


def _model(model: Mapping[str, Any]) -> str:
    trained = "" if model["trainable"] == model["parameters"] else f", {model['trainable']:,} of them trained"
    return (
        f"{model['class']}, {count_of(model['parameters'], 'parameter')}{trained}, {count_of(model['units'], 'unit')}"
    )
