"""The host's side of one kind of accelerator: pinned memory, and waits of a thread.

`AcceleratorDevice` is the same code for every accelerator. It reaches through a `HostSide` what torch offers for some
of them only:

    CUDA, ROCm    `cuda_host_side`: memory of our own is pinned piece by piece through the runtime
    all others    `TorchHostSide`: torch allocates pinned memory

`device_choice.HOST_SIDES` has an entry for each type of device with a side of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from offload.aio import aligned_empty
from offload.sizes import PAGE, format_size
from offload.swapper.memory.limits import free_host_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBlock:
    """Host memory of one allocation. It starts at a whole page, and its last page belongs to no other block."""

    buffer: memoryview
    """Its bytes, which live until the last view of them is gone."""
    releases_pages: bool
    """True for memory of `aligned_empty`, whose unused pages `release_pages` may give back to the system."""


class HostSide(Protocol):
    """The functions of the host that differ between kinds of accelerators. Any thread may call any of them."""

    def allocate(self, nbytes: int) -> HostBlock:
        """Allocates host memory near the device, which `pin` can pin in parts."""

    def pin(self, memory: torch.Tensor) -> str | None:
        """Pins the pages of `memory`, (nbytes,) uint8 of `allocate` from the start of a page.

        Returns:
            None if they are pinned now, else the reason of the refusal, in words.
        """

    def unpin(self, address: int) -> str | None:
        """Undoes the call of `pin` for the memory that begins at `address`; returns a refusal as `pin` does."""

    def wait(self, event: torch.Event) -> None:
        """Blocks the calling thread until `event` is done, without keeping a core busy if the device can do that."""


class TorchHostSide:
    """The host's side of any accelerator, by the functions that torch offers for all of them.

    Torch pins only memory that it allocates itself, so `allocate` returns such memory, pinned as a whole.
    """

    def __init__(self, device: torch.device) -> None:
        """Takes the device; torch pins for the accelerator of the process, of which there is one kind."""
        self._device = device
        self._refusal = f"torch has not allocated this memory as pinned memory for {device.type}"

    def allocate(self, nbytes: int) -> HostBlock:
        """Returns memory that torch has pinned; ordinary memory if torch refuses or if too little memory is free."""
        taken = bytes_taken_by_torch(nbytes + PAGE)
        if taken > free_host_memory():
            self._refusal = (
                f"torch would take {format_size(taken)} for {format_size(nbytes)} of pinned memory, more than is free"
            )
            return HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)
        try:
            whole = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:
            self._refusal = str(error).partition("\n")[0]
            return HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)
        start = -whole.data_ptr() % PAGE
        # The array keeps torch's memory alive, and the view keeps the array alive.
        return HostBlock(buffer=whole[start : start + nbytes].numpy().data, releases_pages=False)

    def pin(self, memory: torch.Tensor) -> str | None:
        """Returns None for memory that torch has allocated as pinned, the reason for other memory."""
        return None if memory.is_pinned() else self._refusal

    def unpin(self, address: int) -> str | None:
        """Does nothing: the memory is unpinned when torch frees it."""
        return None

    def wait(self, event: torch.Event) -> None:
        """Waits as torch does for this accelerator."""
        event.synchronize()


def bytes_taken_by_torch(nbytes: int) -> int:
    """Returns the bytes that torch's allocator of pinned memory takes for `nbytes`: the next power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()
