"""Writes docs/reference/what-works.md from the `works` marks of the tests: `python -m tests.support.what_works_page`.

With `--check` the page is compared instead, and a difference is an error.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "what-works.md"

HEAD = """# What works

Each row is one use of a model, its result, and the test that proves it with every change of the code. `python -m
tests.support.what_works_page` writes this page from the tests, and a test compares the two.

* **right**: everything on disk, with room on the device for about two units and poisoned memory, gives the same bits
  as everything in memory, in fp32 and bf16; in fp32 it agrees with ordinary PyTorch too.
* **refused**: a clear error, before anything is harmed. Training goes on afterwards, unless the row says that the
  engine stops; then the run resumes from its last committed step.

Every row was tested on the CPU; on CUDA nothing of this page has been run yet. Models of transformers need version
5.3 or a later 5: the tests run with 5.23.0, and [those of folders and Trainers](../install.md#versions) ran with others
too.
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
* `torch.save(model)`, which pickles the whole module, does not work with hooks on it; save `model.state_dict()`.
"""


class _Marks:
    """A pytest plugin that collects (area, what, outcome, test), in the order of the tests."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("works"):
                area, what, outcome = mark.args
                function = getattr(item, "originalname", item.name)
                self.rows[area, what] = (outcome, f"`{item.path.name}::{function}`")


def page() -> str:
    """Returns the page that the tests describe."""
    marks = _Marks()
    files = [
        str(path) for path in sorted(Path(__file__).parents[1].glob("test_*.py")) if "mark.works(" in path.read_text()
    ]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(
            ["--collect-only", "-q", "--whole", "-m", "", "--assert=plain", "-p", "no:randomly", *files],
            plugins=[marks],
        )
    if code:
        raise SystemExit(f"the tests cannot be collected:\n{said.getvalue()}")
    lines = [HEAD]
    for area in dict.fromkeys(area for area, _ in marks.rows):
        lines += [f"## {area}\n", "| what | | test |", "|---|---|---|"]
        for (mine, what), (outcome, test) in marks.rows.items():
            if mine == area:
                lines.append(f"| {what} | {outcome} | {test} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n" + TAIL


def main() -> None:
    now = page()
    if "--check" in sys.argv:
        if not PAGE.is_file() or PAGE.read_text() != now:
            raise SystemExit(f"{PAGE} is not what the tests say: run `python -m tests.support.what_works_page`")
        return
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(now)


if __name__ == "__main__":
    main()
