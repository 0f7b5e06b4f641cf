"""Storms of ten minutes find faults of the store and of threads: what `python -m tests.mutants storm` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.importing import VARIABLE

MINUTES = 10
"""In which a mutant must be found."""


@pytest.mark.skipif(VARIABLE not in os.environ, reason="needs a mutant: python -m tests.mutants storm")
@pytest.mark.timeout(60 * MINUTES + 600)
def test_no_storm_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.storm", "--seed", "0", "--minutes", str(MINUTES), "--stop"]
    command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
