"""Layers whose quantized weights are buffers, as those of GPTQ and AWQ: their buffers become frozen parameters.

The engine pages parameters. A buffer stays on the device for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

_CODES = "qweight"
"""Name of the buffer of codes, in every layer of GPTQ and AWQ."""


@contextlib.contextmanager
def with_adopted_buffers(model: nn.Module) -> Iterator[None]:
    """Makes frozen parameters of the buffers of quantized layers; they become buffers again if the body raises.

    Args:
        model: the model. Names, values and ties stay.
    """
    parameters: dict[int, nn.Parameter] = {}
    taken: list[tuple[nn.Module, str, torch.Tensor]] = []
    for module in model.modules():
        codes = module._buffers.get(_CODES)
        if codes is None or codes.is_floating_point():
            continue
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                taken.append((module, name, buffer))
                del module._buffers[name]
                made = parameters.setdefault(id(buffer), nn.Parameter(buffer, requires_grad=False))
                module.register_parameter(name, made)
    try:
        yield
    except BaseException:
        for module, name, buffer in taken:
            del module._parameters[name]
            module._buffers[name] = buffer
        raise
