"""The kernels of one device: their arguments, their grids, and their machine code, loaded at the first use."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from offload.errors import ConfigError
from offload.fileio import cache_folder, read_cache, write_cache
from offload.kernels.cuda import driver
from offload.kernels.cuda.driver import (
    ADDRESS,
    COUNT,
    FLOAT,
    INT,
    WORD,
    Arguments,
    Compiler,
    Context,
    Function,
    Module,
    Signature,
    target,
)
from offload.kernels.update import BLOCK as MOMENT_BLOCK
from offload.kernels.update import (
    AdamWStep,
    Noise,
    Partition,
    Segment,
    blocks_of,
    check_beside,
    check_blocks,
    check_noise,
    check_scales,
    check_segments,
    keyed,
    master_stream,
)
from offload.records import fields, read, text

# -- compiled ------------------------------------------------------------------------------------------
#
# Machine code of kernels in the user's cache folder, so that only the first run on a machine waits for NVRTC.


def machine_code(compiler: Compiler, name: str, source: str, options: Sequence[str]) -> bytes:
    """Returns a compiled program from the cache.

    A program that is missing there, or damaged, is compiled and cached.
    """
    path = cache_path(compiler.version, name, source, options)
    image = _cached(path)
    if image is None:
        image = compiler.compile(name, source, options)
        _cache(path, image)
    return image


def cache_path(version: str, name: str, source: str, options: Sequence[str]) -> Path:
    """Returns the path of a program's cache file, which depends on NVRTC's version, the source and the options."""
    key = hashlib.sha256(json.dumps([version, source, *options]).encode()).hexdigest()
    return cache_folder() / "kernels" / f"{name}-{key[:32]}.json"


def _cached(path: Path) -> bytes | None:
    """Returns the content of a cache file; None if it is missing or damaged, or if another user may have written it."""
    try:
        content = read(read_cache(path), fields({"image": text(), "sha256": text()}))
        image = base64.b64decode(content["image"], validate=True)
        whole = hashlib.sha256(image).hexdigest() == content["sha256"]
    except (OSError, ValueError):
        return None
    return image if whole else None


def _cache(path: Path, image: bytes) -> None:
    content = {"sha256": hashlib.sha256(image).hexdigest(), "image": base64.b64encode(image).decode()}
    try:
        write_cache(path, json.dumps(content))
    except OSError:
        # The home folder is full or read-only. Each run then compiles again, which costs seconds and nothing else.
        return


# -- kernels -------------------------------------------------------------------------------------------


BLOCK = 4096
"""Elements of a block whose squares are added lane by lane: see [Note: sums] in native/sums_body.h."""
WEIGHTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GRADS = WEIGHTS
MOMENTS = {(torch.float32, torch.float32): 0, (torch.bfloat16, torch.bfloat16): 1, (torch.int8, torch.uint8): 2}
"""Dtypes of both moments; in 8 bits the second one is a root."""
BF24 = 3
"""Number of a bf16 weight with 8 low bits, in addition to `WEIGHTS`."""
_CODES = MOMENTS[torch.int8, torch.uint8]
_LANES, _WARP = 16, 32
_THREADS, _MOST_BLOCKS = 256, 1 << 16
# The kernels round through intrinsics. These options keep the compiler from fusing or approximating anything else.
_OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
_PROGRAMS = {"adamw": "adamw", "block_sums": "sums", "chunk_sums": "sums"}
"""Name of the program that contains each kernel."""
_ADAMW = Signature(*(ADDRESS,) * 6, COUNT, *(WORD,) * 5, *(FLOAT,) * 9, *(INT,) * 2)
_SUMS = Signature(ADDRESS, ADDRESS, COUNT, COUNT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """The scalar arguments of the kernel for a step: computed in double, rounded to fp32 once (native/adamw.cpp)."""

    grad_scale: float
    keep: float
    weight_decay: float
    lerp_factor: float
    beta2: float
    one_minus_beta2: float
    root_correction2: float
    eps: float
    minus_step_size: float
    lerp_from_grad: bool
    l2: bool

    @classmethod
    def of(cls, step: AdamWStep) -> Scalars:
        """Returns the scalars of `step`."""
        l2 = not step.decoupled and step.weight_decay != 0
        weight = np.float32(1 - step.beta1)
        far = abs(float(weight)) >= 0.5  # Tensor.lerp_ switches its formula at 0.5
        return cls(
            grad_scale=step.grad_scale,
            keep=1.0 if l2 else 1 - step.lr * step.weight_decay,
            weight_decay=step.weight_decay,
            lerp_factor=float(-(np.float32(1) - weight) if far else weight),
            beta2=step.beta2,
            one_minus_beta2=1 - step.beta2,
            root_correction2=math.sqrt(1 - step.beta2**step.step),
            eps=step.eps,
            minus_step_size=-(step.lr / (1 - step.beta1**step.step)),
            lerp_from_grad=far,
            l2=l2,
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        """Returns the floating-point arguments of the kernel, in the order of `adamw.cu`."""
        return (
            self.grad_scale,
            self.keep,
            self.weight_decay,
            self.lerp_factor,
            self.beta2,
            self.one_minus_beta2,
            self.root_correction2,
            self.eps,
            self.minus_step_size,
        )

    @property
    def choices(self) -> tuple[bool, ...]:
        """Returns the integer arguments of the kernel, which follow the numbers."""
        return self.lerp_from_grad, self.l2


class Kernels:
    """Kernels in one context, each compiled and loaded when it is first launched.

    Methods may be called by several threads at once. They take tensors in memory that the device reads and writes, and
    check nothing.
    """

    def __init__(self, *, context: Context, compiler: Compiler, capability: tuple[int, int]) -> None:
        self._context, self._compiler = context, compiler
        self._architecture = target(capability, compiler.architectures)
        self._modules: dict[tuple[str, int, int, int], Module] = {}
        self._functions: dict[tuple[str, int, int, int], Function] = {}

    def update(self, partition: Partition, segments: Sequence[Segment], stream: int) -> None:
        """Queues an AdamW step for each segment, all on one stream, which orders them with the work around.

        The tensors are contiguous, on the device, with two moments, and their scales if they are codes.
        """
        types = _types(partition)
        kernel, coded = self._kernel("adamw", *types), types[2] == _CODES
        places = _places(partition)
        # Neighbouring segments mostly have equal steps, so the scalars are computed only when the step changes.
        arguments, known = Arguments(_ADAMW), None
        with self._context:
            for segment in segments:
                step = segment.step
                assert isinstance(step, AdamWStep)
                if step != known:
                    scalars, known = Scalars.of(step), step
                    numbers = (*scalars.numbers, *scalars.choices)
                for start, stop, key in _launches(segment):
                    addresses = (place.address + start * place.block_nbytes // MOMENT_BLOCK for place in places)
                    arguments.set(*addresses, stop - start, *key, *numbers)
                    threads = blocks_of(stop - start) * _WARP if coded else stop - start
                    kernel.launch(blocks=_blocks(threads), threads=_THREADS, stream=stream, arguments=arguments)

    def sum_squares(self, values: torch.Tensor, chunk: int, stream: int) -> torch.Tensor:
        """Queues the sum of squares of each chunk, and returns the (ceil(numel / chunk),) float64 tensor for the sums.

        The stream is torch's current one. The last chunk may be shorter.
        """
        numel = values.numel()
        chunk = max(min(chunk, numel), 1)
        chunks, of_chunk = -(-numel // chunk), -(-chunk // BLOCK)
        sums = values.new_empty(chunks * of_chunk, dtype=torch.float64)
        if not numel:
            return sums
        grad, arguments = GRADS[values.dtype], Arguments(_SUMS)
        kernel = self._kernel("block_sums", 0, grad)
        arguments.set(values.data_ptr(), sums.data_ptr(), numel, chunk)
        with self._context:
            kernel.launch(blocks=_blocks(len(sums) * _LANES), threads=_THREADS, stream=stream, arguments=arguments)
        if of_chunk == 1:
            return sums  # each chunk has one block, such as a bias: the sum of the block is the sum of the chunk
        totals = values.new_empty(chunks, dtype=torch.float64)
        kernel = self._kernel("chunk_sums", 0, grad)
        arguments.set(sums.data_ptr(), totals.data_ptr(), chunks, of_chunk)
        with self._context:
            kernel.launch(blocks=_blocks(chunks * _WARP), threads=_THREADS, stream=stream, arguments=arguments)
        # `sums` is freed on return. torch's allocator reuses the memory only on this stream, after the second kernel.
        return totals

    def _kernel(self, name: str, weight: int, grad: int, moment: int = 0) -> Function:
        """Returns a kernel, loaded at its first use. Two threads may both load the kernel, which does no harm."""
        key = (name, weight, grad, moment)
        if key not in self._functions:
            self._functions[key] = self._program(_PROGRAMS[name], weight, grad, moment).function(name)
        return self._functions[key]

    def _program(self, name: str, weight: int, grad: int, moment: int) -> Module:
        """Returns a program for these types of arrays, compiled and loaded at its first use."""
        key = (name, weight, grad, moment)
        if key not in self._modules:
            types = (f"-DWEIGHT={weight}", f"-DGRAD={grad}", f"-DMOMENT={moment}")
            options = (*_OPTIONS, *types, f"--gpu-architecture={self._architecture}")
            self._modules[key] = self._context.load(machine_code(self._compiler, name, source(name), options))
        return self._modules[key]


def source(program: str) -> str:
    """Returns the CUDA source of a program, "adamw" or "sums"."""
    files = (Path(__file__).with_name(f"{name}.cu") for name in ("floats", program))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


class _ArrayPlace(NamedTuple):
    address: int
    """0 for an array that the partition lacks."""
    block_nbytes: int
    """Bytes of the elements of a block of moments, or of its scales."""


def _places(partition: Partition) -> list[_ArrayPlace]:
    """Returns the arrays of a partition, in the order of `adamw.cu`."""
    beside = partition.residual if partition.residual is not None else partition.master

    def place(array: torch.Tensor | None) -> _ArrayPlace:
        return (
            _ArrayPlace(0, 0) if array is None else _ArrayPlace(array.data_ptr(), array.element_size() * MOMENT_BLOCK)
        )

    scales = partition.scales
    of_block = (
        _ArrayPlace(0, 0) if scales is None else _ArrayPlace(scales.data_ptr(), scales.element_size() * scales.shape[1])
    )
    return [*map(place, (partition.weight, beside, *partition.moments)), of_block, place(partition.grad)]


def _types(partition: Partition) -> tuple[int, int, int]:
    bf24 = partition.residual is not None and partition.residual.dtype is torch.int8
    first, second = partition.moments
    weight = BF24 if bf24 else WEIGHTS[partition.weight.dtype]
    return weight, GRADS[partition.grad.dtype], MOMENTS[first.dtype, second.dtype]


def _launches(segment: Segment) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yields for each launch the elements [start, stop) that it updates, and the words of their noise."""
    if segment.start >= segment.stop:
        return
    if segment.noise is None:
        yield segment.start, segment.stop, (0, 0, 0, 0, 0)
        return
    stream, element = segment.noise
    masters = keyed(segment.start, segment.stop, Noise(master_stream(stream), element))
    for moment_key, theirs in zip(keyed(segment.start, segment.stop, segment.noise), masters, strict=True):
        key = moment_key.before, moment_key.between, theirs.before, theirs.between, moment_key.element
        yield moment_key.start, moment_key.stop, key


def _blocks(threads: int) -> int:
    """Returns the number of blocks for `threads` threads, limited to `_MOST_BLOCKS`.

    In a smaller grid each thread loops over several elements.
    """
    return min(-(-threads // _THREADS), _MOST_BLOCKS)


# -- operations ----------------------------------------------------------------------------------------
#
# Public operations on torch tensors, which check their arguments and queue kernels on torch's current stream.


def update(partition: Partition, segments: Sequence[Segment]) -> None:
    """Queues AdamW steps on torch's current stream, in place: `kernels.update` for CUDA tensors.

    Returns once the work is queued.

    Args:
        partition: contiguous (numel,) tensors on one CUDA device; the moments are exp_avg and exp_avg_sq,
            both fp32 or both bf16, or codes (int8 and uint8) with their scales.
        segments: ordered, disjoint ranges of elements, each with an `AdamWStep`; with codes, ranges of whole blocks.

    Raises:
        ValueError: wrong device, shape or order of segments.
        TypeError: wrong dtype or another rule than AdamW.
        ConfigError: NVRTC or the driver's library is missing, or torch is built for ROCm.
        RuntimeError: the driver refuses.
    """
    weight, grad = partition.weight, partition.grad
    beside = partition.residual if partition.residual is not None else partition.master
    tensors = [array for array in (weight, grad, *partition.moments, beside, partition.scales) if array is not None]
    for tensor in tensors:
        if not tensor.is_cuda or tensor.device != weight.device or not tensor.is_contiguous():
            raise ValueError(
                f"expected contiguous tensors on {weight.device}, a CUDA device; got one on {tensor.device}"
            )
        if tensor is not partition.scales and (tensor.shape != weight.shape or tensor.dim() != 1):
            raise ValueError(f"expected shape {tuple(weight.shape)} of all tensors, got {tuple(tensor.shape)}")
    check_segments(segments, weight.numel())
    check_noise(partition, segments)
    check_beside(partition)
    check_scales(partition, weight.numel())
    check_blocks(partition, segments)
    for name, operand, dtypes in (
        ("weight", weight, tuple(WEIGHTS)),
        ("grad", grad, tuple(GRADS)),
        ("residual", partition.residual, (torch.int16, torch.int8)),
        ("master", partition.master, (torch.float32,)),
        ("scales", partition.scales, (torch.float32,)),
    ):
        if operand is not None and operand.dtype not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {operand.dtype}")
    if any(not isinstance(segment.step, AdamWStep) for segment in segments):
        raise TypeError("step: expected AdamWStep")
    if any(segment.grad is not None for segment in segments):
        raise ValueError("grad: expected the gradients of all segments in that of the partition")
    if tuple(moment.dtype for moment in partition.moments) not in MOMENTS:
        raise TypeError("moments: expected two of torch.float32, two of torch.bfloat16, or torch.int8 and torch.uint8")
    device = weight.device
    _kernels(device.index).update(partition, segments, torch.cuda.current_stream(device).cuda_stream)


def sum_squares(values: torch.Tensor, chunk: int) -> torch.Tensor:
    """Queues the sum of squares of each chunk of `values` on torch's current stream: `kernels.sum_squares` for CUDA.

    Args:
        values: (numel,) bf16, fp16 or fp32, contiguous on a CUDA device.
        chunk: elements of a chunk; the last one may be shorter.

    Returns:
        (ceil(numel / chunk),) float64 on the device. Readable on the same stream; the call does not wait.

    Raises:
        ValueError: wrong device, shape, dtype or stride.
        ConfigError: NVRTC or the driver's library is missing, or torch is built for ROCm.
        RuntimeError: the driver refuses.
    """
    if not values.is_cuda or not values.is_contiguous() or values.dim() != 1 or values.dtype not in GRADS:
        raise ValueError(
            f"expected (numel,) contiguous bf16, fp16 or fp32 on a CUDA device, got {tuple(values.shape)} of "
            f"{values.dtype} on {values.device}"
        )
    device = values.device
    return _kernels(device.index).sum_squares(values, chunk, torch.cuda.current_stream(device).cuda_stream)


def why_not(device: torch.device) -> str | None:
    """Returns the reason why these kernels cannot run on a device, or None if a trial run succeeds."""
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    expected = 9.0 * (BLOCK + 1)
    try:
        # Waits for the device once, at the start: a kernel that fails does so after its launch.
        squares = sum_squares(torch.full((BLOCK + 1,), 3.0, dtype=torch.float32, device=device), 2 * BLOCK).item()
    except (ConfigError, RuntimeError) as error:  # both torch and `driver` raise RuntimeError for errors of CUDA
        return str(error)
    return None if squares == expected else f"a trial of the kernels gave {squares} in place of {expected}"


@cache
def _kernels(device: int) -> Kernels:
    if torch.version.hip is not None:
        raise ConfigError("kernels on the GPU need CUDA: torch is built for ROCm, on which they were never tested")
    assert torch.version.cuda is not None  # the tensors are on a CUDA device
    compiler = driver.load_nvrtc(torch.version.cuda)
    context = driver.load().primary_context(device)
    return Kernels(context=context, compiler=compiler, capability=torch.cuda.get_device_capability(device))
