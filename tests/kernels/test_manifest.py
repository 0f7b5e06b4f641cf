"""Every kernel and every sum has a test of its bits, and inputs on which wrong arithmetic gives other bits."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from offload import kernels, losses
from offload.engine import _native as engine_native
from offload.engine.callbacks import GradientStats
from offload.engine.gradients import DeviceTotals, total_of
from offload.kernels import Noise, Partition, Segment, _native, cuda, noise_stream
from offload.kernels.blocks import NF4
from offload.kernels.lamb import LambSegment
from offload.kernels.update import RULES, blocks_of, decode_moments, encode_moments, update
from tests import ROOT
from tests.kernels.manifest import MANIFEST, NO_ARITHMETIC
from tests.kernels.test_kernels_adamw import FORMATS, LAMB_STEP, by_formula, stored, values_of
from tests.kernels.test_kernels_bf24 import bytes_of, chances, joined
from tests.kernels.test_kernels_bf24 import reference as bf24_reference
from tests.kernels.test_kernels_bf24 import split as split_bf24_of
from tests.kernels.test_kernels_formulas import STEPS, formula
from tests.kernels.test_kernels_masters import bf16, moment_values, random_bits, rounded
from tests.kernels.test_kernels_masters import reference as codes_of
from tests.kernels.test_kernels_sums import EDGES, NANS, from_bits, split
from tests.support.kernel_inputs import ISAS, default_settings, normal

__all__ = ["default_settings"]  # fixtures

pytestmark = pytest.mark.numeric

F = np.float32
NUMEL = 3 * 4096 + 77

# -- what there is -------------------------------------------------------------------------------------

_ADDING = {"add_", "accumulate", "squares_of_chunks", "sum_squares", "lerp_", "addcmul_", "addmm_", "sqrt"}
"""Calls by which a function of the engine adds numbers of a training."""


def sums_of_the_engine() -> Iterator[str]:
    """Yields the functions of `offload/engine` that add gradients or squares, as "module:Class.function"."""
    for path in sorted((ROOT / "offload" / "engine").glob("*.py")):
        yield from _adding(ast.parse(path.read_text()), path.stem, "")


def _adding(node: ast.AST, module: str, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
        called = isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in _ADDING
        added = isinstance(child, ast.AugAssign) and isinstance(child.target, ast.Name) and child.target.id == "total"
        if called or added:
            yield f"{module}:{name.strip('.')}"
        yield from _adding(child, module, inner)


def exports() -> set[str]:
    """The names of all kernels and sums, as the manifest has them."""
    without = {name for names in NO_ARITHMETIC.values() for name in names.split()}
    groups: Mapping[str, Any] = {
        "rule ": [rule for rule, _ in RULES.values()],
        "kernels.": kernels.__all__,
        "native ": [name for name in dir(_native) if not name.startswith("_")],
        "engine native ": [name for name in dir(engine_native) if not name.startswith("_")],
        "cuda ": cuda.__all__,
        "losses.": losses.__all__,
        "": sums_of_the_engine(),
    }
    return {f"{prefix}{name}" for prefix, names in groups.items() for name in names if name not in without}


def test_every_kernel_and_sum_has_an_entry() -> None:
    assert exports() == MANIFEST.keys(), "add a test of its bits, and a control, to tests/kernels/manifest.py"
    known = {*kernels.__all__, *dir(_native), *dir(engine_native), *cuda.__all__, *losses.__all__}
    assert {name for names in NO_ARITHMETIC.values() for name in names.split()} <= known


def test_an_entry_names_a_test_and_a_control_that_exist() -> None:
    for name, entry in MANIFEST.items():
        path, _, test = entry.test.partition("::")
        assert f"\ndef {test}(" in (ROOT / path).read_text() and entry.control in CONTROLS, name


# -- controls ------------------------------------------------------------------------------------------


class Control(NamedTuple):
    """One kernel on inputs that wrong arithmetic shows."""

    kernel: bytes
    """What the kernel has made."""
    right: bytes
    wrong: Mapping[str, bytes]


class Numbers(np.lib.mixins.NDArrayOperatorsMixin):
    """fp32 numbers whose operations are each rounded once: or with one fault, as compilers and processors have it."""

    def __init__(self, values: Any, fault: str = "", product: Any = None) -> None:
        self.values, self.fault, self.product = np.asarray(values, F), fault, product

    def __array_ufunc__(self, operation: Any, method: str, *operands: Any, **_: Any) -> Numbers:
        with np.errstate(all="ignore"):
            plain = [each.values if isinstance(each, Numbers) else F(each) for each in operands]
            result, product = operation(*plain), None
            if self.fault == "fused" and operation is np.multiply:
                product = plain[0].astype(np.float64) * plain[1].astype(np.float64)
            elif self.fault == "fused" and operation in (np.add, np.subtract):
                wide = [each.product if isinstance(each, Numbers) else None for each in operands]
                if any(each is not None for each in wide):
                    first, second = (
                        each.astype(np.float64) if exact is None else exact
                        for each, exact in zip(plain, wide, strict=True)
                    )
                    result = operation(first, second if wide[0] is None else plain[1].astype(np.float64)).astype(F)
            if self.fault == "flushed":
                result = np.where(np.abs(result) < np.finfo(F).tiny, F(0), result)
            return Numbers(result, self.fault, product)


def _bytes(*arrays: Any) -> bytes:
    return b"".join(np.ascontiguousarray(each).tobytes() for each in arrays)


def _with_denormals(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Makes 64 elements denormal, and two of them zeros of either sign."""
    values[:64] = torch.arange(64) * scale
    values[0], values[1] = 0.0, -0.0
    return values


def _rule(name: str) -> Control:
    step = STEPS[name]
    moments = RULES[type(step)][1]
    p, g = _with_denormals(normal(NUMEL, 1), 1e-42), _with_denormals(normal(NUMEL, 2, 0.1), 1e-41)
    m, v = _with_denormals(normal(NUMEL, 3, 0.1), 1e-42), _with_denormals(normal(NUMEL, 4).square(), 1e-42).abs()
    second = ((v,) if name.startswith("adagrad") else (m, v))[:moments]
    inputs = [p, g, *(second if moments else ()), *[torch.zeros(NUMEL)] * (2 - moments)]

    def by_formula_with(fault: str) -> bytes:
        arrays = [Numbers(tensor.numpy(), fault) for tensor in inputs]
        made = list(formula(step, *arrays))
        if name == "lion":
            made[0] = made[0] + F(0)  # the kernel subtracts and adds: a negative zero becomes a positive one
        return _bytes(*(each.values for each in made[: 1 + moments]))

    right, wrong = by_formula_with(""), {fault: by_formula_with(fault) for fault in ("fused", "flushed")}
    weight, own = p.clone(), tuple(each.clone() for each in second)
    update(Partition(weight, g, own), [Segment(0, NUMEL, step)])
    return Control(_bytes(weight, *own), right, wrong)


def _lamb() -> Control:
    step, f = LAMB_STEP, F
    p, g = normal(NUMEL, 1), normal(NUMEL, 2)
    m, v = _with_denormals(normal(NUMEL, 3, 0.1), 1e-42), _with_denormals(normal(NUMEL, 4).square(), 1e-42).abs()
    g[:64] = 0

    def moments(fault: str) -> tuple[Numbers, Numbers]:
        gradient = Numbers(g.numpy(), fault) * f(step.grad_scale)
        first = f(step.beta1) * Numbers(m.numpy(), fault) + f(1 - step.beta1) * gradient
        return first, f(step.beta2) * Numbers(v.numpy(), fault) + f(1 - step.beta2) * gradient * gradient

    part = Partition(p.clone(), g, (m.clone(), v.clone()))
    kernels.lamb_moments(part, [LambSegment(0, NUMEL, step)])
    made = {fault: _bytes(*(each.values for each in moments(fault))) for fault in ("", "fused", "flushed")}
    return Control(_bytes(*part.moments), made.pop(""), made)


def _lamb_ratio() -> Control:
    generator = torch.Generator().manual_seed(5)
    pieces = [torch.rand(77, 2, generator=generator, dtype=torch.float64) for _ in range(3)]
    step = LAMB_STEP._replace(min_ratio=0.0, max_ratio=1e9)

    def ratio(rows: list[list[float]]) -> bytes:
        weight = direction = 0.0
        for w, u in rows:
            weight, direction = weight + w, direction + u
        return _bytes(np.float64(math.sqrt(weight) / math.sqrt(direction)))

    rows = [row for piece in pieces for row in piece.tolist()]
    kernel = _bytes(np.float64(kernels.lamb_ratio(step, pieces)))
    return Control(kernel, ratio(rows), {"swapped": ratio(sorted(rows))})


def _squares() -> Control:
    values = torch.cat((normal(NUMEL, 1), torch.full((64,), 1e-39)))
    alone = torch.full((64,), 1e-39)

    def ordered(array: Any) -> float:
        """The order of [Note: sums] in native/sums_body.h."""
        total = 0.0
        for start in range(0, len(array), 4096):
            block = np.zeros(4096)
            block[: len(array[start : start + 4096])] = np.square(array[start : start + 4096].astype(np.float64))
            lanes = np.zeros(16)
            for row in block.reshape(-1, 16):
                lanes += row
            for half in (8, 4, 2, 1):
                lanes[:half] += lanes[half : 2 * half]
            total += lanes[0]
        return total

    one_by_one = 0.0
    for value in values.double().square().tolist():
        one_by_one += value
    right = [ordered(values.numpy()), ordered(alone.numpy())]
    return Control(
        _bytes([kernels.sum_squares(values), kernels.sum_squares(alone)]),
        _bytes(right),
        {"swapped": _bytes([one_by_one, right[1]]), "flushed": _bytes([right[0], 0.0])},
    )


def _accumulate() -> Control:
    out, grad = _with_denormals(normal(NUMEL, 1), 1e-42), _with_denormals(normal(NUMEL, 2), 1e-42)
    narrow = out.bfloat16()
    right = _bytes((out + grad).numpy(), (narrow.float() + grad).bfloat16().view(torch.int16).numpy())
    flushed = (Numbers(out.numpy(), "flushed") + Numbers(grad.numpy(), "flushed")).values
    twice = (narrow + grad.bfloat16()).view(torch.int16).numpy()
    wrong = {"flushed": _bytes(flushed) + right[4 * NUMEL :], "rounded twice": right[: 4 * NUMEL] + _bytes(twice)}
    wide = out.clone()
    kernels.accumulate(wide, grad, add=True)
    kernels.accumulate(narrow, grad, add=True)
    return Control(_bytes(wide, narrow.view(torch.int16)), right, wrong)


def _split_master() -> Control:
    master = torch.cat((from_bits(EDGES + NANS), normal(NUMEL, 1)))
    bits = master.view(torch.int32).numpy().astype(np.int64) & 0xFFFFFFFF

    def divided(upper: Any) -> bytes:
        nan = np.isnan(master.numpy())
        low = np.where(nan, 0, bits - (upper << 16))
        return _bytes(np.where(nan, 0x7FC0, upper).astype(np.uint16), low.astype(np.int16))

    weight, residual = split(master)
    to_even = master.bfloat16().view(torch.int16).numpy().astype(np.int64) & 0xFFFF
    payload = np.where(np.isnan(master.numpy()), bits >> 16, (bits + 0x8000) >> 16).astype(np.uint16)
    right = divided((bits + 0x8000) >> 16)
    flushed = np.where(bits & 0x7F800000 == 0, bits & 0x80000000, bits)
    return Control(
        _bytes(weight.view(torch.int16), residual),
        right,
        {
            "ties to even": divided(to_even),
            "payload of a NaN": _bytes(payload) + right[2 * len(master) :],
            "flushed": divided((flushed + 0x8000) >> 16),
        },
    )


def _join_master() -> Control:
    master = torch.cat((from_bits(EDGES), normal(NUMEL, 1)))
    weight, residual = split(master)
    back = torch.empty_like(master)
    kernels.join_master(weight, residual, back)
    flushed = torch.where(master.abs() < torch.finfo(torch.float32).tiny, 0.0, master)
    unsigned = torch.where(master == 0, 0.0, master)
    wrong = {"flushed": flushed, "no negative zero": unsigned, "without its low bits": weight.float()}
    return Control(_bytes(back), _bytes(master), {fault: _bytes(values) for fault, values in wrong.items()})


NOISE = Noise(noise_stream(7, 3, 11), 1024)


def _split_bf24() -> Control:
    master = torch.cat((from_bits(EDGES + NANS), normal(NUMEL, 1)))
    drawn = chances(NOISE, len(master))
    return Control(
        b"".join(bytes_of(*split_bf24_of(master, NOISE))),
        b"".join(bf24_reference(master, drawn)),
        {"cut off": b"".join(bf24_reference(master, 0)), "to nearest": b"".join(bf24_reference(master, 0x80))},
    )


def _join_bf24() -> Control:
    numbers = torch.cat((from_bits([bits & ~0xFF for bits in EDGES]), from_bits(torch.arange(0, 1 << 24, 4099) << 8)))
    master = numbers[~numbers.isnan()]
    weight, residual = split_bf24_of(master)
    flushed = torch.where(master.abs() < torch.finfo(torch.float32).tiny, 0.0, master)
    return Control(
        _bytes(joined(weight, residual)),
        _bytes(master),
        {"flushed": _bytes(flushed), "without its low bits": _bytes(weight.float())},
    )


def _noise() -> Control:
    values = normal(NUMEL, 1)
    drawn = random_bits(NOISE.stream, np.arange(NUMEL) + NOISE.element)
    later = random_bits(NOISE.stream, np.arange(NUMEL) + NOISE.element + 1)
    made = [rounded(values.numpy(), bits).view(torch.int16) for bits in (drawn, later)]
    return Control(
        _bytes(bf16(values, NOISE).view(torch.int16)),
        _bytes(made[0]),
        {"that of a neighbour": _bytes(made[1]), "to nearest": _bytes(values.bfloat16().view(torch.int16))},
    )


def _quantize() -> Control:
    values = normal(NUMEL, 1)
    values[:128] = 1e-40
    values[128:384] = torch.arange(256) / 254  # ties of int8
    kernel, right, wrong = b"", b"", {"flushed": b"", "by a reciprocal": b""}
    for form in FORMATS:
        kernel += _bytes(stored(form, values))
        right += _bytes(by_formula(form, values))
        wrong["flushed"] += _bytes(by_formula(form, torch.where(values.abs() < 1e-38, 0.0, values)))
        rows = torch.zeros(-(-NUMEL // form.values) * form.values)
        rows[:NUMEL] = values
        scale = rows.view(-1, form.values).abs().amax(1, keepdim=True).bfloat16().float()
        share = rows.view(-1, form.values) * torch.where(scale > 0, 1 / scale, 0.0)
        codes = (share * 127).clamp(-127, 127).round().to(torch.int8)
        wrong["by a reciprocal"] += _bytes(codes) if form.name == "int8" else _bytes(by_formula(form, values))
    return Control(kernel, right, wrong)


def _dequantize() -> Control:
    kernel, right = b"", b""
    wrong = {"divided": b"", "rounded twice": b""}
    for form in FORMATS:
        blocks_stored = stored(form, normal(NUMEL, 1))
        rows = blocks_stored.view(-1, form.nbytes)
        scale, codes = rows[:, -2:].contiguous().view(torch.bfloat16).float(), rows[:, :-2]
        kernel += _bytes(values_of(form, blocks_stored, NUMEL, torch.float32))
        if form.name == "nf4":
            shares = torch.tensor(NF4)[torch.stack((codes >> 4, codes & 15), 2).flatten(1).long()]
            made, divided = shares * scale, shares.double() * scale.double() * (1 + 1e-7)
        else:
            shares = codes.view(torch.int8).float()
            made, divided = shares * (scale * torch.tensor(1 / 127)), (shares * scale / 127).double()
        right += _bytes(made.flatten()[:NUMEL])
        wrong["divided"] += _bytes(divided.float().flatten()[:NUMEL])
        wrong["rounded twice"] += _bytes(made.bfloat16().float().flatten()[:NUMEL])
    return Control(kernel, right, wrong)


def _encode_moments() -> Control:
    values = normal(NUMEL, 1)
    codes, scales = torch.zeros(NUMEL, dtype=torch.int8), torch.zeros(blocks_of(NUMEL), 1)
    encode_moments(values, codes, scales, 0)
    nearest, cut = (codes_of(values.numpy(), False, chance) for chance in (0x8000, 0))
    return Control(_bytes(codes, scales), _bytes(*nearest), {"cut off": _bytes(*cut)})


def _decode_moments() -> Control:
    values = normal(NUMEL, 1).square()
    codes, scales = torch.zeros(NUMEL, dtype=torch.uint8), torch.zeros(blocks_of(NUMEL), 1)
    encode_moments(values, codes, scales, 0)
    made = torch.empty(NUMEL)
    decode_moments(codes, scales, 0, made)
    of_code, scale = codes.numpy().astype(F), np.repeat(scales[:, 0].numpy(), 256)[:NUMEL]
    return Control(
        _bytes(made),
        _bytes(moment_values(codes.numpy(), scales[:, 0].numpy(), True)),
        {"swapped": _bytes(of_code * of_code * scale * scale)},
    )


def _micro_batches() -> Control:
    """Gradients of three micro-batches."""
    first, two, three = (normal(NUMEL, seed) for seed in range(3))
    totals = DeviceTotals({0: torch.empty(NUMEL)}, torch.float32)
    for values in (first, two, three):
        totals.add(0, (0, 0), 0, values)
    host = first.clone()
    for values in (two, three):
        kernels.accumulate(host, values, add=True)
    right = _bytes(first + two + three)
    wide = (first.double() + two.double() + three.double()).float()
    return Control(
        _bytes(totals.values(0, (0, 0)), host),
        right + right,
        {"swapped": _bytes(first + (two + three)) + right, "rounded once": _bytes(wide) + right},
    )


def _total() -> Control:
    squares = torch.rand(3, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64).tolist()
    arrived = [dict(sorted({(0, at): value for at, value in enumerate(row)}.items(), reverse=True)) for row in squares]
    in_order = backwards = 0.0
    for row in squares:
        for value in row:
            in_order += value
    for row in reversed(squares):
        for value in reversed(row):
            backwards += value
    kernel = _bytes(np.float64(total_of(arrived)))
    return Control(kernel, _bytes(np.float64(in_order)), {"swapped": _bytes(np.float64(backwards))})


def _norm() -> Control:
    total = kernels.sum_squares(normal(NUMEL, 1))
    right = math.sqrt(total)
    kernel = GradientStats(sum_squares=total, present=[]).norm
    return Control(
        _bytes(np.float64(kernel)), _bytes(np.float64(right)), {"in fp32": _bytes(np.float64(np.sqrt(F(total))))}
    )


def _loss() -> Control:
    """The head's gradient, of four chunks of tokens."""

    def gradient(hidden: torch.Tensor, labels: torch.Tensor, chunk_tokens: int) -> bytes:
        head = normal(31 * 16, 1).view(31, 16).requires_grad_()
        losses.causal_lm(hidden, head, labels, shift=False, chunk_tokens=chunk_tokens).backward()
        assert head.grad is not None
        return _bytes(head.grad)

    hidden = normal(64 * 16, 2).view(64, 16)
    labels = torch.arange(64) % 31
    back = hidden.flip(0).contiguous(), labels.flip(0).contiguous()
    return Control(gradient(hidden, labels, 16), gradient(hidden, labels, 16), {"swapped": gradient(*back, 16)})


CONTROLS: Mapping[str, Callable[[], Control]] = {
    **{name: functools.partial(_rule, name) for name in ("adamw", "adagrad", "lion", "sgd")},
    "plain_sgd": lambda: _rule("sgd without momentum"),
    "lamb": _lamb,
    "lamb_ratio": _lamb_ratio,
    "squares": _squares,
    "accumulate": _accumulate,
    "split_master": _split_master,
    "join_master": _join_master,
    "split_bf24": _split_bf24,
    "join_bf24": _join_bf24,
    "noise": _noise,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "encode_moments": _encode_moments,
    "decode_moments": _decode_moments,
    "micro_batches": _micro_batches,
    "total": _total,
    "norm": _norm,
    "loss": _loss,
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CONTROLS)
def test_right_arithmetic_has_the_bits_of_the_kernel_and_wrong_arithmetic_has_others(name: str, isa: str) -> None:
    _native.configure(isa, 2)
    control = CONTROLS[name]()
    assert control.kernel == control.right
    assert control.wrong and [fault for fault, made in control.wrong.items() if made == control.right] == []
