"""The contenders of this package, and plain PyTorch, with which all are compared."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import offload
from offload.bench.child_process import run_child, write_json
from offload.bench.configs import ALONE, LEARNING_RATE, WEIGHT_DECAY, for_deepspeed, placed
from offload.bench.measure import (
    DriveSpeeds,
    drive_rates,
    kernel_bytes,
    limit_device_memory,
    median_rates,
    random_ids,
    resident,
)
from offload.bench.train.plan import CONTENDERS, PLAIN, Contender, TrainJob, TrainPlan, reason_to_skip
from offload.finetune.model import make_ready
from offload.presets import build
from offload.sizes import MIB

# -- trainer -------------------------------------------------------------------------------------------
#
# A contender as it trains: its model, its data, and the times of its steps.


UNCOUNTED = 2
"""Untimed steps at the start of a turn. The first one records the access order, and no update overlaps it."""

Batch = dict[str, torch.Tensor]


class Step(NamedTuple):
    """A step's loss, the mean over its micro-batches, and its seconds, in all and by phase if known."""

    loss: float
    seconds: float
    forward: float | None = None
    backward: float | None = None
    update: float | None = None


class Trainer(NamedTuple):
    """A model and its optimizer, ready to train."""

    parameters: int
    vocabulary: int
    step: Callable[[Sequence[Batch]], Step]
    settle: Callable[[], None] = lambda: None
    """Waits for the updates that still run after a step."""
    moved: Callable[[], tuple[int, int]] | None = None
    """Returns the bytes read from and written to files so far; None if only Linux counts them."""
    close: Callable[[], None] = lambda: None


def model_of(name: str, recompute: bool = False) -> nn.Module:
    """Returns a preset's model on the CPU in fp32, with the same weights in each process and no dropout.

    With dropout, losses could not be compared: contenders draw random numbers in different orders. With `recompute` the
    model itself computes its activations again in the backward, the same way for each contender.
    """
    torch.manual_seed(0)
    model = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    make_ready(model, recompute)
    return model.train()


def batches_of(job: TrainJob, vocabulary: int) -> list[Batch]:
    """Returns the micro-batches of every step: the same tokens again, so that a wrong update shows in the next loss."""
    shape = (job.batch_size, job.seq_len)
    ids = [random_ids(shape, vocabulary, seed).to(job.device) for seed in range(job.micro_batches)]
    return [{"input_ids": row, "labels": row} for row in ids]


def in_phases(
    job: TrainJob,
    batches: Sequence[Batch],
    forward: Callable[[Batch], torch.Tensor],
    backward: Callable[[torch.Tensor], Any],
    update: Callable[[bool], Any],
) -> Step:
    """Makes a step and returns its loss and times.

    `update` ends a micro-batch, and receives True for the last one of the step.
    """
    spent, losses = [0.0] * 3, list[torch.Tensor]()
    for index, batch in enumerate(batches):
        # Only the calls lie between two readings of the clock, so the phases sum to the step.
        times = [time.perf_counter()]
        loss = forward(batch)
        times.append(time.perf_counter())
        backward(loss)
        times.append(time.perf_counter())
        update(index == len(batches) - 1)
        times.append(time.perf_counter())
        losses.append(loss.detach())  # read at the end: each read waits for the device
        spent = [total + end - start for total, (start, end) in zip(spent, pairwise(times), strict=True)]
    start = time.perf_counter()
    mean = float(torch.stack(losses).mean())  # waits for the device, as a loop that logs does
    seconds = sum(spent) + time.perf_counter() - start
    # A GPU is still busy with a phase when the call returns.
    return Step(mean, seconds, *spent) if job.device == "cpu" else Step(mean, seconds)


def take_turn(job: TrainJob, begin: Callable[[TrainJob], Trainer]) -> dict[str, Any]:
    """Trains for the steps of a turn and returns the figures.

    Bytes are counted for the steps after the first, by the contender or else by Linux.
    """
    start = time.perf_counter()
    if job.gpu_memory is not None and job.contender != PLAIN:  # plain PyTorch offloads nothing, so it needs all
        limit_device_memory(torch.device(job.device), job.gpu_memory)
    trainer = begin(job)
    try:
        batches = batches_of(job, trainer.vocabulary)
        first = trainer.step(batches)
        started = time.perf_counter() - start
        # The bytes of an update that still runs would count for the next steps.
        trainer.settle()
        moved, counted = trainer.moved or kernel_bytes, UNCOUNTED - 1
        before = moved()
        steps = [trainer.step(batches) for _ in range(counted + job.steps)]
        trainer.settle()
        after = moved()
        peak = resident("VmHWM")  # before `close`, which allocates too
    finally:
        trainer.close()
    read = written = None
    if before is not None and after is not None:
        read, written = ((now - then) / len(steps) for then, now in zip(before, after, strict=True))
    return {
        "parameters": trainer.parameters,
        "losses": [first.loss, *(step.loss for step in steps)],
        "seconds": [step.seconds for step in steps[counted:]],
        **{
            f"{phase}_seconds": [getattr(step, phase) for step in steps[counted:]]
            for phase in ("forward", "backward", "update")
        },
        "seconds_to_first_step": started,
        "peak_host_bytes": peak,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if job.device == "cuda" else None,
        "read_bytes": read,
        "written_bytes": written,
    }


# -- loops ---------------------------------------------------------------------------------------------


def config_of(job: TrainJob, contender: Contender) -> dict[str, Any]:
    """Returns the config of a job in a contender's placement, for engines that read DeepSpeed's JSON."""
    device = torch.device(job.device)
    return placed(contender.placement, Path(job.folder), device, job.batch_size, job.dtype, job.micro_batches)


def plain(job: TrainJob, contender: Contender) -> Trainer:
    """Returns plain PyTorch: everything in memory, torch's fused AdamW, in bf16 on fp32 masters."""
    model: Any = model_of(job.model, job.recompute).to(job.device)
    parameters = list(model.parameters())
    masters = parameters
    if job.dtype == "bf16":
        # The masters reuse the memory of the fp32 weights, so that there is only one fp32 copy.
        masters = [nn.Parameter(parameter.detach()) for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.detach().bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    @torch.no_grad()
    def update(last: bool) -> None:
        if not last:
            return
        for parameter, master in zip(parameters, masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        # In fp32 a weight is its own master.
        for parameter, master in zip(parameters, masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    return Trainer(
        parameters=sum(parameter.numel() for parameter in parameters),
        vocabulary=model.config.vocab_size,
        step=lambda batches: in_phases(
            job, batches, lambda batch: model(**batch).loss, lambda loss: (loss / job.micro_batches).backward(), update
        ),
    )


def ours(job: TrainJob, contender: Contender) -> Trainer:
    """Returns an engine of this package, in the contender's placement and order."""
    settings = config_of(job, contender)
    settings["offload"] |= {"run": "bench-train", "schedule": contender.schedule}
    with offload.init(settings):
        model: Any = model_of(job.model, job.recompute)
    # The initial weights come from a file: `offload.init` draws other numbers than plain PyTorch.
    offload.load_pretrained(model, job.weights)
    engine = offload.initialize(model=model, config=settings)[0]

    def whole(batches: Sequence[Batch]) -> Step:
        # Forward and backward alternate between micro-batches, so neither phase can be timed alone.
        start = time.perf_counter()
        loss = float(engine.train_batch(iter(batches)))
        return Step(loss, time.perf_counter() - start)

    def phases(batches: Sequence[Batch]) -> Step:
        return in_phases(job, batches, lambda batch: engine(**batch).loss, engine.backward, lambda last: engine.step())

    return Trainer(
        parameters=engine.parameter_count,
        vocabulary=model.config.vocab_size,
        step=whole if contender.schedule == "layer_major" else phases,
        settle=engine.synchronize,
        moved=engine.io_bytes,
        close=lambda: engine.destroy(remove=True),
    )


# -- peers ---------------------------------------------------------------------------------------------
#
# The contenders of other packages: DeepSpeed's ZeRO-3, FSDP2 with CPU offload, torchao's optimizer on the CPU.
#
# Each peer is set up as in its own documentation, with settings that make its states fit and use the drive. A comment
# explains each setting that is not a default.


_ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}
_BUFFERS = 8
"""Parameters that DeepSpeed has in buffers at a time."""


def deepspeed(job: TrainJob, contender: Contender) -> Trainer:
    """Returns DeepSpeed's ZeRO-3 in the contender's placement.

    The model is built in full and passed to DeepSpeed, and the peak of memory includes it. Inside `deepspeed.zero.Init`
    the weights would differ, and losses could not be compared.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        os.environ.update(ALONE | {"MASTER_PORT": str(listener.getsockname()[1])})
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # Imported after the environment is set, since DeepSpeed reads the environment when it is imported.
    import deepspeed

    model: Any = model_of(job.model, job.recompute)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    settings = for_deepspeed(config_of(job, contender), pin_memory=job.device != "cpu")
    _use_drive(settings, job, max(parameter.numel() for parameter in model.parameters()))
    engine = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())[0]
    return Trainer(
        parameters=parameters,
        vocabulary=model.config.vocab_size,
        step=lambda batches: in_phases(
            job, batches, lambda batch: engine(**batch).loss, engine.backward, lambda last: engine.step()
        ),
        close=_leave_group,
    )


def _use_drive(settings: dict[str, Any], job: TrainJob, largest: int) -> None:
    """Adds the settings that DeepSpeed needs for tiers on the drive.

    One buffer must hold the `largest` parameter.
    """
    zero = settings["zero_optimization"]
    for key in ("offload_param", "offload_optimizer"):
        if zero[key]["device"] == "nvme":
            zero[key] |= {"nvme_path": job.folder, "buffer_count": _BUFFERS}
    if zero["offload_param"]["device"] == "nvme":
        # Without `max_in_cpu` 0, weights of a small model would stay in RAM. With prefetches, buffers would run out.
        zero["offload_param"] |= {"buffer_size": largest, "max_in_cpu": 0}
        zero["stage3_prefetch_bucket_size"] = 0
    # DeepSpeed's default of 8 requests in flight is too low for an NVMe drive.
    settings["aio"] = {"block_size": MIB, "queue_depth": 32, "overlap_events": True, "single_submit": False}


def fsdp2(job: TrainJob, contender: Contender) -> Trainer:
    """Returns FSDP2 with weights, gradients and states in RAM, in a process group of one."""
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    backend = "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl"
    init_process_group(backend, rank=0, world_size=1, store=torch.distributed.HashStore())  # type: ignore[attr-defined]
    model: Any = model_of(job.model, job.recompute)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    options: dict[str, Any] = {
        "mesh": init_device_mesh(job.device, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=job.device != "cpu"),
    }
    if job.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Blocks, the children of the longest list, are wrapped before the model, which then owns only the other parameters.
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in max(lists, key=len, default=nn.ModuleList()):
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
    return _with_optimizer(job, model, parameters, optimizer, _leave_group)


def torchao(job: TrainJob, contender: Contender) -> Trainer:
    """Returns torchao's CPUOffloadOptimizer: weights on the GPU in fp32, in bf16 by autocast, states in RAM."""
    from torchao.optim import CPUOffloadOptimizer

    model: Any = model_of(job.model, job.recompute).to(job.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **_ADAMW)
    return _with_optimizer(job, model, parameters, optimizer, autocast=job.dtype == "bf16")


def _with_optimizer(
    job: TrainJob,
    model: Any,
    parameters: int,
    optimizer: Any,
    close: Callable[[], None] = lambda: None,
    autocast: bool = False,
) -> Trainer:
    """Returns the ordinary loop over a model and an optimizer.

    With `autocast` the forward computes in bf16 on weights in fp32.
    """

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(job.device, torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(**batch).loss
        return loss

    def update(last: bool) -> None:
        if last:
            optimizer.step()
            optimizer.zero_grad()

    return Trainer(
        parameters=parameters,
        vocabulary=model.config.vocab_size,
        step=lambda batches: in_phases(
            job, batches, forward, lambda loss: (loss / job.micro_batches).backward(), update
        ),
        close=close,
    )


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# -- rounds --------------------------------------------------------------------------------------------
#
# The rounds of `offload bench train`: contenders take turns, and the drive is measured between the rounds.


_PROBE_BYTES = 256 * MIB
_LONGEST = 900.0
"""Seconds after which a turn is ended. DeepSpeed's first turn compiles its operators, which takes minutes."""


class Result(NamedTuple):
    """The results of the rounds."""

    rates: DriveSpeeds
    """Medians of the drive's rates before, between and after the rounds."""
    turns: dict[str, list[dict[str, Any]]]
    """Figures of each turn by the contender's name; none for a contender that did not train."""
    refused: dict[str, str]
    """Contenders that did not train, or failed in a later round, each with the reason."""


def measure(plan: TrainPlan, tell: Callable[[str], None] = lambda _: None, until: float = math.inf) -> Result:
    """Runs all rounds, then removes the files in the plan's folder.

    Each turn is a new process, so that no contender holds memory while another one is measured. A contender that fails
    takes no further turns. Turns end at the latest when the clock `time.monotonic` is at `until`.
    """
    rates: list[DriveSpeeds] = []
    turns: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in plan.contenders}
    refused: dict[str, str] = {}
    for contender in plan.contenders:
        if reason := reason_to_skip(contender, plan.device):
            refused[contender.name] = f"skipped: {reason}"
    with tempfile.TemporaryDirectory(prefix="bench-train-", dir=plan.folder) as name:
        folder = Path(name)
        tell("the weights with which all begin")
        from safetensors.torch import save_model

        save_model(model_of(plan.model), str(folder / "model.safetensors"))
        # Rates drift with time as steps do, so they are measured before, between and after the rounds.
        with drive_rates([folder / "probe"], _PROBE_BYTES) as drive:
            for number in range(plan.rounds):
                tell(f"round {number + 1} of {plan.rounds}: the drive")
                rates.append(drive())
                for contender in plan.contenders:
                    if contender.name in refused:
                        continue
                    tell(f"round {number + 1} of {plan.rounds}: {contender.name}")
                    figures = _turn(plan, contender, folder, min(_LONGEST, until - time.monotonic()))
                    if "error" in figures:
                        refused[contender.name] = figures["error"]
                    else:
                        turns[contender.name].append(figures)
            rates.append(drive())
    return Result(median_rates(rates), turns, refused)


def _turn(plan: TrainPlan, contender: Contender, folder: Path, longest: float) -> dict[str, Any]:
    """Runs one turn in a process of its own and returns its figures; of one that failed the "error".

    The turn is ended after `longest` seconds.
    """
    if longest <= 0:
        return {"error": "left out for time"}
    files, written = folder / "swap", folder / "figures.json"
    files.mkdir()
    job = TrainJob(
        contender=contender.name,
        folder=str(files),
        weights=str(folder / "model.safetensors"),
        **{name: getattr(plan, name) for name in TrainJob._fields[3:]},
    )
    threads = {name: str(plan.threads) for name in ("OMP_NUM_THREADS", "OFFLOAD_THREADS")}
    try:
        result = run_child("offload.bench.train.loops", job._asdict(), written, longest, **threads)
    finally:
        shutil.rmtree(files)
        written.unlink(missing_ok=True)
    figures: dict[str, Any] | None = result["figures"]
    # A process that was stopped, or that the system has killed, has written no error.
    if result["state"] == "stopped":
        return {"error": f"stopped after {longest / 60:.3g} minutes"}
    if figures is None:
        last = (result["last_lines"] or ["no words"])[-1]
        return {"error": f"ended with exit code {result['exit_code']}: {last}"}
    # A process that fails during its shutdown has written its figures, so its training counts.
    return figures


def main(job_json: str, figures: Path) -> None:
    """Takes a turn, in the process of `_turn`, and writes its figures, or the error that ended it, which is raised."""
    job = TrainJob(**json.loads(job_json))
    contender = next(known for known in CONTENDERS if known.name == job.contender)
    begin = {"plain": plain, "offload": ours, "deepspeed": deepspeed, "fsdp2": fsdp2, "torchao": torchao}
    try:
        write_json(figures, take_turn(job, lambda job: begin[contender.kind](job, contender)))
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        write_json(figures, {"error": f"{type(error).__name__}: {words}"})
        raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
