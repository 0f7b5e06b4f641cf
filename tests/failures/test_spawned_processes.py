"""An exception that ends a process of `multiprocessing` is no end of the run: no later start replaces it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import StoreError
from tests.support.oracle import processes


def start(folder: Path, **options: Any) -> offload.Engine:
    torch.manual_seed(0)
    content = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
        "offload": {"device": "cpu", **options},
    }
    return offload.initialize(model=nn.Linear(8, 4), config=content)[0]


def train(index: int, folder: Path, fails: bool) -> None:
    """Commits a step, and ends as `fails` says, without a call of `destroy`."""
    engine = start(folder)
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
    if fails:
        raise ValueError("a bad batch")


def by_torch(folder: Path, fails: bool) -> None:
    if fails:
        with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="a bad batch"):
            torch.multiprocessing.spawn(train, (folder, True))
    else:
        torch.multiprocessing.spawn(train, (folder, False))


def by_python(folder: Path, fails: bool) -> None:
    process = torch.multiprocessing.get_context("spawn").Process(target=train, args=(0, folder, fails))
    process.start()
    process.join()
    assert process.exitcode == int(fails)


@pytest.mark.parametrize("spawn", [by_torch, by_python])
def test_an_exception_keeps_the_run(spawn: Callable[[Path, bool], None], tmp_path: Path) -> None:
    spawn(tmp_path, True)
    with pytest.raises(StoreError, match="resume"):
        start(tmp_path)
    engine = start(tmp_path, resume="must")
    assert engine.global_steps == 1
    engine.destroy(remove=True)


@pytest.mark.slow
def test_the_end_of_the_function_is_an_end_of_the_run(tmp_path: Path) -> None:
    by_torch(tmp_path, False)
    engine = start(tmp_path)
    assert engine.global_steps == 0
    engine.destroy(remove=True)


def begin_and_end(folder: Path) -> None:
    """Begins and ends an engine, and looks at what is called at the end of the process."""
    from multiprocessing import util

    before = len(util._finalizer_registry)
    start(folder).destroy(remove=True)
    assert len(util._finalizer_registry) == before


def test_a_destroyed_engine_is_not_kept_until_the_process_ends(tmp_path: Path) -> None:
    process = processes().Process(target=begin_and_end, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
