"""`offload verify` finds and names every damage of a run's last commit, and passes what a resume accepts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import offload
from offload import testing
from offload.aio import Bandwidth
from offload.cli.main import app
from offload.errors import OffloadError
from offload.layout.modes import MODES
from offload.states import State
from offload.swapper.store.format import Extents
from offload.swapper.store.inspection import look
from tests.support import models
from tests.support.drives.fault_injection import flip_bit
from tests.support.oracle import start, train_step

JOB = models.GPT2._replace(dtype="bf16")
EITHER = "the step after the last commit has begun to overwrite this commit, or this commit is damaged"


def trained(folder: Path, steps: int, **options: Any) -> offload.Engine:
    """A run on two drives, after so many steps in all."""
    drives = [str(folder / "first"), str(folder / "second")]
    engine = start(JOB, ("nvme", "nvme"), folder, nvme_path=drives, **options)
    for step in range(engine.global_steps, steps):
        train_step(engine, JOB, step)
    return engine


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drives with a run of three steps, in small stripes."""
    folder = tmp_path_factory.mktemp("swap")
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "size.stripe", 64 << 10)
        testing.replace(patch, "drives.measured", lambda folders, nbytes: [Bandwidth(2e9, 2e9)] * len(folders))
        trained(folder, 3).destroy()
    return folder


@pytest.fixture
def run(swap: Path) -> Iterator[Path]:
    """The run's folder on the first drive, put back afterwards."""
    files = {path: path.read_bytes() for path in swap.rglob("*") if path.is_file()}
    yield swap / "first" / "default"
    shutil.rmtree(swap)
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def verify(run: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and what was told."""
    result = CliRunner().invoke(app, ["verify", str(run), "--json"])
    return result.exit_code, json.loads(result.stdout)


def output_of(run: Path) -> str:
    return CliRunner().invoke(app, ["verify", str(run)]).output


def inspected(run: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", str(run), "--json"])
    assert result.exit_code == 0
    return json.loads(result.stdout)["ranks"][0]  # type: ignore[no-any-return]


def resumed(swap: Path) -> int | None:
    """The epoch that a resume opens; None where it refuses."""
    try:
        engine = trained(swap, 0, resume="must")
    except (OffloadError, OSError):
        return None
    epoch = engine.global_steps
    engine.destroy()
    return epoch


def newest(run: Path) -> tuple[int, Callable[[int, State], Extents]]:
    """The number of the last blob, and where the slots lie that the last commit names."""
    rank_files = look(run / "rank0")
    assert rank_files.manifest is not None
    record, places = rank_files.commits[0].record, rank_files.manifest.spec.places()
    return record.blob, lambda unit, state: places[unit][state][record.slots[unit]]


def on_drive(run: Path, offset: int) -> tuple[Path, int]:
    """The file and the place in it of a byte of the states."""
    with look(run / "rank0").open_states() as file:
        drive, start, _ = next(file.layout.places(offset, 1))
        return Path(file.parts()[drive].path), start


def test_an_intact_run_passes(run: Path) -> None:
    code, report = verify(run)
    assert code == 0 and report["whole"] and report["epoch"] == 3
    (rank,) = report["ranks"]
    assert rank["damages"] == rank["files"] == [] and rank["before"].endswith("step 2, is intact too")
    manifest = json.loads((run / "rank0" / "manifest.json").read_text())
    assert rank["bytes"] == sum(n for row in manifest["extents"] for slots in row.values() for _, n in slots[0])
    assert (
        report["step"] == rank["step"] == 3
        and "step 3" in output_of(run)
        and "epoch" not in output_of(run)
        and ": intact" in output_of(run)
    )
    assert inspected(run)["damaged"] == []


@pytest.mark.sample(5)
@pytest.mark.parametrize("thing", ["folder", "pipe", "link"])
@pytest.mark.parametrize("place", ["manifest.json", "newest blob", "older blob", "suspect", "second drive"])
def test_what_is_in_the_place_of_a_file_is_refused_by_a_resume_and_verify_says_so(
    run: Path, swap: Path, place: str, thing: str
) -> None:
    blob, _ = newest(run)
    names = {"newest blob": f"blob.{blob}", "older blob": f"blob.{1 - blob}"}
    path = run / "rank0" / names.get(place, place)
    if place == "second drive":
        path = swap / "second" / "default" / "rank0" / "manifest.json"
    if path.exists():
        path.rename(swap / "aside")
    make = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(swap / "aside")}
    make[thing]()
    code, report = verify(run)
    assert code == 1 and report["resumes"] is None
    assert [wrong["path"] for wrong in report["ranks"][0]["files"]] == [str(path)]
    step = 2 if place == "newest blob" else 3
    words = f"step {step} is intact, and a resume refuses what is in the place of a file: remove it, and verify again"
    assert report["next"] == [words]
    assert resumed(swap) is None
    path.rmdir() if thing == "folder" else path.unlink()
    assert verify(run)[1]["resumes"] == step
    assert resumed(swap) == step


@pytest.mark.sample(2)
@pytest.mark.parametrize("state", MODES["bf16"].states)
def test_a_flipped_bit_of_any_state_is_named(state: State, run: Path) -> None:
    _, place = newest(run)
    for unit, position in ((0, 0), (3, place(3, state).nbytes - 1)):
        path, start = on_drive(run, place(unit, state).offset(position))
        flip_bit(path, start)
        code, report = verify(run)
        (damage,) = report["ranks"][0]["damages"]
        assert code == 1 and not report["whole"]
        assert damage["state"] == state.value and damage["slot"] in "AB"
        assert damage["unit"] == look(run / "rank0").manifest.spec.title(unit)  # type: ignore[union-attr]
        assert damage["offset"] <= place(unit, state).offset(position) < damage["offset"] + damage["nbytes"]
        assert any(file == str(path) and at <= start < at + nbytes for file, at, nbytes in damage["places"])
        assert f"damaged: {state.value} of {damage['unit']}, slot {damage['slot']}" in output_of(run)
        flip_bit(path, start)
    assert verify(run)[0] == 0


def test_two_extents_that_changed_places_are_both_named(run: Path) -> None:
    _, place = newest(run)
    third, fourth = place(2, State.EXP_AVG), place(3, State.EXP_AVG)
    assert third.nbytes == fourth.nbytes
    for at in range(0, third.nbytes, 4096):
        (path, first), (again, second) = on_drive(run, third.offset(at)), on_drive(run, fourth.offset(at))
        left, right = path.read_bytes()[first : first + 4096], again.read_bytes()[second : second + 4096]
        for file, to, data in ((path, first, right), (again, second, left)):
            with file.open("r+b") as handle:
                handle.seek(to)
                handle.write(data)
    code, report = verify(run)
    assert code == 1
    assert {(d["state"], d["unit"]) for d in report["ranks"][0]["damages"]} == {
        ("exp_avg", "transformer.h.0"),
        ("exp_avg", "transformer.h.1"),
    }


def test_a_damaged_blob_is_named(run: Path, swap: Path) -> None:
    """A flipped bit of the last blob, or no blob: named, and the commit before is read instead, as a resume does."""
    blob, _ = newest(run)
    path = run / "rank0" / f"blob.{blob}"
    flip_bit(path, 300)
    for reason in ("does not match the checksum", "the file is missing"):
        code, report = verify(run)
        (file,) = report["ranks"][0]["files"]
        assert code == 1 and file["path"] == str(path) and reason in file["reason"]
        assert report["epoch"] == 2 and report["ranks"][0]["damages"] == []
        assert f"damaged: {path}" in output_of(run)
        assert [commit["blob"] for commit in inspected(run)["commits"]] == ["damaged", "right"]
        assert inspected(run)["damaged"] == [file]
        path.unlink(missing_ok=True)
    assert resumed(swap) == 2


def test_both_damaged_blobs_are_named(run: Path, swap: Path, tmp_path: Path) -> None:
    """No other place has a copy of one, so no message sends to --repair."""
    blob, _ = newest(run)
    for number in (0, 1):
        flip_bit(run / "rank0" / f"blob.{number}", 300)
    code, report = verify(run)
    assert code == 1
    assert [(Path(file["path"]).name, file["reason"].rpartition("; ")[2]) for file in report["ranks"][0]["files"]] == [
        (f"blob.{blob}", "the file belongs to the last commit, step 3"),
        (f"blob.{1 - blob}", "the file belongs to the commit before, step 2"),
    ]
    assert "bring back what is missing or damaged" in report["next"][-1]
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert done.exit_code == 1 and "contains no intact commit: " in done.stderr, done.output
    assert "--repair" not in done.stderr and f"`offload log {run}` lists them" in " ".join(done.stderr.split())
    assert resumed(swap) is None


def test_a_torn_record_is_named_and_the_one_before_is_taken(run: Path, swap: Path) -> None:
    page, _ = newest(run)
    for position in (20, 4000):  # of the head, of the zeros behind it
        flip_bit(run / "rank0" / "commit", page * 4096 + position)
        code, report = verify(run)
        (file,) = report["ranks"][0]["files"]
        assert (
            code == 1
            and file["path"].endswith("/commit")
            and "does not match its checksum" in file["reason"]
            and report["epoch"] == 2
        )
        assert inspected(run)["damaged"] == [file] and [c["epoch"] for c in inspected(run)["commits"]] == [2]
        flip_bit(run / "rank0" / "commit", page * 4096 + position)
    flip_bit(run / "rank0" / "commit", page * 4096 + 20)
    assert resumed(swap) == 2


def test_a_lost_commit_file(run: Path, swap: Path) -> None:
    path = run / "rank0" / "commit"
    path.unlink()
    code, report = verify(run)
    assert code == 1 and report["ranks"][0]["files"] == [{"path": str(path), "reason": "the file is missing"}]
    assert inspected(run)["damaged"] == report["ranks"][0]["files"]
    assert resumed(swap) is None


@pytest.mark.sample(2)
@pytest.mark.parametrize("drive", ["first", "second"])
@pytest.mark.parametrize("how", ["flipped", "deleted", "another one", "of another drive"])
def test_a_damaged_manifest_is_named(how: str, drive: str, run: Path, swap: Path) -> None:
    path = swap / drive / "default" / "rank0" / "manifest.json"
    other_path = swap / ("second" if drive == "first" else "first") / "default" / "rank0" / "manifest.json"
    data = path.read_bytes()
    if how == "flipped":
        path.write_bytes(data.replace(b'"parameters"', b'"parametets"', 1))
    elif how == "deleted":
        path.unlink()
    elif how == "another one":
        path.write_bytes(json.dumps(json.loads(data) | {"created": "never"}).encode())
    else:
        path.write_bytes(other_path.read_bytes())
    code, report = verify(run)
    (file,) = report["ranks"][0]["files"]
    assert code == 1 and file["path"] == str(path) and report["ranks"][0]["damages"] == []
    assert inspected(run)["damaged"] == [file]
    goes_on = None if how == "of another drive" else 3
    assert report["resumes"] == goes_on
    assert any(line.startswith("a resume writes the damaged manifest.json anew") for line in report["next"]) == (
        goes_on is not None
    )
    assert any(line.startswith("a resume refuses these drives") for line in report["next"]) == (goes_on is None)
    assert resumed(swap) == goes_on
    if goes_on is not None:
        assert inspected(run)["damaged"] == []


@pytest.mark.parametrize("drive", ["first", "second"])
def test_cut_states_are_named_with_what_was_in_them(drive: str, run: Path, swap: Path) -> None:
    path = swap / drive / "default" / "rank0" / "states"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    code, report = verify(run)
    (file_,) = report["ranks"][0]["files"]
    assert code == 1 and file_["path"] == str(path) and "cut short" in file_["reason"]
    assert inspected(run)["damaged"] == [file_]
    path.unlink()
    assert verify(run)[1]["ranks"][0]["files"] == [{"path": str(path), "reason": "the file is missing"}]
    assert resumed(swap) is None


def test_a_drive_that_is_not_there(run: Path, swap: Path) -> None:
    shutil.rmtree(swap / "second")
    code, report = verify(run)
    (file,) = report["ranks"][0]["files"]
    assert code == 1 and file["path"] == str(swap / "second" / "default" / "rank0") and "drive 1 of 2" in file["reason"]
    assert inspected(run)["damaged"] == [file]
    assert not (swap / "second").exists(), "looking makes no folders"


def test_the_step_after_writes_over_the_commit_before(swap: Path, run: Path, tmp_path: Path) -> None:
    """Which is no damage: the run goes on from its last commit."""
    engine = trained(tmp_path, 2)
    train_step(engine, JOB, 2)
    testing.settle(engine, commit=False)  # written, and not committed: that is done by the next step
    for drive in ("first", "second"):
        shutil.copytree(tmp_path / drive / "default", tmp_path / "left" / drive / "default")
    engine.destroy()
    for drive in ("first", "second"):  # as a kill at that moment leaves it
        shutil.rmtree(tmp_path / drive / "default")
        shutil.move(tmp_path / "left" / drive / "default", tmp_path / drive / "default")
    code, report = verify(tmp_path / "first" / "default")
    assert code == 0 and report["epoch"] == 2
    before = report["ranks"][0]["before"]
    assert before.startswith("the commit before, step 1, is not intact: ") and before.endswith(EITHER)
    assert ": the bytes do not match the stored checksum; " in before, "the place is told"


def test_nothing_is_changed(run: Path, swap: Path) -> None:
    """But for the name in the lock."""
    before = {p: p.read_bytes() for p in swap.rglob("*") if p.is_file() and p.name != "lock"}
    verify(run)
    inspected(run)
    assert {p: p.read_bytes() for p in swap.rglob("*") if p.is_file() and p.name != "lock"} == before


def test_of_many_damages_some_are_listed_and_all_counted(run: Path, swap: Path) -> None:
    for path in swap.rglob("states"):
        path.write_bytes(b"x" * path.stat().st_size)
    code, report = verify(run)
    count = len(report["ranks"][0]["damages"])
    assert code == 1 and count > 20
    assert f"and {count - 20} more" in output_of(run) and f"damaged in {count} places" in output_of(run)


def test_a_folder_of_the_model_that_is_not_there_is_named(run: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(run), "--repair", "--model", str(run / "nowhere")])
    assert done.exit_code == 2
    assert "--model expects the folder of the model with which the run began" in " ".join(done.stderr.split())


def test_a_folder_of_the_model_without_a_repair_is_refused(run: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(run), "--model", str(run)])
    assert done.exit_code == 2 and "add --repair" in " ".join(done.stderr.split())


@pytest.mark.parametrize("rate", ["0", "x", "-5MB"])
def test_a_rate_that_is_none_is_named_with_its_option(rate: str, run: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(run), "--rate", rate])
    assert done.exit_code == 2
    assert "invalid value for '--rate': expected a " in " ".join(done.stderr.split())


# -- the next command ---------------------------------------------------------------------------------


def flip_in_slot(run: Path, older: bool) -> None:
    """Flips a bit of what the newest commit names, or of the commit before."""
    rank_files = look(run / "rank0")
    assert rank_files.manifest is not None
    record = rank_files.commits[older].record
    flip_bit(*on_drive(run, rank_files.manifest.spec.places()[0][State.WEIGHT][record.slots[0]].offset(0)))


def zero_newest_record(run: Path) -> None:
    with (run / "rank0" / "commit").open("r+b") as file:
        file.seek(look(run / "rank0").commits[0].record.blob * 4096)
        file.write(bytes(4096))


NEXT = {
    "newest": (2, True, "a resume goes on from step 2, all of which is intact"),
    "both": (None, True, "no commit is known to be intact, so a resume fails"),
    "record": (2, False, "a resume goes on from step 2, all of which is intact"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", NEXT)
def test_verify_says_what_a_resume_does_and_how_to_mend(damage: str, run: Path, swap: Path) -> None:
    step, mends, words = NEXT[damage]
    if damage == "record":
        zero_newest_record(run)
    else:
        for older in (False, True)[: 1 + (damage == "both")]:
            flip_in_slot(run, older)
    code, report = verify(run)
    assert code == 1 and report["resumes"] == step and words in report["next"][-1]
    assert any(f"offload verify --repair {run}" in line for line in report["next"]) is mends
    assert words in output_of(run)
    assert resumed(swap) == step


def test_an_export_of_a_run_that_has_lost_a_record_says_so(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zero_newest_record(run)
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert done.exit_code == 0 and "the step that is read is 2, and a later one may be lost" in caplog.text


def test_a_damaged_export_names_the_unit_and_the_command(run: Path, tmp_path: Path) -> None:
    flip_in_slot(run, older=False)
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    title = look(run / "rank0").manifest.spec.title(0)  # type: ignore[union-attr]
    assert done.exit_code == 1 and f"use weight of {title}," in done.stderr, done.stderr
    assert f"offload verify --repair {run}" in done.stderr
