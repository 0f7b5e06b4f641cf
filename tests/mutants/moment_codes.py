"""Faults in moments of 8 bits and masters of 24, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "let a block of moments have elements of two parameters",
        "offload.layout.flat_layout",
        "place(rest, MOMENT_BLOCK if in_blocks else ALIGNMENT)",
        "place(rest, ALIGNMENT)",
        "tests/optim/test_int8_moments.py::test_the_bits_are_those_of_seed_unit_update_and_element",
    ),
    Mutant(
        "cut tiles within the page of their scales",
        "offload.layout.modes",
        "PAGE // _SCALE_NBYTES // len(self.moments) * MOMENT_BLOCK if self.in_blocks else self.page_step",
        "self.page_step",
        "tests/optim/test_int8_moments.py::test_tiles_of_any_size_give_the_same_bits",
    ),
    Mutant(
        "let LAMB's first pass leave its scales to the second",
        "offload.optimizers.lamb",
        "self.drafts: Sequence[State] = mode.optimizer_states",
        "self.drafts: Sequence[State] = mode.moments",
        "tests/optim/test_int8_moments.py::test_tiles_of_any_size_give_the_same_bits",
    ),
    Mutant(
        "read the scales of another block than a state's codes",
        "offload.engine.access",
        "part, dtype = mode.part(source, start, start + len(values)), mode.states[source]",
        "part, dtype = mode.part(source, 0, len(values)), mode.states[source]",
        "tests/optim/test_int8_moments.py::test_states_are_read_and_set_in_fp32",
    ),
    Mutant(
        "set a second moment as if it were a first one",
        "offload.layout.optimizer_states",
        "encode_moments(values.float(), states[state][start:stop], scales, mode.moments.index(state))",
        "encode_moments(values.float(), states[state][start:stop], scales, 0)",
        "tests/optim/test_int8_moments.py::test_states_are_read_and_set_in_fp32",
    ),
    Mutant(
        "load scales from the places of the elements",
        "offload.checkpoint.restore",
        "return overlaps(self._scale_runs[chunk.unit], chunk.first, last)",
        "return overlaps(self._runs[chunk.unit], chunk.first, last)",
        "tests/optim/test_int8_moments.py::test_a_checkpoint_loads_on_another_number_of_ranks",
    ),
    Mutant(
        "take the first block of a parameter for the one in which a chunk begins",
        "offload.checkpoint.load",
        "block = self.position // MOMENT_BLOCK",
        "block = self.position // MOMENT_BLOCK // 2 * 2",
        "tests/optim/test_int8_moments.py::test_units_of_several_chunks_are_loaded",
    ),
    Mutant(
        "decode a chunk that begins within a block as if it began with the block",
        "offload.checkpoint.load",
        "self.position % MOMENT_BLOCK)",
        "0)",
        "tests/optim/test_int8_moments.py::test_units_of_several_chunks_are_loaded",
    ),
    Mutant(
        "convert parameters from where the new run has them",
        "offload.runs.convert",
        "run.segment.start + run.position)",
        "run.at)",
        "tests/optim/test_convert_moments.py::test_units_of_several_chunks_are_converted",
    ),
    Mutant(
        "let partitions end within a page of the low bits of bf24 masters",
        "offload.layout.modes",
        "return PAGE if self.in_bytes else _STEP",
        "return _STEP",
        "tests/optim/test_bf24_masters.py::test_a_plan_is_what_a_run_takes",
    ),
    Mutant(
        "cut a checkpoint's chunks within a page of the low bits",
        "offload.checkpoint.restore",
        "if State.SCALES in targets else self._shards.mode.page_step",
        "if State.SCALES in targets else 2048",
        "tests/optim/test_bf24_masters.py::test_units_of_several_chunks_are_loaded_and_converted",
    ),
    Mutant(
        "cut a converted run's chunks within a page of the low bits",
        "offload.runs.convert",
        "if State.SCALES in states else mode.page_step",
        "if State.SCALES in states else 2048",
        "tests/optim/test_bf24_masters.py::test_units_of_several_chunks_are_loaded_and_converted",
    ),
    Mutant(
        "round the masters of matrices to nearest",
        "offload.optimizers.matrices",
        "split(master, states, segment.noise)",
        "split(master, states)",
        "tests/optim/test_bf24_masters.py::test_muon_rounds_the_masters_of_matrices_alike_everywhere",
    ),
    Mutant(
        "round a split by the noise of its first element alone",
        "offload.kernels.sums",
        "_native.split_bf24(*arrays, noise)",
        "_native.split_bf24(*arrays, noise and Noise(noise.stream, 0))",
        "tests/kernels/test_kernels_bf24.py::test_a_split_is_to_nearest_or_by_the_chances_of_a_step",
    ),
    Mutant(
        "let LAMB's second pass round masters by the noise of the segment's start in the unit",
        "offload.kernels.lamb",
        "(start, stop, (*step[:7], ratio), noise)",
        "(start, stop, (*step[:7], ratio), noise and noise.after(start))",
        "tests/kernels/test_kernels_bf24.py::test_lamb_rounds_its_master_in_the_second_pass",
    ),
    Mutant(
        "take a master of 8 low bits for one of 16",
        "offload.kernels.update",
        "BF24_ELEMENT if partition.residual is not None and partition.residual.dtype in INT8 else element(dtype)",
        "element(dtype)",
        "tests/kernels/test_kernels_bf24.py::test_every_rule_computes_its_formula_and_rounds_its_master",
    ),
    Mutant(
        "leave the gradients of another optimizer to a device that has no kernel for it",
        "offload.layout.placement",
        "if machine.device_kernels and mode.rule.on_device:",
        "if machine.device_kernels:",
        "tests/optim/test_bf24_masters.py::test_a_device_with_kernels_updates_them_and_keeps_their_gradients",
    ),
)
