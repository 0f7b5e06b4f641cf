"""`python -m tests.storm`: runs storms for some minutes, or those of given seeds, and reduces each failure.

The command ends with 1 if any of them fails. `--seed 7 --count 1` repeats the storm of seed 7.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.storm import trial
from tests.storm.plan import KINDS, Plan, draw, simpler
from tests.support.oracle import start_server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description="random runs in random weather")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first seed; default: of the clock")
    parser.add_argument("--count", type=int, help="so many seeds, however long they take")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no storm after so many minutes")
    parser.add_argument("--jobs", type=int, default=2, help="storms at a time")
    parser.add_argument("--folder", type=Path, help="for swap files; default: in that for temporary files")
    parser.add_argument("--shrink", type=float, default=0.0, help="minutes of looking for a simpler plan that fails")
    parser.add_argument("--kind", choices=KINDS, default="", help="what ranks do in each storm; default: as drawn")
    parser.add_argument("--stop", action="store_true", help="begin no storm after the first failure")
    arguments = parser.parse_args()
    start_server("tests.storm.imported")
    folder = Path(tempfile.mkdtemp(prefix="offload-storm-", dir=arguments.folder))
    storms = _Storms(folder, arguments.kind)
    seeds = _Shared(_seeds(arguments.seed, arguments.count, arguments.minutes))
    if arguments.stop:
        seeds = _Shared(itertools.takewhile(lambda _: not storms.failed, seeds))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        workers = [pool.submit(lambda: [storms.weather(seed) for seed in seeds]) for _ in range(arguments.jobs)]
    for worker in workers:
        worker.result()
    print(storms.summary())
    for plan in storms.failed if arguments.shrink else ():
        print(f"simplest that fails: {shrunk(plan, folder, time.monotonic() + 60 * arguments.shrink)}")
    if not storms.failed:
        shutil.rmtree(folder)
    return 1 if storms.failed else 0


def _seeds(first: int, count: int | None, minutes: float) -> Iterator[int]:
    """Yields seeds until there are `count`, or, without that, until the time is over."""
    if count is not None:
        yield from range(first, first + count)
        return
    deadline = time.monotonic() + 60 * minutes
    for seed in itertools.count(first):
        if time.monotonic() > deadline:
            return
        yield seed


class _Shared:
    """An iterator from which several threads take."""

    def __init__(self, inner: Iterator[int]) -> None:
        self._inner, self._lock = inner, threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._inner)


class _Storms:
    """All storms of a run of the command."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Begins without a storm; those to come are in a folder, and of a kind if one is named."""
        self.failed: list[Plan] = []
        self._folder, self._kind, self._counts = folder, kind, Counter[str]()
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def weather(self, seed: int) -> None:
        """Runs the storm of a seed, and tells what was wrong."""
        plan = draw(seed, self._kind)
        faults = trial.run(plan, self._folder / str(seed))
        with self._lock:
            self._counts["storms"] += 1
            for fault in plan.faults:
                self._counts[fault.what] += 1
            if not faults:
                shutil.rmtree(self._folder / str(seed))
                return
            self.failed.append(plan)
            print(f"seed {seed} FAILED: {plan}")
            for words in faults[:8]:
                print(f"    {words}")
            kind = f" --kind {self._kind}" if self._kind else ""
            print(f"    repeat: python -m tests.storm --seed {seed} --count 1{kind}; files: {self._folder / str(seed)}")
            sys.stdout.flush()

    def summary(self) -> str:
        """Returns one line of what was run."""
        counts = ", ".join(f"{count} {what}" for what, count in self._counts.most_common())
        return f"{counts} in {(time.monotonic() - self._began) / 60:.1f} minutes; {len(self.failed)} failed"


def shrunk(plan: Plan, folder: Path, deadline: float) -> Plan:
    """Returns the simplest plan found until `deadline` (of the monotonic clock) that fails within three tries."""
    while time.monotonic() < deadline:
        for candidate in simpler(plan):
            if time.monotonic() < deadline and _fails(candidate, folder):
                plan = candidate
                break
        else:
            break
    return plan


def _fails(plan: Plan, folder: Path) -> bool:
    """Returns whether a plan fails within three tries; one whose calm run is impossible does not count."""
    for _ in range(3):
        place = Path(tempfile.mkdtemp(dir=folder))
        faults = trial.run(plan, place / "trial")
        shutil.rmtree(place)
        if faults:
            return not faults[0].startswith("the calm run")
    return False


if __name__ == "__main__":
    raise SystemExit(main())
