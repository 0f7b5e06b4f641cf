"""NVIDIA's own compiler takes the CUDA kernels and rounds each operation as the CPU does; this needs no GPU."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator

import pytest
import torch

from offload.errors import ConfigError
from offload.kernels.cuda import driver
from offload.kernels.cuda.kernels import _OPTIONS, BF24, GRADS, MOMENTS, WEIGHTS, source

ARCHITECTURES = (75, 80, 90, 120)
EXPECTED = {
    "adamw": {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"},
    "sums": {"add.rn.f64", "fma.rn.f64"},
}
ENTRIES = {"adamw": {"adamw"}, "sums": {"block_sums", "chunk_sums"}}
ROUNDED = re.compile(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)")
# A square of a float is exact in double, so it may be fused with an addition in double, which then rounds alone.
EXACT = {"adamw": set(), "sums": {"fma.rn.f64"}}
READ = re.compile(r"ld\.global\.nc\.\w+\s+%\w+, \[%\w+(?:\+(-?\d+))?\]")
CONTRACTED = 'extern "C" __global__ void f(float *a) { a[0] = a[0] * a[1] + a[2]; }'


def find_nvrtc() -> driver.Compiler | None:
    """That of the wheel that the tests install."""
    try:
        return driver.load_nvrtc("12")
    except ConfigError:
        return None


NVRTC = find_nvrtc()
pytestmark = pytest.mark.skipif(NVRTC is None and sys.platform != "linux", reason="NVRTC is there for Linux alone")


def compiled(source: str, *options: str) -> bytes:
    """What the driver would load; a `ConfigError` with the compiler's words where it takes none."""
    assert NVRTC is not None, "nvidia-cuda-nvrtc-cu12 is of the tests' packages: run make again"
    return NVRTC.compile("kernel", source, options)


def ptx(source: str, *options: str) -> str:
    """The assembly of `source`."""
    return compiled(source, *options).rstrip(b"\0").decode()


def arithmetic(assembly: str) -> set[str]:
    """The operations on floats that may round: "fma.rn.f32"."""
    return set(re.findall(r"\b((?:fma|mad|mul|add|sub|div|sqrt|rsqrt|rcp|ex2|lg2)\.[a-z.]*f(?:16|32|64))\b", assembly))


def variants(program: str) -> Iterator[tuple[str, ...]]:
    """Of a step each weight with each form of the moments, and any two of a weight, a gradient and moments meet."""
    types = [(0, grad, 0) for grad in GRADS.values()]
    if program == "adamw":
        states = itertools.product((*WEIGHTS.values(), BF24), MOMENTS.values())
        types = [(weight, (weight + moment) % len(GRADS), moment) for weight, moment in states]
    for weight, grad, moment in types:
        yield (*_OPTIONS, f"-DWEIGHT={weight}", f"-DGRAD={grad}", f"-DMOMENT={moment}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("program", EXPECTED)
def test_it_compiles_and_rounds_each_operation_once(program: str, architecture: int) -> None:
    for options in variants(program):
        assembly = ptx(source(program), *options, f"--gpu-architecture=compute_{architecture}")
        assert set(re.findall(r"\.entry (\w+)\(", assembly)) == ENTRIES[program]
        found = arithmetic(assembly)
        assert found >= EXPECTED[program]
        assert all(ROUNDED.fullmatch(operation) for operation in found - EXACT[program])


@pytest.mark.parametrize("program", EXPECTED)
def test_for_an_architecture_that_it_knows_it_gives_machine_code(program: str) -> None:
    assert NVRTC is not None
    options = *next(variants(program)), f"--gpu-architecture={driver.target((9, 0), NVRTC.architectures)}"
    image = compiled(source(program), *options)
    assert image.startswith(b"\x7fELF")
    assert all(f".text.{entry}".encode() in image for entry in ENTRIES[program])


def test_a_thread_may_have_eight_reads_under_way_each_of_its_own_lane() -> None:
    """Reads of a thread are 16 elements apart, so that 16 threads read neighbours.

    No branch stands between eight of them, so all may be under way before the first addition.
    """
    sizes = {GRADS[torch.float32]: 4, GRADS[torch.bfloat16]: 2, GRADS[torch.float16]: 2}
    for options, size in zip(variants("sums"), sizes.values(), strict=True):
        assembly = ptx(source("sums"), *options, "--gpu-architecture=compute_90")
        body = assembly.partition(".entry block_sums(")[2].partition(".entry ")[0]
        blocks = re.split(r"\bbra\b|^\$L.*:$", body, flags=re.MULTILINE)
        first = sorted(
            int(offset or 0) for offset in READ.findall(next(block for block in blocks if READ.search(block)))
        )
        assert [offset - first[0] for offset in first] == [row * 16 * size for row in range(8)]


def test_the_words_of_the_compiler_are_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"does not compile the kernel kernel \(--fmad=false.*\n.*undefined"):
        compiled('extern "C" __global__ void f(float *a) { a[0] = nowhere; }', "--fmad=false")


def test_what_it_looks_for_would_be_found() -> None:
    assert "fma.rn.f32" in arithmetic(ptx(CONTRACTED, "--gpu-architecture=compute_90"))
    assert "fma.rn.f32" not in arithmetic(ptx(CONTRACTED, *_OPTIONS, "--gpu-architecture=compute_90"))
