"""The host's side of CUDA and ROCm: registered host memory, the NUMA node of the GPU, and waits that sleep."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import torch

from offload.aio import aligned_empty, prefer_node
from offload.sizes import align_up
from offload.swapper.memory.host_side import HostBlock


class CudaHostSide:
    """Pins memory of ours through the CUDA runtime, as torch exposes it; ROCm has the same names there."""

    def __init__(self, device: torch.device) -> None:
        """Takes the GPU; nothing is asked of the driver yet."""
        self._device = device
        self._of_thread = threading.local()

    def allocate(self, nbytes: int) -> HostBlock:
        """Returns memory that lies on the NUMA node of the GPU, as far as that node has free memory."""
        block = HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)
        # A copy from memory of another NUMA node crosses the link between the sockets.
        node = memory_node(torch.cuda.get_device_properties(self._device)) if nbytes else None
        if node is not None:
            # Before pinning: the first touch allocates the pages, and pinning is the first touch.
            prefer_node(block.buffer, node)
        return block

    def pin(self, memory: torch.Tensor) -> str | None:
        """Registers whole pages with CUDA."""
        cudart: Any = torch.cuda.cudart()
        return self._refusal(cudart.cudaHostRegister(memory.data_ptr(), align_up(memory.nbytes), 0))

    def unpin(self, address: int) -> str | None:
        """Ends a registration."""
        cudart: Any = torch.cuda.cudart()
        return self._refusal(cudart.cudaHostUnregister(address))

    def wait(self, event: torch.Event) -> None:
        """Sleeps until `event` is done: a thread that spins would take a core from the update kernels.

        The host spins in a wait for a `torch.Event`, since torch has no flag for it there. So a stream that only this
        thread uses waits for `event`, and the host waits for an event of CUDA's on that stream, whose waits sleep.
        """
        if event.query():
            return
        stream = self._stream()
        stream.wait_event(event)
        stream.record_event(torch.cuda.Event(blocking=True)).synchronize()

    def _stream(self) -> torch.cuda.Stream:
        """Returns the calling thread's stream for waits."""
        stream: torch.cuda.Stream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            # torch has a pool of 32 streams for each priority and hands them out in turns, so a new stream of the
            # default priority may be one that copies, behind whose copies a wait would queue. Hence the high priority.
            stream = self._of_thread.stream = torch.cuda.Stream(self._device, priority=-1)
        return stream

    def _refusal(self, result: Any) -> str | None:
        """Returns CUDA's message for the `result` of a call of its runtime; None if the call succeeded."""
        if int(result) == 0:
            return None
        # CUDA also stores the error as its last one. Torch asks for the last error after its next kernel, which would
        # then seem to have failed. Here the launch of a dummy kernel consumes that error.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        cudart: Any = torch.cuda.cudart()
        return f"{cudart.cudaGetErrorString(result)} (CUDA error {int(result)})"


def memory_node(gpu: Any, folder: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Returns the NUMA node next to the GPU with torch's properties `gpu`.

    None on a machine of one node, and if the system or an older torch does not report the node.
    """
    place = pci_address(gpu)
    try:
        node = -1 if place is None else int((folder / place / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pci_address(gpu: Any) -> str | None:
    """Returns the PCI address of the GPU with torch's properties `gpu`; None if torch is too old to report it."""
    try:
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    except AttributeError:
        return None
