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
KINDS = {"begin a collective under the hooks of the forward, in a storm": "node"}
"""Mutants that few storms of the usual draw can show, with the kind of storms that can."""


@pytest.mark.skipif(VARIABLE not in os.environ, reason="needs a mutant: python -m tests.mutants storm")
@pytest.mark.timeout(60 * MINUTES + 600)
def test_no_storm_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.storm", "--seed", "0", "--minutes", str(MINUTES), "--stop"]
    if kind := KINDS.get(os.environ[VARIABLE]):
        command += ["--kind", kind]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
