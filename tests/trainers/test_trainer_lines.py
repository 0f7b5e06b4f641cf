"""A Trainer's user reads, without any configuration of logging, where states are, where a run resumes and what is kept.

Evaluations of a Trainer are in its log, and so on the page of `offload report`.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from offload.report.figures import figures
from offload.report.log import read_log
from tests.support.trainer_runs import FEW, assert_same, ended, result, trainer, unbroken


class Fail(transformers.TrainerCallback):
    """Ends a training by an exception behind a step."""

    def __init__(self, step: int, error: type[BaseException]) -> None:
        self.step, self.error = step, error

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise self.error


def test_a_start_says_where_states_are_and_a_resume_from_which_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2, "rows": FEW}
    with ended(trainer(tmp_path, **saved)) as mine:
        mine.train()
    begun = capsys.readouterr().err
    line = (
        r"^offload: fp32 on cpu: weights on disk, states on disk; host [\d.]+ [KM]iB, device [\d.]+ [KM]iB, swap files "
    )
    assert len(re.findall(line, begun, re.MULTILINE)) == 1 and "loaded" not in begun
    with ended(trainer(tmp_path, **saved)) as mine:
        mine.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-4")
    resumed = capsys.readouterr().err
    folder = tmp_path / "out" / "checkpoint-4" / "global_step4"
    assert f"offload: loaded {folder}: training goes on after step 4\n" in resumed and re.search(
        line, resumed, re.MULTILINE
    )
    with ended(trainer(tmp_path, learning_rate=1e-5, **saved)) as mine:
        mine.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-4")
        rates = [line["learning_rate"] for line in mine.state.log_history if "learning_rate" in line]
    assert "(set by the schedule of the loop); the schedule of the loop makes the learning rates" in caplog.text
    assert max(rates) > 1e-5, "the schedule goes on"
    capsys.readouterr()
    logging.getLogger("offload").setLevel(logging.WARNING)
    with ended(trainer(tmp_path, **saved)) as mine:
        mine.train(resume_from_checkpoint=True)
    assert capsys.readouterr().err == "", "a user who has set a level gets no more than that"


def test_an_end_says_what_is_kept_and_how_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def end(step: int, error: type[BaseException], resume: str | None = None, **changed: Any) -> str:
        caplog.clear()
        with ended(trainer(tmp_path, rows=FEW, **{"save_strategy": "steps", "save_steps": 2} | changed)) as mine:
            mine.add_callback(Fail(step, error))
            with pytest.raises(error):
                mine.train(resume_from_checkpoint=resume)
        (found,) = [each.getMessage() for each in caplog.records if "the training ended" in each.getMessage()]
        return found

    assert end(1, KeyboardInterrupt) == (
        "offload: the training ended after step 1 by Ctrl-C, before a checkpoint was saved, so nothing is kept: "
        "save_steps is 2"
    )
    assert 'save_strategy is "no"' in end(3, KeyboardInterrupt, save_strategy="no")
    kept = f"{tmp_path}/out/checkpoint-2"
    goes_on = f'{kept} is kept: train(resume_from_checkpoint="{kept}") goes on from there'
    assert end(3, RuntimeError) == f"offload: the training ended after step 3 by RuntimeError; {goes_on}"
    assert end(3, KeyboardInterrupt, kept).endswith(goes_on), "the checkpoint from which it went on is there still"
    assert end(1, KeyboardInterrupt).endswith("save_steps is 2"), "a checkpoint of another training is not this one's"
    # What the line says is so.
    with ended(trainer(tmp_path, rows=FEW)) as mine:
        mine.train(resume_from_checkpoint=kept)
        assert_same(result(mine), unbroken())


def test_evaluations_are_in_the_log_and_count_for_no_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    blocks = {"wall_clock_breakdown": True, "offload": {"nvme_path": str(tmp_path / "swap"), "log": str(path)}}
    with ended(trainer(tmp_path, blocks=blocks, rows=FEW, eval_strategy="steps", eval_steps=2)) as mine:
        mine.train()
        logged = [log["eval_loss"] for log in mine.state.log_history if "eval_loss" in log]
        mine.predict(mine.eval_dataset)
        assert_same(result(mine), unbroken())
    log = read_log(path)
    assert [step["eval_loss"] for step in log.steps if "eval_loss" in step] == logged and len(logged) == 3
    assert [step["step"] for step in log.steps if "eval_loss" in step] == [2, 4, 6]
    found = figures(log)
    assert found["eval_loss"]["last"] == logged[-1] and found["torn_lines"] == found["repeated_steps"] == 0
    assert log.about["model"] == "GPT2LMHeadModel" and log.about["parameters"] == sum(
        p.numel() for p in mine.model.parameters()
    )
    assert log.about["dtype"] == "fp32" and log.about["samples_a_step"] == 4 and log.about["host_budget_bytes"] > 0
