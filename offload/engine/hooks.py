"""Hooks that fetch a unit's weights when its modules run, take gradients, and notice when a backward begins and ends.

    forward    a *site* (a hooked module) binds its units in its pre-hook and releases them in its post-hook, unless
               the enclosing site holds them. A use of a parameter of another unit fetches that unit on demand. It
               stays until the outermost site ends or the memory is needed.
    backward   unpacking a saved view fetches its unit for as long as the view lives (`unit_views`). If Python code in
               a backward uses a parameter, its unit stays until the backward ends or the memory is needed.

The outermost site pushes the saved-tensor hooks and pops them, so `model(...)` is as safe as `engine(...)`. Hooks act
only for the module on which they were installed: a deep copy is an ordinary module. Layers of torch lose theirs.

Threads. Forward hooks run on the caller's thread, all others on autograd's; one backward runs at a time.

[Note: casts] Under autocast torch caches the cast of each fp32 weight on the device until the context ends. The casts
of all units would stay there. So the cache is off while a site runs, and a weight used twice is cast twice.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine import _native
from offload.engine._native import GradientHook, Handle, Pack, Plain, Unpack
from offload.engine.callbacks import ActivationPolicy, EngineCallbacks
from offload.engine.gradients import GradientAccumulator
from offload.engine.params import ParamHandle, handle_of
from offload.engine.unit_views import UnitViews
from offload.errors import UsageError
from offload.interrupts import is_on_stack, uninterrupted
from offload.layout.units import external_parameters, layers_inside
from offload.metrics.meter import NO_SPANS, ComputeSpans
from offload.swapper.pager import Pager
from offload.swapper.policy import PassKind
from offload.timeline import OFF, Phase, Timeline
from offload.torch_internals import (
    call_after_backward,
    has_no_storage,
    inner_tensors,
    inside_backward,
    module_call,
    outside_of_compiled_code,
    plain_tensors,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saves_checkpoint_input,
    tensors_in,
    top_saved_tensor_hooks,
    tree_leaves,
    tree_map,
    under_modes,
)

# -- saved tensors -------------------------------------------------------------------------------------
#
# Saved-tensor hooks of the engine: a view of weights is saved as a handle, any other tensor as it is.
#
# A saved view of a device buffer is packed as (unit, update count, dtype, size, stride, offset). Unpacking makes the
# view again from the unit's weights, in whatever tier they are by then; so a graph contains no weights. A wrapper of
# views of weights (`_make_wrapper_subclass`) is packed as its class and its packed inner tensors. Saved-tensor hooks
# disable torch's own check for in-place changes, so any other tensor is packed with its version, which is compared at
# unpack. If other hooks are active, of the user (`save_on_cpu`) or of checkpointing, other tensors are passed to those.
#
# Autograd saves dozens of tensors in a block. Native hooks (`native/module.cpp`) see all of them, pack and unpack
# the two kinds that are nearly all, and leave the others to this module.
#
# If no unit comes and goes and no other hooks are active, there are no hooks: graphs hold weights that never move.


class _Packed(NamedTuple):
    """The result of a pack hook of others for a tensor, and the hook that unpacks it."""

    value: Any
    unpack: Callable[[Any], torch.Tensor]


class _Wrapped(NamedTuple):
    """A wrapper of other tensors; at least one is a view of weights."""

    kind: Any
    inner: dict[str, Any]
    """The packed inner tensors, by name."""
    attributes: dict[str, Any]
    """Inner values that are no tensors, by name."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class _Pack:
    """A pack hook that makes handles of views of weights, and leaves other tensors to the enclosing hooks."""

    def __init__(self, saved: SavedTensors, outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        self.saved, self.outer = saved, outer
        self._bindings, self._placeholders = saved.bindings, saved.placeholders
        # Within another checkpoint or hooks of the user, those decide about the inputs too.
        self._moves_inputs = outer is None and saved.activations.moves_inputs

    def native(self, arena: list[tuple[int, int]]) -> Callable[[torch.Tensor], Any]:
        """Returns the native hook that calls this one for what is no ordinary tensor and no view of bound weights.

        `arena` are the first and the last address of each allocation that contains weights.
        """
        innermost = self.outer is None and not self._moves_inputs
        bindings, placeholders = self._bindings, self._placeholders
        return Pack(torch.Tensor, nn.Parameter, bindings, placeholders, arena, innermost, self).pack

    # torch refuses a pack hook that changes its tensor, and weights change when a handler destroys the engine.
    @uninterrupted
    def __call__(self, tensor: torch.Tensor) -> Any:
        handle = self.saved.handle(tensor)
        if handle is not None:
            return handle
        if type(tensor) is torch.Tensor or type(tensor) is nn.Parameter:
            if self._moves_inputs and tensor.requires_grad and saves_checkpoint_input():
                activations = self.saved.activations
                kept_input = activations.keep(tensor)
                if kept_input is not None:
                    return _Packed(kept_input, activations.fetch)
        elif self.saved.wraps_weights(tensor):
            return self._wrapped(tensor)
        # Weights never reach the outer hooks: `save_on_cpu` would copy them to the host.
        if self.outer is None:
            return _native.plain_of(tensor)
        pack, unpack = self.outer
        return _Packed(pack(tensor), unpack)

    def _wrapped(self, tensor: torch.Tensor) -> _Wrapped:
        """Packs each inner tensor of a wrapper by itself, as if autograd had saved it."""
        contents = inner_tensors(tensor)
        assert contents is not None, "only a wrapper wraps weights"
        inner = {
            name: self(tensor_or_value)
            for name, tensor_or_value in contents[0].items()
            if isinstance(tensor_or_value, torch.Tensor)
        }
        attributes = {name: value for name, value in contents[0].items() if name not in inner}
        return _Wrapped(type(tensor), inner, attributes, contents[1], tensor.size(), tensor.stride())


class SavedTensors:
    """The saved-tensor hooks of one engine. Packs on the thread that runs a forward, unpacks on autograd's."""

    def __init__(
        self,
        handles: Sequence[Sequence[ParamHandle]],
        unit_views: UnitViews,
        pager: Pager,
        compute: ComputeSpans,
        activations: ActivationPolicy,
        wrapped: bool,
    ) -> None:
        """Prepares the hooks.

        `activations` may keep the inputs of checkpointed modules off the device. With `wrapped` modules compute with
        wrappers of weights, such as DTensors: torch would not notice changed weights whose wrapper a graph holds.
        """
        self.activations = activations
        self._unit_views, self._pager, self._compute = unit_views, pager, compute
        stays = all(pager.device_resident(unit) for unit in range(len(handles)))
        self._moves = wrapped or activations.moves_inputs or not stays
        """True if weights of any unit come and go, or inputs of checkpointed modules."""
        self.bindings = unit_views.bindings
        # By address, since compiled code passes tensors that have lost their class.
        self.placeholders = {handle.storage_address: handle.name for unit in handles for handle in unit}
        """Name of each parameter, by the address of its placeholder's memory."""
        self._parameters = {handle.storage_address: (unit, handle) for unit, of in enumerate(handles) for handle in of}

    def push(self) -> bool:
        """Pushes the hooks on the calling thread, around the active ones. Returns False if there is no need.

        So hooks of checkpointing and of the user, outside of the model or within it, receive every tensor that is no
        weight: in a recomputation the same ones as in the forward.
        """
        if self.settled:
            return False
        # torch calls the innermost hooks only, so these call the enclosing ones themselves.
        outer = top_saved_tensor_hooks()
        try:
            pack = _Pack(self, outer).native(self._pager.arena.addresses())
            views = self._unit_views
            if self._compute is NO_SPANS:
                unpack = Unpack(views.view, self.unpack, views, under_modes)
            else:
                unpack = Unpack(self._view, self.unpack, None, under_modes)
            push_saved_tensor_hooks(pack, unpack.unpack)
        except RuntimeError as error:
            raise UsageError(
                f"the model cannot run here, since its graph would have to hold its weights: {error} Use "
                "torch.autograd.grad instead of torch.func, or a copy.deepcopy of the submodule in question"
            ) from error
        return True

    @property
    def settled(self) -> bool:
        """True if the innermost hooks of the calling thread are this object's, or none where no unit moves.

        A graph may hold weights that never move. Torch itself notices that they have changed since: see
        `UnitViews.outdate`.
        """
        top = top_saved_tensor_hooks()
        if top is None:
            return not self._moves
        ours = _ours(top)
        return ours is not None and ours.saved is self

    @staticmethod
    def pop() -> None:
        """Pops one pair of hooks, if there is one: torch removes some itself after an exception in a backward."""
        if top_saved_tensor_hooks() is not None:
            pop_saved_tensor_hooks()

    def handle(self, tensor: torch.Tensor) -> Handle | None:
        """Returns the handle of a view of weights, or None for any other tensor.

        Raises `UsageError` if compiled code uses a parameter while no module that owns it runs.
        """
        handle = handle_of(tensor)
        if handle is not None and handle.materialized and getattr(tensor, "own", None) is None:
            # `.data`, or a view of it, that was taken before the weights were fetched.
            tensor = handle.parameter.detach().view(tensor.shape)
        address = storage_address(tensor)
        binding = self._unit_views.binding_at(address)
        if binding is not None:
            return _native.handle_of(binding.unit, self._pager.updates(binding.unit), tensor)
        # Compiled code calls no `__torch_function__`, so it can reach a placeholder's own memory, which is NaN.
        used = self.placeholders.get(address)
        if used is not None:
            # An argument of a checkpointed function, which fetches the weights once it uses them.
            if saves_checkpoint_input() and (argument := self._argument(address, tensor)) is not None:
                return argument
            raise UsageError(
                f"parameter {used} is used by compiled code while no module that owns it runs; call that module, name "
                'the one that uses it in "units" of the "offload" block, or call '
                "offload.register_external_parameter(module, parameter)"
            )
        return None

    def _argument(self, address: int, tensor: torch.Tensor) -> Handle | None:
        """Returns the handle of a parameter whose placeholder `tensor` shows whole; None for a part of it."""
        unit, handle = self._parameters[address]
        if tensor.shape != handle.shape:
            return None
        return _native.handle_of(unit, self._pager.updates(unit), self._unit_views.place(unit, handle))

    def without_views(self, output: Any) -> Any:
        """Returns a module's output with clones of weights: a view would pin their device buffer while it lives."""
        if type(output) is torch.Tensor and storage_address(output) not in self.bindings:
            return output  # nearly all
        if isinstance(output, torch.Tensor):
            return output.clone() if self._is_view(output) else output
        if any(self._is_view(leaf) for leaf in tree_leaves(output)):
            return tree_map(lambda leaf: leaf.clone() if self._is_view(leaf) else leaf, output)
        return output

    def _is_view(self, value: Any) -> bool:
        """Returns True for a placeholder and for a view of a materialized unit."""
        if not isinstance(value, torch.Tensor):
            return False
        return handle_of(value) is not None or self._unit_views.binding_at(storage_address(value)) is not None

    def wraps_weights(self, tensor: torch.Tensor) -> bool:
        """Returns True for a wrapper that contains a view of weights, directly or in an inner wrapper."""
        contents = inner_tensors(tensor)
        return contents is not None and any(
            isinstance(value, torch.Tensor) and (self.handle(value) is not None or self.wraps_weights(value))
            for value in contents[0].values()
        )

    @uninterrupted
    def unpack(self, packed: Handle | Plain | _Packed | _Wrapped) -> torch.Tensor:
        """Returns the saved tensor, for whose weights the calling thread may wait.

        Raises:
            RuntimeError: if a tensor was changed in place since it was saved, as torch raises it.
            UsageError: if the weights have changed since the forward.
        """
        if isinstance(packed, Handle):
            return self._view(packed)
        if isinstance(packed, _Packed):
            return packed.unpack(packed.value)
        if isinstance(packed, _Wrapped):
            inner = {name: self.unpack(packed_inner) for name, packed_inner in packed.inner.items()} | packed.attributes
            wrapper: torch.Tensor = packed.kind.__tensor_unflatten__(inner, packed.context, packed.size, packed.stride)
            return wrapper
        tensor = packed.tensor
        if tensor._version != packed.version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place: it is at version "
                f"{tensor._version}, expected {packed.version}"
            )
        return tensor

    @uninterrupted
    def _view(self, packed: Handle) -> torch.Tensor:
        if self._compute is NO_SPANS:
            return self._unit_views.view(packed)
        self._compute.leave_for(packed.unit)  # before the wait for weights, which is no compute
        view = self._unit_views.view(packed)
        self._compute.turn_to(packed.unit)
        return view


def _ours(hooks: Any) -> _Pack | None:
    """Returns the pack hook of an engine in a pair of saved-tensor hooks; None for hooks of others."""
    native = getattr(hooks[0], "__self__", None)
    return native.other if isinstance(native, Pack) else None


def other_hooks() -> Any:
    """Returns the innermost pair of saved-tensor hooks of the calling thread that is no engine's, or None."""
    top = top_saved_tensor_hooks()
    while top is not None and (ours := _ours(top)) is not None:
        top = ours.outer
    return top


def storage_address(tensor: torch.Tensor) -> int:
    """Returns the address of the tensor's storage; 0 if it has none: a sparse tensor, one of torch.func, a wrapper."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter:  # nearly all; torch refuses those without a storage
        try:
            return tensor.untyped_storage().data_ptr()
        except RuntimeError:
            return 0
    if tensor.layout is not torch.strided:
        return 0
    with plain_tensors():  # otherwise a placeholder would fetch its weights
        if has_no_storage(tensor):
            return 0
        try:
            return tensor.untyped_storage().data_ptr()
        except RuntimeError:  # a wrapper of other tensors (`_make_wrapper_subclass`) has no storage
            return 0


# -- passes --------------------------------------------------------------------------------------------
#
# The outermost forward and the outermost backward of an engine: what happens when each begins and ends.
#
#     alone    a forward begins with its outermost module, a backward with its first sign; each ends by itself
#     turns    the micro-batches of a step take turns (`layer_major`): all of their forwards and backwards together are
#              one forward, which ends with the first backward, and one backward
#
# Threads. A forward belongs to its caller's thread, a backward to autograd's. Micro-batches that take turns have a
# thread each; one of these runs at a time.


class Passes:
    """The forward and the backward that are under way."""

    def __init__(
        self,
        pager: Pager,
        gradients: GradientAccumulator,
        views: UnitViews,
        callbacks: EngineCallbacks,
        timeline: Timeline,
    ) -> None:
        self._pager, self._gradients, self._views, self._callbacks = pager, gradients, views, callbacks
        self._timeline = timeline
        self.thread: threading.Thread | None = None
        """The thread whose forward is under way, or for whom micro-batches take turns."""
        self.in_backward = self.gradient_seen = self.through_old_graph = False
        """The last is True if the last backward began in a graph older than a change of weights that stay.

        autograd's threads: the native `GradientHook` reads the first and sets the second.
        """
        self.takes_turns = False
        """True while the micro-batches of a step take turns."""

    # -- forward ------------------------------------------------------------------------------------

    def begin_forward(self, trains: bool) -> None:
        """Begins an outermost forward; `trains` if a backward may follow."""
        if self.takes_turns:
            return
        self._callbacks.enter_forward()
        self.thread = threading.current_thread()
        if not inside_backward():
            self._begin(trains)

    def _begin(self, trains: bool) -> None:
        self._pager.begin(PassKind.TRAIN if trains else PassKind.EVAL)
        self._timeline.begin_phase(Phase.FORWARD if trains else Phase.EVALUATION)

    def end_forward(self) -> None:
        """Ends the outermost forward."""
        if self.takes_turns:
            return
        self.thread = None
        if not inside_backward():
            self._end()

    def _end(self) -> None:
        self._views.end_kept()
        self._pager.end_forward()
        self._timeline.end_phase(Phase.FORWARD)
        self._timeline.end_phase(Phase.EVALUATION)

    # -- backward -----------------------------------------------------------------------------------

    @uninterrupted
    def begin_backward(self, made: int | None = None) -> None:
        """Begins the backward at its first sign: a gradient, a request for weights, or an output's node.

        Such a node passes what `UnitViews.outdated` was when its graph was `made`.
        """
        if not self.in_backward:
            self.through_old_graph = made not in (None, self._views.outdated)
            self._timeline.begin_phase(Phase.BACKWARD)
            try:
                # autograd thread: if this call raises, the backward has not started, and its next sign calls again.
                self._callbacks.begin_backward()
            except BaseException:
                self._timeline.end_phase(Phase.BACKWARD)
                raise
            self.in_backward = True
            call_after_backward(self.end_backward)

    @uninterrupted
    def end_backward(self) -> None:
        """Ends the outermost backward. torch calls this once the graph task has ended."""
        self._views.end_kept()
        self._gradients.end_backward()
        if self.gradient_seen:
            self._callbacks.end_backward()
        self.in_backward = self.gradient_seen = False

    # -- micro-batches that take turns --------------------------------------------------------------

    @contextlib.contextmanager
    def turns(self, micro_batches: int, trains: bool = True) -> Iterator[None]:
        """Makes the forwards and backwards of the context one forward and one backward, of `micro_batches`.

        After an exception the backward is an aborted one, which the engine's next entry clears up. If `trains` is
        False, there are forwards alone.
        """
        self._callbacks.enter_forward()
        self.thread = threading.current_thread()
        self._begin(trains)
        self.takes_turns = True
        try:
            yield
        finally:
            self.takes_turns, self.thread = False, None
        if trains:
            self._end_turns(micro_batches)
        else:
            self._end()

    @uninterrupted
    def _end_turns(self, micro_batches: int) -> None:
        """Ends the one backward, after each micro-batch has produced gradients in it."""
        self._pager.end_forward()
        self._views.end_kept()
        self._gradients.end_backward()
        for _ in range(micro_batches):
            self._callbacks.end_backward()
        self.in_backward = self.gradient_seen = False

    @uninterrupted
    def begin_backward_of_turn(self) -> None:
        """Begins the backward of one micro-batch. The first ends the forward of all, as far as phases go."""
        self._callbacks.begin_backward()
        if not self.in_backward:
            self._timeline.end_phase(Phase.FORWARD)
            self._timeline.begin_phase(Phase.BACKWARD)
            self.in_backward, self.through_old_graph = True, False


# -- module hooks --------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    """One site that was entered and not left, and the units that it uses."""

    module: nn.Module
    units: list[int]
    pushed: bool  # this site pushed the saved-tensor hooks
    in_backward: bool  # entered inside of a backward: after an exception there, torch itself removes the hooks
    call: types.FrameType | None  # of the outermost module, to tell a running site from one that a Ctrl-C has ended
    casts_cached: bool  # the state of torch's autocast cache before this site; see [Note: casts]


class _Nesting(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        """The sites that the thread has entered and not left, outermost first."""


class ModuleHooks:
    """All hooks of an engine on a model. `remove` takes them away and leaves the parameters placeholders."""

    def __init__(
        self,
        model: nn.Module,
        sites: dict[str, tuple[int, ...]],
        handles: Sequence[Sequence[ParamHandle]],
        unit_views: UnitViews,
        saved: SavedTensors,
        gradients: GradientAccumulator,
        pager: Pager,
        callbacks: EngineCallbacks,
        activations: ActivationPolicy,
        *,
        timeline: Timeline,
        compute: ComputeSpans,
    ) -> None:
        """Installs the hooks. `sites` are the units of each hooked module, by its name; `activations` adds its own."""
        self._unit_views, self._saved, self._gradients, self._pager = unit_views, saved, gradients, pager
        self._timeline, self._compute, self._local = timeline, compute, _Nesting()
        self._activations, self._root = activations, model
        self.passes = Passes(pager, gradients, unit_views, callbacks, timeline)
        self._resting = False  # inside of `resting`
        self._removers: list[Callable[[], None]] = []
        self._external: dict[int, list[int]] = {}
        """For each site, by its module's id: units of other modules' parameters that the user registered with it."""
        self._hooks: dict[int, list[Callable[[], None]]] = {}
        """Functions that remove a module's hooks, by the module's id."""
        modules, inside = dict(model.named_modules()), layers_inside(model, sites)
        # The root is a site even without units: the saved tensors of a whole forward must be packed.
        for name, units in ({"": ()} | sites).items():
            self._hook_module(modules[name], units, [modules[layer] for layer in inside.get(name, ())])
        unit_of = {id(handle.parameter): handle.unit for unit in handles for handle in unit}
        for module in modules.values():
            for unit in [
                unit_of[id(parameter)] for parameter in external_parameters(module) if id(parameter) in unit_of
            ]:
                self.use_in(module, unit)
        self._trainable = [handle for unit in handles for handle in unit if handle.trainable]
        for handle in self._trainable:
            self._removers.append(handle.hook_gradient(self._gradient_hook(handle)).remove)
        compute.install(modules, {"": ()} | sites)
        activations.install(modules)

    def remove(self) -> None:
        """Removes every hook."""
        self.leave_all()
        for removers in (self._removers, *self._hooks.values()):
            while removers:
                removers.pop()()
        self._activations.remove()
        self._compute.remove()
        self._unit_views.vacate()

    @uninterrupted
    def reset_aborted(self) -> None:
        """Releases everything that an aborted forward or backward left. Does nothing inside of a backward.

        Raises `UsageError` if the model runs on another thread that is alive.
        """
        if inside_backward():
            return
        passes, thread = self.passes, self.passes.thread
        # The forward of another live thread is not aborted: to release its weights would corrupt its results.
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            raise UsageError(
                f"the model runs on thread {thread.name}: until its forward ends, no other thread may use it or "
                f"read its weights"
            )
        self.leave_all()
        aborted = passes.in_backward
        passes.in_backward = passes.gradient_seen = False
        if aborted:
            self.forget_gradients()
        self._unit_views.reset()

    @uninterrupted
    def leave_all(self) -> None:
        """Leaves every site that a Ctrl-C left open: torch calls no hooks after a `KeyboardInterrupt`."""
        while self._local.frames:
            frame = self._local.frames.pop()
            if frame.pushed and not frame.in_backward:
                self._saved.pop()
            if frame.casts_cached:  # otherwise an enclosing context restores the cache
                torch.set_autocast_cache_enabled(True)
            self.passes.thread = None
        self._activations.abandon()

    def forget_gradients(self) -> None:
        """Drops gradients that an aborted backward left in `.grad` before the engine took them."""
        for handle in self._trainable:
            if handle.parameter.grad is not None:
                handle.parameter.grad = None

    @uninterrupted
    def fetch(self, unit: int, stays: bool = False) -> bool:
        """Materializes `unit` for the forward or the backward that runs now; returns False if neither does.

        With `stays` the unit is held until the innermost site ends. Without it, or if a backward runs outside of any
        site, the unit may be released when memory is needed. If both, in a recomputation of a checkpoint, frozen
        parameters remain placeholders, see `UnitViews.keep`.
        """
        if not self.runs_now():
            return False
        if stays and self._local.frames:
            self._unit_views.use(unit)
            self._local.frames[-1].units.append(unit)
        else:
            self._unit_views.keep(unit, whole=stays or bool(self._local.frames))
        return True

    @uninterrupted
    def turn_to(self, unit: int, others: Collection[int]) -> bool:
        """Materializes `unit` as `fetch` does, until another one of `others` is turned to or the site ends."""
        if not self.runs_now() or not self._local.frames or self._pager.device_resident(unit):
            return self.fetch(unit)
        units = self._local.frames[-1].units
        if unit in units:
            self._pager.wait_upload(unit)
            return True
        # Released first: two of them need not fit on the device together.
        for other in [candidate for candidate in units if candidate in others]:
            units.remove(other)
            self._unit_views.release_unit(other)
        return self.fetch(unit, stays=True)

    def runs_now(self) -> bool:
        """Returns `running`. A backward that runs begins at the latest now: its weights are about to be used."""
        if inside_backward():
            self.passes.begin_backward()
        return self.running

    def use_in(self, module: nn.Module, unit: int) -> None:
        """Adds `unit` to the units that are materialized whenever `module` runs."""
        if id(module) not in self._hooks:
            self._hook_module(module, (), [])
        self._external[id(module)].append(unit)

    def end_use_in(self, module: nn.Module, unit: int) -> None:
        """Reverts one `use_in`, if there was one."""
        units = self._external.get(id(module), [])
        if unit in units:
            units.remove(unit)

    @property
    def running(self) -> bool:
        """True if a forward or a backward is under way on this thread."""
        return bool(self._local.frames) or inside_backward()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Lets the model run without gradients on the gathered memory of its parameters."""
        self._resting = True
        try:
            yield
        finally:
            self._resting = False

    # -- forward ------------------------------------------------------------------------------------

    def _hook_module(self, module: nn.Module, units: tuple[int, ...], layers: list[nn.Module]) -> None:
        """Makes `module` a site of `units`, which takes the hooks of `layers` away when it is called."""
        external = self._external.setdefault(id(module), [])

        def before(called: nn.Module, args: tuple[Any, ...]) -> None:
            if called is not module:
                return
            if self._resting:  # a backward would find other memory
                if self._trainable and torch.is_grad_enabled():
                    raise UsageError(
                        "the model is gathered: run it under torch.no_grad(), or leave `offload.gathered` first"
                    )
                return
            if layers:
                self._free_of_hooks(layers)
            if external or not self._is_nested(module):
                self._enter(module, (*units, *external))
            else:
                self._enter_nested(module, units)

        def after(called: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return self._leave(module, output) if called is module else output

        # The pre-hook runs before all others, so that hooks of the user see weights. The post-hook also runs after an
        # exception, since otherwise a failed forward would leave its units pinned.
        self._hooks[id(module)] = [
            module.register_forward_pre_hook(outside_of_compiled_code(before), prepend=True).remove,
            module.register_forward_hook(outside_of_compiled_code(after), always_call=True).remove,
        ]

    @uninterrupted
    def _free_of_hooks(self, layers: list[nn.Module]) -> None:
        """Removes the hooks of layers that the caller encloses, except where the user has registered parameters."""
        while layers:
            layer = layers.pop()
            if not self._external[id(layer)]:
                for remove in self._hooks.pop(id(layer), ()):
                    remove()

    def _is_nested(self, module: nn.Module) -> bool:
        """Returns True if `module` runs within a site that has changed torch's state as `module` needs it."""
        frames = self._local.frames
        if not frames or not self._saved.settled or torch.is_autocast_cache_enabled():
            return False
        # A module within its own call enters again, so that `_leave` distinguishes the two calls. So does the root.
        return module is not self._root and module not in [frame.module for frame in frames]

    @uninterrupted
    def _enter_nested(self, module: nn.Module, units: Sequence[int]) -> None:
        """Materializes the units of a module that `_is_nested`. Enters a site only if something must be released.

        Units that stay are hidden when the outermost site ends, those of the enclosing site when that one ends.
        """
        frames, frame = self._local.frames, None
        units_here = frames[-1].units
        for unit in units:
            if self._pager.device_resident(unit):
                if unit not in self._unit_views.shown:
                    self._unit_views.use(unit)
            elif unit in units_here:
                # compute stream: waits for the upload. The module may run on another stream than the enclosing site.
                self._pager.wait_upload(unit)
            else:
                if frame is None:
                    frame = _Frame(module, [], False, False, None, False)
                    frames.append(frame)
                self._use(unit, frame)

    def _use(self, unit: int, frame: _Frame) -> None:
        """Materializes `unit` until `frame`, the innermost, is left. An exception leaves the frame."""
        try:
            self._unit_views.use(unit)
            frame.units.append(unit)
        except BaseException:
            # calling thread: a signal's handler may have destroyed the engine during the wait for a unit, and so left
            # all sites.
            if self._local.frames and self._local.frames[-1] is frame:
                self._let_go(self._local.frames.pop())
            raise

    @uninterrupted
    def _enter(self, module: nn.Module, units: Sequence[int]) -> None:
        """Enters a site: begins a pass at the outermost one, then materializes the site's units."""
        local = self._local
        again = module is self._root or any(frame.module is module for frame in local.frames)
        # If the Python frame of the outermost call is no longer on the stack, a Ctrl-C ended it without its post-hook.
        if again and local.frames and (call := local.frames[0].call) is not None and not is_on_stack(call):
            self.reset_aborted()
        if not local.frames:
            self.passes.begin_forward(bool(self._trainable) and torch.is_grad_enabled())
        try:
            pushed = self._saved.push()
        except BaseException:
            # No frame lists this site yet, so no other code would end the forward, and no other thread could begin one.
            if not local.frames:
                self.passes.end_forward()
            raise
        cached = torch.is_autocast_cache_enabled()
        frame = _Frame(module, [], pushed, inside_backward(), module_call(), cached)
        # Stored before any unit is used: after an exception below, the frame lists what to undo.
        local.frames.append(frame)
        # See [Note: casts]. `_let_go` restores the cache.
        torch.set_autocast_cache_enabled(False)
        for unit in units:
            self._use(unit, frame)

    @uninterrupted
    def _leave(self, module: nn.Module, output: Any) -> Any:
        """Leaves the innermost site, and returns the output without views of weights.

        Leaves nothing if that site covers `module`. torch also calls the post-hook of a site that was not entered, when
        a pre-hook raised, and of one that was left, when a signal's handler destroyed the engine.
        """
        if not self._local.frames:
            return output
        frame = self._local.frames[-1]
        if frame.module is not module:
            return self._saved.without_views(output)
        try:
            # Cloned while the units are still pinned.
            output = self._saved.without_views(output)
        finally:
            self._local.frames.pop()
            self._let_go(frame)
        if not self._local.frames and torch.is_grad_enabled() and not inside_backward():
            # autograd thread: runs the nodes of the outermost site's output first in a backward, and they report it.
            begin = self.passes.begin_backward
            for node in (leaf.grad_fn for leaf in tensors_in(output) if leaf.grad_fn is not None):
                node.register_prehook(lambda grads, made=self._unit_views.outdated: begin(made))
        return output

    def _let_go(self, frame: _Frame) -> None:
        """Undoes `_enter`: autocast cache, saved-tensor hooks, the site's units; ends the pass at the outermost."""
        torch.set_autocast_cache_enabled(frame.casts_cached)
        if frame.pushed:
            self._saved.pop()
        for unit in reversed(frame.units):
            self._unit_views.release_unit(unit)
        if not self._local.frames:
            self.passes.end_forward()

    # -- backward -----------------------------------------------------------------------------------

    def _gradient_hook(self, handle: ParamHandle) -> Callable[[torch.Tensor], None]:
        """Returns the hook that moves `.grad` of a parameter into the engine's gradients, on an autograd thread."""
        add = self._gradients.adder(handle.unit, handle.position)

        @uninterrupted
        def record_and_add(gradient: torch.Tensor, alone: bool) -> None:
            self._timeline.add_gradient(gradient.numel() * gradient.element_size())  # a sparse one lacks `nbytes`
            add(gradient, alone)

        return GradientHook(self.passes, plain_tensors, add if self._timeline is OFF else record_and_add).take
