"""The state of autocast and of the random generators in a forward, for a second computation of the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

Casts = tuple[tuple[str, bool, torch.dtype], ...]
"""State of autocast: for each type of device whether it is on, and its dtype."""

Generators = tuple[torch.Tensor, list[int], list[torch.Tensor]]
"""State of the CPU's generator; devices of a tensor, by index; states of their generators."""


def casts_of(hidden: torch.Tensor) -> Casts:
    """Returns the present state of autocast, for the device of a tensor and for the CPU."""
    kinds = [kind for kind in dict.fromkeys((hidden.device.type, "cpu")) if torch.amp.is_autocast_available(kind)]
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextlib.contextmanager
def autocast(casts: Casts) -> Iterator[None]:
    """Sets a state of autocast, without its cache.

    A cast that is made without a graph would stay in the cache, and a later use that needs its gradient would find it.
    """
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


def generators(hidden: torch.Tensor) -> Generators:
    """Returns the states of the generators from which a module that computes with a tensor may draw."""
    devices, states = get_device_states(hidden)
    return torch.get_rng_state(), list(devices), list(states)


def equal(before: Generators, after: Generators) -> bool:
    """Returns True if no number was drawn between two states of the same generators."""
    pairs = zip((before[0], *before[2]), (after[0], *after[2]), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@contextlib.contextmanager
def replayed(states: Generators | None, hidden: torch.Tensor) -> Iterator[None]:
    """Gives the generators these states, and afterwards those of now again. Does nothing without states."""
    if states is None:
        yield
        return
    cpu, devices, others = states
    kind = hidden.device.type
    with torch.random.fork_rng(devices, device_type=kind if devices else "cuda"):
        torch.set_rng_state(cpu)
        if devices:
            set_device_states(devices, others, device_type=kind)
        yield
