"""The native I/O core keeps its promises without Python too: tests/native, which `make sanitize` runs as well."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

NAMES = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
COMPILER = next((name for name in NAMES if name and shutil.which(name.split()[0])), None)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_every_native_test_passes(tmp_path: Path) -> None:
    assert COMPILER is not None
    environment = os.environ | {"CXX": COMPILER, "OPTIMIZE": "-O0", "BUILD": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "sanitize.sh"), "plain"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    listed = sum(path.read_text().count("\nTEST(") for path in (ROOT / "tests" / "native").glob("*_test.cpp"))
    assert done.returncode == 0 and f"\n{listed} passed\n" in done.stdout, done.stdout
