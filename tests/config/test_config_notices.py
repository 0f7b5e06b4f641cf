"""Keys of a config that have no effect are reported on stderr, also without logging set up."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import effective, load_config, resolve_batch
from tests.config.test_reference_configs import MEANINGS
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import shared_pool

SCRIPT = """
import json, sys
import torch
import offload
config = json.loads(sys.argv[1])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if "own" in sys.argv else None
engine = offload.initialize(model=model, optimizer=optimizer, config=config)[0]
print("trains", flush=True)
engine.destroy()
"""
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "offload": {"device": "cpu"},
}


def notices_of(folder: Path, given: dict[str, Any], *options: str) -> list[str]:
    """The lines on stderr of a script that trains by `given`, beside the one that says where states are."""
    done = warm_process.run(["-c", SCRIPT, json.dumps({**BASE, **given}), *options], cwd=folder)
    assert done.returncode == 0 and done.stdout == "trains\n", done.stderr
    return beside_the_headline(done.stderr)


def beside_the_headline(errors: str) -> list[str]:
    """The lines of a start that change with its config, of which one says where states are."""
    lines = errors.splitlines()
    (headline,) = [line for line in lines if re.match(r"offload: \w+ on \w+: weights on ", line)]
    lines.remove(headline)
    return lines


def test_one_line_for_all_that_changes_speed_alone(tmp_path: Path) -> None:
    zero = {"stage": 3, "contiguous_gradients": False, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    (line,) = notices_of(tmp_path, {"zero_optimization": zero, "aio": {"use_gds": True}})
    assert line.startswith("offload: config keys without effect, since this library")
    for key in ("contiguous_gradients", "offload_optimizer.pin_memory", "aio.use_gds"):
        assert key in line


def heard(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said by default, but for how fast this processor is."""
    records = [each for each in caplog.records if each.levelno >= logging.WARNING and each.name.startswith("offload")]
    return [each.getMessage() for each in records if "products are" not in each.getMessage()]


def test_a_line_for_what_is_not_done(caplog: pytest.LogCaptureFixture) -> None:
    ignored = "config keys that are not supported and are ignored: "
    for given, message in (
        ({"autotuning": {"enabled": True}}, f"{ignored}autotuning"),
        ({"sparse_gradients": True}, f"{ignored}sparse_gradients"),
        ({"gradient_clipping": "auto"}, 'to a global norm of 1, which "auto" means where no Trainer sets the'),
    ):
        caplog.clear()
        offload.initialize(model=nn.Linear(4, 4), config={**BASE, **given})[0].destroy()
        (line,) = heard(caplog)
        assert line.startswith("offload: ") and message in line


# -- files that DeepSpeed users have, by each way to train ----------------------------------------------

BY_TRAINER = """
import torch, transformers
from offload.hf import OffloadTrainer
transformers.logging.set_verbosity_error()
size = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
data = [{"input_ids": ids, "labels": ids} for ids in torch.zeros(8, 8, dtype=torch.long)]
more = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "num_train_epochs": 2}
args = transformers.TrainingArguments("output", per_device_train_batch_size=4, **more)
trainer = OffloadTrainer(model=model, args=args, train_dataset=data, offload_config="ds_config.json")
trainer.evaluate(data)
trainer.train()
trainer.engine.destroy()
"""
BY_ACCELERATE = """
import torch
from offload.hf import Accelerator
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
accelerator = Accelerator(cpu=True, offload_config="ds_config.json")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    accelerator.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.engine.destroy()
"""
CLIPPED = (
    'gradients are clipped to a global norm of 1, since the config does not say; "gradient_clipping": 0 turns clipping '
    "off, as in older DeepSpeed"
)


@pytest.mark.parametrize("name", MEANINGS)
def test_each_key_of_a_file_that_is_not_honoured_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meaning = MEANINGS[name]
    expected = [start + ", ".join(keys) for start, keys in meaning.notices]
    expected += [] if '"gradient_clipping"' in meaning.text else [CLIPPED]
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(meaning.text)
    model = nn.Linear(4, 4)
    optimizer = None if meaning.optimizer else torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = offload.initialize(model=model, optimizer=optimizer, config="ds_config.json")[0]
    for _ in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(1, 4, dtype=model.weight.dtype)).float().mean())
        engine.step()
    engine.destroy()
    assert heard(caplog) == [f"offload: {line}" for line in expected]


@pytest.mark.parametrize("script", [BY_TRAINER, BY_ACCELERATE], ids=["Trainer", "Accelerate"])
def test_the_same_by_trainer_and_accelerate(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a run, also where it evaluates before it trains; what clips is said by the arguments and the script."""
    monkeypatch.chdir(tmp_path)
    text = MEANINGS["stage 3 on the CPU"].text.replace('"contiguous_gradients":true', '"contiguous_gradients":false')
    Path("ds_config.json").write_text(text)
    exec(script, {"__name__": "script"})
    (line,) = heard(caplog)
    assert line.startswith("offload: config keys without effect") and line.endswith(".contiguous_gradients")


def test_a_path_may_be_used_though_no_tier_is_nvme(tmp_path: Path) -> None:
    """With little memory states move to the drive, so the line at the start must not say that the path is ignored."""
    script = SCRIPT.replace(
        "torch.nn.Linear(4, 4)", "torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in '.' * 16))"
    )
    zero = {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "swap"}, "offload_optimizer": {"device": "cpu"}}
    config = {**BASE, "zero_optimization": zero, "offload": {"device": "cpu", "host_memory": "44MiB"}}
    done = warm_process.run(["-c", script, json.dumps(config)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "to disk" in done.stderr and (tmp_path / "swap" / "default").is_dir()
    assert "nvme_path is used only if" in done.stderr and "ignored" not in done.stderr


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lines_on_rank(zero: dict[str, object], tier: str = "none") -> list[str]:
    """The warnings of this rank where it makes an engine of that block of ZeRO, with weights in that tier."""
    listener = _Heard()
    logger = logging.getLogger("offload")
    logger.addHandler(listener)
    try:
        config = {**BASE, "zero_optimization": {**zero, "offload_param": {"device": tier}}}
        offload.initialize(model=torch.nn.Linear(4, 4), config=config)[0].destroy()
    finally:
        logger.removeHandler(listener)
    return listener.lines


def test_a_profile_without_a_block_to_compute_again_has_no_effect_and_a_notice() -> None:
    (notice,) = load_config({**BASE, "activation_checkpointing": {"profile": True}}).notices
    assert notice.startswith("activation_checkpointing.profile has no effect: no block is computed again; set ")


def test_stages_1_and_2_on_several_ranks_are_reported_once() -> None:
    with shared_pool(2) as ranks:
        for stage in (1, 2):
            first, second = ranks.run(lines_on_rank, {"stage": stage})
            assert second == [] and len(first) == 1, (first, second)
            assert first[0].startswith(f"offload: ZeRO stage {stage} on 2 ranks: weights, gradients and states are ")
            assert "gathered weights stay on the device until their update" in first[0]
        assert ranks.run(lines_on_rank, {"stage": 3}) == [[], []]
        first, _ = ranks.run(lines_on_rank, {"stage": 2}, "cpu")
        assert "offload: offload_param is honoured at ZeRO stage 2 too, as at stage 3" in first
        assert not any("one process" in line for line in first)
    assert not any("ZeRO stage" in line for line in lines_on_rank({"stage": 2})), "one rank has nothing to part"


def test_a_config_without_a_stage_tells_how_each_rank_keeps_whole_states() -> None:
    with shared_pool(2) as ranks:
        for zero in ({}, {"stage": 0, "mics_shard_size": -1}):
            divided, _ = ranks.run(lines_on_rank, zero)
            advice = '"stage": 0 without "mics_shard_size" keeps all of them on each rank, as in DeepSpeed'
            assert "are partitioned" in divided[0] and advice in divided[0]
        for zero in ({"stage": 0}, {"stage": 0, "mics_shard_size": "auto"}, {"stage": 1, "mics_shard_size": 1}):
            whole, _ = ranks.run(lines_on_rank, zero)
            assert not any("partitioned" in line for line in whole), whole


# --------------------------------------------------------------------------------------------------
# The effective config is logged once, at the start: a line of derived values, and the complete config.


ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def line_of(content: dict[str, Any], world_size: int = 1) -> str:
    config = load_config(content)
    return effective(config, resolve_batch(config, world_size), world_size)


@pytest.mark.parametrize(
    ("content", "ranks", "message"),
    [
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5},
            2,
            "config: 32 samples a step = 4 in a micro-batch * 4 micro-batches * 2 ranks",
        ),
        (
            {},
            1,
            "config: 1 sample a step = 1 in a micro-batch * 1 micro-batch * 1 rank; "
            "gradient_clipping 1 by default, which was 0 in older DeepSpeed",
        ),
    ],
)
def test_sizes_and_the_clip(content: dict[str, Any], ranks: int, message: str) -> None:
    assert line_of(content, ranks) == message


AUTO: dict[str, tuple[dict[str, Any], str]] = {
    "a size": ({"train_batch_size": "auto", "gradient_accumulation_steps": 3}, "train_batch_size 3"),
    "a mode, which is off then": ({"bf16": {"enabled": "auto"}}, "bf16.enabled false"),
    "a mode, by its older name": ({"bfloat16": {"enabled": "auto"}}, "bfloat16.enabled false"),
    "a block, by its older name": ({"bfloat16": "auto"}, "bfloat16 (its defaults)"),
    "a block": ({"fp16": "auto"}, "fp16 (its defaults)"),
    "a clip": ({"gradient_clipping": "auto"}, "gradient_clipping 1.0"),
    "an optimizer": ({"optimizer": "auto"}, "optimizer (its default)"),
    "its numbers": (
        {"optimizer": {"type": "Lion", "params": {"lr": 1, "betas": "auto"}}},
        "optimizer.params.betas [0.9, 0.999]",
    ),
    "its rate": ({"optimizer": {"type": "Lion", "params": {"lr": "auto"}}}, "optimizer.params.lr (that of optimizer=)"),
    "a schedule's": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}},
        "scheduler.params.warmup_num_steps 1000",  # of "auto" as a rate each group knows its own
    ),
    "a schedule's numbers": ({"scheduler": {"type": "WarmupLR", "params": "auto"}}, "scheduler.params (its defaults)"),
    "what there is none of": ({"offload": {"log": "auto"}}, "offload.log (its default)"),
    "what is decided here, by its older name": (
        {"zero_optimization": {"prefetch_bucket_size": "auto"}},
        "zero_optimization.prefetch_bucket_size (its default)",
    ),
    "what is a value": ({"offload": {"resume": "auto"}}, ""),
    "what has no effect": ({"zero_optimization": {"contiguous_gradients": "auto"}}, ""),
    "null": ({"fp16": None, "bf16": {"enabled": None}}, ""),
}


def test_values_that_replace_auto_are_reported() -> None:
    for case, (content, message) in AUTO.items():
        _, auto, became = line_of(content).partition('; "auto": ')
        assert became == message and bool(auto) == bool(message), case


def test_the_effective_config_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "offload": {"device": "cpu"}}
    with caplog.at_level(logging.DEBUG, logger="offload"):
        engine, *_ = offload.initialize(model=nn.Linear(4, 1), config=content)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).mean())
            engine.step()
    info = [each.getMessage() for each in caplog.records if each.getMessage().startswith("config: ")]
    complete = [each for each in caplog.records if each.getMessage().startswith("the complete config: ")]
    assert len(info) == 1 and info[0].startswith("config: 2 samples a step")
    assert [each.levelno for each in complete] == [logging.DEBUG]
    assert json.loads(complete[0].getMessage().partition(": ")[2]) == engine.config
    engine.destroy()
