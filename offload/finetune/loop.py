"""The training loop of a job. It steps, and evaluates and saves the model between steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.checkpoint.directory import make_folder
from offload.engine.engine import Engine, IoBytes
from offload.fileio import atomic_write
from offload.finetune.corpus.token_stream import EvaluationReport
from offload.finetune.job import Job
from offload.finetune.output import MARK
from offload.metrics.flops import rates
from offload.planner.sustained import step_seconds
from offload.swapper.store.inspection import look


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The log's facts about one step. Bytes and seconds are counted from the last return of `step()` to this one."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    read_bytes: int
    written_bytes: int
    measured: Mapping[str, float]
    """Further measurements of the step by the engine. Only the first rank has them."""
    drives: Mapping[str, int]
    """Bytes that the run has written to each drive so far, in all its processes."""
    predicted_seconds: float | None = None
    """Prediction for this step, by the curves of its drives and the bytes that this process wrote before it."""

    def line(self) -> dict[str, Any]:
        line = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.predicted_seconds is None:
            del line["predicted_seconds"]
        line |= {name: value for name, value in line.pop("measured").items() if name not in line}
        return line | {"drives": line.pop("drives"), "time": time.time()}


class SavedModel(NamedTuple):
    """The fact that the model was saved to `folder` after `step` steps."""

    step: int
    folder: Path


def about(job: Job) -> dict[str, Any]:
    """Returns the facts on the run for the first line of a log."""
    engine, config, memory = job.engine, job.engine.config, job.engine.memory_report()
    halves = config["bf16"]
    predicted = {"predicted": dict(job.predicted)} if job.predicted else {}
    return {
        "run": job.run,
        "run_id": None if job.folder is None else look(Path(job.folder) / "rank0").run_id,
        "model": type(engine.module).__name__,
        "parameters": engine.parameter_count,
        "dtype": next((name for name in ("bf16", "fp16") if config[name]["enabled"]), "fp32"),
        "moments": config["offload"]["moments"] or ("bf16" if halves["bf16_optimizer_states"] else "fp32"),
        "master": config["offload"]["master"],
        "kernels": job.identity.kernels,
        "device": str(engine.device),
        "ranks": engine.world_size,
        "steps": job.steps,
        "samples_a_step": engine.train_batch_size(),
        "host_budget_bytes": engine.host_memory,
        "device_budget_bytes": engine.device_memory,
        "planned_peak_bytes": memory["host"]["base"] + sum(memory["planned"].values()),
        "drive_tbw": config["offload"]["drive_tbw"],
        "drive_budget": config["offload"]["drive_budget"],
        "drive_share": config["offload"]["drive_share"],
        **predicted,
    }


def steps(
    job: Job, hold: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[StepReport | EvaluationReport | SavedModel]:
    """Trains from the step after the last committed one, and yields a report of each step, evaluation and save.

    All ranks must iterate alike. `hold` returns a context in which no signal raises. The context spans the end of a
    step and the caller's use of the report, so that every step that a stopped run has committed is reported too.
    """
    engine, accumulation = job.engine, job.engine.gradient_accumulation_steps()
    engine.train()
    since_step = _SinceStep(engine)
    by_written = job.predicted.get("sustained", {}).get("by_written", ())
    while engine.global_steps < job.steps:
        step, lr = engine.global_steps + 1, engine.get_lr()[0]
        before = sum(drive.run_bytes for drive in engine.drive_writes())
        inputs = [job.data.batches.inputs(step, micro_batch) for micro_batch in range(accumulation)]
        parts = engine.accumulate(inputs, lambda batch: engine(**batch, **job.always).loss)
        loss = 0.0
        for part in parts:  # a loop, since `sum` rounds differently in newer Pythons
            loss += float(part) / accumulation
        loss = engine.mean(loss)
        tokens = sum(batch["input_ids"].numel() for batch in inputs) * engine.world_size
        with hold():
            engine.step()
            # Taken before the report is yielded: the caller's time with the report counts for the next step.
            seconds, read, written = since_step.take()
            norm = engine.get_global_grad_norm()
            assert norm is not None
            # Bytes of all processes of the run since its start: wear is counted over the life of a drive.
            drives = {drive.path: drive.life_bytes for drive in engine.drive_writes()}
            # The context of `hold` lasts until the caller resumes the generator.
            yield StepReport(
                step=step,
                loss=loss,
                grad_norm=norm,
                lr=lr,
                tokens=tokens,
                seconds=seconds,
                read_bytes=read,
                written_bytes=written,
                measured={**(rates(job.flops, seconds, job.peak) if job.flops else {}), **engine.measured},
                drives=drives,
                predicted_seconds=step_seconds(by_written, before) if by_written else None,
            )
        evaluates = job.eval_every and (step % job.eval_every == 0 or step == job.steps)
        # The final model is saved after training.
        saves = job.save_every and step % job.save_every == 0 and step < job.steps
        if not (evaluates or saves):
            continue
        with since_step.pause():
            if evaluates:
                yield evaluate(job)
            if saves:
                with hold():
                    yield _saved(job)


class _SinceStep:
    """Counts an engine's seconds and bytes since its last step, without those of pauses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._time, self._moved = time.perf_counter(), engine.io_bytes()

    def take(self) -> tuple[float, int, int]:
        """Ends a step; returns its seconds, and the bytes that were read and written."""
        last, before = self._time, self._moved
        self._time, self._moved = time.perf_counter(), self._engine.io_bytes()
        return self._time - last, self._moved.read - before.read, self._moved.written - before.written

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out the seconds and bytes of the body, which evaluates or saves.

        Updates that still run at the call count for the next step, because the pause begins only at their end.
        """
        self._engine.synchronize()
        began, before = time.perf_counter(), self._engine.io_bytes()
        yield
        after = self._engine.io_bytes()
        # Both marks move on by the pause's seconds and bytes, so that `take` leaves them out.
        self._time += time.perf_counter() - began
        self._moved = IoBytes(
            self._moved.read + after.read - before.read, self._moved.written + after.written - before.written
        )


def evaluate(job: Job) -> EvaluationReport:
    """Returns the loss on the held-out sequences, without dropout. All ranks must call, between steps."""
    engine, held_out, begin = job.engine, job.data.held_out, time.perf_counter()
    assert held_out is not None

    def loss_of(inputs: Mapping[str, torch.Tensor]) -> float:
        return float(engine(**inputs, **job.always).loss)

    engine.eval()
    try:
        with torch.no_grad():
            loss = held_out.loss(loss_of, engine.mean)
    finally:
        engine.train()
    return EvaluationReport(engine.global_steps, loss, time.perf_counter() - begin)


def _saved(job: Job) -> SavedModel:
    """Saves the model into `checkpoint-<step>` below the output folder, atomically. All ranks must call."""
    assert job.output is not None
    folder = job.output / f"checkpoint-{job.engine.global_steps}"
    # The mark is written before the first checkpoint: a job that is killed and starts again recognizes its own folder.
    if job.engine.global_rank == 0:
        make_folder(job.output)
        atomic_write(job.output / MARK, json.dumps(job.identity._asdict()))
    job.engine.save_pretrained(folder, tokenizer=job.tokenizer)
    return SavedModel(job.engine.global_steps, folder)
