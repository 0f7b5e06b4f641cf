"""`offload check-config`: what becomes of each key of a config file, without a model, a machine or a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from offload.cli.console import BAD_INPUT, Json, errors

_KINDS = {
    "errors": "wrong or refused",
    "honoured": "honoured",
    "auto": 'left to "auto", which a script or a Trainer fills in, else the default',
    "without_effect": "without effect, since this library chooses these values itself",
    "ignored": "ignored: not supported, or of another tool",
    "off": "off: these ask for nothing",
}
"""The lists of `--json`, each with its heading."""
_RATE = "optimizer.params.lr"
_REQUIRED = "it has no default, so a start without a Trainer needs a number"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check_config(
    config: Path = typer.Argument(metavar="FILE", help="A DeepSpeed JSON file."), json_output: Json = False
) -> None:
    """List the effect of each key of a DeepSpeed JSON file. A key is honoured, ignored, off, refused or wrong.

    Exit code 0, or 2 if a key is wrong or refused; all such keys are listed. That the batch fits the number of
    ranks is checked by the run. Example: offload check-config ds_config.json
    """
    with errors(BAD_INPUT):
        keys = keys_of(config)
    if json_output:
        print(json.dumps({"config": str(config), **keys}))
    else:
        named = {kind: re.split("[,:]", heading)[0] for kind, heading in _KINDS.items()}
        counts = [f"{len(keys[kind])} {name}" for kind, name in named.items() if keys[kind]] or ["no keys"]
        print(f"{config}: {', '.join(counts)}")
        for kind in _KINDS:
            if keys[kind]:
                why = keys["why"]
                lines = (f"  {name}: {why[name]}" if name in why else f"  {name}" for name in keys[kind])
                print(f"{_KINDS[kind]}:", *lines, sep="\n")
    if keys["errors"]:
        raise typer.Exit(BAD_INPUT)


def keys_of(file: Path) -> dict[str, Any]:
    """Returns the keys of a config file, grouped by their treatment, and the messages on wrong keys.

    "why" maps keys to reasons, for the keys with a reason.
    """
    from offload.config import examine, read_json
    from offload.config.schema import reasons

    content = read_json(file)
    _, findings = examine(content)
    # Params of torch's optimizers and of schedules are kept as one block, which the file calls "params".
    # Switches of older files stand for current keys, which such a file does not contain.
    honoured = sorted(
        {name for key in findings.honoured if _is_in(content, name := key.replace("torch_params", "params"))}
    )
    blocks = {name.rpartition(".")[0] for name in (*honoured, *findings.auto)}
    # Keys that a Trainer fills in are missing only until then.
    required = [name for name in findings.auto if any(_is_missing(name, str(error)) for error in findings.errors)]
    wrong = [str(error) for error in findings.errors if not any(_is_missing(name, str(error)) for name in required)]
    messages = wrong + batch_errors(content)
    # A message is about the value of a key, or about a part of it.
    refused = [name for name in honoured if any(f"{name}." in line or line.startswith(f"{name} ") for line in messages)]
    return {
        "errors": messages,
        "honoured": [name for name in honoured if name not in blocks and name not in refused],
        "auto": sorted(findings.auto),
        "without_effect": sorted(findings.tuning),
        "ignored": sorted(findings.unsupported),
        "off": sorted(findings.off),
        "why": {
            **{name: why for name, why in reasons() if name in (*findings.tuning, *findings.unsupported)},
            **{name: _REQUIRED for name in findings.auto if name in (*required, _RATE)},
            **findings.off,
        },
    }


def _is_in(content: Any, name: str) -> bool:
    """Returns True if a config contains a key of a dotted name, or is a plain value in place of the block."""
    key, _, rest = name.partition(".")
    return not isinstance(content, Mapping) or (key in content and (not rest or _is_in(content[key], rest)))


def _is_missing(name: str, message: str) -> bool:
    return message.startswith(f"{name} is required")


def batch_errors(content: Mapping[str, Any]) -> list[str]:
    """Returns a message if no number of ranks can make up the batch of a config from its micro-batches."""
    total, *parts = [content.get(key) for key in _BATCH]
    sizes = {key: size for key, size in zip(_BATCH[1:], parts, strict=True) if isinstance(size, int) and size > 0}
    # The batch is a multiple of the known sizes' product, for any number of ranks.
    made = math.prod(sizes.values())
    if not isinstance(total, int) or total % made == 0:
        return []
    return [f"train_batch_size is {total}, no multiple of {' * '.join(sizes)}, {made}: no number of ranks makes it"]
