"""Promises of DeepSpeed's tutorials that once did not fully work here, each with its status and the tests that show it.

`python -m tests.pages.tutorial_rows` writes the table into docs/reference/status.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "status.md"
HEADING = "## What tutorials of DeepSpeed say\n"

WORKS, PARTLY, NO_EFFECT, REFUSED = "works", "partly", "no effect", "refused"

_RANKS, _KEYS, _NAMES = "tests/ranks/test_ranks.py", "tests/config/test_config_every_key.py", "test_deepspeed_api.py"
_ONCE = f"{_RANKS}::test_stages_1_and_2_gather_each_weight_once_a_step_and_stage_3_for_each_use"
_SENT = f"{_RANKS}::test_a_step_sends_what_the_formulas_of_zero_say"
_NAMED = f"{_KEYS}::test_named_at_the_start"
_ALWAYS = f"{_KEYS}::test_a_key_that_asks_for_what_is_always_done_is_honoured"
_REFUSED = f"{_KEYS}::test_a_key_without_support_is_refused"
_NAME = f"tests/deepspeed/{_NAMES}::test_a_name_is_here_with_deepspeeds_arguments_in_their_order"
_NO_NAME = f"tests/deepspeed/{_NAMES}::test_a_refused_name_can_be_imported_and_its_use_says_what_to_do"
_STAGES = "states are divided; weights are divided too, and gathered once a step where the device has room for them"
_BUCKETS = "small units share a collective, where all weights stay on the device"
_JOINED = f"{_RANKS}::test_small_units_share_a_collective_and_change_no_bit"


class Row(NamedTuple):
    """A promise of a tutorial."""

    number: str
    """Tutorial and row."""
    promise: str
    status: str
    here: str
    """What is so here, as a clause."""
    tests: tuple[str, ...]
    """Tests that show it, by their node ids without parameters."""


ROWS = (
    Row("000.1", "ZeRO partitions states", WORKS, _STAGES, (_ONCE, _SENT)),
    Row("000.7", "transformer layers of DeepSpeed", REFUSED, "layers are the model's own", (_NO_NAME,)),
    Row("000.17", '`"stage": 2`', WORKS, _STAGES, (_ONCE,)),
    Row("001.1", "stage 1 divides optimizer states", WORKS, _STAGES, (_ONCE, _SENT)),
    Row("001.2", "stage 2 divides gradients too", WORKS, _STAGES, (_ONCE,)),
    Row(
        "001.11",
        "more pipeline stages than micro-batches, with ZeRO-2",
        WORKS,
        "by GPipe's schedule; 1F1B where there are enough micro-batches",
        ("tests/deepspeed/test_deepspeed_pipeline.py::test_a_pipeline_module_trains_as_one_process_bit_for_bit",),
    ),
    Row("001.19", "small reductions are grouped", WORKS, _BUCKETS, (_JOINED,)),
    Row(
        "001.25", "`chunk_size` of ZeRO-3", NO_EFFECT, "no key of DeepSpeed 0.19; a line says which keys are", (_NAMED,)
    ),
    Row(
        "001.26",
        "1-bit Adam",
        WORKS,
        "in stages 0 and 1, as 0/1 Adam and 1-bit LAMB; [stages 2 and 3](deepspeed-compatibility.md#1-bit-optimizers) "
        "are refused",
        ("tests/ranks/test_one_bit.py::test_a_run_sends_a_fifth", _REFUSED),
    ),
    Row("001.29", "sizes of buckets", WORKS, _BUCKETS, (_JOINED,)),
    Row("001.31", '`"pin_memory": true`', WORKS, "host memory is always pinned beside a GPU", (_ALWAYS,)),
    Row(
        "001.35",
        "a profile by the launcher, `--profile`",
        REFUSED,
        "the message names the keys that measure a step",
        ("tests/launch/test_launch.py::test_wrong_input_is_one_line",),
    ),
    Row(
        "001.36",
        "FP8",
        PARTLY,
        "the block `fp8` takes torchao; it ran emulated alone, in CI by `make test-fp8`",
        ("tests/models/test_fp8.py::test_the_block_fp8_is_the_conversion_by_hand",),
    ),
    Row(
        "001.41",
        "`sparse_gradients`",
        NO_EFFECT,
        "embeddings with sparse gradients train with the same bits as dense ones",
        (_NAMED, "tests/models/test_autograd.py::test_sparse_gradients_train_with_the_same_bits"),
    ),
    Row("001.42", "sparse attention", REFUSED, "it changes the training", (_REFUSED,)),
    Row(
        "001.43",
        "compiled operations",
        WORKS,
        'each block by itself, by `"compile"`, `engine.compile()` or the Trainer',
        ("tests/models/test_compiled.py::test_the_config_or_a_call_compiles_each_block",),
    ),
    Row(
        "001.45",
        "clusters of many machines",
        PARTLY,
        "hosts of a hostfile are started; two machines were network namespaces of one",
        ("tests/launch/test_launch_commands.py::test_each_host_of_a_hostfile_has_a_torchrun_by_ssh",),
    ),
    Row(
        "002.6",
        "Megatron beside ZeRO",
        PARTLY,
        "its tensor parallelism; its pipelines, contexts and sequences are refused",
        ("tests/ranks/test_tensor_parallel.py::test_an_mpu_that_is_none_is_refused",),
    ),
    Row("002.9", "states and gradients take a part of each GPU", WORKS, _STAGES, (_ONCE, _SENT)),
    Row(
        "002.10",
        "activations divided among model-parallel ranks",
        WORKS,
        "inputs of recomputed blocks, over the ranks of tensor parallelism",
        ("tests/ranks/test_tensor_parallel.py::test_ranks_of_a_row_keep_parts_of_inputs",),
    ),
    Row("002.29", "`deepspeed.add_tuning_arguments`", WORKS, "there, as in `runtime.lr_schedules`", (_NAME,)),
    Row(
        "002.32",
        "`activation_checkpointing.profile`",
        WORKS,
        "a line of each step on stderr; a notice where no block is computed again",
        (
            "tests/activations/test_activation_jobs.py::test_a_profile_is_a_line_of_each_step_on_stderr",
            "tests/config/test_config_notices.py::"
            "test_a_profile_without_a_block_to_compute_again_has_no_effect_and_a_notice",
        ),
    ),
    Row("003.1", "stage 1 on 8 GPUs", WORKS, _STAGES, (_ONCE, _SENT)),
    Row(
        "003.2",
        "stage 2 sends less than stage 3",
        WORKS,
        "a weight is gathered once a step, in stage 3 for each use",
        (_ONCE,),
    ),
    Row("003.4", '`"stage": 2`', WORKS, _STAGES, (_ONCE,)),
    Row("003.5", '`"allgather_partitions": true`', WORKS, "always so", (_ALWAYS,)),
    Row("003.6", "`allgather_bucket_size`", WORKS, _BUCKETS, (_JOINED,)),
    Row("003.8", '`"reduce_scatter": true`', WORKS, "always so", (_ALWAYS,)),
    Row("003.9", "`reduce_bucket_size`", WORKS, _BUCKETS, (_JOINED,)),
    Row("003.10", '`"contiguous_gradients": true`', WORKS, "always so", (_ALWAYS,)),
    Row(
        "003.16",
        "`Trainer(tokenizer=...)`",
        PARTLY,
        "`processing_class=`: transformers 5, which is needed, has no `tokenizer=`",
        ("tests/trainers/test_trainer.py::test_equals_the_stock_trainer",),
    ),
    Row("003.21", '`"pin_memory": true`', WORKS, "host memory is always pinned beside a GPU", (_ALWAYS,)),
    Row(
        "004.5",
        "`pip install deepspeed`, then `deepspeed train.py`",
        PARTLY,
        "nothing is on PyPI: from a checkout `pip install . ./packaging/deepspeed-command`, or `offload run deepspeed "
        "train.py`",
        (
            "tests/deepspeed/test_deepspeed_install.py::test_the_command_deepspeed_can_be_installed",
            "tests/deepspeed/test_deepspeed_install.py::test_the_command_deepspeed_of_a_tutorial_is_the_launcher",
        ),
    ),
    Row(
        "mission.4",
        "13B parameters and more on one GPU",
        PARTLY,
        "planned for each card; one step of 13B in few bytes ran within 24 GiB of an H200",
        ("tests/planner/test_plan.py::test_ten_lines_say_what_one_wants_to_know",),
    ),
)


def table() -> str:
    """Returns the section of the page."""
    rows = "".join(
        f"| {row.number} | {row.promise} | {row.status} | {row.here} | {_shown(row.tests)} |\n" for row in ROWS
    )
    return (
        f"{HEADING}\nFive tutorials, 000 to 004, make 157 promises; these did not fully work here once. "
        "`python -m tests.pages.tutorial_rows` writes this section, and a test looks for the tests that it names.\n\n"
        f"| tutorial.row | promise | here | | shown by |\n|---|---|---|---|---|\n{rows}"
    )


def _shown(tests: tuple[str, ...]) -> str:
    return ", ".join(f"`{test.rpartition('/')[2]}`" for test in tests)


def document(text: str) -> str:
    """Returns the page with the section in place of an earlier one, at its end."""
    return text.partition(HEADING)[0].rstrip("\n") + "\n\n" + table()


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
