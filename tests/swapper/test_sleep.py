"""An engine gives its memory back between steps, and trains on with the same bits."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.aio import resident_bytes
from offload.deepspeed.zero import OffloadDeviceEnum, OffloadStateTypeEnum
from offload.errors import BudgetError, UsageError
from tests import device
from tests.support import models
from tests.support.oracle import TIERS, accumulated_step, assert_same, run, start, train_step, trained

JOB = models.GPT2._replace(steps=3, dtype="bf16", accumulation=2)


def resident(engine: offload.Engine) -> int:
    arena = testing.inspect(engine).host_arena
    return resident_bytes(arena.address, arena.nbytes)


def on_device(engine: offload.Engine) -> int:
    """Bytes that the engine takes of its device: counted by the allocator of the test device, resident on a CPU."""
    if device.loaded():
        return device.memory()["allocated"]
    return int(engine.memory_report()["host"]["device_arena"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("states", TIERS)
@pytest.mark.parametrize("weights", TIERS)
def test_a_run_that_sleeps_and_wakes_at_random_steps_has_the_bits_of_an_undisturbed_one(
    weights: str, states: str, tmp_path: Path
) -> None:
    expected = run(JOB, (weights, states), tmp_path / "undisturbed")
    engine, chance = start(JOB, (weights, states), tmp_path / "sleeps"), random.Random(f"{weights}-{states}")

    def step(engine: Any, job: Any, number: int) -> float:
        for _ in range(chance.randrange(3)):
            engine.sleep(host=chance.random() < 0.5)
            assert engine.asleep
        if chance.random() < 0.5:
            engine.wake()
        return train_step(engine, job, number)

    assert_same(trained(engine, JOB, step), expected)
    assert not engine.asleep
    engine.sleep(host=True)
    engine.destroy(remove=True)


def test_with_all_states_in_files_nothing_stays_in_memory(tmp_path: Path) -> None:
    engine = start(JOB, ("nvme", "nvme"), tmp_path)
    train_step(engine, JOB, 0)
    engine.synchronize()
    assert resident(engine) > 0 and on_device(engine) > 0
    arena, before = engine.device_memory, on_device(engine)
    freed = engine.sleep()
    assert freed.host == 0 and resident(engine) > 0
    if device.loaded():
        assert before - on_device(engine) == freed.device == arena
    freed = engine.sleep(host=True)
    assert resident(engine) == 0 and freed.host > 0 and testing.inspect(engine).host_arena.pinned_bytes == 0
    assert engine.memory_report()["device"]["arena"] == 0
    engine.destroy()
    engine = start(JOB, ("nvme", "nvme"), tmp_path, resume="must")
    assert engine.global_steps == 1
    engine.destroy(remove=True)


def test_an_engine_with_gradients_or_a_graph_of_weights_does_not_sleep(tmp_path: Path) -> None:
    engine = start(JOB, ("none", "none"), tmp_path)
    loss = JOB.loss(engine, 0, 0)
    with pytest.raises(UsageError, match=r"a view of some is held .*a graph whose backward has not run"):
        engine.sleep()
    engine.backward(loss)  # unharmed
    with pytest.raises(UsageError, match=r"while gradients wait for step\(\).*zero_grad"):
        engine.sleep()
    engine.zero_grad()
    engine.sleep()
    engine.destroy(remove=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["micro_batch_major", "layer_major"])
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "in a dead cycle"])
def test_after_a_backward_that_failed_no_graph_keeps_an_engine_awake(schedule: str, kept: bool, tmp_path: Path) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path, schedule=schedule, activations="cpu")

    def fail(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: 1 // 0)

    handle = engine.module.transformer.h[1].register_forward_hook(fail)
    gc.disable()  # no luck
    try:
        try:
            accumulated_step(engine, JOB, 0)
        except ZeroDivisionError as error:
            error.args = (error,) if kept else ()
        handle.remove()
        engine.zero_grad()
        held = testing.inspect(engine).activation_bytes > 0
        assert held == kept
        engine.sleep()
    finally:
        gc.enable()
    engine.destroy(remove=True)


def test_a_graph_from_before_the_sleep_is_refused_by_its_backward(tmp_path: Path) -> None:
    engine = start(JOB, ("nvme", "cpu"), tmp_path)
    loss = JOB.loss(engine, 0, 0)
    engine.sleep()
    with pytest.raises(UsageError, match=r"graph made before.*or sleep\(\) has given them back"):
        loss.backward()
    assert not engine.asleep
    engine.destroy(remove=True)


def test_an_engine_whose_memory_others_have_taken_sleeps_on_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(JOB, ("none", "cpu"), tmp_path)
    expected = [train_step(engine, JOB, step) for step in range(2)]
    engine.destroy(remove=True)
    engine = start(JOB, ("none", "cpu"), tmp_path)
    losses = [train_step(engine, JOB, 0)]
    engine.sleep()

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(testing.inspect(engine).device), "take_back", refuse)
        with pytest.raises(BudgetError, match="others took while the engine was asleep, and call again"):
            engine.wake()
    assert engine.asleep and [*losses, train_step(engine, JOB, 1)] == expected
    engine.destroy(remove=True)


def test_deepspeeds_names_are_sleep_and_wake_and_check_their_arguments(tmp_path: Path) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path)
    for wrong in ({"include": ["moments"]}, {"device": "nvme"}, {"pin_memory": 1}, {"non_blocking": None}):
        with pytest.raises(UsageError, match=r"offload_states expects"):
            engine.offload_states(**wrong)
    assert not engine.asleep
    engine.offload_states([OffloadStateTypeEnum.optim_states, "lp_params"], OffloadDeviceEnum.cpu, non_blocking=True)
    assert engine.asleep
    engine.reload_states()
    assert not engine.asleep
    engine.destroy(remove=True)


def test_named_weights_are_those_of_the_state_dict_and_are_copies(tmp_path: Path) -> None:
    engine = start(JOB, ("nvme", "nvme"), tmp_path)
    train_step(engine, JOB, 0)
    expected = engine.state_dict()
    weights = dict(engine.named_weights())
    assert set(expected) - set(weights) == {"lm_head.weight"}  # tied
    for name, weight in weights.items():
        assert weight.device == engine.device and torch.equal(weight.cpu(), expected[name])
        weight.zero_()
    assert torch.equal(next(engine.named_weights())[1].cpu(), next(iter(expected.values())))
    engine.destroy(remove=True)
