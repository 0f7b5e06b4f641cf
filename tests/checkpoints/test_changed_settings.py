"""A resume with other settings, and a load into another form, say what changed from what to what, and what follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.checkpoint.load import in_words
from offload.engine.state import Differences
from offload.layout.modes import Mode, make_mode
from tests.deepspeed.test_schedules import CYCLE, LR, MOMENTUM
from tests.deepspeed.test_schedules import start as start_scheduled
from tests.support.models import GPT2
from tests.support.oracle import start, train_step

DISK = ("nvme", "nvme")
THEN = {
    "seed": 0,
    "micro-batch size": 2,
    "accumulation": 4,
    "learning rates": [0.01],
    "schedule": "StepLR",
    "the schedule's total_num_steps": 6,
}
COSINE = {"total_num_steps": 4, "warmup_num_steps": 2, "cos_min_ratio": 0.0}
OTHERWISE = "the steps from here on take the present values, so losses and weights are not those"


def test_equal_settings_have_no_differences() -> None:
    assert not Differences(THEN, dict(THEN))


def test_a_setting_that_only_one_of_both_has_is_no_difference() -> None:
    assert not Differences({"seed": 0}, THEN) and not Differences(THEN, {"seed": 0})


def test_each_is_told_from_what_to_what() -> None:
    found = Differences(THEN, {**THEN, "seed": 7, "learning rates": [0.5]})
    assert str(found) == "seed 0 is now 7, learning rates [0.01] is now [0.5]"
    assert found.consequences().startswith(OTHERWISE)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"accumulation": 8}, f"a step has 16 samples a rank in place of 8; {OTHERWISE}"),
        ({"micro-batch size": 8, "accumulation": 1}, OTHERWISE),
        ({"schedule": "WarmupLR"}, f"WarmupLR begins at its start; {OTHERWISE}"),
        ({"schedule": None}, f"without a schedule the optimizer's own learning rates count; {OTHERWISE}"),
        ({"the schedule's total_num_steps": 10}, OTHERWISE),
    ],
)
def test_what_follows(now: dict[str, object], words: str) -> None:
    assert Differences(THEN, {**THEN, **now}).consequences().startswith(words)


BATCH = {"micro-batch size": 4, "accumulation": 2, "samples of a step": 8}


@pytest.mark.parametrize(
    ("now", "words"),
    [
        # Two ranks share the batch of one: the former micro-batch would make it twice as large.
        ({"micro-batch size": 2}, "a step has 8 samples as before, in other micro-batches: where each sample weighs"),
        ({"micro-batch size": 8, "accumulation": 1}, "a step has 8 samples as before, in other micro-batches: where"),
        ({"micro-batch size": 2, "seed": 7}, f"{OTHERWISE} that the run would have had; the former values give those"),
        ({"samples of a step": 16}, f"{OTHERWISE} that the run would have had; the former values give those, on 1 r"),
        ({"accumulation": 4, "samples of a step": 16}, f"{OTHERWISE} that the run would have had; the former values"),
    ],
)
def test_what_follows_where_the_samples_of_a_step_are_known(now: dict[str, object], words: str) -> None:
    found = Differences({**THEN, **BATCH}, {**THEN, **BATCH, **now})
    assert found and found.consequences().startswith(words)


def test_former_values_name_the_ranks_only_if_they_are_others() -> None:
    same = Differences({**THEN, **BATCH}, {**THEN, **BATCH, "accumulation": 4, "samples of a step": 16})
    assert same.consequences().endswith("the former values give those")
    other = Differences({**THEN, **BATCH}, {**THEN, **BATCH, "micro-batch size": 2, "seed": 7})
    assert other.consequences().endswith("the former values give those, on 1 rank")


def test_of_a_rate_that_a_schedule_has_nothing_follows() -> None:
    found = Differences(THEN, {**THEN, "learning rates": [0.5]}, scheduled=True)
    assert str(found) == "learning rates [0.01] is now [0.5] (a schedule continues from the former)"
    words = found.consequences()
    assert words.startswith("the steps are those that the run would have made; ") and "--schedule constant" in words


def test_beside_other_changes_a_rate_of_a_schedule_takes_no_present_value() -> None:
    found = Differences(THEN, {**THEN, "learning rates": [0.5], "seed": 7}, scheduled=True)
    assert found.consequences().startswith(
        "the steps from here on take the present values but for the learning rates, so"
    )


def test_of_a_rate_that_a_schedule_of_the_loop_has_both_is_told() -> None:
    """Who resumes a Trainer with another rate keeps the former, for the Trainer restores its schedule later."""
    then = {**THEN, "schedule": None}
    group = {"lr": 0.25, "initial_lr": 0.5}
    found = Differences(then, {**then, "learning rates": [0.5]}, groups=[group])
    assert str(found) == "learning rates [0.01] is now [0.5] (set by the schedule of the loop)"
    assert found.consequences().startswith("the schedule of the loop makes the learning rates: those that the run")
    more = Differences(then, {**then, "learning rates": [0.5], "seed": 7}, groups=[group])
    assert "take the present values but for the learning rates, so" in more.consequences()
    # The engine's own schedules mark groups too.
    own = Differences(THEN, {**THEN, "learning rates": [0.5]}, groups=[group])
    assert str(own) == "learning rates [0.01] is now [0.5]"


def test_a_resumed_run_says_both(tmp_path: Path) -> None:
    engine = start(GPT2, DISK, tmp_path)
    train_step(engine, GPT2, 0)
    engine.destroy()
    engine = start(GPT2._replace(accumulation=2, clip=0.5), DISK, tmp_path, resume="must")
    (line,) = [line for line in engine.notices if "other settings" in line]
    assert "accumulation 1 is now 2, samples of a step 1 is now 2, gradient clipping 1.0 is now 0.5; the steps" in line
    engine.destroy(remove=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["OneCycle", "WarmupCosineLR"])
@pytest.mark.parametrize("lr", [LR, 0.5])
def test_without_the_schedule_a_resumed_run_has_its_own_rates(kind: str, lr: float, tmp_path: Path) -> None:
    """Not the point of the curve at which the schedule was left, which may be 0; and they stay."""
    params = {**CYCLE, **MOMENTUM} if kind == "OneCycle" else COSINE
    script = start_scheduled(tmp_path, {"type": kind, "params": params})
    for _ in range(4):
        script.step()
    assert script.engine.get_lr() != [LR]
    script.end()
    for resumed in range(2):
        script = start_scheduled(tmp_path, None, lr=lr)
        group = script.engine.optimizer.param_groups[0]
        assert script.engine.get_lr() == [lr] and group["betas"] == (0.9, 0.999)
        told = any("the optimizer's own learning rates count" in line for line in script.engine.notices)
        assert told is (resumed == 0)
        script.step()
        script.end()
    start_scheduled(tmp_path, None, lr=lr).engine.destroy(remove=True)


@pytest.mark.parametrize(
    ("saved", "mine", "words"),
    [
        (make_mode("fp32", "adam"), make_mode("bf16", "adam"), "dtype fp32 is now bf16 (masters and moments are"),
        (
            make_mode("bf16", "adam"),
            make_mode("bf16", "adam", "int8"),
            "moments fp32 are now int8 (rounded to nearest)",
        ),
        (make_mode("bf16", "adam", "bf16"), make_mode("bf16", "adam"), "moments bf16 are now fp32; losses"),
        (make_mode("bf16", "adam"), make_mode("bf16", "adam", master="bf24"), "master fp32 is now bf24 (rounded to 24"),
        (
            make_mode("bf16", "adam", master="bf24"),
            make_mode("fp32", "adam"),
            "fp32 from here on), master bf24 is now fp32;",
        ),
    ],
)
def test_a_load_into_another_form_says_what_is_rounded(saved: Mode, mine: Mode, words: str) -> None:
    line = in_words(saved, mine, states=True)
    assert line is not None and words in line and line.endswith("are not those that the run would have had")
    assert in_words(mine, mine, states=True) is None


def test_of_moments_that_are_not_loaded_nothing_is_told() -> None:
    saved, mine = make_mode("bf16", "adam"), make_mode("fp32", "adam", "int8")
    line = in_words(saved, mine, states=False)
    assert line is not None and "moments" not in line and "(masters are taken over, and" in line
