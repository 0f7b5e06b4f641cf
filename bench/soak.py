"""A run that is killed, starved and resumed for hours: `python -m bench.soak FOLDER --minutes 120`. Needs root.

    life      calm    nothing happens to the drive
              slow    the kernel allows it 40 MB a second
              full    a file takes all room that is free, so that checkpoints cannot be written
    ends      SIGKILL after some seconds, at any moment; some lives are long

A life resumes the run from its swap files, trains, evaluates, saves checkpoints, and says what it holds: RAM, open
files, threads. Whatever it logs a second time must be the same. In the end one process trains the same steps in memory,
and each loss of each life must have its bits.

Bars: no loss that differs, at most one logged step lost by a kill, and no growth: what a life holds after its first
hundred steps is what it holds at its end, and the last life holds what the first one held.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

import offload
from bench.measure import engine_of, in_process, report, settings_for
from bench.throttle import throttled
from offload.bench.measure import resident
from offload.errors import OffloadError

SLOW = 40_000_000
"""Bytes a second of a slow life."""
_IMAGE = 640 << 20
_EVALUATE_EVERY, _SAVE_EVERY, _WARM = 20, 50, 100
_LONG = 0.1
"""Fraction of the lives that last ten times as long as the others."""
_SECONDS = (4.0, 90.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    log = options.folder / "soak.jsonl"
    log.unlink(missing_ok=True)
    chance = random.Random(options.seed)
    end = time.monotonic() + 60 * options.minutes
    lives: Counter[str] = Counter()
    with _file_system(options.folder) as drive:
        while time.monotonic() < end:
            kind = chance.choice(("calm", "slow", "full"))
            seconds = chance.uniform(*_SECONDS) * (10 if chance.random() < _LONG else 1)
            _live(kind, drive, log, min(seconds, max(end - time.monotonic(), _SECONDS[0])))
            lives[kind] += 1
            print(f"{sum(lives.values())} lives, the last {kind} for {seconds:.0f} s", flush=True)
        used = sum(path.stat().st_blocks * 512 for path in drive.rglob("*") if path.is_file())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = max(line["step"] for line in lines if "loss" in line)
    report(
        "soak", {"lives": dict(lives), "disk": used, **figures(lines, in_process(_in_memory, options.folder, steps))}
    )


def figures(lines: list[dict[str, Any]], expected: list[float]) -> dict[str, Any]:
    """Returns the figures of the lines of all lives.

    Args:
        lines: the lines that `_train` writes, in order.
        expected: the loss of each step in memory, the first one's first.
    """
    lives: list[list[dict[str, Any]]] = []
    refused: Counter[str] = Counter()
    lost, again, wrong = 0, 0, []
    reached = 0
    for line in lines:
        if "pid" in line:
            lives.append([])
            lost = max(lost, reached - line["pid"][1])
        elif "refused" in line:
            refused[line["refused"]] += 1
        elif "loss" in line:
            lives[-1].append(line)
            again += line["step"] <= reached
            reached = max(reached, line["step"])
            if line["loss"] != expected[line["step"] - 1]:
                wrong.append(line["step"])
    held = ("rss", "files", "threads")
    long = max((life for life in lives if life), key=len)
    begin = long[min(_WARM, len(long) - 1)]
    warm = [life for life in lives if len(life) > _WARM]
    return {
        "steps": reached,
        "steps_made_again": again,
        "most_steps_lost": lost,
        "losses_that_differ": len(wrong),
        "saves_refused": dict(refused),
        "saves": sum("saved" in line for line in lines),
        "evaluations": sum("evaluated" in line for line in lines),
        "longest_life": {"steps": len(long)} | {name: [begin[name], long[-1][name]] for name in held},
        "warm_lives": {name: [warm[0][_WARM][name], warm[-1][_WARM][name]] for name in held} if warm else {},
    }


@contextlib.contextmanager
def _file_system(folder: Path) -> Iterator[Path]:
    """A separate file system, so that a full one does not affect others."""
    image, place = folder / "soak.image", folder / "soak"
    place.mkdir(parents=True, exist_ok=True)
    image.write_bytes(b"")
    os.truncate(image, _IMAGE)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        image.unlink()


def _live(kind: str, drive: Path, log: Path, seconds: float) -> None:
    """Resumes the run in a new process, and kills the process after some seconds, perhaps during its start."""
    with throttled(drive, SLOW) if kind == "slow" else contextlib.nullcontext():
        process = multiprocessing.get_context("spawn").Process(target=_train, args=(drive, log))
        process.start()
        filler = drive / "filler"
        if kind == "full":
            process.join(seconds / 2)
            _fill(filler)
            seconds /= 2
        process.join(seconds)
        assert process.exitcode is None, f"a life ended by itself, with {process.exitcode}"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        filler.unlink(missing_ok=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


def _engine(folder: Path, tier: str, resume: str) -> offload.Engine:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # a resumed engine replaces weights and generators by the committed ones
    return engine_of("gpt2-tiny", settings_for(folder, "soak", tier, resume=resume) | {"bf16": {"enabled": False}})


def _loss(engine: offload.Engine, step: int) -> torch.Tensor:
    ids = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
    return loss


def _train(drive: Path, log: Path) -> None:
    """Trains until it is killed."""
    engine = _engine(drive, "nvme", "auto")
    process = psutil.Process()
    with log.open("a", buffering=1) as file:

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")

        write(pid=[process.pid, engine.global_steps])
        for step in itertools.count(engine.global_steps):
            loss = _loss(engine, step)
            engine.backward(loss)
            engine.step()
            holds = {"rss": resident(), "files": process.num_fds(), "threads": process.num_threads()}
            write(step=step + 1, loss=loss.item(), **holds)
            if (step + 1) % _EVALUATE_EVERY == 0:
                engine.eval()
                with torch.no_grad():
                    write(evaluated=_loss(engine, 0).item())
                engine.train()
            if (step + 1) % _SAVE_EVERY == 0:
                try:
                    engine.save_checkpoint(str(drive / "checkpoints"), tag="last")
                    write(saved=step + 1)
                except OffloadError as error:
                    write(refused=type(error).__name__, why=str(error)[:200])


def _in_memory(folder: Path, steps: int) -> list[float]:
    """Returns the losses of an undisturbed run."""
    engine = _engine(folder, "none", "never")
    losses = []
    for step in range(steps):
        loss = _loss(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy(remove=True)
    return losses


if __name__ == "__main__":
    main()
