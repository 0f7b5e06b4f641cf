"""Files of a store that cannot be read, or only look damaged, are reported as what they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.aio import IoQueue
from offload.swapper.store import Store
from offload.swapper.store import store as store_module
from tests.test_store import SPEC, blob, created, opened


@pytest.fixture
def rank(tmp_path: Path, queue: IoQueue) -> Path:
    """The folder of a rank with one commit, of step 1."""
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    return tmp_path / "run" / "rank0"


def test_a_commit_that_is_intact_after_all_is_not_called_damaged(rank: Path, tmp_path: Path, queue: IoQueue) -> None:
    (rank / "suspect").touch()
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one" and store.notices == [
        "a commit or its record looked damaged; all data of step 1 was compared and is intact, and the run resumes "
        "from it"
    ]


def test_a_comparison_that_fails_leaves_no_file_open(
    rank: Path, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read itself, as when no memory is left; the caller of `newest_serial` may try again."""

    def fails(*_: object) -> None:
        raise MemoryError

    def states_open() -> int:
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return sum(os.path.exists(link) and os.readlink(link).endswith("run/rank0/states") for link in links)

    (rank / "suspect").touch()
    store = Store([tmp_path], "run", 0, SPEC, queue)
    monkeypatch.setattr(store_module, "first_damage", fails)
    with pytest.raises(MemoryError):
        store.newest_serial()
    assert states_open() == 0
    store.close()
