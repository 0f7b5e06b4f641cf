"""Faults put into the code on purpose, each of which a test must notice: `python -m tests.mutants`.

Each mutant replaces a stretch of source text while a module is imported, in a pytest process of its own; no file
is changed. A mutant that no test kills, or whose text is no longer there, ends the command with 1.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_VARIABLE = "OFFLOAD_MUTANT"


class Mutant(NamedTuple):
    """`old` becomes `new` in `module`; `tests` must then fail."""

    name: str
    module: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "documents of a row see each other",
        "offload.rows",
        "positions[number, start:stop] = np.arange(len(piece.ids))",
        "positions[number, start:stop] = np.arange(start, stop)",
        "tests/test_rows.py",
    ),
    Mutant(
        "learn the first token of a document by the one before",
        "offload.rows",
        "labels[number, start + 1 : stop] = np.where(piece.learned, piece.ids, _IGNORED)[1:]",
        "labels[number, start:stop] = np.where(piece.learned, piece.ids, _IGNORED)",
        "tests/test_rows.py",
    ),
    Mutant(
        "learn the prompt as well",
        "offload.rows",
        "[False] * len(prompt)",
        "[True] * len(prompt)",
        "tests/test_rows.py",
    ),
    Mutant(
        "each pass over the rows in the same order",
        "offload.rows",
        "np.random.SeedSequence((self._seed, epoch))",
        "np.random.SeedSequence((self._seed, 0))",
        "tests/test_rows.py",
    ),
    Mutant(
        "rows of a batch regardless of the micro-batch",
        "offload.rows",
        "((step - 1) * self._accumulation + micro_batch)",
        "(step - 1)",
        "tests/test_rows.py",
    ),
    Mutant(
        "save over what lies in a folder",
        "offload.train",
        "if folder.exists() and not may_be_there and any(folder.iterdir()):",
        "if False:",
        "tests/test_cli_finetune.py",
    ),
    Mutant(
        "a run that goes on saves over a stranger's folder",
        "offload.train",
        "check_save(folder, may_be_there=False)",
        "check_save(folder, may_be_there=True)",
        "tests/test_cli_finetune.py",
    ),
    Mutant(
        "end a run without saving its model",
        "offload.cli_run",
        "job.save_model()",
        "pass",
        "tests/test_cli_finetune.py",
    ),
    Mutant(
        "train from scratch where a folder has weights",
        "offload.language_model",
        "    if files:",
        "    if False:",
        "tests/test_cli_finetune.py",
    ),
    Mutant(
        "take a schedule's learning rates from the arguments after a load",
        "offload.hf.trainer",
        "self.lr_scheduler.load_state_dict(",
        "dict(",
        "tests/test_trainer_checkpoints.py",
    ),
    Mutant(
        "a boundary that Accelerate knows and the engine does not",
        "offload.hf.accelerator",
        "self.engine.set_gradient_accumulation_boundary(bool(self.sync_gradients))",
        "pass",
        "tests/test_accelerate.py",
    ),
    Mutant(
        "what config and arguments say differently counts as the config has it",
        "offload.hf.fill",
        "elif not _equal(block[last], value):",
        "elif False:",
        "tests/test_trainer_wrong.py",
    ),
    Mutant(
        "leave a schedule where it was at a step that was skipped",
        "offload.hf.accelerator",
        "return bool(self.optimizer.overflow)",
        "return False",
        "tests/test_accelerate.py",
    ),
    Mutant(
        "a copy of an absent parameter forgets where its values lie",
        "offload.engine.absent",
        "    new.origin = tensor.origin\n",
        "",
        "tests/test_pretrained.py::test_a_copy_of_the_model_is_read_too",
    ),
    Mutant(
        "a parameter that is registered twice becomes two",
        "offload.engine.birth",
        "if parameter not in seen:",
        "if True:",
        "tests/test_init.py::test_a_parameter_that_is_registered_twice_stays_one",
    ),
    Mutant(
        "files that others may have changed are read all the same",
        "offload.engine.model_files",
        "if Stamp.of(os.fstat(file.fileno())) != self.stamp:",
        "if False:",
        "tests/test_pretrained_refused.py::test_files_that_change_before_initialize_are_an_error",
    ),
    Mutant(
        "config and index of an earlier save stay while files are moved in",
        "offload.engine.model_folder",
        "            path.unlink()\n        sync_folder(out)",
        "            pass\n        sync_folder(out)",
        "tests/test_save_pretrained.py::test_a_kill_between_two_moves_leaves_nothing_that_loads_as_a_mixture",
    ),
    Mutant(
        "forget the loss scale when gradients are applied",
        "offload.engine.decision",
        "if clip else 1.0) / loss_scale",
        "if clip else 1.0)",
        "tests/test_loss_scale.py",
    ),
    Mutant(
        "let LAMB read moments that it has made already",
        "offload.engine.updater",
        "if job.weighing and state in self._mode.moments:",
        "if False:",
        "tests/test_optimizers.py",
    ),
    Mutant(
        "start over what another run has on a later drive",
        "offload.swapper.store.store",
        "            self._check_mine(over)\n",
        "            pass\n",
        "tests/test_store_strangers.py",
    ),
    Mutant(
        "hold a lock on a file that is gone",
        "offload.swapper.store.folder",
        "if not self._is_there():",
        "if False:",
        "tests/test_store_strangers.py",
    ),
    Mutant(
        "a state that is set is the weight",
        "offload.engine.updater",
        "self._set(tile, start, stop, edit.state,",
        "self._set(tile, start, stop, State.WEIGHT,",
        "tests/test_safe_get_set.py",
    ),
    Mutant(
        "look at a state while updates run",
        "offload.engine.looking",
        "self._parts.updater.finish(commit=False)",
        "pass",
        "tests/test_safe_get_set.py",
    ),
    Mutant(
        "look at a master without its residual",
        "offload.engine.looking",
        "sources(self._held.mode.weights) if joined else (state,)",
        "(state,)",
        "tests/test_safe_get_set.py",
    ),
    Mutant(
        "a gradient that is set keeps the norm of before",
        "offload.engine.gradients",
        "if key[0] != segment}",
        "}",
        "tests/test_safe_get_set.py",
    ),
    Mutant(
        "each rank sets a gradient of its own",
        "offload.engine.looking",
        "self._parts.ranks.broadcast(values, 0)",
        "pass",
        "tests/test_safe_get_set_ranks.py",
    ),
    Mutant(
        "each rank weighs its own parts of a parameter alone",
        "offload.engine.rounds",
        "return [sum(column) for column in",
        "return list(numbers) or [sum(column) for column in",
        "tests/test_ranks_optimizers.py",
    ),
    Mutant(
        "a group that is added keeps the learning rate of the others",
        "offload.engine.optimizer",
        "self.defaults | param_group",
        "param_group | self.defaults",
        "tests/test_freezing.py",
    ),
    Mutant(
        "a part is set without those of the other ranks",
        "offload.engine.looking",
        "            everyone.settle(mine)\n            self._complete(place, whole)\n        self.write(",
        "            everyone.settle(mine)\n        self.write(",
        "tests/test_safe_get_set_ranks.py",
    ),
    Mutant(
        "an edit of a state that other ranks take for the weight",
        "offload.engine.rounds",
        "Edit(start, stop, values, State(state))",
        "Edit(start, stop, values)",
        "tests/test_safe_get_set_ranks.py",
    ),
    Mutant(
        "drop the decay",
        "offload.engine.rules",
        'float(group["eps"]), float(group["weight_decay"]), count, grad_scale',
        'float(group["eps"]), 0.0, count, grad_scale',
        "tests/test_parity.py",
    ),
    Mutant(
        "drop the bias correction",
        "offload.engine.rules",
        'float(group["weight_decay"]), count, grad_scale',
        'float(group["weight_decay"]), 1_000_000, grad_scale',
        "tests/test_parity.py",
    ),
    Mutant(
        "drop the clip",
        "offload.engine.decision",
        "if clip else 1.0",
        "if False else 1.0",
        "tests/test_parity.py",
    ),
    Mutant(
        "skip the wait for a tile's reads",
        "offload.engine.updater",
        "for read in tile.reads:",
        "for read in ():",
        "tests/test_order.py",
    ),
    Mutant(
        "skip the wait for an update",
        "offload.swapper.pager",
        "while entry.updating or entry.residency is not Residency.DEVICE:",
        "while entry.residency is not Residency.DEVICE:",
        "tests/test_order.py",
    ),
    Mutant(
        "skip the wait for a write before its lease is clean",
        "offload.engine.updater",
        "                write.wait()\n                tile.job",
        "                tile.job",
        "tests/test_order.py",
    ),
    Mutant(
        "swap the slots A and B",
        "offload.swapper.store.store",
        "return 0 if self.durable is None else 1 - self.durable.slots[unit]",
        "return 0 if self.durable is None else self.durable.slots[unit]",
        "tests/test_resume.py",
    ),
    Mutant(
        "lose one gradient add",
        "offload.engine.gradients",
        "add=key in squares",
        "add=False",
        "tests/test_parity.py",
    ),
    Mutant(
        "skip one unit's update",
        "offload.engine.decision",
        "            if present[unit]:\n",
        "            if present[unit] and unit != 2:\n",
        "tests/test_parity.py",
    ),
    Mutant(
        "forget to make the names of blobs durable",
        "offload.swapper.store.store",
        "        if None in have:\n            sync_folder",
        "        if False:\n            sync_folder",
        "tests/test_power_cut.py",
    ),
    Mutant(
        "forget to make new folders durable",
        "offload.swapper.store.folder",
        "            for each in new:",
        "            for each in ():",
        "tests/test_power_cut.py",
    ),
    Mutant(
        "write the record before the blob",
        "offload.swapper.store.store",
        '        write_in_place(self.folders[0] / f"blob.{which}", blob)\n',
        "        early = Record(self.durable.serial + 1 if self.durable else 1, epoch, tuple(self.newest), which, "
        "len(blob), crc32c(blob))\n"
        "        write_in_place(self._commit_path, early.pack(), which * PAGE)\n"
        '        write_in_place(self.folders[0] / f"blob.{which}", blob)\n',
        "tests/test_power_cut.py",
    ),
    Mutant(
        "let a commit that was taken back return",
        "offload.swapper.store.store",
        "                if later.serial > record.serial:",
        "                if False:",
        "tests/test_power_cut.py",
    ),
    Mutant(
        "say that a run has ended when its files are gone",
        "offload.engine.engine",
        "                elif remove:\n                    self._note_end()\n",
        "",
        "tests/test_lifecycle.py",
    ),
    Mutant(
        "compare a read with what was written since",
        "offload.swapper.store.sums",
        "            if of is not slot:",
        "            if False:",
        "tests/test_store_reads.py",
    ),
    Mutant(
        "commit the generators of a forward that was given up",
        "offload.engine.training_state",
        "        if self._after_step is None:\n            return self.take()",
        "        if True:\n            return self.take()",
        "tests/test_commit_every.py",
    ),
    Mutant(
        "forget what a drive has borne at a resume",
        "offload.swapper.store.store",
        "self.written.go_on(contents.pop(WRITTEN, None))",
        "contents.pop(WRITTEN, None)",
        "tests/test_endurance.py",
    ),
    Mutant(
        "count all bytes for the first drive",
        "offload.swapper.store.store",
        "self.written.add(drive, count)",
        "self.written.add(0, count)",
        "tests/test_endurance.py",
    ),
    Mutant(
        "keep what was trained before a resume twice",
        "offload.report.log",
        "            for late in [each for each in found if each >= step]:",
        "            for late in ():",
        "tests/test_report.py",
    ),
    Mutant(
        "commit before the data is durable",
        "offload.swapper.store.store",
        "        self._file.sync()\n        which",
        "        which",
        "tests/test_store.py",
    ),
    Mutant(
        "skip the wait for a read of weights",
        "offload.swapper.leases",
        "self._table.changed.without_lock(transfer.future.wait)",
        "pass",
        "tests/test_order.py",
    ),
    Mutant(
        "forget the generators on resume",
        "offload.engine.training_state",
        "            self._generators = generators\n",
        "            self._generators = None\n",
        "tests/test_resume.py",
    ),
    Mutant(
        "write a slice before its last reader is done",
        "offload.swapper.arena",
        "if first < stop and offset < last)",
        "if False)",
        "tests/test_device_order.py",
    ),
    Mutant(
        "compute before the upload is done",
        "offload.swapper.pager",
        "        try:\n            self._device.hold(uploaded)",
        "        try:\n            pass",
        "tests/test_device_order.py",
    ),
    Mutant(
        "add a gradient before it has left the device",
        "offload.engine.gradients",
        "arriving.done.wait()  #",
        "pass  #",
        "tests/test_device_order.py",
    ),
    Mutant(
        "decide on a step before other ranks' gradients are in",
        "offload.engine.engine",
        "self.optimizer.checksum(self._clip), known\n",
        "0, (lambda found: lambda: found)(known())\n",
        "tests/test_ranks.py",
    ),
    Mutant(
        "lose the gradient of the second rank",
        "offload.engine.reduction",
        "for other in received[1:]:",
        "for other in ():",
        "tests/test_ranks.py",
    ),
    Mutant(
        "resume the newest commit of each rank by itself",
        "offload.engine.initialize",
        "return min(held)",
        "return newest",
        "tests/test_ranks_killed.py",
    ),
    Mutant(
        "leave the record of a commit that was taken back",
        "offload.swapper.store.store",
        "for later in found.valid:",
        "for later in ():",
        "tests/test_store.py",
    ),
    Mutant(
        "use a slice again while a view of it lives",
        "offload.engine.bindings",
        "for binding in self._live if not binding.alive]:",
        "for binding in self._live if binding.flat is None]:",
        "tests/test_autograd.py",
    ),
    Mutant(
        "go back through a graph of old weights",
        "offload.engine.saved",
        "if self._pager.updates(packed.unit) != packed.updates:",
        "if False:",
        "tests/test_autograd.py",
    ),
    Mutant(
        "keep the bits beyond bf16 of a weight that was set",
        "offload.engine.masters",
        "states[State.RESIDUAL].mul_(weight.view(torch.int16) == values.view(torch.int16))",
        "pass",
        "tests/test_looking_and_editing.py",
    ),
    Mutant(
        "forget to commit an edit",
        "offload.engine.engine",
        "        self._edited = True\n",
        "",
        "tests/test_looking_and_editing.py",
    ),
    Mutant(
        "leave sites open after Ctrl-C",
        "offload.engine.hooks",
        "while self._local.frames:",
        "while False:",
        "tests/test_recovery.py",
    ),
    Mutant(
        "use a window of a gradient again while it is written",
        "offload.engine.spill",
        "            future.wait()  # a write's buffer may not change before its end\n",
        "",
        "tests/test_spill.py",
    ),
    Mutant(
        "give a window to another while it is written",
        "offload.engine.spill",
        "        lease, future = self._writing[key]\n        future.wait()\n        del",
        "        lease, future = self._writing[key]\n        del",
        "tests/test_spill.py",
    ),
    Mutant(
        "forget what a window had before it was written",
        "offload.engine.spill",
        "            if key in self._written:\n",
        "            if False:\n",
        "tests/test_spill.py",
    ),
    Mutant(
        "stream into a lease that is still copied",
        "offload.swapper.stream",
        "copied[lease.offset].wait()",
        "pass",
        "tests/test_device_order.py",
    ),
    Mutant(
        "take the lease of an update that has begun",
        "offload.swapper.leases",
        "            and not entry.in_update\n",
        "",
        "tests/test_pager.py",
    ),
    Mutant(
        "put what is in use in the middle of the device",
        "offload.swapper.policy",
        "alone = max(offset - floor.start, floor.stop - offset - nbytes) >= floor.largest",
        "alone = True",
        "tests/test_policy.py",
    ),
    Mutant(
        "drop what is used next",
        "offload.swapper.policy",
        "key=lambda block: (-distances[block.unit], block.unit)",
        "key=lambda block: (distances[block.unit], block.unit)",
        "tests/test_policy.py",
    ),
    Mutant(
        "take an evaluation for a step",
        "offload.engine.hooks",
        "Kind.TRAIN if self._trainable and torch.is_grad_enabled() else Kind.EVAL",
        "Kind.TRAIN",
        "tests/test_prefetch.py",
    ),
    Mutant(
        "let gathering decide what is reduced together",
        "offload.engine.rounds",
        "    if uses:\n",
        "    if uses and not any(wish.kind is Kind.REDUCE for wish in wishes):\n",
        "tests/test_ranks.py",
    ),
    Mutant(
        "ask other ranks for what is not there alone",
        "offload.swapper.pager",
        "if self._all_have_all:",
        "if entry.residency is Residency.DEVICE:",
        "tests/test_ranks.py",
    ),
    Mutant(
        "ask no rank any more once all had everything",
        "offload.swapper.pager",
        "                self._all_have_all = False\n",
        "",
        "tests/test_ranks.py",
    ),
    Mutant(
        "keep the states of another engine's share",
        "offload.engine.updater",
        "                del self._residents[key]\n",
        "",
        "tests/test_two_engines.py",
    ),
    Mutant(
        "leave an interrupted gradient with its parameter",
        "offload.engine.hooks",
        "        for place in self._trainable:\n            if place.parameter.grad is not None:",
        "        for place in self._trainable:\n            if False:",
        "tests/test_interrupts.py",
    ),
    Mutant(
        "keep leases of weights through a load",
        "offload.swapper.pager",
        "                self._leases.forget(entry)",
        "                pass",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "do not commit a load",
        "offload.engine.checkpoint",
        "if parts.store is not None and self._commits:\n            held",
        "if False:\n            held",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "leave moments behind in the slot before",
        "offload.engine.checkpoint_fill",
        "elif moves and self._held.stored(unit, state):",
        "elif False:",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "do not pack a state that an optimizer of torch has made anew",
        "offload.engine.packed",
        "elif value.data_ptr() != place.data_ptr() or value.stride() != place.stride():",
        "elif False:",
        "tests/test_torch_optimizers.py",
    ),
    Mutant(
        "give an optimizer of torch no unscaled gradient",
        "offload.engine.torch_steps",
        ".copy_(gradient).mul_(step.grad_scale)",
        ".copy_(gradient)",
        "tests/test_torch_optimizers.py",
    ),
    Mutant(
        "run an optimizer whose parameters depend on each other",
        "offload.engine.torch_steps",
        "_check_apart(optimizer, options, [min(size, _SMALL) for size in shape], attributes)",
        "pass",
        "tests/test_torch_optimizers.py",
    ),
    Mutant(
        "load what an optimizer of torch keeps to where it was, not to where it is",
        "offload.engine.checkpoint_fill",
        "found = self._packed_runs if piece.targets == (State.PACKED,) else self._runs",
        "found = self._runs",
        "tests/test_torch_optimizers.py",
    ),
    Mutant(
        "replace frozen weights by a load without saying that the last commit is not whole",
        "offload.engine.checkpoint_fill",
        "held.pager.table.rewritten = True",
        "pass",
        "tests/test_frozen.py",
    ),
    Mutant(
        "give frozen weights two slots, of which one is written",
        "offload.swapper.store.manifest",
        "return self.frozen if self.frozen and self.slots == 2 else",
        "return",
        "tests/test_store_reads.py",
    ),
    Mutant(
        "take all of a unit that has only weights as frozen",
        "offload.swapper.store.manifest",
        "                shared = frozen if state is State.WEIGHT else 0\n",
        "                shared = nbytes if len(states) == 1 else frozen if state is State.WEIGHT else 0\n",
        "tests/test_frozen.py",
    ),
    Mutant(
        "read on behind what trains, into the other slot",
        "offload.swapper.store.requests",
        "if len(stretches) == 1 else (Joined(file, stretches), 0)",
        "",
        "tests/test_store_reads.py",
    ),
    Mutant(
        "take frozen weights as compared when an update has written what lies before them",
        "offload.swapper.store.store",
        "self._prove((unit, state), range(new[-1].start + new[-1].nbytes))",
        "self._prove((unit, state), range(1 << 62))",
        "tests/test_store_reads.py",
    ),
    Mutant(
        "start over in silence where another version has made a commit",
        "offload.swapper.store.record",
        " or found.other_format is not None:",
        ":",
        "tests/test_store.py",
    ),
    Mutant(
        "load without comparing checksums",
        "offload.engine.checkpoint_load",
        "if sums.pop(key) != ",
        "if False and sums.pop(key) != ",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "name the checkpoint as the latest before it is there",
        "offload.engine.checkpoint_folder",
        '    with told(checkpoint, "rename"):\n        sync_folder(partial)',
        "    (folder / LATEST).write_text(checkpoint.name)\n"
        '    with told(checkpoint, "rename"):\n        sync_folder(partial)',
        "tests/test_checkpoint_killed.py",
    ),
    Mutant(
        "replace a checkpoint by deleting it first",
        "offload.engine.checkpoint_folder",
        "        elif exchange(partial, checkpoint):",
        "        elif _delete(checkpoint) or sync_folder(folder) or os.rename(partial, checkpoint) or True:\n"
        "            pass\n        elif exchange(partial, checkpoint):",
        "tests/test_checkpoint_killed.py",
    ),
    Mutant(
        "take any manifest for one of a checkpoint",
        "offload.engine.checkpoint_files",
        'return isinstance(content, dict) and content.get("kind") == _KIND',
        "return isinstance(content, dict)",
        "tests/test_checkpoint_folder.py",
    ),
    Mutant(
        "delete all that is in a folder of a checkpoint",
        "offload.engine.checkpoint_folder",
        "if not _FILES.fullmatch(e.name) or not e.is_file(follow_symlinks=False)",
        "if False",
        "tests/test_checkpoint_folder.py",
    ),
    Mutant(
        "lock a file that has lost its name",
        "offload.engine.checkpoint_folder",
        "            if _is_at(descriptor, path):\n                with",
        "            if True:\n                with",
        "tests/test_checkpoint_folder.py",
    ),
)


class _Mutator(importlib.abc.MetaPathFinder):
    """Loads the mutant's module from changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=_Loader(name, spec.origin, self._mutant)
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str):  # type: ignore[no-untyped-def]
        source = Path(self.path).read_text()
        assert source.count(self._mutant.old) >= 1, f"the text of the mutant {self._mutant.name!r} is gone"
        return compile(source.replace(self._mutant.old, self._mutant.new), self.path, "exec")


def install() -> None:
    """In a process that runs mutated tests (and in those that it spawns): put the mutant in."""
    name = os.environ.get(_VARIABLE)
    if name:
        sys.meta_path.insert(0, _Mutator(next(m for m in MUTANTS if m.name == name)))


def _run(mutant: Mutant | None, tests: str) -> tuple[bool, str]:
    """Whether the tests passed, and the end of what they printed."""
    environment = dict(os.environ, **({_VARIABLE: mutant.name} if mutant else {}))
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            f"--basetemp={folder}/t",
            tests,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    tail = done.stdout.strip().splitlines()[-3:]
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {tests}:\n{done.stdout}\n{done.stderr}")
    return done.returncode == 0, "\n".join(tail)


def main() -> int:
    parser = argparse.ArgumentParser(description="show that the tests notice faults")
    parser.add_argument("words", nargs="*", help="only mutants whose name has one of these words")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    for tests in dict.fromkeys(mutant.tests for mutant in chosen):
        passed, tail = _run(None, tests)
        if not passed:
            print(f"without any mutant {tests} fails:\n{tail}")
            return 1
    survivors = 0
    for mutant in chosen:
        start = time.monotonic()
        passed, tail = _run(mutant, mutant.tests)
        survivors += passed
        reason = next((line for line in tail.splitlines() if line.startswith("FAILED")), "")
        print(
            f"{'SURVIVED' if passed else 'killed  '} {mutant.name} ({time.monotonic() - start:.0f} s) {reason}",
            flush=True,
        )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0
