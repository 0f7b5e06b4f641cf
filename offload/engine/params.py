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
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import __file__ as grad_scaler_file
from torch.distributed.utils import __file__ as wrappers_file
from torch.nn import functional as F
from torch.nn.utils.clip_grad import __file__ as clip_grad_file
from torch.utils.checkpoint import __file__ as checkpoint_file

from offload.errors import BudgetError, UsageError
from offload.torch_internals import SHALLOW_COPY_QUERY, make_subclass, plain_tensors, set_data, tree_leaves, tree_map

if TYPE_CHECKING:
    from offload.engine.edits import WeightEdits

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

    def attach(self, owner: WeightEdits) -> None:
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
        return handle.engine.hooks.fetch(handle.unit, stays)

    def here(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns the parameter, or a view of it, if a hooked module or a backward is running; None otherwise."""
        if not handle.fetch():
            return None
        if handle.materialized:
            return handle.parameter
        # A frozen parameter that `fetch` has left a placeholder, in a recomputation.
        return handle.engine.unit_views.frozen_view(handle.unit, handle.position)

    def item(self, handle: ParamHandle, index: Any) -> torch.Tensor | None:
        """Returns `parameter[index]` if this form reads less than the whole parameter for it; None otherwise."""
        return None

    def call(self, handle: ParamHandle, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of `func` if this form needs less than the whole parameter for it; None otherwise.

        `func` is a function of `RULES` that calls this method: a lookup of rows, or a product.
        """
        return None

    def leaves(self, handle: ParamHandle) -> list[torch.Tensor]:
        """Returns copies of the newest weights of each part, as autograd leaves whose gradients become the parts'."""
        return [part._leaf() for part in self.parts(handle)]

    def read(self, handle: ParamHandle) -> torch.Tensor:
        """Returns a copy of the newest weights, on the compute device."""
        return handle.engine.read(handle.unit, handle.position)

    def edit(self, handle: ParamHandle, values: torch.Tensor) -> None:
        """Replaces the weights by `values`, which must have the parameter's shape."""
        handle.engine.edit(handle.unit, handle.position, values)

    def unit_for_others(self, handle: ParamHandle) -> int:
        """Returns the unit to bind whenever a module runs that uses the parameter but does not own it.

        Raises `UsageError` if no unit contains all of the parameter.
        """
        return handle.unit

    def saved_keys(self, handle: ParamHandle, state: dict[str, Any], prefix: str, name: str) -> list[str]:
        """Returns the keys of a state dict under which a module has just saved the parameter, its own `name`.

        The last entries of `state` are the module's, whose keys begin with `prefix`.
        """
        if prefix + name in state:
            return [prefix + name]
        # The module's own `_save_to_state_dict` has saved it under other names.
        return [key for key in last_keys(state, prefix) if handle.is_at(state[key])]

    def saved(self, handle: ParamHandle, value: Any, copy: Callable[[], torch.Tensor]) -> Any:
        """Returns the entry of a state dict in place of `value`, which a module has saved under the parameter's name.

        That is the placeholder, a view of it, or another object. `copy` returns the copy of the weights on the CPU that
        all entries of a tied parameter share.
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
    ) -> None:
        """Describes a parameter that is still an ordinary one; `release` makes it a placeholder.

        Its identity never changes. `unit`, and `position` of its segment there, are -1 if several units contain its
        parts. The model computes with weights of `dtype`, on `device`.
        """
        self.parameter, self.name, self.form, self.unit, self.position = parameter, name, form, unit, position
        self.owner: WeightEdits | None = None
        """The object that serves this parameter. None before the engine is complete and after its end; see `attach`."""
        self.trainable = parameter.requires_grad
        self.gradient_hook: Any = None
        """torch's handle of the engine's gradient hook, which must remain the last hook of the parameter."""
        self.take_gradient: Callable[[torch.Tensor], None] | None = None
        """The engine's gradient hook: moves `.grad` of the parameter, or of a copy, into the engine's gradients."""
        self.gathered = False
        """True while `offload.gathered` gives the parameter memory of its own."""
        self.device, self.shape, self.dtype, self._class = device, shape, dtype, type(parameter)
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

    def attach(self, owner: WeightEdits) -> None:
        """Makes `owner` the object that fetches, reads and edits this parameter."""
        self.owner = owner
        self.form.attach(owner)

    def detach(self) -> None:
        """Removes the owner and the gradient hook, at the end of the engine."""
        self.owner = self.take_gradient = self.gradient_hook = None
        self.form.detach()

    def hook_gradient(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Registers the hook that moves `.grad` into the engine's gradients, and returns torch's handle of the hook.

        On an autograd thread it receives this parameter, or a copy of it, after `.grad` was accumulated.
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

        A `view` of the whole placeholder, perhaps of another shape, becomes the alias.
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
        return self.form.join(self.form.leaves(self))

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
    def engine(self) -> WeightEdits:
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
    rule = RULES.get(func)
    if rule is not None and any(handle_of(value) is not None for value in (*args, *kwargs.values())):
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


# -- rules ---------------------------------------------------------------------------------------------
#
# Rules for the torch functions that a placeholder answers in its own way. Every rule takes the torch function and its
# arguments, and returns the result that the user receives.


_LIBRARIES = frozenset({"offload", "torch", "transformers", "accelerate", "peft", "trl"})
"""Libraries that read `.grad` for their own purposes and cope with None."""


def _alias(func: Any, tensor: Any) -> Any:
    """Implements `detach()` and `.data`, which need no elements yet."""
    # DistributedDataParallel detaches every parameter to broadcast it, in torch.distributed.utils.
    if _is_called_by(wrappers_file):
        raise UsageError(
            "DistributedDataParallel copies weights and sums gradients, which the engine does on several ranks itself: "
            "use the engine, or its model, without it; a loop of Accelerate imports offload.hf.Accelerator in place of "
            "accelerate.Accelerator"
        )
    own = getattr(tensor, "own", None)
    if own is not None:
        return own.detach()
    # Reentrant checkpointing detaches the arguments of its function in the backward, as leaves of a graph of its own.
    if _is_called_by(checkpoint_file) and (weights := tensor.offload_handle.here()) is not None:
        return call_plainly(func, weights).view(tensor.shape)
    # A view may have another shape than the parameter.
    return tensor.offload_handle.alias(None if isinstance(tensor, PagedParameter) else call_plainly(func, tensor))


def _address(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `data_ptr()`, `untyped_storage()`, `storage_offset()`, `stride()` and `is_contiguous()`.

    A caller that asks while a module runs will read memory without calling another torch function, as a launcher of
    Triton kernels does, so the weights are fetched and stay while the innermost module runs. The strides of a
    placeholder are all 0: a kernel that was given those, and the address of the weights, would read one element.
    Otherwise an address only shows whether two parameters are the same.
    """
    handle, own = tensor.offload_handle, getattr(tensor, "own", None)
    if own is not None:
        return func(own, *args, **kwargs)
    if handle.owner is not None and handle.fetch(stays=True):
        tensor = handle.parameter.detach().view(tensor.shape)
    return call_plainly(func, tensor, *args, **kwargs)


def _set_data(func: Any, tensor: Any, values: Any) -> None:
    """Implements the assignment to `.data`: the values become an edit, since a placeholder has no memory to replace."""
    handle = tensor.offload_handle
    if values is tensor or (handle_of(values) is handle and getattr(values, "own", None) is None):
        return  # the parameter's own memory
    check_kind(handle, tensor, values)
    if not isinstance(tensor, PagedParameter):
        raise UsageError(
            f"`.data` of a tensor that `.data` or detach() of {handle.name} returned cannot be set; set `.data` of the "
            "parameter"
        )
    with torch.no_grad():
        values = values.detach().clone()  # before the aliases receive copies: `values` may be one
        # In a running module the weights are materialized, and an alias shares their memory, as in torch.
        if not handle.fetch():
            handle.leave_aliases()
        tensor.copy_(values)


def _index(func: Any, tensor: Any, index: Any) -> Any:
    """Implements `tensor[index]`; fetches only the item if the parameter's form supports that."""
    handle = handle_of(tensor)
    item = None
    if handle is not None and getattr(tensor, "own", None) is None and tensor.shape == handle.shape:
        item = handle.form.item(handle, index)
    if item is None:
        return call_with_weights(func, (tensor, index), {})
    return item if isinstance(tensor, PagedParameter) else item.detach()


def _lookup_or_product(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `F.embedding` and `F.linear`; fetches less than the whole weight if its form supports that."""
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    handle = handle_of(weight)
    result = None if handle is None else handle.form.call(handle, func, args, kwargs)
    return call_with_weights(func, args, kwargs) if result is None else result


def _is_compatible(func: Any, tensor: Any, values: Any) -> bool:
    """Answers the query of `nn.Module.to` and others about how to replace a parameter."""
    handle = handle_of(tensor)
    if handle is not None:
        check_kind(handle, tensor, values)
    return bool(call_plainly(func, tensor, values))


def _copy(func: Any, tensor: Any, source: Any, non_blocking: bool = False) -> Any:
    """Implements `copy_`. Values of a higher precision than the weights' are kept, since the master can store them."""
    handle = handle_of(tensor)
    if handle is None or getattr(tensor, "own", None) is not None or handle_of(source) is not None or handle.fetch():
        return call_with_weights(func, (tensor, source), {})
    if torch.is_grad_enabled() and tensor.requires_grad:
        return call_with_weights(func, (tensor, source), {})  # raises torch's own error: an in-place change of a leaf
    # The edit sets every element, so the old weights are not read.
    handle.edit(source.detach().expand(tensor.shape).reshape(handle.shape))
    return tensor


def _set_requires_grad(func: Any, tensor: Any, value: bool = True) -> Any:
    """Implements `requires_grad_()` and the assignment; refuses to train a parameter that has no optimizer states."""
    handle = tensor.offload_handle
    if value and isinstance(tensor, PagedParameterView):
        raise UsageError(
            f"this is the memory of {handle.name}, whose weights are in the swap tiers; clone() this tensor to make a "
            "parameter of its own"
        )
    if value and not handle.trainable:
        raise handle.cannot_train()
    return call_plainly(func, tensor, value)


def _set_grad(func: Any, tensor: Any, value: Any = None) -> None:
    if value is not None:
        raise UsageError(
            f"the gradient of {tensor.offload_handle.name} cannot be set: gradients are in the engine, which "
            f"backward() adds to; offload.safe_set_full_grad sets one"
        )
    call_plainly(func, tensor, value)


def _get_grad(func: Any, tensor: Any) -> Any:
    """Returns `.grad`, which is None between backwards, and reports user code that reads it.

    Code of torch that clips by `.grad` would compute a norm of 0 and clip nothing, and a GradScaler would unscale
    nothing, so both are refused.
    """
    # torch skips a parameter whose `.grad` is None, without an error.
    if _is_called_by(clip_grad_file):
        raise UsageError(
            "gradients are in the engine, where torch.nn.utils cannot clip them: step() clips by gradient_clipping "
            "of the config, engine.clip_grad_norm_(max_norm) sets another norm for the next step, and "
            "engine.get_global_grad_norm() gives the norm after it; a loop of Accelerate imports "
            "offload.hf.Accelerator in place of accelerate.Accelerator, whose clip_grad_norm_ is the engine's"
        )
    if _is_called_by(grad_scaler_file):
        raise UsageError(
            "gradients are in the engine, where a GradScaler finds none to unscale: leave the scaler out and call "
            'engine.step(); with "fp16": {"enabled": true} in the config the engine scales the loss, unscales the '
            "gradients and leaves out a step whose gradients are not finite, and other dtypes need no scale"
        )
    gradient = call_plainly(func, tensor)
    if gradient is not None:
        return gradient
    caller = _caller()
    if caller.startswith("peft.tuners.adalora"):
        raise UsageError(
            "AdaLoRA chooses the ranks of its adapters by their gradients, which are in the engine: leave "
            "update_and_allocate out, so that the ranks stay init_r, or train a peft.LoraConfig"
        )
    handle = handle_of(tensor)
    of_a_library = not caller or caller.partition(".")[0] in _LIBRARIES
    if handle is not None and handle.owner is not None and not of_a_library:
        handle.owner.miss_gradient(handle.name)
    return None


def _caller() -> str:
    """Returns the name of the module that called the torch function; "" if there is none."""
    frame: types.FrameType | None = sys._getframe()
    # The first frame outside of the dispatch is the caller's.
    while frame is not None and _module_of(frame) == __name__:
        frame = frame.f_back
    return "" if frame is None else _module_of(frame)


def _is_called_by(file: str) -> bool:
    """Returns True if the torch function was called in `file` of torch, directly or through other code of torch."""
    frame: types.FrameType | None = sys._getframe()
    # The first frame that is neither the dispatch's nor torch's belongs to the code that called torch.
    while frame is not None and ((name := _module_of(frame)) == __name__ or name.partition(".")[0] == "torch"):
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _convert(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements `to`, `half`, `cuda` …: the same parameter if nothing would change, as in torch; otherwise a copy."""
    if handle_of(tensor) is None:
        return call_plainly(func, tensor, *args, **kwargs)  # x.to(parameter) needs only dtype and device
    form = kwargs.pop("memory_format", None)
    if form not in (None, torch.preserve_format, torch.contiguous_format):
        raise UsageError(
            f"parameter {tensor.offload_handle.name} is stored contiguously in the swap tiers, so it cannot become "
            f"{form}"
        )
    # torch parses the many signatures of `to`: one element shows the dtype and the device that result.
    probe = call_plainly(func, torch.empty((), dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    if (probe.dtype, probe.device) == (tensor.dtype, tensor.device) and not kwargs.get("copy", False):
        return tensor
    return call_with_weights(func, (tensor, *args), kwargs)


class _GraphOfParameter(torch.Tensor):
    """A view of a whole parameter that was made between steps, with the parameter's graph and without its values.

    Code of torch and of users makes one to reach the node that accumulates the parameter's gradient.
    """

    parameter_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_harmless_property(func):  # `grad_fn` and others
            return call_plainly(func, *args, **(kwargs or {}))
        names = [leaf.parameter_name for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        raise UsageError(
            f"{name_of(func)} of a view of {names[0]} that was made between steps with the parameter's graph, so the "
            "view has no values: use `with offload.gathered(parameter):`, or clone() the parameter"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a view of {self.parameter_name} with its graph and no values"


def _like(func: Any, tensor: Any, other: Any) -> Any:
    """Implements `view_as` and others whose second argument only supplies a shape.

    A view of the whole parameter, outside of a run, is another placeholder: writes through the view are edits.
    """
    handle = handle_of(tensor)
    if handle is None:
        return call_plainly(func, tensor, other)
    if getattr(tensor, "own", None) is not None or handle.engine.hooks.runs_now():
        return call_with_weights(func, (tensor, other), {})
    view, with_graph = call_plainly(func, tensor, other), torch.is_grad_enabled() and tensor.requires_grad
    # The gradient of a parameter in several parts goes to the parts, not to the parameter's own accumulation node.
    if view.numel() != tensor.numel() or (with_graph and handle.take_gradient is None):
        return call_with_weights(func, (tensor, other), {})
    if not with_graph:
        return handle.alias(view.detach())  # to torch even a view without a graph requires a gradient
    view.__class__ = _GraphOfParameter
    view.__dict__["parameter_name"] = handle.name
    return view


def _represent(func: Any, tensor: Any, *_: Any, **__: Any) -> str:
    handle = tensor.offload_handle
    return (
        f"PagedParameter({handle.name}, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device}, "
        f"requires_grad={tensor.requires_grad})"
    )


def _register_after_gradient(func: Any, tensor: Any, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers a hook of the user before the engine's own, which takes the gradient away and so must run last."""
    handle = call_plainly(func, tensor, hook)
    own = tensor.offload_handle.gradient_hook
    if own is not None:
        # torch offers no public way to reorder these hooks.
        hooks = tensor._post_accumulate_grad_hooks
        hooks[own.id] = hooks.pop(own.id)  # torch calls hooks in the order of this dict
    return handle


RULES: Mapping[Any, Callable[..., Any]] = {
    TENSOR.detach: _alias,
    torch.detach: _alias,
    TENSOR.data.__get__: _alias,
    TENSOR.data.__set__: _set_data,
    **{
        getattr(TENSOR, name): _address
        for name in "data_ptr untyped_storage storage_offset stride is_contiguous".split()
    },
    SHALLOW_COPY_QUERY: _is_compatible,
    TENSOR.__getitem__: _index,
    F.embedding: _lookup_or_product,
    F.linear: _lookup_or_product,
    TENSOR.copy_: _copy,
    TENSOR.requires_grad_: _set_requires_grad,
    TENSOR.requires_grad.__set__: _set_requires_grad,
    TENSOR.grad.__get__: _get_grad,
    TENSOR.grad.__set__: _set_grad,
    TENSOR.__repr__: _represent,
    TENSOR.__format__: _represent,
    TENSOR.register_post_accumulate_grad_hook: _register_after_gradient,
    **{
        # `cuda` and `xpu` do not exist in every build of torch.
        getattr(TENSOR, name): _convert
        for name in "to type_as half float double bfloat16 cpu cuda xpu".split()
        if hasattr(TENSOR, name)
    },
    **{getattr(TENSOR, name): _like for name in "view_as expand_as reshape_as".split()},
}
