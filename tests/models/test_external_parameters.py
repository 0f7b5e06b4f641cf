"""Weights are there for other modules' code, wrapper tensors and views, or a use is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.spectral_norm import spectral_norm
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import ConfigError, UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, assert_same, plain_loop, run, start, train_step

DISK = ("nvme", "nvme")


class Unseen(nn.Module):
    """Uses another module's weight in a function that torch does not show to placeholders, as extensions' are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.own = nn.Linear(size, size)
        self.others: list[nn.Parameter] = []

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.own(values) @ self.others[0]


class WithUnseen(nn.Module):
    def __init__(self, register: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32), Unseen(32), nn.Linear(32, 61)])
        self.layers[1].others.append(self.layers[0].weight)
        if register:
            offload.register_external_parameter(self.layers[1], self.layers[0].weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(ids)
        for layer in self.layers:
            values = layer(values)
        return values


@pytest.mark.works(
    "Modules", "a parameter read by code that torch does not see (a fused loss in C++), registered", "right"
)
@pytest.mark.numeric
def test_a_registered_parameter_is_there(tmp_path: Path) -> None:
    """It was registered before the engine was made, or after."""
    job = Job(partial(WithUnseen, True), models.mixture_loss, steps=2)
    expected = plain_loop(job).losses
    for late in (False, True):
        engine = start(job._replace(model=partial(WithUnseen, not late)), DISK, tmp_path / str(late))
        unseen, weight = engine.module.layers[1], engine.module.layers[0].weight
        if late:
            with pytest.raises(UsageError, match="register_external_parameter"):
                job.loss(engine, 0, 0)
            for _ in range(2):
                offload.register_external_parameter(unseen, weight)
        rounding_bounds.same_losses([train_step(engine, job, step) for step in range(2)], expected, job)
        offload.unregister_external_parameter(unseen, weight)
        with torch.no_grad():
            assert bool(job.loss(engine, 0, 0).isnan()), "else this test shows nothing"
        with pytest.raises(UsageError, match="was not registered"):
            offload.unregister_external_parameter(unseen, weight)
        engine.destroy(remove=True)


def test_only_modules_and_parameters_can_be_registered() -> None:
    linear = nn.Linear(2, 2)
    for arguments in ((linear, torch.ones(2)), (linear.weight, linear.weight)):
        with pytest.raises(UsageError, match="expects a module and a parameter"):
            offload.register_external_parameter(*arguments)


class Passing(nn.Module):
    """Passes parameters to checkpointed functions as arguments: a table of its own, and a weight of another block."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.table, self.head = nn.Parameter(torch.full((1, 1, 32), 0.1)), nn.Linear(32, 61)
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            weight = self.layers[number - 1].weight
            values = checkpoint(partial(self.block, layer), values, self.table, weight, use_reentrant=self.reentrant)
        return self.head(values)

    @staticmethod
    def block(layer: nn.Module, values: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(values) + table) @ weight + values


@pytest.mark.works("Modules", "a parameter as an argument of a checkpointed function", "right")
@pytest.mark.numeric
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("placement", [DISK, ("none", "none")], ids="-".join)
@pytest.mark.sample(2)
def test_a_checkpointed_function_takes_parameters(reentrant: bool, placement: tuple[str, str], tmp_path: Path) -> None:
    job = Job(partial(Passing, reentrant), models.mixture_loss, steps=2)
    expected = plain_loop(job)
    result = run(job, placement, tmp_path)
    assert torch.allclose(torch.tensor(result.losses), torch.tensor(expected.losses), rtol=0, atol=1e-5)
    assert torch.allclose(torch.tensor(result.norms), torch.tensor(expected.norms), rtol=1e-4)


class Pair(torch.Tensor):
    """Two tensors of one shape, on both of which each operation works."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, first.shape, dtype=first.dtype, strides=first.stride(), requires_grad=False
        )

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, size: torch.Size, stride: Any) -> Pair:
        return Pair(inner["first"], inner["second"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def of(name: str) -> Any:
            return tree_map(lambda leaf: getattr(leaf, name) if isinstance(leaf, Pair) else leaf, (args, kwargs or {}))

        (some, named), (more, others_named) = of("first"), of("second")
        return Pair(func(*some, **named), func(*more, **others_named))


class Plain(torch.autograd.Function):
    """A linear layer."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ hidden


class Wrapped(torch.autograd.Function):
    """The same, which saves its operands wrapped, the weight within two wrappers."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inner = Pair(weight.detach(), 2 * weight.detach())
        ctx.save_for_backward(Pair(hidden.detach(), hidden.detach()), Pair(inner, inner))
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        assert type(weight) is type(weight.first) is type(hidden) is Pair
        assert torch.equal(2 * weight.first.first, weight.second.second)
        return gradient @ weight.first.first, gradient.T @ hidden.second


class Linear(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight, self._function = nn.Parameter(torch.randn(16, 16) / 4), function

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._function.apply(hidden, self.weight)


class Net(nn.Module):
    def __init__(self, function: Any = Wrapped) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Linear(function) for _ in range(6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden


class PlainNet(Net):
    def __init__(self) -> None:
        super().__init__(Plain)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    return model(hidden).pow(2).mean()


JOB = Job(Net, loss, steps=3)


@pytest.mark.works("Graphs", "a saved tensor that wraps views of weights", "right")
@pytest.mark.parametrize("placement", [("none", "none"), ("nvme", "nvme")], ids="-".join)
def test_a_saved_wrapper_of_weights_trains_as_plain_tensors_do(placement: tuple[str, str], tmp_path: Path) -> None:
    expected = run(JOB._replace(model=PlainNet), ("none", "none"), tmp_path / "plain")
    assert_same(expected, run(JOB, placement, tmp_path / "wrapped"))


class SharedPair(nn.Module):
    """Two matrices of 10 by 10, whose memory `share` arranges."""

    def __init__(self, share: Callable[[SharedPair], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.shift = nn.Parameter(torch.zeros(10))
        share(self)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(values))) + self.shift


def loss_shared(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(3, 10, generator=torch.Generator().manual_seed(step))
    return (model(rows) - 1).square().mean()


def rows_of_one(model: SharedPair) -> None:
    memory = torch.randn(15, 10)
    model.first.weight, model.second.weight = nn.Parameter(memory[:10]), nn.Parameter(memory[5:])


def one_frozen(model: SharedPair) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data[:], requires_grad=False)


def an_attribute(model: SharedPair) -> None:
    model.second.lookup = {"rows": [model.second.weight.data[3]]}  # type: ignore[assignment]


def a_hidden_module(model: SharedPair) -> None:
    hidden = nn.Linear(10, 10)
    hidden.weight = nn.Parameter(model.first.weight.data)
    model.others = (hidden,)  # type: ignore[assignment]


class Lookup:
    """An object of a script's."""

    __slots__ = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows


def an_object(model: SharedPair) -> None:
    model.second.lookup = [Lookup({"third": model.second.weight.detach()[3]})]  # type: ignore[assignment]


def a_default(model: SharedPair) -> None:
    model.product = lambda rows, weight=model.first.weight.data: rows @ weight  # type: ignore[assignment]


def a_partial(model: SharedPair) -> None:
    model.product = functools.partial(torch.matmul, other=model.first.weight.data)  # type: ignore[assignment]


def a_hook(model: SharedPair) -> None:
    weight = model.second.weight.data
    model.first.register_forward_hook(lambda module, args, output: output + args[0] @ weight)


def an_array(model: SharedPair) -> None:
    model.table = {"values": model.first.weight.detach().numpy()[2:, 1]}  # type: ignore[assignment]


def of_itself(model: SharedPair) -> None:
    model.first.weight = nn.Parameter(torch.randn(10, 1).expand(10, 10))


@pytest.mark.works("Modules", "tensors over a weight's memory (a buffer, another parameter, an attribute)", "refused")
@pytest.mark.parametrize(
    ("share", "message"),
    [
        (rows_of_one, r"parameters first\.weight and second\.weight share memory"),
        (one_frozen, r"parameters first\.weight and second\.weight share memory"),
        (
            lambda model: model.first.register_buffer("turned", model.first.weight.detach().t()[2:4], persistent=False),
            r"buffer first\.turned lies in the memory of parameter first\.weight",
        ),
        (
            lambda model: model.register_buffer("bits", model.second.weight.detach().view(torch.int16)),
            r"buffer bits lies in the memory of parameter second\.weight",
        ),
        (an_attribute, r"attribute lookup of second lies in the memory of parameter second\.weight"),
        (a_hidden_module, r"attribute others of the model lies in the memory of parameter first\.weight"),
        (an_object, r"attribute lookup of second lies in the memory of parameter second\.weight"),
        (a_default, r"attribute product of the model lies in the memory of parameter first\.weight"),
        (a_partial, r"attribute product of the model lies in the memory of parameter first\.weight"),
        (a_hook, r"attribute _forward_hooks of first lies in the memory of parameter second\.weight"),
        (an_array, r"attribute table of the model lies in the memory of parameter first\.weight"),
        (
            lambda model: model.register_buffer("same", model.first.weight),
            r"buffer same is the parameter first\.weight itself",
        ),
        (of_itself, r"elements of parameter first\.weight share memory"),
    ],
)
def test_what_an_update_would_cut_apart_is_refused(
    share: Callable[[SharedPair], None], message: str, tmp_path: Path
) -> None:
    model = SharedPair(share)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        start(Job(lambda: model, loss_shared), DISK, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("follows", ["parameter", "clone", "state dict", "array"])
def test_a_line_tells_of_what_a_script_has_over_weights(follows: str, tmp_path: Path) -> None:
    model = SharedPair(lambda _: None)
    taken = {
        "parameter": lambda: [*model.parameters()],
        "clone": lambda: model.first.weight.detach().clone(),
        "state dict": model.state_dict,
        "array": lambda: model.first.weight.detach().numpy(),
    }[follows]()
    engine = start(Job(lambda: model, loss_shared), DISK, tmp_path)
    told = [
        notice for notice in engine.notices if "a tensor outside of the model uses the memory of parameter" in notice
    ]
    assert len(told) == (follows in ("state dict", "array")) and taken is not None
    engine.destroy(remove=True)


def columns_of_one(model: SharedPair) -> None:
    memory = torch.randn(10, 20)
    model.first.weight, model.second.weight = nn.Parameter(memory[:, ::2]), nn.Parameter(memory[:, 1::2])


def tied(model: SharedPair) -> None:
    model.second.weight = model.first.weight
    model.listed = [model.first.weight]  # type: ignore[assignment]


def frozen(model: SharedPair) -> None:
    model.first.weight.requires_grad_(False)
    model.second.weight = nn.Parameter(model.first.weight.data, requires_grad=False)
    model.register_buffer("turned", model.first.weight.detach().t())


class Proxy:
    """An object that cannot be asked for anything before it is connected."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("the proxy is not connected")


def of_the_script(model: SharedPair) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    model.held = [Proxy(), optimizer, {"again": model}, lambda: model.first.weight]  # type: ignore[assignment]
    model.copies = {name: value.clone() for name, value in model.state_dict().items()}  # type: ignore[assignment]


@pytest.mark.numeric
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "share", [columns_of_one, tied, frozen, lambda model: spectral_norm(model.first), of_the_script]
)
def test_what_shares_nothing_that_trains_apart_is_as_in_pytorch(
    share: Callable[[SharedPair], None], tmp_path: Path
) -> None:
    job = Job(lambda: SharedPair(share), loss_shared, steps=3, lr=1e-2)
    expected = plain_loop(job).losses
    engine = start(job, DISK, tmp_path)
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_model_that_does_not_train_may_share_memory() -> None:
    model = SharedPair(rows_of_one)
    rows = torch.ones(2, 10)
    expected = model(rows)
    engine = offload.inference(model, {"offload": {"device": "cpu"}})
    assert torch.equal(engine(rows), expected)
    engine.destroy()
