"""Presets of models, built from configs with their published shapes and vocabularies; nothing is downloaded.

transformers is an extra, imported only when a model is built.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from offload.errors import ConfigError
from offload.notices import shell_command
from offload.records import parse
from offload.sizes import MIB

_MOST_OF_CONFIG, _MOST_LAYERS = 16 * MIB, 100_000
"""Most bytes of a config.json, and most layers and experts in it: a larger model would take days to build."""
_COUNTED = re.compile(r".*(layers|experts)|n_layer")
"""Names of numbers of layers and experts in configs of transformers."""
_LEAST = {"num_hidden_layers": 0, "n_layer": 0, "hidden_size": 1, "n_embd": 1}
_CODE = re.compile(r".*(attn|experts)_implementation")
"""Names of settings whose value may be a repository on the hub: transformers would run its code."""

LLAMA = "LlamaConfig"
"""Class of the config of a Llama."""
DECODERS = frozenset({LLAMA, "MistralConfig", "Qwen3Config", "Qwen3MoeConfig"})
"""Classes of configs whose presets a plan knows in closed form, and whose loss can be computed in chunks."""


class Preset(NamedTuple):
    """A transformers config: its class and the settings that differ from that class's defaults."""

    config: str
    parameters: str
    """Approximate number of parameters, for people."""
    settings: dict[str, Any]


def _llama(hidden: int, layers: int, heads: int, key_heads: int, inner: int, **more: Any) -> dict[str, Any]:
    """Returns the settings of a Llama model of the given shape; `more` overrides and extends them."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": inner,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        **more,
    }


# Llama 3 has a larger vocabulary than Llama 2, whose 32000 tokens are the default of `_llama`.
_LLAMA_3 = {"vocab_size": 128256, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001}
_LLAMA_3_1: dict[str, Any] = {
    **_LLAMA_3,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA_3_2 = {
    **_LLAMA_3_1,
    "tie_word_embeddings": True,
    "rope_parameters": {**_LLAMA_3_1["rope_parameters"], "factor": 32.0},
}


def _qwen3(hidden: int, layers: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    shape = _llama(hidden, layers, heads, 8, inner, vocab_size=151936, max_position_embeddings=40960)
    return {**shape, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_parameters": _rope(1e6), **more}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _gemma3(hidden: int, layers: int, heads: int, key_heads: int, head: int, inner: int) -> dict[str, Any]:
    """Returns the settings of the language model of a Gemma 3, without its encoder of images."""
    shape = _llama(hidden, layers, heads, key_heads, inner, vocab_size=262208, max_position_embeddings=131072)
    return {**shape, "head_dim": head, "tie_word_embeddings": True}


PRESETS = {
    "gpt2-tiny": Preset(
        "GPT2Config",
        "3.5M",
        {
            "n_layer": 4,
            "n_embd": 256,
            "n_head": 4,
            "vocab_size": 256,
            "n_positions": 1024,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "gpt2-small": Preset("GPT2Config", "124M", {}),
    "llama-1b": Preset(LLAMA, "1.2B", _llama(2048, 16, 32, 8, 8192, **_LLAMA_3)),
    "llama-3b": Preset(LLAMA, "3.2B", _llama(3072, 28, 24, 8, 8192, **_LLAMA_3)),
    "llama-7b": Preset(LLAMA, "6.7B", _llama(4096, 32, 32, 32, 11008)),
    "llama-8b": Preset(LLAMA, "8.0B", _llama(4096, 32, 32, 8, 14336, **_LLAMA_3_1)),
    "llama-13b": Preset(LLAMA, "13B", _llama(5120, 40, 40, 40, 13824)),
    "llama-70b": Preset(LLAMA, "69B", _llama(8192, 80, 64, 8, 28672)),
    "llama-3.1-8b": Preset(LLAMA, "8.0B", _llama(4096, 32, 32, 8, 14336, **_LLAMA_3_1)),
    "llama-3.2-1b": Preset(LLAMA, "1.2B", _llama(2048, 16, 32, 8, 8192, **_LLAMA_3_2)),
    "llama-3.2-3b": Preset(LLAMA, "3.2B", _llama(3072, 28, 24, 8, 8192, **_LLAMA_3_2)),
    "llama-3.3-70b": Preset(LLAMA, "71B", _llama(8192, 80, 64, 8, 28672, **_LLAMA_3_1)),
    "qwen3-8b": Preset("Qwen3Config", "8.2B", _qwen3(4096, 36, 32, 12288)),
    "qwen3-14b": Preset("Qwen3Config", "14.8B", _qwen3(5120, 40, 40, 17408)),
    "qwen3-32b": Preset("Qwen3Config", "32.8B", _qwen3(5120, 64, 64, 25600)),
    "qwen3-30b-a3b": Preset(
        "Qwen3MoeConfig",
        "30.5B",
        _qwen3(
            *(2048, 48, 32, 6144),
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    "qwen3-235b-a22b": Preset(
        "Qwen3MoeConfig",
        "235B",
        _qwen3(
            *(4096, 94, 64, 12288),
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1536,
            norm_topk_prob=True,
        ),
    ),
    "gemma-3-12b": Preset("Gemma3TextConfig", "11.8B", _gemma3(3840, 48, 16, 8, 256, 15360)),
    "gemma-3-27b": Preset("Gemma3TextConfig", "27.0B", _gemma3(5376, 62, 32, 16, 128, 21504)),
    "mistral-7b": Preset(
        "MistralConfig",
        "7.2B",
        {
            **_llama(4096, 32, 32, 8, 14336, vocab_size=32768, max_position_embeddings=32768),
            "sliding_window": None,
            "rope_parameters": _rope(1e6),
        },
    ),
    "mistral-small-24b": Preset(
        "MistralConfig",
        "23.6B",
        {
            **_llama(5120, 40, 32, 8, 32768, vocab_size=131072, max_position_embeddings=32768),
            "head_dim": 128,
            "sliding_window": None,
            "rope_parameters": _rope(1e8),
        },
    ),
    "gpt-oss-20b": Preset("GptOssConfig", "20.9B", {"num_hidden_layers": 24, "num_local_experts": 32}),
}


def require_transformers() -> Any:
    """Returns the module `transformers`. Raises `ConfigError` with the command to install it if it is missing."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError("transformers is not installed; run: pip install 'offload[hf]'") from error
    return transformers


def check_name(name: str) -> None:
    """Raises `ConfigError` if no preset is called `name`."""
    if name not in PRESETS and (os.sep in name or name.startswith((".", "~"))):
        there = "is a file" if os.path.isfile(name) else "does not exist"
        raise ConfigError(
            f"the model folder {os.path.abspath(name)} {there}; give a folder with a config.json, or a preset: "
            f"{', '.join(PRESETS)}"
        )
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"unknown model {name!r}: {hint}presets are {', '.join(PRESETS)}, or give a folder with a config.json"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a model folder's config.json, which may be anybody's."""
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_OF_CONFIG + 1)
        if len(data) > _MOST_OF_CONFIG:
            raise ValueError(f"it has more than {_MOST_OF_CONFIG // MIB} MiB")
        content = parse(data)
        if not isinstance(content, dict):
            raise ValueError("it is no object of JSON")
        if content.get("quantization_config") is not None and not isinstance(content["quantization_config"], dict):
            raise ValueError('its "quantization_config" is no object')
        _check_values(content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} ({error}), so {folder} is not a model folder") from error
    return content


def _check_values(content: Any) -> None:
    """Raises `ValueError` for values that would run code, or take days, at any depth of a config."""
    for key, value in content.items() if isinstance(content, dict) else ():
        inner = [*value.values()] if isinstance(value, dict) else [value]
        if _CODE.fullmatch(key) and (named := [item for item in inner if "/" in str(item)]):
            raise ValueError(
                f'its "{key}" is {named[0]!r:.99}, which transformers would fetch from the hub, and run: remove that '
                "line; a script that means it gives attn_implementation to load_pretrained"
            )
        if _COUNTED.fullmatch(key) and type(value) is int and value > _MOST_LAYERS:
            raise ValueError(f'its "{key}" is {value!s:.99}, expected at most {_MOST_LAYERS}')
        if (least := _LEAST.get(key)) is not None and type(value) is int and value < least:
            raise ValueError(f'its "{key}" is {value!s:.99}, expected at least {least}')
        for item in value if isinstance(value, list) else [value]:
            _check_values(item)


def check_folder(folder: Path) -> dict[str, Any]:
    """Checks that a folder contains a model that the installed transformers supports.

    Returns:
        The content of its config.json.
    """
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} contains adapters and no model; merge them with their model first: "
            f"{shell_command('merge', folder, f'{folder}-merged')}, then give {folder}-merged"
        )
    if not path.is_file() and (folder / "rank0").is_dir():
        raise ConfigError(
            f"{folder} contains a run or a checkpoint, and no model; write its model to a folder first: "
            f"{shell_command('export', folder)} FOLDER"
        )
    if not path.is_file():
        raise ConfigError(f"{folder} contains no config.json, so it is not a model folder")
    content = read_config(folder)
    kind = content.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError(
            f'{path} contains no "model_type", the name of the model\'s family; give a folder that save_pretrained of '
            f"transformers wrote"
        )
    # Imported after the checks that need no transformers, since the import takes seconds.
    transformers = require_transformers()
    # Only classes of transformers itself count: code that comes with a model is never run.
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f'the "model_type" of {folder} is {kind!r}, which transformers {transformers.__version__} does not know; '
            f"run: pip install -U transformers. Code in the folder itself is never run"
        )
    return content


def quantized_bits(config: Any) -> int | None:
    """Returns the bits of a quantized weight by a model's config; None for a model that is not quantized.

    A config of a quantized model without a number counts as 8 bits.
    """
    quantization = (
        config.get("quantization_config") if isinstance(config, dict) else vars(config).get("quantization_config")
    )
    if quantization is None:
        return None
    settings: dict[str, Any] = quantization if isinstance(quantization, dict) else quantization.to_dict()
    flags = {4: settings.get("load_in_4bit"), 8: settings.get("load_in_8bit")}
    bits = settings.get("bits") or next((bits for bits, on in flags.items() if on), None)
    return bits if isinstance(bits, int) else 8


def positions_of(config: Any) -> int | None:
    """Returns the most tokens of a sequence that a transformers config allows, or None if it sets no limit."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None  # XLNet uses -1 for no limit


def check_positions(config: Any, seq_len: int, option: str = "--seq-len") -> None:
    """Raises `ConfigError` if a model has fewer positions than a sequence has tokens."""
    check_length(positions_of(config), seq_len, option)


def check_length(longest: int | None, seq_len: int, option: str = "--seq-len") -> None:
    """Raises `ConfigError` if a sequence is longer than a model's positions. With `longest` None there is no limit."""
    if longest is not None and longest < seq_len:
        raise ConfigError(f"{option} {seq_len} is more than the {longest} positions of this model; lower {option}")


def error_message(error: Exception) -> str:
    """Returns the message of an error of transformers, without its list of all known models."""
    return str(error).partition("\nModel type should be")[0].strip()


def build(name: str, layers: int | None = None) -> nn.Module:
    """Builds the model of a preset, with weights as the library initializes them.

    Inside `offload.init` the weights take no memory.
    """
    check_name(name)
    transformers = require_transformers()
    preset = PRESETS[name]
    # The cache of keys and values serves generation; in training it would only take memory.
    config = getattr(transformers, preset.config)(**preset.settings, use_cache=False)
    # Config classes with another name for the number, such as GPT-2's `n_layer`, map this name to their own.
    if layers is not None:
        config.num_hidden_layers = layers
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    generation: Any = model.generation_config
    generation.use_cache = True  # else text is generated slowly from a model that was saved
    return model
