"""Writes docs/reference/configuration.md from the blocks of the config: `python -m tests.pages.configuration_page`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.config.blocks import OLD_SWITCHES, SCHEDULES, Block, SchedulerBlock, all_blocks
from offload.config.schema import Config, reasons

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"

_INTRODUCTION = """# Configuration

A DeepSpeed JSON file works unchanged, unless it has a key of [the last section](#refused-unless-switched-off). This
page lists every key that has an effect, with its default, and every key that is accepted without an effect. An
unknown key is an error that names the nearest known key. At the top level, where other tools keep their blocks, a key
that resembles no known key is named in a log line instead. `"auto"` and `null` mean the default; integers may be
written as `1e8`. Comments (`//`, `#`, `/* */`) and a comma after the last item are allowed; quotes and commas, which
HJSON leaves out, are required. Instead of a path, the content may be passed in base64, as DeepSpeed's autotuner does.
A learning rate of `"auto"` must come from `--lr`, from the arguments of a Trainer, or from an optimizer that is
passed to `offload.initialize`. Older names are accepted; the end of this page lists them.

`python -m tests.pages.configuration_page` writes this page from `offload/config`.
"""


def document() -> str:
    """Returns the text of docs/reference/configuration.md."""
    tables: list[str] = [_INTRODUCTION]
    tuning: list[str] = []
    refused: list[str] = []
    for path, model in all_blocks(Config, ""):
        title = f"`{path}`" if path else "Top level"
        tables.append(_section(title, model))
        # `params` is a plain dict in this block; the keys inside are those of the schedule's own block class.
        if model is SchedulerBlock:
            tables.extend(_section(f"`{path}.params` of {name}", params) for name, params in SCHEDULES.items())
        for lines, keys in ((tuning, (*model.TUNING, *model.UNSUPPORTED)), (refused, model.REFUSED)):
            lines.extend([f"* {title}: {', '.join(f'`{key}`' for key in keys)}"] if keys else [])
    return "\n".join(
        [
            *tables,
            "## Accepted without effect\n\nThese keys tune sizes that this library chooses itself, or switch on "
            "features that it lacks and that change no result. One warning at the start names those in a file:\n\n"
            + "\n".join(tuning),
            "\nWhat they ask for, and what is done:\n\n"
            + "\n".join(f"* `{key}`: {reason}" for key, reason in reasons()),
            "\nThese ask for what is always done, and are honoured with this value: "
            + ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in _always())
            + ".",
            "\n## Refused unless switched off\n\nWithout these features the training would be different:\n\n"
            + "\n".join(refused),
            "\n## Older names\n\nDeepSpeed's older names of keys are accepted in their place:\n\n"
            + "\n".join(_older_names()),
            "",
        ]
    )


def _always() -> Iterator[tuple[str, Any]]:
    """Yields each key that asks for what is always done, by its dotted name, with the value that does."""
    for path, model in all_blocks(Config, ""):
        yield from ((f"{path}.{key}", value) for key, value in model.ALWAYS.items())


def _older_names() -> Iterator[str]:
    """Yields a line for each older name, with the key that it stands for."""
    for path, model in all_blocks(Config, ""):
        prefix = f"{path}." if path else ""
        for old, new in model.OLD_NAMES.items():
            yield f"* `{prefix}{old}`: `{new}`"
    for old, block in OLD_SWITCHES.items():
        yield f'* `zero_optimization.{old}`, if true: `{block}` with `"device": "cpu"`'


def _section(title: str, model: type[Block]) -> str:
    return f"## {title}\n\n{(model.__doc__ or '').splitlines()[0]}\n\n{_table(model)}"


def _table(model: type[Block]) -> str:
    if not model.model_fields:
        return "No key has an effect."
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if field.exclude:  # no key of a file
            continue
        block = isinstance(field.default, Block) or field.is_required()
        default = "" if block else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
