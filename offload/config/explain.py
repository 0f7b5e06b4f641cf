"""Error messages of the config: the key, what was expected, what was given, and what to do."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from offload.config.blocks.block import Block, all_blocks
from offload.config.blocks.offload_block import Every
from offload.config.schema import Config
from offload.errors import ConfigError


def nearest(model: type[Block], key: str) -> str | None:
    """Returns the key of `model` whose spelling is nearest to `key`, or None if none is close."""
    known = (*model.keys(), *model.OLD_NAMES, *model.TUNING, *model.UNSUPPORTED, *model.REFUSED)
    return next(iter(difflib.get_close_matches(key, known, 1, 0.6)), None)


def blocks_with_key(model: type[Block], key: str, path: str) -> str:
    """Returns the dotted names of `key` in the blocks inside `model`, joined by "or"; "" for none or over three."""
    inside = [name for name, block in all_blocks(model, "") if name and key in block.model_fields]
    return " or ".join(f"{path}{name}.{key}" for name in inside) if len(inside) <= 3 else ""


def unknown_key(model: type[Block], near: str | None, matches: str, dotted: str) -> str:
    """Returns the message about an unknown key.

    Args:
        model: the block in which the key was found.
        near: a known key of similar spelling, or None.
        matches: dotted names of the same key in inner blocks, or "".
        dotted: dotted name of the unknown key.
    """
    if matches:
        return f"unknown key {dotted}; did you mean {matches}?"
    name = dotted.rpartition(".")[2]
    if name in Config.model_fields:
        return f'unknown key {dotted}; "{name}" belongs at the top level, beside the other blocks'
    keys = f"; keys with an effect are {', '.join(model.keys())}" if model.keys() else ""
    hint = f'did you mean "{near}"?' if near else f"remove it{keys}"
    return f"unknown key {dotted}; {hint}"


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "should be true or false"),
    "model_type": "should be a block, as {...}",
    "dict_type": "should be a block, as {...}",
    "tuple_type": "should be a list",
    "string_type": "should be text",
    "missing": "is required",
    "string_too_short": "should not be empty",
}
# By key, or by the beginning of a dotted key.
_ADVICE = {
    "gradient_clipping": "0 switches clipping off",
    "gradient_allreduce_op": "for a sum multiply the loss by the number of ranks",
    "managed_gradient_accumulation": "to mark the end of a step, call engine.set_gradient_accumulation_boundary",
    "offload.run": "it names a folder: letters, digits, '.', '_' and '-', the first a letter or digit",
    "offload.durability": 'give "auto", "step", "none", or {"every": 10}, which commits every tenth step',
    "scheduler.params.total_num_steps": (
        'give the steps of the complete training; only `offload train` and a Trainer fill "auto"'
    ),
    "optimizer.type": "set one of these, or pass optimizer= to offload.initialize",
}


def explain(error: pydantic.ValidationError, path: str = "") -> list[str]:
    """Returns a message for each wrong key: its path, what was expected, what was given, and what to do.

    Args:
        error: the error of pydantic.
        path: dotted prefix of the block that was validated; "" for the whole config.
    """
    # pydantic reports an error for each type that a value may have; all of them belong to one key.
    of_key: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for each in error.errors(include_url=False):
        place = tuple(itertools.takewhile(lambda part: not _is_choice(part), each["loc"]))
        # An error inside of a value that was wrong already adds nothing.
        whole = next((known for known in of_key if place[: len(known)] == known), place)
        of_key.setdefault(whole, []).append(each)
    return [_explain_key(errors, path) for errors in of_key.values()]


def _explain_key(errors: Sequence[ErrorDetails], path: str) -> str:
    """Returns the message about a key with one or several errors of pydantic."""
    # If a block was given, the error of the block type is the useful one; it comes second.
    several = len(errors) > 1 and _is_choice(errors[0]["loc"][-1]) and isinstance(errors[0]["input"], Mapping)
    first = errors[1] if several else errors[0]
    key = path + ".".join(str(part) for part in first["loc"] if not _is_choice(part))
    ours = first["type"] == "value_error"  # our own validators may quote the value, or name the key of a block
    names_value = first["type"] == "missing" or (
        ours and (repr(first["input"]) in first["msg"] or isinstance(first["input"], Mapping))
    )
    got = "" if names_value else f", got {first['input']!r}"
    expected = re.sub("^(Value error, |Input |String |Tuple )", "", first["msg"]).replace(
        " after validation, not", ", not"
    )
    # `parse_size` has no subject for its message, and the config has one: the key.
    expected = re.sub("^expected a size", "should be a size", expected)
    expected = _EXPECTED.get(first["type"], expected)
    if first["type"] == "string_too_short" and re.search(r"nvme_path\.\d+$", key):
        key = key.rpartition(".")[0]  # a single folder may be given without a list
        expected = "should be a folder on the drive, or a list of folders, one for each drive"
    advice = next((f"; {words}" for name, words in _ADVICE.items() if key == name or key.startswith(f"{name}.")), "")
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        key, expected = key.rpartition(".")[0], f"should be a longer list: item {first['loc'][-1] + 1} is missing"
    if first["type"] == "model_type" and not path:
        advice = _suggestion(key, first["input"]) or advice
    return f"{key} {expected}{got}{advice}"


def _suggestion(key: str, value: Any) -> str:
    """Returns advice on what to write in place of `value`, which was given instead of a block; "" without any."""
    block = dict(all_blocks(Config, "")).get(key)
    if block is None or not block.SUGGESTION:
        return ""
    # If the value fits the first key of the block, it is part of the suggestion; else the example stays as it is.
    first = next(iter(block.SUGGESTION))
    content = {**block.SUGGESTION, first: value}
    try:
        block.model_validate(content)
    except pydantic.ValidationError:
        content = dict(block.SUGGESTION)
    return f'; write "{key.rpartition(".")[2]}": {json.dumps(content)}'


def one_error(errors: Sequence[ConfigError]) -> ConfigError:
    """Returns an error for all that is wrong with a config: a single one as it is, several on lines of their own."""
    if len(errors) == 1:
        return errors[0]
    return ConfigError(f"{len(errors)} things are wrong with the config:" + "".join(f"\n* {each}" for each in errors))


def _is_choice(part: object) -> bool:
    """Returns True if a part of an error's location is one of a value's possible types rather than a key."""
    return isinstance(part, str) and (part.startswith("literal[") or part == Every.__name__)
