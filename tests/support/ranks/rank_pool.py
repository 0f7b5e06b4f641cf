"""Real processes that train together, over gloo.

    pool            ranks of its own, for work that leaves something behind in them
    shared_pool     the ranks of this process: started once, for all its tests that leave nothing behind

A pool is given one piece of work after the other: importing torch takes longer than most of them.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offload
from tests.support.oracle import Job, Result, processes, weights_of
from tests.support.oracle import start as start

_ports = itertools.count()


def free_port() -> int:
    """Returns a free port below those that the kernel gives to connections, so that none takes it before its use."""
    while True:
        port = 10_000 + (97 * os.getpid() + next(_ports)) % 20_000  # others begin elsewhere
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def meet(rank: int, size: int, port: int) -> None:
    """Sets the environment by which ranks find each other, as torchrun does."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    meet(rank, size, port)
    dist.init_process_group("gloo")
    serve(pipe)


def serve(pipe: Any) -> None:
    """Calls what comes through `pipe`, on a rank that has met the others, until None comes."""
    while (work := pipe.recv()) is not None:
        function, arguments = work
        try:
            pipe.send((True, function(*arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


PATIENCE = 200
"""Seconds for one piece of work; less than a test has, so that the next one finds ranks that do not hang."""


class RankPool:
    """`size` ranks; `run` calls a module-level function on each and returns what each returned."""

    target: Callable[..., None] = staticmethod(_serve)
    """The life of a rank: called with its number, their number, the port where they meet, and its end of a pipe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(self.size):
            mine, theirs = processes().Pipe()
            process = processes().Process(target=self.target, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Raises AssertionError with the traceback of every rank that raised, or after `PATIENCE` seconds.

        Ranks that wait for ever are killed then, and others started for the next call.
        """
        if not self.alive():
            self._start_anew()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        deadline = time.monotonic() + PATIENCE
        answers = {
            rank: pipe.recv()
            for rank, pipe in enumerate(self.pipes)
            if pipe.poll(max(0.0, deadline - time.monotonic()))
        }
        wrong = [f"rank {rank}: {answer}" for rank, (right, answer) in answers.items() if not right]
        if waiting := [rank for rank in range(self.size) if rank not in answers]:
            wrong.append(f"ranks {waiting} have not come back from {function.__name__} within {PATIENCE} s")
            self._start_anew()
        assert not wrong, "\n".join(wrong)
        return [answer for _, answer in answers.values()]

    def run_to_the_death(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Runs a function that ends every process; the next call starts others."""
        with contextlib.suppress(AssertionError, EOFError, OSError):
            self.run(function, *arguments)
        for process in self.processes:
            process.join(60)
        assert not self.alive()

    def alive(self) -> bool:
        """Tells whether every rank runs, as far as its process is concerned."""
        return all(process.is_alive() for process in self.processes)

    def _start_anew(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._start()

    def close(self) -> None:
        """Ends the processes, also such as wait for each other for ever."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


@contextmanager
def pool(size: int) -> Iterator[RankPool]:
    ranks = RankPool(size)
    try:
        yield ranks
    finally:
        ranks.close()


_shared: dict[int, RankPool] = {}
"""By their size; daemons, which end with this process."""


@contextmanager
def shared_pool(size: int) -> Iterator[RankPool]:
    """Lends the ranks that all tests of this process share; others are started where those no longer work together."""
    ranks = _shared.get(size) or _shared.setdefault(size, RankPool(size))
    try:
        assert ranks.run(_count_ranks) == [size] * size
    except (AssertionError, EOFError, OSError):
        ranks._start_anew()
    yield ranks


def _count_ranks() -> int:
    """Sums one over all ranks, which shows that they reach each other."""
    count = torch.ones(())
    work = dist.all_reduce(count, async_op=True)
    assert work is not None
    work.wait(datetime.timedelta(seconds=20))
    return int(count)


def rank_and_size() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def steps(
    engine: offload.Engine,
    job: Job,
    first: int,
    last: int,
    weights: Callable[[offload.Engine], dict[str, torch.Tensor]] = weights_of,
) -> Result:
    """Trains steps [first, last) on this rank; losses are the mean over all ranks."""
    losses, norms = [], []
    for step in range(first, last):
        loss = mean = 0.0
        for micro in range(job.accumulation):
            part = job.loss(engine, step, micro)
            engine.backward(part)
            loss += float(part.detach()) / job.accumulation
            mean = engine.mean(loss) if micro == job.accumulation - 1 else 0.0
            engine.step()
        losses.append(mean)
        norms.append(engine.get_global_grad_norm() or 0.0)
    return Result(losses, norms, weights(engine))


def train(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> Result:
    """Trains `job` to its end and removes the store; losses are the mean over all ranks."""
    engine = start(job, placement, folder, **options)
    try:
        return steps(engine, job, 0, job.steps)
    finally:
        engine.destroy(remove=True)
