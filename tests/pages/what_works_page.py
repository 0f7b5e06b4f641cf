"""Writes docs/reference/what-works.md from the `works` marks of the tests: `python -m tests.pages.what_works_page`.

With `--check` the page is compared instead, and a difference is an error.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "what-works.md"

HEAD = """# What works

Each row is one use of a model, its result, and the test that proves it with every change of the code. `python -m
tests.pages.what_works_page` writes this page from the tests, and a test compares the two.

* **right**: everything on disk, with room on the device for about two units and poisoned memory, gives the same bits
  as everything in memory, in fp32 and bf16; in fp32 it agrees with ordinary PyTorch too.
* **refused**: a clear error, before anything is harmed. Training goes on afterwards, unless the row says that the
  engine stops; then the run resumes from its last committed step.

Every row is tested on the CPU. A GPU has run [some of these tests](../benchmarks/2026-11-h200.md#tests), on two
days, and not since. Models of transformers need version 5.3 or a later 5: the tests run with 5.23.0, and [those of
folders and Trainers](../install.md#versions) ran with others too.
"""

TAIL = """
## Limits that no test shows as right

* A weight that is changed in place through `.data` while its module runs (`self.weight.data.clamp_()` in its forward)
  is not noticed: the change is in a copy on the device, which stays if the weights' home is the device and is lost
  otherwise. Under `torch.no_grad()`, without `.data`, the change is noticed and refused. Change weights between steps.
* The tensors of `state_dict()` are copies: writing to them changes nothing. Write to the parameters.
* `zero_grad()` of a submodule drops no gradient; `zero_grad()` of the model, the engine and the optimizer does.
* `torch.compile(fullgraph=True)` cannot contain modules that the engine hooks; nor can `torch.jit` and `torch.export`.
* Modules that compute with buffers and weights of different dtypes (`spectral_norm` in bf16) need
  `data_types.buffer_dtype`.
* Frozen weights can be changed before `offload.initialize` only.
* Modules that are added to the model after `offload.initialize` are not seen; parameters that were frozen then cannot
  be unfrozen (refused). Leave parameters trainable that train later, and freeze them afterwards.
* Views of weights that stay alive (in a `ctx` attribute, in hooks that keep their arguments) hold room on the
  device. Units of different sizes that are needed at one time may need more than the sum of their sizes, since a unit
  in use cannot be moved: `(2k - 1)` times the largest is always enough for `k` of them.
* `p.grad` is None after a backward: gradients are stored in the engine, and `offload.safe_get_full_grad` reads one.
  `torch.nn.utils.clip_grad_norm_` sees none; set `gradient_clipping` in the config.
* BatchNorm in bf16 on the CPU needs `"data_types": {"buffer_dtype": "bf16"}`; without, `initialize` says so.
* `nn.TransformerEncoder` in evaluation mode leaves torch's fast path, since its layers are hooked: at positions that
  `src_key_padding_mask` masks its output, which means nothing, has the values of the slow path in place of zeros.
* `torch.save(model)`, which pickles the whole module, does not work with hooks on it; save `model.state_dict()`.
"""


Rows = dict[tuple[str, str], tuple[str, str]]
"""(area, what) to (outcome, test)."""

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that this process has collected, before any was deselected."""


class _Tests:
    """A pytest plugin that notes what is collected."""

    items: Sequence[pytest.Item] = ()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)


def files() -> list[Path]:
    """Returns the files of tests with a mark, in their order."""
    every = sorted(Path(__file__).parents[1].glob("*/test_*.py"), key=lambda path: path.name)
    return [path for path in every if "mark.works(" in path.read_text()]


def rows(items: Iterable[pytest.Item]) -> Rows:
    """Returns the rows of tests, whatever the order in which their files were collected."""
    rows: Rows = {}
    for item in sorted(items, key=lambda item: item.path.name):
        for mark in item.iter_markers("works"):
            area, what, outcome = mark.args
            rows[area, what] = (outcome, f"`{item.path.name}::{getattr(item, 'originalname', item.name)}`")
    return rows


def collect() -> Rows:
    """Returns the rows of all tests, which are collected here."""
    tests = _Tests()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(
            ["--collect-only", "-q", "--whole", "-m", "", "--assert=plain", "-p", "no:randomly", *map(str, files())],
            plugins=[tests],
        )
    if code:
        raise SystemExit(f"the tests cannot be collected:\n{said.getvalue()}")
    return rows(tests.items)


def page(rows: Rows) -> str:
    """Returns the page of rows."""
    lines = [HEAD]
    for area in dict.fromkeys(area for area, _ in rows):
        lines += [f"## {area}\n", "| what | | test |", "|---|---|---|"]
        for (mine, what), (outcome, test) in rows.items():
            if mine == area:
                lines.append(f"| {what} | {outcome} | {test} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n" + TAIL


def main() -> None:
    now = page(collect())
    if "--check" in sys.argv:
        if not PAGE.is_file() or PAGE.read_text() != now:
            raise SystemExit(f"{PAGE} is not what the tests say: run `python -m tests.pages.what_works_page`")
        return
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(now)


if __name__ == "__main__":
    main()
