"""A device for tests, to torch the accelerator `test`: an address space, streams and lateness, without a GPU.

    device.load()                     before the process's first backward: autograd counts the devices once
    device.seed(7, lateness=0.9)      from here on the same calls run in the same order
    torch.ones(3, device="test")

**Memory.** The device's addresses are mapped without access: a host thread that reads or writes one dies of SIGSEGV.
The backend's own kernels work on a second mapping of the same pages. Memory is reused in the order of streams, at
once, as by CUDA's caching allocator, and new memory is filled with NaN on its stream.

**Streams** are queues. The thread that waits runs what is queued, in any order that events allow, drawn by seed;
`lateness` is the chance that nothing runs when it could, and at 1.0 all work waits until a thread waits for it. Queued
work keeps no memory alive.

**Copies** follow CUDA's rules: from and to pinned memory they are queued, others read or write at the call.
**Operations** are the CPU's kernels with the CPU's bits, queued. Those that depend on values wait, and are counted.
Random numbers are the CPU generator's, drawn when an operation is submitted.

The sources in C++ are in `native/`; `build.py` builds them once.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from tests.device import build

NAME = "test"

RUN, OUT_OF_ORDER, HOST_WAITS, SYNCHRONIZING, COPIES_IN, COPIES_OUT, MOST_QUEUED = range(7)
"""Numbers of the counters: work that ran, and ran after work submitted later; waits of host threads; operations that
waited for their stream; copies to and from the device; the most work that was queued at a time."""


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build.library()))
    library.td_seed.argtypes = [ctypes.c_uint64, ctypes.c_double]
    library.td_counter.restype = ctypes.c_int64
    library.td_set_total.argtypes = [ctypes.c_int64]
    library.td_set_pin_limit.argtypes = [ctypes.c_int64]
    library.td_register.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.td_unregister.argtypes = [ctypes.c_uint64]
    library.td_copy.argtypes = [ctypes.c_uint64] * 3
    library.td_memory.argtypes = [ctypes.POINTER(ctypes.c_int64)]
    return library


@functools.cache
def load() -> None:
    """Makes the device the accelerator of this process, for good."""
    _library()
    from tests.device import module

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)


def loaded() -> bool:
    """Returns True in a process that has the device."""
    return _library.cache_info().currsize > 0


def seed(number: int, lateness: float = 0.9) -> None:
    """Seeds the order in which work runs.

    Args:
        number: The seed.
        lateness: The chance that nothing runs when it could: 0.0 runs all work at its submission, 1.0 none.
    """
    _library().td_seed(number, lateness)


def counter(number: int) -> int:
    """Returns one of the counters, since the process began."""
    return int(_library().td_counter(number))


def poison(on: bool) -> None:
    """Fills new memory with NaN from now on, or no more. On from the start."""
    _library().td_set_poison(int(on))


def set_total_memory(nbytes: int) -> None:
    """Sets the device's memory; beyond it torch raises its out-of-memory error. 4 GiB from the start."""
    _library().td_set_total(nbytes)


def set_pin_limit(nbytes: int | None) -> None:
    """Sets how many bytes of host memory may be registered in all; None is no limit."""
    _library().td_set_pin_limit(-1 if nbytes is None else nbytes)


def register(start: int, nbytes: int) -> int:
    """Pins host memory. Returns 0, or CUDA's error: 2 beyond the limit, 712 where some of it is pinned."""
    return int(_library().td_register(start, nbytes))


def unregister(start: int) -> int:
    """Unpins what was registered at an address. Returns 0, or 713 where nothing was."""
    return int(_library().td_unregister(start))


def read_by_address(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of (numel,) values at an address of the device, made by a kernel of which torch knows nothing.

    It is queued on the stream that is current.
    """
    values = torch.empty(numel, dtype=dtype, device=NAME)
    _library().td_copy(values.data_ptr(), address, values.nbytes)
    return values


def memory() -> dict[str, int]:
    """Returns the allocator's counts, in bytes, and how often it had to empty its cache and found no memory."""
    names = ("allocated", "reserved", "max_allocated", "max_reserved", "total", "retries", "out_of_memory")
    counts = (ctypes.c_int64 * len(names))()
    _library().td_memory(counts)
    return dict(zip(names, counts, strict=True))


def reset_peak_memory() -> None:
    """Makes the peaks of `memory` the present counts."""
    _library().td_reset_peaks()
