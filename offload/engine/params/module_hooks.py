"""Hooks that fetch a unit's weights when its modules run, take gradients, and notice when a backward begins and ends.

    forward    a *site* (a hooked module) binds its units in its pre-hook and releases them in its post-hook, unless
               the enclosing site holds them. If a parameter of another unit is used meanwhile, its unit is fetched on
               demand and stays until the outermost site ends or the memory is needed.
    backward   unpacking a saved view fetches its unit for as long as the view lives (`unit_views`). If Python code in
               a backward uses a parameter, its unit stays until the backward ends or the memory is needed.

The outermost site pushes the saved-tensor hooks and pops them, so `model(...)` is as safe as `engine(...)`. Hooks act
only for the module on which they were installed: a deep copy is an ordinary module. Layers of torch lose theirs.

Threads. Forward hooks run on the caller's thread, all others on autograd's; one backward runs at a time.

[Note: casts] Under autocast torch caches the cast of each fp32 weight on the device until the context ends, which would
keep the casts of all units there. So the cache is off while a site runs, and a weight used twice is cast twice.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.activations.checkpoints import UnitCheckpoints
from offload.engine._native import GradientHook
from offload.engine.callbacks import EngineCallbacks
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.metrics.compute_spans import NO_SPANS, ComputeSpans
from offload.engine.params.experts.targeted import forgive_parametrizations
from offload.engine.params.experts.turns import ExpertTurns
from offload.engine.params.paged_parameter import ParamHandle
from offload.engine.params.saved_tensors import SavedTensors
from offload.engine.params.unit_views import UnitViews
from offload.engine.schedule.passes import Passes
from offload.errors import UsageError
from offload.interrupts import is_on_stack, uninterrupted
from offload.layout.units import external_parameters, layers_inside
from offload.swapper.pager import Pager
from offload.timeline import OFF, Timeline
from offload.torch_internals import (
    inside_backward,
    module_call,
    outside_of_compiled_code,
    plain_tensors,
    tensors_in,
)


class _Frame(NamedTuple):
    """One site that was entered and not left, and the units that it uses."""

    module: nn.Module
    units: list[int]
    pushed: bool  # this site pushed the saved-tensor hooks
    in_backward: bool  # entered inside of a backward: after an exception there, torch itself removes the hooks
    call: types.FrameType | None  # of the outermost module, to tell a running site from one that a Ctrl-C has ended
    casts_kept: bool  # the state of torch's autocast cache before this site; see [Note: casts]


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
        checkpoints: UnitCheckpoints,
        *,
        experts: Mapping[str, range] = {},
        timeline: Timeline = OFF,
        compute: ComputeSpans = NO_SPANS,
    ) -> None:
        """Installs the hooks.

        Args:
            model: the model.
            sites: the units of each hooked module, by the module's name in the model.
            handles: the parameters of each unit.
            unit_views: materializes units.
            saved: the hooks for tensors that autograd saves.
            gradients: receives every gradient.
            pager: is notified of the beginning and the end of each forward.
            callbacks: the engine, as its components see it.
            checkpoints: the hooks of checkpointing, which are outside of all others.
            experts: units of each module whose experts are units, expert by expert.
            timeline: records phases and gradients.
            compute: records the forwards of units.
        """
        self._unit_views, self._saved, self._gradients, self._pager = unit_views, saved, gradients, pager
        self._timeline, self._compute, self._local = timeline, compute, _Nesting()
        self._checkpoints, self._root = checkpoints, model
        self.passes = Passes(pager, gradients, unit_views, callbacks, timeline)
        self._resting = False  # inside of `resting`
        self._removers: list[Callable[[], None]] = []
        self._external: dict[int, list[int]] = {}
        """For each site, by its module's id: units of other modules' parameters that the user registered with it."""
        self._hooks: dict[int, list[Callable[[], None]]] = {}
        """Functions that remove a module's hooks, by the module's id."""
        modules, inside = dict(model.named_modules()), layers_inside(model, sites)
        # The root is a site even without units of its own: the saved tensors of a whole forward must be packed.
        for name, units in ({"": ()} | sites).items():
            self._hook_module(modules[name], units, [modules[layer] for layer in inside.get(name, ())])
        unit_of = {id(handle.parameter): handle.unit for unit in handles for handle in unit}
        for module in modules.values():
            for unit in [unit_of[id(each)] for each in external_parameters(module) if id(each) in unit_of]:
                self.use_in(module, unit)
        self._trainable = [handle for unit in handles for handle in unit if handle.trainable]
        for handle in self._trainable:
            self._removers.append(handle.hook_gradient(self._gradient_hook(handle)).remove)
        self._experts = ExpertTurns(modules, experts, pager)
        self._removers += [*self._experts.install(), *forgive_parametrizations(modules, handles)]
        compute.install(modules, {"": ()} | sites)
        checkpoints.install(modules)

    def remove(self) -> None:
        """Removes every hook."""
        self.leave_all()
        for removers in (self._removers, *self._hooks.values()):
            while removers:
                removers.pop()()
        self._checkpoints.remove()
        self._compute.remove()
        self._unit_views.vacate()

    @uninterrupted
    def reset_aborted(self) -> None:
        """Releases everything that an aborted forward or backward left behind. Does nothing inside of a backward.

        Raises:
            UsageError: if the model runs on another thread that is alive.
        """
        if inside_backward():
            return
        self.passes.check_thread()  # the forward of another live thread is not aborted
        self.leave_all()
        if self.passes.abort_backward():
            self.forget_gradients()
        self._unit_views.reset()

    @uninterrupted
    def leave_all(self) -> None:
        """Leaves every site that a Ctrl-C left open: torch calls no hooks after a `KeyboardInterrupt`."""
        while self._local.frames:
            frame = self._local.frames.pop()
            if frame.pushed and not frame.in_backward:
                self._saved.pop()
            if frame.casts_kept:  # otherwise an enclosing context restores the cache
                torch.set_autocast_cache_enabled(True)
            self.passes.thread = None
        self._checkpoints.abandon()

    def forget_gradients(self) -> None:
        """Drops gradients that an aborted backward left in `.grad` before the engine took them."""
        for handle in self._trainable:
            if handle.parameter.grad is not None:
                handle.parameter.grad = None

    @uninterrupted
    def fetch(self, unit: int, stays: bool = False) -> bool:
        """Materializes `unit` for the forward or the backward that runs now.

        Args:
            unit: index of the unit.
            stays: True to hold the unit until the innermost site ends. If it is False, or if a backward runs outside of
                any site, the unit may be released when memory is needed. If both, in a recomputation of a checkpoint,
                frozen parameters remain placeholders, see `UnitViews.keep`.

        Returns:
            False if neither a forward nor a backward runs.
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
    def turn_to(self, unit: int) -> bool:
        """Materializes an expert's `unit` until the next expert is turned to, or the innermost site ends.

        Returns:
            False if neither a forward nor a backward runs.
        """
        if not self.runs_now() or not self._local.frames or self._pager.stays(unit):
            return self.fetch(unit)
        held = self._local.frames[-1].units
        if unit in held:
            self._pager.wait_upload(unit)
            return True
        # Released first: two experts need not fit on the device together.
        for other in [each for each in held if each in self._experts.units]:
            held.remove(other)
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
        """Lets the model run without gradients on memory that all its parameters have been given."""
        self._resting = True
        try:
            yield
        finally:
            self._resting = False

    # -- forward ------------------------------------------------------------------------------------

    def _may_rest(self) -> bool:
        """Returns True; raises `UsageError` if a backward may follow, which would find other memory."""
        if self._trainable and torch.is_grad_enabled():
            raise UsageError("the model is gathered: run it under torch.no_grad(), or leave `offload.gathered` first")
        return True

    def _hook_module(self, module: nn.Module, units: tuple[int, ...], layers: list[nn.Module]) -> None:
        """Makes `module` a site of `units`, which takes the hooks of `layers` away when it is called."""
        external = self._external.setdefault(id(module), [])

        def before(called: nn.Module, args: tuple[Any, ...]) -> None:
            if called is not module or (self._resting and self._may_rest()):
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
        # A module within its own call enters again, so that `_leave` tells the two calls apart. So does the root.
        return module is not self._root and module not in [frame.module for frame in frames]

    @uninterrupted
    def _enter_nested(self, module: nn.Module, units: Sequence[int]) -> None:
        """Materializes the units of a module that `_is_nested`. Enters a site only if something must be released.

        Units that stay are hidden when the outermost site ends, those of the enclosing site when that one ends.
        """
        frames, frame = self._local.frames, None
        held = frames[-1].units
        for unit in units:
            if self._pager.stays(unit):
                if unit not in self._unit_views.shown:
                    self._unit_views.use(unit)
            elif unit in held:
                self._pager.wait_upload(unit)  # the module may run on another stream than the enclosing site
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
            # A signal's handler may have destroyed the engine during the wait for a unit, and so left all sites.
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
        kept = torch.is_autocast_cache_enabled()
        frame = _Frame(module, [], self._saved.push(), inside_backward(), module_call(), kept)
        # Stored before any unit is used: after an exception below, the frame lists what to undo.
        local.frames.append(frame)
        # See [Note: casts]. `_let_go` restores the cache.
        torch.set_autocast_cache_enabled(False)
        for unit in units:
            self._use(unit, frame)

    @uninterrupted
    def _leave(self, module: nn.Module, output: Any) -> Any:
        """Leaves the innermost site, and returns the output without views of weights.

        Leaves nothing if that site covers `module`. torch also calls the post-hook of a site that was not entered,
        because a pre-hook raised, or that was left, because a signal's handler destroyed the engine.
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
            # The autograd nodes of the outermost site's output run first in a backward, and report it.
            begin = self.passes.begin_backward
            for node in (leaf.grad_fn for leaf in tensors_in(output) if leaf.grad_fn is not None):
                node.register_prehook(lambda grads, made=self._unit_views.outdated: begin(made))
        return output

    def _let_go(self, frame: _Frame) -> None:
        """Undoes `_enter`: autocast cache, saved-tensor hooks, the site's units; ends the pass at the outermost."""
        torch.set_autocast_cache_enabled(frame.casts_kept)
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
        if self._timeline is not OFF:
            add = _recorded(self._timeline, add)
        return GradientHook(self.passes, plain_tensors, add).take


def _recorded(timeline: Timeline, add: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Returns `add`, which also records the bytes of each gradient."""

    @uninterrupted
    def record_and_add(gradient: torch.Tensor) -> None:
        timeline.add_gradient(gradient.numel() * gradient.element_size())  # a sparse one lacks `nbytes`
        add(gradient)

    return record_and_add
