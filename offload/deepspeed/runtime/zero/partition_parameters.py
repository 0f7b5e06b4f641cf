"""`deepspeed.runtime.zero.partition_parameters`: `Init`, `GatheredParameters`, and what transformers replaces in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.deepspeed.accelerator import get_accelerator
from offload.deepspeed.parameters import ZeroParamStatus, ZeroParamType, is_marked
from offload.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

is_zero_param = is_marked

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """Returns `fn`, since `Init` leaves torch's constructors as they are; transformers replaces it by a wrapper.

    Args:
        fn: a constructor such as `torch.empty`.
    """
    return fn
