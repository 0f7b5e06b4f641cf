"""Memory of a device that the host cannot touch: a stray access ends the process with SIGSEGV.

On a GPU the addresses of device memory mean nothing to the host. Here they are addresses of the process, so the pages
are made unreadable, but for the moments in which the device itself works on them: a *window*. A window is open for
every thread, so a stray access is only sure to be seen where no other thread computes or copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence

import torch

_LIBC = ctypes.PyDLL(None, use_errno=True)  # with the GIL: a call takes a microsecond
_NONE, _READ_WRITE = 0, 3  # PROT_NONE, PROT_READ | PROT_WRITE


class ProtectedMemory:
    """All memory of one device. The host reaches it while no thread asks for a `guard`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Kept until the device goes: pages whose addresses were reused would be protected by mistake.
        self._blocks: list[tuple[mmap.mmap, int, int]] = []
        """The mapping, first and last address of each allocation."""
        self._windows, self._guards = 0, 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns (nbytes,) uint8 of new pages."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        block = mmap.mmap(-1, nbytes)
        first = ctypes.addressof(ctypes.c_char.from_buffer(block))
        with self._lock:
            self._blocks.append((block, first, first + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
            self._apply()
        return torch.frombuffer(block, dtype=torch.uint8)

    def holds(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Returns True if one of `ranges`, of (first address, last address), is in this memory."""
        return any(first < end and start < last for first, last in ranges for _, start, end in self._blocks)

    def guard(self, more: int) -> None:
        """Keeps the host out, on all threads, while the sum of all `more` is positive."""
        self._change(guards=more)

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Lets the device work on its memory while the context is open."""
        self._change(windows=1)
        try:
            yield
        finally:
            self._change(windows=-1)

    def _change(self, windows: int = 0, guards: int = 0) -> None:
        with self._lock:
            before = self._is_open
            self._windows, self._guards = self._windows + windows, self._guards + guards
            if before != self._is_open:
                self._apply()

    @property
    def _is_open(self) -> bool:
        return self._windows > 0 or self._guards == 0

    def _apply(self) -> None:
        """Gives all pages the protection of now."""
        for _, first, last in self._blocks:
            if _LIBC.mprotect(
                ctypes.c_void_p(first), ctypes.c_size_t(last - first), _READ_WRITE if self._is_open else _NONE
            ):
                raise OSError(ctypes.get_errno(), "mprotect")
