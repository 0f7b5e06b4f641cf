"""The peak of a process's host memory: its budgets, and what torch allocates beside them. From sizes alone.

    used before the start + host budget + device budget, where the device works in host memory
                          + gradients, sums, a copy of weights, activations, libraries

A start and a plan compare this sum with the tightest limit (`check_peak`): the kernel ends a process beyond the limit
of its cgroup without a word. Before the first step the activations of a loop are unknown, and count as 0;
`engine/memory_guard.py` looks at them when they come.
"""

from __future__ import annotations

from typing import NamedTuple

from offload.errors import BudgetError
from offload.layout.tiers import Partitions
from offload.sizes import MIB, format_size

LIBRARIES = 32 * MIB
"""Bytes of libraries that are loaded in the first step, and of threads' stacks."""

_ENTRIES = 512
"""Divisor: the kernel's tables have 8 bytes for each page of 4096, and the store's checksums 4."""

CHUNK_TOKENS = 1024
"""Tokens of a chunk of the loss, as `offload.losses.chunked.CHUNK_TOKENS`."""


class BesideBudgets(NamedTuple):
    """Bytes that torch allocates in a step where the CPU computes, in addition to both budgets."""

    gradients: int = 0
    """Gradients of the largest parameter that are in memory at once, as autograd makes them."""
    sums: int = 0
    """The sum of a unit's gradients that waits in more bytes than a complete one."""
    copy: int = 0
    """The weights of a parameter, in the layout that a product uses."""
    activations: int = 0
    """Activations of the micro-batches that are in memory at once; 0 where they are not known."""
    libraries: int = LIBRARIES


def beside_budgets(
    parts: Partitions, gradients: int = 2, activations: int = 0, *, copies: bool = True
) -> BesideBudgets:
    """Returns what a backward on the CPU takes in addition to both budgets.

    `gradients` is the number of gradients of the largest parameter that are in memory at once: a tied parameter has
    several. A gradient leaves when it is made; several ranks first collect those of a unit. If gradients wait in fewer
    bytes than their sums have, the sums of a unit are there too. `copies` is False for weights in fp32, whose products
    read them in the layout that they have.
    """
    gradient = min(parts.largest_gradient, parts.largest_parameter) if parts.alone else parts.largest_gradient
    sums = max(map(parts.sum_nbytes, range(len(parts.nbytes))), default=0) if parts.gradients.complete_first else 0
    return BesideBudgets(gradients * gradient, sums, parts.largest_parameter if copies else 0, activations)


class PeakMemory(NamedTuple):
    """Bytes of host memory that a process needs at its peak in addition to what it used before; `sum` adds them up."""

    host_budget: int
    device_budget: int
    """0 for a device with memory of its own."""
    gradients: int
    sums: int
    copy: int
    activations: int
    libraries: int

    @classmethod
    def of(cls, host_budget: int, device_budget: int, beside: BesideBudgets, stored: int) -> PeakMemory:
        """Returns the sum of a run whose swap files have `stored` bytes.

        Its libraries include the checksums of these bytes, and the kernel's tables of pages.
        """
        pages = (host_budget + device_budget + sum(beside)) // _ENTRIES + stored // (2 * _ENTRIES)
        return cls(host_budget, device_budget, *beside._replace(libraries=beside.libraries + pages))

    def __str__(self) -> str:
        """Returns the parts in words, without those that are 0."""
        names = (
            "of the host budget",
            "of the device budget",
            "for gradients of the largest parameter",
            "for the sum of its gradients",
            "for a copy of its weights in a product",
            "for activations",
            "for libraries and records of pages",
        )
        return " + ".join(f"{format_size(nbytes)} {name}" for nbytes, name in zip(self, names, strict=True) if nbytes)


def check_peak(peak: PeakMemory, free: int, limit: str, least: int) -> None:
    """Raises `BudgetError` if the peak exceeds the bytes that a limit leaves free.

    Args:
        peak: the sum.
        free: bytes that `limit`, in words, leaves.
        least: bytes of the sum with the least budgets that work.
    """
    need = sum(peak)
    if need <= free:
        return
    cure = "a larger limit, a smaller micro-batch, shorter sequences or chunks of the loss, or weights in 16 bits"
    if least <= free:
        cure = f"smaller budgets, with which {format_size(least)} ({least} bytes) suffice, or {cure}"
    raise BudgetError(
        f"this run needs {format_size(need)} ({need} bytes) of memory beside what the process uses already, and "
        f"{limit} leaves {format_size(free)}: {peak}; the kernel would end the process without a word. What helps: "
        f"{cure}"
    )
