"""`python -m tests.mutants [WORD…]`: put each fault in, in a pytest process of its own, and show that a test goes red.

A mutant that no test kills, or whose text is no longer there, ends the command with 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from tests.mutants import MUTANTS
from tests.mutants.importing import VARIABLE
from tests.mutants.mutant import Mutant


def main() -> int:
    parser = argparse.ArgumentParser(description="show that the tests notice faults")
    parser.add_argument("words", nargs="*", help="only mutants whose name has one of these words")
    words = parser.parse_args().words
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    for tests in dict.fromkeys(mutant.tests for mutant in chosen):
        passed, tail = _run(None, tests)
        if not passed:
            print(f"without any mutant {tests} fails:\n{tail}")
            return 1
    survivors = 0
    for mutant in chosen:
        start = time.monotonic()
        passed, tail = _run(mutant, mutant.tests)
        survivors += passed
        reason = next((line for line in tail.splitlines() if line.startswith("FAILED")), "")
        print(
            f"{'SURVIVED' if passed else 'killed  '} {mutant.name} ({time.monotonic() - start:.0f} s) {reason}",
            flush=True,
        )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


def _run(mutant: Mutant | None, tests: str) -> tuple[bool, str]:
    """Whether the tests passed, and the end of what they printed."""
    environment = dict(os.environ, **({VARIABLE: mutant.name} if mutant else {}))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"--basetemp={folder}/t", tests]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    tail = done.stdout.strip().splitlines()[-3:]
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {tests}:\n{done.stdout}\n{done.stderr}")
    return done.returncode == 0, "\n".join(tail)


if __name__ == "__main__":
    raise SystemExit(main())
