"""Where one of two ranks is killed, the other ends and names it; both resume the same step, bit for bit.

A rank that does not notice waits for days, and the timeout of these tests ends it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import RankError
from offload.swapper.store import Store
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, die, use_queue
from tests.support.oracle import Job, assert_same_tensors, processes, weights_of
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import free_port, meet, start
from tests.support.sampling import drawn

DISK = ("nvme", "nvme")
JOB = models.GPT2._replace(loss=language_rows_loss, steps=24, dtype="bf16")
pytestmark = pytest.mark.timeout(900)


class Run:
    """Two processes that train `JOB`, from the last step that both hold to the end or a kill."""

    def __init__(
        self, folder: Path, late: float = 0.0, dies: tuple[int, int] | None = None, job: Job = JOB, **options: Any
    ) -> None:
        self.log, port = folder / "log", free_port()
        self.log.mkdir(parents=True, exist_ok=True)
        arguments = [(rank, port, job, folder, late, dies, options) for rank in range(2)]
        self.ranks = [processes().Process(target=_train, args=each, daemon=True) for each in arguments]
        for process in self.ranks:
            process.start()

    def wait_for_a_step(self) -> None:
        """Until rank 0 has told of two steps of this run: the first of them is committed by then."""
        seen = len(self.steps())
        while len(self.steps()) < seen + 2 and self.ranks[0].is_alive():
            time.sleep(0.005)

    def steps(self) -> list[Any]:
        path = self.log / "steps"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kill(self, rank: int) -> None:
        self.ranks[rank].kill()

    def end(self) -> None:
        """Wait for both."""
        try:
            for process in self.ranks:
                process.join()
        finally:
            for process in self.ranks:
                process.kill()  # after the timeout

    def output_of(self, rank: int) -> str:
        """The error with which a rank ended, and forget it."""
        path = self.log / f"error{rank}"
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return text

    def resumed(self) -> list[int]:
        """The step from which each rank went on, for each start."""
        return [json.loads((self.log / f"resumed{rank}").read_text()) for rank in range(2)]


def _train(
    rank: int,
    port: int,
    job: Job,
    folder: Path,
    late: float,
    dies: tuple[int, int] | None,
    options: dict[str, Any],
) -> None:
    meet(rank, 2, port)
    logging.disable(logging.CRITICAL)
    if late:
        use_queue(pytest.MonkeyPatch(), lambda: LateQueue(os.getpid(), late))
    if dies is not None and dies[0] == rank:
        _die_at(dies[1])
    engine = start(job, DISK, folder, resume="auto", **options)
    log = folder / "log"
    (log / f"resumed{rank}").write_text(json.dumps(engine.global_steps))
    try:
        while engine.global_steps < job.steps:
            step = engine.global_steps
            loss = job.loss(engine, step, 0)
            engine.backward(loss)
            mean = engine.mean(float(loss.detach()))
            engine.step()
            if rank == 0:
                with (log / "steps").open("a") as lines:
                    print(json.dumps([step, mean, engine.get_global_grad_norm()]), file=lines, flush=True)
        torch.save(weights_of(engine), log / f"weights{rank}")
        engine.destroy(remove=True)
    except RankError as error:
        (log / f"error{rank}").write_text(str(error))
        engine.destroy()


def _die_at(epoch: int) -> None:
    """Kill this process when it is about to commit `epoch`: the other rank may have committed it."""
    commit = Store.commit

    def commit_or_die(self: Store, number: int, contents: Any) -> None:
        if number == epoch:
            time.sleep(0.3)  # the other one commits
            die()
        commit(self, number, contents)

    Store.commit = commit_or_die  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, torch.Tensor]]:
    run = Run(tmp_path_factory.mktemp("unbroken"))
    run.end()
    return run.steps(), torch.load(run.log / "weights0", weights_only=True)


def check(run: Run, unbroken: tuple[list[Any], dict[str, torch.Tensor]]) -> None:
    """Every step, those that ran twice too, gave what it gave in the unbroken run; so did all weights on both ranks."""
    steps, weights = unbroken
    assert {step: rest for step, *rest in run.steps()} == {step: rest for step, *rest in steps}
    assert all(line in steps for line in run.steps())
    for rank in range(2):
        mine = torch.load(run.log / f"weights{rank}", weights_only=True)
        assert_same_tensors(mine, weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize("late", [0.0, 0.01])
@pytest.mark.works("Several ranks", "SIGKILL of one rank, resume of all", "right")
def test_killed_at_any_moment(late: float, unbroken: Any, tmp_path: Path) -> None:
    chance = random.Random(int(1000 * late))
    for kill in drawn(range(2), 1):
        run = Run(tmp_path, late)
        run.wait_for_a_step()
        time.sleep(chance.uniform(0, 0.15))
        victim = (kill + int(100 * late)) % 2
        run.kill(victim)
        run.end()
        message = run.output_of(1 - victim)
        assert re.match(rf"rank {victim} \(process \d+ on .*\) was killed or has crashed\. ", message), message
        one, other = run.resumed()
        assert one == other
    run = Run(tmp_path, late)
    run.end()
    assert run.resumed()[0] == run.resumed()[1] > 0
    check(run, unbroken)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.works("Several ranks", "SIGKILL of one rank at 30 random moments of one run", "right")
def test_killed_at_thirty_random_moments(tmp_path: Path) -> None:
    """With `-s` it prints the seconds in which the other rank has ended."""
    job, chance, seconds = JOB._replace(steps=300), random.Random(30), []
    whole = Run(tmp_path / "whole", job=job)
    whole.end()
    expected = whole.steps(), torch.load(whole.log / "weights0", weights_only=True)
    for _ in range(30):
        run = Run(tmp_path / "killed", job=job)
        run.wait_for_a_step()
        time.sleep(chance.uniform(0, 0.15))
        victim = chance.randrange(2)
        run.kill(victim)
        killed = time.monotonic()
        run.end()
        seconds.append(time.monotonic() - killed)
        message = run.output_of(1 - victim)
        assert re.match(rf"rank {victim} \(process \d+ on .*\) was killed or has crashed\. ", message), message
        one, other = run.resumed()
        assert one == other
    print("seconds:", sorted(round(each, 2) for each in seconds))
    run = Run(tmp_path / "killed", job=job)
    run.end()
    assert run.resumed()[0] == run.resumed()[1] > 30
    check(run, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["Muon", "torch.optim.Adafactor"])
def test_killed_while_ranks_step_parameters_together(optimizer: str, tmp_path: Path) -> None:
    """The other rank ends, whatever part of a parameter it waits for, and both go on from the same step."""
    job = JOB._replace(optimizer=optimizer, lr=1e-3, params=(), steps=14)
    whole = Run(tmp_path / "whole", job=job)
    whole.end()
    expected = whole.steps(), torch.load(whole.log / "weights0", weights_only=True)
    chance = random.Random(3)
    for victim in drawn(range(2), 1):
        run = Run(tmp_path / "killed", 0.005, job=job)
        run.wait_for_a_step()
        time.sleep(chance.uniform(0, 0.1))
        run.kill(victim)
        run.end()
        message = run.output_of(1 - victim)
        assert re.match(rf"rank {victim} \(process \d+ on .*\) was killed or has crashed\. ", message), message
    run = Run(tmp_path / "killed", 0.005, job=job)
    run.end()
    assert run.resumed()[0] == run.resumed()[1] > 0
    check(run, expected)


def test_killed_between_the_commits_of_the_ranks(unbroken: Any, tmp_path: Path) -> None:
    """The rank that is ahead takes its commit back, and what it then writes is never taken for it."""
    for dies, begins in (((1, 5), 0), ((0, 6), 4), ((1, 7), 5), (None, 6)):
        run = Run(tmp_path, dies=dies)
        run.end()
        assert run.resumed() == [begins, begins]
        if dies is not None:
            assert f"rank {dies[0]} " in run.output_of(1 - dies[0])
    check(run, unbroken)


def test_killed_within_a_window(unbroken: Any, tmp_path: Path) -> None:
    """With a commit every fifth step: the steps since the last one are lost on both, and no other."""
    for victim in (1, 0):
        run = Run(tmp_path, durability={"every": 5})
        before = len(run.steps())
        while len(run.steps()) < before + 8 and run.ranks[0].is_alive():
            time.sleep(0.005)
        done = run.steps()[-1][0] + 1
        run.kill(victim)
        run.end()
        assert f"rank {victim} " in run.output_of(1 - victim)
        begun = run.resumed()[0]
        assert run.resumed() == [begun, begun]
        assert done - begun >= 8
    run = Run(tmp_path, durability={"every": 5})
    run.end()
    last = run.resumed()
    assert last[0] == last[1] and last[0] % 5 == 0 and done - 5 <= last[0] < JOB.steps
    check(run, unbroken)
