"""Parts of the benchmark, each run in a process of its own within the budget, and conclusions from their figures."""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

import offload
from offload.bench.configs import ALONE, for_deepspeed
from offload.bench.gpu.training import PLACEMENTS, Save, Work, config_for, sizes, step, timed, times
from offload.bench.measure import in_turns, median_ratio, random_ids, seconds_of
from offload.hardware.probe import drive_rates, measure_rates
from offload.presets import require_transformers
from offload.sizes import GIB
from offload.swapper.memory.device import Device, open_device
from offload.swapper.memory.host_arena import HostArena, HostBudget, HostBuffer, PinnedRegions


class Part(NamedTuple):
    """A part of the benchmark."""

    name: str
    seconds: float
    """Rough seconds from start to end, with the model of 1B parameters."""
    placement: str = ""
    """Placement for a part that trains a model: weights/states, or "planned"; empty for other parts."""
    changes: Mapping[str, Any] = {}
    """Fields of `Work` that replace those from the command's options."""


LIMIT = 24 * GIB
"""Bytes of memory of a common GPU."""
PLANNED = "planned"
BASE = "none/none"
"""The part whose step bounds those of the other placements."""
_SAME_WORK = ("model", "layers", "parameters", "tokens_per_step", "recompute")
_USUAL = {"none/none": 60.0, "nvme/nvme": 110.0, "cpu/cpu": 60.0}
_13B = {"model": "llama-13b", "batch_size": 4, "seq_len": 2048, "accumulation": 4, "recompute": True, "limit": LIMIT}
_FEW_BYTES = {"moments": "int8", "master": "bf24"}
_LAYERS = {"layers": 4, "accumulation": 1}


PARTS = (
    Part("bits", 75),
    Part("copies", 25),
    Part("rates", 25),
    *(Part(name, _USUAL.get(name, 75), name) for name in PLACEMENTS[:3]),
    Part("13B layers", 90, "nvme/nvme", _13B | _LAYERS),
    Part("tests", 150),
    *(Part(f"{name} in 24 GiB", _USUAL.get(name, 75), name, {"limit": LIMIT}) for name in PLACEMENTS[:3]),
    *(Part(name, _USUAL.get(name, 75), name) for name in PLACEMENTS[3:]),
    Part("DeepSpeed", 120),
    Part("7B", 240, PLANNED, _13B | {"model": "llama-7b"}),
    Part("8B", 260, PLANNED, _13B | {"model": "llama-8b"}),
    Part("13B in few bytes", 300, PLANNED, _13B | _FEW_BYTES),
    Part("13B", 420, PLANNED, _13B),
)
"""All parts, the most important first. `--only` restricts the choice; of the others, those that fit the budget run."""

DIRECTIONS = ("upload", "download", "both")
"""Directions of copies."""

_LEAVING = 5.0
"""Seconds that a part's process needs to end after its last measurement. A part whose steps take longer stops earlier
by itself: see `training.timed`."""


def fitting(parts: Sequence[Part], seconds: float) -> list[Part]:
    """Returns the parts that fit into `seconds` one after the other; earlier ones in `parts` take precedence."""
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
    """Runs the parts that fit into `budget` seconds. Yields each part's name and result, then those of skipped parts.

    `run` receives a part, the seconds after which the part should end, and the seconds after which it must have ended.
    """
    deadline, pending = now() + budget, list(parts)
    while fits := fitting(pending, deadline - now()):
        part, left = fits[0], deadline - now()
        pending.remove(part)
        spare = left - sum(other.seconds for other in fits)
        soft = min(part.seconds + spare / len(fits), left - _LEAVING)
        yield part.name, run(part, soft, left)
    for part in pending:
        yield part.name, {"state": "skipped", "needs_seconds": part.seconds}


def judge(parts: Mapping[str, Mapping[str, Any]]) -> int:
    """Returns the exit code: 1 if a placement gave other bits, a copy other bytes, or a test or part failed; else 0."""
    if any(part["state"] == "failed" for part in parts.values()):
        return 1
    jobs = figures_of(parts, "bits").get("jobs", {}).values()
    wrong = [job for job in jobs if job["different"] or job["failed"]]
    ways = [figures_of(parts, "copies").get(way) for way in DIRECTIONS]
    red = figures_of(parts, "tests").get("exit_code", 0)
    return 1 if wrong or red or not all(way["right"] for way in ways if way) else 0


def figures_of(parts: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Returns the figures of a part; empty if there are none."""
    return parts.get(name, {}).get("figures") or {}


def add_exposure(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds to the figures of each placement the seconds that its step takes beyond the step of none/none.

    Only steps of the same work are compared: the same model, tokens and recomputation. Nothing is added if the figures
    of none/none are missing or invalid.
    """
    base = figures_of(parts, BASE)
    if "step_seconds" not in base or BASE in invalid(parts):
        return
    for part in PARTS:
        figures = figures_of(parts, part.name)
        if part.placement in PLACEMENTS and all(figures.get(key) == base.get(key) for key in _SAME_WORK):
            figures["exposed_seconds"] = figures["step_seconds"] - base["step_seconds"]


def invalid(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the parts whose figures would mislead, each with the reason."""
    reasons = {}
    for name in parts:
        placement = name.partition(" in ")[0]
        missing = figures_of(parts, name).get("no_device_kernels")
        # States on the GPU are then copied to the host for each update and back: 12 bytes a parameter each way.
        if missing and placement in PLACEMENTS and placement.endswith("/none"):
            reasons[name] = f"the host, not the GPU, updated states that are on the GPU: {missing}"
    return reasons


def refused(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the parts whose figures are missing or incomplete, each with the reason."""
    reasons = {}
    for name, part in parts.items():
        if part["state"] == "failed":
            reasons[name] = f"failed with exit code {part['exit_code']}: {(part['last_lines'] or ['no words'])[-1]}"
        elif part["state"] == "stopped":
            reasons[name] = "stopped when the budget was over" + ("" if part["figures"] else ", without figures")
        elif part["state"] == "skipped":
            reasons[name] = f"not run: {part['needs_seconds']:.0f} s did not fit into the budget"
        elif why := figures_of(parts, name).get("skipped"):
            reasons[name] = why
    return reasons


def bounds(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the bounds of the figures; those that were not measured, or are invalid, are None or left out."""
    base, copies = figures_of(parts, BASE), figures_of(parts, "copies")
    return {
        "step_seconds": None if BASE in invalid(parts) else base.get("step_seconds"),
        "matmul": figures_of(parts, "rates").get("plain_matmul"),
        "pinned_gigabytes_per_second": {
            way: copies[way]["pinned_gigabytes_per_second"] for way in DIRECTIONS if way in copies
        },
        "most_read_bytes_per_parameter": 14,
        "most_written_bytes_per_parameter": 12,
    }


# -- copies --------------------------------------------------------------------------------------------
#
# Measurement of copies to and from the engine's host memory, in turns with copies of torch's own pinned memory.


def copies(work: Work, save: Save) -> None:
    """Measures copies to and from a host arena by the device object, in turns with the same copies by torch."""
    nbytes, device = work.copy_nbytes, open_device(work.device)
    copied = None if device.host_addressable else PinnedRegions(resident=0, promoted=0, tiles=True)
    arena = HostArena(HostBudget(nbytes, 0, 0, 0), device, copied=copied)  # registers its memory
    buffer = arena.tiles.take(nbytes)
    assert buffer is not None
    ours = buffer.tensor(torch.uint8).random_(0, 256)
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=work.device.type == "cuda")
    away = torch.empty(nbytes, dtype=torch.uint8, device=work.device)
    figures: dict[str, Any] = {"nbytes": nbytes, "host_bytes": arena.nbytes, "pinned_bytes": arena.pinned_bytes}

    def upload() -> None:
        device.upload(away, ours).wait()

    def download() -> None:
        device.download(ours, away).wait()

    figures["upload"] = _rates(work, upload, lambda: _copy(away, pinned))
    upload()  # again, since the last copy was torch's
    figures["upload"]["right"] = torch.equal(away.cpu(), ours)
    save(figures)
    away.copy_(ours.flip(0))
    device.synchronize()
    figures["download"] = _rates(work, download, lambda: _copy(pinned, away))
    figures["download"]["right"] = torch.equal(ours, away.cpu())
    save(figures)
    figures["both"] = _both(work, device, buffer)
    save(figures)
    arena.close()


def _both(work: Work, device: Device, buffer: HostBuffer) -> dict[str, Any]:
    """Returns the rates of copies in both directions at once, with half of the bytes in each direction."""
    half = work.copy_nbytes // 2
    up, down = buffer.tensor(torch.uint8)[:half], buffer.tensor(torch.uint8)[half : 2 * half]
    pinned = [torch.ones(half, dtype=torch.uint8, pin_memory=work.device.type == "cuda") for _ in range(2)]
    there, away = (torch.full((half,), value, dtype=torch.uint8, device=work.device) for value in (3, 5))
    streams = [torch.cuda.Stream(work.device) for _ in range(2)] if work.device.type == "cuda" else []
    up.fill_(7)
    device.synchronize()

    def ours() -> None:
        for event in (device.upload(there, up), device.download(down, away)):
            event.wait()

    def theirs() -> None:
        for number, (destination, source) in enumerate(((there, pinned[0]), (pinned[1], away))):
            with torch.cuda.stream(streams[number]) if streams else nullcontext():
                destination.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    speeds = _rates(work, ours, theirs)
    ours()  # again, since the last copies were torch's
    speeds["right"] = bool((there.cpu() == 7).all()) and bool((down == 5).all())
    return speeds


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)
    if destination.is_cuda or source.is_cuda:
        torch.cuda.current_stream().synchronize()


def _rates(work: Work, mine: Callable[[], None], theirs: Callable[[], None]) -> dict[str, Any]:
    seconds, bound = in_turns(mine, theirs, work.rounds)
    return {
        "gigabytes_per_second": work.copy_nbytes / statistics.median(seconds) / 1e9,
        "pinned_gigabytes_per_second": work.copy_nbytes / statistics.median(bound) / 1e9,
        "fraction_of_pinned": median_ratio(bound, seconds),
    }


# -- rates ---------------------------------------------------------------------------------------------
#
# Rates of the machine without a model: matrix products in a plain loop, the optimizer, copies, the drive.


_OF_A_COPY = 8
"""Bytes of the file on the drive, as a multiple of a copy's: more than the drive's own cache holds."""
_PRODUCTS = 20


def rates(work: Work, save: Save) -> None:
    """Measures matrix products in a plain loop, and all rates of `offload probe` for this device and this drive."""
    measured = measure_rates(work.device)._asdict()
    # Only the rates for bf16 are kept, since the benchmark trains in bf16.
    measured |= measured.pop("by_dtype")["bf16"]._asdict()
    figures = {"plain_matmul": plain_matmul(work.device, work.rounds), **measured}
    save(figures)
    drive = drive_rates(str(work.folder), _OF_A_COPY * work.copy_nbytes)
    save(figures | {"drive": {name: value for name, value in drive._asdict().items() if name != "path"}})


def plain_matmul(device: torch.device, rounds: int) -> float:
    """Returns the floating-point operations per second of square bf16 products, the bound for a model's products."""
    width = 8192 if device.type == "cuda" else 256
    one, other = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(one, other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the products are measured, not their launch

    products()
    return 2 * width**3 * _PRODUCTS / statistics.median(seconds_of(products) for _ in range(rounds))


# -- correctness ---------------------------------------------------------------------------------------
#
# Comparison of all placements on tiny models: losses, norms and weights must equal those of none/none bit for bit.


class _Tiny(NamedTuple):
    """A small model: class of its config, settings of the config, and micro-batches of a step."""

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
"""Models by name. Each has more blocks than the device arena holds, so that weights are moved. GPT-2 has dropout and a
tied embedding."""
_VOCABULARY = 128
JOBS = tuple(f"{model} {dtype}" for model in _TINY for dtype in ("bf16", "fp32"))


class _Result(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def bits(
    work: Work, save: Save, jobs: Sequence[str] = JOBS, placements: Sequence[str] = PLACEMENTS, steps: int = 5
) -> None:
    """Trains each job in each placement, and compares the results with those of a separate training in none/none.

    Nothing else may use CUDA in this process before, since cuBLAS reads CUBLAS_WORKSPACE_CONFIG when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    figures: dict[str, Any] = {"steps": steps, "jobs": {}}
    try:
        for job in jobs:
            verdict: dict[str, Any] = {"equal": [], "different": {}, "failed": {}}
            figures["jobs"][job] = verdict
            expected = _train(job, "none/none", work, steps)
            for placement in placements:
                try:
                    differences = _differences(expected, _train(job, placement, work, steps))
                except Exception as error:  # the other placements can still be compared
                    verdict["failed"][placement] = f"{type(error).__name__}: {error}"
                else:
                    if differences:
                        verdict["different"][placement] = differences
                    else:
                        verdict["equal"].append(placement)
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
    settings = config_for(placement, work, dtype, accumulation=tiny.accumulation, clip=1.0)
    settings["offload"]["debug"] = {"poison": True}
    engine = offload.initialize(model=model, config=settings)[0]
    try:
        torch.manual_seed(1)
        losses, norms = [], []
        for step in range(steps):
            for micro in range(tiny.accumulation):
                ids = random_ids((2, 32), _VOCABULARY, seed=100 * step + micro)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                losses.append(float(loss.detach()))
                engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
        weights = {key: value.cpu().clone() for key, value in engine.module.state_dict().items()}
    finally:
        engine.destroy(remove=True)
    return _Result(losses, norms, weights)


def _differences(expected: _Result, actual: _Result) -> list[str]:
    """Returns the first difference of each kind in words; an empty list if all bits are equal."""
    words = []
    for what, wanted, have in (("loss", expected.losses, actual.losses), ("norm", expected.norms, actual.norms)):
        for index, (a, b) in enumerate(zip(wanted, have, strict=True), 1):
            if a != b:
                words.append(f"{what} {index} is {b}, not {a}")
                break
    names = [name for name, value in expected.weights.items() if not _same_bits(value, actual.weights[name])]
    if names:
        words.append(f"{len(names)} of {len(expected.weights)} tensors of the state dict, the first is {names[0]}")
    return words


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(t.flatten().view(torch.uint8) for t in (one, other)))


# -- gpu tests -----------------------------------------------------------------------------------------
#
# A run of the tests that need a GPU, by pytest.


_ROOT = Path(__file__).resolve().parents[3]
"""Root of the checkout, if the package is part of one."""
FILES = (
    "tests/accelerators/test_gpu.py",
    "tests/kernels/test_kernels_cuda.py",
    "tests/kernels/test_kernels_adamw.py",
    "tests/swapper/test_pinning.py",
    "tests/aio/test_deepnvme.py",
)
_LAST_LINES = 30


def gpu_tests(work: Work, save: Save, files: tuple[str, ...] = FILES, marked: str = "gpu") -> None:
    """Runs the tests in `files` that have the marker `marked`, and saves the counts of their results.

    If pytest ends with an error, the last lines of its output are saved too.
    """
    missing = [name for name in files if not (_ROOT / name).exists()]
    if missing or importlib.util.find_spec("pytest") is None:
        what = f"there is no {missing[0]}" if missing else "pytest is not installed"
        save({"skipped": f"{what}: the tests are run from a checkout with its tools (make test)"})
        return
    command = [sys.executable, "-m", "pytest", "-m", marked, "-p", "no:cacheprovider", "--basetemp"]
    command += [str(work.folder / "pytest"), *files]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    counts = {how: int(count) for count, how in re.findall(r"(\d+) (passed|failed|skipped|error)", (lines or [""])[-1])}
    save({"exit_code": done.returncode, **counts, "last_lines": lines[-_LAST_LINES:] if done.returncode else []})


# -- deepspeed -----------------------------------------------------------------------------------------
#
# The steps of cpu/cpu by DeepSpeed's ZeRO-3, with weights and states in RAM, if DeepSpeed is installed.


def deepspeed_steps(work: Work, save: Save) -> None:
    """Trains the model of `work` as cpu/cpu does, by DeepSpeed, and times its steps."""
    if importlib.util.find_spec("deepspeed") is None:
        save({"skipped": "DeepSpeed is not installed"})
        return
    import deepspeed

    end = time.monotonic() + work.seconds
    settings = for_deepspeed(config_for("cpu/cpu", work, "bf16", work.accumulation))
    work.keep_limit()
    os.environ.update(ALONE)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model: Any = work.build()
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    ids = random_ids((work.batch_size, work.seq_len), model.config.vocab_size).to(work.device)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    losses = [step(engine, ids, work.accumulation) for _ in range(2)]
    for seconds, loss in timed(work, end, lambda: step(engine, ids, work.accumulation)):
        losses.append(loss)
        save(sizes(work, parameters) | times(work, seconds, parameters) | {"losses": losses})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
