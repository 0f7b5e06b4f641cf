"""The model that `offload train` is asked for: a preset or a folder, its tokenizer, its weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from offload.engine.model_io.load_pretrained import init, load_pretrained
from offload.errors import ConfigError, OffloadError
from offload.presets import PRESETS, build, check_folder, check_name, check_positions, require_transformers, said
from offload.sizes import count_of

APART = frozenset(
    "cohere gemma gemma2 gemma3_text gpt2 gpt_neox gptj granite llama mistral mixtral olmo olmo2 phi phi3 qwen2 qwen3 "
    "qwen3_moe smollm3 stablelm starcoder2".split()
)
"""Families whose masks follow positions; a test holds each. Others have none, or let documents see each other."""

_ONLY_OURS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is downloaded, and no code of a folder is run, nor is anybody asked whether it should be."""


def find_folder(name: str) -> Path | None:
    """The folder that `name` is, or None for a preset. Raises `ConfigError` where it is neither."""
    path = Path(name)
    if not path.is_dir():
        check_name(name)
        return None
    if name in PRESETS:
        return None
    check_folder(path)
    return path


def read_tokenizer(folder: Path) -> Any:
    """The folder's own tokenizer. Raises `ConfigError` where it has none that can be read."""
    transformers = require_transformers()
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), **_ONLY_OURS)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"cannot read the tokenizer of {folder}: {error}") from error
    if not found.tokenize("what a tokenizer makes of words"):  # of a folder without its files some classes make one
        raise ConfigError(f"{folder} has no tokenizer: put the files of one there, such as tokenizer.json")
    return found


def build_model(name: str, folder: Path | None, content: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """The model, and where its weights come from, in words. Raises `ConfigError` and `StoreError`.

    Safetensors are read by `initialize`, a layer at a time; weights in other files are in RAM as a whole.
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
            return model, f"weights of {folder}, from .bin files, which are in RAM as a whole; safetensors are streamed"
        shape = transformers.AutoConfig.from_pretrained(str(folder), **_ONLY_OURS)
        with init(content):
            fresh: nn.Module = auto.from_config(shape)
        return fresh, f"{folder} has no weights: its model is trained from scratch"
    except OffloadError:
        raise
    except Exception as error:  # safetensors and tokenizers raise classes of their own
        raise ConfigError(f"cannot build the model of {folder}: {said(error)}") from error


def check_model(model: nn.Module, seq_len: int, largest_id: int) -> None:
    """Raise `ConfigError` where sequences of so many tokens, or such tokens, do not fit the model."""
    whole: Any = model.config
    config = whole.get_text_config()
    check_positions(config, seq_len)
    if largest_id >= config.vocab_size:
        raise ConfigError(f"the text has token {largest_id}, the model's vocabulary only {config.vocab_size}")


def make_ready(model: Any, gradient_checkpointing: bool) -> None:
    """Set what training wants of a model of transformers: the loss of a language model. Its config stays as it is."""
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what the library would take, after a warning
    if gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable()
        except ValueError as error:
            raise ConfigError(f"--gradient-checkpointing: {error}") from error


def without_cache(model: nn.Module) -> dict[str, Any]:
    """What a forward is told so that it keeps no keys and values, for which training has no use."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def keeps_documents_apart(folder: Path | None) -> bool:
    """Whether documents in one row do not see each other where positions begin anew; all presets do so."""
    return folder is None or json.loads((folder / "config.json").read_text()).get("model_type") in APART
