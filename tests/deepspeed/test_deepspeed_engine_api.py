"""Getters and setters of an engine answer as DeepSpeed's, and a setting acts on the next step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.config import load_config
from offload.errors import UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import PlainEngine, config, start, train_step

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
JOB = models.MIXTURE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    engine = start(JOB, DISK, tmp_path_factory.mktemp("store"))
    yield engine
    engine.destroy(remove=True)


def test_the_config_is_complete_and_loads_again(engine: offload.Engine, tmp_path: Path) -> None:
    found = engine.config
    assert found["train_batch_size"] == 2 and found["gradient_accumulation_steps"] == 2
    assert found["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert found["optimizer"]["params"]["lr"] == JOB.lr and found["gradient_clipping"] == JOB.clip
    again = load_config(found)
    given = load_config(config(JOB, DISK, tmp_path))
    assert again.offload.debug == given.offload.debug and again.optimizer == given.optimizer
    assert load_config(again.model_dump(mode="json")) == again
    found["zero_optimization"]["stage"] = 1
    assert engine.zero_optimization_stage() == 3


def test_modes_and_ranks_are_reported(engine: offload.Engine) -> None:
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled()
    assert (engine.local_rank, engine.global_rank, engine.world_size) == (0, 0, 1)


@pytest.mark.parametrize(
    ("optimizer", "params", "kind", "momentum"),
    [
        ("AdamW", {"betas": (0.8, 0.95)}, "AdamW", (0.8, 0.95)),
        ("Adam", {"adam_w_mode": False}, "Adam", (0.9, 0.999)),
        ("Lamb", {}, "Lamb", (0.9, 0.999)),
        ("Lion", {}, "Lion", (0.9, 0.999)),
        ("Adagrad", {}, "Adagrad", 0.0),
        ("SGD", {"momentum": 0.5}, "SGD", 0.5),
        ("SGD", {}, "SGD", 0.0),
    ],
)
def test_the_optimizers_name_and_momentum(
    optimizer: str, params: dict[str, Any], kind: str, momentum: Any, tmp_path: Path
) -> None:
    job = JOB._replace(optimizer=optimizer, params=tuple(params.items()), dtype="bf16")
    engine = start(job, MEMORY, tmp_path)
    assert engine.get_type() == [kind] and engine.get_mom() == [momentum]
    assert engine.bfloat16_enabled() and engine.config["optimizer"]["type"] == optimizer
    engine.destroy()


@pytest.mark.numeric
def test_learning_rates_that_are_set_count_from_the_next_step_on(tmp_path: Path) -> None:
    engine, plain = start(JOB, DISK, tmp_path), PlainEngine(JOB)
    for step in range(3):
        if step:
            engine.set_lr(3e-3 / step)
            plain.optimizer.param_groups[0]["lr"] = 3e-3 / step
        rounding_bounds.same_losses([train_step(engine, JOB, step)], [train_step(plain, JOB, step)], JOB)
    assert engine.get_lr() == [1.5e-3]
    rounding_bounds.same_weights(engine.module.state_dict(), plain.module.state_dict(), JOB._replace(steps=3, lr=3e-3))
    engine.destroy(remove=True)


def test_a_learning_rate_for_each_group(tmp_path: Path) -> None:
    model = models.Mixture()
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trainable[:2]}, {"params": trainable[2:], "lr": 1.0}]
    engine = offload.initialize(model=model, model_parameters=groups, config=config(JOB, MEMORY, tmp_path))[0]
    engine.set_lr([0.25, 0.5])
    assert engine.get_lr() == [0.25, 0.5]
    engine.set_lr(0.125)
    assert engine.get_lr() == [0.125, 0.125]
    for bad in ([0.1], [0.1] * 3, -1.0, math.nan, math.inf, "1", [0.1, None], [0.1, 10**400], True):
        with pytest.raises(UsageError, match="set_lr expects"):
            engine.set_lr(bad)  # type: ignore[arg-type]
    assert engine.get_lr() == [0.125, 0.125]
    engine.destroy()


# -- the model's own ----------------------------------------------------------------------------------


def test_what_the_engine_has_not_is_the_models(tmp_path: Path) -> None:
    job = models.GPT2
    engine, plain = start(job, DISK, tmp_path), PlainEngine(job)
    for step in range(2):
        train_step(engine, job, step)
        train_step(plain, job, step)
    ids = models.tokens(9, 9)[:, :4]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    engine.eval()
    assert torch.equal(engine.generate(ids, **settings), plain.module.eval().generate(ids, **settings))
    assert [n for n, _ in engine.named_parameters()] == [n for n, _ in plain.module.named_parameters()]
    assert engine.training is False and engine.transformer is engine.module.transformer
    assert engine.module.config.n_layer == 3 and engine.config["gradient_accumulation_steps"] == 1
    engine.destroy(remove=True)


def test_what_neither_has_is_an_attribute_error(engine: offload.Engine) -> None:
    with pytest.raises(AttributeError, match=r"'generate_all'.*Mixture"):
        _ = engine.generate_all
    assert not hasattr(engine, "_no_such") and not hasattr(engine, "_parameters")
    with pytest.raises(AttributeError):
        offload.Engine.__new__(offload.Engine).anything  # noqa: B018


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("enabled", [True, False])
def test_auto_cast_gives_inputs_the_dtype_of_the_weights(mode: str, enabled: bool, tmp_path: Path) -> None:
    content = config(JOB._replace(dtype=mode), MEMORY, tmp_path)
    content[mode] = {"enabled": True, "auto_cast": enabled}
    seen: list[torch.dtype] = []

    class Two(torch.nn.Linear):
        def forward(self, x: torch.Tensor, at: torch.Tensor, **more: Any) -> torch.Tensor:
            seen.extend((x.dtype, at.dtype, more["inner"][0].dtype))
            return super().forward(x.to(self.weight.dtype))

    engine = offload.initialize(model=Two(4, 4), config=content)[0]
    rows = torch.randn(2, 4)
    output = engine(rows, torch.zeros(2, dtype=torch.int64), inner=[rows.double()])
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[mode]
    assert seen == ([dtype, torch.int64, dtype] if enabled else [torch.float32, torch.int64, torch.float64])
    assert output.dtype == dtype
    engine.destroy()
