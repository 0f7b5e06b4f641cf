"""Modules that need a weight in fp32 under bf16 or fp16, such as a router: named where they fail or at the start.

An engine computes with all weights in one dtype. `torch_autocast` in place of "bf16" keeps all of them in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import nn

from offload.errors import UsageError
from offload.layout.modes import dtype_name
from offload.sizes import count_of

_FP32 = re.compile(r"\bfloat\b|\bFloat\b|torch\.float32")
_HALF = re.compile(r"BFloat16|\bHalf\b|torch\.(?:bfloat16|float16)")
_AUTOCAST = '"torch_autocast": {"enabled": true, "dtype": "bfloat16"} in place of "bf16" or "fp16"'


def fp32_needed(error: RuntimeError, model: nn.Module, dtype: torch.dtype) -> UsageError | None:
    """Returns the error to raise in place of torch's about fp32 and a 16-bit dtype in one operation; None for others.

    Args:
        error: what a forward of the model has raised.
        model: the model.
        dtype: dtype of its weights under the engine.
    """
    text = str(error)
    if dtype is torch.float32 or not (_FP32.search(text) and _HALF.search(text)):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    # The innermost module whose forward was running.
    inner = [names[id(each)] for each in _of_frames(error.__traceback__) if id(each) in names]
    name = inner[-1] if inner else ""
    return UsageError(
        f"{name or 'the model'} computes in fp32 with a weight or an input in {dtype_name(dtype)}: {text}. The engine "
        f"computes with all weights in {dtype_name(dtype)}, also with those that were fp32 in the model: set "
        f"{_AUTOCAST}, which keeps all weights in fp32, or cast the module's input to the dtype of its weight"
    )


def _of_frames(traceback: TracebackType | None) -> Iterator[object]:
    """Yields the first argument of each function that was running, outermost first: `self` of a forward."""
    while traceback is not None:
        names = traceback.tb_frame.f_code.co_varnames
        if names:
            yield traceback.tb_frame.f_locals.get(names[0])
        traceback = traceback.tb_next


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns a line if transformers would load some of the model's weights in fp32, where others are in 16 bits.

    Args:
        model: the model.
        dtype: dtype of its weights under the engine.
    """
    if dtype is torch.float32:
        return ()
    found: list[str] = []
    for path, module in model.named_modules():
        parts = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        if parts and isinstance(parts, list | set | tuple):
            pattern = re.compile("|".join(rf"(?:^|\.){re.escape(part)}(?:$|\.)" for part in sorted(parts)))
            found += [
                f"{path}.{name}" if path else name for name, _ in module.named_parameters() if pattern.search(name)
            ]
    found = list(dict.fromkeys(found))
    if not found:
        return ()
    return (
        f"the model computes with {count_of(len(found), 'weight')} in {dtype_name(dtype)} that transformers would load "
        f"in fp32, the first is {found[0]}; their masters are fp32, and {_AUTOCAST} computes with them in fp32",
    )
