"""What the machine is, as the system tells it: processors and their nodes, memory and its limit, GPUs, disks.

Nothing is measured and nothing is touched. What the system does not say is None, or left out.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from offload import kernels
from offload.kernels import _native
from offload.kernels.settings import isa_from
from offload.sizes import count_of
from offload.swapper.memory.device import memory_node, pci_address
from offload.swapper.memory.limits import free_host_memory, memory_limits

_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16")
"""Those that kernels, casts or matrix products use."""
_SYSTEM = Path("/sys")


def processor() -> str:
    for line in text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def arithmetic() -> dict[str, Any]:
    """Which kernels are taken and why, what the processor has for them, and how many threads run them."""
    asked, threads = os.environ.get("OFFLOAD_ISA"), os.environ.get("OFFLOAD_THREADS")
    supported = _native.supported_isas()
    return {
        "isa": isa_from(os.environ, supported),
        "why": "OFFLOAD_ISA asks for it" if asked else "the best that this processor has",
        "supported": supported,
        "features": features(text("/proc/cpuinfo")),
        "threads": kernels.thread_count(),
        "threads_why": "OFFLOAD_THREADS asks for it" if threads else "the cores that this process may use",
    }


def features(cpuinfo: str) -> list[str]:
    """Of `_FEATURES` those that the first processor has."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((set(said.split()) for name, _, said in lines if name.strip() in ("flags", "Features")), set())
    return [name for name in _FEATURES if name in flags]


def memory() -> dict[str, Any]:
    """Bytes of RAM, of the limit of this process's cgroup, and what it may still take."""
    total = psutil.virtual_memory().total
    limits = [limit for limit, _ in memory_limits() if limit < total]  # an older kernel's word for none is 2**63
    return {
        "total_bytes": total,
        "limit_bytes": min(limits, default=None),
        "free_bytes": free_host_memory(),
    }


def nodes(system: Path = _SYSTEM) -> list[dict[str, Any]]:
    """NUMA nodes: their processors, and bytes of their memory."""
    found = []
    for folder in sorted((system / "devices/system/node").glob("node[0-9]*"), key=lambda each: int(each.name[4:])):
        words = next((line.split() for line in text(folder / "meminfo").splitlines() if "MemTotal:" in line), None)
        found.append(
            {
                "node": int(folder.name[4:]),
                "cpus": text(folder / "cpulist").strip(),
                "memory_bytes": None if words is None else int(words[-2]) * 1024,
            }
        )
    return found


# -- GPUs ---------------------------------------------------------------------------------------------


def gpus(system: Path = _SYSTEM) -> dict[str, Any]:
    """Those that torch may compute on, each with its link; and why there is none."""
    if not torch.cuda.is_available():
        return {"why": _no_gpu(system), "cuda": torch.version.cuda, "devices": []}
    devices = [_gpu(index, system) for index in range(torch.cuda.device_count())]
    return {"why": None, "cuda": torch.version.cuda, "devices": devices}


def _no_gpu(system: Path) -> str:
    built = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
    cards = [each for each in (system / "bus/pci/devices").glob("*") if _is_nvidia(each)]
    return f"torch {torch.__version__} {built}" + (
        f", and {count_of(len(cards), 'NVIDIA GPU is', 'NVIDIA GPUs are')} there" if cards else ""
    )


def _is_nvidia(device: Path) -> bool:
    return text(device / "vendor").strip() == "0x10de" and text(device / "class").startswith("0x03")


def _gpu(index: int, system: Path) -> dict[str, Any]:
    about = torch.cuda.get_device_properties(index)
    address = pci_address(about)
    return {
        "name": about.name,
        "memory_bytes": about.total_memory,
        "capability": f"{about.major}.{about.minor}",
        "pci": address,
        "node": memory_node(about, system / "bus/pci/devices"),
        "link": None if address is None else link(system / "bus/pci/devices" / address),
    }


def link(device: Path) -> dict[str, Any] | None:
    """The PCIe link of a device's folder: lanes and speed of now, and the most; None where it has none.

    The speed of now is that of a device at rest, which many lower.
    """
    names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
    said = [text(device / name).strip() for name in names]
    if not (said[0].isdigit() and said[1].isdigit()):
        return None
    return {"lanes": int(said[0]), "most_lanes": int(said[1]), "speed": said[2], "most_speed": said[3]}


# -- disks --------------------------------------------------------------------------------------------


def disks(folder: str, device: str, system: Path = _SYSTEM) -> list[dict[str, Any]]:
    """The disks below the file system of `folder`, which is mounted from `device`; none for memory or a network."""
    number = os.stat(folder).st_dev
    if os.major(number) == 0 and device.startswith("/dev/") and os.path.exists(device):  # such as btrfs
        number = os.stat(device).st_rdev
    place = system / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    return [_disk(each) for each in _whole(place.resolve())] if place.exists() else []


def _whole(device: Path) -> list[Path]:
    """The disks that a partition, a mapping or an array of disks lies on."""
    below = sorted((device / "slaves").glob("*"))
    if below:
        return list(dict.fromkeys(disk for each in below for disk in _whole(each.resolve())))
    return [device.parent] if (device / "partition").exists() else [device]


def _disk(device: Path) -> dict[str, Any]:
    """Of a folder of /sys/block."""
    controller = (device / "device").resolve()
    model = text(device / "device/model").strip() or None
    return {
        "name": device.name,
        "model": model,
        # What a guest is lent has no model, and says that it turns whatever it lies on.
        "rotational": None if model is None else text(device / "queue/rotational").strip() == "1",
        "link": link(controller / "device") or link(controller),
    }


def text(path: str | Path) -> str:
    """What a file says; nothing where it cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
