"""Masters in bf24 are rounded without a bias, by a stream of their own, with the same bits everywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import kernels
from offload.kernels import LambSegment, LambStep, Noise, Partition, Segment, _native, noise_stream, update
from offload.kernels.update import BLOCK, ROOTS, RULES, blocks_of
from tests.kernels.test_kernels_formulas import STEPS, formula, master_of, partition
from tests.kernels.test_kernels_masters import clone_codes as clone
from tests.kernels.test_kernels_masters import coded, decoded, mixed, random_bits, stored
from tests.kernels.test_kernels_sums import EDGES, NANS, from_bits
from tests.support.kernel_inputs import ISAS, default_settings, normal
from tests.support.sampling import examples

__all__ = ["default_settings"]  # fixtures

pytestmark = pytest.mark.numeric

F = np.float32
NOISE = Noise(noise_stream(7, 3, 11), 1024)
LAMB = LambStep(1e-2, 0.9, 0.99, 1e-6, 0.1, 3)
MOMENTS = ["fp32", "bf16", "int8"]

Array = np.ndarray[Any, Any]


def chances(noise: Noise, numel: int) -> Array:
    """The 8 random bits of each element, as the kernel's comments describe them."""
    return random_bits(mixed(noise.stream ^ 0x6D6173746572), np.arange(numel) + noise.element) & np.uint32(0xFF)


def reference(values: torch.Tensor, chances: Array | int) -> tuple[bytes, bytes]:
    """Weight and low bits of masters: `chances` added below the 24 bits that remain."""
    bits = values.numpy().view(np.uint32).astype(np.int64)
    kept = np.where(values.isnan().numpy(), 0x7FC00000, bits + chances & ~0xFF)
    weight = (kept + 0x8000) >> 16
    low = (kept - (weight << 16)) >> 8
    assert ((-128 <= low) & (low <= 127)).all()
    return weight.astype(np.uint16).tobytes(), low.astype(np.int8).tobytes()


def bytes_of(weight: torch.Tensor, residual: torch.Tensor) -> tuple[bytes, bytes]:
    return weight.view(torch.int16).numpy().tobytes(), residual.numpy().tobytes()


def split(master: torch.Tensor, noise: Noise | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    weight, residual = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int8)
    kernels.split_master(master, weight, residual, noise)
    return weight, residual


def joined(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    master = torch.empty(len(weight))
    kernels.join_master(weight, residual, master)
    return master


def bf24(part: Partition) -> Partition:
    """The partition with its master in bf24."""
    weight, residual = split(master_of(part))
    return part._replace(weight=weight, residual=residual)


def inputs(name: str, numel: int, moments: str) -> Partition:
    step = STEPS[name]
    dtype = torch.bfloat16 if moments == "bf16" else torch.float32
    part = bf24(partition(numel, step, torch.bfloat16, torch.bfloat16, dtype))
    rule, count = RULES[type(step)]
    return coded(part, ROOTS[rule]) if moments == "int8" and count else part


def moments_of(part: Partition) -> list[Array]:
    moments = [moment.float() for moment in part.moments] if part.scales is None else decoded(part)
    return [each.numpy() for each in moments]


@pytest.mark.sample(31)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("name", STEPS)
def test_every_rule_computes_its_formula_and_rounds_its_master(name: str, moments: str, isa: str) -> None:
    """The moments are those of any other master."""
    _native.configure(isa, 1)
    step, numel = STEPS[name], 5 * BLOCK + 77
    part = inputs(name, numel, moments)
    full = clone(part)._replace(residual=torch.empty(numel, dtype=torch.int16))
    assert full.residual is not None
    kernels.split_master(master_of(part), full.weight, full.residual)
    old = moments_of(part)
    p, *_ = formula(
        step, master_of(part).numpy(), part.grad.float().numpy(), *old, *[np.zeros(numel, F)] * (2 - len(old))
    )
    for master_part in (part, full):
        update(master_part, [Segment(0, numel, step, NOISE)])
    assert part.residual is not None
    exact = torch.from_numpy(p.astype(F))
    assert master_of(full).numpy().tobytes() == exact.numpy().tobytes()
    assert bytes_of(part.weight, part.residual) == reference(exact, chances(NOISE, numel))
    assert all(torch.equal(one, other) for one, other in zip(part.moments, full.moments, strict=True))


@pytest.mark.parametrize("isa", ISAS)
def test_a_split_is_to_nearest_or_by_the_chances_of_a_step(isa: str) -> None:
    _native.configure(isa, 1)
    master = torch.cat([from_bits(EDGES + NANS), normal(20_000, 1), normal(3, 1, 1e-39)])
    assert bytes_of(*split(master)) == reference(master, 0x80)
    noise = Noise(NOISE.stream, (1 << 32) - 7001)
    assert bytes_of(*split(master, noise)) == reference(master, chances(noise, len(master)))
    halves = [split(master[:5]), split(master[5:])]
    assert torch.equal(torch.cat([each[0] for each in halves]).view(torch.int16), split(master)[0].view(torch.int16))


@pytest.mark.parametrize("isa", ISAS)
def test_every_stored_master_is_split_to_the_same_bits(isa: str) -> None:
    """One of 61 of all, to nearest and by any chance: a parameter that does not move keeps its bytes."""
    _native.configure(isa, 1)
    numbers = torch.arange(0, 1 << 24, 61)
    master = from_bits(numbers << 8)
    given_bits = master.view(torch.int32)
    finite = ~master.isnan()
    for noise in (None, NOISE):
        weight, residual = split(master, noise)
        again = joined(weight, residual).view(torch.int32)
        assert torch.equal(again[finite], given_bits[finite])
        assert (weight.view(torch.int16)[~finite] == 0x7FC0).all() and not residual[~finite].any()


SPREAD = [1 + 2**-20, -1.3, 1e-39, 2.0 - 2**-23, 65280.7]


def test_the_mean_of_many_roundings_is_the_value() -> None:
    """Each of n roundings is one of two neighbours a spacing apart, so the mean's deviation is spacing / sqrt(4 n)."""
    for value in SPREAD:
        print(value)
        numel = 1 << 20
        exact = torch.tensor([value])
        values = joined(*split(exact.expand(numel).contiguous(), NOISE)).double()
        bits = exact.view(torch.int32)
        low, high = ((bits & ~0xFF).view(torch.float32).double(), ((bits & ~0xFF) + 0x100).view(torch.float32).double())
        assert ((values == low) | (values == high)).all(), "one of the two neighbours"
        assert abs(float(values.mean() - exact.double())) <= 6 * abs(float(high - low)) / math.sqrt(4 * numel)


@settings(deadline=None, max_examples=examples(30), derandomize=True)
@given(
    st.lists(st.integers(0, 273), max_size=5).map(sorted),
    st.sampled_from(list(STEPS)),
    st.sampled_from(MOMENTS),
    st.sampled_from(ISAS),
    st.integers(1, 3),
    st.sampled_from([0, 256, (1 << 32) - 156 * 256, (1 << 40) - 512]),
)
def test_cuts_threads_and_instruction_sets_change_no_bit(
    cuts: list[int], name: str, moments: str, isa: str, threads: int, element: int
) -> None:
    """Also where the number of an element exceeds 32 bits, between two calls or within one."""
    numel, step = 70_000, STEPS[name]
    noise = Noise(NOISE.stream, element)
    start = inputs(name, numel, moments)
    _native.configure("scalar", 1)
    uncut = clone(start)
    update(uncut, [Segment(0, numel, step, noise)])
    _native.configure(isa, threads)
    for low, high in zip([0, *(BLOCK * cut for cut in cuts)], [*(BLOCK * cut for cut in cuts), numel], strict=True):
        assert start.residual is not None
        view = Partition(
            start.weight[low:high],
            start.grad[low:high],
            tuple(moment[low:high] for moment in start.moments),
            start.residual[low:high],
            scales=None if start.scales is None else start.scales[low // BLOCK : blocks_of(high)],
        )
        update(view, [Segment(0, high - low, step, noise.after(low))])
    assert stored(uncut) == stored(start)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("isa", ISAS)
def test_lamb_rounds_its_master_in_the_second_pass(isa: str, moments: str) -> None:
    """By the move from the stored master; moments stay what the first pass has made of them."""
    numel = 3 * 4096 + 100
    _native.configure(isa, 2)
    part = inputs("adamw", numel, moments)
    segments = [LambSegment(0, 4096, LAMB, NOISE), LambSegment(4096, numel, LAMB, NOISE.after(4096))]
    before = master_of(part)
    sums = torch.cat(kernels.lamb_moments(part, segments)).sum(0)
    assert torch.equal(master_of(part), before)
    assert float(sums[0]) == pytest.approx(float(before.double().square().sum()), rel=1e-12)
    m, v = moments_of(part)
    kept = stored(part)[1:-1]
    ratio = 0.7
    kernels.lamb_move(part, segments, [ratio, ratio])
    assert stored(part)[1:-1] == kept
    direction = m / (np.sqrt(v) + F(1e-6)) + F(0.1) * before.numpy()
    exact = torch.from_numpy(before.numpy() + F(-(LAMB.lr * (np.sqrt(1 - 0.99**3) / (1 - 0.9**3)) * ratio)) * direction)
    assert part.residual is not None
    assert bytes_of(part.weight, part.residual) == reference(exact, chances(NOISE, numel))


def test_wrong_arguments_are_refused() -> None:
    part = inputs("adamw", 8, "fp32")
    before = stored(part)
    for call, segment in (
        (update, Segment(0, 8, STEPS["adamw"])),
        (kernels.lamb, LambSegment(0, 8, LAMB)),
        (lambda *given: kernels.lamb_move(*given, [1.0]), LambSegment(0, 8, LAMB)),
    ):
        with pytest.raises(ValueError, match="expected one in each segment, since the masters are bf24"):
            call(part, [segment])  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"residual: expected a tensor of torch\.int16 or torch\.int8"):
        update(part._replace(residual=torch.zeros(8, dtype=torch.uint8)), [Segment(0, 8, STEPS["adamw"], NOISE)])
    with pytest.raises(TypeError, match=r"residual: expected a tensor of torch\.int16, got torch\.int8"):
        kernels.adamw(part.weight, part.residual, *part.moments, part.grad, STEPS["adamw"])  # type: ignore[arg-type]
    assert stored(part) == before
