"""`--lora`: low-rank adapters by peft on a model with frozen weights."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

from torch import nn

from offload.errors import ConfigError
from offload.presets import require_transformers

_EXAMPLE = "--lora r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"


class Lora(NamedTuple):
    """Settings of the adapters."""

    r: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Last parts of names of layers, such as "q_proj", or ("all-linear",). If empty, peft chooses by model family."""


def parse_lora(text: str) -> Lora:
    """Returns the settings in the argument of `--lora`.

    Args:
        text: such as "r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj". Only `r` is required; `alpha` is 2 * r by
            default.

    Raises:
        ConfigError: a field is unknown, repeated, missing or out of range.
    """
    values: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (each.strip() for each in item.partition("="))
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
    """Returns the module `peft`.

    Raises:
        ConfigError: peft is not installed; the message contains the command to install it.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError("--lora needs peft, which is not installed; run: pip install 'offload[hf]'") from error
    return peft


def adapt(model: nn.Module, lora: Lora) -> nn.Module:
    """Returns the model with adapters. Only the adapters train.

    Raises:
        ConfigError: a target matches no layer, there are no targets and peft does not know the model's family, or peft
            is not installed.
    """
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
    """Raises `ConfigError` for adapters of a higher rank than any matrix of the model has."""
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
