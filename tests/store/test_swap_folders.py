"""A folder for swap files is made in an existing one and named with its drive; a mistyped path is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offload
from offload.errors import ConfigError
from offload.hardware import system
from offload.hardware.system import Mount, folder_notices, mount_of
from offload.notices import Remark
from tests.support.processes.cli_in_process import call, run_folder

__all__ = ["run_folder"]


def config_of(path: str) -> dict[str, Any]:
    """A config whose states are stored in the folder `path`."""
    tier = {"device": "nvme", "nvme_path": path}
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": tier},
        "offload": {"device": "cpu"},
    }


@pytest.fixture
def on_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that counts as one on the drive of /."""
    monkeypatch.setattr(system, "_is_with_root", lambda path: True)
    monkeypatch.setattr(system, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(system, "mount_of", lambda path: Mount("/dev/sda1", "ext4", "/"))
    return tmp_path


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that counts as one on a drive of its own."""
    monkeypatch.setattr(system, "_is_with_root", lambda path: False)
    monkeypatch.setattr(system, "mount_of", lambda path: Mount("/dev/nvme0n1", "xfs", "/mnt/nvme"))
    return tmp_path


def test_a_folder_that_is_there_needs_no_notice(on_root: Path) -> None:
    assert [*folder_notices([str(on_root)])] == []


def test_a_folder_in_an_existing_one_is_named_with_its_drive(on_root: Path) -> None:
    (line,) = folder_notices([str(on_root / "swap")])
    assert isinstance(line, Remark)
    assert line.startswith(f"{on_root / 'swap'} is made for swap files, on the drive of / (/dev/sda1, ")
    assert line.endswith(" free)")


def test_one_in_a_missing_one_there_is_refused_and_the_first_that_exists_is_named(on_root: Path) -> None:
    """Whether the missing one is a mistyped name or a drive that is not mounted: nothing is made on another drive."""
    config = config_of(path=str(on_root / "nmve" / "runs" / "swap"))
    with pytest.raises(ConfigError) as refused:
        offload.initialize(model=nn.Linear(8, 8), config=config)
    assert str(refused.value) == (
        f"nvme_path {on_root}/nmve/runs/swap does not exist, and neither does the folder above it, "
        f"{on_root}/nmve/runs: the first one on that path which exists is {on_root}, on the drive of /; correct the "
        f"path, mount the drive, or make {on_root}/nmve/runs"
    )
    assert not (on_root / "nmve").exists(), "nothing was made"


def test_the_last_folder_is_made_also_behind_a_link(on_root: Path) -> None:
    (on_root / "drive").mkdir()
    (on_root / "nvme").symlink_to("drive")
    engine, *_ = offload.initialize(model=nn.Linear(8, 8), config=config_of(path=str(on_root / "nvme" / "swap")))
    engine.destroy(remove=True)
    assert (on_root / "drive" / "swap").is_dir()


@pytest.mark.parametrize("place", ["a drive of its own", "the temporary folder"])
def test_elsewhere_all_folders_are_made(place: str, on_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed makes them: jobs of clusters have names of their own below $TMPDIR."""
    if place == "the temporary folder":
        monkeypatch.setattr(system, "gettempdir", lambda: str(on_root))
    else:
        monkeypatch.setattr(system, "_is_with_root", lambda path: False)
    path = on_root / "job" / "swap"
    engine, *_ = offload.initialize(model=nn.Linear(8, 8), config=config_of(path=str(path)))
    engine.destroy(remove=True)
    assert path.is_dir()


def test_a_folder_that_nothing_uses_may_be_anywhere(on_root: Path) -> None:
    """DeepSpeed's configs are handed from machine to machine with their paths."""
    config = config_of(path=str(on_root / "nmve" / "swap"))
    config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    engine, *_ = offload.initialize(model=nn.Linear(8, 8), config=config)
    engine.destroy()
    assert not (on_root / "nmve").exists()


def test_offload_train_refuses_it_as_other_wrong_input(on_root: Path) -> None:
    done = call("--steps", "1", "--nvme-path", "nmve/swap")
    assert done.exit_code == 2 and "correct the path, mount the drive, or make" in done.stderr
    assert not Path("nmve").exists()


def test_on_a_drive_of_its_own_a_new_folder_is_no_warning(elsewhere: Path) -> None:
    (line,) = folder_notices([str(elsewhere / "swap")])
    assert isinstance(line, Remark) and "on the drive of /mnt/nvme (/dev/nvme0n1, " in line


def test_a_place_for_drives_without_one_is_a_warning(on_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_FOR_DRIVES", (str(on_root / "mnt"),))
    (on_root / "mnt" / "nvme").mkdir(parents=True)
    (line,) = folder_notices([str(on_root / "mnt" / "nvme")])
    assert not isinstance(line, Remark) and "no drive is mounted there" in line and "delete" not in line
    (line,) = folder_notices([str(on_root / "mnt" / "nmve")])
    assert not isinstance(line, Remark)
    assert line.endswith(
        f"{on_root / 'mnt' / 'nmve'} does not exist; if the path is mistyped or its drive not mounted, stop, and "
        f"delete {on_root / 'mnt' / 'nmve'}"
    )


def test_the_mount_of_a_folder_is_the_innermost_one(tmp_path: Path) -> None:
    found = mount_of("/proc/self")
    assert (found.kind, found.point) == ("proc", "/proc")
    assert tmp_path.is_relative_to(mount_of(tmp_path).point)


def test_the_start_of_train_names_the_drive_and_ends_in_warnings(
    on_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_FOR_DRIVES", (str(on_root / "mnt"),))
    (on_root / "mnt").mkdir()
    Path("ds.json").write_text(json.dumps({"offload": {"nvme_path": "mnt/nvme", "durability": "step"}}))
    lines = call("--config", "ds.json", "--steps", "1", "--nvme-path", "drive").stdout.splitlines()
    assert any(line.startswith(f"{on_root / 'drive'} is made for swap files, on the drive of /") for line in lines)
    lines = call("--config", "ds.json", "--steps", "1", "--run", "two").stdout.splitlines()
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert any(f"swap files go to {on_root / 'mnt' / 'nvme'} on the drive of /" in line for line in warnings)
    begin = next(number for number, line in enumerate(lines) if line.startswith("gpt2-tiny: "))
    assert lines[begin - len(warnings) : begin] == warnings, "after all that only informs"


def test_a_model_folder_that_is_not_there_is_told_with_its_whole_path(on_root: Path) -> None:
    done = call("--model", "./missing", "--steps", "1")
    assert (
        done.exit_code == 2 and f"the model folder {on_root / 'missing'} does not exist; give a folder" in done.stderr
    )
    done = call("--model", "./text.py", "--steps", "1")
    assert f"the model folder {on_root / 'text.py'} is a file; give" in done.stderr
