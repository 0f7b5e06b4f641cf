"""What a GPU gives, in one command: `python -m bench.gpu --budget-minutes 8 [--folder DIR] [--json FILE] [--model M]`.

Parts, most important first, each in a process of its own, as far as the budget goes:

    bits        tiny models in all placements: losses, norms and weights equal to those of none/none, bit for bit
    copies      to and from the engine's host memory. Bound: the same bytes to and from torch's own pinned memory
    none/none   steps of the model, a part for each placement (weights/states). Bound of the time: the step of
    nvme/nvme   none/none, where both stay on the device. Bound of the bytes: 26 for each parameter and step
    …

`--part NAME` runs one of them alone, in this process. Without a CUDA device it says so in one line; `--device cpu`
shows that it works, and measures nothing of interest. A GPU's other users are seen in the figures, so run it alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import psutil
import torch

import offload
from bench.measure import in_turns, median_ratio
from offload import kernels
from offload.engine import initialize
from offload.presets import build, require_transformers
from offload.sizes import GIB, MIB, format_size, parse_size
from offload.swapper.device import CudaDevice, Device, Event, open_device
from offload.swapper.host import Classes, HostArena
from offload.swapper.monitor import Monitor

_T = TypeVar("_T")
Save = Callable[[dict[str, Any]], None]
"""Called with all figures so far, so that a part that is stopped leaves those it had."""


class Part(NamedTuple):
    name: str
    seconds: float
    """What it takes from start to end, roughly, with the model of 1B parameters."""


PLACEMENTS = (
    "none/none",
    "nvme/nvme",
    "cpu/cpu",
    "cpu/nvme",
    "none/nvme",
    "nvme/cpu",
    "none/cpu",
    "cpu/none",
    "nvme/none",
)
"""weights/states: all nine, most important first."""

_USUAL = {"none/none": 60.0, "nvme/nvme": 110.0, "cpu/cpu": 60.0}
PARTS = (Part("bits", 75), Part("copies", 25), *(Part(name, _USUAL.get(name, 75)) for name in PLACEMENTS))

_WARM_UP = 2
"""Steps that do not count: the first only records the order of uses, the second is the first beside an update."""
_LEAVING = 5.0
"""Seconds in which a process that has measured ends: more where a step is long, which the part itself knows."""
_LAST_LINES = 15
_PASSED_ON = ("device", "model", "batch_size", "seq_len", "steps", "nbytes")
"""Options of the command that are those of a part's process too."""
_ROOT = Path(__file__).resolve().parents[1]


class Work(NamedTuple):
    """What a part works on."""

    device: torch.device
    folder: Path
    """An empty folder for swap files."""
    model: str = "llama-1b"
    batch_size: int = 8
    seq_len: int = 512
    steps: int = 8
    """Timed steps, fewer where `seconds` are over."""
    seconds: float = 60.0
    copy_nbytes: int = 256 * MIB
    rounds: int = 15


# -- bits ---------------------------------------------------------------------------------------------


class _Tiny(NamedTuple):
    config: str
    settings: dict[str, Any]
    accumulation: int


_TINY = {
    "gpt2": _Tiny(
        "GPT2Config",
        {"n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
        1,
    ),
    "llama": _Tiny(
        "LlamaConfig",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        2,
    ),
}
"""Of more blocks than the device arena holds, so that weights come and go. GPT-2 has dropout and a tied embedding."""
_VOCABULARY = 128
JOBS = tuple(f"{model} {dtype}" for model in _TINY for dtype in ("bf16", "fp32"))


class _Result(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def bits(
    work: Work, save: Save, jobs: Sequence[str] = JOBS, placements: Sequence[str] = PLACEMENTS, steps: int = 5
) -> None:
    """Train each job in each placement, none/none a second time too, and compare with none/none.

    Wants to be the first in its process to use CUDA: cuBLAS reads its setting when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    figures: dict[str, Any] = {"steps": steps, "jobs": {}}
    try:
        for job in jobs:
            found: dict[str, Any] = {"equal": [], "different": {}, "failed": {}}
            figures["jobs"][job] = found
            expected = _train(job, "none/none", work, steps)
            for placement in placements:
                try:
                    differences = _differences(expected, _train(job, placement, work, steps))
                except Exception as error:  # the other placements still tell something
                    found["failed"][placement] = f"{type(error).__name__}: {error}"
                else:
                    if differences:
                        found["different"][placement] = differences
                    else:
                        found["equal"].append(placement)
                save(figures)
    finally:
        torch.use_deterministic_algorithms(before)


def _train(job: str, placement: str, work: Work, steps: int) -> _Result:
    name, dtype = job.split()
    tiny = _TINY[name]
    transformers = require_transformers()
    torch.manual_seed(0)
    config = getattr(transformers, tiny.config)(**tiny.settings, vocab_size=_VOCABULARY, use_cache=False)
    # Eager attention is matrix products and a softmax, which have deterministic kernels everywhere.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    settings = _settings(placement, work, dtype, accumulation=tiny.accumulation, clip=1.0)
    settings["offload"]["debug"] = {"poison": True}
    engine = offload.initialize(model=model, config=settings)[0]
    try:
        torch.manual_seed(1)
        losses, norms = [], []
        for step in range(steps):
            for micro in range(tiny.accumulation):
                ids = _ids((2, 32), _VOCABULARY, seed=100 * step + micro)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                losses.append(float(loss.detach()))
                engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
        weights = {key: value.cpu().clone() for key, value in engine.module.state_dict().items()}
    finally:
        engine.destroy(remove=True)
    return _Result(losses, norms, weights)


def _differences(expected: _Result, got: _Result) -> list[str]:
    """In words, the first difference of each kind; empty where all bits are equal."""
    words = []
    for what, wanted, have in (("loss", expected.losses, got.losses), ("norm", expected.norms, got.norms)):
        for index, (a, b) in enumerate(zip(wanted, have, strict=True), 1):
            if a != b:
                words.append(f"{what} {index} is {b}, not {a}")
                break
    names = [name for name, value in expected.weights.items() if not _same_bits(value, got.weights[name])]
    if names:
        words.append(f"{len(names)} of {len(expected.weights)} tensors of the state dict, the first is {names[0]}")
    return words


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(t.flatten().view(torch.uint8) for t in (one, other)))


def _settings(placement: str, work: Work, dtype: str, accumulation: int = 1, clip: float = 0.0) -> dict[str, Any]:
    weights, states = placement.split("/")
    return {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": weights},
            "offload_optimizer": {"device": states},
        },
        "offload": {"nvme_path": str(work.folder), "device": work.device.type},
    }


def _ids(shape: tuple[int, int], vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


# -- copies -------------------------------------------------------------------------------------------


def copies(work: Work, save: Save) -> None:
    """Copies to and from a host arena by the device object, in turns with the same copies by torch."""
    nbytes, device = work.copy_nbytes, open_device(work.device)
    arena = HostArena(Classes(nbytes, 0, 0, 0), device)  # registers its memory
    lease = arena.tiles.take(nbytes)
    assert lease is not None
    ours = lease.tensor(torch.uint8).random_(0, 256)
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=work.device.type == "cuda")
    away = torch.empty(nbytes, dtype=torch.uint8, device=work.device)
    figures: dict[str, Any] = {"nbytes": nbytes, "host_bytes": arena.nbytes, "pinned_bytes": arena.pinned_bytes}

    def upload() -> None:
        device.upload(away, ours).wait()

    def download() -> None:
        device.download(ours, away).wait()

    figures["upload"] = _in_turns(work, upload, lambda: _copy(away, pinned))
    upload()  # once more, since torch came last
    figures["upload"]["right"] = torch.equal(away.cpu(), ours)
    save(figures)
    away.copy_(ours.flip(0))
    device.synchronize()
    figures["download"] = _in_turns(work, download, lambda: _copy(pinned, away))
    figures["download"]["right"] = torch.equal(ours, away.cpu())
    save(figures)
    arena.close()


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)
    if destination.is_cuda or source.is_cuda:
        torch.cuda.current_stream().synchronize()


def _in_turns(work: Work, mine: Callable[[], None], theirs: Callable[[], None]) -> dict[str, Any]:
    seconds, bound = in_turns(mine, theirs, work.rounds)
    return {
        "gigabytes_per_second": work.copy_nbytes / statistics.median(seconds) / 1e9,
        "pinned_gigabytes_per_second": work.copy_nbytes / statistics.median(bound) / 1e9,
        "fraction_of_pinned": median_ratio(bound, seconds),
    }


# -- steps --------------------------------------------------------------------------------------------


class _TimedCuda(CudaDevice):
    """Records when compute begins and ends to wait for a copy; both events lie on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def hold(self, event: Event) -> None:
        if event.done():
            return
        stream = torch.cuda.current_stream(self.torch)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.record_event(before)
        super().hold(event)
        stream.record_event(after)
        self.stalls.append((before, after))


class Waits(NamedTuple):
    """Seconds of one step in which the model stood still."""

    copies: float
    """The compute stream waited for uploads."""
    reads: float
    """A thread that runs the model waited for a read of weights."""
    updates: float
    """It waited for an update, for memory that an update holds, or for the end of the step before."""


class Watch:
    """Finds where time goes, in engines that are initialized and run inside `watching`."""

    def __init__(self) -> None:
        self._devices: list[_TimedCuda] = []
        self._seconds = {"wait": 0.0, "acquire": 0.0}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What waits without the pager's lock waits for a future (`wait`) or for a change (`acquire`)."""
        plain = Monitor.without_lock

        def timed(monitor: Monitor, act: Callable[[], _T]) -> _T:
            name = getattr(act, "__name__", "")
            if name not in self._seconds or threading.current_thread().name.startswith("offload-"):
                return plain(monitor, act)
            start = time.perf_counter()
            try:
                return plain(monitor, act)
            finally:
                self._seconds[name] += time.perf_counter() - start

        with (
            mock.patch.object(Monitor, "without_lock", timed),
            mock.patch.object(initialize, "open_device", self._open, create=True),
        ):
            yield

    def _open(self, device: torch.device) -> Device:
        if device.type != "cuda":
            return open_device(device)
        self._devices.append(_TimedCuda(device))
        return self._devices[-1]

    def take(self) -> Waits:
        """What was waited since the last call."""
        stalled = 0.0
        for device in self._devices:
            stalls, device.stalls = device.stalls, []
            for before, after in stalls:
                after.synchronize()
                stalled += before.elapsed_time(after) / 1e3
        waits = Waits(stalled, self._seconds["wait"], self._seconds["acquire"])
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return waits


def measure_steps(work: Work, placement: str, save: Save) -> None:
    """Train the model of `work` in one placement and time its steps, from one return of `step()` to the next."""
    end, watch = time.monotonic() + work.seconds, Watch()
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
    settings = _settings(placement, work, "bf16")
    with watch.watching():
        with offload.init(settings):
            model = build(work.model)
        shape: Any = model.config
        ids = _ids((work.batch_size, work.seq_len), shape.vocab_size, seed=0)
        engine = offload.initialize(model=model, config=settings)[0]
        torch.manual_seed(0)  # for dropout: losses can be compared between placements
        try:
            _time_steps(work, engine, ids, watch, end, save)
        finally:
            engine.destroy(remove=True)


def _time_steps(work: Work, engine: offload.Engine, ids: torch.Tensor, watch: Watch, end: float, save: Save) -> None:
    losses = [_step(engine, ids) for _ in range(_WARM_UP)]
    watch.take()
    before, seconds, waits = engine.io_bytes(), list[float](), list[Waits]()
    # Beside the next step there must be time for the end of its update, which destroy waits for.
    while len(seconds) < work.steps and (not seconds or time.monotonic() + 2 * statistics.median(seconds) < end):
        began = time.perf_counter()
        losses.append(_step(engine, ids))
        seconds.append(time.perf_counter() - began)
        waits.append(watch.take())
        after, moved = engine.io_bytes(), len(seconds) * engine.parameter_count
        traffic = {
            "read_bytes_per_parameter": (after.read - before.read) / moved,
            "written_bytes_per_parameter": (after.written - before.written) / moved,
        }
        save(_sizes(work, engine, ids) | _times(seconds, waits, ids.numel()) | traffic | {"losses": losses})


def _sizes(work: Work, engine: offload.Engine, ids: torch.Tensor) -> dict[str, Any]:
    return {
        "parameters": engine.parameter_count,
        "tokens_per_step": ids.numel(),
        "host_memory": engine.host_memory,
        "device_memory": engine.device_memory,
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_device_bytes": torch.cuda.max_memory_allocated(work.device) if work.device.type == "cuda" else None,
        "notices": list(engine.notices),
    }


def _step(engine: offload.Engine, ids: torch.Tensor) -> float:
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _times(seconds: Sequence[float], waits: Sequence[Waits], tokens: int) -> dict[str, Any]:
    return {
        "steps": len(seconds),
        "step_seconds": statistics.median(seconds),
        "tokens_per_second": tokens / statistics.median(seconds),
        "exposed_copy_seconds": statistics.median(wait.copies for wait in waits),
        "exposed_io_seconds": statistics.median(wait.reads + wait.updates for wait in waits),
        "read_wait_seconds": statistics.median(wait.reads for wait in waits),
        "update_wait_seconds": statistics.median(wait.updates for wait in waits),
    }


# -- parts within a budget ----------------------------------------------------------------------------


def fitting(parts: Sequence[Part], seconds: float) -> list[Part]:
    """Those of `parts`, most important first, that fit into `seconds` one after the other."""
    chosen = []
    for part in parts:
        if part.seconds <= seconds:
            chosen.append(part)
            seconds -= part.seconds
    return chosen


def run_parts(
    parts: Sequence[Part],
    budget: float,
    run: Callable[[Part, float, float], dict[str, Any]],
    now: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run what fits into `budget` seconds; each part's name and how it went, those that were left out last.

    `run` gets a part, the seconds after which it should come to an end, and those after which it must.
    """
    deadline, pending = now() + budget, list(parts)
    while fits := fitting(pending, deadline - now()):
        part, left = fits[0], deadline - now()
        pending.remove(part)
        spare = left - sum(other.seconds for other in fits)
        soft = min(part.seconds + spare / len(fits), left - _LEAVING)
        yield part.name, run(part, soft, left)
    for part in pending:
        yield part.name, {"state": "skipped"}


def run_child(command: Sequence[str], figures: Path, seconds: float, **environment: str) -> dict[str, Any]:
    """Run a part's process for at most `seconds`: how it ended, its last lines, and what it left in `figures`."""
    log, start = figures.with_suffix(".log"), time.monotonic()
    with log.open("w") as words:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                timeout=max(seconds, 0.0),
                cwd=_ROOT,
                env=os.environ | environment,
                check=False,
            )
            state = "failed" if done.returncode else "done"
        except subprocess.TimeoutExpired:
            state = "stopped"
    result: dict[str, Any] = {"state": state, "seconds": time.monotonic() - start, "figures": None}
    if figures.exists():
        result["figures"] = json.loads(figures.read_text())
    if state == "failed":
        result["exit_code"] = done.returncode
        result["last_lines"] = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return result


def _write(path: Path, value: Any) -> None:
    """Replace the file at once: a reader, or whoever kills this process, never finds half of it."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(beside, path)


def judge(parts: Mapping[str, Mapping[str, Any]]) -> int:
    """The exit code: 1 where a placement gave other bits, a copy other bytes, or a part failed; else 0."""
    if any(part["state"] == "failed" for part in parts.values()):
        return 1
    jobs = _figures(parts, "bits").get("jobs", {}).values()
    wrong = [job for job in jobs if job["different"] or job["failed"]]
    ways = [_figures(parts, "copies").get(way) for way in ("upload", "download")]
    return 1 if wrong or not all(way["right"] for way in ways if way) else 0


def _figures(parts: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return parts.get(name, {}).get("figures") or {}


def add_exposure(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Give each placement the seconds that its step takes beyond that of none/none."""
    base = _figures(parts, "none/none").get("step_seconds")
    for name in PLACEMENTS:
        if base is not None and (figures := _figures(parts, name)):
            figures["exposed_seconds"] = figures["step_seconds"] - base


# -- words --------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "gpu": properties.name if properties else None,
        "gpu_memory": properties.total_memory if properties else None,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "offload": offload.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "cores": os.cpu_count(),
        "threads": kernels.thread_count(),
        "memory": psutil.virtual_memory().total,
        "kernel": os.uname().release,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip().partition("\n")[0] or None


def words(report: Mapping[str, Any]) -> str:
    """The report for people: one table for each kind of part, and a line for each part without figures."""
    parts = report["parts"]
    blocks = [_machine_words(report["machine"])]
    if _figures(parts, "bits"):
        blocks.append(_bits_words(_figures(parts, "bits")))
    if _figures(parts, "copies"):
        blocks.append(_copies_words(_figures(parts, "copies")))
    if measured := {name: _figures(parts, name) for name in PLACEMENTS if _figures(parts, name)}:
        blocks.append(_steps_words(report, measured))
    ends = []
    for name, part in parts.items():
        if part["state"] == "stopped":
            had = "its figures are those so far" if part["figures"] else "it had no figures yet"
            ends.append(f"{name} was stopped when the budget was over; {had}")
        elif part["state"] == "failed":
            ends += [f"{name} FAILED with exit code {part['exit_code']}; its last lines:"]
            ends += [f"    {line}" for line in part["last_lines"]]
    if skipped := [name for name, part in parts.items() if part["state"] == "skipped"]:
        ends.append(f"not run, since the budget was over: {', '.join(skipped)}")
    return "\n\n".join([*blocks, *(["\n".join(ends)] if ends else [])])


def _machine_words(facts: Mapping[str, Any]) -> str:
    where = "the CPU"
    if facts["gpu"]:
        where = f"{facts['gpu']}, {format_size(facts['gpu_memory'])}, driver {facts['driver']}, CUDA {facts['cuda']}"
    memory = format_size(facts["memory"])
    return f"{where}; torch {facts['torch']}; {facts['cores']} cores, {memory} RAM, Linux {facts['kernel']}"


def _bits_words(figures: Mapping[str, Any]) -> str:
    lines = [f"bits: {figures['steps']} steps in each placement of weights/states against none/none"]
    for job, found in figures["jobs"].items():
        seen = [*found["equal"], *found["different"], *found["failed"]]
        absent = [name for name in PLACEMENTS if name not in seen]
        lines.append(f"  {job:12} equal: {', '.join(found['equal']) or 'none of them'}")
        lines += [f"  {'':12} DIFFERENT {name}: {'; '.join(how)}" for name, how in found["different"].items()]
        lines += [f"  {'':12} FAILED {name}: {error}" for name, error in found["failed"].items()]
        lines += [f"  {'':12} not compared: {', '.join(absent)}"] if absent else []
    return "\n".join(lines)


def _copies_words(figures: Mapping[str, Any]) -> str:
    rows = [[f"copies of {format_size(figures['nbytes'])}", "GB/s", "pinned GB/s", "of pinned", ""]]
    for way in ("upload", "download"):
        if way in figures:
            row = figures[way]
            numbers = [row["gigabytes_per_second"], row["pinned_gigabytes_per_second"], row["fraction_of_pinned"]]
            rows.append([way, *(f"{number:.2f}" for number in numbers), "" if row["right"] else "WRONG BYTES"])
    pinned, host = format_size(figures["pinned_bytes"]), format_size(figures["host_bytes"])
    return f"{columns(rows)}\n{pinned} of the engine's {host} are pinned"


def _steps_words(report: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> str:
    given, some = report["given"], next(iter(measured.values()))
    head = (
        f"{given['model']}, {some['parameters']:,} parameters, bf16, a step is {given['batch_size']} x "
        f"{given['seq_len']} tokens"
    )
    titles = "weights/states|tokens/s|step s|over none/none|copies s|I/O s|reads s|updates s"
    rows = [f"{titles}|read B/p|written B/p|peak HBM|peak RSS|steps".split("|")]
    for name, figures in measured.items():
        over, peak = figures.get("exposed_seconds"), figures["peak_device_bytes"]
        waits = ("exposed_copy_seconds", "exposed_io_seconds", "read_wait_seconds", "update_wait_seconds")
        row = [name, f"{figures['tokens_per_second']:,.0f}", f"{figures['step_seconds']:.3f}"]
        row += ["-" if over is None else f"{over:+.3f}", *(f"{figures[wait]:.3f}" for wait in waits)]
        row += [f"{figures[f'{way}_bytes_per_parameter']:.1f}" for way in ("read", "written")]
        row += ["-" if peak is None else f"{peak / GIB:.1f} GiB", f"{figures['peak_host_bytes'] / GIB:.1f} GiB"]
        rows.append([*row, str(figures["steps"])])
    return f"{head}\n{columns(rows)}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


# -- the command --------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        why = "finds no CUDA device" if torch.version.cuda else "is built without CUDA"
        print(f"bench.gpu is skipped: torch {torch.__version__} {why}")
        return 0
    if given.part:
        _run_here(given)
        return 0
    return _run_all(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-minutes", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path(), help="for swap files: a folder on the drive to measure")
    parser.add_argument("--json", type=Path, default=Path("bench-gpu.json"), help="where all figures go")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a placement, fewer where time is short")
    parser.add_argument("--nbytes", default="256MiB", help="bytes of one copy")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=[part.name for part in PARTS], metavar="NAME", help="run this part alone")
    return parser


def _run_here(given: argparse.Namespace) -> None:
    device = torch.device(given.device, torch.cuda.current_device()) if given.device == "cuda" else torch.device("cpu")
    seconds = 60 * given.budget_minutes - (time.time() - psutil.Process().create_time())  # imports take some of them
    work = Work(
        device,
        given.folder,
        given.model,
        given.batch_size,
        given.seq_len,
        given.steps,
        seconds,
        parse_size(given.nbytes),
    )

    def save(figures: dict[str, Any]) -> None:
        _write(given.json, figures)

    if given.part == "bits":
        bits(work, save)
    elif given.part == "copies":
        copies(work, save)
    else:
        measure_steps(work, given.part, save)
    print(given.json.read_text(), end="")


def _run_all(given: argparse.Namespace) -> int:
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "machine": machine(torch.device(given.device)),
        "given": {key: getattr(given, key) for key in ("budget_minutes", *_PASSED_ON)},
        "parts": {},
    }
    with _terminable(), tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=given.folder.resolve()) as folder:

        def run(part: Part, soft: float, hard: float) -> dict[str, Any]:
            print(f"{part.name} …", flush=True)
            return run_part(part.name, given, Path(folder), soft, hard)

        for name, result in run_parts(PARTS, 60 * given.budget_minutes, run):
            report["parts"][name] = result
            add_exposure(report["parts"])
            _write(given.json, report)  # after each part: who ends this process early has what was measured
    print(f"\n{words(report)}\n\nall figures: {given.json}")
    return judge(report["parts"])


def run_part(name: str, given: argparse.Namespace, folder: Path, soft: float, hard: float) -> dict[str, Any]:
    """Run one part in a process of its own, that ends by itself about `soft` seconds from now, and by force at `hard`.

    `folder` is empty again afterwards: a part that was stopped leaves its swap files, a part that failed may.
    """
    files = folder / "swap"
    files.mkdir()
    figures = folder / "figures.json"
    command = [sys.executable, "-m", "bench.gpu", "--part", name, "--json", str(figures), "--folder", str(files)]
    command += ["--budget-minutes", str(soft / 60)]
    for key in _PASSED_ON:
        command += [f"--{key.replace('_', '-')}", str(getattr(given, key))]
    setting = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if name == "bits" else {}  # costs speed, so for no other part
    try:
        return run_child(command, figures, hard, HF_HUB_OFFLINE="1", **setting)
    finally:
        figures.unlink(missing_ok=True)
        shutil.rmtree(files)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, so that the part under way ends too and its files are removed."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
