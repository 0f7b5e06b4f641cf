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
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import offload
from bench.measure import apart, random_ids, report, resident, seconds, settings_for
from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.aio.measure import move
from offload.model_io.source import StoreSource
from offload.presets import PRESETS, require_transformers
from offload.runs.export import export, make_plan
from offload.sizes import GIB, MIB
from offload.swapper.store import remove_run

ALLOWANCE = 512 * MIB
"""Bytes above the base that a save, a load or an export may take."""
REQUEST = 16 * MIB
"""Bytes of a request of a rate; all requests of a pass are queued at once."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model has, where room is short")
    parser.add_argument("--rounds", type=int, default=3)
    report("checkpoint", apart(_run, parser.parse_args(arguments)))


class Rates(NamedTuple):
    """Bytes a second of a drive: of a read, of a write over older bytes, and of a write into a new file."""

    read: float
    write: float
    new: float


class Drive:
    """Measures the rates of the drive under a folder, with two files that are there meanwhile."""

    def __init__(self, folder: Path, nbytes: int, queue: IoQueue) -> None:
        self._new, self._queue = folder / ".bench-checkpoint-new", queue
        self._buffer = aligned_empty(nbytes)
        for start in range(0, nbytes, MIB):
            self._buffer[start : start + MIB] = os.urandom(len(self._buffer[start : start + MIB]))
        self._old = self._made(folder / ".bench-checkpoint-old")
        self._pass(self._old, "write")  # from now on they are older bytes

    def rates(self) -> Rates:
        """Returns the rates of this moment."""
        read, write = self._pass(self._old, "read"), self._pass(self._old, "write")
        with self._made(self._new) as file:
            return Rates(read, write, self._pass(file, "write"))

    def close(self) -> None:
        """Removes the files."""
        self._old.close()
        for path in (Path(self._old.path), self._new):
            path.unlink(missing_ok=True)

    def _made(self, path: Path) -> DirectFile:
        """Returns a new file with all its room reserved."""
        path.unlink(missing_ok=True)
        file = DirectFile(path, create=True)
        file.reserve(len(self._buffer))
        return file

    def _pass(self, file: DirectFile, operation: str) -> float:
        """Returns the bytes a second of one pass over a file."""
        return len(self._buffer) / move(self._queue, file, self._buffer, operation, REQUEST).seconds


class Round(NamedTuple):
    """One save, load or export: its seconds, the rates around it, and the memory that it took."""

    seconds: float
    rates: Rates
    over: int


def measured(action: Callable[[], object], drive: Drive, before: Rates) -> tuple[Round, Rates]:
    """Returns one round of `action`, and the rates after it.

    Args:
        action: The save, load or export.
        drive: Measures the rates after it.
        before: The rates before it.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = resident()
    taken = seconds(action)
    over = resident("VmHWM") - base
    after = drive.rates()
    return Round(taken, Rates(*(statistics.mean(pair) for pair in zip(before, after, strict=True))), over), after


def summary(rounds: Sequence[Round], reads: int, writes: int, new: bool) -> dict[str, Any]:
    """Returns the medians over rounds: seconds, and shares of the bound.

    Args:
        rounds: The rounds.
        reads: Bytes that each of them reads.
        writes: Bytes that each of them writes.
        new: True if they are written into new files.
    """
    bounds = [reads / each.rates.read + writes / (each.rates.new if new else each.rates.write) for each in rounds]
    overwriting = [reads / each.rates.read + writes / each.rates.write for each in rounds]
    taken, over = [each.seconds for each in rounds], max(each.over for each in rounds)
    shares = sorted(bound / each for bound, each in zip(bounds, taken, strict=True))
    return {
        "seconds": statistics.median(taken),
        "bytes_per_second": (reads + writes) / statistics.median(taken),
        "bound_seconds": statistics.median(bounds),
        "share_of_bound": statistics.median(shares),
        "shares": [round(share, 3) for share in shares],
        "share_of_overwriting": statistics.median(b / each for b, each in zip(overwriting, taken, strict=True)),
        "rates": [
            round(statistics.median(rate) / 1e9, 3) for rate in zip(*(each.rates for each in rounds), strict=True)
        ],
        "over": over,
        "kept": over <= ALLOWANCE,
    }


@contextlib.contextmanager
def _drive(folder: Path, nbytes: int) -> Iterator[Drive]:
    with IoQueue() as queue, contextlib.closing(Drive(folder, nbytes, queue)) as drive:
        yield drive


def _run(given: argparse.Namespace) -> dict[str, Any]:
    run, saved = given.folder / "bench-checkpoint", given.folder / "bench-checkpoint-saved"
    try:
        return _save_and_load(given, run, saved) | {"export": _export(given, run, saved)}
    finally:
        shutil.rmtree(saved, ignore_errors=True)
        remove_run(run)


def _save_and_load(given: argparse.Namespace, run: Path, saved: Path) -> dict[str, Any]:
    """Returns the figures of saves and loads in turns; leaves the run."""
    engine = _engine(given, settings_for(given.folder, run.name, "nvme", durability="step"))
    try:
        ids = random_ids((1, 16), 256)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        nbytes = sum(
            nbytes
            for row in engine._core.components.shards.nbytes
            for state, nbytes in row.items()
            if state.value != "grad"
        )
        saves: list[Round] = []
        loads: list[Round] = []
        with _drive(given.folder, min(GIB, nbytes)) as drive:
            engine.save_checkpoint(saved)
            engine.load_checkpoint(saved)  # so that both slots were written before
            rates = drive.rates()
            for _ in range(given.rounds):
                shutil.rmtree(saved)
                for rounds, action in ((saves, engine.save_checkpoint), (loads, engine.load_checkpoint)):
                    found, rates = measured(lambda action=action: action(saved), drive, rates)  # type: ignore[misc]
                    rounds.append(found)
        return {
            "model": given.model,
            "layers": given.layers,
            "parameters": engine.parameter_count,
            "checkpoint_bytes": nbytes,
            "save": summary(saves, nbytes, nbytes, new=True),
            "load": summary(loads, 2 * nbytes, nbytes, new=False),
        }
    finally:
        engine.destroy()
        shutil.rmtree(saved, ignore_errors=True)


def _export(given: argparse.Namespace, run: Path, saved: Path) -> dict[str, Any]:
    """Returns the figures of exports of the run."""
    rounds: list[Round] = []
    with IoQueue() as queue, contextlib.closing(StoreSource(run, queue)) as source:
        plan = make_plan(source, "fp32", 5 * GIB)
        with _drive(given.folder, min(GIB, plan.weights_nbytes)) as drive:
            rates = drive.rates()
            for _ in range(given.rounds):
                found, rates = measured(lambda: export(source, saved, plan, queue), drive, rates)
                rounds.append(found)
                shutil.rmtree(saved)
    # Weight and low bits, 4 bytes, are read for each element of fp32 that is written.
    return summary(rounds, plan.weights_nbytes, plan.weights_nbytes, new=True)


def _engine(given: argparse.Namespace, settings: dict[str, Any]) -> offload.Engine:
    transformers, preset = require_transformers(), PRESETS[given.model]
    name = {"LlamaConfig": "num_hidden_layers", "GPT2Config": "n_layer"}[preset.config]
    fewer = {} if given.layers is None else {name: given.layers}
    with offload.init(settings):
        config = getattr(transformers, preset.config)(**{**preset.settings, **fewer}, use_cache=False)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return offload.initialize(model=model, config=settings)[0]


if __name__ == "__main__":
    main()
