"""`sys.exit` with a failure is no end of the run: no later start replaces it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
from offload.errors import StoreError
from tests.failures.test_spawned_processes import start
from tests.support.processes import warm_process

SCRIPT = """
import sys, threading
from pathlib import Path
from tests.failures.test_exit_status import start, train
engine = start(Path({folder!r}))
train(engine)
{ending}
"""
FAILS = {
    "a number": "sys.exit(1)",
    "words": "sys.exit('no more room')",
    "a caught error": "try:\n    raise ValueError('a bad batch')\nexcept ValueError:\n    sys.exit(2)",
}
DONE = {
    "nothing": "sys.exit()",
    "zero": "sys.exit(0)",
    "a thread's": "thread = threading.Thread(target=sys.exit, args=[1])\nthread.start()\nthread.join()",
    "caught": "try:\n    sys.exit(1)\nexcept SystemExit:\n    train(engine)",
}


def train(engine: offload.Engine) -> None:
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()


def ended(ending: str, folder: Path) -> tuple[int, str]:
    """Returns the status and the errors of a script that commits a step and ends as `ending` says."""
    done = warm_process.python(SCRIPT.format(folder=str(folder), ending=ending))
    return done.returncode, done.stderr


@pytest.mark.parametrize("how", FAILS)
def test_a_failure_keeps_the_run(how: str, tmp_path: Path) -> None:
    status, told = ended(FAILS[how], tmp_path)
    assert status == (2 if how == "a caught error" else 1) and ("no more room" in told) == (how == "words")
    assert "a start without it is refused while the run is there" in told
    with pytest.raises(StoreError, match="holds a run that did not end"):
        start(tmp_path)


@pytest.mark.parametrize("how", DONE)
def test_another_end_is_an_end_of_the_run(how: str, tmp_path: Path) -> None:
    status, told = ended(DONE[how], tmp_path)
    assert status == 0 and "a start without it begins anew" in told
    start(tmp_path).destroy(remove=True)
