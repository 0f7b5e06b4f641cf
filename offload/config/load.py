"""Reader that turns a config file or a dict into a `Config`."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import pydantic

from offload.config.blocks.block import Block, inner_block
from offload.config.blocks.scheduler import SCHEDULES, ScheduleParams, SchedulerBlock
from offload.config.blocks.values import unpacked
from offload.config.blocks.zero import OLD_SWITCHES
from offload.config.contradictions import find_contradictions
from offload.config.explain import blocks_with_key, explain, nearest, one_error, unknown_key
from offload.config.schema import Config, Findings, no_findings
from offload.errors import ConfigError

_LONGEST = 1 << 24
"""Characters of a config file at most: a file of holes has any number."""
_NOTES = ("_comment", "//", "#")
"""Prefixes of keys that are notes: plain JSON has no comments."""


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """Reads a config.

    Comments (`//`, `#`, `/* */`) and a comma after the last item are allowed. A key must not appear twice in one block.

    Args:
        source: path of a JSON file, its content as a dict, or its content in base64.

    Returns:
        The validated config, frozen.

    Raises:
        ConfigError: names each wrong key, what was expected and what was given.
    """
    config, findings = examine(source if isinstance(source, Mapping) else read_json(source))
    if config is None:
        raise one_error(findings.errors)
    return config


def examine(content: Mapping[str, Any]) -> tuple[Config | None, Findings]:
    """Returns the config of a content, or None if something is wrong with it, and what was found about its keys."""
    findings = no_findings()
    known = _known_content(Config, _with_new_names(content, findings), "", findings) or {}
    config = None
    try:
        config = Config.model_validate(known)
    except pydantic.ValidationError as error:
        findings.errors.extend(map(ConfigError, explain(error)))
    contradictions = find_contradictions(config) if config is not None and not findings.errors else ()
    scheduler = _scheduler(known) if config is None else config.scheduler
    if scheduler is not None and scheduler.type in SCHEDULES:
        _read_params(SCHEDULES[scheduler.type], scheduler.params, "scheduler.params.", findings)
    findings.errors.extend(contradictions)
    if config is None or findings.errors:
        return None, findings
    # A config with keys that ask for nothing equals one without.
    config._findings = findings._replace(off={})
    return config, findings


def _scheduler(known: Mapping[str, Any]) -> SchedulerBlock | None:
    """Returns the schedule of a config that is wrong elsewhere; None without one, or if it is wrong itself."""
    try:
        return SchedulerBlock.model_validate(known.get("scheduler"))
    except pydantic.ValidationError:  # reported with the whole config
        return None


P = TypeVar("P", bound=ScheduleParams)


def schedule_params(model: type[P], content: Mapping[Any, Any], path: str = "") -> P:
    """Validates the params of a schedule, from a file or from a script.

    Args:
        model: the schedule's params.
        content: the keys that were given.
        path: dotted prefix of the keys in the file, for messages; "" for a script.

    Raises:
        ConfigError: a key is unknown, a value is out of range, or a pair is in the wrong order.
    """
    findings = no_findings()
    params = _read_params(model, content, path, findings)
    if params is None:
        raise one_error(findings.errors)
    return params


def _read_params(model: type[P], content: Mapping[Any, Any], path: str, findings: Findings) -> P | None:
    """Returns the params of a schedule, or None after adding what is wrong with them to `findings`."""
    before = len(findings.errors)
    known = _known_content(model, content, path, findings) or {}
    try:
        params = model.model_validate(known)
        for low, high in model.ORDERED:
            check_order(path + low, getattr(params, low), path + high, getattr(params, high))
    except pydantic.ValidationError as error:
        findings.errors.extend(map(ConfigError, explain(error, path)))
    except ConfigError as error:
        findings.errors.append(error)
    return params if len(findings.errors) == before else None


def check_order(low: str, lows: Any, high: str, highs: Any) -> None:
    """Raises `ConfigError` if a value of `lows` exceeds the matching value of `highs`. "auto" exceeds nothing.

    Args:
        low: name of the lower bound, for the message.
        lows: a number, or one for each group of parameters.
        high: name of the upper bound, for the message.
        highs: a number or "auto", or one for each group of parameters.
    """
    of_each = isinstance(lows, list | tuple) and isinstance(highs, list | tuple)  # one for each group
    alone, other = (rates if isinstance(rates, list | tuple) else (rates,) for rates in (lows, highs))
    # A single number applies to every group, hence the product.
    for least, most in zip(alone, other, strict=False) if of_each else itertools.product(alone, other):
        if most != "auto" and least > most:
            raise ConfigError(f"{low} {least:g} is above {high} {most:g}; exchange them, or change one")


def read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of a config file: JSON with comments, in which no key appears twice.

    Args:
        source: a path, or the content in base64, as DeepSpeed's autotuner passes it.

    Raises:
        ConfigError: the file cannot be read, or its content is no JSON object.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"the config must be a dict or the path of a JSON file, got {type(source).__name__}")
    name = os.fspath(source)
    text = _decoded(source) if isinstance(source, str) else None
    if text is not None:
        name = "the config that came in base64"
    else:
        try:
            with open(name, encoding="utf-8-sig") as file:
                text = file.read(_LONGEST + 1)
            if len(text) > _LONGEST:
                raise ValueError(f"it has more than {_LONGEST} characters")
        except (OSError, ValueError) as error:  # a path may hold a null byte, a file anything
            raise ConfigError(f"cannot read the config {name}: {error}") from error
    content = _parse(text, name)
    if not isinstance(content, dict):
        raise ConfigError(f"the config must be a JSON object, got {type(content).__name__}")
    return content


def _decoded(source: str) -> str | None:
    """Returns the text of a JSON object that is encoded in either alphabet of base64; None for anything else."""
    try:
        text = base64.b64decode(source.replace("-", "+").replace("_", "/"), validate=True).decode()
    except ValueError:
        return None
    # Many paths are valid base64 too, but do not decode to the start of a JSON object.
    return text if text.lstrip().startswith("{") else None


# Strings are matched first, so that comment signs and commas inside them are left alone.
_STRING = r'("(?:\\.|[^"\\\n])*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")


def without_comments(text: str) -> str:
    """Returns `text` with each comment replaced by as many spaces and line ends: every place stays the same."""
    return _COMMENT.sub(_blank, text)


def without_last_commas(text: str) -> str:
    """Returns `text`, which has no comments, with each comma behind a last item replaced by a space."""
    return _LAST_COMMA.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    """Returns the string that was matched, or spaces, which keep lines and columns of error messages right."""
    return match[1] or re.sub(r"[^\n]", " ", match[0])


def _parse(text: str, name: str) -> Any:
    """Parses JSON with comments and trailing commas. Raises `ConfigError` that names the line and column."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                raise ConfigError(f"{name}: the key {key!r} appears twice in one block; keep one of them")
            seen[key] = value
        return seen

    try:
        return json.loads(without_last_commas(without_comments(text)), object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. Comments and a comma after "
            f"the last item are allowed, other HJSON is not: put keys and strings in quotes, and commas between items"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{name} is not a config: its blocks are nested too deeply") from error
    except ConfigError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"{name} is not a config: {error}") from error


def _with_new_names(content: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Converts spellings of older files to blocks: a boolean "zero_optimization", and those of `OLD_SWITCHES`."""
    content = dict(content)
    zero = content.get("zero_optimization")
    if isinstance(zero, bool):
        content["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        content["zero_optimization"] = zero = dict(zero)
        for old, new in OLD_SWITCHES.items():
            given = zero.pop(old, None)
            if given is not None and not _is_on(given):
                findings.off[f"zero_optimization.{old}"] = f"off; on, it would be {new} on the CPU"
            if _is_on(given):
                if zero.get(new) is not None:
                    findings.errors.append(
                        ConfigError(f"zero_optimization contains both {old} and {new}; leave {old} out")
                    )
                    continue
                zero[new] = {"device": "cpu"}
                findings.honoured.append(f"zero_optimization.{old}")
    return content


def _known_content(
    model: type[Block], content: Mapping[str, Any], path: str, findings: Findings
) -> dict[str, Any] | None:
    """Returns the keys of `content` that are fields of `model`, except those whose value means the default.

    Treats inner blocks the same way. What was found about the keys, and what is wrong with them, is added to
    `findings`. None stands for a block that asks for something unsupported as a whole.
    """
    try:
        model.check(content, path)
        content = model.arranged(unpacked(content))
    except ConfigError as error:
        findings.errors.append(error)
        return None
    kept: dict[str, Any] = {}
    switch = content.get("enabled")
    on = "enabled" not in model.model_fields or _is_on(switch) or switch == "auto"  # no notice for a block that is off
    for key, value in content.items():
        name, dotted = model.OLD_NAMES.get(key, key), f"{path}{key}"
        why = _why_off(model, name, value, on)
        if str(key).startswith(_NOTES):
            findings.off[dotted] = "a note"
            continue
        if why is not None:
            findings.off[dotted] = why
        if name in model.REFUSED:
            if why is None:
                findings.errors.append(ConfigError(f'"{dotted}" {model.REFUSED[name]}'))
        elif name in model.TUNING or name in model.UNSUPPORTED:
            if why is None:
                (findings.tuning if name in model.TUNING else findings.unsupported).append(dotted)
        elif name not in model.model_fields:
            _note_unknown(model, key, path, findings)
        elif name in kept or (name != key and name in content):
            findings.errors.append(
                ConfigError(f'"{dotted}" is the older name of "{path}{name}", which is set too; keep one of them')
            )
        elif _means_default(value, name, model):
            findings.auto.extend([dotted] * (value is not None))
        elif (inner := inner_block(model, name)) is None or not isinstance(value, Mapping):
            findings.honoured.extend([dotted] * (why is None))
            kept[name] = value
        elif (block := _known_content(inner, value, f"{dotted}.", findings)) is not None:
            kept[name] = block
    return kept


def _why_off(model: type[Block], name: str, value: Any, on: bool) -> str | None:
    """Returns the reason why a key that the block knows asks for nothing; None if it asks for something.

    Args:
        model: the block.
        name: the key's name of today.
        value: the key's value.
        on: True unless the block is off.
    """
    if value == {} and name in model.model_fields:
        return "an empty block"
    known = name in model.model_fields or name in model.TUNING
    if name in model.REFUSED:
        return None if _asks_for_refused(name, value) else "off; on, it would be refused"
    if name in model.UNSUPPORTED:
        return None if _is_on(value) else "off; on, it would be ignored"
    if known and not on and name != "enabled":
        return 'its block is off, by "enabled"'
    if known and value is None and _means_default(value, name, model):
        return "null, which is the default"
    return None


def _asks_for_refused(name: str, value: Any) -> bool:
    """Returns True if the value of a refused key switches its feature on."""
    asked = value.get("autotp_size", value) if isinstance(value, Mapping) else value
    alone = asked in (-1, 1) and (name.endswith("_size") or asked is not value)  # splits nothing
    return _is_on(value) and _is_on(asked) and not alone


def _note_unknown(model: type[Block], key: Any, path: str, findings: Findings) -> None:
    """Adds a key that the block does not know to `findings`: as an error, or as one of another tool."""
    dotted = f"{path}{key}"
    near, tiers = nearest(model, str(key)), blocks_with_key(model, str(key), path)
    if path or near or not isinstance(key, str):
        findings.errors.append(ConfigError(unknown_key(model, near, tiers, dotted)))
    else:
        # At the top level this is another tool's block or a note: no error, as in DeepSpeed.
        findings.unsupported.append(f"{dotted} (did you mean {tiers}?)" if tiers else dotted)


def _means_default(value: Any, name: str, model: type[Block]) -> bool:
    """Returns True if `value` (null or "auto") stands for the default of the field."""
    if value is None:
        return name != "gradient_clipping"  # null could be meant as "no clipping", so pydantic refuses it
    return isinstance(value, str) and value == "auto" and name not in model.OWN_AUTO


def _is_on(value: Any) -> bool:
    """Returns True if the value of an unsupported key switches its feature on."""
    if not isinstance(value, Mapping):
        return bool(value) and value != "auto"
    if "enabled" in value:
        return _is_on(value["enabled"])
    # Without a switch any truthy setting counts as a request.
    switches = list(_switches(value))
    return any(switches) if switches else any(_is_on(inner) for inner in value.values())


def _switches(block: Mapping[str, Any]) -> Iterator[bool]:
    """Yields True or False for each switch in a block and in the blocks inside."""
    for key, value in block.items():
        if key in ("enabled", "deepcompile"):
            yield _is_on(value)
        elif isinstance(value, Mapping):
            yield from _switches(value)
