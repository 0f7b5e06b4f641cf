"""A model larger than the memory, from its first step to its scores: `python -m bench.larger FOLDER`. Needs root.

All commands run in one cgroup of `--memory` bytes, one after the other, with everything on the drive of FOLDER.
Options that this program does not know are for `offload train`.

    train           killed with SIGKILL when it has logged `--steps` steps
    train --resume  as many steps more
    export          the weights of the last commit, for transformers
    score           records by what was exported

With `--train-only` there is one life without commits, for the largest model that the drive holds. `--random-limits N`
gives such a life N cgroups in turn, with limits of 0.8 to 8 GiB that `--seed` draws: each must train, or be refused by
a `BudgetError` before its first step. All are run; the program then fails if any ended otherwise.

Each command reports its seconds and the peak of its memory, as the kernel counts it: `own` is memory of the processes'
own, `kernel` and `files` what the kernel had for them and of files at that moment, and `charged` the most of all three.
Pages of files give way to a limit. The report compares the peak with the sum of the run's start, and the seconds with
the prediction by the last `offload probe`. Bars: the kernel kills no command, 10 % of the seconds of a step, 5 % of the
peak, and the resumed run repeats the losses of the steps that it takes again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.measure import report
from bench.memory_limit import MemoryLimit, controller, memory_limit
from offload.cli.console import BAD_INPUT
from offload.finetune.model import byte_tokenizer
from offload.sizes import GIB, parse_size

_UNCOUNTED = 2
"""Steps of each life that are not counted: the first records the order of uses, the second still warms up."""
NO_ROOM = (
    "of memory beside what the process uses already, and",
    "this batch has no room:",
    "the least that works is",
    "is used by default:",
)
"""Words of the errors that refuse a run for its memory: those of its start, and the guard's in the first forward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3b", help="a preset, or a folder with a config.json at least")
    parser.add_argument("--memory", type=parse_size, default=parse_size("4GiB"), help="of all processes together")
    parser.add_argument("--steps", type=int, default=5, help="of each of the two lives")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--records", type=Path, default=Path(__file__), help="text that is scored")
    parser.add_argument("--train-only", action="store_true", help="one life, nothing kept: the disk holds more of it")
    parser.add_argument("--random-limits", type=int, default=0, help="number of limits in place of --memory")
    parser.add_argument("--seed", type=int, default=0, help="of the random limits")
    options, more = parser.parse_known_args()
    parent = controller()
    if parent is None:
        parser.error("needs a memory controller of cgroups, and root")
    log = options.folder / "larger.jsonl"
    log.unlink(missing_ok=True)
    model = _with_tokenizer(options.model, options.folder)
    train = ["train", "--model", model, "--run", "larger", "--log", str(log), "--seq-len", str(options.seq_len)]
    train += ["--nvme-path", str(options.folder), "--batch-size", "1", "--eval-every", "0", *more]
    about = {"model": options.model, "memory": options.memory, "tokens": options.seq_len}
    one_life = [*train, "--steps", str(options.steps), "--durability", "none", "--no-output"]
    if options.random_limits:
        draws = random.Random(options.seed)
        limits = [draws.randrange(8 * GIB // 10, 8 * GIB) for _ in range(options.random_limits)]
        ends = [_live_or_refuse(nbytes, parent, one_life, log, about) for nbytes in limits]
        failed = [nbytes for nbytes, end in zip(limits, ends, strict=True) if end == "failed"]
        if failed:
            raise SystemExit(f"{len(failed)} of {len(limits)} limits ended in no right way: {failed} bytes")
        return
    with memory_limit(options.memory, parent) as limit:
        if options.train_only:
            only = _run(limit, one_life)
            report("larger", {**about, **figures(_lines(log), _lines(log), only["own"])})
            report("larger, trained", only)
            return
        _live_twice(limit, [*train, "--steps", str(2 * options.steps), "--keep"], options, log, about)


def _live_or_refuse(nbytes: int, parent: Path, command: list[str], log: Path, about: dict[str, Any]) -> str:
    """Trains in a cgroup of `nbytes`, and reports and returns how that ended."""
    log.unlink(missing_ok=True)
    began, errors = time.monotonic(), log.with_suffix(".err")
    with memory_limit(nbytes, parent) as limit, errors.open("w") as stderr:
        returned = limit.run([sys.executable, "-m", "offload", *command], stderr=stderr)
        peak = {**limit.peak._asdict(), "charged": limit.charged}
    lines, words = _lines(log), errors.read_text()
    end = end_of(returned, len(lines), words)
    planned = next((line["about"]["planned_peak_bytes"] for line in lines if "about" in line), None)
    figures = {"memory": nbytes, "end": end, "seconds": time.monotonic() - began, **peak, "predicted_peak": planned}
    report("larger, limit", {**about, **figures, "error": None if end == "trained" else words.splitlines()[-1:]})
    return end


def end_of(returned: int, steps: int, words: str) -> str:
    """Returns how a run below a limit ended: "trained", "refused" for its memory before the first step, or "failed".

    Args:
        returned: its exit status.
        steps: steps in its log.
        words: what it wrote to stderr.
    """
    if not returned and steps:
        return "trained"
    errors = [line for line in words.splitlines() if line.startswith("error: ")]
    refused = returned == BAD_INPUT and not steps and any(part in line for line in errors[-1:] for part in NO_ROOM)
    return "refused" if refused else "failed"


def _live_twice(
    limit: MemoryLimit, train: list[str], options: argparse.Namespace, log: Path, about: dict[str, Any]
) -> None:
    """Trains, kills, resumes, exports and scores, and reports each; then removes the files on the drive."""
    exported = options.folder / "larger-model"
    shutil.rmtree(exported, ignore_errors=True)
    killed = _run(limit, [*train, "--resume", "restart"], until=lambda: len(_lines(log)) >= options.steps)
    before = _lines(log)
    again = _run(limit, [*train, "--resume", "must"])
    exports = _run(limit, ["export", str(options.folder / "larger"), str(exported)])
    scores = _run(limit, ["score", str(exported), "--data", str(options.records), "--json"])
    model = sum(path.stat().st_size for path in exported.iterdir())
    shutil.rmtree(exported)
    report("larger", {**about, "exported": model, **figures(before, _lines(log), killed["own"])})
    for name, command_figures in (("killed", killed), ("resumed", again), ("export", exports), ("score", scores)):
        report(f"larger, {name}", command_figures)
    subprocess.run([sys.executable, "-m", "offload", "rm", str(options.folder / "larger"), "--yes"], check=True)


def figures(before: list[dict[str, Any]], after: list[dict[str, Any]], peak: int) -> dict[str, Any]:
    """Returns what was measured, and what was predicted.

    Args:
        before: the log of the life that was killed.
        after: the log of both lives. The resumed life's steps replace the same steps of the killed life.
        peak: bytes of memory of the first life.
    """
    about: dict[str, Any] = next((line["about"] for line in after if "about" in line), {})
    steady = [line["seconds"] for line in before[_UNCOUNTED:]]
    seconds = statistics.median(steady) if steady else None
    lost = {line["step"]: line["loss"] for line in before}
    kept = {line["step"]: line["loss"] for line in after}
    return {
        "seconds": seconds,
        "predicted_seconds": about.get("predicted", {}).get("seconds"),
        "peak": peak,
        "predicted_peak": about.get("planned_peak_bytes"),
        "read": before[-1].get("read_bytes"),
        "written": before[-1].get("written_bytes"),
        "steps": max(kept),
        "differing": sum(loss != kept[step] for step, loss in lost.items()),
        "losses": [round(loss, 4) for _, loss in sorted(kept.items())],
    }


def _with_tokenizer(model: str, folder: Path) -> str:
    """Returns the model for `offload train`, which needs a tokenizer in a folder.

    Of a folder with nothing but a config, the config is copied into `folder`, with a tokenizer whose tokens are bytes.
    """
    source = Path(model)
    if not source.is_dir() or [path.name for path in source.iterdir()] != ["config.json"]:
        return model
    copy = folder / "larger-config"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy)
    byte_tokenizer().save_pretrained(copy)
    return str(copy)


def _lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _run(limit: MemoryLimit, command: Sequence[str], until: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Runs a command of `offload` below the limit; kills it when `until()` is true. Returns its seconds and peaks."""
    began = time.monotonic()
    returned = limit.run([sys.executable, "-m", "offload", *command], until)
    figures = {"seconds": time.monotonic() - began, **limit.peak._asdict(), "charged": limit.charged}
    if returned and not until():
        raise SystemExit(f"{' '.join(command)} ended with {returned}, after {figures}")
    return figures


if __name__ == "__main__":
    main()
