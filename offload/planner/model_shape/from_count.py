"""A decoder of equal layers, from a count of parameters alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout.flat_layout import UnitLayout, lay_out
from offload.planner.model_shape.shape import Shape, Use

_VOCABULARY = 32000
_MOST_PARAMETERS = 10**15
_MOST_LAYERS = 100_000
"""Far more than any model has, and few enough for torch's sizes and for a simulation."""

_LAYER = {2: (46, 151), 4: (85, 214)}
"""The key is the bytes of a weight. The values are the bytes that a layer saves, and the bytes that it moves, per token
and per element of the hidden size, for Llama's layer, whose norms and rotary embeddings are always in fp32."""
_LOSS = {2: 18.0, 4: 12.0}
"""Bytes that a loss moves for each logit, by the bytes of a weight: bf16 logits are copied to fp32 first."""
_WIDE = (43, 16)
"""Width of a gated MLP, as a fraction of the hidden size: 11008 / 4096, as Llama's. It saves four tensors so wide."""
_MLP_SHARE = 8 / 12
"""Fraction of a layer's weights that its MLP contains."""
_FP32 = 4


def from_count(parameters: int, layers: int, sequence: int, itemsize: int = 2) -> Shape:
    """Returns the shape of a decoder of equal layers, with an untied embedding and head of 32000 tokens.

    Args:
        parameters: parameters of the model, embedding and head included.
        layers: layers between embedding and head.
        sequence: tokens of a sequence.
        itemsize: bytes per element of weights and activations; the loss is always in fp32.

    Raises:
        ConfigError: a number is less than 1 or too large, or the parameters are too few for the layers.
    """
    if parameters < 1 or layers < 1 or sequence < 1:
        raise ConfigError(
            f"expected parameters, layers and tokens of at least 1, got {parameters}, {layers}, {sequence}"
        )
    if parameters > _MOST_PARAMETERS or layers > _MOST_LAYERS:
        raise ConfigError(
            f"expected at most 1e15 parameters and {_MOST_LAYERS:,} layers, got {float(min(parameters, 1e300)):.3g} "
            f"and {float(min(layers, 1e300)):.3g}"
        )
    hidden = _hidden(parameters, layers)
    outer = _VOCABULARY * hidden
    inner = (parameters - 2 * outer) // layers
    if inner < 1:
        raise ConfigError(
            f"{parameters} parameters are too few for {layers} layers between an embedding and a head of {_VOCABULARY} "
            f"tokens; give a --model"
        )
    # The embedding takes the remainder of the division, so that the sizes sum to `parameters` exactly.
    sizes = [outer + parameters - 2 * outer - inner * layers, *[inner] * layers, outer]
    names = ["embedding", *(f"layers.{index}" for index in range(layers)), "head"]
    layouts = tuple(_layout(name, size) for name, size in zip(names, sizes, strict=True))
    matrices = frozenset(_weight(name) for name in names[1:-1])
    tokens = sequence * hidden
    # 2 operations per weight and token, and 4 * sequence * hidden per token for the two products of attention.
    flops = 2.0 * inner * sequence + 4.0 * sequence * tokens
    saved, traffic = _LAYER[itemsize]
    wide = itemsize * tokens * _WIDE[0] // _WIDE[1]
    layer = Use(
        0,
        flops,
        float(traffic * tokens),
        saved * tokens,
        itemsize * tokens,
        largest=_FP32 * tokens,  # the input of a norm
        attention=4.0 * sequence * tokens,
        mlp_flops=_MLP_SHARE * 2.0 * inner * sequence,
        mlp_saved=itemsize * tokens + 4 * wide,
        mlp_largest=wide,
    )
    logits = sequence * _VOCABULARY
    # The embedding reads no weights in its backward; the head keeps the logits in fp32, at 4 bytes each.
    uses = (
        Use(0, 0.0, 2.0 * itemsize * tokens, 0, 8 * sequence, lookup=True),
        *(layer._replace(unit=index) for index in range(1, layers + 1)),
        Use(
            layers + 1,
            2.0 * outer * sequence,
            _LOSS[itemsize] * logits,
            _FP32 * logits,
            itemsize * tokens,
            largest=_FP32 * logits,
        ),
    )
    return Shape(
        f"{parameters / 1e9:.3g}B in {layers} layers", layouts, uses, _FP32 * logits, sequence, None, itemsize, matrices
    )


def _layout(name: str, numel: int) -> UnitLayout:
    """Returns the layout of a unit of one parameter, which stands for all those of a layer."""
    return lay_out(name, [(_weight(name), nn.Parameter(torch.empty(numel, device="meta")))], 1)


def _weight(name: str) -> str:
    """Returns the name of the parameter of a unit."""
    return f"{name}.weight"


def _hidden(parameters: int, layers: int) -> int:
    """Returns the root of 12 * layers * hidden**2 + 2 * vocabulary * hidden = parameters, as a multiple of 64.

    A root below 64 is only rounded down to an integer.
    """
    # A decoder layer contains 12 * hidden**2 parameters: 4 for attention, 8 for a feed-forward of four times the width.
    a, b = 12 * layers, 2 * _VOCABULARY
    hidden = (math.sqrt(b * b + 4 * a * parameters) - b) / (2 * a)
    return max(64, round(hidden / 64) * 64) if hidden >= 64 else max(1, int(hidden))
