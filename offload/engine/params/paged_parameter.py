"""What a parameter is between its uses: right shape, dtype and device, no memory of its own, and no silent NaN.

A `Paged` parameter answers questions about itself (shape, dtype, device, hooks, `zeros_like`). Any other function of
torch that is given one comes here first, and there are four ways on:

    a module that the engine hooked is running      the weights are brought, and stay while that module runs
    a backward is running                           the same, until the backward ends
    neither                                         the function gets a copy of the weights, whose gradient comes to the
                                                    engine like any other; what it changed in place becomes an edit, an
                                                    update without a gradient
    neither, and a view of the copy would come out  `UsageError`, that names the parameter

So `load_state_dict`, `copy.deepcopy`, an EMA, `parameter.norm()`, an L2 penalty give what they give with an ordinary
model. A bound parameter has its own class again and costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from offload.engine.params.harmless_functions import asks_for_no_element
from offload.errors import BudgetError, UsageError
from offload.torch_internals import make_subclass, plain_tensors, tree_leaves, tree_map


class Keeper(Protocol):
    """Who brings, reads and edits the weights of the parameters of one model."""

    def bring(self, unit: int, stays: bool = False) -> bool:
        """Bind the parameters of `unit` if a hooked module or a backward is running; whether one is.

        They are bound until that ends or their room is needed; with `stays`, for as long as the innermost module runs.
        """

    def read(self, unit: int, position: int) -> torch.Tensor:
        """A copy of the newest weights of one parameter, on the compute device."""

    def edit(self, unit: int, position: int, values: torch.Tensor) -> None:
        """Make `values`, of the parameter's shape, its weights."""

    def updates(self, unit: int) -> int:
        """How often the weights of `unit` have changed."""

    def end_edits(self, unit: int) -> None:
        """Every rank has made the edits of `unit` that it makes, which may be none."""

    def miss_gradient(self, name: str) -> None:
        """Code of the user has read `.grad` of the parameter `name`, which is None."""


class Place:
    """One parameter of a model under an engine: whose it is, and how it comes and goes."""

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        unit: int,
        position: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        rules: Mapping[Any, Callable[..., Any]],
    ) -> None:
        """Describes a parameter that is still an ordinary one; `unbind` makes it a placeholder.

        Args:
            parameter: of the model.
            name: in the model.
            unit: the unit that it belongs to.
            position: of its segment in the unit.
            dtype: of the weights that the model computes with.
            shape: of the parameter.
            device: on which the model computes.
            rules: for functions of torch, by function; see `torch_function_rules.RULES`.
        """
        self.parameter, self.name, self.unit, self.position = parameter, name, unit, position
        self.keeper: Keeper | None = None
        """None before the engine is complete, and after it was destroyed; see `attach`."""
        self.trainable = parameter.requires_grad
        self.gradient_hook: Any = None
        """The handle of the engine's own hook, which must stay the last."""
        self.take_gradient: Callable[[torch.Tensor], None] | None = None
        """That hook: adds `.grad` of the parameter, or of a copy of it, to the engine's gradients."""
        self.gathered = False
        """Whether `offload.gathered` has given the parameter memory of its own."""
        self.device, self.rules = device, rules
        self._class = type(parameter)
        self._version = self._address = 0
        self._aliases: weakref.WeakValueDictionary[int, PagedAlias] = weakref.WeakValueDictionary()
        self._nan = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        self.storage_address = self._nan.untyped_storage().data_ptr()

    def attach(self, keeper: Keeper) -> None:
        """Makes `keeper` the one that brings, reads and edits this parameter."""
        self.keeper = keeper

    def detach(self) -> None:
        """Takes the keeper and the gradient hook away, at the end of the engine."""
        self.keeper = self.take_gradient = self.gradient_hook = None

    def hook_gradient(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Registers the hook that moves `.grad` into the engine's gradients.

        Args:
            hook: is called with this parameter, or with a copy of it, after `.grad` was accumulated.

        Returns:
            torch's handle of the hook.
        """
        self.take_gradient = hook
        self.gradient_hook = self.parameter.register_post_accumulate_grad_hook(hook)
        return self.gradient_hook

    def bind(self, values: torch.Tensor) -> None:
        """Make the parameter an ordinary one, over the memory of `values`, of its shape."""
        with plain_tensors():
            self._version, self._address = self.parameter._version, values.data_ptr()
        self.parameter.__dict__.pop("offload_place", None)
        self.parameter.__class__ = self._class
        self.parameter.data = values

    @property
    def changed(self) -> bool:
        """Whether the bound parameter was changed in place, or given other memory."""
        if not self.bound or self.parameter.data_ptr() == self._nan.data_ptr():  # an interrupt came before `bind` ended
            return False
        return (self.parameter._version, self.parameter.data_ptr()) != (self._version, self._address)

    @property
    def thawed(self) -> bool:
        """Whether a parameter that was frozen was told to train while it was bound, when nobody could refuse it."""
        return not self.trainable and self.parameter.requires_grad

    def cannot_train(self) -> UsageError:
        """What `requires_grad_(True)` of a frozen parameter raises."""
        return UsageError(
            f"parameter {self.name} was frozen when offload.initialize took the model, so it has no optimizer states; "
            f"set requires_grad before. What is to train later may be frozen after offload.initialize until then, and "
            f"stays as it is meanwhile"
        )

    def unbind(self) -> None:
        """Make the parameter a placeholder."""
        if not self.bound:
            return
        self.parameter.data = self._nan
        self.parameter.__class__ = Paged
        self.parameter.__dict__["offload_place"] = self

    @property
    def bound(self) -> bool:
        return not isinstance(self.parameter, Paged)

    def gather(self, values: torch.Tensor) -> None:
        """Give the parameter the memory of `values` until `let_go`; no module may use it meanwhile."""
        self.bind(values)
        self.gathered = True

    def let_go(self) -> torch.Tensor:
        """End `gather`: the memory with what was written to it."""
        values = self.parameter.data
        self.gathered = False
        self.unbind()
        return values

    def alias(self) -> torch.Tensor:
        """What `parameter.data` and `parameter.detach()` are: the same placeholder, outside of autograd."""
        alias = make_subclass(PagedAlias, self._nan, False)
        alias.__dict__["offload_place"] = self
        self._aliases[id(alias)] = alias
        return alias

    def leave_aliases(self) -> None:
        """The parameter gets other memory: what its aliases show stays as it is, as it does in torch."""
        for alias in list(self._aliases.values()):
            alias.own = self.read()
        self._aliases.clear()

    def copy(self, requires_grad: bool) -> torch.Tensor:
        """An ordinary parameter with the same weights, that no engine knows."""
        values = self.read()
        with plain_tensors():
            copy: torch.Tensor = nn.Parameter(values, requires_grad)
        copy.__class__ = self._class
        return copy

    def read(self) -> torch.Tensor:
        """A copy of the newest weights, on the compute device."""
        return self.engine.read(self.unit, self.position)

    def read_with_gradient(self) -> torch.Tensor:
        """The same as a leaf of a graph, whose gradient becomes the parameter's."""
        values, updates = self.read(), self.engine.updates(self.unit)

        def take(copy: torch.Tensor) -> None:
            if self.engine.updates(self.unit) != updates:
                raise UsageError(
                    f"backward through a graph made before step(): the weights of {self.name} have changed since"
                )
            assert self.take_gradient is not None
            self.take_gradient(copy)

        values.requires_grad_(True)
        values.register_post_accumulate_grad_hook(take)
        return values

    def edit(self, values: torch.Tensor) -> None:
        """Make `values`, of the parameter's shape, its weights."""
        self.engine.edit(self.unit, self.position, values)

    @property
    def engine(self) -> Keeper:
        if self.keeper is None:
            raise UsageError(
                f"parameter {self.name} has no weights: its engine was destroyed; ask for state_dict() before, or "
                f"resume the run"
            )
        return self.keeper


class PagedAlias(torch.Tensor):
    """A placeholder that autograd does not know: what `detach()` and `.data` of a paged parameter give."""

    offload_place: Place
    own: torch.Tensor | None = None
    """Its memory, once the parameter was given other."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._values()
        copy: torch.Tensor = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._values().__reduce_ex__(protocol)

    def _values(self) -> torch.Tensor:
        return self.offload_place.read() if self.own is None else self.own.clone()


class Paged(nn.Parameter):
    """A parameter whose weights are elsewhere; `Place.unbind` makes one of an ordinary parameter."""

    offload_place: Place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.offload_place.copy(self.requires_grad)
        copy: torch.Tensor = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.offload_place.copy(self.requires_grad).__reduce_ex__(protocol)


def place_of(tensor: Any) -> Place | None:
    """The place of a placeholder; None for any other object."""
    return tensor.offload_place if isinstance(tensor, Paged | PagedAlias) else None


# -- what becomes of a call ------------------------------------------------------------------------------


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place = next((found for value in (*args, *kwargs.values()) if (found := place_of(value)) is not None), None)
    rule = None if place is None else place.rules.get(func)
    if rule is not None:
        return rule(func, *args, **kwargs)
    if asks_for_no_element(func):
        return call_plainly(func, *args, **kwargs)
    return call_with_weights(func, args, kwargs)


def call_plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    with plain_tensors():
        return func(*args, **kwargs)


def call_with_weights(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with weights in the place of placeholders."""
    given: dict[int, Any] = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if place_of(leaf) is not None}
    places: dict[int, Place] = {key: leaf.offload_place for key, leaf in given.items()}
    # A parameter that is brought is an ordinary one from there on: the call does not come back here for it.
    outside = [key for key, leaf in given.items() if getattr(leaf, "own", None) is None and not _bring(places[key])]
    real: dict[int, torch.Tensor] = {}
    for key, leaf in given.items():
        if key in outside:
            with_gradient = torch.is_grad_enabled() and leaf.requires_grad
            real[key] = places[key].read_with_gradient() if with_gradient else places[key].read()
        elif isinstance(leaf, PagedAlias):
            real[key] = places[key].parameter.detach() if leaf.own is None else leaf.own
        elif not places[key].bound:
            raise BudgetError(
                f"{_name(func)} needs {', '.join(place.name for place in places.values())} on the device at one time, "
                f'and their units have no room there together; raise "device_memory" in the "offload" block'
            )
    before = {key: real[key]._version for key in outside}
    args, kwargs = tree_map(lambda value: real.get(id(value), value), (args, kwargs))
    result = func(*args, **kwargs)
    for key in outside:
        if real[key]._version != before[key]:
            check_kind(places[key], given[key], real[key])
            places[key].edit(real[key])
    originals = {id(real[key]): given[key] for key in outside}
    storages = {real[key].untyped_storage().data_ptr(): given[key] for key in outside if real[key].numel()}
    return tree_map(lambda value: _returned(func, value, originals, storages), result) if outside else result


def _bring(place: Place) -> bool:
    return place.engine.bring(place.unit)


def _returned(func: Any, value: Any, originals: dict[int, Any], storages: dict[int, Any]) -> Any:
    """What comes back: a placeholder for itself; never memory that looks like the weights and is a copy of them."""
    if id(value) in originals:
        return originals[id(value)]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        of = storages.get(value.untyped_storage().data_ptr())
        if of is not None:
            raise UsageError(
                f"{_name(func)} would give a view of {of.offload_place.name}, whose weights are in the swap tiers: "
                f"what is written to the view would be lost. Use `with offload.gathered(parameter):`, or clone() first"
            )
    elif type(value).__module__ == "numpy" and hasattr(value, "flags"):
        value.flags.writeable = False  # the same, for numpy() and asarray()
    return value


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


# -- what needs no weights -------------------------------------------------------------------------------


# -- one kind of memory ------------------------------------------------------------------------------------


def check_kind(place: Place, tensor: Any, values: Any) -> None:
    mine, given = _kind(tensor), _kind(values)
    if mine != given:
        raise UsageError(
            f"parameter {place.name} is {mine} for as long as it is under an engine, it cannot become {given}; "
            f"precision and device are set in the config"
        )


def _kind(tensor: Any) -> str:
    order = "" if place_of(tensor) is not None or tensor.is_contiguous() else ", not contiguous,"
    return f"{list(tensor.shape)} {tensor.dtype}{order} on {tensor.device}"
