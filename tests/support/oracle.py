"""The oracle of every test of training: a plain loop, and comparisons that must hold for any model.

    plain_loop      the same job in a few lines of PyTorch, with fp32 masters
    same_bits       losses, norms and final weights of several placements are equal, bit for bit
    kill_and_resume a run that is killed and resumed equals the unbroken one, bit for bit

A `Job` is made of module-level functions, so that another process can run it.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import offload
from offload.engine.training.model_inputs import to_device
from offload.layout.flat_layout import lay_out
from offload.layout.units import find_units
from tests.support import warm_process
from tests.support.device_process import engine_device, plain_device
from tests.support.fault_injection import LateQueue, use_queue
from tests.support.sampling import drawn

TIERS = ("none", "cpu", "nvme")

PLACEMENTS = tuple(itertools.product(TIERS, TIERS))
"""(weights, optimizer): all nine."""


class Job(NamedTuple):
    """A training run: the model, its data, its length, and the numbers of AdamW."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    """(model, step, micro-batch) to the loss."""
    steps: int = 4
    accumulation: int = 1
    lr: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: str = "fp32"
    seed: int = 0
    buffers: str | None = None
    """"same" gives floating-point buffers the dtype of the weights."""
    optimizer: str = "AdamW"
    params: tuple[tuple[str, Any], ...] = ()
    """Of the optimizer, beside lr and weight decay."""
    loss_scale: float = 256.0
    """In fp16."""
    logits: float = 1.0
    """The size of the largest, about: what a loss is a difference of (`tests.support.rounding_bounds`)."""
    stage: int = 3
    """Of ZeRO."""
    overlap: bool | None = None
    """`overlap_comm` of ZeRO."""
    sent: str | None = None
    """`communication_data_type`."""
    shard_size: int = -1
    """`mics_shard_size` of ZeRO: ranks of a replica, all by default."""
    node: int = 1
    """`zero_hpz_partition_size` of ZeRO: ranks of a node."""
    quantized: str = ""
    """Words after `zero_quantized_` of the keys of ZeRO that are on."""
    sequence: int = 1
    """`sequence_parallel_size`: ranks that share each sequence."""


class Result(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


# -- the plain loop -----------------------------------------------------------------------------------


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PlainOptimizer(torch.optim.Optimizer):
    """An optimizer that updates one parameter after the other, those with a gradient alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, self.state[p])

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class PlainLion(PlainOptimizer):
    """Lion: Chen et al. 2023, algorithm 2."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (beta1 * m + (1 - beta1) * p.grad).sign())
        m.mul_(beta2).add_((1 - beta2) * p.grad)


class PlainLamb(PlainOptimizer):
    """LAMB: You et al. 2020, algorithm 2, with bias correction and a bounded ratio."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        state["step"] += 1
        state["m"].mul_(0.9).add_(0.1 * p.grad)
        state["v"].mul_(0.999).add_(0.001 * p.grad.square())
        m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.999 ** state["step"])
        direction = m / (v.sqrt() + 1e-8) + group["weight_decay"] * p
        weight, length = p.norm(), direction.norm()
        ratio = 1.0 if weight == 0 or length == 0 else float(min(max(weight / length, 0.01), 10.0))
        p.sub_(group["lr"] * ratio * direction)


PLAIN: dict[str, Any] = {"Lion": PlainLion, "Lamb": PlainLamb}


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weights of an fp32 master; in bf16 ties round away from zero, as a split master rounds them."""
    if dtype is not torch.bfloat16:
        return master.to(dtype)
    return ((master.detach().view(torch.int32).to(torch.int64) + 0x8000) >> 16).to(torch.int16).view(dtype)


class PlainEngine:
    """The engine's calls in ordinary PyTorch: torch's optimizer, on fp32 masters where the model has 16 bits."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        self.module = job.model().to(plain_device())
        if job.dtype == "fp32":
            self.module.float()
        self.global_steps = 0
        self._job, self._norm, self._micro = job, 0.0, 0
        parameters = list(self.module.parameters())
        self._masters = parameters
        if job.dtype != "fp32":
            self._masters = [p.detach().float().clone().requires_grad_(p.requires_grad) for p in parameters]
            self.module.to(DTYPES[job.dtype])
            self._round()
        self._scale = job.loss_scale if job.dtype == "fp16" else 1.0
        trainable = [m for m in self._masters if m.requires_grad]
        if job.optimizer in PLAIN:
            self.optimizer = PLAIN[job.optimizer](trainable, job.lr, job.weight_decay, **dict(job.params))
        else:
            kind = getattr(torch.optim, job.optimizer)
            self.optimizer = kind(
                trainable, lr=job.lr, weight_decay=job.weight_decay, foreach=False, **dict(job.params)
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_device((args, kwargs), plain_device())
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss / self._job.accumulation * self._scale).backward(retain_graph=retain_graph)
        self._micro += 1
        if self._job.dtype != "fp32":
            for parameter, master in zip(self.module.parameters(), self._masters, strict=True):
                if parameter.grad is not None:
                    gradient = parameter.grad.float() / self._scale
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    parameter.grad = None

    def step(self) -> None:
        if self._micro < self._job.accumulation:
            return
        self._norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._job.clip or float("inf")))
        self.optimizer.step()
        self.zero_grad()
        self.global_steps += 1
        if self._job.dtype != "fp32":
            self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in zip(self.module.parameters(), self._masters, strict=True):
            parameter.copy_(rounded(master, parameter.dtype))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._micro = 0

    def get_global_grad_norm(self) -> float:
        return self._norm


def plain_loop(job: Job) -> Result:
    """Trains `job` in ordinary PyTorch."""
    return trained(PlainEngine(job), job)


# -- the engine ---------------------------------------------------------------------------------------


def config(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> dict[str, Any]:
    """Returns the DeepSpeed-style config of `job`; `options` go to the "offload" block. Poison is always on."""
    weights, states = placement
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": job.clip,
        "communication_data_type": job.sent,
        **({"sequence_parallel_size": job.sequence} if job.sequence > 1 else {}),
        "bf16": {"enabled": job.dtype == "bf16"},
        "fp16": {"enabled": job.dtype == "fp16", "loss_scale": job.loss_scale},
        "data_types": {"buffer_dtype": job.dtype if job.buffers else None},
        "optimizer": {
            "type": job.optimizer,
            "params": {"lr": job.lr, "weight_decay": job.weight_decay, **dict(job.params)},
        },
        "zero_optimization": {
            "stage": job.stage,
            "overlap_comm": job.overlap,
            "mics_shard_size": job.shard_size,
            "zero_hpz_partition_size": job.node,
            **{f"zero_quantized_{word}": True for word in job.quantized.split()},
            "offload_param": {"device": weights},
            "offload_optimizer": {"device": states},
        },
        "offload": {
            "nvme_path": str(folder),
            "device": engine_device(),
            "seed": job.seed,
            "debug": {"poison": True},
            **options,
        },
    }


def start(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> offload.Engine:
    """Starts an engine over the job's model, with its generators seeded as the plain loop's."""
    torch.manual_seed(job.seed)
    model = job.model()
    return offload.initialize(model=model, config=config(job, placement, folder, **options))[0]


def room_for(job: Job, units: int, ranks: int = 1) -> int:
    """Bytes of the `units` largest units on the device, or more where several ranks share them.

    A unit of several ranks ends at a multiple of so many pages; each matrix of Muon and SinkGD begins at a page of its
    own; with narrow states a page has twice as many elements.
    """
    model = job.model()
    itemsize = DTYPES[job.dtype].itemsize
    layouts = []
    for unit in find_units(model).units:
        named = [(name, model.get_parameter(name)) for name in unit.parameters]
        matrices = [name for name, _ in named] if ranks > 1 and job.optimizer in ("Muon", "SinkGD") else None
        layouts.append(lay_out(unit.name, named, 2 * ranks if ranks > 1 else 1, matrices=matrices))
    return sum(sorted(layout.numel * itemsize for layout in layouts)[-units:])


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks of gradients, of streamed units and of updates tiny, for tiny models."""
    from offload.engine.gradients import accumulator as gradients
    from offload.engine.gradients import host_gradients
    from offload.engine.gradients import reduce_scatter as reduction
    from offload.engine.gradients import values as gradient_values
    from offload.engine.optim import lamb_norms as weighing
    from offload.layout import tile_sizes as tiles
    from offload.layout.budgets import host as host_budget
    from offload.planner.simulation import updater as simulate_updater

    for module in (host_budget, gradient_values, gradients, host_gradients, reduction, weighing):
        monkeypatch.setattr(module, "CHUNK", 1024)
    for module in (tiles, simulate_updater):
        monkeypatch.setattr(module, "TILE_BUFFERS", 3)  # else tiles are most of a tiny budget
    monkeypatch.setattr(host_budget, "_WINDOW_NBYTES", 8192)
    monkeypatch.setattr(host_budget, "_STREAM_NBYTES", 8192)
    monkeypatch.setattr(tiles, "_TILE_NBYTES", range(16_000, 48_000))


def least_host_memory(job: Job, folder: Path, placement: tuple[str, str] = ("nvme", "nvme"), **options: Any) -> int:
    """Returns the smallest host budget that works, as the error names it."""
    try:
        start(job, placement, folder, host_memory=1, **options)
    except offload.errors.BudgetError as error:
        found = re.search(r"the least that works is [^(]*\((\d+) bytes\)", str(error))
        assert found is not None
        return int(found[1])
    raise AssertionError("one byte was enough")


def train_step(engine: offload.Engine | PlainEngine, job: Job, step: int) -> float:
    """Trains one step of `job` and returns the mean loss over its micro-batches."""
    loss = torch.zeros(())
    for micro in range(job.accumulation):
        part = job.loss(engine, step, micro)
        engine.backward(part)
        loss = loss + part.detach().float() / job.accumulation
        engine.step()
    return float(loss)


def accumulated_step(engine: Any, job: Job, step: int) -> float:
    """The same step by `Engine.accumulate`, in the order of the config's schedule."""
    parts = engine.accumulate(range(job.accumulation), lambda micro: job.loss(engine, step, micro))
    engine.step()
    loss = torch.zeros(())
    for part in parts:
        loss = loss + part.float() / job.accumulation
    return float(loss)


def trained(engine: offload.Engine | PlainEngine, job: Job, by: Callable[..., float] = train_step) -> Result:
    """Trains `job` from its first step to its last, `by` a function that trains one step."""
    losses, norms = [], []
    for step in range(job.steps):
        losses.append(by(engine, job, step))
        norms.append(engine.get_global_grad_norm())
    return Result(losses, norms, weights_of(engine))


def run(
    job: Job, placement: tuple[str, str], folder: Path, by: Callable[..., float] = train_step, **options: Any
) -> Result:
    """Trains `job` by the engine from its first step to its last, and remove its store."""
    engine = start(job, placement, folder, **options)
    try:
        return trained(engine, job, by)
    finally:
        engine.destroy(remove=True)


def weights_of(engine: offload.Engine | PlainEngine) -> dict[str, torch.Tensor]:
    """Weights and buffers of now: later steps leave them as they are."""
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def assert_same_tensors(left: Mapping[str, Any], right: Mapping[str, Any], what: str = "") -> None:
    """Asserts that two dicts of tensors are equal, bit for bit, on whichever devices they are."""
    assert left.keys() == right.keys(), f"{what}: only one has {sorted(left.keys() ^ right.keys())}"
    for name, value in left.items():
        assert torch.equal(value.cpu(), right[name].cpu()), f"{what}: {name} differs"


def assert_same(left: Result, right: Result, what: str = "") -> None:
    """Asserts that two results are equal, bit for bit."""
    assert left.losses == right.losses, f"{what}: losses differ"
    assert left.norms == right.norms, f"{what}: norms differ"
    assert_same_tensors(left.weights, right.weights, what)


def same_bits(job: Job, folder: Path, placements: Sequence[tuple[str, str]] | None = None, **options: Any) -> Result:
    """Trains `job` in several placements, asserts that all are equal, and returns the result.

    Without `placements` these are all in memory, all on disk, and one of the others as the test draws it.
    """
    if placements is None:
        placements = [PLACEMENTS[0], *drawn(PLACEMENTS[1:-1], 1), PLACEMENTS[-1]]
    first: Result | None = None
    for placement in placements:
        result = run(job, placement, folder / "-".join(placement), **options)
        first = first or result
        assert_same(first, result, f"{placements[0]} and {placement}")
    assert first is not None
    return first


# -- kill and resume ----------------------------------------------------------------------------------


def processes() -> Any:
    """Returns a context whose processes start from a server that has imported what tests need, and no more."""
    context = multiprocessing.get_context("forkserver")
    modules = [
        "pytest",
        "tests.support.models",
        "tests.support.fault_injection",
        "transformers.models.gpt2.modeling_gpt2",
        "tests.support.frozen_heap",
    ]
    context.set_forkserver_preload(modules)
    _fork_the_server()
    return context


@functools.cache
def _fork_the_server() -> None:
    """Starts the server from the one that the workers of a run share, which has imported all of that already."""
    python = warm_process.python_of_run()
    if python is not None:
        resource_tracker.ensure_running()  # a small process, by Python itself
        usual = spawn.get_executable()
        spawn.set_executable(python)
        try:
            forkserver.ensure_running()
        finally:
            spawn.set_executable(usual)


def dies(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls `function` in a process that SIGKILL must end."""
    process = processes().Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"it ended with {process.exitcode}"


def _until_killed(
    job: Job,
    placement: tuple[str, str],
    folder: Path,
    log: Path,
    by: Callable[..., float],
    late: float,
    options: dict[str, Any],
) -> None:
    """Trains in a process that may be killed, and writes a line of JSON for each step that `step()` has ended."""
    logging.disable(logging.CRITICAL)
    if late:
        use_queue(pytest.MonkeyPatch(), lambda: LateQueue(os.getpid(), late))
    engine = start(job, placement, folder, resume="auto", **options)
    with log.open("a") as lines:
        while engine.global_steps < job.steps:
            step = engine.global_steps
            loss = by(engine, job, step)
            print(json.dumps([step, loss, engine.get_global_grad_norm()]), file=lines, flush=True)
    torch.save(weights_of(engine), log.with_suffix(".weights"))
    engine.destroy(remove=True)


def kill_and_resume(
    job: Job,
    placement: tuple[str, str],
    folder: Path,
    kills: int,
    seed: int = 0,
    late: float = 0.0,
    by: Callable[..., float] = train_step,
    **options: Any,
) -> Result:
    """Runs `job` in a process that is SIGKILLed `kills` times at random moments of its steps, and resumed.

    `late` makes each request up to so many seconds late, so that most moments lie between the first write of an update
    and its commit.
    Steps that ran again after a resume must have given the same bits again.
    """
    chance = random.Random(seed)
    log = folder / "steps.jsonl"
    for attempt in range(kills + 1):
        process = processes().Process(target=_until_killed, args=(job, placement, folder, log, by, late, options))
        seen = log.stat().st_size if log.exists() else 0
        process.start()
        if attempt < kills:
            # Wait for the first step of this process, so that it is killed while it trains.
            while process.is_alive() and (log.stat().st_size if log.exists() else 0) == seen:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.2))
            assert process.is_alive(), "the process ended before it was killed: give the job more steps"
            process.kill()
        process.join()
        if attempt == kills:
            assert process.exitcode == 0, f"the last process ended with {process.exitcode}"
    losses: dict[int, tuple[float, float]] = {}
    for line in log.read_text().splitlines():
        step, loss, norm = json.loads(line)
        assert losses.setdefault(step, (loss, norm)) == (loss, norm), f"step {step} differs after a resume"
    weights = torch.load(log.with_suffix(".weights"), weights_only=True)
    order = sorted(losses)
    return Result([losses[s][0] for s in order], [losses[s][1] for s in order], weights)


# -- bytes and memory ---------------------------------------------------------------------------------


def batches(steps: int, accumulation: int) -> Iterator[tuple[int, int]]:
    """Yields (step, micro-batch) in order."""
    yield from itertools.product(range(steps), range(accumulation))
