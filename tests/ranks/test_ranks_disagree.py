"""Ranks whose models, configs or calls differ get an error on every rank, and a collective that failed is no end."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offload
from offload import testing
from offload.engine import setup
from offload.errors import ConfigError, RankError, UsageError
from tests.support.oracle import config
from tests.support.param_states import gpt2
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start

DISK = ("nvme", "nvme")


def with_a_buffer() -> nn.Module:
    model = gpt2()
    model.register_buffer("seen", torch.zeros(3), persistent=False)
    return model


def with_a_frozen_norm() -> nn.Module:
    model = gpt2()
    model.get_parameter("transformer.ln_f.bias").requires_grad_(False)
    return model


WRONG: dict[str, Any] = {
    "parameters": lambda job: job._replace(model=with_a_frozen_norm),
    "buffers": lambda job: job._replace(model=with_a_buffer),
    "buffer_dtype": lambda job: job._replace(buffers="same"),
    "fp16": lambda job: job._replace(dtype="fp16", loss_scale=2 * job.loss_scale),
    "stage": lambda job: job._replace(stage=1),
    "overlap_comm": lambda job: job._replace(overlap=False),
    "zero_quantized_weights": lambda job: job._replace(quantized="weights"),
    "zero_quantized_nontrainable_weights": lambda job: job._replace(quantized="nontrainable_weights"),
    "zero_quantized_gradients": lambda job: job._replace(quantized="gradients"),
    "communication_data_type": lambda job: job._replace(sent="bf16"),
}
"""Changes of a job on one rank alone."""


def wrong(folder: Path, what: str) -> str:
    """The error that this rank gets."""
    rank, _ = rank_and_size()
    job = JOBS["gpt2"]._replace(accumulation=1 + (what == "accumulation" and rank))
    try:
        if what == "model" and rank:
            job = JOBS["llama"]
        if what in WRONG and rank:
            job = WRONG[what](job)
        elif what == "fp16":
            job = job._replace(dtype="fp16")
        others = {"config": {"no such key": 1}, "schedule": {"schedule": "micro_batch_major"}}
        options = others.get(what, {}) if rank else {}
        early = mock.patch.object(setup, "load_config", side_effect=KeyboardInterrupt)
        with early if what == "ctrl-c" and rank else contextlib.nullcontext():
            engine = start(job, DISK, folder, **options)
    except (ConfigError, RankError, KeyboardInterrupt) as error:
        return str(error)
    try:
        if what == "step":
            if rank == 0:
                engine.destroy(remove=True)
            else:
                loss = job.loss(engine, 0, 0)
                engine.backward(loss)
                engine.step()
        if what == "end":
            engine.destroy(remove=rank == 1)
        if what in ("lr", "zero_grad"):
            engine.optimizer.param_groups[0]["lr"] = 0.01 * (1 + (what == "lr" and rank))
            engine.backward(job.loss(engine, 0, 0))
            if what == "zero_grad" and rank == 1:
                engine.zero_grad()
            engine.step()
        if what == "edit":
            if rank == 0:
                with torch.no_grad():
                    engine.module.get_parameter("lm_head.weight").fill_(0)
            engine.destroy(remove=True)
        if what == "micro-batches":
            for _ in range(1 + rank):
                engine.backward(job.loss(engine, 0, 0))
            engine.step()
    except (RankError, UsageError) as error:
        return str(error)
    finally:
        try:
            engine.destroy(remove=True)
        except RankError:
            pass
    return ""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("model", ("the units of rank 1 and of rank 0 differ",) * 2),
        ("accumulation", ("the batch of rank 1 and of rank 0 differ",) * 2),
        *((what, (f"the {what} of rank 1 and of rank 0 differ",) * 2) for what in (*WRONG, "schedule")),
        ("parameters", (r"differ: \['transformer.ln_f.bias', \[\d+\], False\], not \[.*, True\]; give",) * 2),
        ("step", (r"rank 0 closes its engine; rank 1 is at step\(\)",) * 2),
        ("end", ("rank 0 keeps its store; rank 1 deletes its store: all ranks must do the same",) * 2),
        ("lr", (r"differ in their learning rates or other settings of the optimizer \(checksums\): \d+, \d+",) * 2),
        ("zero_grad", (r"rank 0 is at step\(\); rank 1 drops its gradients \(zero_grad\)",) * 2),
        ("config", ("rank 1 has ended before it created its engine: ConfigError", "unknown key")),
        ("ctrl-c", ("rank 1 has ended before it created its engine: KeyboardInterrupt", "")),
        ("edit", ("rank 0 changes the weights of .*; rank 1 closes its engine",) * 2),
        ("micro-batches", ("the ranks differ in their micro-batches since the last boundary: 1, 2",) * 2),
    ],
)
def test_ranks_that_disagree_get_an_error_on_every_rank(
    what: str, messages: tuple[str, str], ranks: RankPool, tmp_path: Path
) -> None:
    for message, pattern in zip(ranks.run(wrong, tmp_path, what), messages, strict=True):
        assert re.search(pattern, message), message


def start_with_samples(folder: Path) -> str:
    """The error of ranks with data sets of different lengths."""
    rank, _ = rank_and_size()
    content, data = config(JOBS["gpt2"], DISK, folder), TensorDataset(torch.zeros(20 + 8 * rank, 4))
    with pytest.raises(ConfigError) as error:
        offload.initialize(model=nn.Linear(4, 4), config=content, training_data=data)
    return str(error.value)


def test_data_sets_of_different_lengths_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(start_with_samples, tmp_path):
        assert message.startswith("training_data= contains 20 samples on rank 0 and 28 on rank 1: give every rank")


class Failed:
    """A collective that has ended, and not well."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> None:
        raise RuntimeError("connection closed")


def test_a_collective_that_has_failed_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was gathered ahead may have failed long before anybody waits for it."""
    from offload.distributed.process_group import CollectiveWork, ProcessGroup

    ranks = object.__new__(ProcessGroup)
    testing.replace(monkeypatch, "ranks.blame", lambda self, error: RankError(f"gone: {error}"))
    with pytest.raises(RankError, match="gone: connection closed"):
        CollectiveWork(ranks, Failed(), "gather weights").wait()
