"""A wrong value of a key, and batch sizes that do not fit, are errors that name the key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import Batch, load_config, resolve_batch
from offload.errors import ConfigError

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"train_batchsize": 1}, 'did you mean "train_batch_size"'),
    "a typo inside": ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, r'offload_param\.devise.*"device"'),
    "a typo of what has no effect": ({"zero_optimization": {"sub_group_sise": 1}}, '"sub_group_size"'),
    "a typo under an older name": ({"bfloat16": {"enable": True}}, r'bfloat16\.enable; did you mean "enabled"'),
    "a key that nobody knows": ({"offload": {"zzz": 1}}, r"unknown key offload\.zzz; remove it.*host_memory"),
    "a key that is a number": ({1: 2}, "unknown key 1"),
    "an older name beside the new one": ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "older name"),
    "an older switch beside its block": (
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
        "cpu_offload and offload_optimizer",
    ),
    "the clip in the wrong place": ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
    "true for a number": ({"train_batch_size": True}, "train_batch_size should be a number, got True"),
    "a learning rate of inf": ({"optimizer": {"params": {"lr": float("inf")}}}, r"optimizer\.params\.lr.*finite"),
    "a clip of null": ({"gradient_clipping": None}, "gradient_clipping.*0 switches clipping off"),
    "a durability that is none": ({"offload": {"durability": "always"}}, r'offload\.durability.*always.*"every": 10'),
    "no step between commits": (
        {"offload": {"durability": {"every": 0}}},
        r"offload\.durability.*every.*greater than 0",
    ),
    "a durability misspelt": (
        {"offload": {"durability": {"evry": 3}}},
        r'unknown key offload\.durability\.evry.*"every"',
    ),
    "a size without an end": ({"offload": {"host_memory": "1e400"}}, r"offload\.host_memory"),
    "a seed without an end": ({"offload": {"seed": 1e300}}, r"offload\.seed"),
    "a path that is a number": ({"zero_optimization": {"offload_param": {"nvme_path": 5}}}, "nvme_path.*list.*5"),
    "an empty path": ({"offload": {"nvme_path": [""]}}, "nvme_path"),
    "quantized gradients in bf16": (
        {"communication_data_type": "bf16", "zero_optimization": {"zero_quantized_gradients": True}},
        "zero_quantized_gradients.*communication_data_type in bf16; leave one of them out",
    ),
    "compression": ({"compression_training": {"pruning": {"shared": {"enabled": True}}}}, "compression_training"),
    "sparse attention": ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
    "amsgrad": ({"optimizer": {"params": {"amsgrad": True}}}, "amsgrad"),
    "a typo of ours": ({"offload": {"host_memroy": 1}}, "host_memory"),
    "another device": ({"zero_optimization": {"offload_param": {"device": "disk"}}}, r"offload_param\.device"),
    "another optimizer": (
        {"optimizer": {"type": "Adan"}},
        "'SGD', 'Muon' or 'SinkGD', or an optimizer of torch.*Adan.*pass optimizer=",
    ),
    "another's parameter": (
        {"optimizer": {"type": "lion", "params": {"lr": 1e-4, "eps": 1e-8}}},
        r"optimizer contains params\.eps, and Lion takes lr, betas, weight_decay",
    ),
    "nesterov alone": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}},
        "needs a momentum above 0",
    ),
    "a loss scale below zero": ({"fp16": {"enabled": True, "loss_scale": -1}}, r"fp16\.loss_scale.*greater"),
    "a window of no steps": ({"fp16": {"loss_scale_window": 0}}, r"fp16\.loss_scale_window.*greater than 0"),
    "a loss scale that begins below its bound": (
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 16}},
        r"fp16 contains min_loss_scale 16, and initial_scale_power 2, whose scale of 4 is below it: raise the power",
    ),
    "a beta of one": ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, r"betas\.1 should be less than 1, got 1\.0"),
    "a beta too few": ({"optimizer": {"params": {"betas": [0.9]}}}, "betas"),
    "a fraction": ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps"),
    "zero": ({"train_batch_size": 0}, "train_batch_size.*greater than 0"),
    "a size": ({"offload": {"host_memory": "many"}}, "host_memory.*16GiB"),
    "a run that leaves its folder": ({"offload": {"run": "../x"}}, r"offload\.run"),
    "nvme without a path": ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path"),
    "fp16 and bf16": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
    "amp": ({"amp": {"enabled": True}}, "amp"),
    "a clip below zero": ({"gradient_clipping": -1}, "gradient_clipping"),
    "a block that is a number": ({"optimizer": 3}, "optimizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_key_is_named(case: str) -> None:
    content, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        load_config(content)


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
    with pytest.raises(ConfigError, match=r"is 10, and 3 \* 3 \* 1 is 9"):
        resolve_batch(load_config(content), 1)
    with pytest.raises(ConfigError):
        resolve_batch(load_config({"train_batch_size": 2, "gradient_accumulation_steps": 4}), 1)
