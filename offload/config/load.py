"""From a file or a dict to a config."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from offload.config.blocks.block import Block, inner_block
from offload.config.blocks.scheduler import SCHEDULES, ScheduleParams
from offload.config.explain import explain, homes_of, nearest, unknown_key
from offload.config.schema import Config, Found, nothing_found
from offload.errors import ConfigError

_NOTES = ("_comment", "//", "#")
"""How keys begin that are notes: JSON has no comments of its own."""


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """Read a config from a JSON file's path, from its content as a dict, or from that in base64.

    Comments (`//`, `#`, `/* */`) and a comma after the last item are allowed; a key that appears twice is not. Raises
    `ConfigError` that names the key, what was expected and what came.
    """
    content = source if isinstance(source, Mapping) else read_json(source)
    found = nothing_found()
    try:
        config = Config.model_validate(_sort_out(Config, _in_new_form(content), "", found))
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error)) from error
    config._found = found
    if config.scheduler is not None and config.scheduler.type in SCHEDULES:
        schedule_params(SCHEDULES[config.scheduler.type], config.scheduler.params, "scheduler.params.", found)
    if config.fp16.enabled and config.bf16.enabled:
        raise ConfigError("fp16 and bf16 are both enabled; leave one of them on")
    if config.torch_autocast.enabled and config.dtype != "fp32":
        raise ConfigError(
            f"torch_autocast and {config.dtype} are both enabled: autocast is for fp32 weights; leave one of them on"
        )
    if config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16":
        raise ConfigError(
            "torch_autocast.dtype is fp16, whose gradients need a loss scale that only the fp16 block has; set it to "
            "bf16, or enable fp16 in place of torch_autocast"
        )
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != config.dtype:
        mode = "switch bf16 and fp16 off" if wanted == "fp32" else f'set "{wanted}": {{"enabled": true}}'
        raise ConfigError(
            f"data_types.param_dtype is {wanted}, but the weights are {config.dtype}; {mode}, or leave it out"
        )
    for name, tier in (("offload_param", config.weight_tier), ("offload_optimizer", config.optimizer_tier)):
        if tier == "nvme" and not config.drives:
            raise ConfigError(
                f'zero_optimization.{name}.device is nvme, but no "nvme_path" is given; set it beside the device, or '
                'once in the "offload" block'
            )
    return config


P = TypeVar("P", bound=ScheduleParams)


def schedule_params(model: type[P], content: Mapping[Any, Any], path: str = "", found: Found | None = None) -> P:
    """The params of a schedule, of a file (at `path` in it) or of a script. Raises `ConfigError`."""
    try:
        params = model.model_validate(_sort_out(model, content, path, found or nothing_found()))
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, path)) from error
    for low, high in model.ORDERED:
        check_order(path + low, getattr(params, low), path + high, getattr(params, high))
    return params


def check_order(low: str, lows: Any, high: str, highs: Any) -> None:
    """Raise `ConfigError` where one of `lows` is above its one of `highs`; "auto" is above nothing."""
    of_each = isinstance(lows, list | tuple) and isinstance(highs, list | tuple)  # as many as groups, or refused there
    alone, other = (rates if isinstance(rates, list | tuple) else (rates,) for rates in (lows, highs))
    for least, most in zip(alone, other, strict=False) if of_each else itertools.product(alone, other):
        if most != "auto" and least > most:
            raise ConfigError(f"{low} {least:g} is above {high} {most:g}; exchange them, or change one")


def read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a config file: JSON with comments, in which no key appears twice.

    It may come in base64 in place of a path, as DeepSpeed's autotuner passes it on.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"the config must be a dict or the path of a JSON file, got {type(source).__name__}")
    name = os.fspath(source)
    text = _decoded(source) if isinstance(source, str) else None
    if text is not None:
        name = "the config that came in base64"
    else:
        try:
            text = Path(name).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:  # a path may hold a null byte, a file anything
            raise ConfigError(f"cannot read the config {name}: {error}") from error
    content = _parse(text, name)
    if not isinstance(content, dict):
        raise ConfigError(f"the config must be a JSON object, got {type(content).__name__}")
    return content


def _decoded(source: str) -> str | None:
    """The JSON object that is in base64, in either of its alphabets; None for anything else."""
    try:
        text = base64.b64decode(source.replace("-", "+").replace("_", "/"), validate=True).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


_STRING = r'("(?:\\.|[^"\\\n])*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")


def _parse(text: str, name: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                raise ConfigError(f"{name}: the key {key!r} appears twice in one block; keep one of them")
            seen[key] = value
        return seen

    def blank(match: re.Match[str]) -> str:
        return match[1] or re.sub(r"[^\n]", " ", match[0])  # keeps line numbers right

    try:
        return json.loads(_LAST_COMMA.sub(blank, _COMMENT.sub(blank, text)), object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. Of HJSON, comments and a "
            f"comma after the last item are taken: put keys and words in quotes, and commas between items"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{name} is not a config: its blocks are nested too deeply") from error
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{name} is not a config: {error}") from error


def _in_new_form(content: Mapping[str, Any]) -> dict[str, Any]:
    """`true` for ZeRO and `cpu_offload` are how older files say what blocks say now."""
    content = dict(content)
    zero = content.get("zero_optimization")
    if isinstance(zero, bool):
        content["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        content["zero_optimization"] = zero = dict(zero)
        for old, new in _OLD_SWITCHES.items():
            if _is_on(zero.pop(old, False)):
                if zero.get(new) is not None:
                    raise ConfigError(f"zero_optimization has both {old} and {new}; leave {old} out")
                zero[new] = {"device": "cpu"}
    return content


_OLD_SWITCHES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


def _sort_out(model: type[Block], content: Mapping[str, Any], path: str, found: Found) -> dict[str, Any]:
    """What of `content` is for the fields of `model`: no defaults, and no key without effect; raises at a bad one."""
    model.check(content, path)
    kept: dict[str, Any] = {}
    tuned = "enabled" not in model.model_fields or _is_on(content.get("enabled"))  # what is off needs no word
    for key, value in content.items():
        if str(key).startswith(_NOTES):
            continue
        name, dotted = model.OLD_NAMES.get(key, key), f"{path}{key}"
        if name in model.REFUSED:
            asked = value.get("autotp_size", value) if isinstance(value, Mapping) else value
            alone = asked in (-1, 1) and (name.endswith("_size") or asked is not value)  # nothing is split
            if _is_on(asked) and not alone:
                raise ConfigError(f'"{dotted}" {model.REFUSED[name]}')
        elif name in model.TUNING:
            found.tuning.extend([dotted] * tuned)
        elif name in model.UNSUPPORTED:
            found.unsupported.extend([dotted] * _is_on(value))
        elif name not in model.model_fields:
            near, homes = nearest(model, str(key)), homes_of(model, str(key), path)
            if path or near or not isinstance(key, str):
                raise ConfigError(unknown_key(model, near, homes, dotted))
            # somebody else's block, or a note: as in DeepSpeed no error
            found.unsupported.append(f"{dotted} (did you mean {homes}?)" if homes else dotted)
        elif name in kept or (name != key and name in content):
            raise ConfigError(f'"{dotted}" is the older name of "{path}{name}", which is there too; keep one of them')
        elif _means_default(value, name, model):
            found.auto.extend([f"{path}{name}"] * (value is not None))
        else:
            inner = inner_block(model, name)
            is_block = inner is not None and isinstance(value, Mapping)
            kept[name] = _sort_out(inner, value, f"{dotted}.", found) if inner and is_block else value
    return kept


def _means_default(value: Any, name: str, model: type[Block]) -> bool:
    if value is None:
        return name != "gradient_clipping"  # null could be meant as "no clipping", and is not
    return isinstance(value, str) and value == "auto" and name not in model.OWN_AUTO


def _is_on(value: Any) -> bool:
    """Whether a key that is not supported asks for anything."""
    if not isinstance(value, Mapping):
        return bool(value) and value != "auto"
    if "enabled" in value:
        return _is_on(value["enabled"])
    switches = list(_switches(value))
    return any(switches) if switches else any(_is_on(inner) for inner in value.values())


def _switches(block: Mapping[str, Any]) -> Iterator[bool]:
    for key, value in block.items():
        if key in ("enabled", "deepcompile"):
            yield _is_on(value)
        elif isinstance(value, Mapping):
            yield from _switches(value)
