"""Errors in words: the key, what was expected, what came, what to do."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

import pydantic

from offload.config.blocks.block import Block, all_blocks
from offload.config.blocks.offload_block import Every
from offload.config.schema import Config


def nearest(model: type[Block], key: str) -> str | None:
    known = (*model.model_fields, *model.OLD_NAMES, *model.TUNING, *model.UNSUPPORTED, *model.REFUSED)
    return next(iter(difflib.get_close_matches(key, known, 1, 0.6)), None)


def homes_of(model: type[Block], key: str, path: str) -> str:
    """Where in the blocks of `model` a key of this very name is known; "" if nowhere, or in many."""
    inside = [name for name, block in all_blocks(model, "") if name and key in block.model_fields]
    return " or ".join(f"{path}{name}.{key}" for name in inside) if len(inside) <= 3 else ""


def unknown_key(model: type[Block], near: str | None, homes: str, dotted: str) -> str:
    if homes:
        return f"unknown key {dotted}; did you mean {homes}?"
    keys = f"; keys with an effect are {', '.join(model.model_fields)}" if model.model_fields else ""
    hint = f'did you mean "{near}"?' if near else f"remove it{keys}"
    return f"unknown key {dotted}; {hint}"


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "should be true or false"),
    "model_type": "should be a block, as {...}",
    "dict_type": "should be a block, as {...}",
    "tuple_type": "should be a list",
    "missing": "is needed",
    "string_too_short": "should not be empty",
}
_ADVICE = {
    "gradient_clipping": "0 switches clipping off",
    "gradient_allreduce_op": "for a sum multiply the loss by the number of ranks",
    "managed_gradient_accumulation": "to say where a step ends, call engine.set_gradient_accumulation_boundary",
    "offload.run": "it names a folder: letters, digits, '.', '_' and '-', the first a letter or digit",
    "offload.durability": 'give "auto", "step", "none", or {"every": 10}, which commits every tenth step',
    "scheduler.params.total_num_steps": 'give the steps of the whole training; "auto" is for `offload train` to fill',
    "optimizer.type": "set one of these, or pass optimizer= to offload.initialize",
}


def explain(error: pydantic.ValidationError, path: str = "") -> str:
    """The first error in words: the key's path from `path` on, what was expected, what came, and what to do."""
    errors = error.errors(include_url=False)
    # Of a field that is a word or a block there is one for each: a block was meant where one came.
    several = len(errors) > 1 and _is_choice(errors[0]["loc"][-1]) and isinstance(errors[0]["input"], Mapping)
    first = errors[1] if several else errors[0]
    key = path + ".".join(str(part) for part in first["loc"] if not _is_choice(part))
    ours = first["type"] == "value_error"  # it may say already what came; of a whole block it names the key
    said = first["type"] == "missing" or (
        ours and (repr(first["input"]) in first["msg"] or isinstance(first["input"], Mapping))
    )
    got = "" if said else f", got {first['input']!r}"
    expected = re.sub("^(Value error, |Input |String |Tuple )", "", first["msg"]).replace(
        " after validation, not", ", not"
    )
    expected = _EXPECTED.get(first["type"], expected)
    if first["type"] == "string_too_short" and re.search(r"nvme_path\.\d+$", key):
        key = key.rpartition(".")[0]  # one folder needs no list
        expected = "should be a folder on the drive, or a list of such, one for each drive"
    advice = next((f"; {words}" for name, words in _ADVICE.items() if key == name or key.startswith(f"{name}.")), "")
    if first["type"] == "model_type" and not path:
        advice = _instead(key, first["input"]) or advice
    return f"{key} {expected}{got}{advice}"


def _instead(key: str, value: Any) -> str:
    """What to write for a block in whose place `value` came."""
    block = dict(all_blocks(Config, "")).get(key)
    if block is None or not block.INSTEAD:
        return ""
    first = next(iter(block.INSTEAD))
    content = {**block.INSTEAD, first: value}
    try:
        block.model_validate(content)
    except pydantic.ValidationError:
        content = dict(block.INSTEAD)
    return f'; write "{key.rpartition(".")[2]}": {json.dumps(content)}'


def _is_choice(part: object) -> bool:
    """Whether a part of a location is no key but one of the types that a value may have."""
    return isinstance(part, str) and (part.startswith("literal[") or part == Every.__name__)
