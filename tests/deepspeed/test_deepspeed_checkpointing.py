"""`offload.checkpointing` has DeepSpeed's names, and the block "activation_checkpointing" does what its keys say."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload import checkpointing
from offload.activations import checkpoints
from offload.config import load_config
from offload.errors import ConfigError
from offload.layout.units import blocks_of
from offload.notices import Remark
from tests.support import models
from tests.support.oracle import Job, assert_same, config, run, train_step


class Called(nn.Module):
    """A model that checkpoints its blocks itself, under DeepSpeed's name, as Megatron does: two at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.25), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 2):
            x = checkpointing.checkpoint(self.two, x, first)
        return x

    def two(self, x: torch.Tensor, first: int) -> torch.Tensor:
        y: torch.Tensor = self.blocks[first + 1](self.blocks[first](x))
        return y


class Plain(Called):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.two(x, 0), 2)


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
    y: torch.Tensor = model(x).square().mean()
    return y


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    checkpointing.reset()


def forwards(engine: offload.Engine, name: str) -> list[None]:
    """Grows by one with each forward of a module, recomputations included."""
    seen: list[None] = []
    engine.module.get_submodule(name).register_forward_pre_hook(lambda *_: seen.append(None))
    return seen


def start(folder: Path, build: Any = Plain, **keys: Any) -> offload.Engine:
    job = Job(build, loss)
    full = config(job, ("cpu", "cpu"), folder) | keys
    return offload.initialize(model=build(), config=full)[0]


def test_a_model_that_calls_checkpoint_has_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    plain = run(Job(Plain, loss), ("none", "none"), tmp_path / "plain")
    for tier in ("device", "nvme"):
        assert_same(plain, run(Job(Called, loss), ("nvme", "nvme"), tmp_path / tier, activations=tier), tier)


class WithKeywords(Called):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in (0, 2):
            x = checkpointing.checkpoint(self.two, first=first, x=x)
        return x


def test_keywords_and_their_tensors_are_handed_on(tmp_path: Path) -> None:
    plain = run(Job(Plain, loss), ("none", "none"), tmp_path / "plain")
    assert_same(plain, run(Job(WithKeywords, loss), ("nvme", "nvme"), tmp_path / "nvme", activations="nvme"), "nvme")

    def scaled(x: torch.Tensor, *, debug: torch.Tensor, use_reentrant: float) -> torch.Tensor:
        return x.sin() * debug * use_reentrant

    x, factor = torch.randn(3, requires_grad=True), torch.tensor(2.5, requires_grad=True)
    for checkpoint in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        output = checkpoint(scaled, x, debug=factor, use_reentrant=3.0)
        expected = scaled(x, debug=factor, use_reentrant=3.0)
        gradients = (torch.autograd.grad(each.sum(), (x, factor)) for each in (output, expected))
        assert all(map(torch.equal, *gradients)) and torch.equal(output, expected)


def test_a_sequence_comes_back_as_deepspeed_gives_it() -> None:
    x = torch.ones(2, requires_grad=True)
    assert checkpointing.checkpoint(lambda y: (y * 2,), x).equal(x * 2)
    assert checkpointing.checkpoint(lambda y: [y * 2], x).equal(x * 2)
    pair = checkpointing.checkpoint(lambda y: [y * 2, "kept"], x)
    assert isinstance(pair, tuple) and pair[0].equal(x * 2) and pair[1] == "kept"
    assert checkpointing.checkpoint(lambda y: {"out": y}, x)["out"] is not None


def test_reset_and_the_setter_of_one_key_leave_what_configure_has_set(tmp_path: Path) -> None:
    names = deepspeed.checkpointing
    names.partition_activations_in_checkpoint(True)
    assert not names.is_configured()
    names.configure(None, num_checkpoints=1)
    names.reset()
    names.partition_activations_in_checkpoint(False)
    assert names.is_configured()
    engine = start(tmp_path / "one")
    first, last = forwards(engine, "blocks.0"), forwards(engine, "blocks.3")
    train_step(engine, Job(Plain, loss), 0)
    assert (len(first), len(last)) == (2, 1)
    engine.destroy(remove=True)


def test_a_block_within_the_users_checkpoint_is_computed_again_once(tmp_path: Path) -> None:
    engine = start(tmp_path, Called, activation_checkpointing={"number_checkpoints": 4})
    seen = forwards(engine, "blocks.1")
    train_step(engine, Job(Called, loss), 0)
    assert len(seen) == 2
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    ("keys", "again"),
    [
        ({}, (1, 1)),
        ({"activation_checkpointing": {"profile": True, "cpu_checkpointing": False}}, (1, 1)),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, (2, 2)),
        ({"activation_checkpointing": {"partition_activations": True}}, (2, 2)),
        ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, (2, 2)),
        ({"activation_checkpointing": {"number_checkpoints": 2}}, (2, 1)),
    ],
)
def test_the_keys_decide_which_blocks_are_computed_again(
    keys: dict[str, Any], again: tuple[int, int], tmp_path: Path
) -> None:
    engine = start(tmp_path, **keys)
    first, last = forwards(engine, "blocks.0"), forwards(engine, "blocks.3")
    train_step(engine, Job(Plain, loss), 0)
    assert (len(first), len(last)) == again
    engine.destroy(remove=True)


def test_configure_sets_the_block_of_later_engines(tmp_path: Path) -> None:
    assert not checkpointing.is_configured()
    checkpointing.configure(None, {"activation_checkpointing": {"number_checkpoints": 4}}, num_checkpoints=1)
    assert checkpointing.is_configured()
    engine = start(tmp_path / "one")
    first, last = forwards(engine, "blocks.0"), forwards(engine, "blocks.3")
    train_step(engine, Job(Plain, loss), 0)
    assert (len(first), len(last)) == (2, 1)
    engine.destroy(remove=True)
    # What the engine's own config says wins.
    engine = start(tmp_path / "two", activation_checkpointing={"number_checkpoints": 4})
    last = forwards(engine, "blocks.3")
    train_step(engine, Job(Plain, loss), 0)
    assert len(last) == 2
    engine.destroy(remove=True)


def test_a_wrong_value_leaves_the_settings_as_they_are() -> None:
    checkpointing.configure(SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2))
    assert checkpointing.is_configured()
    checkpointing.reset()
    with pytest.raises(ConfigError, match="number_checkpoints"):
        checkpointing.configure(num_checkpoints=0)
    assert not checkpointing.is_configured()


def test_the_profile_is_a_line_for_each_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"number_checkpoints": 1, "profile": True, "synchronize_checkpoint_boundary": True}
    engine = start(tmp_path, activation_checkpointing=keys)
    with caplog.at_level(logging.INFO, logger="offload"):
        train_step(engine, Job(Plain, loss), 0)
    lines = [r.getMessage() for r in caplog.records if "seconds of forward and recomputation" in r.getMessage()]
    assert len(lines) == 1
    match = re.fullmatch(r"step 1, seconds of forward and recomputation: blocks\.0 (\S+) and (\S+)", lines[0])
    assert match is not None and float(match[1]) > 0 and float(match[2]) > 0
    engine.destroy(remove=True)


def test_inputs_on_disk_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='"activations": "nvme" needs a folder'):
        offload.initialize(
            model=models.shallow(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "offload": {"activations": "nvme", "device": "cpu"},
            },
        )


def test_a_memory_without_effect_is_named() -> None:
    notices = load_config({"offload": {"activation_memory": "1GiB", "activations": "device"}}).notices
    assert any("activation_memory has no effect" in notice for notice in notices)


def test_named_units_take_the_place_of_stages_around_them() -> None:
    stages = [name for name in blocks_of(models.swin()) if name.startswith("swin.encoder.layers.")]
    assert stages and not any(".blocks." in name for name in stages)
    named = blocks_of(models.swin(), ("SwinLayer",))
    assert named and all(".blocks." in name for name in named if name.startswith("swin.encoder.layers."))


def test_experts_and_parts_of_a_layer_are_no_blocks() -> None:
    assert blocks_of(models.mixtral()) == tuple(f"model.layers.{n}" for n in range(len(blocks_of(models.mixtral()))))


def test_a_key_without_effect_is_named() -> None:
    keys: dict[str, Any]
    for keys, blocks, message in (
        ({"offload": {"activations": "nvme", "nvme_path": "/x"}}, 0, "the model has no ModuleList or Sequential"),
        ({"activation_checkpointing": {"number_checkpoints": 1000}}, 8, "number_checkpoints is 1000, .* has 8 blocks"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}, "offload": {"activations": "device"}},
            8,
            'cpu_checkpointing has no effect, since "activations" is "device"',
        ),
        ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, 8, "optimization has no effect"),
    ):
        print(blocks)
        *_, last = checkpoints.notices(load_config(keys), blocks, host_addressable=False)
        assert re.search(message, last) and not isinstance(last, Remark)


def test_a_line_at_the_start_tells_the_blocks_and_where_their_inputs_wait(tmp_path: Path) -> None:
    engine = start(tmp_path, activation_checkpointing={"number_checkpoints": 3})
    assert "3 blocks are computed again in backward; inputs wait on the device" in engine.notices
    engine.destroy(remove=True)
