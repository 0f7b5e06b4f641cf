"""The contract of equal bits, kernel by kernel: the test that holds the bits of each, and the controls it must fail.

`test_manifest.py` finds every export and every sum of the package by itself, and refuses one without an entry here. A
control is the same arithmetic with one operation done otherwise, which must give other bits on the control's inputs: an
entry whose controls give equal bits tests nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A kernel or a sum."""

    test: str
    """The test that compares all its bits with a formula, or with another way to them."""
    control: str
    """The function of `test_manifest.py` that computes it rightly and wrongly."""


KERNELS, GRADIENTS = "tests/kernels/test_kernels", "tests/gradients/test"
FORMULA = f"{KERNELS}_formulas.py::test_a_step_is_its_formula"
SUMS = f"{KERNELS}_sums.py::test_chunks_that_are_summed_in_one_call_have_the_bits_of_a_call_each"
CUDA = f"{KERNELS}_cuda.py::test"

MANIFEST: dict[str, Entry] = {
    # The rules of `kernels.update`.
    "rule adamw": Entry(FORMULA, "adamw"),
    "rule adagrad": Entry(FORMULA, "adagrad"),
    "rule lion": Entry(FORMULA, "lion"),
    "rule sgd": Entry(FORMULA, "sgd"),
    "rule plain_sgd": Entry(FORMULA, "plain_sgd"),
    # Functions of `offload.kernels`.
    "kernels.update": Entry(f"{KERNELS}_formulas.py::test_extreme_values_follow_the_formula", "adamw"),
    "kernels.adamw": Entry(f"{KERNELS}_adamw.py::test_a_split_master_takes_the_steps_of_an_fp32_master", "adamw"),
    "kernels.CPUAdamW": Entry("tests/optim/test_cpu_adamw.py::test_a_saved_run_goes_on_bit_for_bit", "adamw"),
    "kernels.lamb": Entry(f"{KERNELS}_adamw.py::test_a_step_is_the_formula", "lamb"),
    "kernels.lamb_moments": Entry(f"{KERNELS}_adamw.py::test_a_step_is_the_formula", "lamb"),
    "kernels.lamb_move": Entry(f"{KERNELS}_adamw.py::test_cuts_into_chunks_change_no_bit", "lamb"),
    "kernels.lamb_ratio": Entry(f"{KERNELS}_adamw.py::test_cuts_into_chunks_change_no_bit", "lamb_ratio"),
    "kernels.split_master": Entry(f"{KERNELS}_sums.py::test_any_pattern_is_split_exactly", "split_master"),
    "kernels.join_master": Entry(f"{KERNELS}_sums.py::test_any_pattern_is_split_exactly", "join_master"),
    "kernels.accumulate": Entry(f"{KERNELS}_sums.py::test_gradients_are_added_as_torch_adds_them", "accumulate"),
    "kernels.sum_squares": Entry(SUMS, "squares"),
    "kernels.squares_of_chunks": Entry(SUMS, "squares"),
    "kernels.noise_stream": Entry(
        f"{KERNELS}_masters.py::test_every_rule_computes_its_formula_and_rounds_its_moments", "noise"
    ),
    # What they call, `offload.kernels._native`.
    "native update": Entry(FORMULA, "adamw"),
    "native lamb_moments": Entry(f"{KERNELS}_adamw.py::test_a_step_is_the_formula", "lamb"),
    "native split_master": Entry(f"{KERNELS}_sums.py::test_any_pattern_is_split_exactly", "split_master"),
    "native join_master": Entry(f"{KERNELS}_sums.py::test_any_pattern_is_split_exactly", "join_master"),
    "native split_bf24": Entry(
        f"{KERNELS}_bf24.py::test_a_split_is_to_nearest_or_by_the_chances_of_a_step", "split_bf24"
    ),
    "native join_bf24": Entry(f"{KERNELS}_bf24.py::test_every_stored_master_is_split_to_the_same_bits", "join_bf24"),
    "native quantize": Entry(f"{KERNELS}_adamw.py::test_the_bytes_are_those_of_the_formula", "quantize"),
    "native dequantize": Entry(f"{KERNELS}_adamw.py::test_values_are_products_rounded_once", "dequantize"),
    "native encode_moments": Entry(
        f"{KERNELS}_masters.py::test_what_is_stored_is_encoded_to_the_same_bits", "encode_moments"
    ),
    "native decode_moments": Entry(
        f"{KERNELS}_masters.py::test_every_rule_computes_its_formula_and_rounds_its_moments_codes", "decode_moments"
    ),
    "native accumulate": Entry(f"{KERNELS}_sums.py::test_gradients_are_added_as_torch_adds_them", "accumulate"),
    "native sum_squares": Entry(SUMS, "squares"),
    "native Sum": Entry(f"{KERNELS}_sums.py::test_a_gradient_that_is_ready_is_taken_as_it_is", "accumulate"),
    # On a GPU: compared with the CPU's as C++ here, and by `make test-gpu` on one.
    "cuda update": Entry(f"{CUDA}_its_arithmetic_is_that_of_the_cpu", "adamw"),
    "cuda sum_squares": Entry(f"{CUDA}_sums_of_any_length_in_any_chunks_have_the_bits_of_the_cpu", "squares"),
    # Sums of the engine.
    "callbacks:GradientStats.norm": Entry("tests/models/test_pytorch_parity.py::test_fp32_equals_pytorch", "norm"),
    "gradients:DeviceTotals.add": Entry(
        f"{GRADIENTS}_rounded_sums.py::test_order_placement_and_budget_change_no_bit", "micro_batches"
    ),
    "gradients:HostGradients.round": Entry(
        f"{GRADIENTS}_rounded_sums.py::test_all_see_the_fp32_sum_rounded_once", "accumulate"
    ),
    "gradients:GradientAccumulator._keep": Entry(
        f"{GRADIENTS}_rounded_sums.py::test_order_placement_and_budget_change_no_bit", "micro_batches"
    ),
    "gradients:GradientAccumulator._accumulate": Entry(
        f"{GRADIENTS}_gradient_spill.py::test_any_budget_gives_the_same_bits", "micro_batches"
    ),
    "gradients:GradientAccumulator._keep_whole": Entry(
        f"{GRADIENTS}_kept_gradients.py::test_bits_are_those_of_copies", "squares"
    ),
    "gradients:GradientAccumulator._sum_stored": Entry(
        "tests/models/test_pytorch_parity.py::test_as_pytorch_and_the_same_bits_in_another_tier", "squares"
    ),
    "gradients:squares_of": Entry(f"{GRADIENTS}_kept_gradients.py::test_bits_are_those_of_copies", "squares"),
    "gradients:total_of": Entry(f"{GRADIENTS}_kept_gradients.py::test_bits_are_those_of_copies", "total"),
    # Losses.
    "losses.causal_lm": Entry("tests/activations/test_chunked_loss.py::test_bits_do_not_depend_on_the_tier", "loss"),
}

NO_ARITHMETIC = {
    "kernels": "has_two_passes leave_cores probe thread_count",
    "kernels records": "AdagradStep AdamWStep LambSegment LambStep LionStep Noise Partition PlainSGDStep SGDStep "
    "Segment Step Writes",
    "native": "configure parse_cpus run_beside supported_isas thread_count",
    "engine native": "DirectAdd GradientHook Handle Pack Plain Unpack handle_of plain_of view_of",
    "cuda": "why_not",
    "losses": "chunk_loss_of",
}
"""Exports that compute no number of a training, by module. `DirectAdd` calls a `Sum`."""
