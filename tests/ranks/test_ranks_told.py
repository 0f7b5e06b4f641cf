"""An exception of the user's that ends one rank is named by the errors of the others, whoever closes the engine."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest
import torch

from offload import testing
from offload.distributed.process_group import Heartbeat
from offload.errors import OffloadError, RankError
from offload.notices import exception_line
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start

WORDS = "the batch\nis empty" + " and empty" * 100
LINE = r"ValueError: the batch is empty and empty [ a-z]*…"


def one_fails(folder: Path, at_exit: bool) -> str:
    """Rank 0 raises in its loop, and ends in a `finally`, or as its process does. Returns the `RankError`."""
    job = JOBS["gpt2"]
    engine = start(job, ("none", "none"), folder)
    try:
        if rank_and_size()[0] == 0:
            try:
                raise ValueError(WORDS)
            finally:
                if not at_exit:
                    engine.destroy()
        engine.backward(job.loss(engine, 0, 0))
        engine.step()
    except RankError as error:
        return str(error)
    except ValueError as error:
        sys.last_value = error  # as Python does before it calls exit handlers
        testing.leave(engine)
        del sys.last_value
    finally:
        with contextlib.suppress(OffloadError):
            engine.destroy()
    return ""


def test_a_rank_that_closes_its_engine_in_a_finally_tells_why(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(one_fails, tmp_path, False):
        assert re.search(rf"rank 0 closes its engine, after {LINE}; rank 1 is at step\(\)\.", told), told


def test_a_rank_whose_process_ends_by_an_exception_tells_which(ranks: RankPool, tmp_path: Path) -> None:
    nothing, told = ranks.run(one_fails, tmp_path, True)
    closed = rf"rank 0 \(process \d+ on .*\) has ended: its engine was closed at step 0, after {LINE}\. Rank 1 cannot"
    assert nothing == "" and re.match(closed, told), told


def test_each_rank_of_some_is_told_with_its_own_exception() -> None:
    """A rank of tensor parallelism meets those with the same part alone, whose numbers do not follow each other."""
    store = torch.distributed.HashStore()
    pulses = [Heartbeat(store, rank, 4) for rank in (2, 3)]
    pulses[1].explain("ValueError")
    assert pulses[0].tell([1, 3], ["is at step()", "closes"]) == "rank 1 is at step(); rank 3 closes, after ValueError"
    pulses[1].explain(
        "offload.errors.RankError: the ranks have reached different calls: rank 1 is at step(); rank 3 closes"
    )
    assert pulses[0].tell([1, 3], ["is at step()", "closes"]) == "rank 1 is at step(); rank 3 closes"
    for pulse in pulses:
        pulse.close("over")


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyboardInterrupt(), r"KeyboardInterrupt"),
        (ValueError(WORDS), LINE),
        (ValueError("x" * 1000), r"ValueError: …"),
        (Wordless(), r".*Wordless: <exception str\(\) failed>"),
    ],
)
def test_an_exception_is_told_on_one_short_line(error: BaseException, line: str) -> None:
    told = exception_line(error)
    assert re.fullmatch(line, told) and len(told) <= 300
