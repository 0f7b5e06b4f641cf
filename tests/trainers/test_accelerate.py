"""Accelerate's loop runs on an engine: its documented calls work, and training equals an ordinary loop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState

import offload
from offload.hf import Accelerator
from tests.support import models
from tests.support.trainer_runs import DISK, FEW, MEMORY, Run, Texts, assert_close, assert_same, config, seeded

EPOCHS, CLIP = 2, 0.5


@pytest.fixture(autouse=True)
def _another_accelerator() -> Any:
    """Its state belongs to the process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def parts(model: Any = models.gpt2) -> tuple[Any, Any, Any, Any]:
    """A model, its optimizer, data and schedule, as a script makes them."""
    network = seeded(model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.1)
    loader = torch.utils.data.DataLoader(Texts(FEW), batch_size=2, shuffle=True)
    return network, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def loop(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any) -> Run:
    """The loop of Accelerate's documentation. An epoch's five batches leave a step of one at its end."""
    logs: list[dict[str, float]] = []
    model.train()
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    logs.append({"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate})
    weights = accelerator.unwrap_model(model).state_dict()
    return Run(logs, {name: value.clone() for name, value in weights.items()})


def by_engine(folder: Path, tier: str = DISK, accumulation: int = 2, **blocks: Any) -> Run:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, offload_config=config(folder, tier, **blocks)
    )
    try:
        return loop(accelerator, *accelerator.prepare(*parts()))
    finally:
        if accelerator.engine is not None:
            accelerator.engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.works("Trainers", "Accelerate's loop: `accumulate`, `backward`, `clip_grad_norm_`", "right")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.numeric
def test_the_loop_equals_accelerates_own(accumulation: int, tmp_path: Path) -> None:
    """Accumulation with a rest at the end, clip, schedule, shuffle."""
    mine = by_engine(tmp_path, accumulation=accumulation)
    AcceleratorState._reset_state(True)
    plain = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    theirs = loop(plain, *plain.prepare(*parts()))
    assert_close(mine, theirs)
    assert min(log["grad_norm"] for log in mine.logs) > CLIP, "the clip acts at every step"


def test_on_disk_it_is_what_it_is_in_memory(tmp_path: Path) -> None:
    assert_same(by_engine(tmp_path / "disk"), by_engine(tmp_path / "memory", MEMORY))


@pytest.mark.parametrize("held", ["that of initialize", "the one given to it"])
def test_an_engine_is_prepared(held: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a script that calls offload.initialize itself. The clip of the loop counts, which is said."""
    logging.getLogger("offload").setLevel(logging.INFO)
    model, optimizer, loader, schedule = parts()
    blocks = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    engine, mine, _, _ = offload.initialize(model=model, optimizer=optimizer, config=config(tmp_path, **blocks))
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared = accelerator.prepare(engine, optimizer if held == "the one given to it" else mine, loader, schedule)
        assert prepared[0] is engine and accelerator.engine is engine
        found = loop(accelerator, *prepared)
    finally:
        engine.destroy(remove=True)
    assert (
        "gradients are clipped by the engine, to a norm of 0.5, in place of the config's gradient_clipping, 1"
        in caplog.text
    )
    assert caplog.text.count("are clipped by the engine") == 1
    AcceleratorState._reset_state(True)
    assert_same(found, by_engine(tmp_path / "other"))


def test_without_a_clip_there_is_none(tmp_path: Path) -> None:
    """The default of the JSON would clip to 1; a loop of Accelerate that says nothing does not."""
    accelerator = Accelerator(cpu=True, offload_config=config(tmp_path))
    accelerator.prepare(*parts())
    assert accelerator.engine is not None and accelerator.engine.config["gradient_clipping"] == 0
    accelerator.engine.destroy(remove=True)


def test_the_norm_is_there_when_the_step_was_made(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, offload_config=config(tmp_path))
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    accelerator.backward(model(**next(iter(loader))).loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
    assert torch.isnan(norm)
    optimizer.step()
    assert norm.item() == pytest.approx(accelerator.engine.get_global_grad_norm())
    accelerator.engine.destroy(remove=True)


def test_a_checkpoint_has_the_prepared_schedule(tmp_path: Path) -> None:
    """Its rates and the losses after a load are those of the loop that went on."""
    found = []
    for load in (False, True):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, offload_config=config(tmp_path / str(load)))
        model, optimizer, _, schedule = parts()
        # Accelerate orders a shuffled loader by the epochs that it has seen, which a new process counts from 0.
        loader = torch.utils.data.DataLoader(Texts(FEW), batch_size=2)
        prepared = accelerator.prepare(model, optimizer, loader, schedule)
        assert accelerator.engine is not None
        if load:
            accelerator.engine.load_checkpoint(tmp_path / "saved")
        else:
            loop(accelerator, *prepared)
            accelerator.engine.save_checkpoint(tmp_path / "saved")
        found.append(loop(accelerator, *prepared))
        accelerator.engine.destroy(remove=True)
    assert_same(*found)
    assert found[0].logs[0]["learning_rate"] < 1e-3


def test_a_schedule_without_a_plain_state_trains_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loader, _ = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    vars(schedule)["of_the_script"] = object()
    accelerator = Accelerator(cpu=True, offload_config=config(tmp_path))
    loop(accelerator, *accelerator.prepare(model, optimizer, loader, schedule))
    assert "checkpoints will not contain the state of StepLR" in caplog.text
    accelerator.engine.destroy(remove=True)


def test_mixed_precision_is_the_engines(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", offload_config=config(tmp_path))
    model, optimizer, loader, schedule = accelerator.prepare(*parts())
    assert accelerator.engine is not None and accelerator.engine.bfloat16_enabled()
    assert model.lm_head.weight.dtype == torch.bfloat16 and model is accelerator.unwrap_model(model)
    losses = [log["loss"] for log in loop(accelerator, model, optimizer, loader, schedule).logs]
    assert sum(losses[5:]) < sum(losses[:5]), "the second epoch is of the same rows"
    accelerator.engine.destroy(remove=True)


def test_a_step_that_was_skipped(tmp_path: Path) -> None:
    blocks = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    accelerator = Accelerator(cpu=True, offload_config=config(tmp_path, **blocks))
    model, optimizer, loader, schedule = accelerator.prepare(*parts())
    accelerator.backward(model(**next(iter(loader))).loss)
    optimizer.step()
    schedule.step()
    assert accelerator.optimizer_step_was_skipped and schedule.scheduler.last_epoch == 0
    accelerator.engine.destroy(remove=True)


# -- what cannot be -----------------------------------------------------------------------------------


def test_stock_accelerate_raises_an_error_that_names_the_call(tmp_path: Path) -> None:
    """Its clip would find no gradients."""
    model, optimizer, loader, _ = parts()
    engine, mine, _, _ = offload.initialize(model=model, optimizer=optimizer, config=config(tmp_path))
    plain = accelerate.Accelerator(cpu=True)
    prepared, _, loader = plain.prepare(engine, mine, loader)
    plain.backward(prepared(**next(iter(loader))).loss)
    with pytest.raises(offload.UsageError, match=r"imports offload\.hf\.Accelerator .* whose clip_grad_norm_ is"):
        plain.clip_grad_norm_(prepared.parameters(), CLIP)
    with pytest.raises(AttributeError, match=r"neither does its model \(engine\.module\), GPT2LMHeadModel"):
        plain.unwrap_model(prepared)
    engine.destroy(remove=True)


@pytest.mark.cpu_only("Accelerator(cpu=True) moves the model to the CPU")
@pytest.mark.parametrize("blocks", [{"gradient_accumulation_steps": 2}, {"fp16": {"enabled": True}}], ids=str)
def test_stock_accelerate_counts_and_scales_otherwise(blocks: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer, loader, _ = parts()
    engine, mine, _, _ = offload.initialize(model=model, optimizer=optimizer, config=config(tmp_path, **blocks))
    plain = accelerate.Accelerator(cpu=True)
    prepared, stepped, loader = plain.prepare(engine.module, mine, loader)
    with pytest.raises(offload.UsageError, match=r"loop of Accelerate.* use offload\.hf\.Accelerator"):
        for batch in loader:
            plain.backward(prepared(**batch).loss)
            stepped.step()
    engine.destroy(remove=True)


@pytest.mark.cpu_only("gloo knows no other device")
def test_a_model_of_an_engine_is_not_for_ddp(tmp_path: Path) -> None:
    """Stock Accelerate wraps it so on several ranks."""
    model, optimizer, _, _ = parts()
    engine, *_ = offload.initialize(model=model, optimizer=optimizer, config=config(tmp_path))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(offload.UsageError, match=r"without it; a loop of Accelerate imports offload\.hf"):
            torch.nn.parallel.DistributedDataParallel(engine.module)
    finally:
        torch.distributed.destroy_process_group()
        engine.destroy(remove=True)


@pytest.mark.parametrize(
    ("blocks", "given", "message"),
    [
        (
            {"gradient_accumulation_steps": 8},
            {},
            "gradient_accumulation_steps is 8 in the config, and that of the Accelerator is 1",
        ),
        (
            {"bf16": {"enabled": False}},
            {"mixed_precision": "bf16"},
            "bf16.enabled is False in the config, and that of mixed",
        ),
        ({"train_micro_batch_size_per_gpu": 8}, {}, "per_gpu is 8 in the config, and the loader's batch_size is 2"),
        ({"optimizer": {"type": "AdamW"}}, {}, 'has a block "optimizer", and the script has one of its own'),
        ({"torch_autocast": {"enabled": True}}, {}, r"torch_autocast .*prepare\(engine"),
    ],
    ids=str,
)
def test_config_and_accelerator_that_differ(
    blocks: dict[str, Any], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True, offload_config=config(tmp_path, **blocks), **given)
    with pytest.raises(offload.ConfigError, match=message):
        accelerator.prepare(*parts())
    assert accelerator.engine is None


def test_a_model_without_its_optimizer(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, offload_config=config(tmp_path))
    model, optimizer, _, _ = parts()
    with pytest.raises(offload.UsageError, match="one model that trains and one optimizer in one call, got 1 and 0"):
        accelerator.prepare(model)
    accelerator.prepare(model, optimizer)
    with pytest.raises(offload.UsageError, match="has an engine already"):
        accelerator.prepare(*parts())
    reference = seeded().requires_grad_(False)
    assert accelerator.prepare(reference) is reference, "one that does not train is as ever"
    accelerator.engine.destroy(remove=True)


def test_a_second_engine_does_not_take_the_place_of_the_first(tmp_path: Path) -> None:
    engines = []
    for name in ("one", "two"):
        model = seeded()
        mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engines.append(offload.initialize(model=model, optimizer=mine, config=config(tmp_path / name)).engine)
    one, two = engines
    accelerator = Accelerator(cpu=True)
    with pytest.raises(offload.UsageError, match="has an engine already"):
        accelerator.prepare(one, two)
    assert accelerator.engine is None
    _, optimizer = accelerator.prepare(one, one.optimizer)
    with pytest.raises(offload.UsageError, match="has an engine already"):
        accelerator.prepare(two)
    assert accelerator.engine is one and accelerator.prepare(one, one.optimizer)[1] is optimizer, "a repeated call"
    for engine in engines:
        engine.destroy(remove=True)


@pytest.mark.parametrize(("splits", "micro"), [(False, 2), (True, 1)])
def test_a_batch_that_is_split_among_the_ranks(splits: bool, micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def build(config: Any, **_: Any) -> Any:
        asked.append(config)
        raise offload.UsageError("seen")

    monkeypatch.setattr("offload.hf.accelerator.initialize", build)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    given = accelerate.DataLoaderConfiguration(split_batches=splits)
    accelerator = Accelerator(cpu=True, offload_config={}, dataloader_config=given)
    with pytest.raises(offload.UsageError, match="seen"):
        accelerator.prepare(*parts())
    assert asked[0]["train_micro_batch_size_per_gpu"] == micro


def test_clips_that_cannot_be(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, offload_config=config(tmp_path))
    model, _, _, _ = accelerator.prepare(*parts())
    with pytest.raises(offload.UsageError, match="clips the 2-norm, got norm_type=1"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(offload.UsageError, match=r"the norm of all parameters .* were not given"):
        accelerator.clip_grad_norm_(model.transformer.h[0].parameters(), 1.0)
    with pytest.raises(offload.UsageError, match="call clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(offload.UsageError, match=r"engine\.(save|load)_checkpoint"):
            call(str(tmp_path / "state"))
    accelerator.engine.destroy(remove=True)
