"""A store over several drives gives each drive its share and its offsets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from offload.aio import Bandwidth, IoQueue
from offload.errors import StoreError
from offload.sizes import GIB, MIB
from offload.swapper.store import Store, drives
from offload.swapper.store.drives import shares
from tests.store.test_store import SPEC, blob, text_of, update, weight


def test_a_store_over_three_drives_comes_back(tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "_STRIPE_BYTES", 4096)
    paths = [tmp_path / name for name in "abc"]
    store = Store(paths, "run", 0, SPEC, queue)
    store.create()
    for value in (1, 2):
        update(store, 0, value)
        update(store, 1, 10 + value)
        store.commit(value, blob(str(value)))
    store.close()
    sizes = [(path / "run" / "rank0" / "states").stat().st_size for path in paths]
    assert sum(sizes) == SPEC.nbytes and min(sizes) > 0
    store = Store(paths, "run", 0, SPEC, queue)
    assert text_of(store.open()) == "2" and (weight(store, 0), weight(store, 1)) == (2, 12)
    store.close()
    store = Store([paths[0], paths[2], paths[1]], "run", 0, SPEC, queue)
    with pytest.raises(StoreError, match=r"holds drive 2 of store .* expected drive 1"):
        store.open()
    with pytest.raises(StoreError, match="is stored on 3 drives"):
        Store(paths[:2], "run", 0, SPEC, queue).open()


@pytest.mark.parametrize(("nbytes", "moved"), [(3 * MIB, 8 * MIB), (50 * MIB + 1, 50 * MIB), (GIB, 128 * MIB)])
def test_a_small_store_moves_few_bytes_to_measure_its_drives(
    nbytes: int, moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    def measured(folders: Sequence[Path], nbytes: int, rounds: int) -> list[Bandwidth]:
        passes.append(nbytes)
        return [Bandwidth(1e9, 1e9) for _ in folders]

    monkeypatch.setattr(drives, "bandwidths", measured)
    assert len(drives._measured([tmp_path, tmp_path], nbytes)) == 2
    assert passes == [moved]


def test_drives_share_by_speed_as_far_as_their_room_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(free: list[tuple[int, int]], speeds: list[float], need: int) -> list[int]:
        monkeypatch.setattr(drives, "_free_bytes", lambda _: free)
        return [round(share) for share in shares(["x"] * len(free), speeds, need)]

    assert given([(1, 9 * GIB), (2, 9 * GIB)], [3e9, 1e9], 4 * GIB) == [3 * GIB, GIB]
    assert given([(1, GIB), (2, 9 * GIB)], [3e9, 1e9], 4 * GIB) == [GIB, 3 * GIB]
    assert given([(1, 4 * GIB), (1, 4 * GIB), (2, 4 * GIB)], [1e9, 1e9, 1e9], 8 * GIB) == [2 * GIB, 2 * GIB, 4 * GIB]
