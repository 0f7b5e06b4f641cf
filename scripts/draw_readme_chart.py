"""Draw the chart of the README: `python scripts/draw_readme_chart.py`."""

from __future__ import annotations

from pathlib import Path

from offload.bench.measure import pyplot

ROOT = Path(__file__).resolve().parents[1]
# docs/benchmarks/2026-11-larger.md, "The largest model that this disk allows"
ROWS = (
    ("weights, states, gradients on a drive", 60.0, "60 GiB"),
    ("memory limit of the container", 4.0, "4 GiB"),
    ("peak of RAM, predicted", 3.77, "3.77 GiB"),
    ("peak of RAM, measured", 3.59, "3.59 GiB"),
)
INKS = {"light": ("#24292f", "#4051b5", "#9aa0a6"), "dark": ("#e6edf3", "#8c9eff", "#7d8590")}
"""Text, what was measured, everything else, for the two kinds of background that GitHub has."""


def draw(theme: str, path: Path) -> None:
    """Draws one chart without a background of its own."""
    text, measured, others = INKS[theme]
    figure, axes = pyplot().subplots(figsize=(8, 2.3))
    labels = [label for label, _, _ in ROWS]
    colors = [measured if label.endswith("measured") else others for label in labels]
    axes.barh(labels, [gib for _, gib, _ in ROWS], color=colors, height=0.6)
    axes.invert_yaxis()
    for row, (_, gib, words) in enumerate(ROWS):
        axes.text(gib + 0.6, row, words, va="center", color=text)
    axes.set_xlim(0, 68)
    axes.set_xlabel("GiB: a 9.2B model in training, bf16, int8 moments, two CPU cores", color=text)
    axes.tick_params(colors=text, length=0)
    axes.set_xticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    for theme in INKS:
        draw(theme, ROOT / "docs" / "images" / f"memory-{theme}.svg")
