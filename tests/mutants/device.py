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
    Mutant(
        "compare gathered weights in memory that the user has filled, on the test device",
        "offload.engine.access",
        "            values = values.cpu()\n",
        "",
        _ON_DEVICE,
    ),
    _waits(
        "copy on the stream of compute",
        _ACCELERATOR,
        "        with self._submitting_to(stream):\n            for event",
        "        if True:\n            for event",
    ),
    _waits(
        "start a copy before what it waits for",
        _ACCELERATOR,
        "                self._order(stream, event)\n",
        "                pass\n",
    ),
    _waits(
        "record the event of a copy on the stream of compute",
        _ACCELERATOR,
        "non_blocking=True)\n        return _StreamEvent(stream, self._side)",
        "non_blocking=True)\n        return self.record_event()",
    ),
    _waits("wait for no event of a stream", _ACCELERATOR, "        self._side.wait(self.event)\n", "        pass\n"),
    _waits("call each event done", _ACCELERATOR, "return bool(self.event.query())", "return True"),
    _waits("order no stream after an event", _ACCELERATOR, "stream.wait_event(event.event)", "pass"),
    _waits(
        "copy over the border of two pins",
        _ACCELERATOR,
        "in cut(address, address + host.nbytes, self._borders):",
        "in [(address, address + host.nbytes)]:",
    ),
    _waits(
        "unpin under a copy",
        _ACCELERATOR,
        "            self.synchronize()\n        finally:",
        "            pass\n        finally:",
    ),
    _waits(
        "leave the stream of a copy current", _ACCELERATOR, "            torch.accelerator.set_stream(before)\n", ""
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
        "write to a new arena under compute that reads its memory",
        "offload.swapper.memory.device_arena",
        "self._readers = [(0, nbytes, self._earlier_compute())]",
        "self._readers = []",
    ),
    _waits(
        "fill what stays on the device under compute that reads its memory",
        "offload.swapper.memory.device_arena",
        "        for event in device_buffer.after:\n            event.wait()\n        return self.view",
        "        return self.view",
    ),
    _waits(
        "count no shortages of memory",
        "offload.swapper.memory.device",
        'int(stats.get("num_ooms", 0))',
        "0",
    ),
    _waits(
        "give no memory that torch keeps back",
        "offload.swapper.memory.device",
        "        torch.get_device_module(device).empty_cache()",
        "        pass",
    ),
    _waits(
        "run a model in a capture of a graph",
        _ACCELERATOR,
        "return asked is not None and bool(asked())",
        "return False",
    ),
    _waits(
        "let a gradient leave before it is computed",
        "offload.engine.gradient_transfer",
        "(sent.computed,)",
        "()",
    ),
    _waits(
        "add a gradient before it is here",
        "offload.engine.gradient_transfer",
        "arriving.done.wait()",
        "pass",
    ),
    _waits(
        "free a gradient under its copy",
        "offload.engine.gradient_transfer",
        "        part = sent.source[first : first + numel]\n",
        "        part = sent.source[first : first + numel].clone()\n",
    ),
    _waits(
        "evict a host buffer under its copy",
        "offload.swapper.caches",
        "        entry.copied.wait()\n        entry.host_buffer.release()",
        "        entry.host_buffer.release()",
    ),
    _waits(
        "end a streamed upload under its copy",
        "offload.swapper.caches",
        "    last.wait()  # the caller",
        "    # the caller",
    ),
    _reads(
        "an upload's destination, or a gradient",
        _ACCELERATOR,
        "        address = host.data_ptr()",
        "(source if host is destination else destination)",
    ),
    _reads(
        "a freed slice", "offload.swapper.memory.device_arena", "        if self.poison:", "self.view(device_buffer)"
    ),
    _reads(
        "the weights of a unit",
        "offload.engine.unit_views",
        "            ParamHandle.materialize(unit.handles, binding.memory.views)",
        "binding.flat",
    ),
    _reads(
        "weights that a backward needs",
        "offload.engine.unit_views",
        "            return view_of(saved, flat if saved.dtype is unit.places.dtype else flat.view(saved.dtype))",
        "binding.flat",
    ),
    _reads(
        "a parameter",
        "offload.engine.params",
        "            handle._version, handle._address = parameter._version, parameter.data_ptr()",
        "memory",
    ),
    _reads(
        "a gradient that leaves",
        "offload.engine.gradient_transfer",
        "        last = first + numel == len(sent.source)",
        "part",
    ),
    _reads("a total", "offload.engine.gradients", "            here[segment_range].add_(values)", "values"),
    _reads(
        "weights at their acquisition",
        "offload.swapper.pager",
        "            view, uploaded = self.arena.view(entry.device_buffer), entry.uploaded",
        "self.arena.view(entry.device_buffer)",
    ),
    _reads(
        "a streamed unit",
        "offload.swapper.caches",
        "                copied[host_buffer.offset] = last",
        "whole",
    ),
    _reads(
        "states that an update takes from the device",
        "offload.engine.update",
        "            self._shards.device.copy(destination, source)",
        "(destination if source.is_cpu else source)",
    ),
)
