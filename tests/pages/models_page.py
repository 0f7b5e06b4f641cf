"""Writes docs/reference/models.md from the families that tests train by name: `python -m tests.pages.models_page`."""

from __future__ import annotations

from pathlib import Path

from tests.support.families import RELEASES, Release

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"

HEAD = """# Models

Causal models of transformers by family, newest year first. For each, `tests/models/test_families.py` trains a tiny
model with random weights in fp32 on the CPU, by transformers 5.23.0. `python -m tests.pages.models_page` writes this
page from the table of those tests, and a test compares the two.

* **right**: a run on disk, with room on the device for two units, is resumed between its steps. Losses, norms and
  weights have the bits of a run in memory. They agree with ordinary PyTorch but for roundings.
* **right, losses and norms**: as above; but of the comparison with ordinary PyTorch only losses and norms are part,
  since some gradients are differences of nearly equal numbers.

The year is that of the first published weights. Experts are paged [in groups](../guides/mixtures-of-experts.md) where
transformers marks their class as stacked experts.

| family | year | class | layers | experts | result |
|---|---|---|---|---|---|
"""

TAIL = """
## Limits

* **Llama-4**: transformers does not mark its experts, so a layer with all its experts is one unit, whatever
  `"experts"` says. A notice says so: `experts stay in one unit with their layer`. The device must hold the largest
  such layer; otherwise `offload.initialize` raises a `BudgetError` with `the least that works is`.
* **DeepSeek-V4**: layers that choose experts by a table of token ids (`hash_moe`) were not run. The table of a new
  model is zeros, and real values come with published weights. No operation's order differs from PyTorch's: in memory,
  with one thread, all gradients of the first step had the bits of PyTorch. The norm and the update round otherwise, so
  weights then differ by at most 3.7e-9. Gradients of the hyper-connections (`attn_hc`, `ffn_hc`, `hc_head`) cancel:
  PyTorch's own differ from those in fp64 by up to 3.5e-4 of their largest element. Adam divides by their size, so after
  two steps these weights differ by up to 1.5e-6, beyond the bound.
* **Gated delta rule, delta attention, Mamba-2**: the tests run the implementations in PyTorch that transformers has.
  The kernels of `flash-linear-attention`, `causal-conv1d` and `mamba-ssm` were not run.
* Published weights, sizes of published models and GPUs were not run for this page. Text alone was run: of families
  that also read images, [what works](what-works.md) has rows of vision-language models.
* Families without a row are not refused: `offload` knows modules, not names. [What works](what-works.md) has the kinds
  of modules, and what is refused.
"""

_EXPERTS = {"groups": "paged in groups", "layer": "one unit with their layer", "": ""}


def row(name: str, release: Release) -> str:
    result = "right, losses and norms" if release.noisy else "right"
    cells = (name, release.year, f"`{release.model}`", release.layers, _EXPERTS[release.experts], result)
    return "| " + " | ".join(map(str, cells)) + " |"


def page() -> str:
    """Returns the page of all families."""
    order = sorted(RELEASES.items(), key=lambda item: (-item[1].year, item[0].lower()))
    return HEAD + "\n".join(row(*item) for item in order) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
