"""Views of the device arena: the units whose parameters are materialized, and the device buffers still referenced.

A *binding* is one use of a unit: one pin of the pager, and a storage laid over the unit's device buffer, whose users
are counted (`ViewedMemory`). A binding ends when nothing needs it any more **and** nobody uses the storage:

    bound        a module of the unit runs (`uses`), or Python code asked for the unit by name (`requested`)
    lingering    the parameters are placeholders again, but a view of the device buffer lives: one that autograd has
                 just unpacked, that a recomputed graph holds, or a user's function stores. The buffer is not reused
    gone         the pager may reuse the device buffer

[Note: lingering] A live view pins its unit, so no view of weights ever shows other bytes than those it was made of.
This holds in a region of non-reentrant checkpointing, whose recomputation keeps plain views; in a user's own
saved-tensor hooks; and in a `ctx` attribute of an `autograd.Function`. Such a view occupies device memory; if the
device has no more room, a `BudgetError` is raised. No view may live across `step()`, since the weights change.

A unit that never leaves the device has one binding for good, without a pin. Its parameters are only shown and hidden,
all at the end of the outermost forward or backward; views of them may live, and graphs hold them (`outdate`).

Threads. Forward hooks and autograd's threads call `UnitViews`, under its lock.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import increment_version

from offload.engine._native import Handle, view_of
from offload.engine.params import ParamHandle
from offload.errors import BudgetError, UsageError
from offload.interrupts import let_deferred_in, uninterrupted
from offload.layout.flat_layout import UnitLayout, view_places
from offload.swapper.memory.device_arena import Binding, ViewPlaces
from offload.swapper.pager import Pager
from offload.torch_internals import outside_of_modes


class _ViewState:
    """State of one unit: its parameters, and why they are materialized."""

    def __init__(self, places: ViewPlaces, name: str, handles: Sequence[ParamHandle], stays: bool) -> None:
        self.places, self.name, self.handles, self.stays = places, name or "the root", list(handles), stays
        self.frozen = [handle for handle in handles if not handle.trainable]
        self.uses = 0
        self.requested = self.requested_whole = False
        self.whole = False  # True if frozen parameters are materialized too, while the unit has a binding
        self.binding: Binding | None = None

    @property
    def dispensable(self) -> bool:
        """True if Python code alone asked for the unit, and for no frozen parameter, which the code may hold itself."""
        return self.requested and not self.uses and not (self.requested_whole and self.frozen)

    def check_not_gathered(self) -> None:
        """Raises `UsageError` if a parameter of the unit, which the model needs, is gathered."""
        if name := next((handle.name for handle in self.handles if handle.gathered), None):
            raise UsageError(f"{name} is gathered: leave `with offload.gathered(...)` before the model runs")


class UnitViews:
    """Materializes and releases the parameters of units, and pins units for as long as views of them live."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        handles: Sequence[Sequence[ParamHandle]],
        pager: Pager,
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """Makes every parameter, those of a unit in `handles`, a placeholder of the unit's dtype in `dtypes`."""
        self._pager = pager
        self.lock = threading.RLock()
        """Guards everything here: forward hooks and autograd's threads bind and release units at the same time."""
        # Equal ones are one object: blocks of a model share their places on the device.
        known: dict[ViewPlaces, ViewPlaces] = {}
        self._units = []
        for index, (layout, unit_handles, dtype) in enumerate(zip(layouts, handles, dtypes, strict=True)):
            outer = [handle for segment, handle in zip(layout.segments, unit_handles, strict=True) if not segment.inner]
            places = view_places(layout, dtype)
            self._units.append(
                _ViewState(known.setdefault(places, places), layout.name, outer, pager.device_resident(index))
            )
            ParamHandle.release(outer)
        self.shown: set[int] = set()  # units that stay, and whose parameters are ordinary ones now; others only read it
        self.outdated = 0  # changes of units that stay; others only read it
        self._requested: list[_ViewState] = []  # see `keep`; oldest first
        self._live: list[Binding] = []
        """Every binding that still owns a pin of the pager, oldest first."""
        self.bindings: dict[int, Binding] = {}
        """The newest binding at each address, some of them without a live view. Others only read it."""
        self.recent: Binding | None = None
        """The binding of a backward's last view: it needs several views of a unit in a row. Read under the lock."""

    @outside_of_modes
    @uninterrupted
    def use(self, index: int) -> None:
        """Materializes the parameters of a unit. Each call needs one `release_unit`; the last one ends it."""
        unit = self._units[index]
        with self.lock:
            if unit.stays:
                self._show(index)
                return
            if unit.binding is None:
                # A recomputation has come to the next unit. Pins of those before would leave no room to a prefetch.
                for passed in [pin for pin in self._requested if pin.dispensable]:
                    self._end_keep(passed)
            self._bind(index)
            unit.uses += 1

    @outside_of_modes
    @uninterrupted
    def release_unit(self, index: int) -> None:
        """Ends one use of a unit; see `use`."""
        unit = self._units[index]
        with self.lock:
            if unit.uses == 0:
                return  # reset() has ended this use already
            unit.uses -= 1
            self._unbind_idle(unit)

    @outside_of_modes
    @uninterrupted
    def keep(self, index: int, whole: bool = True) -> None:
        """Materializes the parameters of a unit until `end_kept`, until another is used, or the memory is needed.

        A recomputation may keep a frozen parameter itself, not a view of it, and the unit could not be released any
        more. Without `whole` frozen parameters remain placeholders, whose weights `frozen_view` gives.
        """
        unit = self._units[index]
        with self.lock:
            if unit.stays:
                self._show(index)
                return
            self._bind(index, whole)
            if not unit.requested:
                self._requested.append(unit)
            unit.requested = True
            unit.requested_whole |= whole

    @outside_of_modes
    @uninterrupted
    def frozen_view(self, index: int, position: int) -> torch.Tensor:
        """Returns the weights of a parameter of a requested unit, as a view that pins the unit while it lives."""
        unit = self._units[index]
        with self.lock:
            assert unit.binding is not None, "fetched just now, on this thread"
            pairs = zip(unit.handles, unit.binding.memory.views, strict=True)
            return next(view for handle, view in pairs if handle.position == position).detach()

    @outside_of_modes
    @uninterrupted
    def end_kept(self) -> None:
        """Releases the units of `keep`, units that stay, and the unit that a backward viewed last."""
        with self.lock:
            self._let_go_of_recent()
            self._hide()
            for unit in tuple(self._requested):
                unit.requested_whole = False
                self._end_keep(unit)
            self._sweep()

    @uninterrupted
    def end_recent(self) -> None:
        """Releases the unit that a backward viewed last."""
        with self.lock:
            self._let_go_of_recent()
            self._sweep()

    @uninterrupted
    def view(self, saved: Handle) -> torch.Tensor:
        """Returns the view of a unit's weights that was saved, which pins the unit for as long as the view lives.

        Raises `UsageError` if the weights have changed since.
        """
        let_deferred_in()  # a backward that is quick and mostly within changes obeys a Ctrl-C here at the latest
        # A gradient of newer weights than the forward's would be wrong without an error.
        if self._pager.updates(saved.unit) != saved.updates:
            raise UsageError(
                f"backward through a graph made before step(): the weights of "
                f"{self._units[saved.unit].name} have changed since, or sleep() has given them back"
            )
        return self._view(saved)

    def place(self, index: int, handle: ParamHandle) -> torch.Tensor:
        """Returns a tensor without memory that has shape, strides and offset of a parameter in its unit."""
        unit = self._units[index]
        size, stride, start = unit.places.tensors[unit.handles.index(handle)]
        numel = start + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        return torch.empty(numel, dtype=unit.places.dtype, device="meta").as_strided(size, stride, start)

    def binding_at(self, address: int) -> Binding | None:
        """Returns the live binding whose storage begins at `address`, if there is one."""
        # any thread: needs no lock. One look-up is atomic, and a view that the caller holds keeps its binding alive.
        binding = self.bindings.get(address)
        return binding if binding is not None and binding.alive else None

    @uninterrupted
    def settle(self, stays: bool = False) -> None:
        """Raises `UsageError` if a view of weights is alive that may not change; with `stays` of any unit at all."""
        with self.lock:
            self.check_not_gathered("changed")
            if self._viewed(stays):
                gc.collect()  # a dead cycle, such as an exception's frames, may hold a view
            if names := ", ".join(sorted(self._viewed(stays))):
                raise UsageError(
                    f"weights cannot change while a view of some is held (of {names}): in a graph whose backward has "
                    "not run, an attribute of an autograd.Function (use save_for_backward), a list, or the frames of "
                    "an exception (sys.last_traceback). Drop the view, or clone() the values that shall stay"
                )

    def _viewed(self, stays: bool) -> set[str]:
        """Returns the names of units with a live view; see `settle`."""
        self._sweep()
        names = {self._units[view.unit].name for view in self._live}
        bound = [(unit, unit.binding) for unit in self._units if unit.stays and stays]
        return names | {unit.name for unit, at in bound if at and at.memory.viewed_beside(len(unit.handles))}

    def check_not_gathered(self, what: str) -> None:
        """Raises `UsageError` if a parameter is gathered, so that weights cannot be `what` (a participle) now."""
        gathered = [handle.name for unit in self._units for handle in unit.handles if handle.gathered]
        if gathered:
            raise UsageError(f"weights cannot be {what} while {gathered[0]} is gathered: leave the `with` block first")

    def outdate(self, units: Iterable[int]) -> None:
        """Makes torch refuse a backward through graphs that hold present weights of `units`, which will change."""
        for index in units:
            unit = self._units[index]
            if unit.stays:
                self.outdated += 1
                for handle in unit.handles:
                    increment_version(handle.parameter)

    @uninterrupted
    def vacate(self) -> None:
        """Takes the weights away from parameters of units that stay, at the engine's end or until their next use."""
        self.outdate(range(len(self._units)))
        with self.lock:
            for unit in self._units:
                if unit.stays and unit.binding is not None:
                    del self.bindings[unit.binding.memory.address]
                    unit.binding = None
                    for handle in unit.handles:
                        handle.move_out()

    @uninterrupted
    def reset(self) -> None:
        """Releases all parameters and pins that an aborted forward or backward left."""
        with self.lock:
            self._hide()
            for unit in self._units:
                if not unit.stays and (unit.binding is not None or unit.uses or unit.requested):
                    unit.uses, unit.requested, unit.requested_whole = 0, False, False
                    self._unbind(unit)
            self._requested.clear()
            self._let_go_of_recent()
            # A view that the user still holds keeps its pin: see [Note: lingering].
            self._sweep()

    @outside_of_modes
    def _view(self, saved: Handle) -> torch.Tensor:
        index = saved.unit
        unit = self._units[index]
        with self.lock:
            binding = unit.binding
            # autograd thread: a backward unpacks several views of one unit in a row, and they share one pin.
            if binding is None and self.recent is not None and self.recent.unit == index:
                binding = self.recent
            if binding is None:
                self._let_go_of_recent()
                binding = self.recent = self._take(index)
            elif unit.stays:
                self._pager.use_in_place(index)
            else:
                # compute stream: waits for the upload. The unit may have been fetched for another stream.
                self._pager.wait_upload(index)
            flat = binding.flat
            assert flat is not None
            return view_of(saved, flat if saved.dtype is unit.places.dtype else flat.view(saved.dtype))

    # -- under the lock -----------------------------------------------------------------------------

    def _bind(self, index: int, whole: bool = True) -> None:
        """Materializes a unit's parameters over a pinned device buffer; without `whole` those that train alone."""
        unit = self._units[index]
        if unit.binding is not None:
            self._pager.wait_upload(index)
            if whole and not unit.whole:
                self._materialize(unit, frozen=True)
                unit.whole = True
            return
        unit.check_not_gathered()
        binding = self._take(index)
        unit.binding, unit.whole = binding, whole or not unit.frozen
        if unit.whole:
            ParamHandle.materialize(unit.handles, binding.memory.views)
        else:
            self._materialize(unit, frozen=False)

    @staticmethod
    def _materialize(unit: _ViewState, frozen: bool) -> None:
        assert unit.binding is not None
        pairs = zip(unit.handles, unit.binding.memory.views, strict=True)
        pairs_to_show = [(handle, view) for handle, view in pairs if handle.trainable is not frozen]
        ParamHandle.materialize([handle for handle, _ in pairs_to_show], [view for _, view in pairs_to_show])

    def _show(self, index: int) -> None:
        """Makes the parameters of a unit that stays ordinary ones: a change of their class, once they have memory."""
        if index in self.shown:
            return
        unit = self._units[index]
        unit.check_not_gathered()
        self._pager.use_in_place(index)
        self.shown.add(index)
        if unit.binding is None:
            memory = self._pager.arena.viewed(self._pager.acquire(index, ahead=False), unit.places)
            self._pager.release(index)  # the memory is the unit's as long as the engine lives
            unit.binding = self.bindings[memory.address] = Binding(index, memory, None, True)
            for weights, handle in zip(memory.views, unit.handles, strict=True):
                handle.settle_in(weights)
        ParamHandle.show(unit.handles)

    def _hide(self) -> None:
        """Makes the parameters of all units that stay placeholders again. Raises `UsageError` as `_unbind` does."""
        changed: list[ParamHandle] = []
        thawed: list[ParamHandle] = []
        while self.shown:
            unit = self._units[self.shown.pop()]
            changed += ParamHandle.release(unit.handles)
            thawed += [handle for handle in unit.frozen if handle.thawed]
        self._refuse(changed, thawed)

    def _take(self, index: int) -> Binding:
        """Pins a unit. While the device has no room, `_give_way` releases one dispensable unit after the other."""
        self._sweep()
        safe = True
        while True:
            try:
                memory = self._pager.acquire(index, safe=safe)
                break
            except BudgetError:
                if not self._give_way():
                    if not safe:
                        raise
                    # A view that the user holds is in the way. The companions may still find room when they come.
                    safe = False
        pager = self._pager
        viewed = pager.arena.viewed(memory, self._units[index].places)
        binding = self.bindings[viewed.address] = Binding(index, viewed, pager.updates(index), pager.waits(index))
        self._live.append(binding)
        return binding

    def _let_go_of_recent(self) -> None:
        """Drops this object's reference to the storage of the last view of a backward."""
        if self.recent is not None:
            self.recent.let_go()
            self.recent = None

    def _give_way(self) -> bool:
        """Releases the last view of a backward, else one dispensable unit; returns False if there is none."""
        if self.recent is not None:
            self._let_go_of_recent()
            self._sweep()
            return True
        for unit in (unit for unit in self._requested if unit.dispensable):
            self._end_keep(unit)
            return True
        return False

    def _end_keep(self, unit: _ViewState) -> None:
        """Ends `keep` of a unit, and releases what is not used. Raises `UsageError` as `_unbind` does."""
        self._requested.remove(unit)
        unit.requested = False
        self._unbind_idle(unit)

    def _unbind_idle(self, unit: _ViewState) -> None:
        """Releases a unit that nobody uses or requests, or its frozen parameters if nobody requests these."""
        if unit.uses:
            return
        if not unit.requested:
            self._unbind(unit)
            self._sweep()
        elif unit.whole and not unit.requested_whole and unit.frozen:
            unit.whole = False
            self._refuse(ParamHandle.release(unit.frozen), [handle for handle in unit.frozen if handle.thawed])

    def _unbind(self, unit: _ViewState) -> None:
        """Makes a unit's parameters placeholders, and gives up the storage.

        Raises `UsageError` if a parameter was changed in place, or a frozen one set to train, while it was
        materialized. A change in place also stops the engine: device buffer and stored weights disagree from then on.
        """
        changed = ParamHandle.release(unit.handles)
        if unit.binding is not None:
            unit.binding.let_go()
            unit.binding = None
        self._refuse(changed, [handle for handle in unit.frozen if handle.thawed])

    def _refuse(self, changed: Sequence[ParamHandle], thawed: Sequence[ParamHandle]) -> None:
        """Raises `UsageError` if there are parameters that were changed in place, or set to train; see `_unbind`."""
        # Reverted before the error: otherwise the parameter would continue to train without optimizer states.
        for handle in thawed:
            handle.parameter.requires_grad = False
        if thawed and not changed:
            raise thawed[0].cannot_train()
        if changed:
            error = UsageError(
                f"parameter {changed[0].name} was changed in place while its module ran, in a copy on the device that "
                f"is never written back; change it between steps, under torch.no_grad()"
            )
            self._pager.fail(error)
            raise error

    def _sweep(self) -> None:
        """Returns the pins of bindings without a live view."""
        for binding in [binding for binding in self._live if not binding.alive]:
            address = binding.memory.address
            if self.bindings.get(address) is binding:
                del self.bindings[address]
            self._live.remove(binding)
            self._pager.release(binding.unit)
