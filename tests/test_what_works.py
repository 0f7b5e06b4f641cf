"""The page about what works says what the tests show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_page_is_of_these_tests() -> None:
    command = [sys.executable, "-m", "tests.what_works", "--check"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
