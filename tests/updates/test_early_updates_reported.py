"""The log of a run and its report say how many updates under the backward held, and how many came to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.report.figures import figures
from offload.report.log import read_log
from offload.report.page import page
from tests.support import models
from tests.support.early_updates import counts, train_step
from tests.support.oracle import start

CLIPPED = 2
"""The step that clips."""


@pytest.mark.parametrize("speculate", [True, False])
def test_each_update_that_held_or_did_not_is_counted(tmp_path: Path, speculate: bool) -> None:
    job = models.GPT2._replace(dtype="bf16", steps=4, clip=0.0)
    log = tmp_path / "log.jsonl"
    engine = start(job, ("nvme", "nvme"), tmp_path, speculate=speculate, log=str(log))
    for step in range(job.steps):
        if step == CLIPPED:
            engine.clip_grad_norm_(1e-3)
        train_step(engine, job, step)
    made = counts(engine)
    engine.destroy()
    found = read_log(log)
    seen = [(values.get("early_updates"), values.get("early_updates_dropped")) for values in found.steps]
    shown = page(found, figures(found), None)
    if not speculate:
        assert seen == [(None, None)] * job.steps and "under the backward" not in shown
        return
    hits, misses = (sum(int(count or 0) for count in column) for column in zip(*seen, strict=True))
    assert (hits, misses) == (made.hits, made.misses)
    assert [bool(dropped) for _, dropped in seen] == [step == CLIPPED for step in range(job.steps)]
    assert hits > 0
    assert f"Of updates under the backward, {hits} held and {misses} came to nothing." in shown
