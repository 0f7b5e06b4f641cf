"""A DeepSpeed JSON file is honoured, or its key is named in a notice or an error; nothing is dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import Batch, document, load_config, resolve_batch
from offload.errors import ConfigError

ZERO3 = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": "/slow", "buffer_size": 1e8, "max_in_cpu": 1e9},
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto",
        "overlap_comm": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def test_a_usual_file() -> None:
    config = load_config(ZERO3)
    assert (config.weight_tier, config.optimizer_tier, config.dtype) == ("nvme", "nvme", "bf16")
    assert config.drives == ("/fast", "/slow"), "the optimizer's first"
    assert config.gradient_clipping == 0.5
    params = config.optimizer.params
    assert (params.lr, params.betas, params.eps, params.weight_decay) == (1e-5, (0.8, 0.99), 1e-7, 0.0)
    notices = "\n".join(config.notices)
    for key in ("sub_group_size", "buffer_count", "pin_memory", "overlap_comm", "aio", "steps_per_print"):
        assert key in notices, key
    assert "wall_clock_breakdown" not in notices, "what is off needs no word"
    assert len(config.notices) == 2


def test_defaults() -> None:
    config = load_config({})
    assert (config.weight_tier, config.optimizer_tier, config.dtype, config.drives) == ("none", "none", "fp32", ())
    assert config.gradient_clipping == 1.0 and config.optimizer is None and config.notices == ()
    assert config.offload.resume == "never" and config.offload.durability == "auto"


def test_auto_means_the_default_but_in_our_own_block() -> None:
    config = load_config({"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "offload": {"resume": "auto"}})
    assert not config.bf16.enabled and config.train_batch_size is None and config.offload.resume == "auto"


def test_adam_is_adamw_unless_told() -> None:
    assert load_config({"optimizer": {"type": "adam"}}).optimizer.decoupled
    plain = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert not load_config({"optimizer": plain}).optimizer.decoupled


def test_comments_and_lists_of_paths(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
        // weights and states
        "zero_optimization": {"stage": 3, /* both */ "offload_param": {"device": "nvme"}}, # end
        "offload": {"nvme_path": ["/a//b", "~/c"], "run": "x"}
        }"""
    )
    assert load_config(path).drives == ("/a//b", str(Path.home() / "c"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"train_batchsize": 1}, 'did you mean "train_batch_size"'),
    "a typo inside": ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, r"offload_param\.devise.*'device'"),
    "a typo of ours": ({"offload": {"host_memroy": 1}}, "host_memory"),
    "another device": ({"zero_optimization": {"offload_param": {"device": "disk"}}}, r"offload_param\.device"),
    "another optimizer": ({"optimizer": {"type": "Lion"}}, "'Adam' or 'AdamW'.*Lion"),
    "a beta of one": ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, "below 1"),
    "a fraction": ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps"),
    "zero": ({"train_batch_size": 0}, "train_batch_size.*greater than 0"),
    "a size": ({"offload": {"host_memory": "many"}}, "host_memory.*16GiB"),
    "a run that leaves its folder": ({"offload": {"run": "../x"}}, r"offload\.run"),
    "nvme without a path": ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path"),
    "fp16": ({"fp16": {"enabled": True}}, "bf16"),
    "a scheduler": ({"scheduler": {"type": "WarmupLR"}}, "lr_scheduler="),
    "amp": ({"amp": {"enabled": True}}, "amp"),
    "a clip below zero": ({"gradient_clipping": -1}, "gradient_clipping"),
    "a block that is a number": ({"optimizer": 3}, "optimizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_key_is_named(case: str) -> None:
    content, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        load_config(content)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' appears twice"),
        ('{\n "a": }', "line 2"),
        ("[]", "JSON object"),
        ("\x00", "not JSON"),
    ],
)
def test_a_bad_file(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "bad.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        load_config(tmp_path / "none.json")


def test_unknown_top_level_keys_are_named_and_ignored() -> None:
    assert "my_own_note" in load_config({"my_own_note": 1}).notices[0]


def test_an_unused_path_is_said() -> None:
    content = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/x"}}}
    assert "nvme_path is ignored" in load_config(content).notices[0]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.sampled_from(["total", "micro", "accumulation"]))
def test_any_two_batch_sizes_give_the_third(micro: int, accumulation: int, world_size: int, left_out: str) -> None:
    batch = Batch(micro, accumulation, micro * accumulation * world_size)
    keys = {
        "total": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    content = {keys[name]: value for name, value in batch._asdict().items() if name != left_out}
    assert resolve_batch(load_config(content), world_size) == batch


def test_batch_sizes_that_do_not_fit() -> None:
    content = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 3}
    with pytest.raises(ConfigError, match=r"10.*3.*3.*9"):
        resolve_batch(load_config(content), 1)
    with pytest.raises(ConfigError):
        resolve_batch(load_config({"train_batch_size": 2, "gradient_accumulation_steps": 4}), 1)


def test_the_documentation_is_up_to_date() -> None:
    written = Path(__file__).parents[1] / "docs" / "configuration.md"
    assert written.read_text() == document(), "run `make format`"


def test_every_key_is_documented() -> None:
    text = document()
    for key in json.loads(json.dumps(ZERO3)):
        assert f"`{key}`" in text, key
