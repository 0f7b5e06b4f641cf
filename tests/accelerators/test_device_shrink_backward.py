"""Memory comes back after a backward that did not fit, or a shortage that torch hid, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import testing
from offload.engine import device_budget
from offload.sizes import PAGE
from offload.swapper.memory import device as torch_allocator
from offload.swapper.memory.device import DONE
from offload.swapper.memory.device_arena import DeviceArena
from tests.accelerators.grown_device import JOB, grown, small, too_much
from tests.support.devices.late_device import LateDevice, Ticks
from tests.support.oracle import assert_same_tensors, run, train_step, weights_of


@pytest.mark.sample(1)
@pytest.mark.parametrize("uncounted", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_backward_that_does_not_fit_fails_and_its_repetition_fits(
    accumulation: int, uncounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With totals of gradients in grown memory, in the middle of a step, too."""
    job = JOB._replace(accumulation=accumulation, steps=4, dtype="bf16" if accumulation > 1 else "fp32")
    expected = run(job, ("none", "none"), tmp_path / "plain")
    made = engine, device, hungry = small(monkeypatch, tmp_path, job)
    device.uncounted = uncounted
    at_first = engine.device_memory
    with Ticks(device):
        losses = grown(made, job)
        for step in range(1, job.steps):
            if step == 2:
                for micro in range(accumulation):
                    loss = job.loss(engine, step, micro)
                    hungry.backward = too_much(made) if micro == accumulation - 1 else 0
                    if hungry.backward:
                        with pytest.raises(torch.OutOfMemoryError, match=r"gives back .* with its next call"):
                            engine.backward(loss)
                        del loss
                    else:
                        engine.backward(loss)
                        engine.step()
                engine.zero_grad()
                assert engine.device_memory == device.arena == at_first
            losses.append(train_step(engine, job, step))
    assert losses == expected.losses and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


def test_totals_on_the_device_survive_memory_that_is_given_back_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOB._replace(accumulation=3, steps=4, dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "plain")
    made = engine, device, hungry = small(monkeypatch, tmp_path, job)
    with Ticks(device):
        losses, norms = grown(made, job), [engine.get_global_grad_norm()]
        for step in range(1, job.steps):
            total = torch.zeros(())
            for micro in range(3):
                hungry.forward = too_much(made) if (step, micro) == (2, 1) else 0
                if hungry.forward:
                    assert testing.inspect(engine).gradient_totals, "there is something to lose"
                part = job.loss(engine, step, micro)
                engine.backward(part)
                total = total + part.detach().float() / 3
                engine.step()
            losses.append(float(total))
            norms.append(engine.get_global_grad_norm())
    assert losses == expected.losses and norms == expected.norms and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


def test_an_error_of_the_model_itself_is_found_in_torchs_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of `generate`, which calls the model and not the engine."""
    made = engine, device, hungry = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    grown(made)
    hungry.forward = too_much(made)
    with torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError):
            engine.module(torch.zeros(1, 4, dtype=torch.long))
        engine.module(torch.zeros(1, 4, dtype=torch.long))
    assert engine.device_memory == device.arena == at_first
    engine.destroy(remove=True)


def test_memory_comes_back_at_the_end_of_a_step_in_which_torch_freed_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    made = engine, device, _ = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    grown(made)
    loss = JOB.loss(engine, 1, 0)
    device.retry()
    engine.backward(loss)
    assert engine.device_memory > at_first, "in the middle of a step units would only come again"
    engine.step()
    assert engine.device_memory == device.arena == at_first
    assert "the last step was short of device memory" in caplog.text
    engine.destroy(remove=True)


def test_a_view_of_weights_in_use_delays_the_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine, device, _ = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    grown(made)
    held: list[torch.Tensor] = []
    blocks = engine.module.transformer.h
    hooks = [b.register_forward_hook(lambda m, *_: held.append(m.mlp.c_fc.weight.detach()[:1])) for b in blocks]
    engine(torch.zeros(1, 4, dtype=torch.long))
    for hook in hooks:
        hook.remove()
    more = engine.device_memory
    assert engine.empty_partition_cache() == 0 and engine.device_memory == more
    values = [each.clone() for each in held]
    engine(torch.zeros(1, 4, dtype=torch.long))
    assert all(torch.equal(a, b) for a, b in zip(values, held, strict=True))
    held.clear()
    engine(torch.zeros(1, 4, dtype=torch.long))
    assert engine.device_memory == device.arena == at_first
    engine.destroy(remove=True)


def test_memory_is_not_given_to_torch_before_copies_into_it_have_ended() -> None:
    """torch would use it at once for compute, which does not wait for the stream of uploads."""
    device = LateDevice(0, 1.0)
    arena = DeviceArena(PAGE, device)
    start, stop = arena.grow(2 * PAGE)
    block = arena.take_at(start, stop - start)
    assert arena.shrink() == 0, "somebody is in it"
    source = torch.ones(2 * PAGE, dtype=torch.uint8)
    copied = device.upload(arena.view(block), source)
    arena.give(block, copied, DONE)
    assert not copied.done() and arena.shrink() == 2 * PAGE and copied.done()
    assert arena.nbytes == PAGE and arena.shrink() == 0 and len(arena.blocks) == 1
    again, _ = arena.grow(PAGE)
    assert again > start and arena.take(PAGE) is not None


def test_the_counters_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"num_alloc_retries": 3, "num_ooms": 2, "other": {}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("it"))
    for name, counts, times in (("cuda:0", (3, 2), 1), ("cpu", (0, 0), 1)):
        device = torch.device(name)
        assert torch_allocator.shortages(device) == counts
        torch_allocator.empty_cache(device)
        assert len(emptied) == times
    assert device_budget.shortages is torch_allocator.shortages
