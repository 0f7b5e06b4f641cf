"""Checks of a model before its sequences are divided: every mixture of tokens must be an attention that is known."""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any

from torch import nn

from offload.config import Config
from offload.engine.sequence.group import SequenceParallel
from offload.errors import ConfigError
from offload.layout.pass_order import LAYER_MAJOR
from offload.provenance import change_of_call, described, foreign_hooks, forward_text, is_causal_lm_loss, is_of
from offload.sizes import count_of

_LAYERS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
"""Kinds of layers, by the names in a model's config, that mix tokens by attention alone."""
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.MultiheadAttention)
"""Modules that mix tokens in another way, by which a rank would need those of the others."""


def inside_adapters(model: nn.Module) -> Any:
    """Returns the model of transformers inside of a model of peft, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return model if base is None or not hasattr(model, "peft_config") else base()


def check_model(model: nn.Module, config: Config) -> None:
    """Raises `ConfigError` if sequences shall be divided, and those of `model` cannot be. Changes nothing.

    Args:
        model: the model, or one of peft around it.
        config: the whole config.
    """
    size = config.sequence_parallel_size
    if size == 1:
        return
    if config.offload.schedule == LAYER_MAJOR:
        raise ConfigError(
            '"schedule": "layer_major" runs several micro-batches at once, and sequence_parallel_size is '
            f"{size}, whose ranks exchange parts of one at a time: leave one of the two out"
        )
    inner = inside_adapters(model)
    name = type(inner).__name__
    why = _why_not_transformers(model, inner) or _why_not_config(inner.config, size) or _why_not_modules(inner)
    if why is not None:
        raise ConfigError(
            f"sequence_parallel_size is {size}, which divides the sequences of causal language models of transformers, "
            f"and {name} {why}; leave sequence_parallel_size out for this model, or set it to 1"
        )


def check_units(parallel: SequenceParallel | None, experts: bool) -> None:
    """Raises `ConfigError` if ranks that share sequences may use different units.

    Args:
        parallel: this rank's group; None if no sequence is divided, when all is allowed.
        experts: True if experts of the model are units.
    """
    if parallel is not None and experts:
        raise ConfigError(
            f"sequence_parallel_size is {parallel.size}, and experts are units of their own, of which ranks use those "
            "of their tokens, while others wait for them in attention: name the class of the module that has all "
            'experts in "units"'
        )


def _why_not_transformers(model: nn.Module, inner: Any) -> str | None:
    """Returns why a model has not the interface of transformers that is needed, as a clause; None if it has."""
    # Not imported for this: a model of transformers has imported it.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(inner, transformers.PreTrainedModel):
        return "is no model of transformers"
    if model is not inner and any(each.is_prompt_learning for each in model.peft_config.values()):  # type: ignore[operator]
        return "has adapters that put tokens before each sequence"
    if not inner._supports_attention_backend:
        return "does not look its attention up in transformers' table of attention functions"
    from transformers.masking_utils import sdpa_mask

    # Older ones give masks the positions of one part, from which the whole cannot be told.
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        return "is one of a transformers that is too old: 5.23 was tried"
    for each in (inner, model):
        if (change := change_of_call(each, f"its {type(each).__name__}")) is not None:
            return f"does not run as its class says: {change}, which would see a part of the sequence"
    if not is_causal_lm_loss(inner.loss_function) or not _gives_keywords_to_loss(inner):
        return "does not end in transformers' loss of a causal language model"
    # Flex attention has masks of blocks, and kernels of the hub have arguments of their own.
    own = inner.config._attn_implementation
    if own not in ("sdpa", "eager") and not str(own).startswith("flash_attention"):
        return f"has attn_implementation={own!r}, where sdpa, eager and flash attention are known"
    if own == "eager":
        functions = [each for module in inner.modules() if (each := _eager(module)) is not None]
        if not functions:
            return "has no function eager_attention_forward beside its layers"
    else:
        functions = [transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[own]]
    other = next((each for each in functions if not is_of(each, "transformers")), None)
    return None if other is None else f"has the attention {described(other)}, which is not transformers' own"


def _eager(module: nn.Module) -> Any:
    """Returns the function beside a layer's class that transformers calls for "eager"; None without it."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _why_not_config(config: Any, size: int) -> str | None:
    """Returns what in a model's config speaks against it, as a clause; None if nothing does."""
    # Read from the config, and not from a run, which would need a batch and the weights.
    heads = getattr(config, "num_attention_heads", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    reasons = (
        (bool(getattr(config, "sub_configs", None)), "consists of several models, such as one for images"),
        (bool(config.is_encoder_decoder), "has an encoder"),
        (not getattr(config, "is_causal", True), "is not causal"),
        (not isinstance(heads, int), "does not say its num_attention_heads"),
        (bool(kinds), f"has layers of the kind {', '.join(kinds)}, where {', '.join(sorted(_LAYERS))} are known"),
        (getattr(config, "output_router_logits", False), "adds a loss of its router, which is no mean over tokens"),
        (getattr(config, "output_attentions", False), "returns attention weights (output_attentions)"),
        (getattr(config, "reorder_and_upcast_attn", False), "computes attention by itself (reorder_and_upcast_attn)"),
    )
    found = next((why for holds, why in reasons if holds), None)
    if found is None and heads % size:  # type: ignore[operator]
        return f"has {count_of(heads, 'head')}, which {size} ranks cannot divide evenly"  # type: ignore[arg-type]
    return found


def _why_not_modules(inner: nn.Module) -> str | None:
    """Returns which module may mix tokens without attention, or has a part for each head, as a clause."""
    # A kind of layer that is in no list here is found in the first forward, by the number of calls of the attention.
    for path, module in inner.named_modules():
        if isinstance(module, _MIXERS):
            return f"has the {type(module).__name__} {path}, which mixes tokens"
        # A hook of the user's may mix tokens, or look for the whole sequence.
        if "forward" in vars(module):
            return f"has a forward of its own on {path}, {described(vars(module)['forward'])}"
        if (hook := next(foreign_hooks(module, "transformers", "peft"), None)) is not None:
            return f"has the {hook[0]} {described(hook[1])} on {path}, which would see a part of each sequence"
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            return f"has a parameter for each head in {path}"
    return None


def _gives_keywords_to_loss(model: Any) -> bool:
    """Returns True if the model's forward hands its keywords on to `self.loss_function`, decided by its text.

    Those are the labels of this rank's part, which the last token of the part does not have, and the number of tokens
    of the whole sequence. A run would need a batch and the weights.
    """
    text = forward_text(model, "transformers")
    calls = [node for node in ast.walk(text) if isinstance(node, ast.Call)] if text is not None else []
    losses = [call for call in calls if ast.unparse(call.func) == "self.loss_function"]
    return len(losses) == 1 and any(keyword.arg is None for keyword in losses[0].keywords)
