"""A save may be killed at any moment: the checkpoint before stays, `latest` names an intact one, the next works."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoint import directory, save
from tests.support import models
from tests.support.drives.fault_injection import die
from tests.support.oracle import config, dies, processes, start, train_step

JOB = models.DROPOUT._replace(dtype="bf16", steps=4)
CPU = ("cpu", "cpu")
_REPLACES = ("all but the old one", "the old one goes", "the old one is empty", "between two renames")
"""Moments of a save of a tag that is there already."""


def before(module: Any, name: str, call: int = 1) -> Callable[[], None]:
    """Die at the `call`th call of a function."""

    def install() -> None:
        real, left = getattr(module, name), [call]

        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                die()
            return real(*arguments, **named)

        setattr(module, name, counted)

    return install


def after(module: Any, name: str) -> Callable[[], None]:
    """Die when a function returns."""

    def install() -> None:
        real = getattr(module, name)
        setattr(module, name, lambda *a, **n: (real(*a, **n), die()))

    return install


def without_exchange() -> None:
    directory.exchange = lambda *_: False


def between_renames() -> None:
    without_exchange()
    before(directory.os, "rename", 2)()


def after_renames() -> None:
    without_exchange()
    before(directory, "sync_folder", 2)()


MOMENTS: dict[str, Callable[[], None]] = {
    "the folder was made": after(save, "begin_folder"),
    "states are written": before(save, "crc32c_joined", 9),
    "states are there": after(save, "_write_states"),
    "the manifest is missing": before(save, "end_folder"),
    "nothing has its name": before(directory, "sync_folder"),
    "it has its name": before(directory, "sync_folder", 2),
    "latest follows": before(directory.os, "replace"),
    "all but the old one": before(directory, "delete"),
    "the old one goes": before(directory.os, "unlink", 3),  # the first is of `.latest.<tag>`
    "the old one is empty": before(directory.os, "rmdir"),
    "between two renames": between_renames,
    "after two renames": after_renames,
}


def save_and_die(folder: Path, moment: str | None, same_tag: bool, pipe: Any) -> None:
    """Save after each step for ever, or die at a moment of the second save."""
    logging.disable(logging.CRITICAL)
    engine = start(JOB, CPU, folder / "run")
    for step in range(1000):
        train_step(engine, JOB, step)
        if step and moment is not None:
            MOMENTS[moment]()
        engine.save_checkpoint(folder / "saved", tag="best" if same_tag else None, keep_last=2)
        pipe.send(step + 1)


def goes_on(folder: Path, least: int, same_tag: bool) -> int:
    """Load the latest in a new process' engine and compare it with an unbroken run; the step that it was saved at."""
    torch.manual_seed(99)
    engine = offload.initialize(model=JOB.model(), config=config(JOB, CPU, folder / "other"))[0]
    path, _ = engine.load_checkpoint(folder / "saved")
    assert path is not None and engine.global_steps >= least
    step = engine.global_steps
    losses = [train_step(engine, JOB, each) for each in range(step, step + 2)]
    tag = Path(path).name.strip(".").removesuffix(".old") if same_tag else None
    engine.save_checkpoint(folder / "saved", tag=tag, keep_last=1)
    assert len([path for path in (folder / "saved").iterdir() if path.name != "latest"]) == 1, "all that was left goes"
    engine.load_checkpoint(folder / "saved")
    assert engine.global_steps == step + 2
    engine.destroy()
    unbroken = start(JOB, CPU, folder / "whole")
    assert [train_step(unbroken, JOB, each) for each in range(step + 2)][step:] == losses
    unbroken.destroy()
    return step


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("moment", "same_tag"),
    [(moment, same) for moment in MOMENTS for same in (False, True) if same or moment not in _REPLACES],
)
def test_killed_at_each_moment(moment: str, same_tag: bool, tmp_path: Path) -> None:
    receiver, sender = processes().Pipe(duplex=False)
    dies(save_and_die, tmp_path, moment, same_tag, sender)
    assert receiver.recv() == 1 and not receiver.poll(), "it died in the second save"
    named = moment in ("latest follows", "it has its name", "after two renames")
    gone = moment in ("all but the old one", "the old one goes", "the old one is empty")
    step = goes_on(tmp_path, 1, same_tag)
    assert step == (2 if gone or (named and same_tag) else 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("same_tag", [False, True], ids=["others", "the same"])
def test_killed_at_random_moments(same_tag: bool, tmp_path: Path) -> None:
    chance = random.Random(same_tag)
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        receiver, sender = processes().Pipe(duplex=False)
        process = processes().Process(target=save_and_die, args=(folder, None, same_tag, sender))
        process.start()
        first = receiver.recv()
        time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        process.join()
        while receiver.poll():
            first = receiver.recv()
        assert goes_on(folder, first, same_tag) in (first, first + 1)
