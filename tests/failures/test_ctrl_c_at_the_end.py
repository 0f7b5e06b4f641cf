"""A Ctrl-C while an engine ends, by `destroy` or at exit, is told in words, with the run that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failures.test_exit_status import train
from tests.failures.test_spawned_processes import start
from tests.support.processes import warm_process

SCRIPT = """
import os, signal
from offload import testing
from pathlib import Path
from tests.failures.test_exit_status import train
from tests.failures.test_spawned_processes import start
engine = start(Path({folder!r}), durability={{"every": 2}})
for _ in range(3):
    train(engine)
testing.inspect(engine).update_worker.come_to_rest = lambda: os.kill(os.getpid(), signal.SIGINT)
{ending}
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "ending", ["", "engine.destroy()", "engine.destroy(remove=True)"], ids=["at exit", "destroy", "remove"]
)
def test_the_run_is_kept_and_told(ending: str, tmp_path: Path) -> None:
    done = warm_process.python(SCRIPT.format(folder=str(tmp_path), ending=ending))
    assert done.stderr.count("the run is kept in") == 1, done.stderr
    assert "at step 2, the last committed one of 3" in done.stderr
    assert "is refused while the run is there" in done.stderr
    if not ending:
        assert "at exit: stopped by Ctrl-C" in done.stderr and "Traceback" not in done.stderr
    assert (done.returncode == 0) == (not ending), "Python's status, whatever a handler at exit meets"
    engine = start(tmp_path, durability={"every": 2}, resume="must")
    assert engine.global_steps == 2
    train(engine)
    engine.destroy(remove=True)
