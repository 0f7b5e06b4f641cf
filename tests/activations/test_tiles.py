"""A tiled module computes what the whole module computes, and holds what is inside of it for one chunk at a time."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.activations.in_pieces import Gated, equal, gradients, in_pieces, inputs
from tests.activations.test_causal_lm_loss import Peak
from tests.support import models
from tests.support.oracle import DTYPES
from tests.support.rounding_bounds import unit


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
    for found, right, size, terms in (
        (output, x @ weight.T + bias, x.abs() @ weight.T.abs() + bias.abs(), 17),
        (mine[0], s @ weight, s.abs() @ weight.abs(), 24),
    ):
        # A row is summed as in the whole: over the features, rounded, and rounded again with the bias.
        assert torch.all((found.flatten(0, 1).double() - right).abs() <= ((terms + 2) * wide + 2 * u) * size * 1.01)
    for found, right, size in (
        (mine[1], s.T @ x, s.T.abs() @ x.abs()),
        (mine[2], s.sum(0), s.abs().sum(0)),
    ):
        own = u * size + u * right.abs() if dtype != torch.float32 else 0.0
        assert torch.all((found.double() - right).abs() <= (own + (tokens + chunks + 2) * wide * size) * 1.01)


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
    assert all(each.any() for each in gradients(module, short))


def test_autograd_receives_one_gradient_for_each_parameter() -> None:
    module, calls = offload.tiled(Gated(), chunks=5), list[int]()
    for each in module.parameters():
        each.register_post_accumulate_grad_hook(lambda parameter: calls.append(id(parameter)))
    for _ in range(2):
        module(inputs(1, 16, 16)).sum().backward()
    assert len(calls) == 2 * 4 == 2 * len(set(calls))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_chunks_are_wide(dtype: torch.dtype) -> None:
    """In bf16, 300 times one is 256: from there on, one is half a unit."""
    layer, hidden = nn.Linear(1, 1).to(dtype), torch.ones(1, 300, 1, dtype=dtype)
    offload.tiled(layer, chunk_length=1)(hidden).sum().backward()
    assert layer.weight.grad.dtype == dtype and layer.weight.grad.item() == torch.tensor(300.0, dtype=dtype)
    assert layer.bias.grad.item() == torch.tensor(300.0, dtype=dtype)


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


def test_a_parameter_that_no_chunk_uses_receives_none() -> None:
    module = Gated()
    module.unused = nn.Linear(3, 3)
    offload.tiled(module, chunks=3)(inputs(1, 9, 16)).sum().backward()
    assert module.unused.weight.grad is None and module.up.weight.grad is not None


def test_without_gradients_there_is_no_graph() -> None:
    module, hidden = Gated(), inputs(2, 16, 16)
    expected = in_pieces(module, hidden, 4)
    offload.tiled(module, chunks=4)
    with torch.no_grad():
        assert torch.equal(module(hidden), expected) and not module(hidden).requires_grad
    with torch.inference_mode():
        assert torch.equal(module(hidden), expected)


def test_a_retained_graph_gives_its_gradients_again() -> None:
    module, hidden = offload.tiled(Gated(dropout=0.5), chunks=3), inputs(1, 16, 16)
    loss = module(hidden).square().sum()
    first = torch.autograd.grad(loss, [hidden, *module.parameters()], retain_graph=True)
    assert equal(list(first), list(torch.autograd.grad(loss, [hidden, *module.parameters()])))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_around_it_changes_no_bit(reentrant: bool) -> None:
    torch.manual_seed(0)
    module, hidden = offload.tiled(Gated(dropout=0.5), chunks=3), inputs(1, 16, 16)
    found = []
    for run in (module, lambda given: checkpoint(module, given, use_reentrant=reentrant)):
        torch.manual_seed(1)
        run(hidden).square().sum().backward()
        found.append([hidden.grad, *(each.grad for each in module.parameters())])
        hidden.grad = None
        module.zero_grad()
    assert equal(*found)


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


def test_an_exception_in_a_chunk_leaves_nothing_behind() -> None:
    module, hidden = Gated(dropout=0.5), inputs(1, 16, 16)
    offload.tiled(module, chunks=4)
    torch.manual_seed(1)
    right = gradients(module, module(hidden), hidden)
    fails_at = [3, 7, 8, 11]  # calls: of a forward, of a backward, of a forward and a backward
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in fails_at:
            raise ValueError("in a chunk")

    hook = module.up.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="in a chunk"):
            gradients(module, module(hidden), hidden)
    hook.remove()
    torch.manual_seed(1)
    assert torch.is_grad_enabled() and equal(gradients(module, module(hidden), hidden), right)


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


def test_a_module_is_tiled_again_by_other_numbers() -> None:
    module = offload.tiled(offload.tiled(Gated(), chunks=2), chunks=4)
    calls = list[int]()
    module.up.register_forward_hook(lambda *_: calls.append(1))
    module(inputs(1, 8, 16))
    assert len(calls) == 4 and type(offload.untiled(module)) is Gated


# -- memory -------------------------------------------------------------------------------------------


def peak(run: Callable[[], Any]) -> int:
    """Returns the bytes that operations have made and not yet freed, at most."""
    with Peak() as counted:
        run()
    return counted.peak


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [2048, 8192])
def test_memory_is_one_chunk_and_the_gradients(positions: int, dtype: torch.dtype) -> None:
    """The formula of offload/activations/tiles.py, with what a gated MLP saves and makes for one chunk."""
    features, inner, length, size = 32, 128, 512, dtype.itemsize
    module = offload.tiled(Gated(features, inner), chunk_length=length).to(dtype)
    hidden = torch.randn(1, positions, features, dtype=dtype, requires_grad=True)
    weights = sum(each.numel() for each in module.parameters())
    output = positions * features * size
    generators = 2 * torch.get_rng_state().numel() + 256
    used = peak(lambda: module(hidden))
    # Three inner tensors at a time: silu, up, and their product.
    assert used <= output + length * 3 * inner * size + generators
    result = module(hidden)
    slope = torch.ones_like(result)
    used = peak(lambda: result.backward(slope))
    # Six: gate, silu and up, and the gradients of the product and its factors. The output of a chunk has a graph.
    chunk = length * (6 * inner + features) * size
    assert used <= output + chunk + weights * (size + 4) + generators < positions * 4 * inner * size


def test_a_graph_holds_the_input_alone() -> None:
    module, hidden = offload.tiled(Gated(), chunks=4), inputs(1, 16, 16)
    saved = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (saved.append(each), each)[1], lambda each: each):
        module(hidden)
    assert [each.data_ptr() for each in saved] == [hidden.data_ptr()]
