"""Generator of docs/reference/configuration.md from the descriptions and tables of all blocks."""

from __future__ import annotations

import json

from offload.config.blocks.block import Block, all_blocks
from offload.config.blocks.scheduler import SCHEDULES, SchedulerBlock
from offload.config.schema import Config

_INTRODUCTION = """# Configuration

A DeepSpeed JSON file works as it is. This page lists every key that has an effect, with its default, and every key
that is accepted without one. An unknown key is an error that names the nearest one; at the top level, where other tools
keep their blocks, a key that is like no known key is named in a line at the start instead. `"auto"` and `null` mean
the default, integers may be written as `1e8`. Comments (`//`, `#`, `/* */`) and a comma after the last item are
allowed; quotes and commas, which HJSON leaves out too, are required. In place of a path the content may come in
base64, as DeepSpeed's autotuner passes it. A learning rate of `"auto"` must come from `--lr` or from an optimizer
that is passed to `offload.initialize`. Older names hold: `bfloat16` for `bf16`, and in `zero_optimization`
`cpu_offload` and `cpu_offload_params`, which put one of the two blocks on `cpu`.

`python -m offload.config` writes this page from `offload/config`.
"""


def document() -> str:
    """Returns the text of docs/reference/configuration.md."""
    tables: list[str] = [_INTRODUCTION]
    tuning: list[str] = []
    refused: list[str] = []
    for path, model in all_blocks(Config, ""):
        title = f"`{path}`" if path else "Top level"
        tables.append(_section(title, model))
        # `params` is a dict in the block itself; each schedule has a model of its own for it.
        if model is SchedulerBlock:
            tables.extend(_section(f"`{path}.params` of {name}", params) for name, params in SCHEDULES.items())
        for lines, keys in ((tuning, (*model.TUNING, *model.UNSUPPORTED)), (refused, model.REFUSED)):
            lines.extend([f"* {title}: {', '.join(f'`{key}`' for key in keys)}"] if keys else [])
    return "\n".join(
        [
            *tables,
            "## Accepted without effect\n\nThey tune what this library sizes by itself, or switch on what is not here "
            "and would not change a bit; one warning at the start names those that a file has:\n\n" + "\n".join(tuning),
            "\n## Refused unless switched off\n\nWithout them training would be another one:\n\n" + "\n".join(refused),
            "",
        ]
    )


def _section(title: str, model: type[Block]) -> str:
    """Returns the section of a block: its title, the first line of its docstring and its table."""
    return f"## {title}\n\n{(model.__doc__ or '').splitlines()[0]}\n\n{_table(model)}"


def _table(model: type[Block]) -> str:
    """Returns the table of a block's keys in Markdown."""
    if not model.model_fields:
        return "No key has an effect."
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        block = isinstance(field.default, Block) or field.is_required()
        default = "" if block else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"
