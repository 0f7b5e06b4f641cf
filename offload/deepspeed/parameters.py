"""`ds_id`, `ds_shape` and the other attributes by which scripts of DeepSpeed recognise and measure parameters.

They exist for the parameters of `zero.Init` and of `initialize` alone: `hasattr(p, "ds_id")` is False for any other.

[Note: attributes] They are properties of `nn.Parameter`, so that they are right at any moment, whatever class the
parameter has then. The parameter itself has a number, and maybe the dtype that `zero.Init` was asked for, which hinder
no pickle and no copy; a copy of a paged parameter, which is an ordinary parameter, has neither.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from offload.engine.access import safe_get_local_fp32_param
from offload.engine.deferred import is_deferred
from offload.engine.params import handle_of
from offload.errors import UsageError

_ID = "_deepspeed_id"
"""Attribute of the parameters of `zero.Init` and `initialize`."""
_ids = itertools.count()


class ZeroParamType(enum.Enum):
    """DeepSpeed's kinds of parameters. Those with the attributes of this module are PARTITIONED."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Where the weights of a parameter are: AVAILABLE while the parameter is an ordinary one over its memory."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Gives parameters the attributes of this module; those that have them keep their ids.

    Args:
        parameters: parameters of one model, in the same order on every rank.
    """
    # With the first model: a process that never trains by these names keeps torch's class as it is.
    if not hasattr(nn.Parameter, "ds_id"):
        for name, read in _READ.items():
            setattr(nn.Parameter, name, _property(name, read))
        # Weights that a backward of one's own has saved are views of them, which have memory; trl asks each.
        setattr(torch.Tensor, "ds_status", property(_has_memory))  # noqa: B010 - mypy knows no such attribute
    for parameter in parameters:
        if not is_marked(parameter):
            setattr(parameter, _ID, next(_ids))


def is_marked(parameter: Any) -> bool:
    """Returns True if a parameter has the attributes."""
    return isinstance(parameter, torch.Tensor) and _ID in vars(parameter)


def _property(name: str, read: Callable[[Any], Any]) -> property:
    """Returns a property that only the parameters of `mark` have."""

    def get(parameter: Any) -> Any:
        if not is_marked(parameter):
            raise AttributeError(f"{type(parameter).__name__!r} object has no attribute {name!r}")
        return read(parameter)

    return property(get, doc=f"DeepSpeed's {name}.")


def _status(parameter: Any) -> ZeroParamStatus:
    # By the class of the moment: the pager changes it at each use, and nothing else has to be told.
    absent = handle_of(parameter) is not None or is_deferred(parameter)
    return ZeroParamStatus.NOT_AVAILABLE if absent else ZeroParamStatus.AVAILABLE


def _has_memory(tensor: torch.Tensor) -> ZeroParamStatus:
    """Returns AVAILABLE for any tensor that is no parameter of an engine; an unmarked parameter has no status."""
    if isinstance(tensor, nn.Parameter):
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute 'ds_status'")
    return ZeroParamStatus.AVAILABLE


def _partition(parameter: Any) -> torch.Tensor:
    """Returns a copy of this rank's partition, in the dtype of the weights."""
    try:
        values = safe_get_local_fp32_param(parameter)
    except UsageError as error:
        # An attribute that cannot be read now is none: `hasattr` and `getattr` with a default then work.
        raise AttributeError(str(error)) from error
    assert values is not None
    return values.to(parameter.dtype)


_READ: dict[str, Callable[[Any], Any]] = {
    "ds_id": lambda parameter: vars(parameter)[_ID],
    "ds_shape": lambda parameter: parameter.shape,
    "ds_numel": lambda parameter: parameter.numel(),
    "ds_status": _status,
    "ds_tensor": _partition,
    # Also of a unit that stays on the device: a script that reads the flag then gathers, which is right.
    "ds_persist": lambda parameter: False,
}
