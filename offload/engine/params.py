"""Placeholders for parameters whose weights are paged out, and the handle that materializes and releases them.

Queries of a `PagedParameter` (shape, dtype, device, hooks, `zeros_like`) need no weights. It occupies no memory of its
own: its storage is one NaN, expanded to the shape. Any other torch function that receives a placeholder is dispatched
to this module:

    a hooked module is running        the weights are fetched, and stay while that module runs
    a backward is running             the weights are fetched, and stay until the backward ends
    neither                           the function receives a copy of the weights. The copy's gradient reaches the
                                      engine like any other. An in-place change of the copy becomes an edit, that is
                                      an update without a gradient
    neither, and the result would     `UsageError`, which names the parameter
    be a view of the copy

So `load_state_dict`, `copy.deepcopy`, an EMA, `parameter.norm()` and an L2 penalty give the same result as with an
ordinary model, and no NaN enters a result silently. A materialized parameter has its original class again and
costs nothing per call. A parameter of a unit that stays on the device keeps its memory, and only changes its class.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from offload.engine.callbacks import ParamOwner
from offload.errors import BudgetError, UsageError
from offload.torch_internals import make_subclass, plain_tensors, set_data, tree_leaves, tree_map

# -- harmless functions --------------------------------------------------------------------------------
#
# The functions of torch that need no element of a parameter, and calls of them on placeholders.


def asks_for_no_element(func: Any) -> bool:
    """Returns True if a function of torch needs none of the values of a parameter that it receives."""
    return func in _HARMLESS or is_harmless_property(func)


def call_plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `func` on placeholders as they are, without dispatch to `__torch_function__`."""
    with plain_tensors():
        return func(*args, **kwargs)


TENSOR: Any = torch.Tensor
"""`torch.Tensor`, typed as Any: in the stubs its properties are tensors, on the class they are descriptors."""


_HARMLESS: frozenset[Any] = frozenset(
    {
        *(
            getattr(TENSOR, name)
            for name in (
                "size dim ndimension numel nelement __len__ element_size is_floating_point is_complex is_signed "
                "is_contiguous stride storage_offset data_ptr untyped_storage get_device is_pinned is_inference "
                "is_shared register_hook retain_grad _is_view new_empty new_zeros new_ones new_full new_tensor "
                "is_same_size"
            ).split()
        ),
        *(
            getattr(torch, name)
            for name in (
                "numel is_floating_point is_complex is_same_size empty_like zeros_like ones_like full_like rand_like "
                "randn_like result_type can_cast"
            ).split()
        ),
        torch.autograd.grad,
        torch.autograd.backward,
    }
)
"""Functions that need no element; `grad` and `backward` identify a parameter by its autograd node alone."""


_WITH_DATA = frozenset({"data", "T", "H", "mT", "mH", "real", "imag", "__cuda_array_interface__"})
"""Properties that return the elements themselves, or their address."""


def is_harmless_property(func: Any) -> bool:
    """Returns True for the getter, setter or deleter of a property that does not return the elements."""
    if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__"):
        return False
    name = getattr(getattr(func, "__self__", None), "__name__", None)
    return name is not None and name not in _WITH_DATA


def name_of(func: Any) -> str:
    """Returns the name of a torch function for messages; for a property, the property's name."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


# -- paged parameter -----------------------------------------------------------------------------------


class StorageForm:
    """How the weights of a parameter are stored: here as one segment of a unit, fetched and read as a whole.

    Another storage form overrides the methods whose results differ. Every method receives the parameter's handle, so a
    form without data serves any number of parameters.
    """

    content = ""
    """The segment's content if its elements are not values of the parameter, such as "nf4"; empty if they are."""

    def attach(self, owner: ParamOwner) -> None:
        """Makes `owner` the object that serves the parameter, as `ParamHandle.attach`."""
        return  # the handle calls the owner directly

    def detach(self) -> None:
        """Removes the owner, at the end of the engine."""
        return

    def parts(self, handle: ParamHandle) -> Sequence[ParamHandle]:
        """Returns the handles of the segments that make up the parameter, each with a unit and a position."""
        return (handle,)

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the values of the parameter, joined from the values of its parts."""
        return values[0]

    def divide(self, values: torch.Tensor) -> Iterable[torch.Tensor]:
        """Returns the values of each part, taken from the values of the parameter."""
        return (values,)

    def fetch(self, handle: ParamHandle, stays: bool) -> bool:
        """Materializes the parameter if a hooked module or a backward is running, and returns True if one is."""
        return handle.engine.fetch(handle.unit, stays)

    def here(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns the parameter, or a view of it, if a hooked module or a backward is running; None otherwise."""
        if not handle.fetch():
            return None
        return handle.parameter if handle.materialized else handle.engine.frozen_view(handle.unit, handle.position)

    def item(self, handle: ParamHandle, index: Any) -> torch.Tensor | None:
        """Returns `parameter[index]` if this form reads less than the whole parameter for it; None otherwise."""
        return None

    def read(self, handle: ParamHandle) -> torch.Tensor:
        """Returns a copy of the newest weights, on the compute device."""
        return handle.engine.read(handle.unit, handle.position)

    def edit(self, handle: ParamHandle, values: torch.Tensor) -> None:
        """Replaces the weights by `values`, which must have the parameter's shape."""
        handle.engine.edit(handle.unit, handle.position, values)

    def unit_for_others(self, handle: ParamHandle) -> int:
        """Returns the unit to bind whenever a module runs that uses the parameter but does not own it.

        Raises:
            UsageError: if no unit contains all of the parameter.
        """
        return handle.unit

    def saved_keys(self, handle: ParamHandle, state: dict[str, Any], prefix: str, name: str) -> list[str]:
        """Returns the keys of a state dict under which a module has just saved the parameter.

        Args:
            handle: the parameter's handle.
            state: the state dict, whose last entries are the module's.
            prefix: beginning of the module's keys.
            name: name of the parameter in the module.
        """
        if prefix + name in state:
            return [prefix + name]
        # The module's own `_save_to_state_dict` has saved it under other names.
        return [key for key in last_keys(state, prefix) if handle.is_at(state[key])]

    def saved(self, handle: ParamHandle, value: Any, copy: Callable[[], torch.Tensor]) -> Any:
        """Returns the entry of a state dict in place of `value`, which a module has saved.

        Args:
            handle: the parameter's handle.
            value: the placeholder, a view of it, or another object that the module has saved under the parameter's
                name.
            copy: returns the copy of the weights on the CPU that all entries of a tied parameter share.
        """
        if not handle.is_at(value) or value.shape == handle.shape:
            return copy()
        return copy().view(value.shape) if value.numel() == math.prod(handle.shape) else value


def last_keys(state: dict[str, Any], prefix: str) -> list[str]:
    """Returns the keys of the module that is being saved: the last keys of the state dict, with its prefix."""
    return list(itertools.takewhile(lambda key: key.startswith(prefix), reversed(state)))


class ParamHandle:
    """One parameter of a model under an engine, switched between placeholder and weights on behalf of its owner."""

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        form: StorageForm,
        unit: int,
        position: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        rules: Mapping[Any, Callable[..., Any]],
    ) -> None:
        """Describes a parameter that is still an ordinary one; `release` makes it a placeholder.

        Args:
            parameter: the parameter of the model. Its identity never changes.
            name: name of the parameter in the model.
            form: how its weights are stored.
            unit: index of the unit that contains the parameter; -1 if several contain its parts.
            position: index of the parameter's segment in the unit; -1 if it has several.
            dtype: dtype of the weights that the model computes with.
            shape: shape of the parameter.
            device: device that the model computes on.
            rules: replacements for torch functions, by function; see `torch_functions.RULES`.
        """
        self.parameter, self.name, self.form, self.unit, self.position = parameter, name, form, unit, position
        self.owner: ParamOwner | None = None
        """The object that serves this parameter. None before the engine is complete and after its end; see `attach`."""
        self.trainable = parameter.requires_grad
        self.gradient_hook: Any = None
        """torch's handle of the engine's gradient hook, which must remain the last hook of the parameter."""
        self.take_gradient: Callable[[torch.Tensor], None] | None = None
        """The engine's gradient hook: moves `.grad` of the parameter, or of a copy, into the engine's gradients."""
        self.gathered = False
        """True while `offload.gathered` gives the parameter memory of its own."""
        self.device, self.rules, self.shape, self.dtype, self._class = device, rules, shape, dtype, type(parameter)
        self._version = self._address = -1
        self._aliases: weakref.WeakValueDictionary[int, PagedParameterView] = weakref.WeakValueDictionary()
        # One element, expanded to the shape; NaN makes any use of the element visible.
        self._nan = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        self.storage_address = self._nan.untyped_storage().data_ptr()
        self._own, self._own_address = self._nan, self.storage_address
        """Memory of the placeholder: one element, or the weights if the unit stays on the device."""

    @property
    def parts(self) -> Sequence[ParamHandle]:
        """The handles of the segments that make up the parameter: this one, or others."""
        return self.form.parts(self)

    def attach(self, owner: ParamOwner) -> None:
        """Makes `owner` the object that fetches, reads and edits this parameter."""
        self.owner = owner
        self.form.attach(owner)

    def detach(self) -> None:
        """Removes the owner and the gradient hook, at the end of the engine."""
        self.owner = self.take_gradient = self.gradient_hook = None
        self.form.detach()

    def hook_gradient(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Registers the hook that moves `.grad` into the engine's gradients, and returns torch's handle of the hook.

        Args:
            hook: receives this parameter, or a copy of it, after `.grad` was accumulated. Runs on an autograd thread.
        """
        self.take_gradient = hook
        self.gradient_hook = self.parameter.register_post_accumulate_grad_hook(hook)
        return self.gradient_hook

    @staticmethod
    def materialize(handles: Iterable[ParamHandle], values: Iterable[torch.Tensor]) -> None:
        """Makes parameters ordinary ones over the memory of `values`, whose shapes must be the parameters'."""
        # One call for all parameters of a unit, as in `show` and `release`, because they run at each use of a unit.
        for handle, memory in zip(handles, values, strict=True):
            parameter = handle.parameter
            # The class comes first: an assignment to `.data` of a placeholder would dispatch to its rule.
            parameter.__class__ = handle._class
            parameter.data = memory
            handle._version, handle._address = parameter._version, parameter.data_ptr()
            parameter.__dict__.pop("offload_handle", None)

    def settle_in(self, weights: torch.Tensor) -> None:
        """Makes the parameter an ordinary one over `weights`, memory that it keeps when it becomes a placeholder."""
        self._own, self._own_address = weights, weights.data_ptr()
        self.materialize([self], [weights])

    def move_out(self) -> None:
        """Takes away the memory of `settle_in`."""
        self.show([self])
        self._own, self._own_address = self._nan, self.storage_address
        self.release([self])

    @staticmethod
    def show(handles: Iterable[ParamHandle]) -> None:
        """Makes parameters that have memory of their own (`settle_in`) ordinary ones again."""
        for handle in handles:
            parameter = handle.parameter
            parameter.__class__ = handle._class
            handle._version, handle._address = parameter._version, handle._own_address
            parameter.__dict__.pop("offload_handle", None)

    @staticmethod
    def release(handles: Iterable[ParamHandle]) -> list[ParamHandle]:
        """Makes parameters placeholders, unless gathered; returns those changed in place or given other memory."""
        changed = []
        for handle in handles:
            parameter = handle.parameter
            if handle.gathered or type(parameter) is PagedParameter:
                continue
            address = parameter.data_ptr()
            if parameter._version != handle._version or address != handle._address:
                changed.append(handle)
            # The data comes first, while the parameter is still an ordinary one: see `materialize`.
            if address != handle._own_address:
                try:
                    parameter.data = handle._own
                except RuntimeError:  # torch refuses it for some types of device
                    set_data(parameter, handle._own)
            parameter.__dict__["offload_handle"] = handle
            parameter.__class__ = PagedParameter
        return changed

    def forgive_changes(self) -> None:
        """Marks the parameter as unchanged, whatever torch has counted; see `release`."""
        self._version = self.parameter._version

    @property
    def thawed(self) -> bool:
        """True if a frozen parameter was set to train while it was materialized, and so could not refuse."""
        return not self.trainable and self.parameter.requires_grad

    def cannot_train(self) -> UsageError:
        """Returns the error that `requires_grad_(True)` of a frozen parameter raises."""
        return UsageError(
            f"parameter {self.name} was frozen when offload.initialize took the model, so it has no optimizer states; "
            "set requires_grad before offload.initialize. A parameter that shall train later may be frozen after "
            "offload.initialize"
        )

    @property
    def materialized(self) -> bool:
        """True if the parameter is an ordinary one now, over real memory."""
        return type(self.parameter) is not PagedParameter  # nn.Parameter's isinstance is slow Python

    def is_at(self, tensor: Any) -> bool:
        """Returns True if `tensor` is a placeholder of this parameter, or shares the memory of its weights."""
        if handle_of(tensor) is not None:
            return handle_of(tensor) is self
        return self.materialized and isinstance(tensor, torch.Tensor) and tensor.data_ptr() == self.parameter.data_ptr()

    def gather(self, values: torch.Tensor) -> None:
        """Gives the parameter the memory of `values` until `let_go`; no module may use the parameter meanwhile."""
        self.materialize([self], [values])
        for handle in (self, *self.parts):
            handle.gathered = True

    def let_go(self) -> torch.Tensor:
        """Ends `gather` and returns its memory, with all changes that the user has written to it."""
        values = self.parameter.data
        for handle in (self, *self.parts):
            handle.gathered = False
        self.release([self])
        return values

    def alias(self, view: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the result of `parameter.data` and `parameter.detach()`: a placeholder outside of autograd.

        Args:
            view: A view of the whole placeholder, perhaps of another shape, which becomes the alias.
        """
        alias: Any = make_subclass(PagedParameterView, self._nan, False) if view is None else view
        alias.__class__ = PagedParameterView
        alias.__dict__["offload_handle"] = self
        # Held weakly: `leave_aliases` copies weights only for an alias that the user still holds.
        self._aliases[id(alias)] = alias
        return cast("torch.Tensor", alias)

    def leave_aliases(self) -> None:
        """Detaches all aliases before the parameter receives other memory.

        Each alias receives a copy of the present weights, because in torch an alias keeps the memory from which it was
        made.
        """
        for alias in list(self._aliases.values()):
            alias.own = alias._values()
        self._aliases.clear()

    def copy(self, requires_grad: bool) -> torch.Tensor:
        """Returns an ordinary parameter with the same weights, which belongs to no engine."""
        values = self.read()
        with plain_tensors():
            copy: torch.Tensor = nn.Parameter(values, requires_grad)
        copy.__class__ = self._class
        return copy

    def fetch(self, stays: bool = False) -> bool:
        """Materializes the unit if a hooked module or a backward is running, and returns True if one is."""
        return self.form.fetch(self, stays)

    def here(self) -> torch.Tensor | None:
        """Returns the parameter, or a view of it, if a hooked module or a backward is running; None otherwise."""
        return self.form.here(self)

    def read(self) -> torch.Tensor:
        """Returns a copy of the newest weights, on the compute device."""
        return self.form.read(self)

    def read_with_gradient(self) -> torch.Tensor:
        """Returns a copy of the newest weights, whose gradient becomes the parameter's."""
        return self.form.join([part._leaf() for part in self.parts])

    def _leaf(self) -> torch.Tensor:
        """Returns a copy of the newest weights of one segment as an autograd leaf."""
        values, updates = self.read(), self.engine.updates(self.unit)

        def take(copy: torch.Tensor) -> None:
            # Runs on an autograd thread at any later time. After a step in between, this would be a gradient of old
            # weights.
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
        """Replaces the weights by `values`, which must have the parameter's shape."""
        self.form.edit(self, values)

    @property
    def engine(self) -> ParamOwner:
        """The owner. Raises `UsageError` if the engine was destroyed."""
        if self.owner is None:
            raise UsageError(
                f"parameter {self.name} has no weights, because its engine was destroyed: call state_dict() before "
                "destroy(), or resume the run, or `offload export` what it has kept"
            )
        return self.owner


class PagedParameterView(torch.Tensor):
    """A placeholder outside of autograd: `detach()` and `.data` of a paged parameter, or a view of all of it."""

    offload_handle: ParamHandle
    own: torch.Tensor | None = None
    """The view's own memory, set once the parameter has received other memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._values()
        return cast("torch.Tensor", memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._values().__reduce_ex__(protocol)

    def _values(self) -> torch.Tensor:
        return self.offload_handle.read().view(self.shape) if self.own is None else self.own.clone()


class PagedParameter(nn.Parameter):
    """A parameter whose weights are paged out. `ParamHandle.release` turns an ordinary parameter into one."""

    offload_handle: ParamHandle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.offload_handle.copy(self.requires_grad)
        return cast("torch.Tensor", memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.offload_handle.copy(self.requires_grad).__reduce_ex__(protocol)


def handle_of(tensor: Any) -> ParamHandle | None:
    """Returns the handle of a placeholder, or None for any other object."""
    # By type, since nn.Parameter's isinstance is slow Python; neither class has subclasses.
    return tensor.offload_handle if type(tensor) in (PagedParameter, PagedParameterView) else None


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies the rule of `func`, if there is one; otherwise calls `func` with weights if it needs any element."""
    handle = next((first for value in (*args, *kwargs.values()) if (first := handle_of(value)) is not None), None)
    rule = None if handle is None else handle.rules.get(func)
    if rule is not None:
        return rule(func, *args, **kwargs)
    if asks_for_no_element(func):
        return call_plainly(func, *args, **kwargs)
    return call_with_weights(func, args, kwargs)


def call_with_weights(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `func` with weights in place of the placeholders among its arguments, which may be nested.

    In a running module or backward the parameters are fetched and materialized. Otherwise `func` receives copies: an
    in-place change of a copy is written back as an edit, and a result that is a copy is replaced by its placeholder.

    Raises:
        BudgetError: if the units of all arguments do not fit on the device together.
        UsageError: if the result would be a view of a copy, or if an in-place change alters shape, dtype or device.
    """
    leaves: dict[int, Any] = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if handle_of(leaf) is not None}
    handles: dict[int, ParamHandle] = {key: leaf.offload_handle for key, leaf in leaves.items()}
    # A fetched parameter is an ordinary one from now on: torch does not dispatch to this module for it again.
    here = {key: handles[key].here() for key, leaf in leaves.items() if getattr(leaf, "own", None) is None}
    outside = [key for key, tensor in here.items() if tensor is None]
    real: dict[int, torch.Tensor] = {}
    for key, leaf in leaves.items():
        tensor: Any = here.get(key)
        if key in outside:
            with_gradient = torch.is_grad_enabled() and leaf.requires_grad
            real[key] = handles[key].read_with_gradient() if with_gradient else handles[key].read().view(leaf.shape)
        elif isinstance(leaf, PagedParameterView):
            real[key] = tensor.detach().view(leaf.shape) if leaf.own is None else leaf.own
        elif tensor is not None and tensor is not handles[key].parameter:
            real[key] = tensor
        # A later fetch has released the unit of an earlier one to make room.
        elif not handles[key].materialized:
            raise BudgetError(
                f"{name_of(func)} needs {', '.join(handle.name for handle in handles.values())} on the device at one "
                'time, but their units do not fit together; raise "device_memory" in the "offload" block'
            )
    # Copied are parameters outside of a run, and parameters whose parts lie in several units.
    copied = [key for key in real if not isinstance(leaves[key], PagedParameterView) or key in outside]
    before = {key: real[key]._version for key in copied}
    args, kwargs = tree_map(lambda value: real.get(id(value), value), (args, kwargs))
    result = func(*args, **kwargs)
    for key in copied:
        # The version counter is torch's own record of in-place changes, so `func` needs no table of mutating functions.
        if real[key]._version != before[key]:
            check_kind(handles[key], leaves[key], real[key])
            handles[key].edit(real[key].view(handles[key].shape))
    originals = {id(real[key]): leaves[key] for key in outside}
    storages = {real[key].untyped_storage().data_ptr(): leaves[key] for key in outside if real[key].numel()}
    return tree_map(lambda value: _returned(func, value, originals, storages), result) if outside else result


def _returned(func: Any, value: Any, originals: dict[int, Any], storages: dict[int, Any]) -> Any:
    """Returns the object that the user receives for one leaf `value` of a result of `func`.

    A copy of weights becomes its placeholder again (`originals`, by the copy's id). A view of a copy (`storages`, by
    address) would look like the weights while writes to it were lost: such a tensor is refused, and such a numpy array
    becomes read-only.
    """
    if id(value) in originals:
        return originals[id(value)]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        of = storages.get(value.untyped_storage().data_ptr())
        if of is not None:
            raise UsageError(
                f"{name_of(func)} would give a view of {of.offload_handle.name}, whose weights are in the swap tiers: "
                "writes to the view would be lost. Use `with offload.gathered(parameter):`, or clone() first"
            )
    elif type(value).__module__ == "numpy" and hasattr(value, "flags"):
        value.flags.writeable = False  # a view by numpy() or asarray()
    return value


def check_kind(handle: ParamHandle, tensor: Any, values: Any) -> None:
    """Raises `UsageError` unless `values` have the shape, dtype, memory order and device of `tensor`."""
    current, new = _kind(tensor), _kind(values)
    if current != new:
        raise UsageError(
            f"parameter {handle.name} is {current} while an engine manages it, and cannot become {new}; precision and "
            "device are set in the config"
        )


def _kind(tensor: Any) -> str:
    """Returns shape, dtype, memory order and device of a tensor as text."""
    order = "" if handle_of(tensor) is not None or tensor.is_contiguous() else ", not contiguous,"
    return f"{list(tensor.shape)} {tensor.dtype}{order} on {tensor.device}"
