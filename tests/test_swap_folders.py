"""A folder for swap files that is made anew is named with its drive; one that may be a mistake is a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload.hardware import mounts
from offload.hardware.mounts import Mount, folder_notices, mount_of
from offload.notices import Remark
from tests.support.cli_in_process import call, run_folder

__all__ = ["run_folder"]


@pytest.fixture
def on_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that counts as one on the drive of /."""
    monkeypatch.setattr(mounts, "_is_with_root", lambda path: True)
    monkeypatch.setattr(mounts, "mount_of", lambda path: Mount("/dev/sda1", "ext4", "/"))
    return tmp_path


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that counts as one on a drive of its own."""
    monkeypatch.setattr(mounts, "_is_with_root", lambda path: False)
    monkeypatch.setattr(mounts, "mount_of", lambda path: Mount("/dev/nvme0n1", "xfs", "/mnt/nvme"))
    return tmp_path


def test_a_folder_that_is_there_needs_no_notice(on_root: Path) -> None:
    assert [*folder_notices([str(on_root)])] == []


def test_a_folder_in_an_existing_one_is_named_with_its_drive(on_root: Path) -> None:
    (line,) = folder_notices([str(on_root / "swap")])
    assert isinstance(line, Remark)
    assert line.startswith(f"{on_root / 'swap'} is made for swap files, on the drive of / (/dev/sda1, ")
    assert line.endswith(" free)")


def test_folders_on_the_drive_of_the_system_whose_parent_is_missing_are_a_warning(on_root: Path) -> None:
    (line,) = folder_notices([str(on_root / "nmve" / "swap")])
    assert not isinstance(line, Remark)
    assert f"swap files go to {on_root / 'nmve' / 'swap'} on the drive of / (/dev/sda1, " in line
    assert line.endswith(
        f"{on_root / 'nmve'} does not exist; if the path is mistyped or its drive not mounted, stop, and delete "
        f"{on_root / 'nmve'}"
    )


def test_on_a_drive_of_its_own_they_are_none(elsewhere: Path) -> None:
    (line,) = folder_notices([str(elsewhere / "runs" / "swap")])
    assert isinstance(line, Remark) and "on the drive of /mnt/nvme (/dev/nvme0n1, " in line


def test_a_place_for_drives_without_one_is_a_warning(on_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_FOR_DRIVES", (str(on_root / "mnt"),))
    (on_root / "mnt" / "nvme").mkdir(parents=True)
    (line,) = folder_notices([str(on_root / "mnt" / "nvme")])
    assert not isinstance(line, Remark) and "no drive is mounted there" in line and "delete" not in line


def test_the_mount_of_a_folder_is_the_innermost_one(tmp_path: Path) -> None:
    found = mount_of("/proc/self")
    assert (found.kind, found.point) == ("proc", "/proc")
    assert tmp_path.is_relative_to(mount_of(tmp_path).point)


def test_the_start_of_train_names_the_drive_and_ends_in_warnings(on_root: Path) -> None:
    Path("ds.json").write_text(json.dumps({"offload": {"nvme_path": "nmve/swap", "durability": "step"}}))
    lines = call("--config", "ds.json", "--steps", "1", "--nvme-path", "drive").stdout.splitlines()
    assert any(line.startswith(f"{on_root / 'drive'} is made for swap files, on the drive of /") for line in lines)
    lines = call("--config", "ds.json", "--steps", "1", "--run", "two").stdout.splitlines()
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert any(f"swap files go to {on_root / 'nmve' / 'swap'} on the drive of /" in line for line in warnings)
    begin = next(number for number, line in enumerate(lines) if line.startswith("gpt2-tiny: "))
    assert lines[begin - len(warnings) : begin] == warnings, "after all that only informs"


def test_a_model_folder_that_is_not_there_is_told_with_its_whole_path(on_root: Path) -> None:
    done = call("--model", "./missing", "--steps", "1")
    assert (
        done.exit_code == 2 and f"the model folder {on_root / 'missing'} does not exist; give a folder" in done.stderr
    )
    done = call("--model", "./text.py", "--steps", "1")
    assert f"the model folder {on_root / 'text.py'} is a file; give" in done.stderr
