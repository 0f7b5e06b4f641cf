"""`offload info` reports the machine, the chosen backend with its reason, and the fix for what is missing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload import testing
from offload.aio import BACKENDS
from offload.aio.backend import refusals
from offload.cli.main import app
from offload.errors import ConfigError
from offload.hardware import info, system
from tests.support.processes.seccomp import refusing


def test_a_report_for_people_and_one_for_programs(tmp_path: Path) -> None:
    plain = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert plain.exit_code == 0, plain.output
    for message in (
        "kernels",
        "instructions",
        "memory",
        "GPU",
        "I/O backend",
        "O_DIRECT",
        "2 MiB pages",
        "lockable memory",
        "versions",
    ):
        assert message in plain.stdout, message
    report = json.loads(CliRunner().invoke(app, ["info", "--nvme-path", str(tmp_path), "--json"]).stdout)
    works = [name for name in BACKENDS if refusals()[name] is None]
    assert report["io"]["backend"] == works[0] and set(report["io"]["backends"]) == set(BACKENDS)
    (drive,) = report["drives"]
    assert drive["path"] == str(tmp_path) and drive["free_bytes"] > 0 and drive["file_system"]
    assert not list(tmp_path.iterdir())


def test_why_a_backend_was_not_taken(tmp_path: Path) -> None:
    code = """
import json
from offload.hardware.info import facts, lines
found = facts()
print(json.dumps(found))
print(json.dumps(lines(found)))
"""
    report, reports = map(json.loads, refusing(tmp_path, {"io_uring_setup": errno.EPERM}, code))
    assert report["io"]["backend"] != "io_uring" and "EPERM" in report["io"]["why"]
    assert "EPERM" in report["io"]["backends"]["io_uring"]
    assert any("io_uring" in message for message in report["advice"])
    assert any(name == "advice" for name, _ in reports)


def test_a_folder_that_is_not_there() -> None:
    """The rest is told all the same: it is for a bug report."""
    done = CliRunner().invoke(app, ["info", "/none/such"])
    assert done.exit_code == 2 and "No such file" in " ".join(done.stdout.split()) and "I/O backend" in done.stdout


def test_memory_is_not_a_drive() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    report = info.facts(["/dev/shm"])
    assert report["drives"][0]["file_system"] == "tmpfs"
    assert any("is memory" in message for message in report["advice"])


def test_advice_has_a_line_for_each_thing_that_is_slow() -> None:
    def facts(**io: Any) -> dict[str, Any]:
        usual = {
            "backend": "io_uring",
            "why": "",
            "huge_pages": {"setting": "madvise", "granted": True},
            "registered": {"asked_bytes": 1, "got_bytes": 1},
        }
        none: dict[str, Any] = {"why": "torch is built without CUDA", "devices": []}
        return {"io": usual | io, "drives": [], "kernels": {"isa": "avx2"}, "gpus": none}

    assert info.advice(facts()) == []
    (message,) = info.advice(facts(huge_pages={"setting": "never", "granted": False}))
    assert "4 KiB pages" in message and "never" in message
    (message,) = info.advice(facts(registered={"asked_bytes": 2 << 20, "got_bytes": 0}))
    assert "RLIMIT_MEMLOCK" in message
    (message,) = info.advice(facts(backend="threads", why="io_uring is not available"))
    assert "threads" in message and "io_uring is not available" in message


def test_the_machine_is_reported() -> None:
    """Kernels and why, processor's features, memory and its limit, nodes, GPUs: what a bug report must hold."""
    report = info.facts()
    limit = os.environ.get("OFFLOAD_ISA")
    assert report["kernels"]["isa"] == (limit or report["kernels"]["supported"][-1])
    assert report["kernels"]["threads"] >= 1 and ("OFFLOAD_ISA" if limit else "the best") in report["kernels"]["why"]
    memory = report["memory"]
    assert 0 < memory["free_bytes"] <= (memory["limit_bytes"] or memory["total_bytes"]) <= memory["total_bytes"]
    cpus = [each["cpus"] for each in report["numa"]]
    assert not cpus or any(cpus)
    assert bool(report["gpus"]["devices"]) == (report["gpus"]["why"] is None)


def test_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    for number, cpus in ((0, "0-3"), (10, ""), (2, "4-7")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:  1024 kB\nNode {number} MemFree: 1 kB\n")
    reports = system.nodes(tmp_path)
    assert [(each["node"], each["cpus"]) for each in reports] == [(0, "0-3"), (2, "4-7"), (10, "")]
    assert all(each["memory_bytes"] == 1 << 20 for each in reports)
    assert system.nodes(tmp_path / "none") == []


def test_a_disk_is_found_below_partitions_and_mappings(tmp_path: Path) -> None:
    """An NVMe drive with a partition, on which an encrypted mapping lies; its controller's link has half its lanes."""
    bus = tmp_path / "devices/pci/0000:01:00.0"
    disk = bus / "nvme/nvme0/nvme0n1"
    partition, mapping = disk / "nvme0n1p2", tmp_path / "devices/virtual/block/dm-0"
    for folder in (partition, disk / "queue", mapping / "slaves", tmp_path / "dev/block"):
        folder.mkdir(parents=True)
    (disk / "device").symlink_to(disk.parent)
    (disk.parent / "device").symlink_to(bus)
    for path, message in (
        (partition / "partition", "2"),
        (disk.parent / "model", "FAST 1TB   "),
        (disk / "queue/rotational", "0"),
        (bus / "current_link_width", "2"),
        (bus / "max_link_width", "4"),
        (bus / "current_link_speed", "16.0 GT/s PCIe"),
        (bus / "max_link_speed", "16.0 GT/s PCIe"),
    ):
        path.write_text(message + "\n")
    (mapping / "slaves" / "nvme0n1p2").symlink_to(partition)
    number = os.stat(tmp_path).st_dev
    (tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(mapping)
    (facts,) = system.disks(str(tmp_path), "none", tmp_path)
    assert (facts["name"], facts["model"], facts["rotational"]) == ("nvme0n1", "FAST 1TB", False)
    assert facts["link"] == {"lanes": 2, "most_lanes": 4, "speed": "16.0 GT/s PCIe", "most_speed": "16.0 GT/s PCIe"}
    drive = {"path": "/x", "o_direct": True, "file_system": "ext4", "disks": [facts]}
    usual = info.facts() | {"drives": [drive]}
    assert any("2 of 4 lanes" in message for message in info.advice(usual))


def test_a_gpu_that_torch_cannot_use_is_reported(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch can use it")
    card = tmp_path / "bus/pci/devices/0000:02:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    reports = system.gpus(tmp_path)
    assert "1 NVIDIA GPU is there" in reports["why"] and not reports["devices"]
    assert any("install a torch" in message for message in info.advice(info.facts() | {"gpus": reports}))


# -- slices and hidden GPUs ---------------------------------------------------------------------------

LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 1g.5gb      Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-6e6ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
"""
PROPERTIES = SimpleNamespace(
    name="NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    uuid="c7384736-a75d-5afc-978f-d2f1294409fd",
    total_memory=20 << 30,
    major=8,
    minor=0,
    pci_domain_id=0,
    pci_bus_id=2,
    pci_device_id=0,
)


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch see one slice of the first of two cards, of which a variable names it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-c7384736-a75d-5afc-978f-d2f1294409fd")
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: PROPERTIES)
    testing.replace(monkeypatch, "machine.gpus", lambda: system.parse_cards(LISTED))


def test_a_slice_and_what_hides_the_rest_are_reported(sliced: None, tmp_path: Path) -> None:
    cards = system.gpus(tmp_path)
    assert cards["why"] is None and cards["visible"] == {"CUDA_VISIBLE_DEVICES": f"MIG-{PROPERTIES.uuid}"}
    (device,) = cards["devices"]
    assert device["slice"] == "3g.20gb" and device["memory_bytes"] == 20 << 30
    rows = info._of_gpus(cards)
    assert rows[0][0] == "GPU" and rows[0][1].startswith("NVIDIA A100-SXM4-40GB, slice 3g.20gb, 20.0 GiB")
    words = [f"{name.strip()}: {value}" for name, value in rows]
    assert any(line.startswith("CUDA_VISIBLE_DEVICES: 'MIG-c7384736") for line in words)
    assert "of the driver: 2 cards, 2 slices; torch sees 1 device" in words
    assert "card 0: NVIDIA A100-SXM4-40GB, slices 3g.20gb, 1g.5gb" in words and "card 1: NVIDIA A100-SXM4-40GB" in words


def test_a_variable_that_hides_every_gpu_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    cards = system.gpus(tmp_path)
    assert cards["why"].endswith("finds no CUDA device; CUDA_VISIBLE_DEVICES is ''")
    assert ("  CUDA_VISIBLE_DEVICES", "''") in info._of_gpus(cards)


@pytest.mark.parametrize(("code", "expected"), [("echo 'GPU 0: A (UUID: GPU-1)'", 1), ("exit 9", None)])
def test_the_drivers_tool_may_fail_or_be_missing(
    code: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cards = system.driver_cards()
    assert (None if cards is None else len(cards)) == expected
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert system.driver_cards() is None


def test_where_no_backend_works_the_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "pthread_create")

    testing.replace(monkeypatch, "io.native_queue", refuses)
    with pytest.raises(
        ConfigError, match=r"io_uring is not available: .*; libaio is not available: .*; threads is not available: "
    ):
        info.io()


def test_the_doctor_says_what_to_do_and_fails_if_a_run_would(tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    assert good.exit_code == 0, good.output
    levels = {each["name"]: each for each in json.loads(good.stdout)}
    assert levels[f"drive of {tmp_path}"]["level"] != "error" and "offload probe" in levels["probe"]["words"]
    assert {"I/O", "locked memory", "open files", "memory", "GPU"} <= levels.keys()
    bad = CliRunner().invoke(app, ["doctor", str(tmp_path / "missing")])
    assert bad.exit_code == 1 and "error" in bad.stdout and "make the folder" in " ".join(bad.stdout.split())


def test_the_doctor_sees_what_a_machine_lacks() -> None:
    report = info.facts()
    report["open_files"], report["machine"]["kernel"] = 256, "6.6.87.2-microsoft-standard-WSL2"
    report["gpus"]["devices"] = [{"name": "RTX 4090", "memory_bytes": 24 << 30}]
    report["drives"] = [
        {"path": "/a", "file_system": "ext4", "device": "sda", "o_direct": True, "free_bytes": 0, "disks": []}
    ]
    words = {(each.level, each.name): each.words for each in info.findings(report, probed=True)}
    assert "ulimit -n 4096" in words["warning", "open files"] and ("warning", "pinned memory") in words
    assert "free some room" in words["error", "drive of /a"] and ("warning", "probe") not in words
