"""What this machine gives, which way is taken and why: what a bug report should hold."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from offload.aio import BACKENDS, DirectFile, IoQueue, aligned_empty, huge_page_share
from offload.aio._native import crc32c_ways
from offload.aio.backend import DEFAULTS, refusals
from offload.aio.measure import remove
from offload.errors import IoError
from offload.hardware.system import arithmetic, disks, gpus, memory, nodes, processor, text
from offload.sizes import MIB, count_of, format_size

_PACKAGES = ("offload", "torch", "numpy", "transformers", "safetensors", "pydantic")


def machine() -> dict[str, Any]:
    """Processor, memory, kernel, versions."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def io() -> dict[str, Any]:
    """Which backend is taken, why none before it; pages of 2 MiB; limits."""
    refused = refusals()
    taken = next(name for name in BACKENDS if refused[name] is None)
    return {
        "backend": taken,
        "why": "; ".join(words for name in BACKENDS[: BACKENDS.index(taken)] if (words := refused[name]))
        or "the first choice works",
        "backends": {name: refused[name] or "works" for name in BACKENDS},
        "defaults": DEFAULTS[taken]._asdict(),
        "crc32c": f"by {crc32c_ways()[-1]}",
        "huge_pages": _huge_pages(),
        "registered": _registered(),
        "memlock_bytes": _memlock(),
        "libaio_events": {"taken": _number("/proc/sys/fs/aio-nr"), "most": _number("/proc/sys/fs/aio-max-nr")},
    }


def drive(folder: str) -> dict[str, Any]:
    """The file system under `folder`: its type, disks, room, and whether O_DIRECT works. Errors are `IoError`."""
    path = os.path.realpath(folder)
    if not os.path.isdir(path):
        raise IoError(folder, 0, 0, errno.ENOTDIR if os.path.exists(path) else errno.ENOENT, "look at")
    mount = _mount_of(path)
    probe = Path(path) / f".offload-info.{os.getpid()}"
    try:
        with DirectFile(probe, create=True) as file:
            direct = file.direct
    finally:
        remove(probe)
    room = shutil.disk_usage(path)
    return {
        "path": folder,
        "file_system": mount[1],
        "device": mount[0],
        "o_direct": direct,
        "free_bytes": room.free,
        "total_bytes": room.total,
        "disks": disks(path, mount[0]),
    }


def advice(facts: dict[str, Any]) -> list[str]:
    """What to change on this machine, in plain words; empty where all is well."""
    about_io, found = facts["io"], []
    if about_io["backend"] != BACKENDS[0]:
        found.append(
            f"I/O goes by {about_io['backend']}, which takes more processor time than io_uring: {about_io['why']}"
        )
    pages = about_io["huge_pages"]
    if not pages["granted"]:
        found.append(
            "buffers lie on 4 KiB pages, from which O_DIRECT moved 0.6 to 0.75 of the bytes a second on the drives "
            f"that were tried (docs/benchmarks): transparent huge pages are {pages['setting'] or 'not there'}; "
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    known = about_io["registered"]
    if about_io["backend"] == "io_uring" and known["got_bytes"] < known["asked_bytes"]:
        got, asked = format_size(known["got_bytes"]), format_size(known["asked_bytes"])
        found.append(
            f"only {got} of {asked} of memory can be registered for I/O: RLIMIT_MEMLOCK (ulimit -l) or an older "
            "kernel; it costs about a tenth of I/O's processor time"
        )
    found += _of_machine(facts)
    for each in facts["drives"]:
        if "error" in each:
            continue
        for disk in each["disks"]:
            found += _of_disk_to_change(each["path"], disk)
        if not each["o_direct"]:
            found.append(f"{each['path']} ({each['file_system']}) has no O_DIRECT: swap files there use RAM as a cache")
        if each["file_system"] in ("tmpfs", "ramfs"):
            found.append(f"{each['path']} is memory, not a drive: swap files there save none")
    return found


def _of_machine(facts: dict[str, Any]) -> list[str]:
    found, cards = [], facts["gpus"]
    if facts["kernels"]["isa"] == "scalar":
        found.append(f"kernels go without vector instructions, many times slower: {facts['kernels']['why']}")
    if "NVIDIA GPU" in (cards["why"] or ""):
        found.append(f"{cards['why']}: install a torch that is built with CUDA, and the driver")
    for each in cards["devices"]:
        if _narrow(each["link"]):
            found.append(f"{each['name']} has {_of_link(each['link'])}: another slot moves more bytes a second")
    return found


def _of_disk_to_change(path: str, disk: dict[str, Any]) -> list[str]:
    if disk["rotational"]:
        return [f"{path} lies on {disk['name']}, which turns: paging wants an SSD"]
    if _narrow(disk["link"]):
        return [f"{path} lies on {disk['name']} with {_of_link(disk['link'])}: another slot moves more bytes a second"]
    return []


def _narrow(link: dict[str, Any] | None) -> bool:
    return link is not None and link["lanes"] < link["most_lanes"]


def facts(folders: Sequence[str] = ()) -> dict[str, Any]:
    """All of it, with what is known of the drive under each folder."""
    found: dict[str, Any] = {
        "machine": machine(),
        "kernels": arithmetic(),
        "memory": memory(),
        "numa": nodes(),
        "gpus": gpus(),
        "io": io(),
        "drives": [],
    }
    for folder in folders:
        try:
            found["drives"].append(drive(folder))
        except IoError as error:
            found["drives"].append({"path": folder, "error": str(error)})
    return found | {"advice": advice(found)}


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """`facts` for people: names and values."""
    host, about_io = found["machine"], found["io"]
    pages, events, locked = about_io["huge_pages"], about_io["libaio_events"], about_io["memlock_bytes"]
    shape, known = about_io["defaults"], about_io["registered"]
    told = [
        ("processor", f"{host['processor']}, {count_of(host['cores'], 'core')}"),
        *_of_arithmetic(found["kernels"]),
        *_of_memory(found["memory"], found["numa"]),
        *_of_gpus(found["gpus"]),
        ("kernel", f"Linux {host['kernel']}"),
        ("versions", ", ".join(f"{name} {v}" for name, v in {"python": host["python"], **host["versions"]}.items())),
        ("I/O backend", f"{about_io['backend']} ({about_io['why']})"),
        *((f"  {name}", words) for name, words in about_io["backends"].items()),
        ("  by default", f"{shape['threads']} x {shape['depth']} blocks of {format_size(shape['block_bytes'])}"),
        ("CRC-32C", about_io["crc32c"]),
        ("2 MiB pages", ("granted" if pages["granted"] else "not granted") + f" (setting: {pages['setting']})"),
        ("registered memory", f"{format_size(known['got_bytes'])} of {format_size(known['asked_bytes'])} asked for"),
        ("lockable memory", "no limit" if locked is None else format_size(locked)),
        ("libaio events", f"{events['taken']} of {events['most']} taken"),
    ]
    for each in found["drives"]:
        if "error" in each:
            told.append((each["path"], each["error"]))
            continue
        how = "O_DIRECT" if each["o_direct"] else "no O_DIRECT"
        told.append(
            (each["path"], f"{each['file_system']} on {each['device']}, {how}, {format_size(each['free_bytes'])} free")
        )
        told += [(f"  {disk['name']}", _of_disk(disk)) for disk in each["disks"]]
    return told + [("advice", words) for words in found["advice"]]


def _of_arithmetic(found: dict[str, Any]) -> list[tuple[str, str]]:
    threads = f"{count_of(found['threads'], 'thread')} ({found['threads_why']})"
    return [
        ("kernels", f"{found['isa']} ({found['why']}), {threads}"),
        ("  instructions", " ".join(found["features"]) or "none that kernels use"),
    ]


def _of_memory(found: dict[str, Any], numa: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    limit = found["limit_bytes"]
    of_group = "no limit of a cgroup" if limit is None else f"limited to {format_size(limit)} by the cgroup"
    told = [("memory", f"{format_size(found['total_bytes'])}, {of_group}, {format_size(found['free_bytes'])} free")]
    for each in numa if len(numa) > 1 else ():
        size = "" if each["memory_bytes"] is None else f", {format_size(each['memory_bytes'])}"
        told.append((f"  node {each['node']}", f"processors {each['cpus'] or 'none'}{size}"))
    return told


def _of_gpus(found: dict[str, Any]) -> list[tuple[str, str]]:
    if not found["devices"]:
        return [("GPU", f"none: {found['why']}")]
    told = []
    for each in found["devices"]:
        node = "" if each["node"] is None else f", node {each['node']}"
        how = "" if each["link"] is None else f", {_of_link(each['link'])}"
        told.append(("GPU", f"{each['name']}, {format_size(each['memory_bytes'])}, CUDA {found['cuda']}{how}{node}"))
    return told


def _of_disk(disk: dict[str, Any]) -> str:
    kind = {True: "turns", False: "solid state", None: ""}[disk["rotational"]]
    how = "" if disk["link"] is None else _of_link(disk["link"])
    return ", ".join(filter(None, (disk["model"], kind, how))) or "nothing known"


def _of_link(link: dict[str, Any]) -> str:
    """At rest a device lowers its speed, so the most is what counts; of lanes those that are there."""
    return f"{link['lanes']} of {link['most_lanes']} lanes of {link['most_speed']}"


def _huge_pages() -> dict[str, Any]:
    """What the system says, and what it gives: memory is asked for, touched and looked at."""
    setting = text("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = setting.partition("[")[2].partition("]")[0]
    buffer = aligned_empty(8 * MIB)
    buffer[::4096] = bytes(len(buffer) // 4096)
    return {"setting": chosen, "granted": huge_page_share(buffer) >= 0.5}


def _registered() -> dict[str, int]:
    """How much of some memory the kernel registers for a queue (io_uring alone does)."""
    buffer = aligned_empty(16 * MIB)
    with IoQueue() as queue:
        return {"asked_bytes": len(buffer), "got_bytes": queue.register(buffer)}


def _memlock() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _mount_of(path: str) -> tuple[str, str]:
    """Device and type of the file system that `path` lies on."""
    found = [part for part in psutil.disk_partitions(all=True) if Path(path).is_relative_to(part.mountpoint)]
    # Of two on one place the later one is seen.
    longest = max(reversed(found), key=lambda part: len(part.mountpoint), default=None)
    return (longest.device, longest.fstype) if longest else ("?", "?")


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _number(path: str) -> int | None:
    said = text(path).strip()
    return int(said) if said.isdigit() else None
