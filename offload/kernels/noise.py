"""Random bits with which moments and masters are rounded: see [Note: stochastic rounding] in native/noise.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_WORD = (1 << 64) - 1
_RANGE = 1 << 32
_GOLDEN = 0x9E3779B97F4A7C15


class Noise(NamedTuple):
    """The random bits of a segment: a stream, and the number of the segment's first element in the stream."""

    stream: int
    """Selects one of 2**64 streams; see `noise_stream`."""
    element: int
    """From 0 to below 2**64."""

    def after(self, count: int) -> Noise:
        """Returns the noise from `count` elements on."""
        return Noise(self.stream, self.element + count)


class Keyed(NamedTuple):
    """Elements [start, stop) whose numbers in their stream agree in all but the lower 32 bits, and their key."""

    start: int
    stop: int
    before: int
    between: int
    element: int
    """The lower 32 bits of the number of element `start`."""


def keyed(start: int, stop: int, noise: Noise) -> Iterator[Keyed]:
    """Yields the parts of a segment, mostly one, each of which has one key of its noise."""
    stream, element = noise
    while start < stop:
        high, low = divmod(element, _RANGE)
        key = _mixed(stream + _GOLDEN * high & _WORD)
        end = min(stop, start + _RANGE - low)
        yield Keyed(start, end, key % _RANGE, key // _RANGE, low)
        element += end - start
        start = end


def noise_stream(seed: int, unit: int, step: int) -> int:
    """Returns the stream of one update of a parameter.

    Args:
        seed: the seed of the run.
        unit: index of the parameter's unit.
        step: number of updates of the parameter, this one included.
    """
    # SplitMix64: streams of neighbouring numbers have nothing in common.
    stream = 0
    for part in (seed, unit, step):
        stream = _mixed((stream ^ part) + _GOLDEN & _WORD)
    return stream


def master_stream(stream: int) -> int:
    """Returns the stream that rounds masters, beside `stream`, which rounds moments; as native/noise.h has it."""
    return _mixed(stream ^ 0x6D6173746572)


def _mixed(value: int) -> int:
    """Returns the finalizer of SplitMix64, as `mixed` of native/noise.h computes it."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)
