"""Where a rank is killed, ends alone or is cut off, the others end and name it; all resume one step, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offload
from offload import testing
from offload.distributed import process_group
from offload.distributed.process_group import BoundedStore, Heartbeat
from offload.errors import ConfigError, EngineFailed, IoError, OffloadError, RankError
from offload.notices import exception_line
from tests.support import models
from tests.support.drives.fault_injection import die
from tests.support.oracle import Job, assert_same_tensors, processes, train_step, weights_of
from tests.support.ranks import sequence_parallel as sp
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_jobs import JOBS, language_rows_loss
from tests.support.ranks.rank_pool import RankPool, free_port, meet, rank_and_size, start

DISK = ("nvme", "nvme")
JOB = models.GPT2._replace(loss=language_rows_loss, steps=5, dtype="bf16")
pytestmark = pytest.mark.timeout(900)


class Run:
    """Two processes that train `JOB`, from the last step that both hold to the end or a kill."""

    def __init__(
        self, folder: Path, dies: tuple[int, int] | None = None, in_step: bool = False, job: Job = JOB, **options: Any
    ) -> None:
        """A rank `dies` when it is about to commit a step, or `in_step`, between its forward and its backward."""
        self.log, port = folder / "log", free_port()
        self.log.mkdir(parents=True, exist_ok=True)
        arguments = [(rank, port, job, folder, dies, in_step, options) for rank in range(2)]
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
    rank: int, port: int, job: Job, folder: Path, dies: tuple[int, int] | None, in_step: bool, options: dict[str, Any]
) -> None:
    meet(rank, 2, port)
    logging.disable(logging.CRITICAL)
    if dies is not None and dies[0] == rank and not in_step:
        _die_at(dies[1])
    engine = start(job, DISK, folder, resume="auto", **options)
    log = folder / "log"
    (log / f"resumed{rank}").write_text(json.dumps(engine.global_steps))
    try:
        while engine.global_steps < job.steps:
            step = engine.global_steps
            loss = job.loss(engine, step, 0)
            if in_step and dies == (rank, step):
                die()
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

    def commit_or_die(commit: Any, store: Any, number: int, contents: Any) -> None:
        if number == epoch:
            time.sleep(0.3)  # the other one commits
            die()
        commit(store, number, contents)

    testing.intercept(pytest.MonkeyPatch(), "store.commit", commit_or_die)


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
        left, right = run.resumed()
        assert left == right
    print("seconds:", sorted(round(each, 2) for each in seconds))
    run = Run(tmp_path / "killed", job=job)
    run.end()
    assert run.resumed()[0] == run.resumed()[1] > 30
    check(run, expected)


@pytest.mark.works("Several ranks", "SIGKILL of one rank, resume of all", "right")
def test_killed_between_the_commits_of_the_ranks_and_within_a_window(unbroken: Any, tmp_path: Path) -> None:
    """The rank that is ahead takes its commit back, and what it then writes is never taken for it.

    With a commit every third step, the steps since the last one are lost on both, and no other.
    """
    for dies, every, begins in (((1, 3), 1, 0), ((0, 4), 1, 2), ((1, 4), 3, 3), (None, 3, 3)):
        run = Run(tmp_path, dies, in_step=every > 1, durability={"every": every})
        run.end()
        assert run.resumed() == [begins, begins]
        if dies is not None:
            message = run.output_of(1 - dies[0])
            assert re.match(rf"rank {dies[0]} \(process \d+ on .*\) was killed or has crashed\. ", message), message
    check(run, unbroken)


NET = Job(tp.Net, tp.one_loss, lr=3e-4)


def start_sharing(kind: str, folder: Path, **options: Any) -> offload.Engine:
    if kind == "sequence":
        return sp.start(sp.JOBS["llama"], 2, DISK, folder, **options)
    return tp.start(NET, "weights", 2, DISK, folder, **options)


def edit_beside_a_lost_rank(folder: Path) -> None:
    """Rank 0 fails with its first commit; rank 1 edits, and ends."""
    if rank_and_size()[0] == 0:
        with pytest.MonkeyPatch.context() as patches, pytest.raises(IoError):
            testing.replace(patches, "store.commit", fail_to_commit)
            start_sharing("tensor", folder)
    else:
        engine = start_sharing("tensor", folder)
        weight = engine.module.head.weight
        offload.safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
        with contextlib.suppress(RankError):
            engine.destroy()


def fail_to_commit(*_: Any) -> None:
    raise IoError("commit", 0, 4096, errno.EIO, "write")


def begin_again(folder: Path) -> None:
    engine = start_sharing("tensor", folder, resume="auto")
    assert engine.global_steps == 0 and engine.module.head.weight.any()
    engine.destroy(remove=True)


def test_an_edit_is_committed_by_all_ranks_or_none(ranks: RankPool, tmp_path: Path) -> None:
    """Another rank may have ended before its last commit, to which a resume then goes back."""
    for function in (edit_beside_a_lost_rank, begin_again):
        ranks.run(function, tmp_path)


def edit_beside_a_lost_step(folder: Path) -> None:
    """Rank 0 fails with the commit of the second step, which rank 1 makes; then rank 1 edits two units, and ends."""
    rank, _ = rank_and_size()
    engine = start_sharing("tensor", folder)
    losses = [train_step(engine, NET, step) for step in range(2)]
    (folder / f"losses{rank}").write_text(repr(losses))
    if rank == 0:
        with pytest.MonkeyPatch.context() as patches, contextlib.suppress(OffloadError):
            testing.replace(patches, "store.commit", fail_to_commit)
            engine.destroy()
        return
    for weight in (engine.module.head.weight, engine.module.embed.weight):
        offload.safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
    assert not offload.safe_get_full_fp32_param(engine.module.head.weight).any()
    with contextlib.suppress(RankError):
        engine.destroy()


def repeat_the_lost_step(folder: Path) -> None:
    engine = start_sharing("tensor", folder, resume="auto")
    assert engine.global_steps == 1
    again = train_step(engine, NET, 1)
    engine.destroy(remove=True)
    assert (folder / f"losses{rank_and_size()[0]}").read_text().endswith(f", {again!r}]")


def test_an_edit_takes_nothing_from_the_step_that_another_rank_resumes_from(ranks: RankPool, tmp_path: Path) -> None:
    """It is written where the step before last is."""
    for function in (edit_beside_a_lost_step, repeat_the_lost_step):
        ranks.run(function, tmp_path)


def end_in_a_batch(kind: str, how: str, folder: Path) -> None:
    """Rank 0 ends after an error in the middle of a batch, while rank 1 answers nobody."""
    engine = start_sharing(kind, folder)
    ended = folder / "ended"
    if rank_and_size()[0] == 0:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                sys.exit(1) if how == "exit" else engine.destroy()
        testing.leave(engine)
        ended.touch()
        return
    while not ended.exists():
        time.sleep(0.01)
    with pytest.raises(RankError, match="its engine was closed at step 0, after KeyboardInterrupt"):
        engine.destroy()


@pytest.mark.parametrize(("kind", "how"), [("tensor", "destroy"), ("sequence", "exit")])
def test_an_end_after_an_error_waits_for_nobody(kind: str, how: str, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(end_in_a_batch, kind, how, tmp_path)


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


def stops(folder: Path) -> str:
    """A thread of rank 0 fails, and its script goes on to `destroy()`. Returns the `RankError` of rank 1."""
    job = JOBS["gpt2"]
    engine = start(job, ("cpu", "cpu"), folder)
    try:
        if rank_and_size()[0] == 0:
            testing.fail(engine, ValueError(WORDS))
        engine.backward(job.loss(engine, 0, 0))
        engine.step()
    except RankError as error:
        return str(error)
    except EngineFailed:
        pass
    finally:
        with contextlib.suppress(OffloadError):
            engine.destroy()
    return ""


def test_a_rank_that_an_error_has_stopped_tells_which(ranks: RankPool, tmp_path: Path) -> None:
    nothing, told = ranks.run(stops, tmp_path)
    assert nothing == "" and re.search(rf"was closed at step 0, after {LINE}\. Rank 1 cannot", told), told


def test_a_rank_whose_process_ends_by_an_exception_tells_which(ranks: RankPool, tmp_path: Path) -> None:
    nothing, told = ranks.run(one_fails, tmp_path, True)
    closed = rf"rank 0 \(process \d+ on .*\) has ended: its engine was closed at step 0, after {LINE}\. Rank 1 cannot"
    assert nothing == "" and re.match(closed, told), told


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


LONGEST = 3.0
"""Seconds for a call: many times what one takes on a busy machine."""
SILENT = f"torch's key-value store has not answered for {LONGEST:g} s"


class Cable:
    """A connection to a port that carries bytes until it is cut, and then swallows them: no end is told of it."""

    def __init__(self, port: int) -> None:
        self.cut = threading.Event()
        self._port, self._ends = port, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:  # closed
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self.cut.is_set():
                    target.sendall(data)
        except OSError:  # closed
            return

    def close(self) -> None:
        """Ends the connection, and with it a call of torch's that still waits."""
        for end in (self._listener, *self._ends):
            end.close()


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any, Cable]]:
    """torch's own store, a client of it behind a cable, and the cable."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cable = Cable(server.port)
    yield server, dist.TCPStore("127.0.0.1", cable.port, is_master=False, wait_for_workers=False), cable
    for _end in cable._ends:
        _end.shutdown(socket.SHUT_RDWR)  # wakes a call that waits
    cable.close()


def test_a_call_behind_a_cut_cable_ends_and_no_other_is_made(ends: tuple[Any, Any, Cable]) -> None:
    server, client, cable = ends
    store = BoundedStore(client, LONGEST)
    store.set("here", "1")
    assert store.get("here") == "1" and store.get("nowhere") is None
    cable.cut.set()
    with pytest.raises(RuntimeError, match=SILENT):
        store.get("here")
    cable.cut.clear()  # torch still waits for the answer that was lost
    with pytest.raises(RuntimeError, match=SILENT):
        store.set("later", "1")
    store.close()
    assert not server.check(["later"])


def test_a_rank_that_is_cut_off_says_so_and_ends(ends: tuple[Any, Any, Cable], monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "ranks.heartbeat_store", functools.partial(BoundedStore, longest=LONGEST))
    _, client, cable = ends
    pulse = Heartbeat(client, 0, 2)
    pulse.places = [("here", 1), ("there", 1)]
    assert pulse.gone(60.0, [1]) == []
    cable.cut.set()
    assert pulse.gone(60.0, [1]) == [f"{SILENT}: this machine, or the one that serves the store, is cut off"]
    with pytest.raises(RankError, match=f"{SILENT}, so rank 0 cannot meet the other ranks"):
        pulse.meet()
    pulse.close("over")


def test_a_decision_of_rank_0_is_not_awaited_for_ever(ends: tuple[Any, Any, Cable]) -> None:
    _, client, cable = ends
    store = BoundedStore(client, LONGEST)
    assert process_group._decided(store, "choose") is None
    cable.cut.set()
    with pytest.raises(RankError, match=f"rank 0 has ended before it could choose: {SILENT}"):
        process_group._decided(store, "choose")
    store.close()


def test_a_port_that_is_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f":{port}: .*another process has this port: set MASTER_PORT to a free"):
            process_group.meet_others()
    assert not dist.is_initialized()
