"""`torch.test`: the functions that torch and its users look for in the module of a device type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests import device as backend

Stream = torch.Stream
Event = torch.Event


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    pass


class device:
    """A context in which this device is the current one: it always is."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize()


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


capturing = False
"""True while the current stream is to look as if it recorded a graph."""


def is_current_stream_capturing() -> bool:
    return capturing


# -- memory ------------------------------------------------------------------------------------------


integrated = False
"""True if the device is to report that its memory is the host's."""


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(is_integrated=integrated)


def memory_allocated(device: Any = None) -> int:
    return backend.memory()["allocated"]


def memory_reserved(device: Any = None) -> int:
    return backend.memory()["reserved"]


def max_memory_allocated(device: Any = None) -> int:
    return backend.memory()["max_allocated"]


def max_memory_reserved(device: Any = None) -> int:
    return backend.memory()["max_reserved"]


def reset_peak_memory_stats(device: Any = None) -> None:
    backend.reset_peak_memory()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    counts = backend.memory()
    return max(counts["total"] - counts["reserved"], 0), counts["total"]


def memory_stats(device: Any = None) -> dict[str, int]:
    counts = backend.memory()
    return {
        "allocated_bytes.all.current": counts["allocated"],
        "allocated_bytes.all.peak": counts["max_allocated"],
        "reserved_bytes.all.current": counts["reserved"],
        "reserved_bytes.all.peak": counts["max_reserved"],
        "num_alloc_retries": counts["retries"],
        "num_ooms": counts["out_of_memory"],
    }


def empty_cache() -> None:
    torch.accelerator.memory.empty_cache()


# -- random numbers: the CPU's, see `tests.device` -------------------------------------------------------


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
