"""The I/O queue against plain O_DIRECT calls: `python -m bench.io FOLDER [--nbytes N]`.

Bound: one thread of `os.preadv` or `os.pwritev` for each of the queue's threads, on the same file and from the same
2 MiB pages, with nothing else in between.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import in_turns, median_ratio, report
from offload.aio import DirectFile, IoFuture, IoQueue, aligned_empty
from offload.sizes import MIB, parse_size


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nbytes", default="1GiB")
    parser.add_argument("--request", default="16MiB", help="bytes of one request")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    request = parse_size(given.request)
    nbytes = max(parse_size(given.nbytes) // request, 1) * request
    buffer = aligned_empty(nbytes)
    buffer[:] = bytes(MIB) * (nbytes // MIB) if nbytes % MIB == 0 else bytes(nbytes)
    path = given.folder / "bench.io"
    figures: dict[str, object] = {"nbytes": nbytes, "request": request, "threads": given.threads}
    with DirectFile(str(path), create=True) as file, IoQueue(threads=given.threads) as queue:
        file.reserve(nbytes)
        plain = _Plain(str(path), given.threads, request)
        for name, mine, theirs in (
            (
                "write",
                lambda: _all(queue.write, file, buffer, request),
                lambda: plain.run(os.pwritev, buffer),
            ),
            ("read", lambda: _all(queue.read, file, buffer, request), lambda: plain.run(os.preadv, buffer)),
        ):
            ours, bound = in_turns(mine, theirs, given.rounds)
            figures[f"{name}_gigabytes_per_second"] = nbytes / statistics.median(ours) / 1e9
            figures[f"{name}_plain_gigabytes_per_second"] = nbytes / statistics.median(bound) / 1e9
            figures[f"{name}_fraction_of_plain"] = median_ratio(bound, ours)
        plain.close()
    path.unlink()
    report("io", figures)


def _all(
    operation: Callable[[DirectFile, int, memoryview], IoFuture], file: DirectFile, buffer: memoryview, request: int
) -> None:
    futures = [operation(file, start, buffer[start : start + request]) for start in range(0, len(buffer), request)]
    for future in futures:
        future.wait()


class _Plain:
    """Threads that make nothing but system calls."""

    def __init__(self, path: str, threads: int, request: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        self._pool, self._request = ThreadPoolExecutor(threads), request

    def run(self, call: Callable[[int, list[memoryview], int], int], buffer: memoryview) -> None:
        starts = range(0, len(buffer), self._request)
        moved = self._pool.map(lambda s: call(self._descriptor, [buffer[s : s + self._request]], s), starts)
        assert sum(moved) == len(buffer)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)


if __name__ == "__main__":
    main()
