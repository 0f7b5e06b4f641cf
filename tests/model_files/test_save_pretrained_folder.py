"""`engine.save_pretrained` into an existing folder keeps the old files until all new ones are there."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers

import offload
from offload import testing
from offload.aio import IoQueue
from offload.engine.shards import LocalShards
from offload.errors import IoError, OffloadError, StoreError
from offload.model_io import save
from tests.model_files.test_save_pretrained import JOB, NAMES, a_tokenizer, engine, listed, untied
from tests.support.exported_runs import tensors as all_tensors
from tests.support.oracle import assert_same_tensors, start, train_step

__all__ = ["engine"]


def test_files_of_others_stay_and_older_weights_go(engine: offload.Engine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-5").mkdir(parents=True)
    (out / "checkpoint-5" / "model.safetensors").write_text("dear")
    (out / "notes.txt").write_text("dear")
    engine.save_pretrained(out, max_shard_size="50KB")
    first = listed(out)
    assert len([name for name in first if name.startswith("model-")]) > 2
    engine.save_pretrained(out)
    others = {"checkpoint-5", "checkpoint-5/model.safetensors", "notes.txt"}
    assert listed(out) == NAMES | others
    assert (out / "checkpoint-5" / "model.safetensors").read_text() == (out / "notes.txt").read_text() == "dear"
    engine.save_pretrained(out, max_shard_size="50KB")
    assert listed(out) == first
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert_same_tensors(model.state_dict(), engine.module.state_dict())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_of_an_earlier_save_is_replaced(
    can_exchange: bool, engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        testing.replace(monkeypatch, "folder.exchange", lambda *_: False)
    engine.save_pretrained(tmp_path / "out", max_shard_size="50KB")
    train_step(engine, JOB, 1)
    engine.save_pretrained(tmp_path / "out")
    assert listed(tmp_path / "out") == NAMES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    assert_same_tensors(all_tensors(tmp_path / "out"), untied(engine))


@pytest.mark.sample(3)
@pytest.mark.parametrize("foreign", [True, False])
@pytest.mark.parametrize("failure", ["room", "reserve", "head", "begin", "write", "config", "tokenizer"])
def test_a_disk_that_is_full_leaves_what_was_there(
    failure: str, foreign: bool, engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    engine.save_pretrained(out)
    if foreign:
        (out / "notes.txt").write_text("dear")
    before = {path: path.read_bytes() for path in out.iterdir()}
    train_step(engine, JOB, 1)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = IoQueue.write

    def full_file(queue: IoQueue, file: Any, *request: Any, **options: Any) -> Any:
        if "partial" not in file.path:  # the update of the step before
            return write(queue, file, *request, **options)
        if failure == "begin":
            raise IoError(file.path, 0, 0, errno.ENOSPC, "write")
        return Failing(write(queue, file, *request, **options))

    tokenizer = a_tokenizer()
    with monkeypatch.context() as patch:
        if failure == "room":
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        elif failure == "reserve":
            patch.setattr(os, "posix_fallocate", full)
        elif failure == "head":
            testing.replace(patch, "file.write_all", full)
        elif failure in ("begin", "write"):
            testing.replace(patch, "io.write", full_file)
        elif failure == "config":
            testing.replace(patch, "file.write_new", full)
        else:
            patch.setattr(type(tokenizer), "save_pretrained", full)
        with pytest.raises((StoreError, OSError)) as error:
            engine.save_pretrained(out, tokenizer=tokenizer)
        assert isinstance(error.value, OffloadError)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    engine.save_pretrained(out)
    assert_same_tensors(all_tensors(out), untied(engine))
    train_step(engine, JOB, 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("moves", range(4))
def test_a_kill_between_two_moves_leaves_nothing_that_loads_as_a_mixture(
    moves: int, engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("dear")
    engine.save_pretrained(out, max_shard_size="100KB")
    train_step(engine, JOB, 1)
    done = 0
    replace = os.replace

    class Killed(BaseException):
        pass

    def stop(source: Any, target: Any) -> None:
        nonlocal done
        if done == moves:
            raise Killed
        done += 1
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(Killed):
            engine.save_pretrained(out, max_shard_size="100KB")
    assert not (out / "config.json").exists() and not (out / "model.safetensors.index.json").exists()
    with pytest.raises(StoreError):
        offload.load_pretrained(transformers.AutoModelForCausalLM, out)
    with pytest.raises((OSError, ValueError), match=r"config\.json|model"):
        transformers.AutoModelForCausalLM.from_pretrained(out)


def test_leftovers_of_a_kill_are_removed_and_reported(
    engine: offload.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(5000))
    with caplog.at_level(logging.WARNING, "offload"):
        engine.save_pretrained(tmp_path / "out")
    assert f"removed {left}" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    left.mkdir()
    (left / "thesis").write_text("dear")
    with pytest.raises(StoreError, match="thesis"):
        engine.save_pretrained(tmp_path / "out")
    assert (left / "thesis").read_text() == "dear"


@pytest.mark.parametrize("there", [(), ("config.json", "model.safetensors")])
def test_the_folder_that_the_process_is_in_stays(
    there: tuple[str, ...], engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    (folder / "below").mkdir(parents=True)
    (folder / "below").rmdir()
    for name in there:
        (folder / name).write_text("old")
    monkeypatch.chdir(folder)
    engine.save_pretrained(".")
    assert Path.cwd() == folder and listed(folder) == NAMES
    engine.save_pretrained(folder)
    assert os.listdir(".") and os.stat(".").st_ino == folder.stat().st_ino


@pytest.mark.parametrize("there", [(), ("config.json", "model.safetensors")])
def test_a_folder_that_is_exchanged_keeps_its_mode(
    there: tuple[str, ...], engine: offload.Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in there:
        (folder / name).write_text("old")
    folder.chmod(0o2770)
    engine.save_pretrained(folder)
    assert listed(folder) == NAMES and folder.stat().st_mode & 0o7777 == 0o2770


def test_one_save_at_a_time_into_a_folder(
    engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads one is refused, whatever the other has come to: while it writes, and where it changes names."""
    out, refused = tmp_path / "out", []

    def save_too() -> None:
        def attempt() -> None:
            with pytest.raises(StoreError, match=r"process .* is saving into .*out") as caught:
                engine.save_pretrained(out)
            refused.append(str(caught.value))

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()

    def between(*names: Any) -> Any:
        save_too()
        real(*names)
        save_too()

    real = save._arrive
    testing.replace(monkeypatch, "folder.arrive", between)
    for _ in range(2):  # where nothing is, and where a model is replaced
        engine.save_pretrained(out)
    assert len(refused) == 4 and str(os.getpid()) in refused[0]
    assert listed(out) == NAMES and sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    monkeypatch.undo()
    (out / "notes.txt").write_text("dear")
    engine.save_pretrained(out)  # beside other files
    assert listed(out) == {*NAMES, "notes.txt"}


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_a_read_that_fails_leaves_none_in_flight(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are freed next; all reads fail here, so none may end the wait for the others."""
    engine = start(JOB._replace(dtype=mode), ("nvme", "nvme"), tmp_path / "swap")
    read, flying = LocalShards.read, list[Failing]()

    def fails(shards: LocalShards, *arguments: Any, **options: Any) -> list[Any]:
        flying.extend(found := [Failing(future) for future in read(shards, *arguments, **options) for _ in range(2)])
        return found

    with monkeypatch.context() as patch:
        testing.replace(patch, "state.read", fails)
        with pytest.raises(IoError):
            engine.save_pretrained(tmp_path / "out", dtype="fp32")
    assert flying and all(future.awaited for future in flying)
    engine.destroy(remove=True)


class Failing:
    """A request that fails, and knows if somebody has waited for it."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.awaited = inner, False

    def done(self) -> bool:
        return bool(self._inner.done())

    def wait(self, timeout: float | None = None) -> int:
        self.awaited = True
        self._inner.wait(timeout)
        raise IoError("states", 0, 0, errno.EIO, "read")
