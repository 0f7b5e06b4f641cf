"""Facts about the machine as the system reports them: processors and NUMA nodes, memory and limits, GPUs, disks.

This module measures and writes nothing. A fact that the system does not report is None or left out.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import psutil
import torch

from offload import kernels
from offload.errors import ConfigError
from offload.fileio import check_name
from offload.kernels import _native
from offload.kernels.settings import isa_from
from offload.notices import Remark
from offload.sizes import count_of, format_size
from offload.swapper.memory.device import memory_node, pci_address
from offload.swapper.memory.limits import cgroup_limits, free_host_memory

_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16")
"""Instruction sets that kernels, casts or matrix products use."""
_SYSTEM = Path("/sys")
_HIDING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables of the environment that hide or order GPUs."""


def processor() -> str:
    """Returns the model name of the processor, or its architecture if the name is unknown."""
    for line in text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def arithmetic() -> dict[str, Any]:
    """Returns the kernels in use with the reason, the processor's instruction sets and the number of threads."""
    asked, threads = os.environ.get("OFFLOAD_ISA"), os.environ.get("OFFLOAD_THREADS")
    supported = _native.supported_isas()
    return {
        "isa": isa_from(os.environ, supported),
        "why": "set by OFFLOAD_ISA" if asked else "the best that this processor has",
        "supported": supported,
        "features": features(text("/proc/cpuinfo")),
        "threads": kernels.thread_count(),
        "threads_why": "set by OFFLOAD_THREADS" if threads else "the cores that this process may use",
    }


def features(cpuinfo: str) -> list[str]:
    """Returns the names of `_FEATURES` that the first processor in `cpuinfo` supports."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    # The line is called "flags" on x86 and "Features" on ARM.
    flags = next((set(values.split()) for name, _, values in lines if name.strip() in ("flags", "Features")), set())
    return [name for name in _FEATURES if name in flags]


def memory() -> dict[str, Any]:
    """Returns in bytes the RAM, the limit of this process's cgroup, and the memory that is free for this process."""
    total = psutil.virtual_memory().total
    limits = [
        limit.nbytes for limit in cgroup_limits() if limit.nbytes < total
    ]  # older kernels report 2**63 for no limit
    return {"total_bytes": total, "limit_bytes": min(limits, default=None), "free_bytes": free_host_memory()}


def nodes(system: Path = _SYSTEM) -> list[dict[str, Any]]:
    """Returns the NUMA nodes with their processors and bytes of memory."""
    rows = []
    for folder in sorted((system / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        words = next((line.split() for line in text(folder / "meminfo").splitlines() if "MemTotal:" in line), None)
        rows.append(
            {
                "node": int(folder.name[4:]),
                "cpus": text(folder / "cpulist").strip(),
                "memory_bytes": None if words is None else int(words[-2]) * 1024,
            }
        )
    return rows


# -- GPUs ---------------------------------------------------------------------------------------------


def gpus(system: Path = _SYSTEM) -> dict[str, Any]:
    """Returns the GPUs that torch may use, each with its PCIe link, or the reason why there is none.

    "visible" contains the environment variables that hide or order GPUs. "cards" contains all GPUs and slices (MIG)
    that the driver reports, regardless of these variables; None without the driver's tool.
    """
    shown, cards = visible(os.environ), driver_cards()
    about = {"cuda": torch.version.cuda, "visible": shown, "cards": cards}
    if not torch.cuda.is_available():
        return {"why": _no_gpu(system, shown), "devices": [], **about}
    devices = [_gpu(index, system, cards or []) for index in range(torch.cuda.device_count())]
    return {"why": None, "devices": devices, **about}


def visible(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `environ` that hide or order GPUs, with their values; an empty value hides all."""
    return {name: environ[name] for name in _HIDING if name in environ}


def driver_cards() -> list[dict[str, Any]] | None:
    """Returns the cards of the NVIDIA driver with their slices; None if its tool is missing or fails."""
    said = nvidia_smi("-L")
    return None if said is None or said.returncode else parse_cards(said.stdout)


def nvidia_smi(*options: str) -> subprocess.CompletedProcess[str] | None:
    """Runs the tool of the NVIDIA driver; returns None if it is missing or does not end."""
    try:
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def parse_cards(listed: str) -> list[dict[str, Any]]:
    """Returns the cards of the output of `nvidia-smi -L`: index, name and UUID, and profile and UUID of each slice."""
    cards: list[dict[str, Any]] = []
    for line in listed.splitlines():
        card = re.match(r"GPU (\d+): (.+) \(UUID: (\S+)\)", line)
        part = re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (\S+)\)", line)
        if card:
            cards.append({"index": int(card[1]), "name": card[2], "uuid": card[3], "slices": []})
        elif part and cards:
            cards[-1]["slices"].append({"profile": part[1], "uuid": part[2]})
    return cards


def _no_gpu(system: Path, shown: Mapping[str, str]) -> str:
    """Returns the reason why torch finds no GPU, with the number of NVIDIA cards on the PCI bus."""
    built = torch.version.cuda is not None or torch.version.hip is not None
    why = f"torch {torch.__version__} {'finds no CUDA device' if built else 'is built without CUDA'}"
    # A card on the bus that torch does not see points to a missing driver or a CPU build of torch.
    cards = [
        device
        for device in (system / "bus/pci/devices").glob("*")
        # A display controller (class 0x03) of NVIDIA (vendor 0x10de).
        if text(device / "vendor").strip() == "0x10de" and text(device / "class").startswith("0x03")
    ]
    why += f", and {count_of(len(cards), 'NVIDIA GPU is', 'NVIDIA GPUs are')} there" if cards else ""
    return why + "".join(f"; {name} is {value!r}" for name, value in shown.items() if built)


def _gpu(index: int, system: Path, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(index)
    address = pci_address(about)
    # Older torch has no UUID. A UUID of torch lacks the driver's "GPU-" or "MIG-".
    uuid = getattr(about, "uuid", None)
    return {
        "name": about.name,
        "slice": slice_of(about.name, None if uuid is None else str(uuid), cards),
        "uuid": None if uuid is None else str(uuid),
        "memory_bytes": about.total_memory,
        "capability": f"{about.major}.{about.minor}",
        "pci": address,
        "node": memory_node(about, system / "bus/pci/devices"),
        "link": None if address is None else link(system / "bus/pci/devices" / address),
    }


def slice_of(name: str, uuid: str | None, cards: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the profile, such as "3g.20gb", of a torch device that is a slice (MIG); None for an undivided card.

    CUDA adds "MIG" and the profile to the name of a slice.
    """
    for card in cards:
        for part in card["slices"]:
            if uuid is not None and part["uuid"].endswith(uuid):
                return str(part["profile"])
    return name.partition(" MIG ")[2] or None


def link(device: Path) -> dict[str, Any] | None:
    """Returns lanes and speed of a device's PCIe link, current and maximum; None if the device has no link.

    Many devices lower their speed at rest, and the current speed is read at rest.
    """
    names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
    values = [text(device / name).strip() for name in names]
    if not (values[0].isdigit() and values[1].isdigit()):
        return None
    return {"lanes": int(values[0]), "most_lanes": int(values[1]), "speed": values[2], "most_speed": values[3]}


# -- disks --------------------------------------------------------------------------------------------


def disks(folder: str, device: str, system: Path = _SYSTEM) -> list[dict[str, Any]]:
    """Returns the disks below the file system of `folder`; none for memory or a network."""
    number = os.stat(folder).st_dev
    if (
        os.major(number) == 0 and device.startswith("/dev/") and os.path.exists(device)
    ):  # btrfs, for example, reports an anonymous device number: take the mounted device's
        number = os.stat(device).st_rdev
    entry = system / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    return [_disk(disk) for disk in _physical_disks(entry.resolve())] if entry.exists() else []


def _physical_disks(device: Path) -> list[Path]:
    below = sorted((device / "slaves").glob("*"))
    if below:
        return list(dict.fromkeys(disk for entry_below in below for disk in _physical_disks(entry_below.resolve())))
    return [device.parent] if (device / "partition").exists() else [device]


def _disk(device: Path) -> dict[str, Any]:
    # An NVMe disk's `device` is its controller, whose own `device` is the PCI function with the link.
    controller = (device / "device").resolve()
    model = text(device / "device/model").strip() or None
    return {
        "name": device.name,
        "model": model,
        # A virtual disk has no model and reports that it rotates, even on a solid-state drive of the host.
        "rotational": None if model is None else text(device / "queue/rotational").strip() == "1",
        "link": link(controller / "device") or link(controller),
    }


def text(path: str | Path) -> str:
    """Returns the content of a file, or "" if the file cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# -- mounts --------------------------------------------------------------------------------------------
#
# The file system below a folder, and notices on swap folders in places that a user may not expect.


_FOR_DRIVES = ("/mnt", "/media", "/run/media")
"""Folders in which drives are mounted, by custom."""


class Mount(NamedTuple):
    """A mounted file system."""

    device: str
    kind: str
    point: str
    """The folder on which it is mounted."""


def mount_of(path: str | Path) -> Mount:
    """Returns the file system that contains `path`; every field is "?" if the system does not say."""
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(path).is_relative_to(part.mountpoint)]
    # The mount point with the longest path is the innermost one. If two file systems are mounted on one folder, the
    # later mount hides the earlier one.
    longest = max(reversed(mounts), key=lambda part: len(part.mountpoint), default=None)
    return Mount(longest.device, longest.fstype, longest.mountpoint) if longest else Mount("?", "?", "?")


def check_folders(folders: Iterable[str]) -> None:
    """Raises an error if a swap folder would be created on the drive of / in a place for drives, or with its parent.

    The path is then usually mistyped, or its drive is not mounted. Any folder may be created on another drive, and in
    the folder for temporary files.
    """
    for name in folders:
        check_name(Path(name), '"nvme_path"')
        path = Path(os.path.realpath(name))
        there = next(parent for parent in path.parents if parent.exists())
        for_drives = not path.exists() and any(path.is_relative_to(place) for place in _FOR_DRIVES)
        if for_drives and _is_with_root(there):
            missing = there / path.relative_to(there).parts[0]
            raise ConfigError(
                f"nvme_path {name}: there is no {missing}, and no drive is mounted at {there}: mount the drive; or, if "
                f"swap files shall go to the drive of /, make the folder: mkdir -p {path}"
            )
        if there == path.parent or not _is_with_root(there) or path.is_relative_to(os.path.realpath(gettempdir())):
            continue
        raise ConfigError(
            f"nvme_path {name} does not exist, and neither does the folder above it, {path.parent}: the first one on "
            f"that path which exists is {there}, on the drive of /; correct the path, mount the drive, or make "
            f"{path.parent}"
        )


def folder_notices(folders: Iterable[str]) -> Iterator[str]:
    """Yields a notice for each swap folder that will be created, or that may lie on the drive of / by mistake.

    The notice is a `Remark` for an ordinary new folder. It is a warning for a folder on the drive of / in a place where
    drives are usually mounted: the path may be mistyped, or its drive may not be mounted.
    """
    for name in folders:
        path = Path(os.path.realpath(name))
        there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
        mount = mount_of(there)
        on = f"the drive of {mount.point} ({mount.device}, {format_size(shutil.disk_usage(there).free)} free)"
        if _is_with_root(there) and any(path.is_relative_to(root) for root in _FOR_DRIVES):
            yield (
                f"swap files go to {path} on {on}: no drive is mounted there; if the path is mistyped or its drive not "
                "mounted, stop"
            )
        elif there != path:
            yield Remark(f"{path} is made for swap files, on {on}")


def _is_with_root(path: Path) -> bool:
    """Returns True if a folder is on the file system of /."""
    return path.stat().st_dev == os.stat("/").st_dev
