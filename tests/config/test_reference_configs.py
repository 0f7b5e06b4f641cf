"""Four files that DeepSpeed users have, as they are: each loads, says what it means here, and trains.

They are from tutorials and from Trainer's documentation: comments, `2e8` for integers, `"auto"`, keys that tune what
this library decides by itself. Nothing in them is changed for these tests, and a model is trained by the usual loop.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset

import offload
from offload import testing
from offload.config import Batch, load_config, resolve_batch
from offload.errors import ConfigError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, PlainEngine

FP16_WITH_COMMENTS = """\
{"zero_optimization":{"stage":2,"allgather_partitions":true,"allgather_bucket_size":2e8,"overlap_comm":true,"reduce_scatter":true,"reduce_bucket_size":2e8,"contiguous_gradients":true},
"fp16":{"enabled":true,"loss_scale":0,"loss_scale_window":1000,"initial_scale_power":16,"hysteresis":2,"min_loss_scale":1},
"bf16":{"enabled":false // or true on A100/H100
},"gradient_accumulation_steps":4,"gradient_clipping":1.0,"train_batch_size":"auto","train_micro_batch_size_per_gpu":4,"wall_clock_breakdown":false}
"""

MINIMAL = """\
{"train_batch_size":32,"gradient_accumulation_steps":1,"optimizer":{"type":"AdamW","params":{"lr":1e-5}},"fp16":{"enabled":true},"zero_optimization":{"stage":2}}
"""

WARM_UP = """\
{"train_batch_size":32,"train_micro_batch_size_per_gpu":4,"gradient_accumulation_steps":8,"optimizer":{"type":"AdamW","params":{"lr":1e-4,"weight_decay":0.01}},
"scheduler":{"type":"WarmupLR","params":{"warmup_min_lr":0.0,"warmup_max_lr":1e-4,"warmup_num_steps":1000}},
"zero_optimization":{"stage":2,"offload_optimizer":{"device":"cpu","pin_memory":true},"offload_param":{"device":"cpu","pin_memory":true},"overlap_comm":true,"reduce_scatter":true,"contiguous_gradients":true},
"gradient_clipping":1.0,"fp16":{"enabled":true,"loss_scale":0,"loss_scale_window":1000,"initial_scale_power":16,"hysteresis":2,"min_loss_scale":1},"wall_clock_breakdown":false}
"""

STAGE_3_ON_CPU = """\
{"zero_optimization":{"stage":3,"offload_optimizer":{"device":"cpu","pin_memory":true},"offload_param":{"device":"cpu","pin_memory":true},"overlap_comm":true,"contiguous_gradients":true,"sub_group_size":1e9,
"reduce_bucket_size":"auto","stage3_prefetch_bucket_size":"auto","stage3_param_persistence_threshold":"auto","stage3_max_live_parameters":1e9,"stage3_max_reuse_distance":1e9,"stage3_gather_16bit_weights_on_model_save":true},"train_micro_batch_size_per_gpu":4}
"""

EXPECTED_FP16 = {
    "enabled": True,
    "auto_cast": None,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}


class Meaning(NamedTuple):
    """What a file says, and the numbers of the plain loop that does the same."""

    text: str
    batch: Batch
    job: Job
    rates: tuple[float, ...]
    """Of the first steps: two, or as many as it takes to have a rate above 0."""
    tier: str
    stage: int
    notices: tuple[tuple[str, tuple[str, ...]], ...]
    """How each begins, and the keys that it names after that."""
    optimizer: bool = True
    """Whether the file has one; else the script passes it."""


MEANINGS = {
    "fp16 with comments": Meaning(
        FP16_WITH_COMMENTS,
        Batch(4, 4, 16),
        Job(models.shallow, models.language_loss, accumulation=4, dtype="fp16", loss_scale=2.0**16),
        (1e-3, 1e-3),
        "none",
        2,
        (),
        optimizer=False,
    ),
    "minimal": Meaning(
        MINIMAL,
        Batch(32, 1, 32),
        Job(models.shallow, models.language_loss, lr=1e-5, weight_decay=0.0, dtype="fp16", loss_scale=2.0**16),
        (1e-5, 1e-5),
        "none",
        2,
        (),
    ),
    "warm-up": Meaning(
        WARM_UP,
        Batch(4, 8, 32),
        Job(
            models.shallow,
            models.language_loss,
            accumulation=8,
            lr=1e-4,
            weight_decay=0.01,
            dtype="fp16",
            loss_scale=2.0**16,
        ),
        (0.0, 0.0, 1e-4 * math.log(2) / math.log(1000)),
        "cpu",
        2,
        (("offload_param is honoured at ZeRO stage 2 too, as at stage 3", ()),),
    ),
    "stage 3 on the CPU": Meaning(
        STAGE_3_ON_CPU,
        Batch(4, 1, 4),
        Job(models.shallow, models.language_loss),
        (1e-3, 1e-3),
        "cpu",
        3,
        (),
        optimizer=False,
    ),
}
each_file = pytest.mark.parametrize("name", MEANINGS)


def written(meaning: Meaning, folder: Path) -> Path:
    path = folder / "ds_config.json"
    path.write_text(meaning.text)
    return path


@each_file
def test_a_reference_config_has_its_meaning(name: str, tmp_path: Path) -> None:
    meaning = MEANINGS[name]
    config = load_config(written(meaning, tmp_path))
    assert resolve_batch(config, 1) == meaning.batch
    assert (config.weight_tier, config.optimizer_tier, config.drives) == (meaning.tier, meaning.tier, ())
    assert (config.zero_optimization.stage, config.gradient_clipping) == (meaning.stage, 1.0)
    assert config.dtype == meaning.job.dtype
    if config.dtype == "fp16":
        assert config.fp16.model_dump() == EXPECTED_FP16
    assert (config.optimizer is not None) is meaning.optimizer
    if config.optimizer is not None:
        assert config.optimizer.type == "AdamW" and config.optimizer.params.lr == meaning.job.lr
        assert config.optimizer.settings["weight_decay"] == meaning.job.weight_decay
    assert config.notices == tuple(start + ", ".join(keys) for start, keys in meaning.notices)


class Ids(Dataset[dict[str, torch.Tensor]]):
    """Samples of a causal language model."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = models.tokens(index, 0, (32,))
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plain loop: the files do not name a device."""
    testing.replace(monkeypatch, "device.choose", lambda _: torch.device("cpu"))


@pytest.mark.sample(1)
@each_file
@pytest.mark.numeric
def test_the_first_steps_as_in_pytorch(name: str, tmp_path: Path) -> None:
    meaning = MEANINGS[name]
    job = meaning.job
    torch.manual_seed(job.seed)
    model = job.model()
    given: dict[str, Any] = {}
    if not meaning.optimizer:
        given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=job.weight_decay)
    engine, optimizer, loader, scheduler = offload.initialize(
        model=model, config=str(written(meaning, tmp_path)), training_data=Ids(), **given
    )
    assert optimizer is engine.optimizer and (scheduler is not None) is (name == "warm-up")
    assert engine.train_micro_batch_size_per_gpu() == meaning.batch.micro and loader is not None
    assert engine.gradient_accumulation_steps() == meaning.batch.accumulation
    plain = PlainEngine(job)
    batches = (batch for _ in iter(int, 1) for batch in loader)  # as many passes as it takes
    for step, rate in enumerate(meaning.rates):
        assert engine.get_lr() == pytest.approx([rate]), f"step {step}"
        for group in plain.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(meaning.batch.accumulation):
            batch = next(batches)
            losses = engine(**batch).loss, plain(**batch).loss
            assert batch["input_ids"].shape[0] == meaning.batch.micro
            mine, theirs = (float(loss.detach()) for loss in losses)
            rounding_bounds.same_losses([mine], [theirs], job)
            for engine_or_plain, loss in zip((engine, plain), losses, strict=True):
                engine_or_plain.backward(loss)
                engine_or_plain.step()
        assert engine.was_step_applied() and engine.global_steps == plain.global_steps == step + 1
        rounding_bounds.same_norms([engine.get_global_grad_norm()], [plain.get_global_grad_norm()], job)
    weights = plain.module.state_dict()
    for key, value in engine.module.state_dict().items():
        assert float((value - weights[key]).abs().max()) <= sum(meaning.rates), f"{key}: further than these steps go"
    if job.dtype == "fp16":
        assert engine.loss_scale == 2**16
    engine.destroy()


@each_file
def test_without_an_optimizer_the_block_to_add_is_shown(name: str, tmp_path: Path) -> None:
    meaning = MEANINGS[name]
    if meaning.optimizer:
        offload.initialize(model=models.shallow(), config=str(written(meaning, tmp_path)))[0].destroy()
        return
    with pytest.raises(
        ConfigError, match=r'no optimizer; add to the config "optimizer": \{"type": "AdamW".*optimizer='
    ):
        offload.initialize(model=models.shallow(), config=str(written(meaning, tmp_path)))
