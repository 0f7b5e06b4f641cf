"""A checkpoint saved and loaded, a run exported, all on disk: `python -m bench.checkpoint FOLDER [--layers N]`.

Bound of the time: what is read over the read rate and what is written over the write rate of the same folder, for one
drive that does one after the other. The rates are measured right before and right after each save, load and export,
and their means count, because a drive that others share changes within seconds. A save reads all once and writes it
once; a load reads it twice, since all is checked before anything is changed, and writes it once. An export in fp32
reads weight and residual, 4 bytes a parameter, and writes as many.

A save and an export write new files. A drive may be slower at that than where it was written before (a virtual drive
gets its room only then), so the rate of new files is measured too: `share_of_bound` takes that rate for what is new,
`share_of_overwriting` the other. A load writes slots of the store, which are not new. Memory: the peak of the resident
set during each, above what was resident before it. Needs room for 36 bytes a parameter: two slots and the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import offload
from bench.measure import in_process, report, settings_for
from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.aio.measure import move, remove
from offload.bench.measure import drive_rates, random_ids, resident, seconds_of
from offload.hardware.noise import fill_with_noise
from offload.model_io.save import make_plan
from offload.model_io.source import StoreSource
from offload.presets import build
from offload.runs.export import export
from offload.sizes import GIB, MIB
from offload.swapper.store import remove_run

ALLOWANCE = 512 * MIB
"""Bytes above the base that a save, a load or an export may take."""


class Rates(NamedTuple):
    """Bytes a second of a drive: of a read, of a write over older bytes, and of a write into a new file."""

    read: float
    write: float
    new: float


class Round(NamedTuple):
    """One save, load or export: its seconds, the rates around it, and the memory that it took."""

    seconds: float
    rates: Rates
    over: int


class Drive:
    """The drive under a folder, whose rates are measured between the rounds."""

    def __init__(self, folder: Path, nbytes: int, stack: contextlib.ExitStack) -> None:
        self._queue = stack.enter_context(IoQueue())
        self._rates = stack.enter_context(drive_rates([folder / ".bench-checkpoint-old"], nbytes))
        self._path, self._buffer = folder / ".bench-checkpoint-new", aligned_empty(nbytes)
        fill_with_noise(self._buffer)
        self._before = self._measure()

    def _measure(self) -> Rates:
        rates = self._rates()
        try:
            with DirectFile(self._path, create=True) as file:
                file.reserve(len(self._buffer))
                seconds = move(self._queue, file, self._buffer, "write", 16 * MIB).seconds
        finally:
            remove(self._path)
        return Rates(rates.read, rates.write, len(self._buffer) / seconds)

    def round(self, action: Callable[[], object]) -> Round:
        """Returns one round of a save, load or export."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        base = resident()
        seconds = seconds_of(action)
        over, after = resident("VmHWM") - base, self._measure()
        rates = Rates(*(statistics.mean(pair) for pair in zip(self._before, after, strict=True)))
        self._before = after
        return Round(seconds, rates, over)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model has, where room is short")
    parser.add_argument("--rounds", type=int, default=3)
    report("checkpoint", in_process(_run, parser.parse_args(arguments)))


def _run(options: argparse.Namespace) -> dict[str, Any]:
    run, saved = options.folder / "bench-checkpoint", options.folder / "bench-checkpoint-saved"
    try:
        return _save_and_load(options, run, saved) | {"export": _export(options, run, saved)}
    finally:
        shutil.rmtree(saved, ignore_errors=True)
        remove_run(run)


def _save_and_load(options: argparse.Namespace, run: Path, saved: Path) -> dict[str, Any]:
    """Returns the figures of saves and loads in turns; leaves the run."""
    settings = settings_for(options.folder, run.name, "nvme", durability="step")
    with offload.init(settings):
        model = build(options.model, options.layers)
    engine = offload.initialize(model=model, config=settings)[0]
    try:
        ids = random_ids((1, 16), 256)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        saves: list[Round] = []
        loads: list[Round] = []
        engine.save_checkpoint(saved)
        engine.load_checkpoint(saved)  # so that both slots were written before
        nbytes = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        with contextlib.ExitStack() as stack:
            drive = Drive(options.folder, min(GIB, nbytes), stack)
            for _ in range(options.rounds):
                shutil.rmtree(saved)
                saves.append(drive.round(lambda: engine.save_checkpoint(saved)))
                loads.append(drive.round(lambda: engine.load_checkpoint(saved)))
        return {
            "model": options.model,
            "layers": options.layers,
            "parameters": engine.parameter_count,
            "checkpoint_bytes": nbytes,
            "save": _summary(saves, nbytes, nbytes, new=True),
            "load": _summary(loads, 2 * nbytes, nbytes, new=False),
        }
    finally:
        engine.destroy()
        shutil.rmtree(saved, ignore_errors=True)


def _export(options: argparse.Namespace, run: Path, saved: Path) -> dict[str, Any]:
    rounds: list[Round] = []
    with IoQueue() as queue, contextlib.closing(StoreSource(run, queue)) as source, contextlib.ExitStack() as stack:
        plan = make_plan(source, "fp32", 5 * GIB)
        drive = Drive(options.folder, min(GIB, plan.weights_nbytes), stack)
        for _ in range(options.rounds):
            rounds.append(drive.round(lambda: export(source, saved, plan, queue)))
            shutil.rmtree(saved)
    # Weight and low bits, 4 bytes, are read for each element of fp32 that is written.
    return _summary(rounds, plan.weights_nbytes, plan.weights_nbytes, new=True)


def _summary(rounds: list[Round], reads: int, writes: int, new: bool) -> dict[str, Any]:
    """Returns the medians over rounds; `new` is True if the bytes are written into new files."""

    def shares(field: str) -> list[float]:
        bounds = [reads / one.rates.read + writes / getattr(one.rates, field) for one in rounds]
        return sorted(bound / one.seconds for bound, one in zip(bounds, rounds, strict=True))

    seconds = statistics.median(one.seconds for one in rounds)
    of_bound, over = shares("new" if new else "write"), max(one.over for one in rounds)
    medians = map(statistics.median, zip(*(one.rates for one in rounds), strict=True))
    return {
        "seconds": seconds,
        "bytes_per_second": (reads + writes) / seconds,
        "share_of_bound": statistics.median(of_bound),
        "shares": [round(share, 3) for share in of_bound],
        "share_of_overwriting": statistics.median(shares("write")),
        "rates": [round(rate / 1e9, 3) for rate in medians],
        "over": over,
        "kept": over <= ALLOWANCE,
    }


if __name__ == "__main__":
    main()
