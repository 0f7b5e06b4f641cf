"""A drive budget decides how often a run commits; it keeps its bits, its count over kills, and what was promised."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.config import load_config
from offload.errors import EngineFailed
from offload.layout.drive_budget import (
    LONGEST,
    Account,
    DriveBudget,
    Written,
    commit_is_due,
    ends,
    excess,
    opened,
    spend,
    steps_between,
)
from offload.sizes import format_decimal
from offload.states import Tier
from tests.support.oracle import Job, assert_same_tensors, dies, least_host_memory, run, start, train_step, weights_of
from tests.support.ranks.rank_pool import RankPool, rank_and_size

DAY = 86400.0
STATES = 12 * 2 * 128 * 128
"""Bytes of weights and moments in fp32, in whole pages."""


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))


def loss(model: nn.Module, step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 8, 128, generator=generator)
    error: torch.Tensor = model(inputs) - targets
    return error.square().mean()


JOB = Job(model, loss)


class Clock:
    """The wall clock of the engine's account."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        testing.replace(monkeypatch, "clock.drive_budget", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def begin(folder: Path, budget: str, placement: tuple[str, str] = ("nvme", "nvme"), **options: Any) -> offload.Engine:
    return start(JOB, placement, folder, drive_budget=budget, host_memory="64MiB", **options)


def written(engine: offload.Engine) -> int:
    return sum(drive.run_bytes for drive in engine.drive_writes())


def committed(engine: offload.Engine) -> int:
    engine.synchronize()
    store = testing.inspect(engine).store
    assert store is not None and store.durable is not None
    return store.durable.step


def used(engine: offload.Engine, budget: float) -> float:
    """Returns the bytes of the account."""
    worker = testing.inspect(engine).update_worker
    assert worker is not None and worker.commits.budget_share is not None
    return worker.commits.budget_share * budget


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# -- the decision --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes", "seconds"),
    [
        ("1TB/day", 10**12, DAY),
        ("600TB/5y", 600 * 10**12, 5 * 365.25 * DAY),
        ("600 TBW / 5 years", 600 * 10**12, 5 * 365.25 * DAY),
        ("20GiB/h", 20 * 2**30, 3600),
        ("7TB/2weeks", 7 * 10**12, 14 * DAY),
    ],
)
def test_a_budget_is_bytes_over_a_time(text: str, nbytes: int, seconds: float) -> None:
    assert DriveBudget.of(text) == (text, nbytes, seconds)
    block = {"drive_budget": text}
    assert load_config({"train_batch_size": 1, "offload": block}).offload.drive_budget == text


@pytest.mark.parametrize(
    "text", ["1TB", "1TB/", "/day", "1TB/fortnight", "0B/day", "5/day", "1TB/0h", "1TB/day/day", "", "5", 5]
)
def test_what_is_no_budget_is_refused(text: Any) -> None:
    with pytest.raises(offload.errors.ConfigError, match=r"offload\.drive_budget expected bytes over a time, such as"):
        load_config({"train_batch_size": 1, "offload": {"drive_budget": text}})


def test_commits_take_what_steps_leave_of_a_budget() -> None:
    budget, chance = DriveBudget.of("1TB/day"), random.Random(0)
    for each_step, at_commit in ((0.0, 2e10), (3e8, 2e10), (5e8, 1e11), (0.0, 5e7)):
        account, total, begun = opened(0.0), 0.0, 0.0
        for _ in range(3000):
            begun += chance.uniform(40, 250)
            account = spend(account, budget, begun, each_step, at_commit)
            total += each_step
            if commit_is_due(account, at_commit):
                account, total = (
                    spend(account._replace(committed=begun), budget, begun, at_commit, at_commit),
                    total + at_commit,
                )
            assert total <= budget.rate * begun + 1
        most = min(budget.rate * begun, 3000 * (each_step + at_commit))
        assert total >= 0.95 * most - 2 * at_commit, "the budget is used"


def test_a_run_that_was_stopped_for_a_week_does_not_catch_up() -> None:
    budget = DriveBudget.of("1TB/day")
    account = spend(opened(0.0), budget, 7 * DAY, 0.0, 1e10)
    assert account.credit == 2e10 and account.spent == 0 and account.since == 7 * DAY
    assert spend(account, budget, 6 * DAY, 0.0, 1e10).credit == 2e10, "a clock that was set back"


def test_a_clock_that_was_ahead_stops_no_commit() -> None:
    budget = DriveBudget.of("1B/day")
    account = spend(opened(1000 * DAY), budget, 3 * DAY, 0.0, 1e10)
    assert account.since == account.committed == 3 * DAY
    assert not commit_is_due(spend(account, budget, 3.5 * DAY, 0.0, 1e10), 1e10)
    assert commit_is_due(spend(account, budget, 4 * DAY, 0.0, 1e10), 1e10)


def test_a_commit_is_made_once_a_day_whatever_the_budget() -> None:
    budget = DriveBudget.of("1GB/day")
    account = spend(opened(0.0), budget, LONGEST - 1, 5e12, 1e12)
    assert not commit_is_due(account, 1e12)
    assert commit_is_due(spend(account, budget, LONGEST, 0.0, 1e12), 1e12)
    assert commit_is_due(account, 0.0), "a commit that writes no states is not put off"


def test_the_end_of_a_budget_by_hand() -> None:
    budget = DriveBudget.of("1TB/day")
    # 25 GB in each step of 600 s are 3.6 TB a day, and a commit of 0.4 TB a day comes to them.
    assert excess(budget, Written(25e9, 4e11), 600, None) == pytest.approx(3e12 / DAY)
    assert excess(budget, Written(0, 5e9), 600, promised=600) == 0, "720 GB a day"
    assert excess(budget, Written(0, 5e9), 300, promised=300) == pytest.approx(0.44e12 / DAY)
    account = Account(at=21600.0, credit=0, since=0, spent=6e11, committed=0)
    assert (
        ends(account, budget, 1e8) == 4000 and ends(account, budget, 1e6) is None and ends(account, budget, 0) is None
    )
    assert steps_between(budget, Written(0, 1e11), 864) == 10, "ten commits a day"
    assert steps_between(budget, Written(9e9, 1e11), 864) == 100, "0.9 TB a day are left to the steps"
    assert steps_between(budget, Written(10e9, 1e11), 864) == 100, "once a day"
    assert steps_between(budget, Written(0, 9e9), 864) == 1
    assert steps_between(budget, Written(0, 1.2e10), 864) == 2, "each step would write more than the budget"


# -- a run ---------------------------------------------------------------------------------------------


def test_a_budget_is_kept_over_300_steps_with_kills(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, chance = JOB._replace(steps=300), random.Random(0)
    usual = run(job, ("cpu", "cpu"), tmp_path / "usual")
    budget = f"{40 * STATES}B/day"
    kills = sorted(chance.sample(range(5, 300), 8))
    engine, total, begun, resumed, left = begin(tmp_path, budget), 0, clock.now, [], list[int]()

    def write(real: Any, *arguments: Any) -> Any:
        """Writes, or is killed once no write of `left` is left."""
        if left:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("killed")
        return real(*arguments)

    testing.intercept(monkeypatch, "store.write", write)
    while engine.global_steps < job.steps:
        clock.now += chance.uniform(100, 476)  # 300 steps in a day
        killed = False
        try:
            train_step(engine, job, engine.global_steps)
            if chance.random() < 0.1:
                engine.synchronize()
        except EngineFailed:
            killed = True
        if kills and engine.global_steps >= kills[0] and not left:
            kills.pop(0)
            if chance.random() < 0.3:
                left.append(chance.randrange(6))  # in the next commit, which has six writes
            else:
                testing.settle(engine, commit=chance.random() < 0.5)
                killed = True
        if killed:
            left.clear()
            total += written(engine)
            testing.abandon(engine)
            engine = begin(tmp_path, budget, resume="must")
            resumed.append(engine.global_steps)
        allowed = 40 * STATES * (clock.now - begun) / DAY
        assert total + written(engine) <= 1.05 * allowed + STATES + 60_000, "beside the first states"
    weights = weights_of(engine)
    engine.synchronize()
    total += written(engine)
    days = (clock.now - begun) / DAY
    engine.destroy(remove=True)
    assert len(resumed) == 8 and all(step > 0 for step in resumed[1:])
    assert 0.95 * days <= total / (40 * STATES) <= 1.05 * days
    assert_same_tensors(weights, usual.weights)


def killed_in_a_commit(folder: Path) -> None:
    """Trains until the first commit after the start, and kills this process when its states are written."""
    patch = pytest.MonkeyPatch()
    engine = begin(folder, "900TB/h")
    testing.intercept(patch, "store.commit", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    train_step(engine, JOB, 0)
    testing.settle(engine)


def test_a_commit_that_sigkill_ends_has_been_counted(tmp_path: Path) -> None:
    dies(killed_in_a_commit, tmp_path)
    engine = begin(tmp_path, "900TB/h", resume="must")
    assert engine.global_steps == 0
    train_step(engine, JOB, 0)
    # The first weights, a third of the states, and the commit; the counter of the last commit knows the weights alone.
    assert used(engine, 9e14) >= STATES / 3 + STATES > sum(drive.life_bytes for drive in engine.drive_writes())
    engine.destroy(remove=True)


def test_the_count_goes_on_after_an_end_and_after_a_kill(clock: Clock, tmp_path: Path) -> None:
    budget = f"{8 * STATES}B/day"
    engine, total = begin(tmp_path, budget), 0
    shares = []
    for end in ("destroy", "abandon", "destroy", "abandon"):
        for _ in range(4):
            clock.now += 1000
            train_step(engine, JOB, engine.global_steps)
        shares.append(used(engine, 8 * STATES))
        if end == "destroy":
            engine.destroy(remove=False)
        else:
            testing.settle(engine, commit=False)
            testing.abandon(engine)
        total += written(engine)
        engine = begin(tmp_path, budget, resume="must")
    clock.now += 1
    train_step(engine, JOB, engine.global_steps)
    counted = used(engine, 8 * STATES)
    engine.destroy(remove=True)
    assert shares == sorted(shares)
    # Each of four ends and kills may count a 64th of a commit too much, and none too little.
    assert total <= counted <= total + 4 * STATES / 64 + 4096


def test_layers_stay_in_memory_as_far_as_the_budget_has_room(tmp_path: Path) -> None:
    plain = start(JOB, ("nvme", "nvme"), tmp_path / "plain", host_memory="64MiB")
    assert {size.tier for size in testing.inspect(plain).sizes} == {Tier.DISK}
    plain.destroy(remove=True)
    tiers = []
    # 64 MiB have room for all layers, the least that works for none.
    for budget in ("64MiB", least_host_memory(JOB, tmp_path)):
        engine = start(JOB, ("nvme", "nvme"), tmp_path, drive_budget="1TB/day", host_memory=budget)
        tiers.append([size.tier for size in testing.inspect(engine).sizes])
        engine.destroy(remove=True)
    assert set(tiers[0]) == {Tier.HOST} and set(tiers[1]) == {Tier.DISK}


@pytest.mark.parametrize(
    ("durability", "steps"), [("step", list(range(1, 7))), ({"every": 3}, [3, 6])], ids=["step", "every third"]
)
def test_a_promise_is_kept_and_the_end_of_the_budget_said(
    durability: Any, steps: list[int], clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offload")
    engine = begin(tmp_path, f"{30 * STATES}B/day", durability=durability)
    assert any("as the config promises, whatever" in line and "drive_budget" in line for line in engine.notices)
    made = set()
    for step in range(6):
        clock.now += 600
        train_step(engine, JOB, step)
        made.add(committed(engine))
    assert made - {0} == set(steps)
    engine.destroy(remove=True)
    (line,) = said(caplog)
    assert "cannot be kept: steps of 600 s write at least" in line and "of this period are spent in" in line


def test_a_budget_that_is_spent_is_said_to_be(clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin(tmp_path, f"{STATES}B/day", durability="step")
    for step in range(5):
        clock.now += 600
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    lines = said(caplog)
    assert any("cannot be kept" in line for line in lines)
    for line in lines:
        assert "the bytes of this period are spent, and it ends in 23." in line and "in 0 seconds" not in line


def test_without_a_promise_commits_are_put_off_and_said(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offload")
    engine = begin(tmp_path, f"{4 * STATES}B/day")
    assert any("durable as often as" in line and "at least one a day" in line for line in engine.notices)
    made = []
    for step in range(40):
        clock.now += 2160  # 40 a day
        train_step(engine, JOB, step)
        made.append(committed(engine))
    # The first weights, and what a commit writes beside states, come to the ten steps of each commit.
    assert sorted(set(made)) == pytest.approx([0, 15, 25, 36], abs=1)
    assert not said(caplog)
    engine.destroy(remove=False)
    engine = begin(tmp_path, f"{4 * STATES}B/day", resume="must")
    assert engine.global_steps == 40, "an end commits the last step"
    engine.destroy(remove=True)


def test_without_commits_the_first_line_has_what_a_step_writes(tmp_path: Path) -> None:
    engine = start(
        JOB,
        ("nvme", "nvme"),
        tmp_path,
        drive_budget="1TB/day",
        durability="none",
        host_memory=least_host_memory(JOB, tmp_path),
    )
    assert any("1TB/day (drive_budget); a step writes" in line for line in engine.notices)
    engine.destroy(remove=True)
    engine = begin(tmp_path, "1TB/day", durability="none")
    assert any("weights on host, states on host" in line for line in engine.notices), "nothing is written"
    engine.destroy(remove=True)


def test_kept_steps_are_committed_whatever_the_budget(clock: Clock, tmp_path: Path) -> None:
    engine = begin(tmp_path, f"{STATES}B/day", keep_every=4)
    made = set()
    for step in range(9):
        clock.now += 1
        train_step(engine, JOB, step)
        made.add(committed(engine))
    assert made == {0, 4, 8}
    engine.destroy(remove=True)


def test_the_share_of_a_budget_is_a_number_of_each_step(clock: Clock, tmp_path: Path) -> None:
    engine = begin(tmp_path, f"{10 * STATES}B/day", log=str(tmp_path / "log.jsonl"))
    clock.now += 60
    train_step(engine, JOB, 0)
    assert engine.measured["drive_budget_used"] == pytest.approx(1 / 30, abs=0.01), "the first weights"
    engine.destroy(remove=True)


def test_nine_tenths_of_a_budget_are_said_once(clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin(tmp_path, f"{20 * STATES}B/day", durability="step")
    for step in range(21):
        clock.now += 300
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    kept, nearly = said(caplog)
    assert "cannot be kept" in kept
    assert nearly.startswith("9") and re.search("of this period are spent in .*, and it ends in 2", nearly)


def commits_of_a_rank(folder: Path) -> list[int]:
    """Returns the committed step after each of 40 steps on this rank; the clock of the first rank alone goes on."""
    with pytest.MonkeyPatch.context() as patch:
        times = itertools.count(1e9, 0 if rank_and_size()[0] else 2160)
        testing.replace(patch, "clock.drive_budget", lambda: float(next(times)))
        engine = begin(folder, f"{4 * STATES}B/day")
        made = []
        for step in range(40):
            train_step(engine, JOB, step)
            made.append(committed(engine))
        engine.destroy(remove=True)
        return made


def test_the_first_rank_decides_for_all(ranks: RankPool, tmp_path: Path) -> None:
    rank0, rank1 = ranks.run(commits_of_a_rank, tmp_path)
    assert rank0 == rank1 and len(set(rank0)) > 3


# -- bytes by mode -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "room", "options", "numel"),
    [
        (("nvme", "nvme"), False, {"durability": "step"}, 12),
        (("nvme", "nvme"), False, {"durability": {"every": 3}}, 12),
        (("nvme", "nvme"), False, {"durability": "none"}, 12),
        (("nvme", "nvme"), False, {"drive_budget": f"{STATES}B/day"}, 12),
        (("nvme", "nvme"), True, {"durability": "step"}, 12),
        (("nvme", "nvme"), True, {"durability": {"every": 3}}, 4),
        (("nvme", "nvme"), True, {"durability": "none"}, 0),
        (("cpu", "nvme"), True, {"durability": {"every": 3}}, 4),
        (("nvme", "cpu"), True, {"durability": {"every": 3}}, 4),
        (("none", "nvme"), True, {"durability": {"every": 3}}, 4),
        (("cpu", "cpu"), True, {"durability": "step"}, 12),
        (("cpu", "cpu"), True, {"durability": {"every": 3}}, 4),
        (("cpu", "cpu"), True, {"durability": "none"}, 0),
        (("none", "none"), True, {"durability": "step"}, 12),
        (("none", "none"), True, {"durability": {"every": 3}}, 4),
        (("none", "none"), True, {"durability": "none"}, 0),
        # A commit's states, checksums and record in the budget of three steps.
        (("nvme", "nvme"), True, {"drive_budget": f"{STATES + 20_000}B/day"}, 4),
    ],
    ids=str,
)
def test_the_bytes_a_parameter_and_step_of_each_mode(
    placement: tuple[str, str],
    room: bool,
    options: dict[str, Any],
    numel: int,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table of docs/concepts/drive-wear.md. What a commit writes beside states is not counted here."""
    memory = "64MiB" if room else least_host_memory(JOB, tmp_path)
    engine = start(JOB, placement, tmp_path, host_memory=memory, **options)
    counted = [0]

    def write(real: Any, store: Any, unit: int, state: Any, slot: int, start: int, buffer: memoryview) -> Any:
        counted[0] += len(buffer)
        return real(store, unit, state, slot, start, buffer)

    testing.intercept(monkeypatch, "store.write", write)
    for step in range(9):
        if step == 3:
            engine.synchronize()
            counted[0] = 0
        clock.now += DAY / 3
        train_step(engine, JOB, step)
    engine.synchronize()
    assert counted[0] == 6 * numel * STATES / 12
    engine.destroy(remove=True)


# -- damage --------------------------------------------------------------------------------------------


GARBAGE = {
    "nothing": b"",
    "zeros": bytes(512),
    "noise": random.Random(0).randbytes(512),
    "no number": b'{"at": "now"}',
    "a huge number": b'{"at": 1%s, "credit": 0, "since": 0, "spent": 0, "committed": 0, "life": 0}' % (b"0" * 400),
    "a credit without end": b'{"at": 0, "credit": 1e300, "since": 0, "spent": -1e300, "committed": 0, "life": 0}',
    "deep": b"[" * 300,
    "long": b" " * (1 << 21),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_damaged_account_begins_anew_without_credit(
    garbage: str, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = 4 * STATES
    begin(tmp_path, f"{budget}B/day").destroy(remove=False)
    (tmp_path / "default" / "rank0" / "budget").write_bytes(GARBAGE[garbage])
    engine = begin(tmp_path, f"{budget}B/day", resume="must")
    (line,) = [line for line in said(caplog) if "is no account of a drive budget" in line]
    assert "this run's count begins anew" in line
    made = set()
    for step in range(12):
        clock.now += DAY / 40
        train_step(engine, JOB, step)
        made.add(committed(engine))
        assert written(engine) <= budget * (step + 1) / 40 + 60_000, "what the budget allows from here on"
    assert made == {0, 10} or made == {0, 11}
    engine.destroy(remove=True)


def test_a_bit_that_flips_in_an_account_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path, "1TB/day").destroy(remove=False)
    path = tmp_path / "default" / "rank0" / "budget"
    content = bytearray(path.read_bytes())
    content[content.index(b'"credit": ') + 11] ^= 1
    path.write_bytes(content)
    begin(tmp_path, "1TB/day", resume="must").destroy(remove=True)
    assert sum("its checksum is wrong" in line for line in said(caplog)) == 1


# -- before a run --------------------------------------------------------------------------------------


PLAN = ("plan", "--parameters", "350M", "--layers", "8", "--batch-size", "1", "--accumulation", "1")


def plan(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*PLAN, "--gpu", "4GB", "--drive", "7GB/s,5GB/s,2TB", *arguments])
    assert done.exit_code == 0, done.output
    return {"text": " ".join(done.stdout.split())} if "--json" not in arguments else json.loads(done.stdout)


def test_a_plan_says_how_often_a_run_commits() -> None:
    given = ("--ram", "32GB", "--drive-budget", "1TB/day")
    report = plan(*given, "--json")
    seconds, budget = report["step"]["seconds"], report["drive_budget"]
    # 12 bytes of each parameter, by hand: 1 TB a day is 11.57 MB a second.
    assert budget["each_step_bytes"] == 0 and budget["at_commit_bytes"] == pytest.approx(12 * 350e6, rel=0.02)
    assert budget["commit_every"] == pytest.approx(budget["at_commit_bytes"] / (1e12 / DAY) / seconds, rel=0.02)
    assert report["step"]["written_bytes"] == pytest.approx(seconds * 1e12 / DAY, rel=0.05)
    text = plan(*given)["text"]
    assert " budget 1TB/day kept: " in text and f"a commit of 4.2 GB every {budget['commit_every']:,} steps" in text
    assert "weights on RAM, states on RAM" in text


def test_a_plan_says_when_a_budget_ends() -> None:
    report = plan("--ram", "32GB", "--drive-budget", "1TB/day", "--durability", "step", "--json")
    a_second = report["drive_budget"]["bytes_per_second"] + report["drive_budget"]["excess_bytes_per_second"]
    assert a_second == pytest.approx(report["step"]["written_bytes"] / report["step"]["seconds"], rel=0.02)
    text = plan("--ram", "32GB", "--drive-budget", "1TB/day", "--durability", "step")["text"]
    assert f"1TB/day cannot be kept: {format_decimal(DAY * a_second)[:4]}" in text and "are spent after" in text


def test_a_plan_refuses_a_budget_that_is_none() -> None:
    done = CliRunner().invoke(app, [*PLAN, "--gpu", "4GB", "--drive", "7GB/s,5GB/s", "--drive-budget", "1TB"])
    assert done.exit_code == 2 and "expected bytes over a time" in done.output


def test_a_plan_with_a_large_budget_commits_each_step() -> None:
    given = ("--ram", "32GB", "--drive-budget", "900TB/h")
    report = plan(*given, "--json")
    assert report["drive_budget"]["commit_every"] == 1 and report["drive_budget"]["excess_bytes_per_second"] == 0
    assert report["step"]["written_bytes"] == pytest.approx(12 * 350e6, rel=0.02)
    assert "a day to a drive; each step is committed" in plan(*given)["text"]
