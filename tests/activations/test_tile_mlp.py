"""`"tile_mlp"` in the config finds the MLPs that compute each token by itself, and leaves modules of the user alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.activations import tiles
from tests.activations.tiled_models import DISK, JOBS, lora_in_mlps, of, tiled_by_hand
from tests.support import models
from tests.support.oracle import PlainEngine, config, run


def begun(model: nn.Module, folder: Path, **options: Any) -> tuple[Any, ...]:
    return offload.initialize(model=model, config=config(JOBS["llama"], DISK, folder, **options))


def test_the_engine_undoes_its_tiles_and_leaves_those_of_the_user(tmp_path: Path) -> None:
    model: Any = models.llama()
    mine, theirs = (layer.mlp for layer in model.model.layers)
    keys, kind = list(model.state_dict()), type(mine)
    offload.tiled(mine, chunks=2)
    engine = begun(model, tmp_path, tile_mlp=3)[0]
    assert type(theirs) is not kind and isinstance(theirs, kind) and list(model.state_dict()) == keys
    assert any(
        "1 MLPs are computed in tiles of 3 chunks, from model.layers.1.mlp on" in each for each in engine.notices
    )
    engine.destroy(remove=True)
    assert type(theirs) is kind and type(mine) is not kind
    assert type(offload.untiled(mine)) is kind


def test_a_start_that_fails_leaves_the_modules_as_they_were(tmp_path: Path) -> None:
    model: Any = models.llama()
    with pytest.raises(offload.BudgetError):
        begun(model, tmp_path, tile_mlp=3, host_memory=1)
    with pytest.raises(offload.errors.OffloadError):
        begun(model, tmp_path / "file" if not (tmp_path / "file").write_text("") else tmp_path, tile_mlp=3)
    assert {type(layer.mlp).__mro__[1] for layer in model.model.layers} == {nn.Module}


def test_auto_computes_short_sequences_whole(tmp_path: Path) -> None:
    """Chunks of 1024 tokens in a small model: as many as features, but not fewer."""
    model: Any = of("Llama", max_position_embeddings=2048)
    engine = begun(model, tmp_path, tile_mlp="auto")[0]
    calls = list[int]()
    engine.module.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    for length, expected in ((1024, 1), (1025, 2 + 2), (64, 1)):
        calls.clear()
        ids = torch.randint(128, (1, length), device=engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        assert len(calls) == expected
    engine.destroy(remove=True)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi3", "Olmo2", "StableLm", "Phi"])
def test_mlps_of_decoders_are_known(kind: str) -> None:
    model = of(kind, num_key_value_heads=4, head_dim=8)
    assert tiles.known_mlps(model) == ("model.layers.0.mlp", "model.layers.1.mlp")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (models.gpt2, 3),
        (lora_in_mlps, 2),
        (lambda: of("GPTNeoX"), 2),
        (models.mixtral, 0),
        (lambda: of("Qwen2Moe", num_experts=2, moe_intermediate_size=32, shared_expert_intermediate_size=32), 0),
        (models.t5, 0),
        (models.Mixture, 0),
        (tiled_by_hand, 0),
        (lambda: nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"fc1": nn.Linear(2, 2)})})]), 0),
        (lambda: of("Bloom", n_layer=2, n_head=4), 0),  # its MLP takes the residual too
    ],
    ids=["gpt2", "lora", "neox", "mixtral", "qwen2moe", "t5", "mixture", "tiled already", "others", "bloom"],
)
def test_only_mlps_that_compute_each_token_by_itself_are_known(make: Callable[[], nn.Module], expected: int) -> None:
    assert len(tiles.known_mlps(make())) == expected


class LlamaMLP(nn.Module):
    """A module of the user that looks like an MLP, and mixes its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x).cumsum(1))  # type: ignore[no-any-return]


def test_a_module_of_the_user_is_never_taken_for_a_known_one() -> None:
    layer = nn.Module()
    layer.mlp = LlamaMLP()
    assert tiles.known_mlps(nn.ModuleList([layer])) == ()


class Cumulative(nn.Linear):
    """A layer of the user that mixes tokens."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values.cumsum(1))


def subclass_inside(mlp: Any, patch: pytest.MonkeyPatch) -> None:
    mlp.down_proj.__class__ = Cumulative


def activation_inside(mlp: Any, patch: pytest.MonkeyPatch) -> None:
    mlp.act_fn = nn.Softmax(1)


def hook_inside(mlp: Any, patch: pytest.MonkeyPatch) -> None:
    mlp.act_fn.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))


def forward_inside(mlp: Any, patch: pytest.MonkeyPatch) -> None:
    usual = mlp.up_proj.forward
    mlp.up_proj.forward = lambda values: usual(values.cumsum(1))


def forward_of_the_class(mlp: Any, patch: pytest.MonkeyPatch) -> None:
    usual = type(mlp).forward

    @functools.wraps(usual)
    def cumulative(self: Any, values: torch.Tensor) -> Any:
        return usual(self, values.cumsum(1))

    patch.setattr(type(mlp), "forward", cumulative)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (subclass_inside, "its down_proj is a "),
        (activation_inside, "its act_fn is a "),
        (hook_inside, "its act_fn has a forward hook"),
        (forward_inside, "its up_proj has a forward of its own"),
        (forward_of_the_class, "the forward of LlamaMLP was replaced"),
    ],
)
def test_an_mlp_in_which_something_may_mix_tokens_stays_whole(
    change: Callable[[Any, pytest.MonkeyPatch], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a line says what."""
    model: Any = models.llama()
    change(model.model.layers[0].mlp, monkeypatch)
    known = tiles.known_mlps(model)
    assert known == (() if change is forward_of_the_class else ("model.layers.1.mlp",))
    engine = begun(model, tmp_path, tile_mlp="auto")[0]
    (line,) = [each for each in engine.notices if "MLP" in each]
    assert f"(model.layers.0.mlp stays whole: {reason}" in line
    engine.destroy(remove=True)


def test_a_model_without_known_mlps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = models.MIXTURE._replace(steps=1)
    with pytest.raises(offload.ConfigError, match='"tile_mlp" of the "offload" block is 4, and Mixture has no MLP'):
        run(job, DISK, tmp_path / "4", tile_mlp=4)
    assert not list(tmp_path.rglob("*.swap"))
    with caplog.at_level(logging.WARNING, logger="offload"):
        run(job, DISK, tmp_path / "auto", tile_mlp="auto")
    assert '"tile_mlp": "auto" found no MLP of a decoder' in caplog.text


def test_the_plain_engine_is_not_tiled() -> None:
    """The oracle of this file is the whole computation."""
    assert not tiles.is_tiled(PlainEngine(JOBS["llama"]).module.model.layers[0].mlp)
