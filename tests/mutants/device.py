"""Of the path to a GPU: waits and pins taken out, reads of device memory by the host. The test device finds them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ON_DEVICE = "tests/accelerators/test_device_engine.py"
_ACCELERATOR = "offload.swapper.memory.device"


def _waits(name: str, module: str, old: str, new: str) -> Mutant:
    return Mutant(f"{name}, on the test device", module, old, new, _ON_DEVICE)


def _reads(name: str, module: str, old: str, tensor: str, before: bool = True) -> Mutant:
    """The host reads the first byte of a tensor on the device, before or after a line."""
    indentation = old[: len(old) - len(old.lstrip())]
    read = f'{indentation}__import__("ctypes").string_at({tensor}.data_ptr(), 1)'
    new = f"{read}\n{old}" if before else f"{old}\n{read}"
    return Mutant(f"read {name} on the host, on the test device", module, old, new, _ON_DEVICE)


MUTANTS = (
    Mutant(
        "load weights where an upload ahead may still read",
        "offload.swapper.pager",
        "                entry.copied.wait()  # an upload ahead may still read where the load is about to write\n",
        "",
        "tests/accelerators/test_device_streams.py::test_a_load_writes_no_weights_that_are_still_uploaded",
    ),
    _waits("wait for no event of a stream", _ACCELERATOR, "        self._side.wait(self.event)\n", "        pass\n"),
    _waits(
        "unpin under a copy",
        _ACCELERATOR,
        "            self.synchronize()\n        finally:",
        "            pass\n        finally:",
    ),
    _waits(
        "read a batch of the caller after the return",
        "offload.engine.data",
        "        return staged.to(device, non_blocking=True)",
        "        return value.to(device, wanted, non_blocking=True)",
    ),
    _waits(
        "compute before the upload",
        "offload.swapper.pager",
        "        try:\n            # compute stream: the upload may be in flight.\n"
        "            self._device.wait_event(uploaded)",
        "        try:\n            pass",
    ),
    _waits(
        "write over what compute reads",
        "offload.swapper.memory.device_arena",
        "if first < stop and offset < last)",
        "if False)",
    ),
    _waits(
        "free a gradient under its copy",
        "offload.engine.gradient_transfer",
        "        part = sent.source[first : first + numel]\n",
        "        part = sent.source[first : first + numel].clone()\n",
    ),
    _reads(
        "an upload's destination, or a gradient",
        _ACCELERATOR,
        "        address = host.data_ptr()",
        "(source if host is destination else destination)",
    ),
    _reads(
        "a gradient that leaves",
        "offload.engine.gradient_transfer",
        "        last = first + numel == len(sent.source)",
        "part",
    ),
)
