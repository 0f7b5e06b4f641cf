"""Types of config values, with the conversions from the spellings that files use."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from offload.sizes import MIB, parse_size

Tier = Literal["none", "cpu", "nvme"]
TORCH_OPTIMIZERS = "torch.optim."
"""Start of the types of optimizers that are classes of torch."""
OF_TORCH_ALONE = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
)
"""Classes of `torch.optim` that DeepSpeed's JSON names without the module, and that are no type of ours."""


def _number(value: Any) -> Any:
    """Converts `1e8` and `200000000.0` to integers. Raises `ValueError` for a boolean, which is an int in Python."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def unpacked(value: Any) -> Any:
    """Returns a value of a script's dict with the numbers of tensors, arrays and numpy's scalars in their place.

    Those without dimensions are numbers. No library is imported here to recognize them.
    """
    if isinstance(value, Mapping):
        return {key: unpacked(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(unpacked, value))
    return value.item() if getattr(value, "ndim", None) == 0 else value


def spelled_number(value: Any) -> Any:
    """Returns the number that a string spells, such as "1e-3"; any other value unchanged.

    Files that a program has made from YAML contain such strings, since YAML takes `1e-3` for one.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _strings(value: Any) -> Any:
    """Wraps a single string or path in a tuple."""
    return (value,) if isinstance(value, str | os.PathLike) else value


def expanded(value: Any) -> Any:
    """Expands `~` in a path."""
    return os.path.expanduser(value) if isinstance(value, str | os.PathLike) else value


def _rates(value: Any) -> Any:
    """Returns a number for all groups of parameters, or a tuple with one for each. Raises `ValueError` otherwise."""
    numbers = [spelled_number(each) for each in (value if isinstance(value, list | tuple) else (value,))]
    if not numbers or not all(_is_rate(number) for number in numbers):
        raise ValueError("should be a number of at least 0, or a list of such, one for each group of parameters")
    rates = tuple(float(number) for number in numbers)
    return rates if isinstance(value, list | tuple) else rates[0]


def _is_rate(value: Any) -> bool:
    """Returns True for a finite number of at least 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max


def _or_auto(value: Any) -> Any:
    """Returns "auto" unchanged, and anything else as `_rates` does."""
    return value if isinstance(value, str) and value == "auto" else _rates(value)


def _momentum(value: Any) -> Any:
    """Returns rates that are below 1. Raises `ValueError` otherwise."""
    rates = _rates(value)
    if max(rates if isinstance(rates, tuple) else (rates,)) >= 1:
        raise ValueError("should be below 1")
    return rates


def _memory(value: Any) -> Any:
    """Parses a size. Raises `ValueError` for bare digits below a mebibyte, where a unit was forgotten."""
    nbytes = parse_size(value)
    if isinstance(value, str) and value.strip().isdecimal() and nbytes < MIB:
        raise ValueError(f"should be a size such as 16GiB; {value} alone are bytes: give a unit")
    return nbytes


def _device(value: Any) -> Any:
    """Returns the type of a device, as torch names it. Raises `ValueError` for one with an index, as "cuda:1"."""
    if isinstance(value, str) and not value.isidentifier():
        raise ValueError("should be 'auto', 'cpu', 'cuda' or the type of another accelerator, as 'xpu'")
    return value


def _tiles(value: Any) -> Any:
    """Returns "auto", False, or a number of chunks. Raises `ValueError` otherwise."""
    if value is False or value == "auto":
        return value
    chunks = None if isinstance(value, bool) else _number(value)
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError("should be 'auto', false or a number of chunks of at least 1")
    return chunks


def _optimizer(value: Any) -> Any:
    """Returns the name of an optimizer in our spelling, or that of one of torch. Raises `ValueError` for another."""
    names = get_args(OptimizerName)
    known = {name.lower(): name for name in names}
    if value in OF_TORCH_ALONE:
        return TORCH_OPTIMIZERS + value
    if isinstance(value, str) and (value.lower() in known or value.startswith(TORCH_OPTIMIZERS)):
        return known.get(value.lower(), value)
    listed = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
    raise ValueError(f"should be {listed}, or an optimizer of torch, as '{TORCH_OPTIMIZERS}NAdam'")


def steps_or_never(value: Any) -> Any:
    """Converts infinity, as `accelerate` writes it, to 0: never."""
    return 0 if value == math.inf else _number(value)


def spelling(names: Mapping[str, str]) -> BeforeValidator:
    """Returns a validator that maps other spellings of a choice, in any case of letters, to the choice."""
    return BeforeValidator(lambda value: names.get(value.lower(), value) if isinstance(value, str) else value)


# Types of fields. A validator in front converts the spellings of files before pydantic checks the type.
Integer = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Integer, Field(gt=0)]
Elements = Annotated[Integer, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[Number, Field(le=1)]
Rates = Annotated[float | tuple[float, ...], BeforeValidator(_rates)]
RatesOrAuto = Annotated[float | tuple[float, ...] | Literal["auto"], BeforeValidator(_or_auto)]
Tiles = Annotated[Literal["auto", False] | int, BeforeValidator(_tiles)]
DeviceName = Annotated[str, BeforeValidator(_device)]
Momentum = Annotated[float | tuple[float, ...], BeforeValidator(_momentum)]
WarmupType = Annotated[Literal["log", "linear"], spelling({"log": "log", "linear": "linear"})]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_strings)]
Paths = Annotated[tuple[Annotated[Name, BeforeValidator(expanded)], ...], BeforeValidator(_strings)]
Size = Annotated[int, BeforeValidator(parse_size)]
Memory = Annotated[int, BeforeValidator(_memory)]
OptimizerName = Literal["Adam", "AdamW", "Lamb", "Adagrad", "Lion", "SGD", "Muon", "SinkGD"]
OptimizerType = Annotated[str, BeforeValidator(_optimizer)]
DTYPE_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
SumDtype = Annotated[Literal["fp32", "bf16", "fp16"], spelling(DTYPE_NAMES)]
Beta = Annotated[Number, Field(lt=1)]
