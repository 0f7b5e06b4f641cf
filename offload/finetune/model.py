"""The model of `offload train`: a preset or a folder, with tokenizer and weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, OffloadError
from offload.losses.choice import would_be_chunked
from offload.model_io.load import init, load_pretrained
from offload.planner.model_shape import config_of, model_of
from offload.presets import (
    LLAMA,
    PRESETS,
    build,
    check_folder,
    check_name,
    check_positions,
    error_message,
    quantized_bits,
    read_config,
    require_transformers,
)
from offload.sizes import count_of

APART = frozenset(
    "cohere gemma gemma2 gemma3_text gpt2 gpt_neox gptj granite llama mistral mixtral olmo olmo2 phi phi3 qwen2 qwen3 "
    "qwen3_moe smollm3 stablelm starcoder2".split()
)
"""Model families whose attention masks follow `position_ids`, so that documents of one row do not attend to each other.
A test covers each. Other families ignore positions or let documents attend to each other."""

_ONLY_OURS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Keyword arguments that prevent downloads, code from the folder, and the prompt that asks whether to run such code."""


def find_folder(name: str, adapters: bool = False) -> Path | None:
    """Returns the folder that `name` names, or None for a preset. A preset has precedence over a folder of its name.

    Args:
        name: the preset, or the folder's path.
        adapters: True if adapters train, and not the model.

    Raises:
        ConfigError: `name` is neither a folder nor a preset, the folder contains no model, or one in quantized weights,
            which do not train.
    """
    path = Path(name)
    if not path.is_dir():
        check_name(name)
        return None
    if name in PRESETS:
        return None
    content = check_folder(path)
    if not adapters and quantized_bits(content) is not None:
        raise ConfigError(
            f"the weights of {path} are quantized, and quantized weights do not train; train adapters on them, such as "
            "--lora r=16,targets=all-linear, or give the model before quantization"
        )
    return path


def read_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a model folder.

    Raises:
        ConfigError: the folder contains no readable tokenizer.
    """
    transformers = require_transformers()
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), **_ONLY_OURS)
    except Exception as error:  # tokenizers raises bare Exception
        # Without any file of one, transformers lists the packages by which it would convert others.
        reason = str(error).split("\n", 1)[0].strip().removesuffix(" from one of:")
        raise ConfigError(
            f"cannot read a tokenizer in {folder} ({reason}): put the files of one there, such as tokenizer.json"
        ) from error
    # Some classes build an empty tokenizer if the folder contains no file of one.
    if not found.tokenize("what a tokenizer makes of words"):
        raise ConfigError(f"{folder} contains no tokenizer: put the files of a tokenizer there, such as tokenizer.json")
    return found


def build_model(name: str, folder: Path | None, content: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """Returns the model, and a line on the source of its weights.

    `initialize` reads safetensors later, one layer at a time. Weights in other files are loaded into RAM at once.

    Args:
        name: preset, or path of the folder.
        folder: the model folder; None for a preset.
        content: the run's config.

    Raises:
        ConfigError: the model cannot be built.
        StoreError: a weight file cannot be read.
    """
    if folder is None:
        with init(content):
            return build(name), f"no weights are read: {name} is trained from scratch"
    transformers = require_transformers()
    auto = transformers.AutoModelForCausalLM
    files = sorted(folder.glob("*.safetensors"))
    try:
        if files:
            model: nn.Module = load_pretrained(auto, folder, content, trust_remote_code=False)
            return model, f"weights of {folder}, from {count_of(len(files), 'safetensors file')}"
        if any(folder.glob("*.bin")):
            model = auto.from_pretrained(str(folder), **_ONLY_OURS)
            return (
                model,
                f"weights of {folder}, from .bin files, which are read into RAM at once; safetensors are streamed",
            )
        shape = transformers.AutoConfig.from_pretrained(str(folder), **_ONLY_OURS)
        with init(content):
            fresh: nn.Module = auto.from_config(shape)
        return fresh, f"{folder} contains no weights: its model is trained from scratch"
    # Errors of this library name the cause already; all others get the folder's name below.
    except OffloadError:
        raise
    except Exception as error:  # safetensors and tokenizers raise classes of their own
        raise ConfigError(f"cannot build the model of {folder}: {error_message(error)}") from error


def check_model(model: nn.Module, seq_len: int, largest_id: int) -> None:
    """Raises `ConfigError` if sequences of `seq_len` tokens or token ids up to `largest_id` do not fit the model."""
    whole: Any = model.config
    config = whole.get_text_config()
    check_positions(config, seq_len)
    # On a GPU such a token would cause an asynchronous assertion failure, without a usable message.
    if largest_id >= config.vocab_size:
        raise ConfigError(
            f"the text contains token {largest_id}, the model's vocabulary ends before {config.vocab_size}"
        )


def make_ready(model: Any, gradient_checkpointing: bool) -> None:
    """Sets up a transformers model for training: language-model loss and checkpointing. The config is not changed.

    Raises:
        ConfigError: the model does not support gradient checkpointing.
    """
    if getattr(model, "loss_type", "") is None:
        # transformers falls back to this loss itself, with a warning.
        model.loss_type = "ForCausalLM"
    if gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable()
        except ValueError as error:
            raise ConfigError(f"--gradient-checkpointing: {error}") from error


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Returns the keyword arguments with which a forward keeps no key-value cache; training does not use one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def allows_chunks(name: str) -> bool:
    """Returns True if the loss of a preset's or a folder's model is computed in chunks by default. No weight is made.

    Raises:
        ConfigError: the name is unknown, or the model cannot be built.
    """
    # The answer for each of them, without transformers, whose import takes seconds.
    if name in PRESETS and PRESETS[name].config == LLAMA:
        return True
    config = config_of(name)
    with contextlib.suppress(ConfigError):  # some models cannot be cut; then all of their layers are built
        config = config_of(name, layers=1)
    try:
        # The choice reads the code of the model's forward, so one layer without values is enough.
        with torch.device("meta"):
            return would_be_chunked(model_of(config, torch.bfloat16), None)
    except Exception as error:  # a model's own code may raise any error
        raise ConfigError(f"cannot build {name} without its weights ({error_message(error)})") from error


def keeps_documents_apart(folder: Path | None) -> bool:
    """Returns True if the model masks documents of one row from each other, by positions; true for all presets."""
    return folder is None or read_config(folder).get("model_type") in APART


def decay_groups(parameters: Iterable[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Returns the trainable parameters in groups: weight decay applies to matrices, not to biases and norms.

    Args:
        parameters: tensors with `requires_grad` and `ndim`; frozen ones are left out.
        weight_decay: weight decay of matrices.
    """
    training = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in training if parameter.ndim > 1]
    others = [parameter for parameter in training if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
