"""The oracle of every test of training: a plain loop, and comparisons that must hold for any model.

    plain_loop      the same job in a few lines of PyTorch, with fp32 masters
    same_bits       losses, norms and final weights of several placements are equal, bit for bit
    kill_and_resume a run that is killed and resumed equals the unbroken one, bit for bit

A `Job` is made of module-level functions, so that another process can run it.
"""

from __future__ import annotations

from tests.support.oracle.bits import assert_same, assert_same_tensors, same_bits
from tests.support.oracle.job import DTYPES, PLACEMENTS, TIERS, Job, Result, config
from tests.support.oracle.kills import dies, kill_and_resume, processes, start_server
from tests.support.oracle.plain_engine import PLAIN, PlainEngine, PlainOptimizer, rounded
from tests.support.oracle.training import (
    accumulated_step,
    least_host_memory,
    plain_loop,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)

__all__ = [
    "DTYPES",
    "PLACEMENTS",
    "PLAIN",
    "TIERS",
    "Job",
    "PlainEngine",
    "PlainOptimizer",
    "Result",
    "accumulated_step",
    "assert_same",
    "assert_same_tensors",
    "config",
    "dies",
    "kill_and_resume",
    "least_host_memory",
    "plain_loop",
    "processes",
    "room_for",
    "rounded",
    "run",
    "same_bits",
    "small_pieces",
    "start",
    "start_server",
    "train_step",
    "trained",
    "weights_of",
]
