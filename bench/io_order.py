"""Reads and writes at once against windows of one direction, on one drive: `python -m bench.io_order FOLDER`.

Two measurements, each with both orders in turns. A queue: as many bytes read as written, all queued at once. An update
from disk to disk: against the bytes that it moves, at once or one after the other, whichever is faster by the rates of
the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import torch

import offload
from bench.measure import median_ratio, report, seconds
from bench.update import make_engine
from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.aio.file import WINDOW_BYTES, window_bytes
from offload.aio.measure import move, remove
from offload.sizes import MIB

_ORDERS = {"at_once": 0, "windows": WINDOW_BYTES}
"""Bytes of a window, by the name of the order."""
_REQUEST = 16 * MIB


class _Rates(NamedTuple):
    """Bytes a second of the drive."""

    read: float
    write: float
    mixed: float


class _Update(NamedTuple):
    """An update, and the fraction of its seconds in which the drive alone would have moved its bytes."""

    seconds: float
    of_the_bound: float
    nbytes: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=float, default=300e6, help="of the engine")
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--size", type=int, default=256 * MIB, help="bytes read, and bytes written, by the queue")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    numel = int(given.parameters) // given.units // 2048 * 2048
    engine = make_engine(given, numel, "bench-io-order")
    try:
        measured = _measure(engine, given.folder / "bench-io-order.rates", given.size, given.rounds)
    finally:
        engine.destroy(remove=True)
    report("io_order", {"parameters": numel * given.units, **_figures(*measured)})


def _measure(
    engine: offload.Engine, path: Path, size: int, rounds: int
) -> tuple[list[_Rates], dict[str, list[float]], dict[str, list[_Update]]]:
    """Returns, for each round, the rates of the drive, and of each order the bytes a second of a queue and an update.

    Args:
        engine: the engine whose updates are measured.
        path: a file for the queue, which is removed.
        size: bytes that the queue reads, and bytes that it writes.
        rounds: number of rounds that count; one more is made before.
    """
    rates: list[_Rates] = []
    queues: dict[str, list[float]] = {name: [] for name in _ORDERS}
    updates: dict[str, list[_Update]] = {name: [] for name in _ORDERS}
    buffer = aligned_empty(2 * size)
    torch.frombuffer(buffer, dtype=torch.int32).random_()
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(DirectFile(path, create=True))
            opened = {name: stack.enter_context(IoQueue(window_bytes=window)) for name, window in _ORDERS.items()}
            file.reserve(len(buffer))

            def moved(name: str, way: str) -> float:
                return len(buffer) / move(opened[name], file, buffer, way, _REQUEST).seconds

            for turn in range(rounds + 1):
                found = _Rates(**{way: moved("at_once", way) for way in ("write", "read", "mixed")})
                # Whoever comes first finds the drive rested, so the order of the turns changes.
                for name in list(_ORDERS)[:: 1 if turn % 2 else -1]:
                    queued, taken = moved(name, "mixed"), _update(engine, opened[name], found)
                    if turn:
                        queues[name].append(queued)
                        updates[name].append(taken)
                if turn:
                    rates.append(found)
    finally:
        remove(path)
    return rates, queues, updates


def _figures(rates: list[_Rates], queues: dict[str, list[float]], updates: dict[str, list[_Update]]) -> dict[str, Any]:
    """Returns what the rounds came to; see `_measure`."""
    seconds_of = {name: [each.seconds for each in row] for name, row in updates.items()}
    medians = _Rates(*(statistics.median(column) for column in zip(*rates, strict=True)))
    return {
        "rates": medians._asdict(),
        "one_after_the_other": 2 / (1 / medians.read + 1 / medians.write),
        "chosen": "windows" if window_bytes([medians]) else "at_once",
        "queue": {name: statistics.median(each) for name, each in queues.items()},
        "queue_windows_to_at_once": median_ratio(queues["windows"], queues["at_once"]),
        "update_seconds": {name: statistics.median(each) for name, each in seconds_of.items()},
        "update_at_once_to_windows": median_ratio(seconds_of["at_once"], seconds_of["windows"]),
        "quartiles_of_update_at_once_to_windows": statistics.quantiles(map(truediv, *seconds_of.values())),
        "of_the_bound": {name: statistics.median(e.of_the_bound for e in row) for name, row in updates.items()},
        "update_bytes": {name: statistics.median(e.nbytes for e in row) for name, row in updates.items()},
    }


def _update(engine: offload.Engine, queue: IoQueue, rates: _Rates) -> _Update:
    """Measures all updates of a step by another queue than the engine's."""
    # One engine for both orders: two would share a budget, and keep different states in memory.
    shared = engine._core.components.queue
    assert shared is not None
    own, shared._queue = shared._queue, queue
    try:
        engine.backward(engine(torch.zeros(1, requires_grad=True)).sum())
        before = shared.read_bytes, shared.written_bytes
        taken = seconds(engine.step)
        read, written = shared.read_bytes - before[0], shared.written_bytes - before[1]
    finally:
        shared._queue = own
    both = min(read, written)
    at_once = 2 * both / rates.mixed + (read - both) / rates.read + (written - both) / rates.write
    bound = min(at_once, read / rates.read + written / rates.write)
    return _Update(taken, bound / taken, read + written)


if __name__ == "__main__":
    main()
