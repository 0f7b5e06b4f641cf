"""The message of an engine that stopped describes the store correctly."""

from __future__ import annotations

import errno
import shlex
from pathlib import Path

import pytest

from offload import testing
from offload.errors import EngineFailed, IoError
from tests.support import models
from tests.support.oracle import start, train_step

DISK = ("nvme", "nvme")


def message_of(folder: Path, error: BaseException, rewritten: bool = False, **options: object) -> str:
    engine = start(models.GPT2, DISK, folder, **options)
    train_step(engine, models.GPT2, 0)
    testing.inspect(engine).pager.mark_rewritten(rewritten)
    testing.fail(engine, error)
    with pytest.raises(EngineFailed) as caught:
        train_step(engine, models.GPT2, 1)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_run_that_is_not_removed_after_an_error_is_reported(
    durability: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The command is one for a shell, whatever the path."""
    tmp_path /= "a drive's runs"
    tmp_path.mkdir()
    engine = start(models.GPT2, DISK, tmp_path, durability=durability)
    train_step(engine, models.GPT2, 0)
    testing.settle(engine, commit=False)
    testing.fail(engine, IoError("states", 0, 1, errno.EIO, "read"))
    for _ in range(2):  # reported once
        engine.destroy(remove=True)
    messages = [each.getMessage() for each in caplog.records if "is kept" in each.getMessage()]
    folder = tmp_path / "default"
    delete = f"offload rm {shlex.quote(str(folder))}"
    kept = f"an error has stopped the engine, so the run in {folder} is kept: `{delete}` deletes it"
    assert messages == ([kept] if durability == "step" else []) and folder.exists() == bool(messages)


def test_the_last_commit_is_called_intact_only_where_it_is(tmp_path: Path) -> None:
    fault, damage = IoError("states", 0, 1, errno.EIO, "read"), IoError("states", 0, 1, errno.EBADMSG, "use a weight")
    assert message_of(tmp_path / "fault", fault).endswith("the last committed step is intact")
    message = message_of(tmp_path / "damage", damage)
    assert "intact" not in message and '"resume": "auto"' in message and "checkpoint" in message
    message = message_of(tmp_path / "none", fault, durability="none")
    assert "intact" not in message and "nothing was committed" in message
    message = message_of(tmp_path / "load", fault, rewritten=True)
    assert "intact" not in message and "replacing frozen weights" in message
