"""A store over several drives gives each drive its share and its offsets."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from offload.aio import Bandwidth, IoQueue
from offload.errors import StoreError
from offload.sizes import GIB, MIB
from offload.states import State
from offload.swapper.store import Store, StoreSpec, drives, remove_run
from offload.swapper.store.drives import new_manifest, shares
from offload.swapper.store.inspection import look
from offload.swapper.store.store import SwapFiles
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
    folders = [tmp_path / drive / "run" / "rank0" for drive in "ab"]
    manifest = new_manifest("run", 0, folders, StoreSpec(({State.WEIGHT: nbytes},), 1, {}), None)
    assert len(manifest.weights) == 2 and passes == [moved]


def test_drives_share_by_speed_as_far_as_their_room_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(free: list[tuple[int, int]], speeds: list[float], need: int) -> list[int]:
        monkeypatch.setattr(drives, "_free_bytes", lambda _: free)
        return [round(share) for share in shares(["x"] * len(free), speeds, need)]

    assert given([(1, 9 * GIB), (2, 9 * GIB)], [3e9, 1e9], 4 * GIB) == [3 * GIB, GIB]
    assert given([(1, GIB), (2, 9 * GIB)], [3e9, 1e9], 4 * GIB) == [GIB, 3 * GIB]
    assert given([(1, 4 * GIB), (1, 4 * GIB), (2, 4 * GIB)], [1e9, 1e9, 1e9], 8 * GIB) == [2 * GIB, 2 * GIB, 4 * GIB]


# -- drives that are mounted elsewhere ----------------------------------------------------------------


def _moved(root: Path, queue: IoQueue) -> list[Path]:
    """Returns the new places of two drives with a run of one commit, which lie beside each other no more."""
    before, after = [root / "da" / "swap", root / "db" / "swap"], [root / "x" / "da", root / "y" / "deep" / "db"]
    store = Store(before, "run", 0, SPEC, queue)
    store.create()
    store.commit(1, blob("one"))
    store.close()
    for old, new in zip(before, after, strict=True):
        new.parent.mkdir(parents=True)
        old.parent.rename(new.parent / "away")
        (new.parent / "away" / "swap").rename(new)
    return after


def _resumed(paths: Sequence[Path], queue: IoQueue) -> Store:
    store = Store(paths, "run", 0, SPEC, queue)
    store.open()
    return store


@pytest.mark.parametrize("commits", [False, True])
def test_drives_that_are_mounted_elsewhere_are_known_from_the_next_start(
    commits: bool, tmp_path: Path, queue: IoQueue
) -> None:
    after = _moved(tmp_path, queue)
    store = _resumed(after, queue)
    if commits:
        store.commit(2, blob("two"))
    store.close()
    found = look(after[0] / "run" / "rank0")
    assert found.wrong == () and found.folders == tuple(path / "run" / "rank0" for path in after)
    assert remove_run(after[0] / "run").not_found == ()
    assert not any((path / "run").exists() for path in after)


@pytest.mark.parametrize("written", [0, 1])
def test_a_kill_while_the_new_places_are_written_loses_nothing(
    written: int, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = _moved(tmp_path, queue)
    write = SwapFiles._write_manifests

    def cut_short(files: SwapFiles) -> None:
        files.folders, folders = files.folders[:written], files.folders
        write(files)
        files.folders = folders
        raise KeyboardInterrupt

    monkeypatch.setattr(SwapFiles, "_write_manifests", cut_short)
    with pytest.raises(KeyboardInterrupt):
        _resumed(after, queue)
    monkeypatch.setattr(SwapFiles, "_write_manifests", write)
    if written:
        assert look(after[0] / "run" / "rank0").wrong == ()
    _resumed(after, queue).close()
    for path in after:
        assert look(path / "run" / "rank0").manifest.drives == tuple(map(str, after))  # type: ignore[union-attr]


def test_a_copy_that_is_resumed_is_apart_from_its_original(tmp_path: Path, queue: IoQueue) -> None:
    original, copy = [tmp_path / "a", tmp_path / "b"], [tmp_path / "x" / "a", tmp_path / "y" / "z" / "b"]
    store = Store(original, "run", 0, SPEC, queue)
    store.create()
    store.commit(1, blob("one"))
    store.close()
    for here, there in zip(original, copy, strict=True):
        shutil.copytree(here, there)
    _resumed(copy, queue).close()
    for paths in (original, copy):
        found = look(paths[0] / "run" / "rank0")
        assert found.wrong == () and found.folders == tuple(path / "run" / "rank0" for path in paths)
    remove_run(copy[0] / "run")
    assert look(original[0] / "run" / "rank0").wrong == () and not (copy[1] / "run").exists()


def test_a_removal_names_the_drives_that_it_did_not_find(tmp_path: Path, queue: IoQueue) -> None:
    after = _moved(tmp_path, queue)
    left = remove_run(after[0] / "run").not_found
    assert left == (str(tmp_path / "db" / "swap" / "run" / "rank0"),) and not (after[0] / "run").exists()
    remove_run(after[1] / "run")
    assert not (after[1] / "run").exists()


def test_a_drive_that_was_emptied_is_not_looked_for(tmp_path: Path, queue: IoQueue) -> None:
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    store.create()
    store.close()
    shutil.rmtree(tmp_path / "b" / "run")
    assert remove_run(tmp_path / "a" / "run").not_found == ()
