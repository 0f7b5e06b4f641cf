"""`zero.GatheredParameters`: ordinary memory for parameters that are paged, and values for those that have none yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offload.engine.access import gathered, register_external_parameter
from offload.engine.deferred import is_deferred, keeping_copies
from offload.engine.keywords import refuse
from offload.engine.params import handle_of
from offload.errors import UsageError
from offload.torch_internals import swap_parameters


class GatheredParameters:
    """Context in which parameters have ordinary memory, for an engine's and for those of `zero.Init`.

    In a forward or a backward, where an engine's weights are fetched as they are used, it gathers nothing more.
    Parameters of `zero.Init` that have no values yet can be given them here, by `load_state_dict`, `copy_` or
    `torch.nn.init`; what is not given is initialized by `initialize`. Other parameters are left alone.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Checks the arguments.

        Args:
            params: a parameter, or parameters.
            modifier_rank: 0 to keep changes, those of rank 0; None to read. A change without it is an error.
            fwd_module: a module whose forward uses the parameters; registered as `register_external_parameter` does.
            enabled: False to do nothing.

        Raises:
            UsageError: if `modifier_rank` is another rank.
        """
        refuse(modifier_rank=modifier_rank)
        self._enabled, self._modifier_rank = enabled, modifier_rank
        # A generator such as `model.parameters()` gives its items once; tied parameters may be given twice.
        single = isinstance(params, torch.Tensor) or not isinstance(params, Iterable)
        listed: list[Any] = [params] if single else list(params)
        self._params = list({id(each): each for each in listed if isinstance(each, nn.Parameter)}.values())
        self._open = contextlib.ExitStack()
        if enabled and fwd_module is not None:
            # The forward of that module reads the parameter without being its owner.
            for parameter in self._params:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        if self._enabled:
            self._open.enter_context(_gathered(self._params, self._modifier_rank))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._open.__exit__(kind, error, trace)


@contextlib.contextmanager
def _gathered(params: list[Any], modifier_rank: int | None) -> Iterator[None]:
    """Gathers parameters of an engine, or takes values for those that have none; see `GatheredParameters`.

    Raises:
        UsageError: if weights shall be modified while the model runs.
    """
    handles = [handle for parameter in params if (handle := handle_of(parameter)) is not None]
    # `fetch` returns True only while a forward or a backward runs.
    if handles and all([handle.fetch() for handle in handles]):
        if modifier_rank is not None:
            raise UsageError(
                "GatheredParameters with modifier_rank changes weights, which a running forward or backward uses: "
                "enter it between steps"
            )
        yield
        return
    young = [parameter for parameter in params if is_deferred(parameter)]
    # Without a modifier values are read, and those that do not exist yet cannot be: the read says so.
    takes = keeping_copies() if young and modifier_rank is not None else contextlib.nullcontext()
    with gathered(params, modifier_rank=modifier_rank), takes:
        yield
    # Behind the body, as DeepSpeed broadcasts: the engines' parameters are shared by `gathered` itself.
    if modifier_rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
        for parameter in young:
            _share(parameter)


def _share(parameter: nn.Parameter) -> None:
    """Gives a parameter of `zero.Init` on every rank the values that it has on rank 0, if it has any there."""
    # Rank 0 alone knows whether the code has set the parameter: on other ranks it stays as it was.
    given = torch.tensor([not is_deferred(parameter)])
    dist.broadcast(given, src=0)
    if not given:
        return
    values = parameter.detach() if dist.get_rank() == 0 else torch.empty(parameter.shape, dtype=parameter.dtype)
    dist.broadcast(values, src=0)
    if dist.get_rank() != 0:
        # Swapped, so that modules that share the parameter keep the same object.
        swap_parameters(parameter, nn.Parameter(values, parameter.requires_grad))


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yields the engine, by which `generate` works as it is: weights are paged for each of its forwards.

    Args:
        model: an engine.
    """
    yield model
