"""What there is of one parameter, whole and in fp32: its master, its gradient, its optimizer states; read and set.

For between forwards and backwards, wherever things lie; what users call is in `calls`. A read
copies the newest values, a few chunks at a time, from the parameter's own stretch of each partition alone; of several
ranks, each gives what it holds. What is set is an edit like that of a weight (see `weights`): it goes through the
update worker to the slot that the last commit does not name, together with other edits of its unit, and is committed
with the next step. A gradient that is set is that of the next step, whose norm and clip see it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload.aio import aligned_empty
from offload.aio.protocols import Future
from offload.engine.callbacks import EngineCallbacks
from offload.engine.distributed.agreement import Kind
from offload.engine.distributed.all_or_nothing import Together, together
from offload.engine.params.paged_parameter import Place
from offload.engine.training.components import Parts
from offload.errors import BudgetError, UsageError
from offload.layout.flat_layout import Piece, Segment, pieces
from offload.layout.master_weights import join, sources
from offload.layout.opaque_state import unpack
from offload.layout.placement import CHUNK
from offload.sizes import format_size
from offload.states import State
from offload.swapper.memory.limits import free_host_memory

_EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose every value fp32 has."""

_engines: weakref.WeakSet[Looking] = weakref.WeakSet()


def engines() -> list[Looking]:
    """Those of this process: a parameter that is bound looks like any other, and one of them knows it."""
    return list(_engines)


class Looking:
    """Reads and sets what there is of the parameters of one engine. Belongs to the thread that runs the model."""

    def __init__(self, parts: Parts, callbacks: EngineCallbacks) -> None:
        self._parts, self._held, self._callbacks = parts, parts.held, callbacks
        self._states = {state.value: state for state in parts.held.mode.moments if state is not State.PACKED}
        _engines.add(self)

    def place(self, parameter: Any) -> Place | None:
        """The place of a parameter of this engine's model, also while it is bound."""
        return self._parts.weights.place(parameter)

    def state(self, place: Place, name: Any) -> State:
        """The optimizer state of that name. Raises `UsageError` where the optimizer has none."""
        by_torch = [each.name for each in self._segment(place).kept]
        if name in by_torch:
            return State.PACKED
        if name not in self._states:
            known = ", ".join(f'"{known}"' for known in (*self._states, *by_torch)) or "none"
            raise UsageError(f"this engine's optimizer keeps no state {name!r}; it keeps for each parameter: {known}")
        return self._states[name]

    def read_state(self, place: Place, name: Any) -> torch.Tensor | None:
        """What `read` gives, of an optimizer state by its name; of what torch keeps in the shape that it has there."""
        if not place.trainable:
            return None
        state = self.state(place, name)
        if state is not State.PACKED:
            return self.read(place, state)
        self._begin(state)
        self._finish()
        segment = self._segment(place)
        words = torch.empty(len(segment.packed), dtype=torch.float32, device="cpu")
        self._read_newest(place, State.PACKED, segment.packed.start, words)
        value = unpack(segment.kept, words.view(torch.uint8)).get(name)
        if value is None:
            return None
        value = torch.as_tensor(value)
        return value.to(place.device, torch.float32 if value.is_floating_point() else None, copy=True)

    def check_idle(self, place: Place, call: str) -> None:
        """Raise `UsageError` where the model runs, or the parameter has memory of its own."""
        if self._parts.hooks.running:
            raise UsageError(f"{call} is for between steps, not for inside of a forward or a backward")
        if place.gathered:
            raise UsageError(f"{call}: {place.name} is gathered; leave `with offload.gathered(...)` first")

    def read_state_local(self, place: Place, name: Any) -> torch.Tensor | None:
        """This rank's part of it, flat."""
        if not place.trainable:
            return None
        state = self.state(place, name)
        if state is not State.PACKED:
            return self.read_local(place, state)
        value = self.read_state(place, name)  # of one rank
        return None if value is None else value.view(-1)

    def read(self, place: Place, state: State) -> torch.Tensor | None:
        """A copy of a state, of the parameter's shape in fp32 on the compute device; for WEIGHT that of the master.

        None for a gradient where there is none, and for all but the weight of a frozen parameter. Every rank calls it.
        """
        if not self._settled(place, state):
            return None
        whole = torch.empty(0, device="cpu")

        def mine() -> None:
            nonlocal whole
            self._check_room(place, self._numel(place))
            whole = torch.empty(self._numel(place), dtype=torch.float32, device="cpu")
            piece = self._piece(place)
            self._read_piece(place, state, piece, whole[piece.position : piece.position + piece.numel])

        with self._together("look at a parameter", place, state) as everyone:
            if not any(everyone.settle(lambda: self._has(place, state))):
                return None
            everyone.settle(mine)
            self._complete(place, whole)
        return whole.view(self._shape(place)).to(place.device)

    def write(self, place: Place, state: State, values: torch.Tensor) -> None:
        """Make `values`, of the parameter's shape, its state; where there are several ranks all call it, and those of
        rank 0 count."""
        self._begin(state)
        if state is not State.WEIGHT and not place.trainable:
            raise UsageError(f"parameter {place.name} is frozen: it has no gradient and no optimizer states to set")
        self._check_values(place, values, self._shape(place))
        self._check_room(place, self._numel(place))
        if state is State.PACKED:
            raise UsageError(
                "what an optimizer without a kernel keeps can be looked at, and not be set; load_checkpoint loads it"
            )
        if state is State.GRAD:
            self._finish()
            self._set_gradient(place, values.detach().to("cpu", torch.float32, copy=True).contiguous().view(-1))
        else:
            self._parts.weights.edit(place.unit, place.position, values.detach().float(), state)

    def read_local(self, place: Place, state: State) -> torch.Tensor | None:
        """This rank's part of what `read` gives, flat. Alone, but for a gradient: whether there is one, all know."""
        if not self._settled(place, state):
            return None
        if state is State.GRAD:
            with self._together("look at a parameter", place, state) as everyone:
                if not any(everyone.settle(lambda: self._has(place, state))):
                    return None
        piece = self._piece(place)
        self._check_room(place, piece.numel)
        values = torch.empty(piece.numel, dtype=torch.float32, device="cpu")
        self._read_piece(place, state, piece, values)
        return values.to(place.device)

    def write_local(self, place: Place, state: State, values: torch.Tensor) -> None:
        """Make `values`, (n,), this rank's part of a state; every rank calls it, with its own part."""
        self._begin(state)
        whole = torch.empty(0, device="cpu")

        def mine() -> None:
            nonlocal whole
            piece = self._piece(place)
            self._check_values(place, values, (piece.numel,))
            self._check_room(place, 2 * self._numel(place))
            whole = torch.empty(self._numel(place), dtype=torch.float32, device="cpu")
            whole[piece.position : piece.position + piece.numel] = values.detach().to("cpu", torch.float32)

        with self._together("set a part of a parameter", place, state) as everyone:
            everyone.settle(mine)
            self._complete(place, whole)
        self.write(place, state, whole.view(self._shape(place)))

    def state_dict(self, module: nn.Module, without_frozen: bool) -> dict[str, Any]:
        """`module.state_dict()` with every tensor on the CPU."""
        weights = self._parts.weights
        with weights.leaving_out_frozen() if without_frozen else contextlib.nullcontext():
            state: dict[str, Any] = module.state_dict()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to("cpu")  # what is there already stays the same tensor: tied weights are one
        return state

    def use_in(self, module: nn.Module, place: Place) -> None:
        """Bind the parameter's unit as well whenever `module` runs."""
        self._parts.hooks.use_in(module, place.unit)

    def end_use_in(self, module: nn.Module, place: Place) -> None:
        """Take one `use_in` back."""
        self._parts.hooks.end_use_in(module, place.unit)

    # -- on the way ---------------------------------------------------------------------------------

    def _begin(self, state: State) -> None:
        self._callbacks.enter_weights()
        if state is State.GRAD:
            self._parts.gradients.end_backward()  # of one that was aborted, what it had added counts, as in torch

    def _settled(self, place: Place, state: State) -> bool:
        """Whether a parameter has this state, which lies where it belongs then, with all that was set."""
        self._begin(state)
        if state is not State.WEIGHT and not place.trainable:
            return False
        if self._parts.weights.waits(place.unit, place.position, state):
            self._parts.weights.flush()
        self._finish()
        return True

    def _finish(self) -> None:
        """Wait until all states lie where they belong, and no update reads a gradient any more."""
        if self._parts.updater is not None:
            self._parts.updater.finish(commit=False)

    def _has(self, place: Place, state: State) -> bool:
        return state is not State.GRAD or self._parts.gradients.has(place.unit, place.position)

    @contextlib.contextmanager
    def _together(self, what: str, place: Place, state: State) -> Iterator[Together]:
        """Every rank does this, with the same state of the same parameter."""
        with together(self._parts.rounds, Kind.LOOK, what) as everyone:
            everyone.same({"parameter": place.name, "what": state.value})
            yield everyone

    def _complete(self, place: Place, whole: torch.Tensor) -> None:
        """Fill in what the other ranks have; `whole` has this rank's part."""
        if self._parts.ranks is not None:
            for piece in self._pieces(place):
                self._parts.ranks.broadcast(whole[piece.position : piece.position + piece.numel], piece.rank)

    def _read_piece(self, place: Place, state: State, piece: Piece, values: torch.Tensor) -> None:
        """Fill `values` with what this rank holds."""
        if state is State.GRAD:
            if piece.numel:
                self._parts.gradients.look(place.unit, place.position, piece.position, values)
            return
        for first in range(0, piece.numel, CHUNK):
            self._read_newest(place, state, piece.start + first, values[first : first + CHUNK])

    def _read_newest(self, place: Place, state: State, start: int, values: torch.Tensor) -> None:
        """Fill `values` from element `start` of this rank's partition on."""
        joined = state is State.WEIGHT and place.trainable
        found: dict[State, torch.Tensor] = {}
        futures: list[Future] = []
        try:
            for each in sources(self._held.mode.weights) if joined else (state,):
                dtype = self._held.mode.states[each]
                buffer = aligned_empty(len(values) * dtype.itemsize)
                found[each] = torch.frombuffer(buffer, dtype=dtype)
                # A stretch that begins and ends anywhere has no checksum to compare with.
                futures += self._held.read(place.unit, each, start * dtype.itemsize, buffer, compare=False)
            for future in futures:
                future.wait()
        finally:
            for future in futures:  # no buffer is freed under a read
                with contextlib.suppress(OSError):
                    future.wait()
        values.copy_(join(found) if state is State.WEIGHT else found[state])

    def _set_gradient(self, place: Place, values: torch.Tensor) -> None:
        def mine() -> None:
            piece = self._piece(place)
            part = values[piece.position : piece.position + piece.numel]
            self._parts.gradients.replace(place.unit, place.position, piece.position, part)

        with self._together("set a gradient", place, State.GRAD) as everyone:
            if self._parts.ranks is not None:
                self._parts.ranks.broadcast(values, 0)
            if len(values):
                everyone.settle(mine)

    def _pieces(self, place: Place) -> list[Piece]:
        layout = self._parts.layouts[place.unit]
        return list(pieces(layout, self._parts.world_size, layout.segments[place.position]))

    def _segment(self, place: Place) -> Segment:
        return self._parts.layouts[place.unit].segments[place.position]

    def _piece(self, place: Place) -> Piece:
        """This rank's part of a parameter, which may be empty."""
        rank = self._parts.rank
        return next((piece for piece in self._pieces(place) if piece.rank == rank), Piece(rank, 0, 0, 0))

    def _shape(self, place: Place) -> tuple[int, ...]:
        return self._segment(place).shape

    def _numel(self, place: Place) -> int:
        return self._segment(place).numel

    def _check_values(self, place: Place, values: Any, shape: tuple[int, ...]) -> None:
        part = "" if shape == self._shape(place) else f"this rank's part of the {self._numel(place)} elements of "
        expected = f"values of {part}parameter {place.name} must be a tensor of shape {list(shape)} in fp32"
        if not isinstance(values, torch.Tensor):
            raise UsageError(f"{expected}, got {type(values).__name__}")
        if tuple(values.shape) != shape:
            raise UsageError(f"{expected}, got shape {list(values.shape)}")
        if values.dtype not in _EXACT:
            raise UsageError(f"{expected}, or in bf16 or fp16, got {values.dtype}; convert it first: value.float()")

    def _check_room(self, place: Place, numel: int) -> None:
        need = numel * torch.float32.itemsize
        free = free_host_memory()
        if need > free:
            raise BudgetError(
                f"parameter {place.name} takes {format_size(need)} of RAM in fp32, {format_size(free)} is free; lower "
                f'"host_memory" in the "offload" block, or end what else needs memory'
            )
