"""A system that lies about locks or time takes nothing from a run: whoever was there first ends, the newest stays."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from offload import testing
from offload.errors import EngineFailed, StoreError
from tests.failures import linear_engine
from tests.support.processes import warm_process

OTHER = """
from pathlib import Path
import pytest
from offload import testing
from tests.failures import linear_engine
testing.replace(pytest.MonkeyPatch(), "file.lock", lambda *_: None)
engine = linear_engine.start(Path({folder!r}), resume="must")
print("resumed after", engine.global_steps)
for _ in range(2):
    linear_engine.train(engine)
engine.destroy()
"""


def test_where_locks_keep_nobody_out_the_first_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS that locks on each host alone. What the first wrote later would be in the slots of the second."""
    testing.replace(monkeypatch, "file.lock", lambda *_: None)
    first = linear_engine.start(tmp_path)
    linear_engine.train(first)
    testing.settle(first)
    done = warm_process.python(OTHER.format(folder=str(tmp_path)), cwd=Path.cwd())
    assert done.returncode == 0 and "resumed after 1" in done.stdout, done.stderr
    with pytest.raises((EngineFailed, StoreError)) as caught:
        for _ in range(3):
            linear_engine.train(first)
    assert re.search(r"rank0 is used by process \d+ on .* too, since locks of its file system", str(caught.value))
    first.destroy()
    monkeypatch.undo()
    again = linear_engine.start(tmp_path, resume="must")
    assert again.global_steps == 3
    again.destroy(remove=True)


def test_a_clock_that_was_set_back_makes_no_checkpoint_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = linear_engine.start(tmp_path / "run")
    now = datetime.now(timezone.utc)
    for step, hours in enumerate([0, 1, -48, -72], 1):
        linear_engine.train(engine)
        testing.replace(monkeypatch, "clock.checkpoint", _says(now + timedelta(hours=hours)))
        engine.save_checkpoint(tmp_path / "saved", keep_last=2)
        kept = {f"global_step{each}" for each in (step - 1, step) if each}
        assert {path.name for path in (tmp_path / "saved").glob("global*")} == kept
    engine.destroy(remove=True)


def _says(moment: datetime) -> Any:
    return lambda: moment
