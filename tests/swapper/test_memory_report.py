"""`engine.memory_report()` adds up to RSS, and names the contents of the budgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

import offload
from offload import testing
from offload.aio import aligned_empty, resident_bytes
from offload.sizes import MIB, align_up
from tests.support import models
from tests.support.oracle import Job, processes, start, train_step
from tests.support.processes.process_measures import peak_in

TOLERANCE = 64 * MIB
"""What may be resident beside base and budgets: activations of one layer, libraries that come with the first step."""


def middle() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=8, n_embd=512, n_head=8, vocab_size=256, n_positions=64, use_cache=False)
    )


def loss(model: torch.nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(step))
    return model(input_ids=ids, labels=ids).loss


def forked(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Call `function` in a process that has imported torch and done nothing yet: its result and peak RSS in bytes.

    As `peak_memory` does, in a tenth of the time. Its peak begins with what it has at its start.
    """
    return peak_in(processes(), function, *arguments)


def _train(folder: str, tiers: tuple[str, str]) -> dict[str, Any]:
    job = Job(middle, loss, steps=3, dtype="bf16")
    models.language_loss(models.gpt2().bfloat16(), 0, 0).backward()  # its libraries come with it
    engine = start(job, tiers, Path(folder))
    for step in range(job.steps):
        train_step(engine, job, step)
    before = psutil.Process().memory_info().rss
    report = engine.memory_report()
    rss = before, psutil.Process().memory_info().rss
    words = str(report)
    engine.destroy(remove=True)
    return {"report": dict(report), "rss": rss, "words": words, "host": engine.host_memory}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu"), ("none", "none")], ids=lambda tiers: tiers[0])
def test_it_adds_up_to_rss(tiers: tuple[str, str], tmp_path: Path) -> None:
    found = forked(_train, str(tmp_path), tiers)[0]
    host = found["report"]["host"]
    assert sum(nbytes for name, nbytes in host.items() if name != "rss") == host["rss"]
    before, after = sorted(found["rss"])  # threads of the engine may touch pages between the readings
    assert before - 2 * MIB <= host["rss"] <= after + 2 * MIB
    assert host["other_engines"] == 0
    assert abs(host["other"]) < TOLERANCE, "base and budgets explain RSS"
    assert 0 < host["arena"] <= align_up(found["host"]) and host["device_arena"] > 0
    assert "resident" in found["words"] and "tiles" in found["words"]


def test_classes_are_the_budget(tmp_path: Path) -> None:
    job = models.GPT2
    engine = start(job, ("nvme", "nvme"), tmp_path)
    train_step(engine, job, 0)
    report = engine.memory_report()
    assert sum(each["budget"] for each in report["classes"].values()) == report["host_memory"] == engine.host_memory
    assert all(each["used"] <= each["peak"] <= each["budget"] for each in report["classes"].values())
    # A CPU has no allocator to ask: the arena stands for the device.
    other = 0 if engine.device.type == "cpu" else report["allocator"]["allocated"] - engine.device_memory
    assert report["device"] == {
        "allocated": engine.device_memory + other,
        "arena": engine.device_memory,
        "in_use": testing.inspect(engine).device_arena.used_bytes,
        "other": other,
    }
    assert other >= 0
    second = offload.initialize(
        model=models.GPT2.model(),
        config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "offload": {"device": "cpu"}},
    )[0]
    assert second.memory_report()["host"]["other_engines"] > 0
    second.destroy()
    engine.destroy(remove=True)


def test_resident_bytes_are_those_that_were_touched() -> None:
    memory = aligned_empty(64 * MIB)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert resident_bytes(address, len(memory)) == 0
    memory[10 * MIB] = 1
    assert 0 < resident_bytes(address, len(memory)) <= 2 * MIB
    assert resident_bytes(address, 0) == 0
