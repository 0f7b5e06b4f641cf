"""Search for the `aio` block that suits a drive, and its insertion into a config."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio import Bandwidth
from offload.aio.measure import TimedTransfer
from offload.bench.io import Case, make_plan, passes_of
from offload.config import load_config, read_json
from offload.config.edit import set_in_block
from offload.fileio import atomic_write, check_writable
from offload.sizes import MIB

BLOCKS = tuple(MIB * n // 2 for n in (1, 2, 4, 8, 16))
DEPTHS = (4, 8, 16, 32, 64)
_MOST_IN_FLIGHT = 256 * MIB
_FINALISTS = 6
_AS_GOOD = 0.97
"""Fraction of the best rate from which a trial counts as equally good. Among equal trials, the one with the fewest
bytes in flight wins: an urgent read then waits less.
"""


class Trial(NamedTuple):
    """A shape of the queue with its bandwidth, medians of the rounds."""

    block_bytes: int
    depth: int
    rate: Bandwidth


class Found(NamedTuple):
    """The winner, with all trials of the last rounds, best first."""

    backend: str
    best: Trial
    trials: tuple[Trial, ...]

    @property
    def aio(self) -> dict[str, int]:
        """The `aio` block as in DeepSpeed's JSON."""
        return {"block_size": self.best.block_bytes, "queue_depth": self.best.depth, "intra_op_parallelism": 1}


def tune(
    folders: Sequence[str],
    backend: str,
    nbytes: int = 512 * MIB,
    rounds: int = 3,
    tell: Callable[[str], None] = lambda _: None,
) -> Found:
    """Tries every shape once, then the best ones `rounds` times in turns; returns the winner and the finalists."""
    plan = make_plan(
        folders, backends=[backend], blocks=BLOCKS, depths=DEPTHS, operations=("write", "read"), nbytes=nbytes,
        rounds=1, with_fio=False,
    )  # fmt: skip
    # A queue for more bytes than the file's would never be full, so such shapes are left out.
    cases = [case for case in plan.cases if case.block_bytes * case.depth <= min(_MOST_IN_FLIGHT, plan.nbytes)]
    # A short first round of all shapes, then a fair comparison of the few that are left.
    first = trials_of(passes_of(replace(plan, cases=tuple(cases or plan.cases[:1])), tell))
    # One round is noisy, as the drive of a shared machine varies twofold: its best shapes are only candidates.
    finalists = tuple(Case(backend, trial.block_bytes, trial.depth) for trial in first[:_FINALISTS])
    last = trials_of(passes_of(replace(plan, cases=finalists, rounds=rounds), tell))
    return Found(backend, choose(last), tuple(last))


def trials_of(passes: Mapping[tuple[Case, str], list[TimedTransfer]]) -> list[Trial]:
    """Returns the trials of all cases, best first."""

    def rate(case: Case, operation: str) -> float:
        return statistics.median(timed.nbytes / timed.seconds for timed in passes[case, operation])

    cases = dict.fromkeys(case for case, _ in passes)
    trials = [Trial(c.block_bytes, c.depth, Bandwidth(rate(c, "read"), rate(c, "write"))) for c in cases]
    return sorted(trials, key=lambda trial: -trial.rate.swap)


def choose(trials: Iterable[Trial]) -> Trial:
    """Returns the trial with the fewest bytes in flight among the trials that are as good as the best."""
    trials = list(trials)
    best = max(trial.rate.swap for trial in trials)
    good = [trial for trial in trials if trial.rate.swap >= _AS_GOOD * best]
    return min(good, key=lambda trial: (trial.block_bytes * trial.depth, -trial.rate.swap))


def check_config(source: Path, target: Path) -> None:
    """Checks that `source` is a config, if it exists, and that `target` can be written: a measurement takes minutes."""
    if source.exists():
        load_config(read_json(source))
    check_writable(target, "--config" if target == source else "--output")


def write_config(source: Path, target: Path, aio: dict[str, int]) -> None:
    """Writes the text of `source`, or an empty config, to `target` with the keys of `aio`, atomically.

    No other character of the text changes. `source` may be missing; `target` keeps its mode.
    """
    check_config(source, target)
    text = source.read_bytes().decode() if source.exists() else "{}\n"  # as bytes: they keep the ends of their lines
    # `thread_count` is the older name of `intra_op_parallelism`; a config must not contain both.
    atomic_write(target, set_in_block(text, "aio", aio, {"thread_count": "intra_op_parallelism"}))


def as_json(tuned: Found) -> dict[str, Any]:
    """Returns the content that `--json` prints."""
    return {
        "backend": tuned.backend,
        "aio": tuned.aio,
        "trials": [
            {
                "block_size": trial.block_bytes,
                "queue_depth": trial.depth,
                "read_gb_per_s": round(trial.rate.read / 1e9, 3),
                "write_gb_per_s": round(trial.rate.write / 1e9, 3),
            }
            for trial in tuned.trials
        ],
    }
