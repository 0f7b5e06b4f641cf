"""Ordinary memory for parameters between steps: `offload.gathered`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.keywords import refuse
from offload.engine.params.paged_parameter import ParamHandle, handle_of
from offload.errors import BudgetError, UsageError
from offload.sizes import count_of, format_size
from offload.swapper.memory.limits import free_host_memory


@contextlib.contextmanager
def gathered(
    params: Any, modify: bool = False, *, modifier_rank: int | None = None, enabled: bool = True
) -> Iterator[None]:
    """Gives parameters ordinary memory inside of a `with` block, between steps.

    The memory is a copy on the compute device, outside of all budgets. `step()` must not be called. A model all of
    whose parameters are gathered runs on that memory, without paging and without gradients, for instance to generate;
    one of which some are gathered does not run. Parameters of an ordinary model are left alone.

    On several ranks all of them enter with the same parameters if `modify` is set. For each unit, the changes of the
    lowest rank that made any apply on all ranks, so `if rank == 0:` may be used inside.

    Args:
        params: a parameter, an iterable of parameters, or a module.
        modify: True to write changes to the swap tiers at the end, also after an exception.
        modifier_rank: DeepSpeed's name for `modify`; only rank 0.
        enabled: False to do nothing.

    Yields:
        None, once, while the parameters are ordinary ones.

    Raises:
        BudgetError: if there is no room for the memory.
        UsageError: if called inside of a forward or a backward, or if a parameter changed shape or dtype, or changed at
            all without `modify`; such changes are dropped.
    """
    refuse(modifier_rank=modifier_rank)
    if not enabled:
        yield
        return
    modify = modify or modifier_rank is not None
    handles = _handles_of(params)
    # `fetch` returns True only while a forward or a backward runs.
    for handle in handles:
        if handle.fetch():
            raise UsageError(
                "gathered() must be called outside of forwards and backwards; inside of them parameters are available"
            )
    taken: list[ParamHandle] = []
    misfits: list[UsageError] = []
    changed: list[tuple[ParamHandle, torch.Tensor]] = []
    try:
        _take(handles, taken)
        with contextlib.ExitStack() as stack:
            for engine in dict.fromkeys(handle.engine for handle in handles):
                stack.enter_context(engine.on_gathered({id(handle.parameter) for handle in handles}))
            yield
    finally:
        misfits, changed = _let_go(taken)
        if modify:
            _write_back(handles, changed)
    if misfits:
        raise misfits[0]
    if changed and not modify:
        raise UsageError(
            f"parameter {changed[0][0].name} was changed inside of gathered(), and the change is dropped: pass "
            "modify=True, or to GatheredParameters modifier_rank=0"
        )


def _write_back(handles: Sequence[ParamHandle], changed: Sequence[tuple[ParamHandle, torch.Tensor]]) -> None:
    """Writes changed values to the swap tiers, unit by unit, and ends the edits of each unit.

    Args:
        handles: all parameters that were gathered.
        changed: those that were changed, with their values.
    """
    # Also for units without a change, or without room here: every rank must come to the same `end_edits`, in the same
    # order.
    for engine, unit in dict.fromkeys((handle.engine, handle.unit) for handle in handles):
        for handle, values in changed:
            if (handle.engine, handle.unit) == (engine, unit):
                handle.edit(values)
        engine.end_edits(unit)


def _handles_of(params: Any) -> list[ParamHandle]:
    """Returns the handles of all placeholders among `params`, without duplicates."""
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    elif not isinstance(params, Iterable):
        raise UsageError(f"gathered() takes parameters or a module, got {type(params).__name__}")
    found = (handle_of(parameter) for parameter in params)
    return list(dict.fromkeys(handle for handle in found if handle is not None))


def _take(handles: Collection[ParamHandle], taken: list[ParamHandle]) -> None:
    """Gives parameters ordinary memory, and appends each to `taken`. Without room it takes none: `BudgetError`."""
    free = free_host_memory()
    # Linux kills a process that takes more; an accelerator says so itself.
    if any(handle.device.type == "cpu" for handle in handles) and _nbytes(handles) > free:
        raise _no_room(handles, f"{format_size(free)} are")
    try:
        for handle in handles:
            handle.gather(handle.read())
            taken.append(handle)
    except torch.OutOfMemoryError as error:
        # Nobody has had them, so there is no change to look for, which would need memory.
        while taken:
            taken.pop().let_go()
        raise _no_room(handles, "less is") from error


def _let_go(taken: Iterable[ParamHandle]) -> tuple[list[UsageError], list[tuple[ParamHandle, torch.Tensor]]]:
    """Takes the memory away again. Returns an error for each misfit, and without one the values that have changed.

    The caller raises errors after its `finally`, in which they would replace an exception of the user. With a misfit no
    change is kept, but on several ranks this rank still takes part in the end of the edits.
    """
    given = [(handle, handle.let_go()) for handle in taken]
    misfits: list[UsageError] = []
    changed: list[tuple[ParamHandle, torch.Tensor]] = []
    # One after the other: a whole model would be in memory twice.
    while given:
        handle, values = given.pop(0)
        try:
            old = handle.read()
        except torch.OutOfMemoryError:
            # The user has taken what was left. What the parameter had is as much as the comparison needs.
            values = values.cpu()
            old = handle.read().cpu()
        if not _same_kind(values, old):
            misfits.append(_misfit(values, old))
        elif not _same_bits(values, old):
            changed.append((handle, values))
        del values
    return misfits, [] if misfits else changed


def _nbytes(handles: Iterable[ParamHandle]) -> int:
    """Returns the bytes of gathered parameters."""
    return sum(math.prod(handle.shape) * handle.parameter.element_size() for handle in handles)


def _no_room(handles: Collection[ParamHandle], free: str) -> BudgetError:
    """Returns the error for parameters for which there is no memory."""
    return BudgetError(
        f"{count_of(len(handles), 'gathered parameter')} would take {format_size(_nbytes(handles))} of the device's "
        f"memory, {free} free: gather fewer at a time, or lower device_memory. trl gathers all to generate: set "
        "ds3_gather_for_generation=False, and the weights are paged"
    )


def _same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors have one shape and dtype."""
    return one.shape == other.shape and one.dtype == other.dtype


def _misfit(one: torch.Tensor, other: torch.Tensor) -> UsageError:
    """Returns the error for a gathered parameter that became `one` and was `other`."""
    return UsageError(
        f"a gathered parameter became {list(one.shape)} {one.dtype}, it was {list(other.shape)} {other.dtype}"
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors of one kind are equal bit for bit: a NaN equals itself, and -0 differs from 0."""
    one, other = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)
