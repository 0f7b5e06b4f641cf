"""Measurement of this machine's speed, the input of `offload plan`: measured once and cached for the machine.

The probe uses the code that training will use: the I/O queue, the kernels, pinned memory, and torch's matrix products.
A size that suits one machine may take minutes on another, and Python handles no signal during a call of torch. So no
measurement starts with its largest size, and the rounds of all measurements share a budget of seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from offload import kernels
from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.aio.file import open_new
from offload.aio.measure import OPERATIONS, move, remove
from offload.errors import ConfigError, OffloadError
from offload.fileio import cache_file, own_cache_folder, read_cache, write_cache
from offload.hardware.adam_arrays import STEP, Arrays
from offload.hardware.info import drive as about_drive
from offload.hardware.info import machine as about_machine
from offload.hardware.noise import fill_with_noise
from offload.records import parse
from offload.sizes import MIB, PAGE, align_up, count_of, format_size, rounded
from offload.swapper.memory.device import compute_device, open_device

# -- rates: results, per second ---------------------------------------------------------------------

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes in which a model may train. A machine may multiply one of them twenty times slower than another."""


class DriveRates(NamedTuple):
    """Bandwidths of one drive by itself, in bytes."""

    path: str
    device: str
    read: float
    write: float
    mixed: float
    """Half of the bytes read and half written, concurrently."""


class DtypeRates(NamedTuple):
    """Rates that depend on the dtype of the weights."""

    matmul: float
    """Floating-point operations of matrix products with many tokens."""
    weights: float
    """Bytes of weights that a matrix product reads, or writes as a gradient, beside its operations."""
    elementwise: float
    """Bytes that norms, activations, softmax, products and sums between matrix products read and write."""
    optimizer: float
    """Parameters that AdamW updates on the host."""
    gradient: float
    """Elements of a gradient that is stored on the host while its squares are summed."""


class Rates(NamedTuple):
    """Rates of the processor, the memory and the compute device."""

    memory: float
    """Bytes that all threads together read and write: the bound of the optimizer."""
    copy: float
    """Bytes copied within host memory."""
    upload: float
    """Bytes copied to the device; on a CPU, into its arena."""
    download: float
    """Bytes copied from the device."""
    fresh: float
    """Bytes of a large tensor filled in newly allocated memory."""
    by_dtype: Mapping[str, DtypeRates]
    """Rates of each of `DTYPES`."""


class Probed(NamedTuple):
    """A measurement, with the machine and the date."""

    machine: dict[str, Any]
    rates: Rates
    drives: tuple[DriveRates, ...]
    date: str
    seconds: float
    doubts: tuple[str, ...] = ()
    """Sentences about signs of other work on the machine during the probe."""
    spread: float = 1.0
    """Largest ratio between a rate's measurements at the beginning and at the end of the probe."""


# -- measure: all of it, one measurement after the other --------------------------------------------

SECONDS = 30.0
"""Approximate duration of the entire probe on a machine of any speed."""
_OF_DRIVES = 0.3
"""Fraction of the probe's seconds for all drives together."""
_OF_THE_FIRST_WRITE = 0.15
"""Fraction of a drive's seconds that its first write takes."""
_REQUEST = 16 * MIB
_CHECKED = "fp32"
"""Dtype of the measurements that are repeated at the end: no machine is slow in fp32."""

Tell = Callable[[str, float], None]
"""A function that receives the name of the next measurement, and the completed fraction of the work, from 0 to 1."""


def probe(
    folders: Sequence[str],
    device: str = "auto",
    nbytes: int = 256 * MIB,
    tell: Tell = lambda *_: None,
    seconds: float = SECONDS,
) -> Probed:
    """Measures the machine. During the probe, each folder contains a file of at most `nbytes`."""
    start = time.perf_counter()
    compute = device_of(device)
    drives = []
    for index, folder in enumerate(folders):
        tell(f"the drive of {folder}", _OF_DRIVES * index / len(folders))
        drives.append(drive_rates(folder, nbytes, seconds=_OF_DRIVES * seconds / len(folders)))
    # The progress of the remaining measurements is mapped to the rest of the bar.
    share = _OF_DRIVES if folders else 0.0
    rates, doubts, spread = _measure(compute, lambda words, done: tell(words, share + (1 - share) * done), seconds)
    date = time.strftime("%Y-%m-%d")
    return Probed(machine_of(compute), rates, tuple(drives), date, time.perf_counter() - start, doubts, spread)


def drive_rates(folder: str, nbytes: int = 256 * MIB, rounds: int = 5, seconds: float = SECONDS) -> DriveRates:
    """Measures the drive under `folder` with the I/O queue that runs use, on a temporary file.

    A slow drive writes less than `nbytes` and runs fewer rounds, at least one, to end after about `seconds`.
    """
    check_size(nbytes)
    buffer = aligned_empty(align_up(nbytes))
    fill_with_noise(buffer)
    # Two requests at least, so that the mixed operation reads and writes.
    request = min(_REQUEST, align_up(len(buffer) // 2))
    path = Path(folder) / f".offload-probe.{os.getpid()}-{os.urandom(4).hex()}"
    start = time.perf_counter()
    taken: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    try:
        with DirectFile(path, create=True, opener=open_new) as file, IoQueue() as queue:
            file.reserve(len(buffer))
            part = buffer[: _written(queue, file, buffer, request, _OF_THE_FIRST_WRITE * seconds)]
            while not taken["read"] or (len(taken["read"]) < rounds and time.perf_counter() - start < seconds):
                # Operations take turns in each round, so a slow moment of the drive affects all of them.
                for name in OPERATIONS:
                    transfer = move(queue, file, part, name, request)
                    taken[name].append(transfer.nbytes / transfer.seconds)
    finally:
        remove(path)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return DriveRates(
        os.path.realpath(folder), about_drive(folder)["device"], medians["read"], medians["write"], medians["mixed"]
    )


def _written(queue: IoQueue, file: DirectFile, buffer: memoryview, request: int, seconds: float) -> int:
    """Writes the beginning of the buffer, because first writes of blocks are slower; returns the bytes written.

    Starts with the bytes of two requests, and writes twice as many, again from the start, until `seconds` have passed
    or the buffer is written completely.
    """
    start, written = time.perf_counter(), 0
    while written < len(buffer) and (not written or time.perf_counter() - start < seconds):
        written = min(max(2 * request, 2 * written), len(buffer))
        move(queue, file, buffer[:written], "write", request)
    return written


def measure_rates(device: torch.device) -> Rates:
    """Measures everything except the drives. Allocates about a gigabyte of memory temporarily."""
    return _measure(device, lambda *_: None, SECONDS)[0]


def _measure(device: torch.device, tell: Tell, seconds: float) -> tuple[Rates, tuple[str, ...], float]:
    """Measures everything except the drives. Returns the rates, sentences about causes for doubt, and the spread."""
    others, steps = Others(), 2 + 3 * len(DTYPES) + 2
    done = iter(range(steps))

    def report(words: str) -> None:
        tell(words, next(done) / steps)

    report("memory")
    host, compute = Host(Pace.of(seconds)), Compute(device, Pace.of(seconds))
    # Some measurements are repeated at the end: if others use the machine, or if it throttles, the rates differ.
    memory, copy = host.memory(), host.copy()
    products, elementwise, stepped = {}, {}, {}
    for name in DTYPES:
        report(f"matrix products in {name}")
        products[name] = compute.products(name)
    report("copies to and from the device")
    upload, download = compute.copies()
    for name in DTYPES:
        report(f"norms, activations and sums in {name}")
        elementwise[name] = compute.elementwise(name)
        report(f"optimizer and gradients in {name}")
        stepped[name] = host.optimizer(name)
    report("new memory")
    fresh = compute.fresh()
    report("memory, matrix products and norms once more")
    twice: tuple[tuple[str, float, float, Callable[[float], str]], ...] = (
        ("memory", memory, host.memory(), lambda rate: f"{rate / 1e9:.1f} GB/s"),
        (
            f"matrix products in {_CHECKED}",
            products[_CHECKED][0],
            compute.products(_CHECKED)[0],
            lambda rate: f"{rate / 1e12:.3g} Tflop/s",
        ),
        (
            f"norms, activations and sums in {_CHECKED}",
            elementwise[_CHECKED],
            compute.elementwise(_CHECKED),
            lambda rate: f"{rate / 1e9:.1f} GB/s",
        ),
    )
    doubts = (*(sentence for rate in twice for sentence in apart(*rate)), *others.doubts())
    spread = max(max(first, last) / min(first, last) for _, first, last, _ in twice)
    by_dtype = {name: DtypeRates(*products[name], elementwise[name], *stepped[name]) for name in DTYPES}
    return Rates(memory, copy, upload, download, fresh, by_dtype), doubts, spread


def check_size(nbytes: int) -> None:
    """Raises `ConfigError` if a file of `nbytes` is too short, or its buffer needs more than half of free memory."""
    if nbytes < 2 * PAGE:
        raise ConfigError(f"expected a size of at least {2 * PAGE} bytes, got {nbytes}")
    free = psutil.virtual_memory().available
    if nbytes > free // 2:
        raise ConfigError(
            f"{format_size(free)} of memory are free, and the buffer is as long as the file, {format_size(nbytes)}: "
            f"give a smaller --size"
        )


def check_folders(folders: Sequence[str]) -> None:
    """Raises `IoError` if a folder does not exist or cannot be written to."""
    for folder in folders:
        # Creates and removes a file in the folder.
        about_drive(folder)


def device_of(name: str) -> torch.device:
    """Returns the device called `name`. Raises `ConfigError`, which mentions `--device`, if it does not exist."""
    return compute_device(name, "--device")


def machine_of(device: torch.device) -> dict[str, Any]:
    """Returns the properties of the machine, with its GPU if `device` is one."""
    facts = about_machine() | {"name": platform.node(), "gpu": None, "gpu_memory_bytes": 0}
    if device.type != "cpu":
        of = torch.get_device_module(device).get_device_properties(device)
        facts |= {"gpu": of.name, "gpu_memory_bytes": of.total_memory}
    return facts


# -- host: memory and the optimizer, the CPU's work on every compute device -------------------------

_NUMELS = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Parameters, in growing sizes; the largest exceed any cache."""
_TILE = 1 << 20
"""Elements of an update that are computed at a time."""


class Host:
    """Arrays of an update, sized so that a pass over them takes about `pace.call` seconds on this machine."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.numel = grown(_NUMELS, float, _moving, pace.call)
        self._arrays = Arrays(self.numel, torch.bfloat16, torch.bfloat16)
        self._host_buffer = torch.frombuffer(aligned_empty(2 * self.numel), dtype=torch.bfloat16)

    def memory(self) -> float:
        """Returns the bytes a second that all threads read and write."""
        nbytes = self.numel * self._arrays.bytes_per_parameter
        return nbytes / in_turns([lambda: kernels.probe(self._arrays.partition)], self._pace.rate)[0]

    def copy(self) -> float:
        """Returns the bytes a second that are copied."""
        return (
            self._host_buffer.nbytes
            / in_turns([lambda: self._host_buffer.copy_(self._arrays.weight)], self._pace.rate)[0]
        )

    def optimizer(self, dtype: str) -> tuple[float, float]:
        """Returns the parameters a second that AdamW updates, and the elements a second of a gradient that is stored.

        The squares of the gradient are summed meanwhile.
        """
        of = DTYPES[dtype]
        arrays = self._arrays if of is torch.bfloat16 else Arrays(self.numel, of, of)
        buffer = torch.frombuffer(aligned_empty(self.numel * of.itemsize), dtype=of)
        gradient = torch.ones(self.numel, dtype=of, device="cpu")  # in ordinary memory, like autograd's gradients
        size = min(_TILE, self.numel)
        tiles = [_slice_of(arrays.partition, start, start + size) for start in range(0, self.numel, size)]
        segments = [kernels.Segment(0, size, STEP)]

        def update() -> None:
            for tile in tiles:
                kernels.update(tile, segments)

        def accumulate() -> None:
            for start in range(0, self.numel, size):
                kernels.accumulate(buffer[start : start + size], gradient[start : start + size], add=False)

        updated, stored = in_turns([update, accumulate], self._pace.rate)
        return self.numel / updated, self.numel / stored


def _moving(numel: int) -> Callable[[], object]:
    arrays = Arrays(numel, torch.bfloat16, torch.bfloat16)
    return lambda: kernels.probe(arrays.partition)


def _slice_of(whole: kernels.Partition, start: int, stop: int) -> kernels.Partition:
    span = slice(start, stop)
    beside = [None if tensor is None else tensor[span] for tensor in (whole.residual, whole.master)]
    return kernels.Partition(
        whole.weight[span], whole.grad[span], tuple(moment[span] for moment in whole.moments), *beside
    )


# -- compute device: matrix products, the operations between them, new memory, copies ---------------

_COPIED = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
"""Bytes of a copy, in growing sizes."""
_LAYERS = 12


class Product(NamedTuple):
    """A linear layer (width -> wide), and two numbers of tokens that pass through it."""

    width: int
    wide: int
    few: int
    many: int

    @property
    def flops(self) -> float:
        """Floating-point operations of a pass with many tokens: three products, each a multiply and an add per term."""
        return 6.0 * self.width * self.wide * self.many


_SCALES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
_PRODUCTS = tuple(Product(64 * scale, 256 * scale, 4 * scale, 32 * scale) for scale in _SCALES)
_PRODUCTS_OF_GPU = tuple(Product(1024 * scale, 1024 * scale, 128 * scale, 1024 * scale) for scale in (1, 2, 4, 8))
_VALUES = ((16, 1024), (64, 1024), (256, 1024), (512, 1024))
_VALUES_OF_GPU = ((512, 2048), (2048, 4096), (8192, 8192))
"""Tokens and width of elementwise operations; `_VALUES` on a CPU."""


class Compute:
    """The compute device of a measurement."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._device, self._pace = device, pace
        self._sizes: dict[str, Product] = {}
        """Size by dtype name, chosen when the dtype is measured for the first time."""

    def products(self, dtype: str) -> tuple[float, float]:
        """Returns the operations a second of a linear layer's three products, and the bytes of weights that they read.

        Conditions are as in a model: a weight has not been used for a while, and gradients are larger than the blocks
        that malloc keeps for reuse.
        """
        device = self._device
        size = self._sizes[dtype] = self._sizes.get(dtype) or self._product(DTYPES[dtype])
        layer = _Linear(DTYPES[dtype], device, size)
        # Time is linear in tokens. Two numbers of tokens separate the cost of a token from the fixed cost of the
        # weights; the bounds keep noise from giving a rate of zero or infinity.
        small, large = in_turns([layer.passes(size.few), layer.passes(size.many)], self._pace.rate, device)
        per_product = max(large - small, 0.5 * large) / (
            size.many - size.few
        )  # seconds of a token; the remainder belongs to the weights
        rest = min(max(small - size.few * per_product, 0.01 * small), 0.5 * small)
        return 6 * size.wide * size.width / per_product, 3 * layer.nbytes / rest

    def _product(self, dtype: torch.dtype) -> Product:
        """Returns the size with which the dtype is measured: small for a dtype that is slow on this machine."""

        def passes(size: Product) -> Callable[[], object]:
            return _Linear(dtype, self._device, size).passes(size.many)

        sizes = _PRODUCTS if self._device.type == "cpu" else _PRODUCTS_OF_GPU
        return grown(sizes, lambda size: size.flops, passes, 3 * self._pace.call, self._device)

    def elementwise(self, dtype: str) -> float:
        """Returns the bytes a second of a transformer's operations between its products, in the dtype named `dtype`.

        The results go to new memory each time, as in a model.
        """
        device, of = self._device, DTYPES[dtype]
        sizes = _VALUES if device.type == "cpu" else _VALUES_OF_GPU
        size = grown(
            sizes, lambda size: float(size[0] * size[1]), partial(_layers, of, device), self._pace.call, device
        )
        seconds = in_turns([_layers(of, device, size)], self._pace.rate, device)[0]
        # The operations of `_layers` together read and write each value 12 times.
        return _LAYERS * 12 * size[0] * size[1] * of.itemsize / seconds

    def fresh(self) -> float:
        """Returns the bytes a second that are filled in newly allocated memory."""

        def make(nbytes: int) -> Callable[[], object]:
            return lambda: torch.full((nbytes,), 0, dtype=torch.uint8, device=self._device)

        size = grown(_COPIED, float, make, self._pace.call, self._device)
        return size / in_turns([make(size)], self._pace.rate, self._device)[0]

    def copies(self) -> tuple[float, float]:
        """Returns the bytes a second of copies from host memory like the engine's arena to the device, and back."""
        opened, device = open_device(self._device), self._device
        host = torch.frombuffer(opened.allocate_host(_COPIED[-1]).buffer, dtype=torch.uint8)
        there = torch.ones(_COPIED[-1], dtype=torch.uint8, device=device)
        opened.register([host])  # pins; before the first touch, as the engine does
        try:
            host.fill_(1)
            size = grown(_COPIED, float, partial(_copy, there, host), self._pace.call, device)
            up, down = in_turns([_copy(there, host, size), _copy(host, there, size)], self._pace.rate, device)
        finally:
            opened.unregister([host])
        return size / up, size / down


class _Linear:
    """Three linear layers of equal shape, used in turns, so that no weight stays in a cache."""

    def __init__(self, dtype: torch.dtype, device: torch.device, size: Product) -> None:
        self._dtype, self._device, self._width = dtype, device, size.width
        self._generator = torch.Generator(device).manual_seed(0)
        weights = [self._inputs((size.wide, size.width)) for _ in range(3)]
        self.nbytes = weights[0].nbytes
        self._taken = itertools.cycle(weights)

    def _inputs(self, shape: tuple[int, int]) -> torch.Tensor:
        # Random, as in training: products of equal numbers draw less power, so a GPU keeps a higher clock (an H200
        # made 907 TFLOP/s of them, and 680 of random ones).
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.uniform_(-0.01, 0.01, generator=self._generator)

    # autograd records nothing here, so the two products of the backward are written out.
    def passes(self, tokens: int) -> Callable[[], object]:
        """Returns a function that computes the forward of `tokens` tokens and its backward."""
        inputs = self._inputs((tokens, self._width))

        def work() -> None:
            weight = next(self._taken)
            output = torch.nn.functional.linear(inputs, weight)
            output @ weight
            output.t() @ inputs

        return work


def _layers(dtype: torch.dtype, device: torch.device, size: tuple[int, int]) -> Callable[[], object]:
    values = torch.full(size, 0.5, dtype=dtype, device=device)
    weight = torch.ones(size[1], dtype=dtype, device=device)

    def layers() -> None:
        for _ in range(_LAYERS):
            # Bytes in units of the values: norm, activation and softmax move 2 each, product and sum 3 each.
            hidden = torch.nn.functional.layer_norm(values, size[1:], weight, weight)
            hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
            hidden = torch.softmax(hidden, -1)
            torch.add(hidden * values, values)

    return layers


def _copy(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Callable[[], object]:
    """Returns a function that copies the first `nbytes` bytes; on a GPU the copy is only queued."""
    return lambda: target[:nbytes].copy_(source[:nbytes], non_blocking=True)


# -- pace: sizes that grow until a call takes long enough, and rounds within seconds ----------------

_T = TypeVar("_T")
_ROUNDS = 9
"""Rounds at most: more do not change a median."""
_BEYOND = 2.0
"""A larger size is tried if its expected time is at most this multiple of the sufficient time."""
_RATES = 30
"""Number of measurements among which the seconds of a probe are divided."""
_CALLS = 20
"""Calls of one measurement."""
_TRIES = 5
"""Calls of a size at most. Other work on the machine makes calls longer, so the shortest one counts."""


class Pace(NamedTuple):
    """Approximate durations in seconds."""

    rate: float
    """Duration of the measurement of one rate."""
    call: float
    """Target duration of one call; in shorter ones the overhead of the call dominates."""

    @classmethod
    def of(cls, seconds: float) -> Pace:
        """Returns the pace of a probe that takes `seconds` in all."""
        return cls(seconds / _RATES, seconds / _RATES / _CALLS)


def grown(
    sizes: Sequence[_T], work: Callable[[_T], float], call: Callable[[_T], Callable[[], object]], enough: float,
    device: torch.device | None = None,
) -> _T:  # fmt: skip
    """Returns the first of the growing `sizes` whose call takes `enough` seconds.

    Stops earlier if the next size is expected to take much longer than that. `work` is the amount of work of a size,
    from which the time of the next one is estimated.
    """
    # The last size is never tried: it is taken if a call with the previous size is short enough.
    for size, larger in itertools.pairwise(sizes):
        action = call(size)
        if not _is_short(action, enough, work(larger) / work(size), device):
            return size
    return sizes[-1]


def _is_short(action: Callable[[], object], enough: float, times: float, device: torch.device | None) -> bool:
    """Returns True if a call takes less than `enough`, and a call with `times` the work would not take far more.

    The first call allocates memory and selects kernels, so it does not count if there is time for another.
    """
    limit, spent = min(enough, _BEYOND * enough / times), 0.0
    for tried in range(_TRIES):
        seconds = seconds_of(action, device)
        spent += seconds
        if tried and seconds < limit:
            return True
        # A machine far too slow for this size: further tries would only exceed the budget.
        if tried and spent > _TRIES * enough:
            break
    return False


def in_turns(
    actions: Sequence[Callable[[], object]], seconds: float, device: torch.device | None = None
) -> list[float]:
    """Returns the median seconds of each action. The actions take turns, so a slow moment of the machine affects all.

    A first round, which allocates memory and selects kernels, does not count. At least one more is run. `seconds` is
    the budget of all rounds.
    """
    end = time.perf_counter() + seconds
    rounds: list[list[float]] = []
    # The warm-up round counts against the budget, so a slow machine runs one further round and stops.
    while len(rounds) < 2 or (len(rounds) <= _ROUNDS and time.perf_counter() < end):
        rounds.append([seconds_of(action, device) for action in actions])
    return [statistics.median(taken) for taken in zip(*rounds[1:], strict=True)]


def seconds_of(action: Callable[[], object], device: torch.device | None = None) -> float:
    """Returns the seconds of one call, until the device has finished."""
    start = time.perf_counter()
    action()
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)  # the call only queues work; its execution is measured
    return time.perf_counter() - start


# -- disturbance: rates measured twice, and processor time of other processes -----------------------

_APART = 1.2
"""Ratio above which two measurements of a rate lead to different plans."""
FAR = 10.0
"""Ratio above which both measurements are unusable."""
SLOWEST = 1e8
"""Operations of products, and bytes of memory, per second below which a probe was disturbed: one core reaches a hundred
times as many."""
_SHARE = 0.15
"""Fraction of the cores that other processes may use."""
CURE = "run `offload probe` again while the machine is idle"


def apart(name: str, first: float, last: float, describe: Callable[[float], str]) -> list[str]:
    """Returns a sentence if a rate differs between the beginning and the end of the probe, else nothing."""
    if max(first, last) <= _APART * min(first, last):
        return []
    return [f"{name}: {describe(first)} at the beginning of the probe, {describe(last)} at its end; {CURE}"]


class Others:
    """A meter of other processes' work on the cores that this process may use, from the construction on."""

    def __init__(self) -> None:
        self._busy, self._mine, self._start = _busy(), time.process_time(), time.perf_counter()

    def share(self) -> float | None:
        """Returns the fraction of the cores that others used since the construction; None if this is unknown."""
        busy = _busy()
        if self._busy is None or busy is None:
            return None
        seconds = (time.perf_counter() - self._start) * len(_cores())
        return max(busy - self._busy - (time.process_time() - self._mine), 0.0) / seconds if seconds else None

    def doubts(self) -> list[str]:
        """Returns a sentence if others used more than `_SHARE` of the cores; nothing if this cannot be determined."""
        share = self.share()
        if share is None or share <= _SHARE:
            return []
        return [f"other processes took {share:.0%} of the cores during the probe; {CURE}"]


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


def _busy() -> float | None:
    """Returns the seconds that these cores have worked for any process.

    None if the system does not report them, or if a CPU quota makes them meaningless.
    """
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        # With a quota most work on these cores belongs to other containers, and does not slow this process.
        limits = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
        quotas = [path.read_text().split()[0] for path in limits if path.is_file()]
        if any(quota not in ("max", "-1") for quota in quotas):
            return None
        times = psutil.cpu_times(percpu=True)
        idle = ("idle", "iowait", "guest", "guest_nice")  # `user` includes the seconds of guests
        worked = [times[core]._asdict() for core in _cores()]
        seconds: float = sum(value for core in worked for name, value in core.items() if name not in idle)
        return seconds
    return None


# -- cache, and results in words --------------------------------------------------------------------

_VERSION = 5


def check_kept() -> None:
    """Raises `ConfigError` if a result cannot be cached. Called before the measurement, which takes half a minute."""
    path = cache_path()
    try:
        # A file without a name: nothing is left behind if the probe is killed.
        with own_cache_folder(path), tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"the result cannot be stored in {path.parent}: {error.strerror or error}; set XDG_CACHE_HOME, or give "
            "--no-keep"
        ) from error


def cache_path() -> Path:
    """Returns the path of the cache of this machine."""
    return cache_file("probe")


def unusable(probed: Probed) -> list[str]:
    """Returns sentences on why a measurement is unusable; none for a usable one."""
    reasons = []
    if probed.spread > FAR:
        reasons.append(f"a rate that was measured twice differs {probed.spread:,.0f}-fold")
    by_dtype = probed.rates.by_dtype
    for name, rate, unit in (
        *((f"matrix products in {name}", of.matmul, "operations") for name, of in by_dtype.items()),
        ("norms, activations and sums in fp32", by_dtype["fp32"].elementwise, "bytes"),
        ("memory", probed.rates.memory, "bytes"),
    ):
        if not rate >= SLOWEST:
            reasons.append(f"{name}: {rate:.3g} {unit} a second is no rate of a machine")
    return reasons


def keep(probed: Probed) -> Path:
    """Caches a measurement for the planner, and returns the path.

    Drives that were measured earlier and are not in `probed` are kept.

    Raises:
        OffloadError: the measurement is unusable. The cache keeps its previous content.
        OSError: the file cannot be written.
    """
    if reasons := unusable(probed):
        raise OffloadError(f"the result is not stored: {'; '.join(reasons)}; {CURE}")
    path = cache_path()
    before = kept()
    paths = {drive.path for drive in probed.drives}
    drives = [*(drive for drive in (before.drives if before else ()) if drive.path not in paths), *probed.drives]
    write_cache(path, json.dumps(as_json(probed._replace(drives=tuple(drives))), indent=2) + "\n")
    return path


def kept() -> Probed | None:
    """Returns the cached measurement; None if there is none, or if it is of another processor or number of cores."""
    try:
        content = parse(read_cache(cache_path()))
        if content["version"] != _VERSION:
            return None
        probed = from_json(content)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none yet, or damaged: the next probe replaces it
    if unusable(probed):
        return None  # earlier versions cached unusable measurements, too
    # A home folder may be shared by several machines, so the cache is checked against this one.
    here = about_machine()
    return probed if all(probed.machine.get(key) == here[key] for key in ("processor", "cores")) else None


def drive_under(probed: Probed, folder: str) -> DriveRates | None:
    """Returns the rates measured in `folder`, or else in another folder of the same file system; None without any."""
    path = os.path.realpath(folder)
    for drive in probed.drives:
        if drive.path == path:
            return drive
    system = _file_system(path)
    return next(
        (drive for drive in probed.drives if os.path.isdir(drive.path) and _file_system(drive.path) == system), None
    )


def _file_system(path: str) -> int:
    """Returns the device number of the file system of `path`, which need not exist yet."""
    # The folder may not exist yet: its first existing parent is on the same file system.
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


def as_json(probed: Probed) -> dict[str, Any]:
    """Returns the content that `--json` prints and `keep` writes."""
    return {
        "version": _VERSION,
        "machine": probed.machine,
        "rates": {
            **_rounded(probed.rates),
            "by_dtype": {name: _rounded(dtype_rates) for name, dtype_rates in probed.rates.by_dtype.items()},
        },
        "drives": [_rounded(drive) for drive in probed.drives],
        "date": probed.date,
        "seconds": round(probed.seconds, 1),
        "doubts": list(probed.doubts),
    }


def from_json(content: Mapping[str, Any]) -> Probed:
    """Returns the measurement that `as_json` has written; an error of Python if it is damaged."""
    by_dtype = {name: DtypeRates(**rates) for name, rates in content["rates"]["by_dtype"].items()}
    return Probed(
        content["machine"],
        Rates(**content["rates"] | {"by_dtype": by_dtype}),
        tuple(DriveRates(**drive) for drive in content["drives"]),
        content["date"],
        content["seconds"],
        tuple(content["doubts"]),
    )


def _rounded(values: NamedTuple) -> dict[str, Any]:
    return {name: rounded(value) for name, value in values._asdict().items()}


def lines(probed: Probed) -> list[tuple[str, str]]:
    """Returns the results for people, as pairs of name and value."""
    host, rates = probed.machine, probed.rates
    device = host["gpu"] or f"{host['processor']}, {count_of(host['cores'], 'core')}"
    rows = [
        ("compute", device),
        ("memory", f"{rates.memory / 1e9:.1f} GB/s read and written, {rates.copy / 1e9:.1f} GB/s copied"),
        ("to the device", f"{rates.upload / 1e9:.1f} GB/s, and from it {rates.download / 1e9:.1f} GB/s"),
        ("new memory", f"{rates.fresh / 1e9:.1f} GB/s"),
    ]
    for name, of in rates.by_dtype.items():
        rows += [
            (f"{name}: products", f"{of.matmul / 1e12:.3g} Tflop/s, {of.weights / 1e9:.1f} GB/s of weights"),
            ("elementwise", f"{of.elementwise / 1e9:.1f} GB/s"),
            ("optimizer", f"{of.optimizer / 1e6:.0f} M parameters a second"),
            ("gradients", f"{of.gradient / 1e6:.0f} M parameters a second"),
        ]
    return rows + [(drive.path, drive_line(drive)) for drive in probed.drives]


def drive_line(rates: DriveRates) -> str:
    """Returns the rates of a drive in words."""
    return f"reads {rates.read / 1e9:.2f}, writes {rates.write / 1e9:.2f}, both {rates.mixed / 1e9:.2f} GB/s"
