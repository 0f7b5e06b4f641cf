"""Which units' parameters are views of the device arena now, and which stretches of it somebody still looks at.

A *binding* is one use of a unit: one pin of the pager, and one storage laid over the unit's slice, so that torch
itself counts who looks at it. A binding ends when nothing needs it any more **and** its storage is gone:

    bound        a module of the unit runs (`uses`), or Python code asked for it by name (`kept`)
    lingering    its parameters are placeholders again, but a view of the slice lives: what autograd has just
                 unpacked, what a recomputed graph holds, what a user's function kept. Its slice is not used again
    gone         the pager may have the slice

[Note: lingering] So no view of weights ever shows other bytes than those it was made of: not in a region of
non-reentrant checkpointing, whose recomputation keeps plain views; not in a user's own saved-tensor hooks; not in a
`ctx` attribute of an `autograd.Function`. Such a view costs room on the device, and where that ends there is a
`BudgetError`. Across `step()` it cannot live: the weights change.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented, but not in __all__

from offload.engine.params.paged_parameter import Place
from offload.errors import BudgetError, UsageError
from offload.layout.flat_layout import UnitLayout
from offload.swapper.pager import Pager
from offload.torch_internals import under_modes, without_modes

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _without_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Our copies are no part of the user's computation: dispatch modes and torch.func must not see them."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not under_modes():
            return function(*args, **kwargs)
        with without_modes():
            return function(*args, **kwargs)

    return call


class Binding:
    """One pin of a unit, and the storage over its slice."""

    def __init__(self, unit: int, memory: torch.Tensor) -> None:
        self.unit = unit
        # A storage of its own, which dies with its last view; the arena's own storage never does.
        self.flat: torch.Tensor | None = from_dlpack(to_dlpack(memory))
        storage = self.flat.untyped_storage()
        self.address = storage.data_ptr()
        self._storage = StorageWeakRef(storage)

    @property
    def alive(self) -> bool:
        return not self._storage.expired()


class _Unit:
    def __init__(self, layout: UnitLayout, places: Sequence[Place]) -> None:
        self.layout, self.places = layout, places
        self.views = [
            (segment.shape, torch.empty(segment.shape, device="meta").stride(), segment.start)
            for segment in layout.segments
        ]
        """Size, stride and offset of each parameter."""
        self.uses = 0
        self.kept = False
        self.binding: Binding | None = None


class Bindings:
    """Binds and unbinds units. Forward hooks and autograd's threads call it, under its lock."""

    def __init__(
        self, layouts: Sequence[UnitLayout], places: Sequence[Sequence[Place]], pager: Pager, dtype: torch.dtype
    ) -> None:
        self._pager, self._dtype = pager, dtype
        self._lock = threading.RLock()
        self._units = [_Unit(layout, mine) for layout, mine in zip(layouts, places, strict=True)]
        self._live: list[Binding] = []
        """Every binding whose pin was not given back, oldest first."""
        self._at: dict[int, Binding] = {}
        """The newest binding at each address."""
        self._recent: Binding | None = None
        """The one of which a backward asked for a view last: it asks for several of each unit, one after the other."""
        for unit in self._units:
            self._unbind(unit)

    @_without_modes
    def use(self, index: int) -> None:
        """Bind the parameters of a unit until `unuse`, as often as it was used."""
        unit = self._units[index]
        with self._lock:
            self._bind(index)
            unit.uses += 1

    @_without_modes
    def unuse(self, index: int) -> None:
        """End one use."""
        unit = self._units[index]
        with self._lock:
            if unit.uses == 0:
                return  # reset() came in between
            unit.uses -= 1
            self._unbind_idle(unit)

    @_without_modes
    def keep(self, index: int) -> None:
        """Bind the parameters of a unit until `end_kept`, or until its room is needed."""
        with self._lock:
            self._bind(index)
            self._units[index].kept = True

    @_without_modes
    def end_kept(self) -> None:
        """Let go of what `keep` has bound, and of what a backward has asked for."""
        with self._lock:
            self._let_go_of_recent()
            for unit in self._units:
                if unit.kept:
                    unit.kept = False
                    self._unbind_idle(unit)
            self._sweep()

    @_without_modes
    def view(
        self, index: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> torch.Tensor:
        """A view of a unit's weights, `offset` in elements; its slice stays for as long as the view lives."""
        with self._lock:
            binding = self._units[index].binding
            if binding is None and self._recent is not None and self._recent.unit == index:
                binding = self._recent
            if binding is None:
                self._let_go_of_recent()
                binding = self._recent = self._take(index)
            else:
                self._pager.hold(index)  # it may have been brought for another stream
            assert binding.flat is not None
            return torch.as_strided(binding.flat.view(dtype), size, stride, offset)

    def binding_at(self, address: int) -> Binding | None:
        """The live binding whose storage begins at `address`."""
        binding = self._at.get(address)
        return binding if binding is not None and binding.alive else None

    def settle(self) -> None:
        """Before weights change: raise `UsageError` where a view of some lives on."""
        with self._lock:
            self.check_not_gathered("changed")
            self._sweep()
            if self._live:
                gc.collect()  # a view in a cycle, such as an exception's frames
                self._sweep()
            if self._live:
                names = ", ".join(sorted({self._units[binding.unit].layout.name for binding in self._live}))
                raise UsageError(
                    f"weights cannot change while a view of some is held (of {names}): in an attribute of an "
                    f"autograd.Function (use save_for_backward), in a list, in the frames of an exception "
                    f"(sys.last_traceback). Drop it, or clone() what shall stay"
                )

    def check_not_gathered(self, what: str) -> None:
        """Raise `UsageError` where a user has weights in memory of their own, so that they cannot be `what` now."""
        gathered = [place.name for unit in self._units for place in unit.places if place.gathered]
        if gathered:
            raise UsageError(f"weights cannot be {what} while {gathered[0]} is gathered: leave the `with` block first")

    @property
    def whole(self) -> bool:
        """Whether nothing is left of an aborted forward or backward."""
        with self._lock:
            self._sweep()
            idle = all(unit.binding is None and not unit.uses and not unit.kept for unit in self._units)
            lingering = all(binding.flat is None for binding in self._live)
            return idle and lingering and self._pager.pins == len(self._live)

    def reset(self) -> None:
        """Unbind all that an aborted forward or backward left behind."""
        with self._lock:
            for unit in self._units:
                unit.uses, unit.kept = 0, False
                self._unbind(unit)
            self._recent = None
            for binding in self._live:
                binding.flat = None
            self._live = [binding for binding in self._live if binding.alive]
            self._pager.set_pins([binding.unit for binding in self._live])

    # -- under the lock -----------------------------------------------------------------------------

    def _bind(self, index: int) -> None:
        unit = self._units[index]
        if unit.binding is not None:
            self._pager.hold(index)
            return
        gathered = [place.name for place in unit.places if place.gathered]
        if gathered:
            raise UsageError(f"{gathered[0]} is gathered: leave `with offload.gathered(...)` before the model runs")
        binding = self._take(index)
        assert binding.flat is not None
        flat = binding.flat.view(self._dtype)
        unit.binding = binding
        for (size, stride, start), place in zip(unit.views, unit.places, strict=True):
            place.bind(torch.as_strided(flat, size, stride, start))

    def _take(self, index: int) -> Binding:
        """Pin a unit; where there is no room, units that are only kept make some."""
        self._sweep()
        while True:
            try:
                memory = self._pager.acquire(index)
                break
            except BudgetError:
                if not self._give_way():
                    raise
        binding = Binding(index, memory)
        self._live.append(binding)
        self._at[binding.address] = binding
        return binding

    def _let_go_of_recent(self) -> None:
        if self._recent is not None:
            self._recent.flat = None
            self._recent = None

    def _give_way(self) -> bool:
        """Unbind one unit that is only kept; whether there was one."""
        if self._recent is not None:
            self._let_go_of_recent()
            self._sweep()
            return True
        for unit in self._units:
            # A recomputation may keep a frozen parameter itself, not a view of it: that must stay what it is.
            if unit.kept and not unit.uses and all(place.trainable for place in unit.places):
                unit.kept = False
                self._unbind_idle(unit)
                return True
        return False

    def _unbind_idle(self, unit: _Unit) -> None:
        if not unit.uses and not unit.kept:
            self._unbind(unit)
            self._sweep()

    def _unbind(self, unit: _Unit) -> None:
        changed = unit.binding is not None and [place.name for place in unit.places if place.changed]
        for place in unit.places:
            if not place.gathered:
                place.unbind()
        if unit.binding is not None:
            unit.binding.flat = None
            unit.binding = None
        thawed = [place for place in unit.places if place.thawed]
        for place in thawed:
            place.parameter.requires_grad = False
        if thawed:
            raise thawed[0].cannot_train()
        if changed:
            error = UsageError(
                f"parameter {changed[0]} was changed in place while its module ran, in a copy on the device that is "
                f"never written back; change it between steps, under torch.no_grad()"
            )
            self._pager.fail(error)
            raise error

    def _sweep(self) -> None:
        """Give back the pins of bindings that nobody looks at any more."""
        for binding in [binding for binding in self._live if not binding.alive]:
            if self._at.get(binding.address) is binding:
                del self._at[binding.address]
            self._live.remove(binding)  # before its pin: an interrupt in between is seen by `whole`
            self._pager.release(binding.unit)
