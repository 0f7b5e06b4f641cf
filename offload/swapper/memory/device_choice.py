"""The choice of the device that a process computes on, by name, and its device object."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from offload.errors import ConfigError
from offload.sizes import count_of
from offload.swapper.memory.accelerator import AcceleratorDevice, current_index, set_index
from offload.swapper.memory.cuda_host_side import CudaHostSide
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_side import HostSide, TorchHostSide

HOST_SIDES: dict[str, Callable[[torch.device], HostSide]] = {"cuda": CudaHostSide}
"""Constructors of the host's side, by torch's name of the device type, for types that have a side of their own."""

_ROCM = ("hip", "rocm")
"""Names of AMD's GPUs that torch does not go by."""


def accelerator_type() -> str | None:
    """Returns the type of the accelerator that torch finds, such as "cuda" (ROCm too) or "xpu"; None without one."""
    # Asked first: torch 2.6 raises if there is none.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def compute_device(name: str, setting: str = '"device"') -> torch.device:
    """Returns the device that this process computes on; if there are several, LOCAL_RANK selects the current one.

    Args:
        name: "auto", "cpu", or the type of an accelerator as torch names it: "cuda" (ROCm too), "xpu", "npu". "auto" is
            the accelerator that torch finds, and the CPU without one.
        setting: the user's name for the setting, for error messages.

    Raises:
        ConfigError: if the name is unknown, or if the device does not exist.
    """
    found = None if name == "cpu" else accelerator_type()
    if name not in ("auto", "cpu", found):
        if not _is_type(name) or name in _ROCM:
            known = "" if found in (None, "cuda") else f", {found}"
            raise ConfigError(f"there is no device {name!r}: {setting} may be auto, cpu, cuda{known}{_hint(name)}")
        raise ConfigError(f'{setting} is {name}, but torch finds no {name.upper()} device; set it to "auto" or "cpu"')
    if found is None:
        return torch.device("cpu")
    local, count = os.environ.get("LOCAL_RANK", "0"), torch.accelerator.device_count()
    # torchrun shows all GPUs to each process, other launchers show one. A current device other than 0 is the user's.
    if count > 1 and current_index() == 0:
        if not local.isdecimal() or int(local) >= count:
            raise ConfigError(
                f"LOCAL_RANK is {local}, but torch finds {count_of(count, 'device')}; start one process for each"
            )
        set_index(int(local))
    return torch.device(found, current_index())


def _hint(name: str) -> str:
    """Returns what somebody who has given such a name is looking for."""
    if name in _ROCM:
        return "; ROCm is cuda to torch"
    kind, colon, index = name.partition(":")
    # One process computes on one device, which it sees as the first.
    return f"; CUDA_VISIBLE_DEVICES={index} chooses one of several" if colon and kind == "cuda" else ""


def _is_type(name: str) -> bool:
    """Returns True if `name` is a type of device that torch knows, present or not."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return False
    return device.type == name and name != "meta"


@functools.cache
def open_device(device: torch.device) -> Device:
    """Returns the device object of a torch device, the same one for all engines of a process."""
    if device.type == "cpu":
        return Device(device)
    if device.index is None:
        return open_device(torch.device(device.type, current_index()))
    return AcceleratorDevice(device, host_side_of(device))


def host_side_of(device: torch.device) -> HostSide:
    """Returns the host's side of an accelerator."""
    return HOST_SIDES.get(device.type, TorchHostSide)(device)
