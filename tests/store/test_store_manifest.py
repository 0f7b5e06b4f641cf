"""The manifest identifies a store: another model, layout or format is refused, and the run stays as it is."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from offload.aio import IoQueue, crc32c
from offload.errors import StoreError
from offload.runs.verify import RunChecking
from offload.sizes import PAGE
from offload.states import State
from offload.swapper.store import Store, StoreSpec, run_status
from offload.swapper.store.format import read_manifest
from tests.store.test_store import SIZES, SPEC, blob, created, opened, update, weight


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[]", b"\xff\x00"])
def test_a_manifest_that_is_lost_comes_back_from_the_commit(
    damage: bytes | None, tmp_path: Path, queue: IoQueue
) -> None:
    store = created(tmp_path, queue)
    update(store, 1, 5)
    store.commit(1, blob("one"))
    store.close()
    path = tmp_path / "run" / "rank0" / "manifest.json"
    before = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage)
    store, text = opened(tmp_path, queue)
    assert (text, weight(store, 1)) == ("one", 5)
    assert "manifest.json" in store.notices[0] and path.read_bytes() == before
    store.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SPEC._replace(fingerprint={"model": "other"}), r'layout/model is "test" in the run and "other" here'),
        (SPEC._replace(fingerprint={"model": "test", "more": 1}), "layout/more exists in only one of the run"),
        (SPEC._replace(slots=1), "was step, or every N in the run and is none here"),
        (
            SPEC._replace(partitions=(SIZES, {**SIZES, State.EXP_AVG: 4096}, {State.WEIGHT: 4096})),
            "partitions/1/exp_avg",
        ),
        (SPEC._replace(frozen=(0, 4096, 4096)), "shared/1 is 0 in the run and 4096 here"),
        (SPEC._replace(partitions=(SIZES, SIZES), frozen=()), "another model: the run contains 3 units, this model 2"),
    ],
)
def test_another_model_is_refused_with_the_difference(
    spec: StoreSpec, message: str, tmp_path: Path, queue: IoQueue
) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    with pytest.raises(StoreError, match=message):
        opened(tmp_path, queue, spec)
    opened(tmp_path, queue)[0].close()


@pytest.mark.parametrize(
    ("column", "advice"),
    [
        ({}, "; to change them, call save_checkpoint in the run and load_checkpoint here"),
        ({"tensor_parallel": {"size": 2, "coordinate": 0}}, ""),
    ],
)
def test_a_store_of_another_number_of_ranks_is_an_error_with_the_fix(
    column: dict[str, dict[str, int]], advice: str, tmp_path: Path, queue: IoQueue
) -> None:
    store = created(tmp_path, queue, SPEC._replace(fingerprint={"world_size": 2, **column}))
    store.commit(1, blob("one"))
    store.close()
    asked = "resume with as many ranks as the run had, and with its mics_shard_size"
    with pytest.raises(StoreError, match=rf"world_size is 2 in the run and 1 here; {asked}{advice}$"):
        opened(tmp_path, queue, SPEC._replace(fingerprint={"world_size": 1, **column}))


def test_another_format_is_refused(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    path = tmp_path / "run" / "rank0" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(StoreError, match=r"has store format 99; this version of offload reads format 3"):
        read_manifest(path)


def test_a_run_id_that_an_older_version_has_left_out_of_its_commits_is_no_damage(
    tmp_path: Path, queue: IoQueue
) -> None:
    """Such a version reads no id and writes none; the file is that of the start."""
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    path = tmp_path / "run" / "rank0" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": "the id"}))
    assert read_manifest(path).run_id == "the id"
    with contextlib.closing(RunChecking(tmp_path / "run")) as checking:
        assert checking.run(queue).whole
    store, text = opened(tmp_path, queue)
    assert text == "one"
    store.close()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": 7}))
    with pytest.raises(StoreError, match="expected the id of a run as run_id, got 7"):
        read_manifest(path)


@pytest.mark.parametrize("commits", [1, 2])
def test_a_run_of_another_format_is_refused_and_left_as_it_is(commits: int, tmp_path: Path, queue: IoQueue) -> None:
    """As an earlier version has left it: its records and its manifest say so."""
    store = created(tmp_path, queue)
    for number in range(commits):
        store.commit(number, blob("one"))
    store.close()
    rank = tmp_path / "run" / "rank0"
    pages = bytearray((rank / "commit").read_bytes())
    for page in range(0, commits * PAGE, PAGE):
        pages[page + 8 : page + 12] = (2).to_bytes(4, "little")
        pages[page + PAGE - 4 : page + PAGE] = crc32c(bytes(pages[page : page + PAGE - 4])).to_bytes(4, "little")
    (rank / "commit").write_bytes(pages)
    path = rank / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "about": {"offload": "0.0.9"}}))
    assert run_status([tmp_path], "run").exists
    store = Store([tmp_path], "run", 0, SPEC, queue)
    message = (
        r"store format 2; this version of offload reads format 3: resume with the version that made the run \(0.0.9\)"
    )
    for refused in (store.newest_serial, store.open):
        with pytest.raises(StoreError, match=message):
            refused()
    with pytest.raises(StoreError, match="holds a run that did not end"):
        Store([tmp_path], "run", 0, SPEC, queue).create()
    assert (rank / "commit").read_bytes() == pages and (rank / "states").stat().st_size == SPEC.nbytes
