"""Random generators of the micro-batches of one step: each micro-batch draws from its own.

Dropout then has the same masks in whatever order micro-batches pass through the units. The first micro-batch goes on
with torch's generators as they are; each further one begins with a seed that torch's CPU generator draws before.
Afterwards torch's generators are where the first micro-batch has left them. A step of one micro-batch draws no seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

_T = TypeVar("_T")


class _States(NamedTuple):
    """States of torch's generators."""

    of_cpu: torch.Tensor
    of_device: torch.Tensor | None
    """None where the CPU's generator is the device's."""


class MicroBatchGenerators:
    """The generators of one step's micro-batches. Belongs to the thread that runs the step."""

    def __init__(self, device: torch.device, micro_batches: int) -> None:
        self._device = None if device.type in ("cpu", "meta") else device
        self._seeds = torch.randint(1 << 62, (micro_batches - 1,), dtype=torch.int64, device="cpu").tolist()
        self._states: list[_States | None] = [None] * micro_batches

    @contextlib.contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Makes torch's generators those of a micro-batch; may be entered again, to go on where it ended."""
        outside = self._taken()
        states = self._states[micro_batch]
        if states is not None:
            self._put(states)
        elif micro_batch:
            torch.manual_seed(self._seeds[micro_batch - 1])
        try:
            yield
        finally:
            self._states[micro_batch] = self._taken()
            if micro_batch:
                self._put(outside)

    def run(self, micro_batch: int, work: Callable[[], _T]) -> _T:
        """Returns the result of `work`, during which torch's generators are those of a micro-batch."""
        with self.of(micro_batch):
            return work()

    def _taken(self) -> _States:
        on_device = None
        if self._device is not None:
            module = torch.get_device_module(self._device)
            on_device = module.get_rng_state(self._device)
        return _States(torch.get_rng_state(), on_device)

    def _put(self, states: _States) -> None:
        torch.set_rng_state(states.of_cpu)
        if self._device is not None:
            module = torch.get_device_module(self._device)
            module.set_rng_state(states.of_device, self._device)
