"""Errors about a config in the words of the command line: `--host-memory` in the place of `"host_memory"`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from offload.finetune.options import KEYS, Options

_OTHERS = (
    ("lr", ("optimizer", "params", "lr")),
    ("nvme_path", ("offload", "nvme_path")),
    ("durability", ("offload", "durability", "every")),
    ("batch_size", ("train_micro_batch_size_per_gpu",)),
    ("accumulation", ("gradient_accumulation_steps",)),
)
"""Options with a merge of their own, and their key in the config."""
_WITHOUT_NAME = ("frozen",)
"""Options whose name on the command line is not that of their field."""
_VALUE = r'(?::\s*(?:"(?P<word>[^"]*)"|\{"every":\s*(?P<every>\d+)\}|(?P<number>[0-9.]+)))?'
_PLACE = r'(?: in (?:the |its )?(?:block )?"offload"(?: block)?| in "offload"| of the config)?'
_ASIDE = re.compile(r"(?: there)? \(offload train: [^)]*\)")
"""What messages add for the command line, which is not needed beside the names of options."""


def in_options(message: str, options: Options) -> str:
    """Returns a message in which options of the command stand for the keys that they set.

    Without a config file every value came from an option or from the command's defaults. With one, only keys whose
    option was given are replaced: the user may have written the others.

    Args:
        message: the text of an error.
        options: the options as they were typed.
    """
    found = message
    for flag, path in _replaced(options):
        found = _pattern(path).sub(functools.partial(_spelled, flag), found)
    return found if found == message else _ASIDE.sub("", found)


def _replaced(options: Options) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the options that stand for their keys, each with the path of its key."""
    for name, path in (*((name, path) for name, path, _ in KEYS), *_OTHERS):
        given = getattr(options, name) not in (None, ())
        if name not in _WITHOUT_NAME and (given or options.config is None):
            yield f"--{name.replace('_', '-')}", path


def _pattern(path: tuple[str, ...]) -> re.Pattern[str]:
    """Returns the pattern of a key as messages write it: dotted, or in quotes if the name alone is clear."""
    names = [rf"(?<![\w.\"]){re.escape('.'.join(path))}(?![\w.])"]
    if len(path) == 1 or (path[0] == "offload" and len(path) == 2):
        names.append(f'"{path[-1]}"')
    return re.compile(f"(?:{'|'.join(names)}){_VALUE}{_PLACE}")


def _spelled(flag: str, match: re.Match[str]) -> str:
    """Returns an option with the value that a message gives to its key, if it gives one."""
    value = next((match[name] for name in ("word", "every", "number") if match[name] is not None), None)
    return flag if value is None else f"{flag} {value}"
