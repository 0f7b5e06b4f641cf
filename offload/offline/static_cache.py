"""The static cache of keys and values of `offload generate`: how much memory it takes, before a token is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.errors import BudgetError, ConfigError
from offload.sizes import format_size, parse_size

_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value by the name of its dtype."""


_MOVING = 3
"""Layers of a cache in host memory that are on an accelerator at a time: one is used, one comes, one goes."""


def static_cache(config: Any, length: int, paged: bool = False) -> Any:
    """Returns an empty cache of transformers, whose memory is taken at the first token.

    Args:
        config: Config of the model.
        length: Most tokens of a prompt and its continuation.
        paged: True if transformers shall keep each layer's part in host memory between its uses on a GPU.

    Raises:
        ConfigError: The model keeps other values from token to token than keys and values of its heads.
    """
    from transformers import StaticCache

    text = config.get_text_config(decoder=True)
    try:
        cache = StaticCache(config, max_cache_len=length, offloading=paged, offload_only_non_sliding=False)
        plain = all(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
    # transformers raises these for kinds of layers that it has no static form of.
    except (AttributeError, KeyError, TypeError, ValueError):
        plain = False
    # Latent attention compresses keys and values, whose width is then not that of a head.
    if not plain or config.is_encoder_decoder or getattr(text, "kv_lora_rank", None):
        raise ConfigError(
            f"{config.model_type} keeps other values from token to token than the keys and values of its heads, for "
            "which there is no static cache: leave --static-cache out"
        )
    return cache


def is_paged(on_host: bool, device: torch.device) -> bool:
    """Returns whether the parts of a static cache move between host and device.

    Args:
        on_host: True if the cache shall be in host memory.
        device: Where the model computes. A CPU's memory is the host's.

    Raises:
        ConfigError: transformers moves caches to GPUs of CUDA alone.
    """
    if on_host and device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"--static-cache-on host is for GPUs of CUDA and for the CPU, and the model computes on {device.type}: "
            "leave it out"
        )
    return on_host and device.type == "cuda"


def device_nbytes(config: Any, length: int, nbytes: int, on_host: bool) -> int:
    """Returns the bytes of a static cache that are on the device at a time.

    Args:
        config: Config of the model.
        length: Most tokens of a prompt and its continuation.
        nbytes: Bytes of the whole cache, as `cache_nbytes` gives them.
        on_host: True if the cache is in host memory.
    """
    if not on_host:
        return nbytes
    tokens: list[int] = [layer.max_cache_len for layer in static_cache(config, length).layers]
    return min(nbytes, _MOVING * max(tokens) * nbytes // sum(tokens))


def cache_nbytes(config: Any, length: int, rows: int, itemsize: int) -> int:
    """Returns the bytes of the static cache of a batch.

    Args:
        config: Config of the model.
        length: Most tokens of a prompt and its continuation; layers with a sliding window keep no more than it.
        rows: Prompts of a batch.
        itemsize: Bytes of a value.

    Raises:
        ConfigError: See `static_cache`.
    """
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = sum(layer.max_cache_len for layer in static_cache(config, length).layers)
    return 2 * rows * int(heads) * int(width) * int(tokens) * itemsize


def value_nbytes(content: Mapping[str, Any], config: Any) -> int:
    """Returns the bytes of a key's value: those of the dtype in which the model computes.

    Args:
        content: Config of the engine.
        config: Config of the model, which says the dtype of its files.
    """
    for name in ("bf16", "bfloat16", "fp16"):
        if name in content:
            return 2 if content[name].get("enabled") else 4
    return _DTYPES.get(str(config.dtype).removeprefix("torch."), 4)


def beside_cache(content: Mapping[str, Any], nbytes: int) -> dict[str, Any]:
    """Returns the config of the engine, with a device budget, if there is one, for what the cache leaves of it.

    Args:
        content: Config of the engine.
        nbytes: Bytes of the cache on the device.

    Raises:
        BudgetError: The cache leaves nothing.
    """
    block = content.get("offload", {})
    given = block.get("device_memory", "auto")
    if given == "auto":
        return dict(content)
    left = parse_size(given) - nbytes
    if left <= 0:
        raise BudgetError(
            f"the static cache takes {format_size(nbytes)} there, and the device budget is {given}: raise "
            "--device-memory, lower --static-cache or --batch-size, or try --static-cache-on host"
        )
    return {**content, "offload": {**block, "device_memory": left}}
