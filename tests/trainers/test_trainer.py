"""transformers' Trainer trains as the stock one, with its checkpoints and errors."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

import offload
from offload.config.script_values import ScriptValue, filled
from offload.engine.params import handle_of
from offload.errors import BudgetError, UsageError
from offload.hf import Accelerator, OffloadMixin, OffloadTrainer
from offload.hf.trainer import OVERRIDDEN
from offload.report.figures import figures
from offload.report.log import read_log
from tests.support import models, rounding_bounds
from tests.support.oracle import assert_same_tensors
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size
from tests.support.trainer_runs import (
    CHECKPOINTING,
    FEW,
    MEMORY,
    Run,
    Texts,
    arguments,
    as_job,
    assert_close,
    assert_same,
    config,
    ended,
    offloaded,
    result,
    seeded,
    stock,
    trainer,
    unbroken,
)
from tests.trainers.test_trainer_checkpoints import Break

CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without a clip": {"max_grad_norm": 0.0},
    "checkpointing of activations": {CHECKPOINTING: True},
    "cosine, one micro-batch": {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 1},
    "Adagrad": {"optim": "adagrad", "learning_rate": 1e-2},
    "SGD": {"optim": "sgd", "learning_rate": 1e-1},
    "RMSprop, without a kernel": {"optim": "rmsprop"},
    "Adafactor, without a kernel": {"optim": "adafactor", "model": models.llama},
}


@pytest.mark.sample(1)
@pytest.mark.works("Trainers", "transformers' `Trainer`: losses, norms, rates and weights of the stock one", "right")
@pytest.mark.parametrize("changed", CASES.values(), ids=CASES)
@pytest.mark.numeric
def test_equals_the_stock_trainer(changed: dict[str, Any], tmp_path: Path) -> None:
    """Adafactor scales a tensor's step by all of it, so a bias of keys, which is noise, would be in the others."""
    mine, theirs = offloaded(tmp_path / "mine", **changed), stock(tmp_path / "stock", **changed)
    assert_close(mine, theirs, changed.get("model", models.shallow))


@pytest.mark.numeric
def test_decay_has_the_groups_of_the_trainer(tmp_path: Path) -> None:
    """A decay that large shows in every weight that has it."""
    changed = {"weight_decay": 100.0}
    mine = offloaded(tmp_path / "mine", **changed)
    assert_close(mine, stock(tmp_path / "stock", **changed))
    assert float((mine.weights["transformer.ln_f.weight"] - 1).abs().max()) < 0.02, "norms have no decay"
    assert float(mine.weights["transformer.wte.weight"].std()) < 0.018, "the embedding has"


@pytest.mark.numeric
def test_bf16_keeps_fp32_masters_and_follows_fp32(tmp_path: Path) -> None:
    """Steps follow the fp32 ones, for rounding does not add up in the masters."""
    mine, plain = offloaded(tmp_path, bf16=True), unbroken()
    assert all(value.dtype == torch.bfloat16 for value in mine.weights.values())
    for left, right in zip(mine.logs, plain.logs, strict=True):
        rounding_bounds.same_losses([left["loss"]], [right["loss"]], as_job(plain.logs, models.shallow, "bf16"))
        assert left["learning_rate"] == right["learning_rate"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_torch_compile_compiles_each_block(tmp_path: Path) -> None:
    """The stock Trainer compiles the whole model."""
    compiled = {"torch_compile_backend": "aot_eager"}
    mine, plain = offloaded(tmp_path / "mine", **compiled), stock(tmp_path / "stock", **compiled)
    assert_close(mine, plain)


@pytest.mark.numeric
def test_torch_autocast_is_the_stock_trainers_bf16(tmp_path: Path) -> None:
    """fp32 weights, and matrix products in bf16: the same graph up to the order of sums of a clip."""
    blocks = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    mine, plain = offloaded(tmp_path / "mine", blocks=blocks, bf16=True), stock(tmp_path / "stock", bf16=True)
    job = as_job(plain.logs, models.shallow, "bf16")
    for left, right in zip(mine.logs, plain.logs, strict=True):
        rounding_bounds.same_losses([left["loss"]], [right["loss"]], job)
        rounding_bounds.same_norms([left["grad_norm"]], [right["grad_norm"]], job)


def test_in_fp16_a_step_that_overflows_moves_no_schedule(tmp_path: Path) -> None:
    applied: list[bool] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            applied.append(mine.engine.was_step_applied())

    blocks = {"fp16": {"enabled": "auto", "initial_scale_power": 20, "hysteresis": 1}}
    rates = [log["learning_rate"] for log in unbroken().logs]
    with ended(trainer(tmp_path, blocks=blocks, rows=FEW, fp16=True)) as mine:
        mine.add_callback(Watch)
        mine.train()
        assert mine.state.global_step == 6 and 0 < mine.engine.skipped_steps == applied.count(False) < 5
        expected = [rates[sum(applied[:step])] for step in range(6)]
        assert [log["learning_rate"] for log in result(mine).logs] == expected


def test_a_second_train_goes_on_with_the_engine(tmp_path: Path) -> None:
    with ended(trainer(tmp_path, rows=FEW)) as mine:
        mine.train()
        first, engine = result(mine), mine.engine
        mine.train()
        assert mine.engine is engine and engine.global_steps == 12
        assert result(mine).logs[0]["loss"] < first.logs[0]["loss"] - 0.1, "it begins with what was trained"
        assert [log["learning_rate"] for log in result(mine).logs] == [log["learning_rate"] for log in first.logs]


@pytest.mark.slow
def test_model_init_makes_a_new_engine_for_each_train(tmp_path: Path) -> None:
    mine = OffloadTrainer(
        model_init=lambda: models.shallow(),
        args=arguments(tmp_path, num_train_epochs=1),
        train_dataset=Texts(FEW),
        offload_config=config(tmp_path),
    )
    with ended(mine):
        mine.train()
        first = result(mine)
        mine.train()
        assert_same(first, result(mine))


# -- the config's own optimizer and schedule ----------------------------------------------------------


def test_auto_is_what_the_arguments_say(tmp_path: Path) -> None:
    """Every key to which transformers' own integration gives a value, at once; all parameters have the decay."""
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    changed = {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6}
    with ended(trainer(tmp_path, blocks=auto, rows=FEW, **changed)) as mine:
        mine.train()
        settled = mine.engine.config
        group = mine.engine.optimizer.param_groups[0]
        rates = [log["learning_rate"] for log in result(mine).logs]
    keys = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    assert [settled[key] for key in keys] == [4, 2, 0.5]
    assert not settled["bf16"]["enabled"] and settled["offload"]["device"] == "cpu"
    assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.8, 0.99), 1e-6, 0.1)
    expected = [0, 0, 10, 10, 7.5, 5]  # DeepSpeed's begins and falls one behind
    assert rates == pytest.approx([rate * 1e-4 for rate in expected])


def test_the_optimizer_of_a_configs_file_may_be_one_that_the_arguments_do_not_know(tmp_path: Path) -> None:
    """The file is left alone."""
    path, content = tmp_path / "ds_config.json", config(tmp_path, optimizer={"type": "Lion", "params": {"lr": 1e-3}})
    path.write_text(json.dumps(content))
    args, rows = arguments(tmp_path), Texts(FEW)
    with ended(OffloadTrainer(model=seeded(), args=args, train_dataset=rows, offload_config=path)) as mine:
        mine.train()
        assert mine.engine.get_type() == ["Lion"]
        assert result(mine).logs[-1]["loss"] < result(mine).logs[0]["loss"] - 0.1
    assert json.loads(path.read_text()) == content


# -- what it leans on ---------------------------------------------------------------------------------


def test_what_it_overrides_is_there() -> None:
    assert [name for name in OVERRIDDEN if not callable(getattr(transformers.Trainer, name, None))] == []


class WithReference(transformers.Trainer):
    """What trl's DPOTrainer does with its reference, in a loss that is short."""

    def __init__(self, *args: Any, ref_model: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.ref_model(**inputs).logits.float()
        apart = functional.kl_div(outputs.logits.float().log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        loss = (outputs.loss + apart / 100) / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


class OffloadWithReference(OffloadMixin, WithReference):
    """As a user writes it."""


def reference() -> Any:
    """Of other weights than the model, and frozen by nobody."""
    torch.manual_seed(1)
    return models.shallow().eval()


def made(kind: Any, folder: Path, **given: Any) -> Any:
    rows = Texts(FEW)
    return kind(
        model=seeded(), ref_model=reference(), args=arguments(folder), train_dataset=rows, eval_dataset=rows, **given
    )


@contextmanager
def offloaded_reference(folder: Path, tier: str = "nvme", **block: Any) -> Iterator[Any]:
    content = config(folder, tier)
    trainer = made(OffloadWithReference, folder, offload_config=content | {"offload": content["offload"] | block})
    try:
        yield trainer
    finally:
        for engine in (trainer.engine, *trainer.accelerator.references):
            if engine is not None:
                engine.destroy(remove=True)


@pytest.mark.slow
@pytest.mark.works("Trainers", "a reference model, as trl's `DPOTrainer` prepares it: paged", "right")
@pytest.mark.numeric
def test_training_is_the_stock_trainers(tmp_path: Path) -> None:
    """The reference is in swap files of its own, and does not train."""
    stock = made(WithReference, tmp_path / "stock")
    stock.train()
    with offloaded_reference(tmp_path / "disk", log=str(tmp_path / "log")) as mine:
        (engine,) = mine.accelerator.references
        assert mine.ref_model is engine.module and mine.engine is None
        assert all(handle_of(parameter) is not None for parameter in mine.ref_model.parameters())
        assert (tmp_path / "disk" / "swap" / "default-reference" / "rank0" / "manifest.json").is_file()
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        mine.train()
        on_disk = result(mine)
        assert mine.engine is not engine and mine.model is not mine.ref_model
        assert mine.accelerator.prepare_model(mine.ref_model, evaluation_mode=True) is mine.ref_model
        assert len(mine.accelerator.references) == 1
        assert_same_tensors(engine.state_dict(), before)
    left = {path.name for path in (tmp_path / "disk" / "swap").rglob("*") if path.is_file()}
    assert left <= {"finished.json"}
    assert_close(on_disk, result(stock))
    with offloaded_reference(tmp_path / "memory", "none") as mine:
        mine.train()
        assert_same(result(mine), on_disk)


@pytest.mark.slow
def test_device_memory_is_that_of_both(tmp_path: Path) -> None:
    with offloaded_reference(tmp_path / "alone") as mine:
        mine.evaluate()
        needed = mine.engine.device_memory, mine.accelerator.references[0].device_memory
    with offloaded_reference(tmp_path / "given", device_memory=sum(needed)) as mine:
        mine.evaluate()
        assert mine.engine.device_memory + mine.accelerator.references[0].device_memory <= sum(needed)
    for left in (0, 4096):
        with (
            offloaded_reference(tmp_path / str(left), device_memory=needed[1] + left) as mine,
            pytest.raises(BudgetError),
        ):
            mine.evaluate()


def test_a_reference_that_comes_later_finds_no_device_memory(tmp_path: Path) -> None:
    content = config(tmp_path)
    content["offload"]["device_memory"] = "64MiB"
    accelerator = Accelerator(cpu=True, offload_config=content)
    model = models.shallow()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with pytest.raises(UsageError, match="before prepare"):
        accelerator.prepare_model(reference(), evaluation_mode=True)
    accelerator.engine.destroy(remove=True)


DIFFERENCES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"train_micro_batch_size_per_gpu": 4}, {}, "per_gpu is 4 in the config, and per_device_train_.* is 2"),
    ({"gradient_accumulation_steps": 8}, {}, "_steps is 8 in the config, and gradient_acc.* is 2"),
    ({"train_batch_size": 16}, {}, r"train_batch_size is 16 in the config, and per_device.* \* .*1 rank is 4"),
    ({"sequence_parallel_size": 2}, {}, "OffloadTrainer gives each rank samples of its own"),
    ({"tensor_parallel": {"tp_size": 2}}, {}, "autotp_size is 2, and OffloadTrainer gives each rank"),
    ({"gradient_clipping": 1.0}, {}, "gradient_clipping is 1.0 in the config, and max_grad_norm is 0.5"),
    ({"bf16": {"enabled": True}}, {}, "bf16.enabled is True in the config, and bf16 is False"),
    ({"bfloat16": {"enabled": True}}, {}, "bf16.enabled is True in the config, and bf16 is False"),
    ({"fp16": {"enabled": False}}, {"fp16": True}, "fp16.enabled is False in the config, and fp16 is True"),
    ({"optimizer": {"params": {"lr": 3e-4}}}, {}, r"params.lr is 0.0003 in the config, and learning_rate is 0.001"),
    ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, {}, r"is \[0.9, 0.95\] in .*, and adam_beta1, .* \[0.9, 0.999"),
    ({"optimizer": {"type": "SGD", "params": {"weight_decay": 1}}}, {}, "is 1 in the config, and weight_decay is 0.1"),
    ({"offload": {"device": "cuda"}}, {}, "is 'cuda' in the config, and the device of the arguments is 'cpu'"),
]


def test_config_and_arguments_that_differ(tmp_path: Path) -> None:
    for blocks, changed, message in DIFFERENCES:
        with pytest.raises(offload.ConfigError, match=message):
            trainer(tmp_path, MEMORY, blocks=blocks, **changed)


def test_all_differences_are_reported_at_once() -> None:
    with pytest.raises(
        offload.ConfigError, match=r"a\.b is 1 in the config, and one is 2 in the script; c .* 4 .*\. Make them equal"
    ):
        filled({"a": {"b": 1}, "c": 3}, [ScriptValue("a.b", 2, "one"), ScriptValue("c", 4, "two")])


def test_a_value_in_the_place_of_a_block(tmp_path: Path) -> None:
    for blocks in ({"bf16": True}, {"bf16": False}, {"fp16": 1}, {"offload": [1]}, {"offload": "x"}):
        with pytest.raises(offload.ConfigError, match=f"{next(iter(blocks))} should be a block"):
            trainer(tmp_path, MEMORY, blocks=blocks).train()
    assert filled({"offload": "auto"}, [ScriptValue("offload.device", "cpu", "one")]) == {"offload": {"device": "cpu"}}


def test_a_number_in_quotes_is_that_number() -> None:
    content = {"lr": "1e-3", "betas": ["0.9", 0.99]}
    assert filled(content, [ScriptValue("lr", 1e-3, "one"), ScriptValue("betas", (0.9, 0.99), "two")]) == content
    for wrong in (2e-3, "words", True):
        with pytest.raises(offload.ConfigError, match="lr is '1e-3' in the config"):
            filled(content, [ScriptValue("lr", wrong, "one")])


def test_a_schedule_that_differs(tmp_path: Path) -> None:
    """The number of steps is known when the training begins, and the engine is made after that."""
    for params, message in (
        ({"total_num_steps": 100}, "total_num_steps is 100 in the config, and the steps of the training is 12"),
        ({"warmup_num_steps": 7}, "warmup_num_steps is 7 in the config, and warmup_steps is 2"),
        ({"warmup_max_lr": 1.0}, "warmup_max_lr is 1.0 in the config, and learning_rate is 0.001"),
    ):
        mine = trainer(tmp_path, MEMORY, blocks={"scheduler": {"type": "WarmupDecayLR", "params": params}})
        with pytest.raises(offload.ConfigError, match=message):
            mine.train()
        assert mine.engine is None


def test_an_optimizer_that_no_kernel_does(tmp_path: Path) -> None:
    for optim in ("adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "galore_adamw", "lomo"):
        mine = trainer(tmp_path, MEMORY, optim=optim)
        message = rf'optim="{optim}" is not supported .* expected one of adamw_torch, .*"optimizer"'
        with pytest.raises(offload.ConfigError, match=message):
            mine.train()
        assert mine.engine is None


SGD = {"optimizer": {"type": "SGD"}}
ADAMW: dict[str, Any] = {"optimizer": {"params": {"lr": "auto"}}}
DECAY = {"scheduler": {"type": "WarmupDecayLR"}}


KINDS: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    (SGD, {"optim": "adafactor"}, 'optimizer.type is "SGD" in .*optim is "adafactor" .*: take optim out of'),
    ({"optimizer": {"type": "AdamW"}}, {"optim": "adamw_bnb_8bit"}, 'is "adamw_bnb_8bit" in the script'),
    (ADAMW, {"optim": "adafactor"}, 'optimizer.type is "AdamW", the default, in .*optim is "adafactor" .*: take'),
    ({"optimizer": {"type": None}}, {"optim": "sgd"}, 'type is "AdamW", the default, in .*optim is "sgd"'),
    ({"optimizer": {"type": "auto"}}, {"optim": "rmsprop"}, 'optimizer.type is "AdamW", the default, in'),
    (ADAMW, {"optim": "adamw_torch_fused"}, None),
    (DECAY, {"lr_scheduler_type": "cosine"}, 'type is "WarmupDecayLR" .*lr_scheduler_type is "cosine"'),
    (SGD, {"optim": "sgd"}, None),
    (SGD, {}, None),
    ({"scheduler": {"type": "WarmupCosineLR"}}, {"lr_scheduler_type": "cosine"}, None),
    (DECAY, {}, None),
]


def test_an_optimizer_or_a_schedule_of_another_kind(tmp_path: Path) -> None:
    for blocks, changed, message in KINDS:
        if message is None:
            assert trainer(tmp_path, MEMORY, blocks=blocks, **changed).engine is None
        else:
            with pytest.raises(offload.ConfigError, match=message):
                trainer(tmp_path, MEMORY, blocks=blocks, **changed)


def test_arguments_of_another_engine(tmp_path: Path) -> None:
    for name in ("fsdp", "deepspeed", "parallelism_config", "auto_find_batch_size", "bf16_full_eval"):
        args = arguments(tmp_path)
        setattr(args, name, "something")  # some of them need packages, or several processes, to be made
        with pytest.raises(offload.ConfigError, match=rf"OffloadTrainer cannot be combined with {name}='something': "):
            OffloadTrainer(model=seeded(), args=args, offload_config=config(tmp_path))


def test_two_gpus_and_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(offload.ConfigError, match=r"sees 2 GPUs .* torchrun"):
        trainer(tmp_path, MEMORY)


def test_two_ways_to_go_on(tmp_path: Path) -> None:
    for block in ({"resume": "auto"}, {"resume": "must"}, {"durability": "step"}, {"durability": {"every": 5}}):
        with pytest.raises(offload.ConfigError, match=rf"offload.{next(iter(block))} is .*resume_from_checkpoint=True"):
            trainer(tmp_path, MEMORY, blocks={"offload": block})


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
    mine = trainer(tmp_path, MEMORY)
    with pytest.raises(offload.StoreError, match="resume_from_checkpoint is nowhere, which is not a folder"):
        mine.train(resume_from_checkpoint="nowhere")
    assert mine.engine is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_without_the_extra(name: str) -> None:
    forget = "for each in [each for each in sys.modules if each.startswith('offload.hf')]: del sys.modules[each]"
    done = warm_process.python(f"import sys\n{forget}\nsys.modules[{name!r}] = None\nimport offload.hf")
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
    saved = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1, "rows": FEW}
    with ended(trainer(tmp_path, **saved)) as mine:
        mine.train()
    begun = capsys.readouterr().err
    line = (
        r"^offload: fp32 on cpu: weights on disk, states on disk; host [\d.]+ [KM]iB, device [\d.]+ [KM]iB, swap files "
    )
    assert len(re.findall(line, begun, re.MULTILINE)) == 1 and "loaded" not in begun
    with ended(trainer(tmp_path, **saved)) as mine:
        mine.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-2")
    resumed = capsys.readouterr().err
    folder = tmp_path / "out" / "checkpoint-2" / "global_step2"
    assert f"offload: loaded {folder}: training goes on after step 2\n" in resumed and re.search(
        line, resumed, re.MULTILINE
    )
    with ended(trainer(tmp_path, learning_rate=1e-5, **saved)) as mine:
        mine.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-2")
        rates = [line["learning_rate"] for line in mine.state.log_history if "learning_rate" in line]
    assert "(set by the schedule of the loop); the schedule of the loop makes the learning rates" in caplog.text
    assert max(rates) > 1e-5, "the schedule goes on"
    capsys.readouterr()
    logging.getLogger("offload").setLevel(logging.WARNING)
    with ended(trainer(tmp_path, **saved)) as mine:
        mine.train(resume_from_checkpoint=True)
    assert capsys.readouterr().err == "", "a user who has set a level gets no more than that"


@pytest.mark.slow
def test_an_end_says_what_is_kept_and_how_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def end(step: int, error: type[BaseException], resume: str | None = None, **changed: Any) -> str:
        caplog.clear()
        with ended(trainer(tmp_path, rows=FEW, **{"save_strategy": "steps", "save_steps": 2} | changed)) as mine:
            mine.add_callback(Fail(step, error))
            with pytest.raises(error):
                mine.train(resume_from_checkpoint=resume)
        (message,) = [each.getMessage() for each in caplog.records if "the training ended" in each.getMessage()]
        return message

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
    report = figures(log)
    assert report["eval_loss"]["last"] == logged[-1] and report["torn_lines"] == report["repeated_steps"] == 0
    assert log.about["model"] == "GPT2LMHeadModel" and log.about["parameters"] == sum(
        p.numel() for p in mine.model.parameters()
    )
    assert log.about["dtype"] == "fp32" and log.about["samples_a_step"] == 4 and log.about["host_budget_bytes"] > 0


SAVED = {"save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with pool(2) as ranks:
        yield ranks


def train(folder: Path, until: int = 0, resume: bool = False, **changed: Any) -> Run:
    """On this rank; the batch of a step is the same on one process and on two."""
    rank, size = rank_and_size()
    transformers.logging.set_verbosity_error()
    changed |= {"ddp_backend": "gloo"} if size > 1 else {}
    with ended(trainer(folder, model=models.shallow, per_device_train_batch_size=4 // size, **SAVED | changed)) as mine:
        mine.train_dataset = Texts(24)  # no rest: Accelerate would fill a rank's last batch up with rows of the first
        if until:
            mine.add_callback(Break(until))
        mine.train(resume_from_checkpoint=resume or None)
        assert mine.engine is not None and mine.engine.world_size == size and mine.engine.global_rank == rank
        return result(mine)


@pytest.mark.numeric
def test_two_ranks_give_what_one_gives(two: RankPool, tmp_path: Path) -> None:
    single = train(tmp_path / "one", save_strategy="no", num_train_epochs=1)
    mine, rank1 = two.run(functools.partial(train, num_train_epochs=1), tmp_path / "two")
    assert_close(mine, single, reordered=True)
    assert_same(mine._replace(logs=[]), rank1._replace(logs=[]))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "out" / "checkpoint-3").state_dict()
    assert_same_tensors(saved, mine.weights)


def draw_on_one_rank(folder: Path) -> list[float]:
    """Dropout on rank 0 alone: by itself rank 1 would take turns from the third step on."""
    model = models.shallow if rank_and_size()[0] else models.shallow_dropout
    changed = {CHECKPOINTING: True, "gradient_accumulation_steps": 2, "max_steps": 4, "ddp_backend": "gloo"}
    with ended(trainer(folder, model=model, per_device_train_batch_size=1, save_strategy="no", **changed)) as mine:
        mine.train()
        assert mine.engine is not None and mine.engine.schedule == "layer_major"
        return [log["loss"] for log in mine.state.log_history if "loss" in log]


@pytest.mark.slow
def test_ranks_take_one_order_where_the_model_of_one_alone_draws_random_numbers(two: RankPool, tmp_path: Path) -> None:
    rank0, rank1 = two.run(draw_on_one_rank, tmp_path)
    assert len(rank0) == 4 and rank0 == rank1


def accelerated(folder: Path) -> list[float]:
    _, size = rank_and_size()
    torch.manual_seed(0)
    model = models.shallow()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Texts(24), batch_size=4 // size)
    accelerator = Accelerator(cpu=True, offload_config=config(folder))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert accelerator.engine is not None
    accelerator.engine.destroy(remove=True)
    return losses


@pytest.mark.slow
@pytest.mark.numeric
def test_accelerate_on_two_ranks(two: RankPool, tmp_path: Path) -> None:
    single = accelerated(tmp_path / "one")
    mine, rank1 = two.run(accelerated, tmp_path / "two")
    assert mine == rank1
    rounding_bounds.same_losses(mine, single, models.SHALLOW)
