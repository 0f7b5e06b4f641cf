"""Frozen tensor subclasses that wrap others, and layers whose codes are buffers, train as in memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import ConfigError, UsageError
from offload.torch_internals import tree_map
from tests.support.oracle import PLACEMENTS, Job, config, run, same_bits, start

AREA = "Weights that another library has quantized"
DISK = ("nvme", "nvme")


class Halves(torch.Tensor):
    """A weight as codes and scales, and inside of another wrapper: all that a library of quantization may do."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Halves:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Halves:
        return Halves(inner["codes"], inner["scale"], context)

    def value(self) -> torch.Tensor:
        return (self.codes.to(torch.float32) * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Halves(func(args[0].codes), func(args[0].scale), args[0].dtype)
        args, kwargs = tree_map(lambda each: each.value() if isinstance(each, Halves) else each, (args, kwargs or {}))
        return func(*args, **kwargs)


def halves(weight: torch.Tensor) -> nn.Parameter:
    scale = weight.abs().amax(1, keepdim=True).float() / 127
    inner = Halves((weight.float() / scale).round().to(torch.int8), scale, weight.dtype)
    return nn.Parameter(inner, requires_grad=False)


class Outer(torch.Tensor):
    """A wrapper of a wrapper."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Outer:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Outer:
        return Outer(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Outer(func(args[0].inner))
        args, kwargs = tree_map(lambda each: each.inner if isinstance(each, Outer) else each, (args, kwargs or {}))
        return func(*args, **kwargs)


class Packed(nn.Module):
    """A layer as those of GPTQ and AWQ, all of buffers: eight codes in an int32, zero points, scales, an index."""

    def __init__(self, linear: nn.Linear, group: int = 32) -> None:
        super().__init__()
        weight = linear.weight.detach().float().t().contiguous()  # (in, out)
        rows = weight.view(-1, group, weight.shape[1])
        low, high = rows.amin(1), rows.amax(1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.int32)
        codes = ((rows / scales.float()[:, None]).round() + zeros[:, None]).clamp(0, 15).to(torch.int32)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        self.register_buffer("qweight", (codes.view(-1, 8, weight.shape[1]) << shifts[None, :, None]).sum(1).int())
        self.register_buffer("qzeros", (zeros.view(len(zeros), -1, 8) << shifts).sum(2).int())
        self.register_buffer("scales", scales)
        self.register_buffer("g_idx", torch.arange(weight.shape[0], dtype=torch.int32) // group)
        self.register_buffer("bias", linear.bias.detach().half())
        self.shifts, self.out_features, self.in_features = shifts, weight.shape[1], weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = ((self.qweight[:, None] >> self.shifts[None, :, None]) & 15).view(-1, self.qweight.shape[1])
        zeros = ((self.qzeros[:, :, None] >> self.shifts) & 15).view(len(self.qzeros), -1)
        groups = self.g_idx.long()
        weight = self.scales[groups] * (codes - zeros[groups])
        return torch.matmul(x, weight.to(x.dtype)) + self.bias.to(x.dtype)


class Adapted(nn.Module):
    """Frozen layers, each with an adapter that trains."""

    def __init__(self, quantize: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]) for _ in range(3))
        self.bfloat16()
        for layer in self.layers:
            layer[0] = quantize(layer[0].requires_grad_(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, adapter in self.layers:
            x = torch.tanh(frozen(x) + adapter(x))
        return x


def wrapped(linear: nn.Linear) -> nn.Module:
    linear.weight = halves(linear.weight.detach())
    return linear


def nested(linear: nn.Linear) -> nn.Module:
    linear.weight = nn.Parameter(Outer(halves(linear.weight.detach()).detach()), requires_grad=False)
    return linear


class Integers(nn.Module):
    """A layer with codes in a parameter of integers, and its scale beside it in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.codes = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes.float() * self.scale).to(x.dtype).t()


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "wrapper": wrapped,
    "wrapper of a wrapper": nested,
    "buffers of GPTQ and AWQ": Packed,
    "parameters of integers": Integers,
}


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(step), dtype=torch.bfloat16)
    found: torch.Tensor = model(values).float().square().mean()
    return found


def job(quantize: Callable[[nn.Linear], nn.Module]) -> Job:
    return Job(functools.partial(Adapted, quantize), loss, steps=3, dtype="bf16")


def as_in_memory(this: Job, path: Path) -> None:
    """Asserts that the first losses and gradients are those in memory, bit for bit."""
    engine = start(this, DISK, path)
    torch.manual_seed(this.seed)
    memory = this.model()
    for step in range(2):
        found, expected = this.loss(engine, step, 0), this.loss(memory, step, 0)
        assert torch.equal(found, expected)
        engine.backward(found)
        expected.backward()
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                gradient, theirs = offload.safe_get_full_grad(parameter), memory.get_parameter(name)
                assert gradient is not None and theirs.grad is not None
                assert torch.equal(gradient, theirs.grad.float()), name
        engine.step()
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                memory.get_parameter(name).data, memory.get_parameter(name).grad = parameter.detach().clone(), None
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "wrapper", marks=pytest.mark.works(AREA, "any tensor subclass that wraps others, nested too", "right")
        ),
        "wrapper of a wrapper",
        pytest.param(
            "buffers of GPTQ and AWQ",
            marks=pytest.mark.works(AREA, "layers of the structure of GPTQ and AWQ: integers in buffers", "right"),
        ),
        pytest.param(
            "parameters of integers", marks=pytest.mark.works(AREA, "codes in integer parameters or in float8", "right")
        ),
    ],
)
def test_losses_and_gradients_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    as_in_memory(job(KINDS[kind]), tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_all_placements_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    same_bits(job(KINDS[kind]), tmp_path, PLACEMENTS[::4])


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_and_copies_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    this = job(KINDS[kind])
    torch.manual_seed(this.seed)
    memory = this.model()
    engine = start(this, DISK, tmp_path)
    theirs, mine = memory.state_dict(), engine.module.state_dict()
    assert theirs.keys() == mine.keys()
    values = torch.ones(2, 64, dtype=torch.bfloat16)
    for name, value in theirs.items():
        assert type(value) is type(mine[name]) and value.dtype == mine[name].dtype
        assert torch.equal(value * 1, mine[name] * 1), name
    with torch.no_grad():
        alone, expected = copy.deepcopy(engine.module), memory(values)
        assert torch.equal(engine(values), expected) and torch.equal(alone(values), expected)
    engine.destroy(remove=True)
    assert torch.equal(alone(values), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_read_of_single_tensors_and_refused_of_others(kind: str, tmp_path: Path) -> None:
    this = job(KINDS[kind])
    torch.manual_seed(this.seed)
    stored = this.model().state_dict()
    engine = start(this, DISK, tmp_path)
    segments = [segment for layout in testing.inspect(engine).layouts for segment in layout.segments if segment.inner]
    assert segments
    for segment in segments:
        parameter = engine.module.get_parameter(segment.name)
        if len(segment.inner) > 1:
            with pytest.raises(UsageError, match="stored as its library has quantized it"):
                offload.safe_get_full_fp32_param(parameter)
        else:
            values = offload.safe_get_full_fp32_param(parameter)
            assert values is not None and torch.equal(values, stored[segment.name].float()), segment.name
    engine.destroy(remove=True)


def test_a_run_resumes(tmp_path: Path) -> None:
    for number, kind in enumerate(KINDS.values()):
        this = job(kind)
        expected = run(this, DISK, tmp_path / f"{number}whole")
        first = start(this, DISK, tmp_path / f"{number}", durability="step")
        for step in range(2):
            first.backward(loss(first, step, 0))
            first.step()
        first.destroy()
        engine = start(this, DISK, tmp_path / f"{number}", durability="step", resume="auto")
        assert engine.global_steps == 2
        engine.backward(loss(engine, 2, 0))
        engine.step()
        weights = engine.module.state_dict()
        for name, value in expected.weights.items():
            assert torch.equal(value * 1, weights[name] * 1), name
        engine.destroy(remove=True)


def test_buffers_are_buffers_again_if_the_engine_cannot_start(tmp_path: Path) -> None:
    model = Adapted(Packed)
    before = list(model.state_dict())
    with pytest.raises(offload.errors.BudgetError):
        offload.initialize(model=model, config=config(job(Packed), DISK, tmp_path, host_memory=1))
    assert list(dict(model.layers[0][0].named_buffers())) == ["qweight", "qzeros", "scales", "g_idx", "bias"]
    assert list(model.state_dict()) == before


def test_a_quantized_weight_that_shall_train_is_refused(tmp_path: Path) -> None:
    model = Adapted(wrapped)
    model.layers[0][0].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"shall train is quantized, the first is layers\.0\.0\.weight"):
        offload.initialize(model=model, config=config(job(wrapped), DISK, tmp_path))


# -- torchao ------------------------------------------------------------------------------------------


def of_torchao(name: str, arguments: dict[str, Any], linear: nn.Linear) -> nn.Module:
    import torchao.quantization

    held = nn.ModuleList([linear])
    torchao.quantization.quantize_(held, getattr(torchao.quantization, name)(**arguments))
    return held[0]


TORCHAO: dict[str, dict[str, Any]] = {
    "Int8WeightOnlyConfig": {},
    "Float8WeightOnlyConfig": {},
    "IntxWeightOnlyConfig": {"weight_dtype": torch.int4},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.works(AREA, "torchao: int8, int4 (in int8) and float8 weights", "right")
@pytest.mark.parametrize("name", TORCHAO)
def test_torchao_trains_as_in_memory(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    this = job(functools.partial(of_torchao, name, TORCHAO[name]))
    as_in_memory(this, tmp_path / "memory")
    first = run(this, ("none", "none"), tmp_path / "device")
    found = run(this, ("cpu", "nvme"), tmp_path / "host")
    assert (found.losses, found.norms) == (first.losses, first.norms)
