"""Layers that are computed in tiles of tokens: bits, gradients, memory, and what is refused."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload.activations import tiles
from tests.activations.test_chunked_loss import Peak
from tests.support import models, rounding_bounds
from tests.support.oracle import (
    DTYPES,
    Job,
    assert_same,
    config,
    plain_loop,
    room_for,
    run,
    same_bits,
    start,
    train_step,
    trained,
)
from tests.support.rounding_bounds import unit


class Gated(nn.Module):
    """The MLP of a Llama."""

    def __init__(self, features: int = 16, inner: int = 40, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(features, inner, bias=False), nn.Linear(features, inner, bias=False)
        self.down, self.dropout = nn.Linear(inner, features), nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.silu(self.gate(hidden)) * self.up(hidden)))  # type: ignore[no-any-return]


def inputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def in_pieces(module: nn.Module, hidden: torch.Tensor, length: int) -> torch.Tensor:
    """Returns what a loop over chunks computes, whose graph holds everything."""
    return torch.cat([module(part) for part in hidden.split(length, 1)], 1)


def gradients(module: nn.Module, output: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Returns the gradients of a sum of squares: those of `others`, then those of the module."""
    wanted = [*inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    return list(torch.autograd.grad(output.float().square().sum(), wanted))


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


TIERS = [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")]
DISK = ("nvme", "nvme")


def of(kind: str, **more: Any) -> nn.Module:
    """Returns a small causal language model of a family."""
    made = getattr(transformers, f"{kind}Config")(**{**models.DECODER, "pad_token_id": 0, **more})
    return getattr(transformers, f"{kind}ForCausalLM")(made)  # type: ignore[no-any-return]


def qwen2() -> nn.Module:
    return of("Qwen2")


def recomputed(reentrant: bool) -> nn.Module:
    model: Any = models.llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its new name
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model  # type: ignore[no-any-return]


def recomputed_by_hooks() -> nn.Module:
    return recomputed(False)


def recomputed_by_a_function() -> nn.Module:
    model: Any = recomputed(True)
    model.enable_input_require_grads()
    return model  # type: ignore[no-any-return]


def lora_in_mlps() -> nn.Module:
    adapters = peft.LoraConfig(r=4, target_modules=["up_proj", "q_proj"], init_lora_weights=False)
    return peft.get_peft_model(models.llama(), adapters)  # type: ignore[no-any-return, arg-type]


JOBS = {
    "llama": Job(models.llama, models.language_loss, steps=3, accumulation=2),
    "llama, bf16": Job(models.llama, models.language_loss, steps=3, accumulation=2, dtype="bf16"),
    "llama, fp16": Job(models.llama, models.language_loss, steps=3, dtype="fp16"),
    "gpt2": Job(models.shallow, models.language_loss, steps=3),
    "qwen2": Job(qwen2, models.language_loss, steps=3),
    "lora": Job(lora_in_mlps, models.language_loss, steps=3),
    "recomputed": Job(recomputed_by_hooks, models.language_loss, steps=3),
    "recomputed, reentrant": Job(recomputed_by_a_function, models.language_loss, steps=3),
}


def tiled_by_hand() -> nn.Module:
    model: Any = models.llama()
    for layer in model.model.layers:
        offload.tiled(layer.mlp, chunks=3)
    return model  # type: ignore[no-any-return]


@pytest.mark.numeric
@given(
    batch=st.integers(1, 3),
    positions=st.integers(1, 30),
    chunks=st.integers(1, 40),
    name=st.sampled_from(["fp32", "bf16"]),
    seed=st.integers(0, 1000),
)
def test_a_linear_layer_differs_from_its_exact_values_by_the_stated_bound(
    batch: int, positions: int, chunks: int, name: str, seed: int
) -> None:
    """The bound of [Note: bits]: the roundings of each sum, of each chunk's gradient, and of the gradients' sum."""
    torch.manual_seed(seed)
    dtype, u, wide, tokens = DTYPES[name], unit(name), unit(), batch * positions
    layer, slope = nn.Linear(16, 24).to(dtype), torch.randn(batch, positions, 24).to(dtype)
    hidden = inputs(batch, positions, 16, seed=seed, dtype=dtype)
    exact = [each.detach().double().flatten(0, 1) for each in (hidden, slope)]
    weight, bias = (each.detach().double() for each in (layer.weight, layer.bias))
    output = offload.tiled(layer, 1, chunks)(hidden)
    mine = torch.autograd.grad(output, [hidden, layer.weight, layer.bias], slope)
    x, s = exact
    for computed_output, right, size, terms in (
        (output, x @ weight.T + bias, x.abs() @ weight.T.abs() + bias.abs(), 17),
        (mine[0], s @ weight, s.abs() @ weight.abs(), 24),
    ):
        # A row is summed as in the whole: over the features, rounded, and rounded again with the bias.
        assert torch.all(
            (computed_output.flatten(0, 1).double() - right).abs() <= ((terms + 2) * wide + 2 * u) * size * 1.01
        )
    for computed_output, right, size in ((mine[1], s.T @ x, s.T.abs() @ x.abs()), (mine[2], s.sum(0), s.abs().sum(0))):
        own = u * size + u * right.abs() if dtype != torch.float32 else 0.0
        assert torch.all((computed_output.double() - right).abs() <= (own + (tokens + chunks + 2) * wide * size) * 1.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 5, 8, 15])
def test_bits_are_those_of_a_loop_over_the_chunks(length: int, dtype: torch.dtype) -> None:
    """Gradients of weights are those of the chunks, added in fp32 in the order of the chunks."""
    torch.manual_seed(0)
    module, hidden, slope = Gated().to(dtype), inputs(2, 16, 16, dtype=dtype), torch.randn(2, 16, 16, dtype=dtype)
    expected = in_pieces(module, hidden, length)
    (of_input,) = torch.autograd.grad(expected, hidden, slope)
    parts = [
        torch.autograd.grad(module(part), list(module.parameters()), slope_of_part)
        for part, slope_of_part in zip(hidden.split(length, 1), slope.split(length, 1), strict=True)
    ]
    sums = [functools.reduce(torch.add, (each.float() for each in of_chunks)) for of_chunks in zip(*parts, strict=True)]
    output = offload.tiled(module, 1, chunk_length=length)(hidden)
    mine = torch.autograd.grad(output, [hidden, *module.parameters()], slope)
    assert torch.equal(output, expected) and equal(list(mine), [of_input, *(each.to(dtype) for each in sums)])


def test_dropout_is_the_same_in_the_backward() -> None:
    torch.manual_seed(0)
    module, hidden = Gated(dropout=0.5), inputs(2, 16, 16)
    torch.manual_seed(1)
    right = gradients(module, in_pieces(module, hidden, 8), hidden)
    after = torch.get_rng_state()
    offload.tiled(module, chunks=2)
    torch.manual_seed(1)
    output = module(hidden)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(2)  # what else draws between forward and backward
    before = torch.get_rng_state()
    assert equal(gradients(module, output, hidden), right)
    assert torch.equal(torch.get_rng_state(), before), "a backward draws nothing from the generator of the user"


def test_autocast_is_the_same_in_the_backward() -> None:
    torch.manual_seed(0)
    module, hidden = Gated(), inputs(2, 16, 16)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = in_pieces(module, hidden, 8)
    right = gradients(module, expected, hidden)
    offload.tiled(module, chunks=2)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(hidden)
    assert output.dtype == torch.bfloat16 and torch.equal(output, expected)
    assert equal(gradients(module, output, hidden), right)

    def backward_alone(output: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(module, output, hidden)

    mine = backward_alone(module(hidden))
    offload.untiled(module)
    assert equal(mine, backward_alone(in_pieces(module, hidden, 8))), "each chunk is computed again in fp32"


def test_a_whole_use_after_a_tiled_one_in_the_same_autocast_has_its_gradient() -> None:
    """A cast that the tiled use left in torch's cache would have no graph."""
    module = offload.tiled(Gated(), chunk_length=8)
    with torch.autocast("cpu", torch.bfloat16):
        module(inputs(1, 16, 16))
        short = module(inputs(1, 4, 16))
    assert all(tensor.any() for tensor in gradients(module, short))


def test_the_gradient_of_the_output_is_not_changed() -> None:
    """For a sum it is that of a parameter too, and autograd gives it as it is."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.added = nn.Parameter(torch.zeros(1, 4, 8))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.added

    module, slope = offload.tiled(Positions(), chunk_length=4), torch.arange(96.0).view(1, 12, 8)
    module(torch.zeros(1, 12, 8)).backward(slope)
    assert torch.equal(slope, torch.arange(96.0).view(1, 12, 8))
    assert torch.equal(module.added.grad, slope.view(3, 1, 4, 8).sum(0))


def test_frozen_weights_receive_nothing_and_pass_on_the_gradient() -> None:
    torch.manual_seed(0)
    module, hidden = Gated(), inputs(2, 16, 16)
    module.gate.requires_grad_(False)
    right = gradients(module, in_pieces(module, hidden, 8), hidden)
    offload.tiled(module, chunks=2)
    assert equal(gradients(module, module(hidden), hidden), right)
    assert equal(gradients(module, module(hidden.detach())), right[1:])
    module.requires_grad_(False)
    module(hidden).square().sum().backward()
    assert torch.equal(hidden.grad, right[0]) and not any(each.grad is not None for each in module.parameters())
    assert not module(hidden.detach()).requires_grad


def test_a_retained_graph_gives_its_gradients_again() -> None:
    module, hidden = offload.tiled(Gated(dropout=0.5), chunks=3), inputs(1, 16, 16)
    loss = module(hidden).square().sum()
    first = torch.autograd.grad(loss, [hidden, *module.parameters()], retain_graph=True)
    assert equal(list(first), list(torch.autograd.grad(loss, [hidden, *module.parameters()])))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_it_changes_no_bit(reentrant: bool) -> None:
    torch.manual_seed(0)
    module, hidden = offload.tiled(Gated(dropout=0.5), chunks=3), inputs(1, 16, 16)
    gradients = []
    for run_name in (module, lambda given: checkpoint(module, given, use_reentrant=reentrant)):
        torch.manual_seed(1)
        run_name(hidden).square().sum().backward()
        gradients.append([hidden.grad, *(parameter.grad for parameter in module.parameters())])
        hidden.grad = None
        module.zero_grad()
    assert equal(*gradients)


def test_checkpointing_does_not_compute_the_forward_of_a_last_mlp_again() -> None:
    """It is computed in the forward, and again in the backward: not in the recomputation too."""
    layer = nn.Sequential(nn.LayerNorm(16), offload.tiled(Gated(), chunks=4))
    calls = list[int]()
    layer[1].up.register_forward_hook(lambda *_: calls.append(1))
    output = checkpoint(lambda hidden: hidden + layer(hidden), inputs(1, 16, 16), use_reentrant=False)
    output.sum().backward()
    assert len(calls) == 4 + 4


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_compiled_code_around_it_changes_no_bit() -> None:
    module = nn.Sequential(nn.LayerNorm(16), offload.tiled(Gated(), chunks=2))
    hidden = inputs(1, 16, 16)
    expected = gradients(module, module(hidden), hidden)
    compiled = torch.compile(module, backend="eager")
    assert equal(gradients(module, compiled(hidden), hidden), expected)


def test_a_second_derivative_is_refused_by_torch() -> None:
    module, hidden = offload.tiled(Gated(), chunks=2), inputs(1, 16, 16)
    (first,) = torch.autograd.grad(module(hidden).square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# -- the module ---------------------------------------------------------------------------------------


def test_the_module_stays_what_it_was() -> None:
    model = models.llama()
    mlp, keys = model.model.layers[0].mlp, list(model.state_dict())
    kind, calls = type(mlp), list[int]()
    mlp.register_forward_hook(lambda *_: calls.append(1))
    assert offload.tiled(mlp, chunks=3) is mlp and model.model.layers[0].mlp is mlp
    assert isinstance(mlp, kind) and type(mlp).__name__ == "LlamaMLP" and list(model.state_dict()) == keys
    hidden = inputs(2, 12, 64)
    output = mlp(hidden)
    output.sum().backward()
    assert calls == [1], "the hooks of the user are called for the whole"
    assert torch.equal(mlp(x=hidden), output)
    assert offload.untiled(mlp) is mlp and type(mlp) is kind and "_offload_tiling" not in mlp.__dict__
    offload.untiled(mlp)
    assert type(mlp) is kind


def test_a_copy_of_a_tiled_module_is_tiled() -> None:
    module, hidden = offload.tiled(Gated(), chunks=3), inputs(1, 9, 16)
    calls = list[int]()
    for twin in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        calls.clear()
        hook = twin.up.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(twin(hidden), module(hidden)) and len(calls) in (3, 6)
        hook.remove()
        assert type(offload.untiled(twin)) is Gated


@pytest.mark.parametrize(
    ("arguments", "shape", "calls"),
    [
        ({"chunks": 1}, (1, 7, 16), 1),
        ({"chunks": 3}, (1, 7, 16), 3),
        ({"chunks": 5}, (1, 7, 16), 4),  # chunks of two
        ({"chunks": 50}, (1, 7, 16), 7),
        ({"chunks": 3}, (1, 0, 16), 1),
        ({"chunk_length": 7}, (1, 7, 16), 1),
        ({"chunk_length": 6}, (1, 7, 16), 2),
        ({"dim": 0, "chunks": 3}, (6, 2, 16), 3),
        ({"dim": -2, "chunks": 3}, (7, 16), 3),
        ({}, (1, 1024, 16), 1),
        ({}, (1, 1025, 16), 2),
        ({}, (4, 257, 16), 2),
        ({}, (2000, 2, 16), 2),
        ({}, (1, 2048, 1500), 2),
        ({}, (1, 1500, 1500), 1),
    ],
)
def test_the_number_of_chunks_follows_the_input(arguments: dict[str, Any], shape: tuple[int, ...], calls: int) -> None:
    module, counted = nn.Sequential(nn.Identity()), list[int]()
    module[0].register_forward_hook(lambda *_: counted.append(1))
    hidden = torch.zeros(shape)
    assert offload.tiled(module, **arguments)(hidden).shape == hidden.shape
    assert len(counted) == calls


# -- memory -------------------------------------------------------------------------------------------


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


def test_mlps_of_decoders_are_known() -> None:
    for kind in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi3", "Olmo2", "StableLm", "Phi"):
        print(kind)
        model = of(kind, num_key_value_heads=4, head_dim=8)
        assert tiles.known_mlps(model) == ("model.layers.0.mlp", "model.layers.1.mlp")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (models.shallow, 2),
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


SPLITS = st.tuples(st.integers(1, 12), st.integers(1, 12))


def grid_of(layer: offload.TiledLinear, gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of the whole layer, or their gradients, put together from the blocks."""
    rows: list[list[Any]] = [[block for block in row] for row in layer.linears]  # type: ignore[union-attr, attr-defined]
    value = (lambda parameter: parameter.grad) if gradient else (lambda parameter: parameter.detach())
    weight = torch.cat([torch.cat([value(block.weight) for block in row], 1) for row in rows])
    bias = [value(row[-1].bias) for row in rows if row[-1].bias is not None]
    assert all(block.bias is None for row in rows for block in row[:-1])
    return weight, torch.cat(bias) if bias else None


@given(splits=SPLITS, bias=st.booleans())
def test_blocks_hold_the_weights_of_the_whole_layer(splits: tuple[int, int], bias: bool) -> None:
    whole = nn.Linear(17, 12, bias=bias)
    layer = offload.TiledLinear(17, 12, bias, *splits)
    layer.copy_params_from(whole)
    weight, added = grid_of(layer)
    assert torch.equal(weight, whole.weight) and (whole.bias is None or torch.equal(added, whole.bias))
    sizes = [block.weight.shape for row in layer.linears for block in row]  # type: ignore[union-attr]
    assert len(sizes) == splits[0] * splits[1]
    assert all(max(each) - min(each) <= 1 for each in zip(*sizes, strict=True))


def test_weights_are_drawn_as_for_the_whole_layer() -> None:
    """`nn.Linear` draws from 1 / sqrt(inputs), and a block has fewer inputs than the layer."""
    torch.manual_seed(0)
    layer = offload.TiledLinear(400, 300, in_splits=4, out_splits=3)
    for weight in grid_of(layer):
        assert weight is not None and weight.abs().max() <= 0.05
    deviation = 0.05 / 3**0.5
    assert abs(float(grid_of(layer)[0].std()) - deviation) < 6 * deviation / (2 * 400 * 300) ** 0.5
    with offload.init(None):
        deferred: Any = offload.TiledLinear(400, 300, in_splits=4, out_splits=3)
    assert deferred.linears[0][0].weight.is_meta


# -- under an engine ----------------------------------------------------------------------------------

WIDTH, WIDE = 32, 256


class Wide(nn.Module):
    """A model with one layer much larger than all others, whole or tiled."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDTH)])
        self.head = nn.Linear(WIDTH, 61)
        if tiled:  # last, so that all other weights are drawn as without
            self.layers[1] = offload.TiledLinear(WIDE, WIDE, True, 4, 2, init_linear=self.layers[1])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(ids)
        inner = hidden
        for layer in self.layers:
            inner = F.gelu(layer(inner))
        return self.head(hidden + inner)  # type: ignore[no-any-return]


def whole() -> nn.Module:
    return Wide(False)


def tiled() -> nn.Module:
    return Wide(True)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(step))
    ids = ids.to(getattr(model, "device", ids.device))
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


TILED, WHOLE = (Job(model, loss, steps=3) for model in (tiled, whole))
LAYER = WIDE * WIDE * 4


@pytest.mark.works("Modules", "a layer larger than the device budget, as `offload.TiledLinear`", "right")
def test_a_layer_larger_than_the_budget_trains(tmp_path: Path) -> None:
    """Whole it is refused; tiled it has the bits of any other budget and tier."""
    with pytest.raises(offload.BudgetError):
        run(WHOLE, DISK, tmp_path / "whole", device_memory=LAYER // 2)
    room = [run(TILED, DISK, tmp_path / str(share), device_memory=LAYER // share) for share in (1, 2)]
    anywhere = same_bits(TILED, tmp_path / "tiers", [("none", "none"), ("cpu", "cpu"), DISK])
    assert all(each.losses == anywhere.losses and each.norms == anywhere.norms for each in room)
    rounding_bounds.same_training(anywhere, plain_loop(TILED), TILED)


def test_parameters_of_a_paged_model_are_copied(tmp_path: Path) -> None:
    """Between steps, as edits."""
    source = nn.Linear(WIDE, WIDE)
    engine = start(TILED, DISK, tmp_path)
    layer = engine.module.layers[1]
    layer.copy_params_from(source)
    blocks = [[block.weight.clone().cpu() for block in row] for row in layer.linears]
    assert torch.equal(torch.cat([torch.cat(row, 1) for row in blocks]), source.weight)
    engine.destroy(remove=True)


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ((0, 1), "in_splits of TiledLinear is from 1 to in_features, 4; got 0"),
        ((5, 1), "in_splits of TiledLinear is from 1 to in_features, 4; got 5"),
        ((1, 7), "out_splits of TiledLinear is from 1 to out_features, 6; got 7"),
    ],
)
def test_splits_that_make_no_sense_are_refused(splits: tuple[int, int], message: str) -> None:
    with pytest.raises(offload.UsageError, match=message):
        offload.TiledLinear(4, 6, True, *splits)


@pytest.mark.parametrize("layer_of_another_size", [nn.Linear(6, 4), nn.Linear(4, 6, bias=False)])
def test_parameters_of_another_layer_are_refused(layer_of_another_size: nn.Linear) -> None:
    layer = offload.TiledLinear(4, 6, in_splits=2)
    before = grid_of(layer)[0]
    with pytest.raises(offload.UsageError, match=r"expects a linear layer with a weight of \[6, 4\] and a bias, got"):
        layer.copy_params_from(layer_of_another_size)
    assert torch.equal(grid_of(layer)[0], before)


def test_numbers_that_make_no_sense_are_refused() -> None:
    arguments: dict[str, Any]
    for arguments, message in (
        ({"chunks": 0}, "chunks of offload.tiled is a whole number of at least 1, not 0"),
        ({"chunks": 2.0}, "not 2.0"),
        ({"chunks": True}, "not True"),
        ({"chunk_length": -1}, "chunk_length of offload.tiled is a whole number of at least 1, not -1"),
        ({"chunks": 2, "chunk_length": 3}, "not both"),
    ):
        print(message)
        module = Gated()
        with pytest.raises(offload.UsageError, match=message):
            offload.tiled(module, **arguments)
        assert type(module) is Gated and "_offload_tiling" not in module.__dict__


def test_a_module_that_normalizes_over_positions_is_refused() -> None:
    with pytest.raises(offload.UsageError, match="1 normalizes over all positions, so Sequential"):
        offload.tiled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def test_a_module_whose_class_does_not_decide_its_forward_is_refused() -> None:
    """It would be computed whole, without a word."""
    module = Gated()
    module.forward = module.forward  # type: ignore[method-assign]
    for refused in (module, torch.compile(Gated(), backend="eager")):
        with pytest.raises(
            offload.UsageError, match=f"forward of this {type(refused).__name__} was replaced in the object"
        ):
            offload.tiled(refused)


class Second(nn.Module):
    """A module with another signature."""

    def __init__(self, returns: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, hidden: torch.Tensor, factor: Any = None) -> Any:
        return self.returns(hidden)


def test_a_call_with_other_arguments_is_refused() -> None:
    call: Callable[[nn.Module], Any]
    for call, message in (
        (lambda module: module(torch.zeros(2, 8, 4), torch.zeros(2, 8, 4)), "called with Tensor, Tensor"),
        (lambda module: module(torch.zeros(2, 8, 4), factor=None), "called with Tensor, NoneType"),
        (lambda module: module([1, 2]), "called with list"),
        (lambda module: module(), "called with nothing"),
        (lambda module: module(torch.zeros(8)), r"tiled along dimension 1, and its input has the shape \[8\]"),
    ):
        print(message)
        with pytest.raises(offload.UsageError, match=message):
            call(offload.tiled(Second(lambda hidden: hidden), chunks=2))


def test_another_output_is_refused() -> None:
    returns: Callable[[torch.Tensor], Any]
    for returns, message in (
        (lambda hidden: (hidden, hidden), "returned tuple for a chunk of 4 positions"),
        (lambda hidden: hidden.sum(1), r"returned \[2, 4\] for a chunk of 4 positions"),
        (lambda hidden: hidden[:, :3], r"returned \[2, 3, 4\]"),
        (lambda hidden: hidden.sum(), r"returned \[\]"),
    ):
        print(message)
        with pytest.raises(offload.UsageError, match=message):
            offload.tiled(Second(returns), chunks=2)(torch.zeros(2, 8, 4))


def test_a_hook_that_would_be_called_for_each_chunk_is_refused() -> None:
    module = offload.tiled(Gated(), chunks=2)
    hook = module.up.weight.register_hook(lambda slope: 2 * slope)
    with pytest.raises(offload.UsageError, match=r"parameter up\.weight of the tiled Gated has a hook"):
        module(inputs(1, 8, 16))
    with torch.no_grad():
        module(inputs(1, 8, 16))
    hook.remove()
    module(inputs(1, 8, 16)).sum().backward()


def test_a_tensor_that_would_receive_no_gradient_is_refused() -> None:
    outer = nn.Parameter(torch.ones(16))
    for hidden in (outer, outer * 2):
        module = offload.tiled(Second(lambda given, outer=hidden: given * outer), chunks=2)  # type: ignore[misc]
        output = module(inputs(1, 8, 16))
        with pytest.raises(offload.UsageError, match=r"uses a tensor of shape \[16\] that is neither its input"):
            output.sum().backward()


def test_weights_that_have_changed_since_the_forward_are_refused() -> None:
    module, hidden = offload.tiled(Gated(), chunks=2), inputs(1, 8, 16)
    output = module(hidden)
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(offload.UsageError, match=r"the weights of up\.weight of the tiled Gated have changed since"):
        output.sum().backward()


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.works("Graphs", "MLPs computed in chunks of the sequence (`tile_mlp`, `offload.tiled`)", "right")
def test_bits_do_not_depend_on_the_tier(name: str, tmp_path: Path) -> None:
    """And numbers are those of the untiled model but for roundings; see the bound in `rounding_bounds`."""
    job = JOBS[name]
    mine = same_bits(job, tmp_path / "tiled", TIERS, tile_mlp=3)
    rounding_bounds.same_training(mine, plain_loop(job), job, reordered=True)
    assert mine.losses[1:] != run(job, DISK, tmp_path / "whole").losses[1:] or name != "llama, bf16", (
        "nothing was tiled"
    )


def test_the_config_the_call_and_plain_torch_give_the_same(tmp_path: Path) -> None:
    """The first two the same bits, and a plain loop the same numbers."""
    job = JOBS["llama"]
    by_hand = job._replace(model=tiled_by_hand)
    assert_same(run(job, DISK, tmp_path / "1", tile_mlp=3), run(by_hand, DISK, tmp_path / "2"))
    rounding_bounds.same_training(run(by_hand, DISK, tmp_path / "3"), plain_loop(by_hand), by_hand)


@pytest.mark.sample(1)
@pytest.mark.parametrize("units", [(), ("Linear",)], ids=["layers", "matrices"])
def test_a_small_budget_changes_no_bit(units: tuple[str, ...], tmp_path: Path) -> None:
    """With matrices as units and room for two, the three of an MLP never fit together."""
    job = JOBS["llama"]
    expected = run(job, ("none", "none"), tmp_path / "whole", tile_mlp=3)
    matrix = 64 * 128 * 4
    room = 2 * matrix + 2048 if units else room_for(job, 1)
    result = run(job, DISK, tmp_path / "small", tile_mlp=3, units=list(units), device_memory=room)
    assert_same(expected, result)


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_chunk_is_recovered_from(error: type[BaseException], tmp_path: Path) -> None:
    """In the forward, and in the backward; the next micro-batch gives the bits that it would have given."""
    job = JOBS["llama"]._replace(accumulation=1)
    expected = run(job, DISK, tmp_path / "expected", tile_mlp=4)
    engine = start(job, DISK, tmp_path / "fails", tile_mlp=4)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 2 + 4 + 2):  # the second chunk of the first forward, and of the second one's backward
            raise error("in a chunk")

    hook = engine.module.model.layers[1].mlp.act_fn.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(error, match="in a chunk"):
            engine.backward(models.language_loss(engine, 0, 0))
        engine.zero_grad()
    hook.remove()
    assert_same(trained(engine, job), expected)
    engine.destroy(remove=True)


def test_a_graph_made_before_a_step_is_refused(tmp_path: Path) -> None:
    """Chunks that were computed again would be those of newer weights."""

    def stack() -> nn.Module:
        return nn.Sequential(*(offload.tiled(nn.Sequential(nn.Linear(8, 8)), chunks=2) for _ in range(2)))

    def loss(model: Any, step: int, micro: int) -> torch.Tensor:
        return model(torch.ones(1, 6, 8)).square().mean()  # type: ignore[no-any-return]

    job = Job(stack, loss)
    engine = start(job, DISK, tmp_path)
    old = loss(engine, 0, 0)
    train_step(engine, job, 0)
    with pytest.raises(offload.UsageError, match=r"graph made before step\(\): the weights of 0\.weight of the tiled"):
        old.backward()
    engine.destroy(remove=True)


def test_a_tiled_module_runs_alone(tmp_path: Path) -> None:
    """Outside of the model's call, and its backward is then the whole backward."""
    job = JOBS["llama"]
    gradients = []
    for how in (3, False):
        engine = start(job, DISK, tmp_path / str(how), tile_mlp=how)
        mlp = engine.module.model.layers[0].mlp
        hidden = torch.ones(1, 9, 64).cumsum(1).div(9).to(engine.device).requires_grad_()
        mlp(hidden).square().sum().backward()
        gradients.append([hidden.grad, *(offload.safe_get_full_grad(parameter) for parameter in mlp.parameters())])
        engine.destroy(remove=True)
    for mine, right in zip(*gradients, strict=True):
        assert right.any() and torch.allclose(mine, right, rtol=0, atol=float(right.abs().max()) * 64 * 2.0**-24)


class Stack(nn.Module):
    """Residual MLPs, as in a decoder without attention."""

    def __init__(self, layers: int, features: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(features, inner) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("positions", [1024, 4096])
def test_device_memory_of_a_step_is_the_hidden_states_and_one_tile(positions: int, dtype: str, tmp_path: Path) -> None:
    """Beside the arena: a hidden state for each layer, some of the backward, one tile, and gradients of one MLP."""
    layers, features, inner, length, size = 3, 32, 128, 64, DTYPES[dtype].itemsize

    def stack() -> nn.Module:
        model = Stack(layers, features, inner)
        for layer in model.layers:
            offload.tiled(layer, chunk_length=length)
        return model

    engine = start(Job(stack, models.language_loss, dtype=dtype), ("cpu", "cpu"), tmp_path)
    hidden = torch.randn(1, positions, features, dtype=DTYPES[dtype])
    with Peak() as counted:
        output = engine(hidden)
        output.backward(torch.ones_like(output))
    engine.destroy(remove=True)
    state = positions * features * size
    tile = length * (6 * inner + 2 * features) * size
    gradients = (3 * features * inner + features) * (4 + size)
    small = 4 * torch.get_rng_state().numel() + 1024
    # States: the sums of the layers, and in the backward the slope, the slope of the MLP's input, and their sum.
    formula = (layers + 3) * state + tile + gradients + small
    assert (layers + 1) * state < counted.peak <= formula < layers * positions * 4 * inner * size
