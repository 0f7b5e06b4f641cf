"""Options and a config file become one config: what was typed wins, with a line; what was not never does."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from offload.config import load_config, resolve_batch
from offload.errors import ConfigError
from offload.train_options import Options, chooses_dtype, merge

FILE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
    },
    "offload": {"run": "mine", "seed": 7, "resume": "auto", "durability": "step"},
}


def test_defaults_without_a_file() -> None:
    content, lines = merge(None, Options())
    config = load_config(content)
    assert lines == ()
    assert (config.weight_tier, config.optimizer_tier) == ("nvme", "nvme") and chooses_dtype(content)
    assert config.drives == ("./swap",)
    assert resolve_batch(config, 1) == (8, 1, 8)
    assert config.optimizer is not None and config.optimizer.params.lr == 3e-4
    assert (config.offload.seed, config.offload.run, config.offload.resume) == (0, "default", "never")


def test_a_schedule_that_asks_for_the_end_gets_the_steps() -> None:
    for params in ({}, {"params": {"total_num_steps": "auto"}}, {"params": None}):
        content, lines = merge({**FILE, "scheduler": {"type": "WarmupDecayLR", **params}}, Options(steps=7))
        assert load_config(content).scheduler.params == {"total_num_steps": 7} and lines == ()
    for block in (
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}},
        {"type": "WarmupLR", "params": {}},
        {"type": "StepLR"},
        5,
    ):
        assert merge({**FILE, "scheduler": block}, Options(steps=7))[0]["scheduler"] == block


def test_nothing_typed_leaves_the_file_as_it_is() -> None:
    before = copy.deepcopy(FILE)
    content, lines = merge(FILE, Options())
    assert FILE == before, "the file's content was changed in place"
    assert (content, lines) == (FILE, ())
    assert resolve_batch(load_config(content), 1) == (4, 8, 32)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ({"lr": 5e-4}, "--lr 0.0005 overrules optimizer.params.lr 0.001"),
        ({"dtype": "bf16"}, "--dtype bf16 overrules bf16.enabled false"),
        ({"offload_param": "none"}, "--offload-param none overrules zero_optimization.offload_param.device cpu"),
        (
            {"nvme_path": ("/a", "/b")},
            "--nvme-path /a /b overrules zero_optimization.offload_optimizer.nvme_path /fast",
        ),
        ({"run": "other"}, "--run other overrules offload.run mine"),
        ({"seed": 0}, "--seed 0 overrules offload.seed 7"),
        ({"resume": "must"}, "--resume must overrules offload.resume auto"),
        ({"durability": {"every": 3}}, '--durability {"every": 3} overrules offload.durability step'),
    ],
)
def test_a_typed_option_wins_with_one_line(typed: dict[str, Any], line: str) -> None:
    assert merge(FILE, Options()._replace(**typed))[1] == (line,)


@pytest.mark.parametrize(
    "typed",
    [{"lr": 1e-3}, {"dtype": "fp32"}, {"offload_param": "cpu"}, {"nvme_path": ("/fast",)}, {"seed": 7}],
)
def test_the_same_value_needs_no_line(typed: dict[str, Any]) -> None:
    content, lines = merge(FILE, Options()._replace(**typed))
    assert lines == ()
    assert load_config(content).drives == ("/fast",)


def test_typed_values_arrive() -> None:
    typed = Options(offload_param="none", nvme_path=("/a", "/b"), dtype="bf16", host_memory="2GiB", device="cpu")
    config = load_config(merge(FILE, typed)[0])
    assert (config.weight_tier, config.drives, config.dtype) == ("none", ("/a", "/b"), "bf16")
    assert (config.offload.host_memory, config.offload.device) == (2 << 30, "cpu")


@pytest.mark.parametrize("block", ["fp16", "bfloat16"])
def test_dtype_stands_for_every_mode(block: str) -> None:
    content, lines = merge({block: {"enabled": True}}, Options(dtype="fp32"))
    assert lines == (f"--dtype fp32 overrules {block}.enabled true",)
    assert load_config(content).dtype == "fp32"
    assert load_config(merge({block: {"enabled": True}}, Options(dtype="bf16"))[0]).dtype == "bf16"
    content, lines = merge({block: {"enabled": True}}, Options(dtype="auto"))
    assert lines == (f"--dtype auto overrules {block}.enabled true",)
    assert chooses_dtype(content) and load_config(content).dtype == "fp32"


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_the_machine_chooses_the_dtype_where_that_is_asked_for(name: str) -> None:
    """Without a file, by the option, or by the file's "auto"; a file without a word is fp32, as in DeepSpeed."""
    assert chooses_dtype(merge({name: {"enabled": "auto"}}, Options())[0])
    assert chooses_dtype(merge({}, Options(dtype="auto"))[0])
    for file, typed in (({}, None), (FILE, None), ({name: {"enabled": "auto"}}, "bf16"), (None, "fp32")):
        assert not chooses_dtype(merge(file, Options(dtype=typed))[0])


@pytest.mark.parametrize(
    ("file", "typed", "batch"),
    [
        ({}, None, (8, 1, 8)),
        ({"gradient_accumulation_steps": 4}, None, (2, 4, 8)),
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, None, (8, 1, 8)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, None, (2, 3, 6)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 12, (4, 3, 12)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 16, (2, 8, 16)),
        ({"train_micro_batch_size_per_gpu": 4}, 16, (16, 1, 16)),
        ({"gradient_accumulation_steps": 2.0}, 6, (3, 2, 6)),
    ],
)
def test_batch_size_is_of_a_whole_step(file: dict[str, Any], typed: int | None, batch: tuple[int, ...]) -> None:
    assert resolve_batch(load_config(merge(file, Options(batch_size=typed))[0]), 1) == batch


def test_batch_size_says_what_it_overrules() -> None:
    assert merge(FILE, Options(batch_size=16))[1] == (
        "--batch-size 16 overrules train_batch_size 32",
        "--batch-size 16 overrules train_micro_batch_size_per_gpu 4",
    )
    with pytest.raises(ConfigError, match=r"--batch-size 9 is not a multiple of gradient_accumulation_steps 2"):
        merge({"gradient_accumulation_steps": 2}, Options(batch_size=9))
    with pytest.raises(ConfigError, match="the default 8 is not a multiple"):
        merge({"gradient_accumulation_steps": 3}, Options())


@pytest.mark.parametrize("lr", ["auto", None])
def test_a_learning_rate_is_always_there(lr: Any) -> None:
    content, lines = merge({"optimizer": {"type": "Adam", "params": {"lr": lr}}}, Options())
    assert content["optimizer"] == {"type": "Adam", "params": {"lr": 3e-4}} and lines == ()
    assert merge({"optimizer": None}, Options(lr=0.1))[0]["optimizer"] == {"type": "AdamW", "params": {"lr": 0.1}}


def test_the_default_path_counts_where_the_file_names_none() -> None:
    file = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    assert load_config(merge(file, Options())[0]).drives == ("./swap",)
    assert load_config(merge(FILE, Options())[0]).drives == ("/fast",)


@pytest.mark.parametrize("file", [{"optimizer": "AdamW"}, {"optimizer": {"params": [1]}}, {"offload": 3}])
def test_a_block_that_is_none_is_said(file: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a block of keys, got"):
        merge(file, Options(run="x"))


def test_a_stage_may_be_a_switch() -> None:
    content, _ = merge({"zero_optimization": True}, Options(offload_param="cpu"))
    assert load_config(content).zero_optimization.stage == 1
