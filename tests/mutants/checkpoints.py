"""Faults in checkpoints and exported models, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "import what a pickle of another program names",
        "offload.fileio.torch_file",
        'return type("Record", (Record,), {"name": f"{module}.{name}"})',
        "return super().find_class(module, name)",
        "tests/test_deepspeed_checkpoints.py",
    ),
    Mutant(
        "do not compare the bytes of DeepSpeed's files",
        "offload.engine.checkpoint.foreign.checkpoint",
        "elif total != chunk.storage.crc32:",
        "elif False:",
        "tests/test_deepspeed_checkpoints.py",
    ),
    Mutant(
        "take the parts of a parameter in ZeRO-3 as if none was padded",
        "offload.engine.checkpoint.foreign.zero",
        "            start += part",
        "            start += parameter.numel // len(ranks)",
        "tests/test_deepspeed_checkpoints.py",
    ),
    Mutant(
        "take the runs of a chunk that is cut by columns as if they followed one another",
        "offload.engine.checkpoint.foreign.distributed",
        "for i, stride in zip(index, strides, strict=False)",
        "for i, stride in zip(index, [0] * len(strides), strict=False)",
        "tests/test_distributed_checkpoints.py",
    ),
    Mutant(
        "leave a buffer as it was that a checkpoint has as a frozen weight",
        "offload.engine.checkpoint.load",
        "among = {name: found.saved[name] for name in names if name in found.saved}",
        "among: dict[str, tuple[int, Segment]] = {}",
        "tests/test_distributed_checkpoints.py",
    ),
    Mutant(
        "leave out the low bits of masters in a universal checkpoint",
        "offload.runs.states_by_parameter",
        "return {MASTER: sources(self.mode.weights), **moments}",
        "return {MASTER: (State.WEIGHT,), **moments}",
        "tests/test_deepspeed_checkpoints.py",
    ),
    Mutant(
        "read moments of a checkpoint as if they had the engine's dtype",
        "offload.engine.checkpoint.restore",
        "return self._makes_masters(targets) or any(theirs.get",
        "return self._makes_masters(targets) and any(theirs.get",
        "tests/test_bf16_moments.py::test_a_checkpoint_converts_moments",
    ),
    Mutant(
        "do not commit a load",
        "offload.engine.checkpoint.manager",
        "if components.store is not None and self._state.commits:\n            held",
        "if False:\n            held",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "take any manifest for one of a checkpoint",
        "offload.engine.checkpoint.files",
        'return isinstance(content, dict) and content.get("kind") == _KIND',
        "return isinstance(content, dict)",
        "tests/test_checkpoint_folder.py",
    ),
    Mutant(
        "leave moments behind in the slot before",
        "offload.engine.checkpoint.restore",
        "elif moves and self._shards.stored(unit, state):",
        "elif False:",
        "tests/test_checkpoint.py",
    ),
    Mutant(
        "load what an optimizer of torch keeps to where it was, not to where it is",
        "offload.engine.checkpoint.restore",
        "found = self._packed_runs if chunk.targets == (State.PACKED,) else self._runs",
        "found = self._runs",
        "tests/test_torch_optimizers.py",
    ),
    Mutant(
        "replace frozen weights by a load without saying that the last commit is not whole",
        "offload.engine.checkpoint.restore",
        "shards.mark_rewritten()",
        "pass",
        "tests/test_frozen_weights.py",
    ),
    Mutant(
        "name the checkpoint as the latest before it is there",
        "offload.engine.checkpoint.directory",
        '    with naming_errors(checkpoint, "rename"):\n        sync_folder(partial)',
        "    (folder / LATEST).write_text(checkpoint.name)\n"
        '    with naming_errors(checkpoint, "rename"):\n        sync_folder(partial)',
        "tests/test_checkpoint_killed.py",
    ),
    Mutant(
        "replace a checkpoint by deleting it first",
        "offload.engine.checkpoint.directory",
        "            if exchange(partial, checkpoint):",
        "            if _delete(checkpoint) or sync_folder(folder) or os.rename(partial, checkpoint) or True:\n"
        "                going = None\n            elif exchange(partial, checkpoint):",
        "tests/test_checkpoint_killed.py",
    ),
    Mutant(
        "delete all that is in a folder of a checkpoint",
        "offload.engine.checkpoint.directory",
        "if not _FILES.fullmatch(e.name) or not e.is_file(follow_symlinks=False)",
        "if False",
        "tests/test_checkpoint_folder.py",
    ),
    Mutant(
        "load without comparing checksums",
        "offload.engine.checkpoint.load",
        "if sums.pop(key) != ",
        "if False and sums.pop(key) != ",
        "tests/test_checkpoint_damage.py",
    ),
    Mutant(
        "save bytes that are not those of the store",
        "offload.engine.checkpoint.save",
        "if expected is None or expected == crc:",
        "if True:",
        "tests/test_checkpoint_damage.py",
    ),
    Mutant(
        "write a chunk of an export one element too far",
        "offload.engine.model_io.weight_stream",
        "nbytes, skipped = (stop - start) * itemsize, (segment.first + start - segment.start) * itemsize",
        "nbytes, skipped = (stop - start) * itemsize, (segment.first + start - segment.start + 1) * itemsize",
        "tests/test_export_stream.py",
    ),
    Mutant(
        "files that others may have changed are read all the same",
        "offload.engine.model_io.safetensors_folder",
        "if Stamp.of(os.fstat(file.fileno())) != self.stamp:",
        "if False:",
        "tests/test_pretrained_refused.py::test_files_that_change_before_initialize_are_an_error",
    ),
    Mutant(
        "config and index of an earlier save stay while files are moved in",
        "offload.engine.model_io.output_folder",
        "            path.unlink()\n        sync_folder(out)",
        "            pass\n        sync_folder(out)",
        "tests/test_save_pretrained_folder.py::test_a_kill_between_two_moves_leaves_nothing_that_loads_as_a_mixture",
    ),
)
