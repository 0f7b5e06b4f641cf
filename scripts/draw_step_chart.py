"""Draw the chart of the README from the measured files of docs/benchmarks: `python scripts/draw_step_chart.py`."""

from __future__ import annotations

import json
from pathlib import Path

from offload.bench.measure import pyplot

ROOT = Path(__file__).resolve().parents[1]
ROWS = (
    # label, file, part
    ("offload, all in GPU memory", "2026-11-h200.json", "none/none"),
    ("offload, all in host memory", "2026-11-h200-tiles.json", "cpu/cpu"),
    ("DeepSpeed ZeRO-3, all in host memory", "2026-11-h200-deepspeed.json", "DeepSpeed"),
)
INKS = {"light": ("#24292f", "#4051b5", "#9aa0a6"), "dark": ("#e6edf3", "#8c9eff", "#7d8590")}
"""Text, our bars, the bars of others, for the two kinds of background that GitHub has."""


def step_seconds(file: str, part: str) -> float:
    """Returns the seconds of a step of a part of `offload bench gpu`."""
    parts = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())["parts"]
    return float(parts[part]["figures"]["step_seconds"])


def draw(theme: str, path: Path) -> None:
    """Draws one chart without a background of its own."""
    text, ours, others = INKS[theme]
    seconds = [step_seconds(file, part) for _, file, part in ROWS]
    figure, axes = pyplot().subplots(figsize=(8, 2.1))
    colors = [ours if label.startswith("offload") else others for label, _, _ in ROWS]
    axes.barh([label for label, _, _ in ROWS], seconds, color=colors, height=0.6)
    axes.invert_yaxis()
    axes.axvline(seconds[0], color=text, linewidth=1, linestyle="--")
    for row, each in enumerate(seconds):
        axes.text(each + 0.015, row, f"{each:.2f} s", va="center", color=text)
    axes.set_xlim(0, 1.45)
    axes.set_xlabel("seconds a step, llama-1b in bf16, 32,768 tokens, one H200; dashed: the bound", color=text)
    axes.tick_params(colors=text, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    for theme in INKS:
        draw(theme, ROOT / "docs" / "images" / f"step-{theme}.svg")
