"""`gathered`: ordinary memory for parameters between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offload.engine.keywords import refuse
from offload.engine.params.paged_parameter import Place, place_of
from offload.errors import UsageError


@contextlib.contextmanager
def gathered(
    params: Any, modify: bool = False, *, modifier_rank: int | None = None, enabled: bool = True
) -> Iterator[None]:
    """Give `params` (a parameter, several, or a module) ordinary memory inside of a `with` block.

    The memory is a copy on the compute device, outside of all budgets. With `modify`, what was changed is written to
    the swap tiers at the end, also after an exception; without, a change raises `UsageError` at the end. Models may
    not run on gathered parameters, nor may `step()` be called. Parameters of an ordinary model are left alone.

    With several ranks and `modify`, all of them come here with the same parameters; of each unit, what the lowest rank
    changed that changed any counts on all of them, so that `if rank == 0:` may stand inside. `modifier_rank=0` is how
    DeepSpeed says `modify`; where it is not `enabled`, nothing is done.
    """
    refuse(modifier_rank=modifier_rank)
    if not enabled:
        yield
        return
    modify = modify or modifier_rank is not None
    places = _places_of(params)
    for place in places:
        if place.engine.bring(place.unit):
            raise UsageError("gathered() is for between forwards and backwards; inside of them parameters are there")
    taken: list[Place] = []
    changed: list[tuple[Place, torch.Tensor]] = []
    try:
        for place in places:
            place.gather(place.read())
            taken.append(place)
        yield
    finally:
        given = [(place, place.let_go()) for place in taken]
        changed = [(place, values) for place, values in given if not _same_bits(values, place.read())]
        if modify:
            for unit in dict.fromkeys((place.engine, place.unit) for place in taken):
                for place, values in changed:
                    if (place.engine, place.unit) == unit:
                        place.edit(values)
                unit[0].end_edits(unit[1])
    if changed and not modify:
        raise UsageError(
            f"parameter {changed[0][0].name} was changed inside of gathered(); the change is dropped: say modify=True"
        )


def _places_of(params: Any) -> list[Place]:
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    elif not isinstance(params, Iterable):
        raise UsageError(f"gathered() takes parameters or a module, got {type(params).__name__}")
    found = (place_of(parameter) for parameter in params)
    return list(dict.fromkeys(place for place in found if place is not None))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        raise UsageError(
            f"a gathered parameter became {list(one.shape)} {one.dtype}, it was {list(other.shape)} {other.dtype}"
        )
    one, other = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)
