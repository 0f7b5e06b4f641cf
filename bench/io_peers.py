"""The I/O queue against its peers: `python -m bench.io_peers FOLDER [--deepspeed PYTHON]`.

One file, overwritten and read by everyone in turns, with O_DIRECT: `IoQueue` as it is made without arguments, `fio` by
libaio and io_uring with its buffers on 4 KiB and on 2 MiB pages, and DeepSpeed's `async_io` where an interpreter that
has it is named. For each peer: the median over the rounds of the ratio of ours to it, with the 95 % interval of that
median by bootstrap. Prints a Markdown table and, as its last line, JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload.aio import IoQueue, StripedFile, aligned_empty
from offload.aio.measure import OPERATIONS, TimedTransfer, move
from offload.bench.io import Fio
from offload.hardware.info import machine
from offload.hardware.noise import fill_with_noise
from offload.sizes import MIB, format_size, parse_size

DEEPSPEED = {
    "DeepSpeed 1 MiB x 32, overlap": (MIB, 32, False, True, 1),
    "DeepSpeed 1 MiB x 128": (MIB, 128, False, False, 1),
    "DeepSpeed 8 MiB x 8, overlap, 2 threads": (8 * MIB, 8, False, True, 2),
}
"""Block, depth, single_submit, overlap_events, threads, as in DeepSpeed's tutorials and from its tuner."""

FIO = {
    "fio libaio, 1 MiB x 32": ("libaio", MIB, 32),
    "fio io_uring, 1 MiB x 32": ("io_uring", MIB, 32),
    "fio io_uring, 8 MiB x 8": ("io_uring", 8 * MIB, 8),
}

_SERVER = """
import json, os, resource, sys, time
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["PATH"] = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what it prints is not for us
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
path, nbytes, half = sys.argv[1], int(sys.argv[2]), int(sys.argv[2]) // 2
aio, handles, buffer = AsyncIOBuilder().load(verbose=False), {}, None
for line in sys.stdin:
    operation, *shape = json.loads(line)
    shape = tuple(shape)
    if shape not in handles:
        handles[shape] = aio.aio_handle(*shape), aio.aio_handle(*shape)
    reader, writer = handles[shape]
    if buffer is None:
        buffer = reader.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        buffer.random_(0, 256)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    if operation == "read":
        reader.sync_pread(buffer, path)
    elif operation == "write":
        writer.sync_pwrite(buffer, path)
    else:  # two handles, as its swappers have
        reader.async_pread(buffer[:half], path, 0)
        writer.async_pwrite(buffer[half:], path, half)
        reader.wait(), writer.wait()
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps([seconds, cpu]), file=answers, flush=True)
"""


class _DeepSpeed:
    """A process of the interpreter with DeepSpeed. It runs one pass per request."""

    def __init__(self, python: str, path: str, nbytes: int) -> None:
        command = [python, "-c", _SERVER, path, str(nbytes)]
        self._nbytes = nbytes
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, operation: str, shape: Sequence[Any]) -> TimedTransfer:
        assert self._process.stdin and self._process.stdout
        print(json.dumps([operation, *shape]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("DeepSpeed's process has ended: run its interpreter by hand to see why")
        return TimedTransfer(self._nbytes, *json.loads(line))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the median of `ratios`, by bootstrap."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(4000))
    return medians[100], medians[3899]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="4GiB")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has DeepSpeed")
    options = parser.parse_args()
    nbytes = parse_size(options.size) // (16 * MIB) * (16 * MIB)
    path = str(options.folder / f"bench-io-peers.{os.getpid()}")
    try:
        with StripedFile([path], create=True) as file:
            file.reserve(nbytes)
            passes = _measure(file, path, nbytes, options.rounds, options.deepspeed)
    finally:
        Path(path).unlink(missing_ok=True)
    _report(passes, nbytes, options.rounds)


def _measure(
    file: StripedFile, path: str, nbytes: int, rounds: int, deepspeed: str | None
) -> dict[tuple[str, str], list[TimedTransfer]]:
    buffer = aligned_empty(nbytes)
    fill_with_noise(buffer)
    peer = _DeepSpeed(deepspeed, path, nbytes) if deepspeed else None
    with IoQueue() as queue, IoQueue("libaio") as libaio, IoQueue("threads") as threads:
        contenders: dict[str, Callable[[str], TimedTransfer]] = {
            "ours": lambda op: move(queue, file, buffer, op, 16 * MIB),
            "ours, libaio": lambda op: move(libaio, file, buffer, op, 16 * MIB),
            "ours, threads": lambda op: move(threads, file, buffer, op, 16 * MIB),
        }
        for name, (engine, block, depth) in FIO.items():
            for pages, huge in (("4 KiB", False), ("2 MiB", True)):
                contenders[f"{name}, {pages} pages"] = Fio([path], engine, block, depth, nbytes, huge).run
        if peer is not None:
            for name, shape in DEEPSPEED.items():
                contenders[name] = functools.partial(peer.run, shape=shape)
        passes: dict[tuple[str, str], list[TimedTransfer]] = {
            (name, operation): [] for operation in OPERATIONS for name in contenders
        }
        for contender in contenders.values():
            contender("write")  # the first write of a block does more; memory is touched
        names = list(contenders)
        for turn in range(rounds):
            random.Random(turn).shuffle(names)
            for operation in OPERATIONS:
                for name in names:
                    passes[name, operation].append(contenders[name](operation))
            print(f"round {turn + 1} of {rounds}, {time.strftime('%H:%M:%S')}", flush=True)
    if peer is not None:
        peer.close()
    return passes


def _report(passes: dict[tuple[str, str], list[TimedTransfer]], nbytes: int, rounds: int) -> None:
    rows = []
    for operation in OPERATIONS:
        print(f"\n**{operation}**, {format_size(nbytes)}, {rounds} rounds\n")
        print("| | GB/s | CPU s/GB | ours to it | 95 % interval |\n|---|---|---|---|---|")
        ours = passes["ours", operation]
        for (name, of), mine in passes.items():
            if of != operation:
                continue
            speed = statistics.median(sample.nbytes / sample.seconds for sample in mine) / 1e9
            cpu = statistics.median(sample.cpu_seconds / sample.nbytes for sample in mine) * 1e9
            ratios = [b.seconds / b.nbytes / (a.seconds / a.nbytes) for a, b in zip(ours, mine, strict=True)]
            ratio, (low, high) = statistics.median(ratios), interval(ratios)
            row = {"op": operation, "name": name, "gb_per_s": speed, "cpu_s_per_gb": cpu}
            rows.append(row if name == "ours" else row | {"ratio": ratio, "low": low, "high": high})
            last = "| |" if name == "ours" else f"{ratio:.2f} | {low:.2f} to {high:.2f} |"
            print(f"| {name} | {speed:.2f} | {cpu:.4f} | {last}")
    print(json.dumps({"benchmark": "io_peers", "machine": machine(), "bytes": nbytes, "rounds": rounds, "rows": rows}))


if __name__ == "__main__":
    main()
