"""The least budget that works, as the error of a single byte names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import offload
from offload.sizes import PAGE
from tests.support.oracle import Job, room_for, start
from tests.support.ranks.rank_pool import rank_and_size


def least(job: Job, placement: tuple[str, str], folder: Path, budget_name: str, **options: Any) -> int:
    """Returns the smallest `which`, "host_memory" or "device_memory", that works with whole tables of words.

    0 where a single byte is enough, as where the CPU uses weights in RAM alone. Nothing is made in `folder`.
    """
    # Not deleted at the end: another stage of a pipeline, which ends by itself, may still write a note there.
    elsewhere = folder.with_name(f"{folder.name}-least")
    if paths := options.get("nvme_path"):
        options["nvme_path"] = [str(elsewhere / str(drive)) for drive in range(len(paths))]
    options = {budget_name: 1, "vocabulary": "whole"} | options | {"resume": "restart"}
    try:
        start(job, placement, elsewhere, **options).destroy(remove=True)
    except offload.BudgetError as error:
        match = re.search(r"the least that works is [^(]*\((\d+) bytes\)", str(error))
        assert match is not None
        return int(match[1])
    return 0


def budget(
    job: Job, placement: tuple[str, str], budget_name: str, above: float | None, folder: Path, **options: Any
) -> dict[str, int]:
    """Returns an option: the budget `which`, `above` times the least above it; none if `above` is None."""
    if above is None:
        return {}
    lowest = least(job, placement, folder, budget_name, **options)
    if budget_name == "device_memory":
        lowest += room_for(job, 1, rank_and_size()[1])  # two units are in use at a time
    return {budget_name: int(lowest * (1 + above)) // PAGE * PAGE + PAGE}
