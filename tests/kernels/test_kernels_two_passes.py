"""A pass that writes the weights, and then one that writes the moments, give the bits of one that writes all."""

from __future__ import annotations

import ctypes
import mmap
import os
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.kernels import Noise, Partition, Segment, Writes, _native, has_two_passes, noise_stream, update
from offload.kernels.update import BLOCK, ROOTS, RULES
from tests.kernels.test_kernels_bf24 import bf24
from tests.kernels.test_kernels_formulas import GRADS, STEPS, WEIGHTS, partition
from tests.kernels.test_kernels_masters import clone_codes as clone
from tests.kernels.test_kernels_masters import coded, stored
from tests.support.kernel_inputs import ISAS, default_settings
from tests.support.sampling import examples

__all__ = ["default_settings"]  # fixtures

pytestmark = pytest.mark.numeric

TWO_PASSES = [name for name, step in STEPS.items() if has_two_passes(step)]
MASTERS = [*WEIGHTS, "bf24"]
MOMENTS = [torch.float32, torch.bfloat16, torch.int8]


def inputs(
    name: str, numel: int, weight: torch.dtype | str, grad: torch.dtype, moments: torch.dtype
) -> tuple[Partition, str]:
    """A partition and its rule."""
    step = STEPS[name]
    dtypes = torch.bfloat16 if isinstance(weight, str) else weight, grad
    part = partition(numel, step, *dtypes, torch.float32 if moments is torch.int8 else moments)
    part = bf24(part) if isinstance(weight, str) else part
    rule, _ = RULES[type(step)]
    return coded(part, ROOTS[rule]) if moments is torch.int8 else part, rule


def states(part: Partition) -> dict[Writes, list[bytes]]:
    """The bytes of the states that each pass writes."""
    weights = [part.weight, part.residual, part.master]
    moments = [*part.moments, part.scales]
    return {
        writes: [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor is not None]
        for writes, tensors in ((Writes.WEIGHTS, weights), (Writes.MOMENTS, moments))
    }


@settings(max_examples=examples(400), deadline=None)
@given(
    st.sampled_from(TWO_PASSES),
    st.sampled_from(MASTERS),
    st.sampled_from(GRADS),
    st.sampled_from(MOMENTS),
    st.integers(1, 70_000) | st.integers(1, 600),
    st.lists(st.integers(0, 70_000), max_size=4),
    st.sampled_from(ISAS),
    st.integers(1, 3),
    st.integers(0, 1 << 33),
)
def test_weights_first_and_then_moments_have_the_bits_of_one_pass(
    name: str,
    weight: torch.dtype | str,
    grad: torch.dtype,
    moments: torch.dtype,
    numel: int,
    cuts: list[int],
    isa: str,
    threads: int,
    first: int,
) -> None:
    _native.configure(isa, threads)
    whole, _ = inputs(name, numel, weight, grad, moments)
    step = BLOCK if moments is torch.int8 else 1
    # Every other piece between two cuts is a segment.
    borders = sorted({min(cut // step * step, numel) for cut in cuts} | {0, numel})
    stream = noise_stream(7, 3, 11)
    segments = [
        Segment(start, stop, STEPS[name], Noise(stream, first // BLOCK * BLOCK + start))
        for start, stop in zip(borders[::2], borders[1::2], strict=False)
    ]
    apart, before = clone(whole), states(whole)
    update(whole, segments)
    after = states(whole)
    update(apart, segments, Writes.WEIGHTS)
    assert states(apart) == {Writes.WEIGHTS: after[Writes.WEIGHTS], Writes.MOMENTS: before[Writes.MOMENTS]}
    update(apart, segments, Writes.MOMENTS)
    assert states(apart) == after
    assert stored(apart) == stored(whole)


def protected(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copies in pages that the process may only read."""
    libc, buffers = ctypes.CDLL(None, use_errno=True), list[torch.Tensor | None]()
    for tensor in tensors:
        if tensor is None:
            buffers.append(None)
            continue
        pages = mmap.mmap(-1, tensor.nbytes)
        copy = torch.frombuffer(pages, dtype=tensor.dtype)[: tensor.numel()].view(tensor.shape)
        copy.copy_(tensor)
        assert not libc.mprotect(ctypes.c_void_p(copy.data_ptr()), ctypes.c_size_t(tensor.nbytes), mmap.PROT_READ)
        buffers.append(copy)
    return buffers


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("writes", [Writes.WEIGHTS, Writes.MOMENTS])
def test_a_pass_writes_nothing_of_the_other(writes: Writes) -> None:
    """Not even the bytes that are there: another thread may read them."""
    child = os.fork()
    if child == 0:  # no return into pytest from here
        for weight in MASTERS:
            for moments in MOMENTS:
                part, _ = inputs("adamw", 3 * BLOCK + 5, weight, torch.bfloat16, moments)
                if writes is Writes.WEIGHTS:
                    *two, scales = protected([*part.moments, part.scales])
                    part = part._replace(moments=tuple(two), scales=scales)
                else:
                    of_weights = protected([part.weight, part.residual, part.master])
                    part = part._replace(**dict(zip(("weight", "residual", "master"), of_weights, strict=True)))
                update(part, [Segment(0, len(part.grad), STEPS["adamw"], Noise(1, 0))], writes)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_moments_that_depend_on_the_weight_are_not_written_apart() -> None:
    for name in (name for name in STEPS if name not in TWO_PASSES):
        print(name)
        part, rule = inputs(name, 300, torch.bfloat16, torch.bfloat16, torch.float32)
        before = stored(part)
        for writes in (Writes.WEIGHTS, Writes.MOMENTS):
            with pytest.raises(ValueError, match=re.escape(f"the moments of {rule} depend on the weight")):
                update(part, [Segment(0, 300, STEPS[name])], writes)
        assert stored(part) == before
