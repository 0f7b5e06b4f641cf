"""A model larger than the memory, from its first step to its scores: `python -m bench.larger FOLDER`. Needs root.

All commands run in one cgroup (v1) of `--memory` bytes, one after the other, with everything on the drive of FOLDER.
Options that this program does not know are for `offload train`.

    train           killed with SIGKILL when it has logged `--steps` steps
    train --resume  as many steps more
    export          the weights of the last commit, for transformers
    score           records by what was exported

With `--train-only` there is one life without commits, for the largest model that the drive holds. `--random-limits N`
gives such a life N cgroups in turn, with limits of 0.8 to 8 GiB that `--seed` draws: each must train, or end in an
error of this library before its first step.

Each says its seconds and the peak of its memory, as the kernel counts it: `peak` is memory of the processes' own,
`charged` has what the kernel kept of files too, which gives way. The sum of the run's start stands beside its peak, and
the prediction by the last `offload probe` beside its seconds. Bars: no command is killed by the kernel, 10 % of the
seconds of a step, 5 % of the peak, and the resumed run repeats the losses of the steps that it takes again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.measure import report
from offload.cli.console import BAD_INPUT
from offload.sizes import GIB, parse_size

_MEMORY = Path("/sys/fs/cgroup/memory")
_LOOK_SECONDS = 0.02
_UNCOUNTED = 2
"""Steps of each life that are not counted: the first records the order of uses, the second still warms up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3b", help="a preset, or a folder with a config.json")
    parser.add_argument("--memory", type=parse_size, default=parse_size("4GiB"), help="of all processes together")
    parser.add_argument("--steps", type=int, default=5, help="of each of the two lives")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--records", type=Path, default=Path(__file__), help="text that is scored")
    parser.add_argument("--train-only", action="store_true", help="one life, nothing kept: the disk holds more of it")
    parser.add_argument("--random-limits", type=int, default=0, help="number of limits in place of --memory")
    parser.add_argument("--seed", type=int, default=0, help="of the random limits")
    options, more = parser.parse_known_args()
    log = options.folder / "larger.jsonl"
    log.unlink(missing_ok=True)
    train = ["train", "--model", options.model, "--run", "larger", "--log", str(log), "--seq-len", str(options.seq_len)]
    train += ["--nvme-path", str(options.folder), "--batch-size", "1", "--eval-every", "0", *more]
    about = {"model": options.model, "memory": options.memory, "tokens": options.seq_len}
    one_life = [*train, "--steps", str(options.steps), "--durability", "none", "--no-output"]
    if options.random_limits:
        draws = random.Random(options.seed)
        for _ in range(options.random_limits):
            _live_or_refuse(draws.randrange(8 * GIB // 10, 8 * GIB), one_life, log, about)
        return
    with _limited(options.memory) as limit:
        if options.train_only:
            only = limit.run(one_life)
            report("larger", {**about, **figures(_lines(log), _lines(log), only["peak"])})
            report("larger, trained", only)
            return
        _live_twice(limit, [*train, "--steps", str(2 * options.steps), "--keep"], options, log, about)


def _live_or_refuse(nbytes: int, command: list[str], log: Path, about: dict[str, Any]) -> None:
    """Trains in a cgroup of `nbytes`, where an error before the first step is a right end too."""
    log.unlink(missing_ok=True)
    with _limited(nbytes) as limit:
        life = limit.run(command, may_refuse=True)
    lines = _lines(log)
    planned = next((line["about"]["planned_peak_bytes"] for line in lines if "about" in line), None)
    report("larger, limit", {**about, "memory": nbytes, **life, "predicted_peak": planned, "lines": len(lines)})
    if life["returned"] and lines:
        raise SystemExit(f"a limit of {nbytes} bytes ended the run after {len(lines)} lines of its log")


def _live_twice(limit: _Limit, train: list[str], options: argparse.Namespace, log: Path, about: dict[str, Any]) -> None:
    """Trains, kills, resumes, exports and scores, and reports each; then removes the files on the drive."""
    exported = options.folder / "larger-model"
    shutil.rmtree(exported, ignore_errors=True)
    killed = limit.run([*train, "--resume", "restart"], until=lambda: len(_lines(log)) >= options.steps)
    before = _lines(log)
    again = limit.run([*train, "--resume", "must"])
    exports = limit.run(["export", str(options.folder / "larger"), str(exported)])
    _write_tokenizer(exported)
    scores = limit.run(["score", str(exported), "--data", str(options.records), "--json"])
    model = sum(path.stat().st_size for path in exported.iterdir())
    shutil.rmtree(exported)
    report("larger", {**about, "exported": model, **figures(before, _lines(log), killed["peak"])})
    for name, came in (("killed", killed), ("resumed", again), ("export", exports), ("score", scores)):
        report(f"larger, {name}", came)
    subprocess.run([sys.executable, "-m", "offload", "rm", str(options.folder / "larger"), "--yes"], check=True)


def figures(before: list[dict[str, Any]], after: list[dict[str, Any]], peak: int) -> dict[str, Any]:
    """Returns measured beside predicted.

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


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose tokens are bytes, as which a preset reads its text."""
    # Byte-level BPE names each byte by a character of its own; without merges each byte is a token.
    tokens = pre_tokenizers.ByteLevel.alphabet()
    printed = [byte for byte in range(256) if (chr(byte) in tokens)]
    others = [byte for byte in range(256) if byte not in printed]
    names = {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class _Limit:
    """A cgroup with a limit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, command: Sequence[str], until: Any = None, may_refuse: bool = False) -> dict[str, Any]:
        """Runs a command of `offload` in the cgroup; kills it when `until()` is true. Returns its seconds and peaks.

        With `may_refuse` the command may end in an error about what it was given, such as its memory.
        """
        began, peak = time.monotonic(), 0
        (self._folder / "memory.max_usage_in_bytes").write_text("0")
        process = subprocess.Popen([sys.executable, "-m", "offload", *command], preexec_fn=self._enter)
        while process.poll() is None:
            peak = max(peak, self._rss())
            if until is not None and until():
                process.send_signal(signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
        came = {"seconds": time.monotonic() - began, "peak": peak, "returned": process.returncode}
        refused = may_refuse and process.returncode == BAD_INPUT
        if process.returncode and not refused and not (until is not None and until()):
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}, after {came}")
        return came | {"charged": int((self._folder / "memory.max_usage_in_bytes").read_text())}

    def _enter(self) -> None:
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def _rss(self) -> int:
        rows = (line.split() for line in (self._folder / "memory.stat").read_text().splitlines())
        return next(int(value) for name, value in rows if name == "rss")


@contextlib.contextmanager
def _limited(nbytes: int) -> Iterator[_Limit]:
    """Yields a cgroup whose processes have `nbytes` of memory together."""
    folder = _MEMORY / f"offload-larger-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(nbytes))
        yield _Limit(folder)
    finally:
        folder.rmdir()


if __name__ == "__main__":
    main()
