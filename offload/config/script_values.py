"""Merge of a script's values into a config.

A key that the config leaves out or sets to "auto" takes the script's value; two different values are an error. Pure
functions, which depend on no trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from offload.config.blocks import TensorParallel, spelled_number
from offload.config.load import read_json
from offload.errors import ConfigError


class ScriptValue(NamedTuple):
    """A value that the script determines for one key of the config."""

    key: str
    """Path of the key, with dots between blocks."""
    value: Any
    argument: str
    """Name of the value in the script, for errors."""


def content_of(config: Any) -> dict[str, Any]:
    """Returns a copy of the config, given as a path or a mapping, with "bfloat16" renamed to "bf16"."""
    content = copy.deepcopy(dict(config)) if isinstance(config, Mapping) else read_json(config)
    if "bfloat16" in content and "bf16" not in content:
        content["bf16"] = content.pop("bfloat16")
    return content


def filled(content: Mapping[str, Any], values: Iterable[ScriptValue]) -> dict[str, Any]:
    """Returns a copy of `content`: values of the script replace "auto", null and missing keys."""
    result = copy.deepcopy(dict(content))
    wrong: list[str] = []
    for key, value, argument in values:
        *path, last = key.split(".")
        block: Any = result
        for name in path:
            inner = block.get(name)
            # A block may be missing, null or "auto" in JSON; each becomes a new block.
            inner = {} if inner in (None, "auto") else inner
            if not isinstance(inner, Mapping):
                break  # such as "bf16": true, which `load_config` refuses with the right spelling
            # Python assigns from left to right: first the copy is stored in its parent, then `block` becomes the copy.
            block[name] = block = dict(inner)
        else:
            if block.get(last) in (None, "auto"):
                block[last] = value
            elif not _equal(block[last], value):
                wrong.append(f"{key} is {block[last]!r} in the config, and {argument} is {value!r} in the script")
    if wrong:
        raise ConfigError(
            f"the config and the script disagree: {'; '.join(wrong)}. Make them equal, or set the key in "
            f'the config to "auto", which takes the value of the script'
        )
    return result


def _equal(first: Any, second: Any) -> bool:
    """Returns True if two values of JSON mean the same: a list and a tuple, "1e-3" and 0.001, but not True and 1."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    same = first == second or spelled_number(first) == spelled_number(second)
    # In Python True == 1; in a config they are different values.
    return bool(same) and isinstance(first, bool) == isinstance(second, bool)


def value_of(content: Mapping[str, Any], key: str) -> Any:
    """Returns the config's value at a dotted key; None for "auto" and for a key that is missing."""
    value: Any = content
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value == "auto" else value


def without(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns the config without the blocks `names`."""
    return {key: value for key, value in content.items() if key not in names}


def refuse_blocks(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns the config without the blocks `names`, which are null if the config has them."""
    for name in names:
        if content.get(name) is not None:
            raise ConfigError(
                f'the config has a block "{name}", and the script has one of its own; remove the block, or train '
                f"by offload.initialize"
            )
    return without(content, *names)


def refuse_commits(content: Mapping[str, Any], trainer: str, resumes_by: str, interval: str) -> None:
    """Raises `ConfigError` if a config asks for commits, or for a resume from swap files.

    [Note: two ways to resume] A Trainer resumes from a folder that it has written itself, with its own counters, log
    and callbacks. Swap files contain none of these, so commits would cost writes and be of no use.

    For the error, `resumes_by` is the call that makes the Trainer resume, and `interval` the argument that says after
    how many steps the Trainer saves.
    """
    block = content.get("offload")
    for key, fine in (("resume", (None, "never")), ("durability", (None, "auto", "none"))):
        value = block.get(key) if isinstance(block, Mapping) else None
        if value not in fine:
            raise ConfigError(
                f"offload.{key} is {value!r}, but {trainer} resumes from its checkpoints, {resumes_by}, and not from "
                f"swap files: remove the key, and set {interval} to the steps that a kill may lose"
            )


def refuse_shared_batches(content: Mapping[str, Any], trainer: str) -> None:
    """Raises `ConfigError` if ranks share batches, for a trainer whose loaders give each rank samples of its own."""
    tensors = content.get("tensor_parallel")
    sizes = {"sequence_parallel_size": value_of(content, "sequence_parallel_size")}
    if isinstance(tensors, Mapping):
        sizes["tensor_parallel.autotp_size"] = TensorParallel.arranged(tensors).get("autotp_size")
    for key, size in sizes.items():
        if size not in (None, 1):
            raise ConfigError(
                f"{key} is {size!r}, and {trainer} gives each rank samples of its own, where ranks that compute "
                "together need the same: leave the key out, or train in a loop of your own by offload.initialize"
            )
