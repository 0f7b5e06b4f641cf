"""On a device with late streams, inputs on their way between tiers keep the bits of the plain CPU run."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.activations.kept_inputs import KeptInput, KeptInputs
from tests import device
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.modules.checkpointed import JOB, WIDTH, batch, gives_back, kept, running, small_inputs_move, stack

pytestmark = pytest.mark.test_device
DEPTH = 14
PLAIN = ("none", "none")


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


def _loss(model: Any, step: int, micro: int, rows: int = 64) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, micro, (rows, WIDTH))).square().mean()
    return loss


# -- what a step does ---------------------------------------------------------------------------------


def _plainly(engine: offload.Engine, step: int, chance: random.Random) -> None:
    engine.backward(_loss(engine, step, 0))


def _retained(engine: offload.Engine, step: int, chance: random.Random) -> None:
    loss = _loss(engine, step, 0)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


def _dropped(engine: offload.Engine, step: int, chance: random.Random) -> None:
    """Graphs that end while their inputs are on their way: before the backward, and in its middle."""
    _loss(engine, step, 1)
    middle = _loss(engine, step, 2)
    _loss(engine, step, 3)
    torch.autograd.grad(middle, list(engine.module.blocks[DEPTH - 3].parameters()))
    del middle
    engine.backward(_loss(engine, step, 0))


def _two(engine: offload.Engine, step: int, chance: random.Random) -> None:
    """Of two sizes, backward in either order."""
    losses = [_loss(engine, step, 0, 64), _loss(engine, step, 1, 80)]
    chance.shuffle(losses)
    for loss in losses:
        engine.backward(loss)


STEPS: dict[str, Callable[[offload.Engine, int, random.Random], None]] = {
    "plain": _plainly,
    "retained": _retained,
    "dropped": _dropped,
    "two": _two,
}


def _norms(play: str, seed: int, folder: Path, **options: Any) -> list[float]:
    chance = random.Random(seed)
    found = []
    with running(JOB._replace(model=stack(DEPTH)), folder, PLAIN, **options) as engine:
        for step in range(4):
            STEPS[play](engine, step, chance)
            engine.step()
            found.append(engine.get_global_grad_norm())
        found += [float(value.cpu().double().sum()) for value in engine.module.state_dict().values()]
        gc.collect()
        if "activations" in options:
            gives_back(engine)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lateness", [0.5, 0.95, 1.0])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("play", STEPS)
def test_inputs_on_their_way_keep_every_bit(
    play: str, tier: str, lateness: float, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late` makes requests to the drive late as well; until a read has ended, its memory holds NaN."""
    seed = int(lateness * 100) + late
    expected = _norms(play, seed, tmp_path / "plain", device="cpu")
    if late:
        use_queue(monkeypatch, lambda: LateQueue(seed, 0.003))
    device.seed(seed, lateness)
    assert _norms(play, seed, tmp_path / "late", activations=tier) == expected


@pytest.mark.sample(2)
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("lateness", [0.5, 1.0])
def test_an_input_that_is_changed_while_it_is_copied_is_refused(behind: int, lateness: float, tmp_path: Path) -> None:
    """The copy may have the old bytes, the new ones, or some of both."""
    device.seed(5, lateness)
    seen: list[torch.Tensor] = []

    def change(module: Any, args: Any, output: torch.Tensor) -> None:
        seen.append(args[0])
        if len(seen) == 6:
            with torch.no_grad():
                seen[5 - behind].mul_(2)

    with running(JOB._replace(model=stack(DEPTH)), tmp_path, PLAIN, activations="cpu") as engine:
        for block in engine.module.blocks:
            block.register_forward_hook(change)
        with pytest.raises(RuntimeError, match="was changed in place since the unit received it"):
            engine.backward(_loss(engine, 0, 0))


def test_memory_of_an_upload_that_nobody_waits_for_is_not_given_to_other_compute(tmp_path: Path) -> None:
    """The backward ends before it comes to the input that is on its way."""
    with running(JOB._replace(model=stack(DEPTH)), tmp_path, PLAIN, activations="cpu") as engine:
        for seed in range(8):
            device.seed(seed, 1.0)
            loss = _loss(engine, seed, 0)
            torch.autograd.grad(loss, list(engine.module.blocks[DEPTH - 3].parameters()))
            del loss
            kept(engine).recover()
            others = [torch.full((64, WIDTH), 7.0, device=engine.device) for _ in range(24)]
            torch.accelerator.synchronize()
            assert all(bool((other == 7.0).all()) for other in others)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_an_upload_ahead_without_device_memory_is_made_when_it_is_needed(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _norms("plain", 3, tmp_path / "plain", device="cpu")
    upload, refused = KeptInputs._upload, []

    def without_memory(self: KeptInputs, kept: KeptInput) -> None:
        if sys._getframe(1).f_code is KeptInputs._fetch_ahead.__code__:
            refused.append(kept.position)
            raise torch.OutOfMemoryError("of the test")
        upload(self, kept)

    testing.replace(monkeypatch, "input.upload", without_memory)
    device.seed(3, 0.95)
    assert _norms("plain", 3, tmp_path / "late", activations=tier) == expected
    assert refused
