"""A report on this machine for bug reports: its properties, the choices that follow from them, and the reasons."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from offload.aio import BACKENDS, DirectFile, IoQueue, aligned_empty, huge_page_share
from offload.aio._native import crc32c_ways
from offload.aio.backend import DEFAULTS, refusals
from offload.aio.file import open_new
from offload.aio.measure import remove
from offload.errors import ConfigError, IoError
from offload.hardware.system import arithmetic, check_folders, disks, gpus, memory, mount_of, nodes, processor, text
from offload.sizes import GIB, MIB, count_of, format_size

_PACKAGES = ("offload", "torch", "numpy", "transformers", "safetensors", "pydantic")


def machine() -> dict[str, Any]:
    """Returns processor, cores, bytes of memory, kernel and versions."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def io() -> dict[str, Any]:
    """Returns the I/O backend, the reasons against those preferred to it, 2 MiB pages, registered memory and limits.

    Raises `ConfigError` if this system refuses every backend.
    """
    trial = aligned_empty(16 * MIB)
    with IoQueue() as queue:  # raises the error with the reasons if no backend works
        # Only io_uring registers memory.
        taken, registered = queue.backend, queue.register(trial)
    refused = refusals()
    return {
        "backend": taken,
        "why": "; ".join(words for name in BACKENDS[: BACKENDS.index(taken)] if (words := refused[name]))
        or "the first choice works",
        "backends": {name: refused[name] or "works" for name in BACKENDS},
        "defaults": DEFAULTS[taken]._asdict(),
        "crc32c": f"by {crc32c_ways()[-1]}",
        "huge_pages": _huge_pages(),
        "registered": {"asked_bytes": len(trial), "got_bytes": registered},
        "memlock_bytes": _soft_limit(resource.RLIMIT_MEMLOCK),
        "libaio_events": {"taken": _number("/proc/sys/fs/aio-nr"), "most": _number("/proc/sys/fs/aio-max-nr")},
    }


def drive(folder: str) -> dict[str, Any]:
    """Returns the file system under `folder`: type, disks, free bytes, and True if O_DIRECT works.

    Raises `IoError` if the folder does not exist or a file cannot be created in it.
    """
    path = os.path.realpath(folder)
    if not os.path.isdir(path):
        raise IoError(folder, 0, 0, errno.ENOTDIR if os.path.exists(path) else errno.ENOENT, "look at")
    mount = mount_of(path)
    probe = Path(path) / f".offload-info.{os.getpid()}-{os.urandom(4).hex()}"
    # Only an open shows if the file system accepts O_DIRECT.
    try:
        with DirectFile(probe, create=True, opener=open_new) as file:
            direct = file.direct
    finally:
        remove(probe)
    room = shutil.disk_usage(path)
    return {
        "path": folder,
        "file_system": mount.kind,
        "device": mount.device,
        "o_direct": direct,
        "free_bytes": room.free,
        "total_bytes": room.total,
        "disks": disks(path, mount.device),
    }


def rated_bytes_of(folder: str) -> int | None:
    """Returns the rated bytes of the drive of `folder` by SMART; None without smartctl or the right to use it."""
    # The rating is an extra: a missing tool, right or field must not fail the plan.
    with contextlib.suppress(OSError, ValueError, KeyError, subprocess.SubprocessError):
        return rated_bytes(_smart(folder))
    return None


def used_percent_of(folder: str) -> int | None:
    """Returns the percent of its life that the drive of `folder` has used, by SMART; None as for `rated_bytes_of`."""
    with contextlib.suppress(OSError, ValueError, KeyError, subprocess.SubprocessError):
        return int(_smart(folder)["nvme_smart_health_information_log"]["percentage_used"])
    return None


def _smart(folder: str) -> Mapping[str, Any]:
    command = ["smartctl", "-j", "-A", drive(folder)["device"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    content: Mapping[str, Any] = json.loads(done.stdout)
    return content


def temperature_of(folder: str) -> float | None:
    """Returns the degrees Celsius of the disk of `folder` by the kernel's sensors; None without a sensor."""
    number = os.stat(folder).st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    # A partition's folder lies in that of its disk. NVMe has the sensor one level higher, at the controller.
    for device in (block / "device", block.parent / "device"):
        for sensor in sorted((*device.glob("hwmon*/temp1_input"), *device.glob("hwmon/hwmon*/temp1_input"))):
            with contextlib.suppress(OSError, ValueError):
                return int(sensor.read_text()) / 1000
    return None


def rated_bytes(smart: Mapping[str, Any]) -> int | None:
    """Returns the bytes written so far divided by the fraction of the drive's life used; None at 0 % of it.

    `smart` is smartctl's JSON of an NVMe drive, whose data units are 512,000 bytes.
    """
    log = smart["nvme_smart_health_information_log"]
    # NVMe reports the used life in percent of the rated endurance, so the quotient is the rating.
    used, written = int(log["percentage_used"]), int(log["data_units_written"]) * 512_000
    return written * 100 // used if used else None


def advice(facts: dict[str, Any]) -> list[str]:
    """Returns advice on changes to this machine, one line each; empty if there is none."""
    about_io, sentences = facts["io"], []
    if about_io["backend"] != BACKENDS[0]:
        sentences.append(
            f"I/O uses {about_io['backend']}, which takes more processor time than io_uring: {about_io['why']}"
        )
    pages = about_io["huge_pages"]
    if not pages["granted"]:
        sentences.append(
            "buffers are on 4 KiB pages, from which O_DIRECT moved 0.6 to 0.75 of the bytes a second on the drives "
            f"that were measured (docs/benchmarks): transparent huge pages are {pages['setting'] or 'missing'}; "
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    # Registration saves the look-up of pages for each block. Only io_uring supports it.
    known = about_io["registered"]
    if about_io["backend"] == "io_uring" and known["got_bytes"] < known["asked_bytes"]:
        available, asked = format_size(known["got_bytes"]), format_size(known["asked_bytes"])
        sentences.append(
            f"only {available} of {asked} of memory can be registered for I/O: RLIMIT_MEMLOCK (ulimit -l) or an older "
            "kernel is the limit; I/O takes about a tenth more processor time"
        )
    sentences += _of_machine(facts)
    for folder in facts["drives"]:
        if "error" in folder:
            continue
        for disk in folder["disks"]:
            where = f"{folder['path']} is on {disk['name']}"
            if disk["rotational"]:
                sentences.append(f"{where}, a rotating disk: paging needs an SSD")
            elif _narrow(disk["link"]):
                sentences.append(f"{where} with {_of_link(disk['link'])}: another slot moves more bytes a second")
        if not folder["o_direct"]:
            sentences.append(
                f"{folder['path']} ({folder['file_system']}) has no O_DIRECT: swap files there use RAM as a cache"
            )
        if folder["file_system"] in ("tmpfs", "ramfs"):
            sentences.append(f"{folder['path']} is memory, not a drive: swap files there save no memory")
    return sentences


def _of_machine(facts: dict[str, Any]) -> list[str]:
    sentences, cards = [], facts["gpus"]
    if facts["kernels"]["isa"] == "scalar":
        sentences.append(f"kernels run without vector instructions, many times slower: {facts['kernels']['why']}")
    if "NVIDIA GPU" in (cards["why"] or ""):
        sentences.append(f"{cards['why']}: install a torch that is built with CUDA, and the driver")
    for card in cards["devices"]:
        if _narrow(card["link"]):
            sentences.append(f"{card['name']} has {_of_link(card['link'])}: another slot moves more bytes a second")
    return sentences


def _narrow(link: dict[str, Any] | None) -> bool:
    return link is not None and link["lanes"] < link["most_lanes"]


def facts(folders: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the complete report.

    An error of a folder is reported in place of its drive.
    """
    report: dict[str, Any] = {
        "machine": machine(),
        "kernels": arithmetic(),
        "memory": memory(),
        "numa": nodes(),
        "gpus": gpus(),
        "io": io(),
        "open_files": _soft_limit(resource.RLIMIT_NOFILE),
        "drives": [],
    }
    for folder in folders:
        try:
            report["drives"].append(drive(folder))
        # One bad folder must not hide the rest of the report.
        except IoError as error:
            report["drives"].append({"path": folder, "error": str(error)})
    return report | {"advice": advice(report)}


class Finding(NamedTuple):
    """What `offload doctor` says of one property of this machine."""

    level: str
    """ "ok", "warning" if a run works and is slower or smaller, "error" if no run works."""
    name: str
    words: str


_FEW_FILES = 1024
"""Open files that systems allow by default. A model of many files needs more than half of them."""
_LITTLE_ROOM = 10 * GIB
"""Free bytes of a drive below which the swap files of hardly any model fit."""


def findings(report: dict[str, Any], probed: bool) -> list[Finding]:
    """Returns what a report of `facts` means for a run; `probed` is True if a probe has measured the machine."""
    about_io, memory_of, cards = report["io"], report["memory"], report["gpus"]["devices"]
    locked, limit, files = about_io["memlock_bytes"], memory_of["limit_bytes"], report["open_files"]
    locked_words = "no limit" if locked is None else format_size(locked)
    few = files is not None and files < _FEW_FILES
    lines = [
        Finding("ok", "native parts", "built for this machine; no compiler is needed"),
        Finding("ok", "I/O", f"{about_io['backend']}: {about_io['why']}"),
        Finding("ok", "locked memory", f"{locked_words} (ulimit -l)"),
        Finding(
            "warning" if few else "ok",
            "open files",
            f"{'no limit' if files is None else files} (ulimit -n)" + ("; run: ulimit -n 4096" if few else ""),
        ),
        Finding(
            "ok",
            "memory",
            f"{format_size(memory_of['free_bytes'])} free"
            + ("" if limit is None else f"; the container allows {format_size(limit)}"),
        ),
        *(Finding("ok", "GPU", f"{card['name']}, {format_size(card['memory_bytes'])}") for card in cards),
    ]
    if not cards:
        lines.append(Finding("warning", "GPU", f"none, so the CPU computes: {report['gpus']['why']}"))
    if cards and "microsoft" in report["machine"]["kernel"].lower():
        words = "WSL pins 0.5 to 1 GiB in all, and copies the rest more slowly; nothing to do"
        lines.append(Finding("warning", "pinned memory", words))
    lines += [finding for folder in report["drives"] for finding in _of_folder(folder)]
    if not report["drives"]:
        lines.append(Finding("warning", "drive", "not examined; give its folder: offload doctor /mnt/nvme"))
    if not probed:
        where = "".join(f" {folder['path']}" for folder in report["drives"] if "error" not in folder)
        words = f"this machine was not measured, so plans need --gpu; run: offload probe{where}"
        lines.append(Finding("warning", "probe", words))
    lines += [Finding("warning", "advice", words) for words in report["advice"]]
    return lines


def _of_folder(folder: dict[str, Any]) -> list[Finding]:
    name = f"drive of {folder['path']}"
    if "error" in folder:
        words = f"{folder['error']}; make the folder, or give one that you may write to"
        try:
            check_folders([folder["path"]])
        except ConfigError as error:  # no drive is mounted there: to make the folder would fill the drive of /
            words = str(error)
        return [Finding("error", name, words)]
    kinds = {True: "rotating", False: "solid state", None: "of unknown kind"}
    kind = ", ".join(kinds[disk["rotational"]] for disk in folder["disks"]) or "of unknown kind"
    how = "O_DIRECT" if folder["o_direct"] else "no O_DIRECT"
    free = f"{format_size(folder['free_bytes'])} free"
    lines = [Finding("ok", name, f"{folder['file_system']} on {folder['device']}, {kind}, {how}, {free}, writable")]
    if folder["free_bytes"] < _LITTLE_ROOM:
        level = "warning" if folder["free_bytes"] > MIB else "error"
        lines.append(Finding(level, name, f"only {free}: free some room, or give another drive"))
    return lines


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the report for people, as pairs of name and value."""
    host, about_io = report["machine"], report["io"]
    pages, events, locked = about_io["huge_pages"], about_io["libaio_events"], about_io["memlock_bytes"]
    shape, known = about_io["defaults"], about_io["registered"]
    of_kernels = report["kernels"]
    threads = f"{count_of(of_kernels['threads'], 'thread')} ({of_kernels['threads_why']})"
    rows = [
        ("processor", f"{host['processor']}, {count_of(host['cores'], 'core')}"),
        ("kernels", f"{of_kernels['isa']} ({of_kernels['why']}), {threads}"),
        ("  instructions", " ".join(of_kernels["features"]) or "none that kernels use"),
        *_of_memory(report["memory"], report["numa"]),
        *_of_gpus(report["gpus"]),
        ("kernel", f"Linux {host['kernel']}"),
        ("versions", ", ".join(f"{name} {v}" for name, v in {"python": host["python"], **host["versions"]}.items())),
        ("I/O backend", f"{about_io['backend']} ({about_io['why']})"),
        *((f"  {name}", words) for name, words in about_io["backends"].items()),
        ("  by default", f"{shape['threads']} x {shape['depth']} blocks of {format_size(shape['block_bytes'])}"),
        ("CRC-32C", about_io["crc32c"]),
        ("2 MiB pages", ("granted" if pages["granted"] else "not granted") + f" (setting: {pages['setting']})"),
        ("registered memory", f"{format_size(known['got_bytes'])} of {format_size(known['asked_bytes'])} requested"),
        ("lockable memory", "no limit" if locked is None else format_size(locked)),
        ("libaio events", f"{events['taken']} of {events['most']} taken"),
    ]
    for folder in report["drives"]:
        if "error" in folder:
            rows.append((folder["path"], folder["error"]))
            continue
        how = "O_DIRECT" if folder["o_direct"] else "no O_DIRECT"
        rows.append(
            (
                folder["path"],
                f"{folder['file_system']} on {folder['device']}, {how}, {format_size(folder['free_bytes'])} free",
            )
        )
        rows += [(f"  {disk['name']}", _of_disk(disk)) for disk in folder["disks"]]
    return rows + [("advice", words) for words in report["advice"]]


def _of_memory(report: dict[str, Any], numa: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    limit = report["limit_bytes"]
    of_group = "no limit of a cgroup" if limit is None else f"limited to {format_size(limit)} by the cgroup"
    rows = [("memory", f"{format_size(report['total_bytes'])}, {of_group}, {format_size(report['free_bytes'])} free")]
    for node in numa if len(numa) > 1 else ():
        size = "" if node["memory_bytes"] is None else f", {format_size(node['memory_bytes'])}"
        rows.append((f"  node {node['node']}", f"processors {node['cpus'] or 'none'}{size}"))
    return rows


def _of_gpus(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [] if report["devices"] else [("GPU", f"none: {report['why']}")]
    for card in report["devices"]:
        node = "" if card["node"] is None else f", node {card['node']}"
        how = "" if card["link"] is None else f", {_of_link(card['link'])}"
        part = "" if card["slice"] is None else f", slice {card['slice']}"
        name = card["name"].partition(" MIG ")[0]
        rows.append(("GPU", f"{name}{part}, {format_size(card['memory_bytes'])}, CUDA {report['cuda']}{how}{node}"))
    return rows + _of_hidden_gpus(report)


def _of_hidden_gpus(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns lines about variables that hide GPUs from torch, and the driver's cards if they differ from torch's."""
    cards = report["cards"] or []
    parts = sum(len(card["slices"]) for card in cards)
    rows = [(f"  {name}", repr(value)) for name, value in report["visible"].items()]
    # The driver's list adds information only if it differs from torch's, or if a card is divided.
    if cards and (report["visible"] or parts or len(cards) != len(report["devices"])):
        seen = count_of(len(report["devices"]), "device")
        rows.append(
            ("  of the driver", f"{count_of(len(cards), 'card')}, {count_of(parts, 'slice')}; torch sees {seen}")
        )
        for card in cards:
            slices = ", ".join(part["profile"] for part in card["slices"])
            rows.append((f"  card {card['index']}", card["name"] + (f", slices {slices}" if slices else "")))
    return rows


def _of_disk(disk: dict[str, Any]) -> str:
    kind = {True: "rotating", False: "solid state", None: ""}[disk["rotational"]]
    how = "" if disk["link"] is None else _of_link(disk["link"])
    return ", ".join(filter(None, (disk["model"], kind, how))) or "nothing known"


def _of_link(link: dict[str, Any]) -> str:
    """Returns lanes and speed of a link in words: current lanes, but the maximum speed.

    A device at rest lowers its speed, so the current speed would mislead.
    """
    return f"{link['lanes']} of {link['most_lanes']} lanes of {link['most_speed']}"


def _huge_pages() -> dict[str, Any]:
    """Returns the system's setting for huge pages, and True if a buffer that is touched is granted them."""
    setting = text("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = setting.partition("[")[2].partition("]")[0]
    buffer = aligned_empty(8 * MIB)
    # One write to each page: the kernel allocates pages when they are first touched.
    buffer[::4096] = bytes(len(buffer) // 4096)
    # Half is enough: with fragmented memory the kernel mixes both sizes.
    return {"setting": chosen, "granted": huge_page_share(buffer) >= 0.5}


def _soft_limit(kind: int) -> int | None:
    """Returns a limit of this process, or None if there is none."""
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


@functools.cache  # each start of an engine asks, and a package's metadata take a millisecond to parse
def _version(name: str) -> str | None:
    """Returns the version of an installed package, or None, as it was when this process first asked."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _number(path: str) -> int | None:
    content = text(path).strip()
    return int(content) if content.isdigit() else None
