"""The GPU benchmark runs what matters most first, as much as fits into its minutes, each part in its own process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from offload.bench.child_process import run_child
from offload.bench.gpu.parts import PARTS, Part, fitting, run_parts

TIERS = ("none", "cpu", "nvme")


def test_what_matters_most_fits_in_eight_minutes_and_all_nine_placements_are_parts() -> None:
    first = ["bits", "copies", "rates", "none/none", "nvme/nvme", "cpu/cpu", "13B layers"]
    assert [part.name for part in fitting(PARTS, 8 * 60)][:7] == first
    placements = [part.placement for part in PARTS if not part.changes and part.placement]
    assert sorted(placements) == sorted(f"{weights}/{states}" for weights in TIERS for states in TIERS)
    assert [part.name for part in PARTS if part.changes.get("limit")][-3:] == ["7B", "13B in few bytes", "13B"]


def test_what_fits_in_a_budget() -> None:
    parts = [Part("a", 50), Part("b", 60), Part("c", 30)]
    assert fitting(parts, 1000) == parts
    assert [part.name for part in fitting(parts, 109)] == ["a", "c"], "a smaller part takes what b leaves"
    assert fitting(parts, 29) == []


def test_parts_run_in_order_while_there_is_time_and_the_others_are_named() -> None:
    clock, granted = [0.0], {}
    takes = {"a": 10.0, "b": 135.0, "c": 1.0, "d": 1.0}

    def run(part: Part, soft: float, hard: float) -> dict[str, Any]:
        granted[part.name] = (soft, hard)
        clock[0] += takes[part.name]
        return {"state": "done"}

    parts = [Part("a", 50), Part("b", 60), Part("c", 30), Part("d", 20)]
    ended = dict(run_parts(parts, 170, run, lambda: clock[0]))
    assert list(ended) == ["a", "b", "d", "c"]
    assert [part["state"] for part in ended.values()] == ["done", "done", "done", "skipped"]
    assert granted["a"] == (50 + 10 / 4, 170), "what nobody needs is shared"
    assert granted["b"][1] == 160 and granted["d"][1] == 25, "nobody may take more than is left"


def test_a_process_that_ends_well_that_fails_and_that_takes_too_long(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text('{"so": "far"}')
    well = run_child([sys.executable, "-c", "pass"], figures, 60)
    assert well["state"] == "done" and well["figures"] == {"so": "far"}
    failed = run_child([sys.executable, "-c", "print('a word'); raise SystemExit(3)"], figures, 60)
    assert (failed["state"], failed["exit_code"], failed["last_lines"]) == ("failed", 3, ["a word"])
    stopped = run_child([sys.executable, "-c", "import time; time.sleep(60)"], figures, 0.2)
    assert stopped["state"] == "stopped" and stopped["figures"] == {"so": "far"}
