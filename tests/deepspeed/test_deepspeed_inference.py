"""`deepspeed.init_inference` computes what the model does; what it cannot do is refused before the model changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import offload.deepspeed as deepspeed
from offload.errors import UsageError


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "bf16", None], ids=str)
def test_outputs_are_those_of_the_model_in_that_dtype(dtype: Any) -> None:
    model = _model()
    plain = copy.deepcopy(model).to(torch.float32 if dtype in (None, torch.float32) else torch.bfloat16)
    batch = torch.randn(3, 8, dtype=next(plain.parameters()).dtype)
    keys = {} if dtype is None else {"dtype": dtype}
    with deepspeed.init_inference(model, {"zero": {"stage": 3}}, **keys, mp_size=1) as engine:
        assert isinstance(engine, deepspeed.InferenceEngine)
        assert torch.equal(engine(batch), plain(batch))


def test_a_key_about_deepspeeds_layers_is_named_as_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    with deepspeed.init_inference(_model(), {"replace_with_kernel_inject": True, "max_out_tokens": 64}):
        assert "without effect: replace_with_kernel_inject, max_out_tokens" in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor_parallel": {"tp_size": 2}}, "tensor_parallel is 2"),
        ({"mp_size": 4}, "mp_size is 4"),
        ({"dtype": torch.int8}, "got torch.int8"),
        ({"enable_cuda_graph": True}, "CUDA graphs"),
        ({"dtyp": "fp16"}, "has no key 'dtyp'"),
        ({"checkpoint": "files.json"}, "the folder of the model"),
        ({"config": {"dtype": "fp16"}, "dtype": "bf16"}, "'fp16' in config and 'bf16' as a keyword"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_an_error_and_the_model_is_as_it_was(keys: dict[str, Any], message: str) -> None:
    model = _model()
    with pytest.raises(UsageError, match=message):
        deepspeed.init_inference(model, **keys)
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in model.parameters())
