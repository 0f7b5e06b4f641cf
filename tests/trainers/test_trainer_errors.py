"""What `OffloadTrainer` cannot do is an error before anything is touched, with both values and the fix."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offload
from offload.config.script_values import ScriptValue, filled
from offload.hf import OffloadTrainer
from offload.report.figures import figures
from offload.report.log import read_log
from tests.support.trainer_runs import (
    FEW,
    MEMORY,
    Texts,
    arguments,
    assert_same,
    config,
    ended,
    result,
    seeded,
    trainer,
    unbroken,
)


def made(folder: Path, blocks: dict[str, Any] | None = None, **changed: Any) -> OffloadTrainer:
    return trainer(folder, MEMORY, blocks=blocks, **changed)


@pytest.mark.parametrize(
    ("blocks", "changed", "message"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            {},
            "per_gpu is 4 in the config, and per_device_train_.* is 2",
        ),
        (
            {"gradient_accumulation_steps": 8},
            {},
            "gradient_accumulation_steps is 8 in the config, and gradient_acc.* is 2",
        ),
        ({"train_batch_size": 16}, {}, r"train_batch_size is 16 in the config, and per_device.* \* .*1 rank is 4"),
        ({"sequence_parallel_size": 2}, {}, "OffloadTrainer gives each rank samples of its own"),
        ({"gradient_clipping": 1.0}, {}, "gradient_clipping is 1.0 in the config, and max_grad_norm is 0.5"),
        ({"bf16": {"enabled": True}}, {}, "bf16.enabled is True in the config, and bf16 is False"),
        ({"bfloat16": {"enabled": True}}, {}, "bf16.enabled is True in the config, and bf16 is False"),
        ({"fp16": {"enabled": False}}, {"fp16": True}, "fp16.enabled is False in the config, and fp16 is True"),
        (
            {"optimizer": {"params": {"lr": 3e-4}}},
            {},
            r"optimizer.params.lr is 0.0003 in the config, and learning_rate is 0.001",
        ),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
            {},
            r"is \[0.9, 0.95\] in the config, and adam_beta1, .* \[0.9, 0.999",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"weight_decay": 1}}},
            {},
            "decay is 1 in the config, and weight_decay is 0.1",
        ),
        (
            {"offload": {"device": "cuda"}},
            {},
            "offload.device is 'cuda' in the config, and the device of the arguments is 'cpu'",
        ),
    ],
    ids=str,
)
def test_config_and_arguments_that_differ(
    blocks: dict[str, Any], changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(offload.ConfigError, match=message):
        made(tmp_path, blocks, **changed)


def test_all_differences_are_reported_at_once() -> None:
    with pytest.raises(
        offload.ConfigError,
        match=r"a\.b is 1 in the config, and one is 2 in the script; c .* 4 .*\. Make them equal",
    ):
        filled({"a": {"b": 1}, "c": 3}, [ScriptValue("a.b", 2, "one"), ScriptValue("c", 4, "two")])


@pytest.mark.parametrize("blocks", [{"bf16": True}, {"bf16": False}, {"fp16": 1}, {"offload": [1]}, {"offload": "x"}])
def test_a_value_in_the_place_of_a_block(blocks: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match=f"{next(iter(blocks))} should be a block"):
        made(tmp_path, blocks).train()
    assert filled({"offload": "auto"}, [ScriptValue("offload.device", "cpu", "one")]) == {"offload": {"device": "cpu"}}


def test_a_number_in_quotes_is_that_number() -> None:
    content = {"lr": "1e-3", "betas": ["0.9", 0.99]}
    assert filled(content, [ScriptValue("lr", 1e-3, "one"), ScriptValue("betas", (0.9, 0.99), "two")]) == content
    for wrong in (2e-3, "words", True):
        with pytest.raises(offload.ConfigError, match="lr is '1e-3' in the config"):
            filled(content, [ScriptValue("lr", wrong, "one")])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"total_num_steps": 100}, "total_num_steps is 100 in the config, and the steps of the training is 12"),
        ({"warmup_num_steps": 7}, "warmup_num_steps is 7 in the config, and warmup_steps is 2"),
        ({"warmup_max_lr": 1.0}, "warmup_max_lr is 1.0 in the config, and learning_rate is 0.001"),
    ],
    ids=str,
)
def test_a_schedule_that_differs(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The number of steps is known when the training begins, and the engine is made after that."""
    mine = made(tmp_path, {"scheduler": {"type": "WarmupDecayLR", "params": params}})
    with pytest.raises(offload.ConfigError, match=message):
        mine.train()
    assert mine.engine is None


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "galore_adamw", "lomo"])
def test_an_optimizer_that_no_kernel_does(optim: str, tmp_path: Path) -> None:
    mine = made(tmp_path, optim=optim)
    with pytest.raises(
        offload.ConfigError, match=rf'optim="{optim}" is not supported .* expected one of adamw_torch, .*"optimizer"'
    ):
        mine.train()
    assert mine.engine is None


SGD = {"optimizer": {"type": "SGD"}}
ADAMW: dict[str, Any] = {"optimizer": {"params": {"lr": "auto"}}}
DECAY = {"scheduler": {"type": "WarmupDecayLR"}}


@pytest.mark.parametrize(
    ("blocks", "changed", "message"),
    [
        (SGD, {"optim": "adafactor"}, 'optimizer.type is "SGD" in .*optim is "adafactor" .*: take optim out of'),
        ({"optimizer": {"type": "AdamW"}}, {"optim": "adamw_bnb_8bit"}, 'is "adamw_bnb_8bit" in the script'),
        (ADAMW, {"optim": "adafactor"}, 'optimizer.type is "AdamW", the default, in .*optim is "adafactor" .*: take'),
        (
            {"optimizer": {"type": None}},
            {"optim": "sgd"},
            'optimizer.type is "AdamW", the default, in .*optim is "sgd"',
        ),
        ({"optimizer": {"type": "auto"}}, {"optim": "rmsprop"}, 'optimizer.type is "AdamW", the default, in'),
        (ADAMW, {"optim": "adamw_torch_fused"}, None),
        (DECAY, {"lr_scheduler_type": "cosine"}, 'type is "WarmupDecayLR" .*lr_scheduler_type is "cosine"'),
        (SGD, {"optim": "sgd"}, None),
        (SGD, {}, None),
        ({"scheduler": {"type": "WarmupCosineLR"}}, {"lr_scheduler_type": "cosine"}, None),
        (DECAY, {}, None),
    ],
    ids=str,
)
def test_an_optimizer_or_a_schedule_of_another_kind(
    blocks: dict[str, Any], changed: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    if message is None:
        assert made(tmp_path, blocks, **changed).engine is None
        return
    with pytest.raises(offload.ConfigError, match=message):
        made(tmp_path, blocks, **changed)


@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "parallelism_config", "auto_find_batch_size", "bf16_full_eval"])
def test_arguments_of_another_engine(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, "something")  # some of them need packages, or several processes, to be made
    with pytest.raises(offload.ConfigError, match=rf"OffloadTrainer cannot be combined with {name}='something': "):
        OffloadTrainer(model=seeded(), args=args, offload_config=config(tmp_path))


def test_two_gpus_and_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(offload.ConfigError, match=r"sees 2 GPUs .* torchrun"):
        made(tmp_path)


@pytest.mark.parametrize(
    "block", [{"resume": "auto"}, {"resume": "must"}, {"durability": "step"}, {"durability": {"every": 5}}], ids=str
)
def test_two_ways_to_go_on(block: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match=rf"offload.{next(iter(block))} is .*resume_from_checkpoint=True"):
        made(tmp_path, {"offload": block})


def test_an_engine_or_its_model(tmp_path: Path) -> None:
    of_config = config(tmp_path, MEMORY) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = offload.initialize(model=seeded(), config=of_config)
    try:
        for model, message in (
            (engine, "makes the engine itself; give it the model"),
            (engine.module, "is under an engine"),
        ):
            with pytest.raises(offload.ConfigError, match=message):
                OffloadTrainer(model=model, args=arguments(tmp_path), offload_config=config(tmp_path))
    finally:
        engine.destroy()


def test_an_optimizer_and_a_schedule_twice(tmp_path: Path) -> None:
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for block, pair in (("optimizer", (optimizer, None)), ("scheduler", (None, schedule))):
        content = config(tmp_path, MEMORY) | {block: {"type": {"optimizer": "AdamW", "scheduler": "WarmupLR"}[block]}}
        with pytest.raises(offload.ConfigError, match=f'has a block "{block}", and the Trainer was given one'):
            OffloadTrainer(model=model, args=arguments(tmp_path), offload_config=content, optimizers=pair)


def test_an_optimizer_and_a_schedule_that_are_given(tmp_path: Path) -> None:
    """The schedule holds the groups of the optimizer that was given, and moves them."""
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.1)
    mine = OffloadTrainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=Texts(),
        offload_config=config(tmp_path),
        optimizers=(optimizer, schedule),
    )
    with ended(mine):
        mine.train()
        assert mine.engine is not None and mine.engine.get_lr() == pytest.approx([1e-4])
        rates = [log["learning_rate"] for log in mine.state.log_history if "loss" in log]
        assert rates == pytest.approx([1e-2] * 6 + [1e-3] * 6)


def test_no_folder_to_resume_from(tmp_path: Path) -> None:
    mine = made(tmp_path)
    with pytest.raises(offload.StoreError, match="resume_from_checkpoint is nowhere, which is not a folder"):
        mine.train(resume_from_checkpoint="nowhere")
    assert mine.engine is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_without_the_extra(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; import offload.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"ImportError: offload.hf needs {name}: pip install 'offload[hf]'" in done.stderr


# --------------------------------------------------------------------------------------------------
# A Trainer's user reads, without any configuration of logging, where states are, where a run resumes and what is kept.


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
