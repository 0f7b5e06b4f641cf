"""Faults in the tiers of blocks' inputs: waits and orders taken out. The test device finds what streams need."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_PACKAGE = "offload.activations"


def _streams(name: str, module: str, old: str, new: str) -> Mutant:
    tests = "tests/activations/test_activation_streams.py"
    return Mutant(f"{name}, an input on the test device", f"{_PACKAGE}.{module}", old, new, tests)


def _input(name: str, module: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(
        f"{name}, an input", f"{_PACKAGE}.{module}", old, new, f"tests/activations/test_activation_{tests}.py"
    )


MUTANTS = (
    # -- streams
    _streams(
        "download before it is computed",
        "kept_inputs",
        "ready = (*block.after, self._device.record_event())",
        "ready = (*block.after,)",
    ),
    _streams(
        "give memory of the device away under its download",
        "kept_inputs",
        "            self._device.wait_event(kept_input.memory.downloaded)\n",
        "",
    ),
    _streams(
        "compute before the upload",
        "kept_inputs",
        "                self._device.wait_event(memory.uploaded)\n",
        "",
    ),
    _streams(
        "upload into memory that compute uses",
        "kept_inputs",
        "ready = (memory.downloaded, self._device.record_event())",
        "ready = (memory.downloaded,)",
    ),
    _streams(
        "forget which copies use a block",
        "kept_inputs",
        "block.after = (memory.downloaded, memory.uploaded)",
        "block.after = ()",
    ),
    _streams(
        "give a block away with its copies forgotten",
        "kept_inputs",
        "block.after = tuple(event for event in block.after if not event.done())",
        "block.after = ()",
    ),
    _streams(
        "give memory of the device away under an upload that nobody waits for",
        "kept_inputs",
        "                    self._device.wait_event(event)\n",
        "                    pass\n",
    ),
    _streams(
        "write before the download",
        "kept_inputs",
        "        memory.downloaded.wait()  # the drive reads what the device has written\n",
        "",
    ),
    _streams(
        "read into a block that the device reads",
        "kept_inputs",
        "                event.wait()\n            memory.reading",
        "                pass\n            memory.reading",
    ),
    _streams(
        "miss a change under the download",
        "kept_inputs",
        "            kept_input.changed = kept_input.changed or tensor._version != kept_input.version\n",
        "",
    ),
    # -- I/O
    _input(
        "give a block away under its write",
        "kept_inputs",
        "                memory.writing.wait()\n",
        "                pass\n",
        "faults",
    ),
    _input(
        "use a block under its read",
        "kept_inputs",
        "                memory.reading.wait()\n",
        "                pass\n",
        "faults",
    ),
    _input(
        "count a write that did not start",
        "kept_inputs",
        "        slot = self._slots.take(kept_input.nbytes)\n        try:\n",
        "        memory.slot = slot = self._slots.take(kept_input.nbytes)\n        try:\n",
        "faults",
    ),
    _input(
        "count a read that did not start",
        "kept_inputs",
        "        try:\n            for event in block.after:",
        "        memory.block = block\n        try:\n            for event in block.after:",
        "faults",
    ),
    _input(
        "take a failed write for a good one",
        "kept_inputs",
        "            slot, memory.slot, memory.writing = memory.slot, None, None\n",
        "            slot, memory.writing = None, None\n",
        "faults",
    ),
    _input(
        "take a failed read for a good one",
        "kept_inputs",
        "            block, memory.block, memory.reading = memory.block, None, None\n",
        "            block, memory.reading = None, None\n",
        "faults",
    ),
    _input(
        "give the block of a dropped input away under its transfer",
        "kept_inputs",
        "        memory.settle()\n        self.check_open()",
        "        memory.writing = memory.reading = None\n        self.check_open()",
        "in_flight",
    ),
    # -- Ctrl-C
    _input(
        "take a Ctrl-C for the end of a write",
        "kept_inputs",
        "        except IoError:  # no other error: after a Ctrl-C the drive still reads the block",
        "        except BaseException:",
        "in_flight",
    ),
    _input(
        "take a Ctrl-C for the end of a read",
        "kept_inputs",
        "        except IoError:  # no other error: after a Ctrl-C the drive still writes to the block",
        "        except BaseException:",
        "in_flight",
    ),
    _input(
        "lose a Ctrl-C where a graph ends",
        "kept_inputs",
        "    @uninterrupted  # Python drops what is raised in here, a Ctrl-C too\n",
        "",
        "interrupts",
    ),
    _input(
        "go on after a handler has destroyed the engine",
        "kept_inputs",
        "        if self.closed:\n",
        "        if False:\n",
        "interrupts",
    ),
    _input(
        "close a generator that runs",
        "checkpoints",
        "        next(generator)  # may wait for I/O, and so run a handler that calls `abandon`\n"
        "        call.generator = generator\n",
        "        call.generator = generator\n        next(generator)\n",
        "interrupts",
    ),
    # -- what is kept
    _input(
        "take memory that has changed for the same input",
        "kept_inputs",
        "if kept_input is None or kept_input.changed or kept_input.version != tensor._version:",
        "if kept_input is None or kept_input.changed:",
        "inputs_kept",
    ),
    _input(
        "take memory that was freed for the same input",
        "kept_inputs",
        "if entry is None or entry[0].expired():",
        "if entry is None:",
        "graphs",
    ),
    _input(
        "return the form of another view",
        "kept_inputs",
        "return tensor if view.form == kept_input.form else view.form.view(tensor)",
        "return tensor",
        "inputs_kept",
    ),
    _input("copy bytes that are not values", "kept_inputs", "        and not tensor.is_conj()\n", "", "input_forms"),
    _input("remember what was dropped for ever", "kept_inputs", "2 * len(alive) + _MOST_SHARED", "1 << 30", "graphs"),
    _input(
        "keep memory of a graph that outlives its engine",
        "kept_inputs",
        "memory.tensor = memory.block = memory.slot = memory.arriving = None",
        "pass",
        "graphs",
    ),
    _input(
        "leave blocks of another size where they are",
        "kept_inputs",
        "candidates = [kept_input for kept_input in inputs if _has_block(kept_input.memory)]",
        "candidates = [e for e in inputs if _has_block(e.memory) and e.memory.block.buffer.nbytes >= nbytes]",
        "memory",
    ),
    # -- what is computed again
    _input(
        "change statistics twice",
        "checkpoints",
        "return self.tensor._version != self.version or isinstance(self.owner, nn.modules.batchnorm._NormBase)",
        "return self.tensor._version != self.version",
        "buffers",
    ),
    _input(
        "miss a buffer that is replaced",
        "checkpoints",
        "buffer.tensor._version != buffer.version or _differs(now, buffer.tensor)",
        "buffer.tensor._version != buffer.version",
        "buffers",
    ),
    _input(
        "leave out a cache that is in use",
        "checkpoints",
        "return module.training and _length_of(cache, module) == 0",
        "return True",
        "input_caches",
    ),
    _input(
        "give a block copies of the caller's lists",
        "checkpoints",
        "        return args, kwargs\n    args = tuple",
        "        return tree_unflatten(*tree_flatten((args, kwargs)))\n    args = tuple",
        "input_forms",
    ),
)
