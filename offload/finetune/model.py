"""The model of `offload train`: a preset or a folder, with tokenizer and weights, and adapters by `--lora`."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError, OffloadError
from offload.losses.causal_model import would_be_chunked
from offload.model_io.folder import INDEX
from offload.model_io.load import init, load_pretrained
from offload.planner.model_shape import config_of, model_of
from offload.presets import (
    DECODERS,
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

    With `adapters` only the adapters train.
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
    """Returns the tokenizer of a model folder."""
    transformers = require_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **_ONLY_OURS)
    except Exception as error:  # tokenizers raises bare Exception
        # If the folder has no tokenizer file, transformers lists packages that could convert one.
        reason = str(error).split("\n", 1)[0].strip().removesuffix(" from one of:")
        raise ConfigError(
            f"cannot read a tokenizer in {folder} ({reason}): put the files of one there, such as tokenizer.json"
        ) from error
    # Some classes build an empty tokenizer if the folder contains no tokenizer file.
    if not tokenizer.tokenize("what a tokenizer makes of words"):
        raise ConfigError(f"{folder} contains no tokenizer: put the files of a tokenizer there, such as tokenizer.json")
    return tokenizer


def build_model(name: str, folder: Path | None, content: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """Returns the model, and a line on the source of its weights. `folder` is None for a preset.

    `initialize` reads safetensors later, one layer at a time. Weights in other files are loaded into RAM at once.
    """
    if folder is None:
        with init(content):
            return build(name), f"no weights are read: {name} is trained from scratch"
    transformers = require_transformers()
    auto = transformers.AutoModelForCausalLM
    files = sorted(folder.glob("*.safetensors"))
    try:
        # With an index alone, `load_pretrained` names the first file that is missing.
        if files or (folder / INDEX).is_file():
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
    """Sets up a transformers model for training: language-model loss and checkpointing. The config is not changed."""
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
    """Returns True if the loss of a preset's or a folder's model is in chunks by default. No weight is made."""
    # All these presets allow chunks. Without this shortcut, the import of transformers would take seconds.
    if name in PRESETS and PRESETS[name].config in DECODERS:
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
    """Returns the trainable parameters in groups: weight decay applies to matrices, not to biases and norms."""
    training = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in training if parameter.ndim > 1]
    others = [parameter for parameter in training if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


_EXAMPLE = "--lora r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"


class Lora(NamedTuple):
    """Settings of the adapters."""

    r: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Last parts of names of layers, such as "q_proj", or ("all-linear",). If empty, peft chooses by model family."""


def parse_lora(text: str) -> Lora:
    """Returns the settings in the argument of `--lora`; only `r` is required, and `alpha` is 2 * r by default."""
    values: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in Lora._fields or not equals or not value or name in values:
            fields = ", ".join(Lora._fields)
            raise ConfigError(f"--lora takes {fields}, each once and with its value, got {item!r}; example: {_EXAMPLE}")
        values[name] = value
    if "r" not in values:
        raise ConfigError(f"--lora needs a rank r; example: {_EXAMPLE}")
    r = _number(values, "r", 0)
    if r < 1 or r != int(r):
        raise ConfigError(f"--lora r must be a whole number of at least 1, got {values['r']}")
    alpha, dropout = _number(values, "alpha", 2 * r), _number(values, "dropout", 0.0)
    if alpha <= 0:
        raise ConfigError(f"--lora alpha must be above 0, got {values['alpha']}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"--lora dropout must be at least 0 and below 1, got {values['dropout']}")
    return Lora(int(r), alpha, dropout, _targets(values["targets"]) if "targets" in values else ())


def _targets(text: str) -> tuple[str, ...]:
    """Returns the names in `text`. Raises `ConfigError` for an empty name, and for "all-linear" beside another name."""
    names = tuple(name.strip() for name in text.split("+"))
    if not all(names):
        raise ConfigError(f"--lora targets are names joined by +, got {text!r}; example: {_EXAMPLE}")
    if "all-linear" in names and len(names) > 1:
        raise ConfigError(f"--lora targets: all-linear is every linear layer and stands alone, got {text!r}")
    return names


def _number(values: dict[str, str], name: str, default: float) -> float:
    """Returns the value of a field, or `default`. Raises `ConfigError` if the value is not a finite number."""
    try:
        value = float(values.get(name, default))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"--lora {name} must be a number, got {values[name]}")
    return value


def require_peft() -> Any:
    """Returns the module `peft`."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError("--lora needs peft, which is not installed; run: pip install 'offload[hf]'") from error
    return peft


def adapt(model: nn.Module, lora: Lora) -> nn.Module:
    """Returns the model with adapters. Only the adapters train."""
    peft = require_peft()
    _check_targets(model, lora.targets)
    _check_rank(model, lora.r)
    # peft takes "all-linear" as a string, names as a list, and None for its own choice by model family.
    targets = lora.targets[0] if lora.targets == ("all-linear",) else list(lora.targets) or None
    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        # peft reads a deprecated attribute of transformers.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # peft corrects `fan_in_fan_out` itself, and warns.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set", UserWarning)
        try:
            adapted: nn.Module = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(
                f"peft makes no adapters for this model: {error}; give targets; example: {_EXAMPLE}"
            ) from error
    return adapted


def _check_rank(model: Any, r: int) -> None:
    ranks = [min(weight.shape) for weight in model.parameters() if weight.ndim == 2]
    highest = max(ranks, default=r)
    if r > highest:
        raise ConfigError(
            f"--lora r={r} is more than {highest}, the highest rank of a matrix of this {type(model).__name__}; lower "
            "r, or train the model as a whole"
        )


def _check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Raises `ConfigError` for a target that is not the last part of any module's name."""
    # The layers of GPT-2 are of transformers' own class, which peft adapts too.
    kinds = (nn.Linear, require_transformers().pytorch_utils.Conv1D)
    names = [name for name, _ in model.named_modules()]
    for target in targets if targets != ("all-linear",) else ():
        # peft matches names by the same rule, but its error does not list the choices.
        if not any(name == target or name.endswith(f".{target}") for name in names):
            linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}
            raise ConfigError(
                f"--lora targets: {type(model).__name__} has no {target}; its linear layers are "
                f"{', '.join(sorted(linear))}, or give all-linear"
            )


_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level tokenizers write as the character of their number. All others follow from character 256 on."""


def byte_tokenizer() -> Any:
    """Returns a tokenizer of transformers with a token for each byte of UTF-8, whose id is the byte.

    The tokenizer has no merges and no special tokens, so any text is encoded as its bytes and decoded without loss. The
    newline that ends a document in training is no special token: a text may contain newlines anywhere.
    """
    transformers = require_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    others = [byte for byte in range(256) if byte not in _SHOWN]
    characters = {byte: chr(byte) for byte in _SHOWN} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def learned_bytes(client_state: Mapping[str, Any]) -> bool:
    """Returns True if the client state of a run is that of `offload train` with a preset, whose tokens are bytes."""
    job = client_state.get("job")
    return isinstance(job, Mapping) and job.get("weights") == ""  # a checksum of the weights for every folder
