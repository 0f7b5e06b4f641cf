"""All that is wrong with a config is one error, and `offload check-config` says what becomes of each key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.config import documentation, load_config
from offload.errors import ConfigError

WRONG: dict[str, Any] = {
    "amp": {"enabled": True},
    "train_batch_size": "four",
    "fp16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 1.5]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_stps": 3}},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": {"device": "cpu", "speed": 1}},
    "flops_profiler": {"enabled": True},
}
MESSAGES = (
    '"amp" is apex\'s mixed precision',
    "train_batch_size should be a whole number, got 'four'",
    "optimizer.params.betas.1 should be less than 1, got 1.5",
    "unknown key scheduler.params.warmup_num_stps; did you mean",
    "unknown key zero_optimization.offload_param.speed; remove it",
)


def check(content: Any, folder: Path, *options: str) -> Any:
    file = folder / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return CliRunner().invoke(app, ["check-config", str(file), *options])


def test_every_wrong_key_is_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(WRONG)
    first, *others = str(caught.value).split("\n* ")
    assert first == "5 things are wrong with the config:" and len(others) == len(MESSAGES)
    for message in MESSAGES:
        assert sum(each.startswith(message) for each in others) == 1, message


def test_a_single_wrong_key_is_a_message_without_a_list() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key zero_optimization\.stge; did you mean"):
        load_config({"zero_optimization": {"stge": 3}})


def test_a_value_of_several_types_is_one_message() -> None:
    with pytest.raises(ConfigError, match=r"^offload\.durability\.every should be a whole") as caught:
        load_config({"offload": {"durability": {"every": "x"}}})
    assert "\n" not in str(caught.value)


def test_two_contradictions_are_one_error() -> None:
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"(?s)fp16 and bf16 are both enabled.*torch_autocast and bf16 are both"):
        load_config(both)


def test_a_contradiction_between_keys_of_ranks_hides_no_other() -> None:
    zero = {"stage": 3, "zero_quantized_gradients": True, "offload_param": {"device": "nvme"}}
    with pytest.raises(ConfigError, match=r"(?s)^2 things are wrong.*send gradients as int8 codes.*no \"nvme_path\""):
        load_config({"communication_data_type": "bf16", "zero_optimization": zero})


def test_the_command_lists_keys_by_what_becomes_of_them(tmp_path: Path) -> None:
    done = check(WRONG, tmp_path, "--json")
    assert done.exit_code == 2
    found = json.loads(done.stdout)
    assert [any(each.startswith(message) for each in found["errors"]) for message in MESSAGES] == [True] * 5
    assert found["honoured"] == [
        "fp16.enabled",
        "optimizer.type",
        "scheduler.type",
        "zero_optimization.offload_param.device",
        "zero_optimization.overlap_comm",
        "zero_optimization.stage",
    ]
    assert (found["auto"], found["ignored"]) == (["optimizer.params.lr"], ["flops_profiler"])
    text = check(WRONG, tmp_path).stdout
    assert ': 5 wrong or refused, 6 honoured, 1 left to "auto", 1 ignored\n' in text
    assert "\nhonoured:\n  fp16.enabled\n" in text and "\nignored: not supported, or of another tool:\n" in text


def test_a_config_without_a_wrong_key_ends_with_0(tmp_path: Path) -> None:
    right = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "contiguous_gradients": True}}
    done = check(right, tmp_path)
    assert done.exit_code == 0 and "ds.json: 2 honoured, 1 without effect\n" in done.stdout
    assert "zero_optimization.contiguous_gradients" in done.stdout.partition("without effect, since")[2]
    assert check({}, tmp_path).stdout.endswith("ds.json: no keys\n")


def test_a_file_that_is_no_json_is_one_line(tmp_path: Path) -> None:
    done = check("{", tmp_path)
    assert done.exit_code == 2 and "is not JSON" in done.stderr and not done.stdout


def test_a_batch_that_no_number_of_ranks_makes_is_found(tmp_path: Path) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    done = check({"train_batch_size": 9, **sizes}, tmp_path)
    assert done.exit_code == 2 and "train_batch_size is 9, no multiple of train_micro" in done.stdout
    assert check({"train_batch_size": 8, **sizes}, tmp_path).exit_code == 0
    assert check({"train_batch_size": 9, "train_micro_batch_size_per_gpu": "auto"}, tmp_path).exit_code == 0


OFF: dict[str, Any] = {
    "_comment": "of a colleague",
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
    "amp": {"enabled": False},
    "flops_profiler": {"enabled": False},
    "gradient_clipping": "auto",
    "steps_per_print": None,
    "checkpoint": {},
    "zero_optimization": {"stage": 3, "cpu_offload": False, "reduce_bucket_size": 5e8, "round_robin_gradients": True},
}


def test_each_key_of_a_file_is_in_one_list(tmp_path: Path) -> None:
    found = json.loads(check(OFF, tmp_path, "--json").stdout)
    listed = [name for kind in ("honoured", "auto", "without_effect", "ignored", "off") for name in found[kind]]
    keys = {
        f"{block}.{key}"
        if isinstance(content, dict) and block not in ("amp", "flops_profiler", "checkpoint")
        else block
        for block, content in OFF.items()
        for key in (content if isinstance(content, dict) and content else [""])
    }
    assert sorted(listed) == sorted(keys)


def test_a_key_that_asks_for_nothing_is_listed_with_the_reason(tmp_path: Path) -> None:
    text = check(OFF, tmp_path).stdout
    off = text.partition("\noff: these ask for nothing:\n")[2]
    assert off.splitlines() == [
        "  _comment: a note",
        "  amp: off; on, it would be refused",
        "  checkpoint: an empty block",
        "  flops_profiler: off; on, it would be ignored",
        '  fp16.hysteresis: its block is off, by "enabled"',
        '  fp16.loss_scale: its block is off, by "enabled"',
        "  steps_per_print: null, which is the default",
        "  zero_optimization.cpu_offload: off; on, it would be offload_optimizer on the CPU",
    ]
    assert "  zero_optimization.reduce_bucket_size: gradients are reduced unit by unit" in text


def test_a_block_whose_switch_a_trainer_fills_in_is_not_off(tmp_path: Path) -> None:
    found = json.loads(check({"fp16": {"enabled": "auto", "loss_scale": 0}}, tmp_path, "--json").stdout)
    assert (found["auto"], found["honoured"], found["off"]) == (["fp16.enabled"], ["fp16.loss_scale"], [])


TRAINER: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3},
}


def test_what_a_trainer_fills_in_is_not_wrong_and_has_no_default(tmp_path: Path) -> None:
    done = check(TRAINER, tmp_path)
    assert done.exit_code == 0 and 'ds.json: 3 honoured, 4 left to "auto"\n' in done.stdout
    reason = ": it has no default, so a start without a Trainer needs a number\n"
    for name in ("optimizer.params.lr", "scheduler.params.total_num_steps"):
        assert f"  {name}{reason}" in done.stdout
    assert done.stdout.count(reason) == 2
    without = {**TRAINER, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}}
    done = check(without, tmp_path)
    assert done.exit_code == 2 and "scheduler.params.total_num_steps is required" in done.stdout


def test_a_contradiction_is_found_beside_what_a_trainer_fills_in(tmp_path: Path) -> None:
    done = check({**TRAINER, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, tmp_path)
    assert done.exit_code == 2 and ": 1 wrong or refused, " in done.stdout and "both enabled" in done.stdout


def test_a_key_is_listed_under_the_name_that_the_file_gives_it(tmp_path: Path) -> None:
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}, "aio": {"thread_count": "auto"}}
    found = json.loads(check(old, tmp_path, "--json").stdout)
    assert found["honoured"] == ["zero_optimization.cpu_offload", "zero_optimization.stage"]
    assert found["auto"] == ["aio.thread_count"]


def test_no_reason_refers_to_that_of_another_key() -> None:
    reasons = dict(documentation.reasons())
    assert "gradient_predivide_factor" in reasons and not any("the same" in each for each in reasons.values())
