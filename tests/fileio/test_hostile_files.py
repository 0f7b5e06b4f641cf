"""Whatever a file contains, a reader returns or raises an error of this library, soon and in little memory."""

from __future__ import annotations

import random
import resource
import shutil
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from offload.errors import OffloadError
from tests.fileio.hostile_files import READERS

_LONGEST = 5
"""Seconds that no file may take, by far: the others take a thousandth."""
_MOST_NBYTES = 100_000_000


def _hang(*_: object) -> NoReturn:
    raise AssertionError(f"a file has taken {_LONGEST} s")


def _read(name: str, numbers: range, folder: Path) -> int:
    """Reads made-up files, and returns how many were refused."""
    reader, refused = READERS[name], 0
    before = signal.signal(signal.SIGALRM, _hang)
    try:
        for number in numbers:
            path = folder / str(number)
            path.mkdir()
            reader.make(random.Random(number), path)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            signal.alarm(_LONGEST)
            try:
                reader.read(path)
            except OffloadError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name} {number} has raised {type(error).__name__}") from error
            finally:
                signal.alarm(0)
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
            assert grown < _MOST_NBYTES, f"{name} {number} has taken {grown} bytes"
            shutil.rmtree(path)
    finally:
        signal.signal(signal.SIGALRM, before)
    return refused


@pytest.mark.parametrize("name", READERS)
def test_a_made_up_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    refused = _read(name, range(100), tmp_path)
    # Neither all, which would be refused at the door, nor none.
    assert name == "hosts" or 5 < refused < 100


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_made_up_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    _read(name, range(100, 2600), tmp_path)
