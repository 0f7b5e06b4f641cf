"""What an engine that stopped says of the store is true."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from offload.errors import EngineFailed, IoError
from tests.support import models
from tests.support.oracle import start, train_step

DISK = ("nvme", "nvme")


def words(folder: Path, error: BaseException, rewritten: bool = False, **options: object) -> str:
    engine = start(models.GPT2, DISK, folder, **options)
    train_step(engine, models.GPT2, 0)
    engine._core.components.pager.mark_rewritten(rewritten)
    engine._core.components.pager.fail(error)
    with pytest.raises(EngineFailed) as caught:
        train_step(engine, models.GPT2, 1)
    engine.destroy()
    return str(caught.value)


def test_the_last_commit_is_called_intact_only_where_it_is(tmp_path: Path) -> None:
    fault, damage = IoError("states", 0, 1, errno.EIO, "read"), IoError("states", 0, 1, errno.EBADMSG, "use a weight")
    assert words(tmp_path / "fault", fault).endswith("the last committed step is intact")
    said = words(tmp_path / "damage", damage)
    assert "intact" not in said and '"resume": "auto"' in said and "checkpoint" in said
    said = words(tmp_path / "none", fault, durability="none")
    assert "intact" not in said and "nothing was committed" in said
    said = words(tmp_path / "load", fault, rewritten=True)
    assert "intact" not in said and "replacing frozen weights" in said
