"""Names modules, such as routers, that need a weight in fp32 under bf16 or fp16: when they fail, or at the start.

An engine computes with all weights in one dtype, except the weights of "keep_in_fp32".
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from types import TracebackType

import torch
from torch import nn

from offload.errors import UsageError
from offload.layout.modes import dtype_name
from offload.layout.units import listed_in_fp32
from offload.notices import Remark
from offload.sizes import count_of

_FP32 = re.compile(r"\bfloat\b|\bFloat\b|torch\.float32")
_HALF = re.compile(r"BFloat16|\bHalf\b|torch\.(?:bfloat16|float16)")
_KEY = '"keep_in_fp32": {} in the block "offload"'


def fp32_needed(error: RuntimeError, model: nn.Module, dtype: torch.dtype) -> UsageError | None:
    """Returns an error to raise instead of `error`, if an operation got fp32 and a 16-bit dtype; None for other errors.

    `dtype` is the dtype of the model's weights under the engine.
    """
    text = str(error)
    if dtype is torch.float32 or not (_FP32.search(text) and _HALF.search(text)):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    # The error names the innermost module whose forward was running.
    inner = [names[id(module)] for module in _of_frames(error.__traceback__) if id(module) in names]
    name = inner[-1] if inner else ""
    parameters = list(model.get_submodule(name).parameters(recurse=False))
    if parameters and all(parameter.dtype is torch.float32 for parameter in parameters):
        return UsageError(
            f'{name or "the model"} has its weights in fp32, by "keep_in_fp32", and an input in {dtype_name(dtype)}: '
            f"{text}. Cast its input in its forward, as x.to(self.weight.dtype), or leave it out of the key"
        )
    return UsageError(
        f"{name or 'the model'} computes in fp32 with a weight or an input in {dtype_name(dtype)}: {text}. The engine "
        f"computes with weights in {dtype_name(dtype)}, also with those that were fp32 in the model: set "
        f"{_KEY.format(json.dumps([name or 'NAME']))}, which keeps those of this module in fp32; or "
        '"torch_autocast": {"enabled": true, "dtype": "bfloat16"} in place of "bf16" or "fp16", which keeps all in '
        "fp32; or cast the module's input to the dtype of its weight"
    )


def _of_frames(traceback: TracebackType | None) -> Iterator[object]:
    """Yields the first argument of each running function, outermost first. In a forward, this argument is `self`."""
    while traceback is not None:
        names = traceback.tb_frame.f_code.co_varnames
        if names:
            yield traceback.tb_frame.f_locals.get(names[0])
        traceback = traceback.tb_next


def precision_notices(model: nn.Module, dtype: torch.dtype, in_fp32: Collection[str], wanted: bool) -> tuple[str, ...]:
    """Returns notices about weights that stay in fp32, and about weights that only transformers would keep in fp32.

    `dtype` is the dtype of the model's weights under the engine, `in_fp32` names the parameters that stay in fp32, and
    `wanted` is True if the config names them, False if the model's class lists them.
    """
    if dtype is torch.float32:
        return ()
    lines: list[str] = []
    if in_fp32:
        why = "" if wanted else ", as the model's class says"
        lines.append(
            Remark(
                f"{count_of(len(in_fp32), 'weight stays', 'weights stay')} in fp32{why}, the first is {min(in_fp32)}"
            )
        )
    # transformers has two lists. It keeps weights of the one that is not strict in fp32 only if the rest is fp16.
    listed = listed_in_fp32(model, strict=dtype is torch.bfloat16) - frozenset(in_fp32)
    if listed and not wanted:
        names = [name for name, _ in model.named_parameters() if name in listed]
        lines.append(
            f"the model computes with {count_of(len(listed), 'weight')} in {dtype_name(dtype)} that transformers would "
            f"load in fp32, the first is {names[0]}; their masters are fp32, and {_KEY.format(json.dumps(names[:1]))} "
            "computes with them in fp32"
        )
    return tuple(lines)
