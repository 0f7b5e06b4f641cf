"""Faults in moments of 8 bits, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "let a block of moments have elements of two parameters",
        "offload.layout.flat_layout",
        "place(rest, MOMENT_BLOCK if in_blocks else _ALIGNMENT)",
        "place(rest, _ALIGNMENT)",
        "tests/test_int8_moments.py::test_the_bits_are_those_of_seed_unit_update_and_element",
    ),
    Mutant(
        "cut tiles within the page of their scales",
        "offload.swapper.modes",
        "PAGE // _SCALE_NBYTES // len(self.moments) * MOMENT_BLOCK if self.in_blocks else _STEP",
        "_STEP",
        "tests/test_int8_moments.py::test_tiles_of_any_size_give_the_same_bits",
    ),
    Mutant(
        "let LAMB's first pass leave its scales to the second",
        "offload.engine.optim.lamb",
        "self.drafts: Sequence[State] = mode.optimizer_states",
        "self.drafts: Sequence[State] = mode.moments",
        "tests/test_int8_moments.py::test_tiles_of_any_size_give_the_same_bits",
    ),
    Mutant(
        "read the scales of another block than a state's codes",
        "offload.engine.param_access",
        "part, dtype = mode.part(each, start, start + len(values)), mode.states[each]",
        "part, dtype = mode.part(each, 0, len(values)), mode.states[each]",
        "tests/test_int8_moments.py::test_states_are_read_and_set_in_fp32",
    ),
    Mutant(
        "set a second moment as if it were a first one",
        "offload.layout.optimizers.moment_values",
        "encode_moments(values.float(), states[state][start:stop], scales, mode.moments.index(state))",
        "encode_moments(values.float(), states[state][start:stop], scales, 0)",
        "tests/test_int8_moments.py::test_states_are_read_and_set_in_fp32",
    ),
    Mutant(
        "load scales from the places of the elements",
        "offload.engine.checkpoint.restore",
        "return overlaps(self._scale_runs[chunk.unit], chunk.first, last)",
        "return overlaps(self._runs[chunk.unit], chunk.first, last)",
        "tests/test_int8_moments.py::test_a_checkpoint_loads_on_another_number_of_ranks",
    ),
    Mutant(
        "take the first block of a parameter for the one in which a chunk begins",
        "offload.engine.checkpoint.saved_states",
        "block = self.position // MOMENT_BLOCK",
        "block = self.position // MOMENT_BLOCK // 2 * 2",
        "tests/test_int8_moments.py::test_units_of_several_chunks_are_loaded",
    ),
    Mutant(
        "decode a chunk that begins within a block as if it began with the block",
        "offload.engine.checkpoint.saved_states",
        "self.position % MOMENT_BLOCK)",
        "0)",
        "tests/test_int8_moments.py::test_units_of_several_chunks_are_loaded",
    ),
    Mutant(
        "convert parameters from where the new run has them",
        "offload.runs.converted_states",
        "run.segment.start + run.position)",
        "run.at)",
        "tests/test_convert_moments.py::test_units_of_several_chunks_are_converted",
    ),
)
