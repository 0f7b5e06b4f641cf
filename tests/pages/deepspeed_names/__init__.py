"""Every public name of DeepSpeed's documentation: right, refused or absent here. The page of names is written from it.

`python -m tests.pages.deepspeed_names` writes docs/reference/deepspeed-names.md.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.pages.deepspeed_names import component_names, training_names
from tests.pages.deepspeed_names.name import ABSENT, ENGINE, REFUSED, RIGHT, Name

__all__ = ["ABSENT", "NAMES", "PAGE", "REFUSED", "RIGHT", "SECTIONS", "Name", "document"]

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "deepspeed-names.md"

SECTIONS = training_names.SECTIONS | component_names.SECTIONS
"""The names by section of the page."""

NAMES = tuple(name for names in SECTIONS.values() for name in names)

_HEAD = """<!-- Written by `python -m tests.pages.deepspeed_names`. Do not edit. -->
# DeepSpeed's names

`import offload.deepspeed as deepspeed` has these names of DeepSpeed 0.19, and so has `import deepspeed` in a script
that [`offload run`](../guides/from-deepspeed.md) starts, or behind `offload.deepspeed.install()`.

| word | meaning |
|---|---|
| right | takes DeepSpeed's arguments in their order, and does what DeepSpeed documents, but for what stands beside it |
| refused | can be imported, and its use is an error that says what to do |
| absent | cannot be imported |

Parameters of `zero.Init` and of `initialize` have `ds_id`, `ds_shape`, `ds_numel`, `ds_status`, `ds_persist` and
`ds_tensor`; no others have. `ds_tensor` is a copy of this rank's partition, in the dtype of the weights: change it by
`safe_set_local_fp32_param`. They are read, not set.
"""


def document() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for section, names in SECTIONS.items():
        parts.append(f"\n## {section}\n\n| `deepspeed.` | here | |\n|---|---|---|\n")
        for (outcome, words), some in itertools.groupby(names, lambda name: (name.outcome, name.words)):
            shown = ", ".join(f"`{_shown(name.path)}`" for name in some)
            parts.append(f"| {shown} | {outcome} | {words} |\n")
    return "".join(parts)


def _shown(path: str) -> str:
    """Returns the path as a user writes it."""
    return path.replace(ENGINE, "DeepSpeedEngine")
