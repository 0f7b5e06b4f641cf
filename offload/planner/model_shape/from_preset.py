"""The shape of a Llama preset in closed form: what a forward on fake tensors counts, without the model.

A forward needs transformers, whose import and models take longer than all else of a plan. A test holds that each number
here is the counted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.layout.flat_layout import Segment, UnitLayout, arrange
from offload.planner.model_shape.shape import Shape, Use
from offload.presets import LLAMA, PRESETS, check_length

_FP32 = 4
"""Bytes of an element of norms, logits and rotary embeddings inside of their operations."""
_IDS = 8
"""Bytes of a token's id."""
_ROTARY = {2: 54, 4: 42}
"""Bytes that rotary embeddings move for each token and feature of a head, by the bytes of a weight."""
_LOSS = {2: 18, 4: 12}
"""Bytes that the loss moves for each logit, by the bytes of a weight: bf16 logits are copied to fp32 first."""


def from_preset(name: str, sequence: int, itemsize: int) -> Shape | None:
    """Returns the shape of a preset in the default division into units; None where only a forward tells.

    Args:
        name: the name of a model. A forward tells the shape of one that is no preset, or no Llama.
        sequence: tokens of a sequence.
        itemsize: bytes of an element of weights and activations, 2 or 4.

    Raises:
        ConfigError: the model has fewer positions than the sequence has tokens.
    """
    if name not in PRESETS or PRESETS[name].config != LLAMA:
        return None
    settings = PRESETS[name].settings
    # The count leaves out the causal mask, and with it, at these lengths, other tensors that have the same shape.
    if sequence in (1, settings["hidden_size"] // settings["num_attention_heads"]):
        return None
    check_length(settings["max_position_embeddings"], sequence)
    uses = tuple(_uses(settings, sequence, itemsize))
    layouts = tuple(_layouts(settings))
    return Shape(
        name=name,
        layouts=layouts,
        uses=uses,
        temporary=max(max(use.largest, use.mlp_largest) for use in uses),
        sequence=sequence,
        positions=settings["max_position_embeddings"],
        itemsize=itemsize,
        matrices=frozenset(
            segment.name for layout in layouts for segment in layout.segments if segment.name.endswith("_proj.weight")
        ),
    )


def _layouts(settings: Mapping[str, Any]) -> Iterator[UnitLayout]:
    """Yields the layouts of the embedding, of each layer, of the norm, and of the head unless it is the embedding."""
    hidden, inner, vocabulary = (settings[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = hidden // settings["num_attention_heads"] * settings["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    yield _layout("model.embed_tokens", {"": (vocabulary, hidden)})
    for index in range(settings["num_hidden_layers"]):
        yield _layout(f"model.layers.{index}", {f".{module}": shape for module, shape in layer.items()})
    yield _layout("model.norm", {"": (hidden,)})
    if not _is_tied(settings):
        yield _layout("lm_head", {"": (vocabulary, hidden)})


def _layout(unit: str, shapes: Mapping[str, tuple[int, ...]]) -> UnitLayout:
    """Returns the layout of a unit whose modules have one weight each, by the ends of their names."""
    segments = [
        Segment(f"{unit}{module}.weight", shape, 0, shape[0] * (shape[1] if len(shape) > 1 else 1), True)
        for module, shape in shapes.items()
    ]
    return arrange(unit, segments, 1)


def _uses(settings: Mapping[str, Any], tokens: int, itemsize: int) -> Iterator[Use]:
    """Yields the uses of a forward of one sequence; `itemsize` is the bytes of a weight."""
    hidden, layers, vocabulary = (settings[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    features = hidden // settings["num_attention_heads"]
    boundary = itemsize * tokens * hidden
    yield Use(
        0,
        0.0,
        float(82 + 2 * features + tokens * (290 + itemsize * hidden + _ROTARY[itemsize] * features)),
        saved=_IDS * tokens,
        boundary=_IDS * tokens,
        lookup=True,
        largest=boundary,
    )
    layer = _layer(settings, tokens, itemsize)
    # The first layer saves the rotary embeddings of all.
    yield layer._replace(saved=layer.saved + 2 * itemsize * tokens * features)
    yield from (layer._replace(unit=index) for index in range(2, layers + 1))
    yield Use(
        layers + 1,
        0.0,
        float(tokens * (24 + (44 - 4 * itemsize) * hidden)),
        saved=tokens * (_FP32 + (_FP32 + itemsize) * hidden),
        boundary=boundary,
        largest=_FP32 * tokens * hidden,
    )
    yield Use(
        0 if _is_tied(settings) else layers + 2,
        2.0 * tokens * hidden * vocabulary,
        float(16 + tokens * (24 + _LOSS[itemsize] * vocabulary)),
        saved=12 + tokens * (_IDS + itemsize * hidden + _FP32 * vocabulary),
        boundary=boundary,
        largest=_FP32 * tokens * vocabulary,
    )


def _layer(settings: Mapping[str, Any], tokens: int, itemsize: int) -> Use:
    """Returns the use of the first layer, without the rotary embeddings that it saves for all."""
    hidden, inner, heads = (settings[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    features, groups = hidden // heads, settings["num_key_value_heads"]
    keys = features * groups
    attention = 4.0 * tokens * tokens * hidden
    mlp_flops = 6.0 * tokens * hidden * inner
    # Keys and values of a group of heads are copied for each head.
    copied = 0 if groups == heads else 4 * itemsize * hidden
    moved = 48 + (88 + 8 * itemsize) * hidden + itemsize * (10 * keys + 5 * inner + 4 * features) + copied
    return Use(
        1,
        4.0 * tokens * hidden * (hidden + keys) + mlp_flops + attention,
        float(4 * itemsize + tokens * moved),
        saved=tokens * (8 + 8 * (1 + itemsize) * hidden + 4 * itemsize * inner + 4 * heads),
        boundary=itemsize * tokens * hidden,
        largest=_FP32 * tokens * hidden,
        attention=attention,
        mlp_flops=mlp_flops,
        mlp_saved=itemsize * tokens * (hidden + 4 * inner),
        mlp_largest=itemsize * tokens * inner,
    )


def _is_tied(settings: Mapping[str, Any]) -> bool:
    """Returns True if the head is the embedding; `LlamaConfig` has a head of its own by default."""
    return bool(settings.get("tie_word_embeddings", False))
