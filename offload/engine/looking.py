"""What there is of one parameter, whole and in fp32: its master, its gradient, its optimizer states; read and set.

The functions have DeepSpeed's names and meaning and are for between forwards and backwards, wherever things lie. A read
copies the newest values, a few chunks at a time, from the parameter's own stretch of each partition alone; of several
ranks, each gives what it holds. What is set is an edit like that of a weight (see `weights`): it goes through the
update worker to the slot that the last commit does not name, together with other edits of its unit, and is committed
with the next step. A gradient that is set is that of the next step, whose norm and clip see it.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn

from offload.aio import aligned_empty
from offload.engine.hooks import external_parameters, set_external_parameters
from offload.engine.masters import join, sources
from offload.engine.parts import Parts
from offload.engine.pieces import Piece, pieces
from offload.engine.placeholder import Place, place_of
from offload.engine.placement import CHUNK, free_host_memory
from offload.engine.rounds import Kind
from offload.engine.together import together
from offload.errors import BudgetError, UsageError
from offload.sizes import format_size
from offload.swapper.states import State
from offload.swapper.store import Future

_EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose every value fp32 has."""

_engines: weakref.WeakSet[Looking] = weakref.WeakSet()
"""Those of this process: a parameter that is bound looks like any other, and one of them knows it."""


class Looking:
    """Reads and sets what there is of the parameters of one engine. Belongs to the thread that runs the model."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._held = parts, parts.held
        self._rank, self._size = (0, 1) if parts.ranks is None else (parts.ranks.rank, parts.ranks.size)
        self._states = {state.value: state for state in parts.held.mode.moments}
        _engines.add(self)

    def place(self, parameter: Any) -> Place | None:
        """The place of a parameter of this engine's model, also while it is bound."""
        return self._parts.weights.place(parameter)

    def state(self, name: Any) -> State:
        """The optimizer state of that name. Raises `UsageError` where the optimizer has none."""
        if name not in self._states:
            known = ", ".join(f'"{known}"' for known in self._states) or "none"
            raise UsageError(f"this engine's optimizer keeps no state {name!r}; it keeps for each parameter: {known}")
        return self._states[name]

    def check_idle(self, place: Place, call: str) -> None:
        """Raise `UsageError` where the model runs, or the parameter has memory of its own."""
        if self._parts.hooks.running:
            raise UsageError(f"{call} is for between steps, not for inside of a forward or a backward")
        if place.gathered:
            raise UsageError(f"{call}: {place.name} is gathered; leave `with offload.gathered(...)` first")

    def read(self, place: Place, state: State) -> torch.Tensor | None:
        """A copy of a state, of the parameter's shape in fp32 on the compute device; for WEIGHT that of the master.

        None for a gradient where there is none, and for all but the weight of a frozen parameter. Every rank calls it.
        """
        self._begin(state)
        if state is not State.WEIGHT and not place.trainable:
            return None
        if self._parts.weights.waits(place.unit, place.position, state):
            self._parts.weights.flush()
        self._finish()
        whole = torch.empty(0, device="cpu")

        def mine() -> None:
            nonlocal whole
            self._check_room(place)
            whole = torch.empty(self._numel(place), dtype=torch.float32, device="cpu")
            self._read_mine(place, state, whole)

        rounds, ranks = self._parts.rounds, self._parts.ranks
        with together(rounds, self._rank, self._size, Kind.LOOK, "look at a parameter") as everyone:
            everyone.same({"parameter": place.name, "what": state.value})
            if not any(everyone.settle(lambda: self._has(place, state))):
                return None
            everyone.settle(mine)
            for piece in self._pieces(place) if ranks is not None else ():
                assert ranks is not None
                ranks.broadcast(whole[piece.position : piece.position + piece.numel], piece.rank)
        return whole.view(self._shape(place)).to(place.device)

    def write(self, place: Place, state: State, values: torch.Tensor) -> None:
        """Make `values`, of the parameter's shape, its state; where there are several ranks all call it, and those of
        rank 0 count."""
        self._begin(state)
        if state is not State.WEIGHT and not place.trainable:
            raise UsageError(f"parameter {place.name} is frozen: it has no gradient and no optimizer states to set")
        self._check_values(place, values)
        self._check_room(place)
        if state is State.GRAD:
            self._finish()
            self._set_gradient(place, values.detach().to("cpu", torch.float32, copy=True).contiguous().view(-1))
        else:
            self._parts.weights.edit(place.unit, place.position, values.detach().float(), state)

    def state_dict(self, module: nn.Module, without_frozen: bool) -> dict[str, Any]:
        """`module.state_dict()` with every tensor on the CPU."""
        weights = self._parts.weights
        weights.without_frozen = without_frozen
        try:
            state: dict[str, Any] = module.state_dict()
        finally:
            weights.without_frozen = False
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
        self._parts.weights.entered()
        if state is State.GRAD:
            self._parts.gradients.end_backward()  # of one that was aborted, what it had added counts, as in torch

    def _finish(self) -> None:
        """Wait until all states lie where they belong, and no update reads a gradient any more."""
        if self._parts.updater is not None:
            self._parts.updater.finish(commit=False)

    def _has(self, place: Place, state: State) -> bool:
        return state is not State.GRAD or self._parts.gradients.has(place.unit, place.position)

    def _read_mine(self, place: Place, state: State, whole: torch.Tensor) -> None:
        """Fill in what this rank holds."""
        for piece in self._pieces(place):
            if piece.rank != self._rank:
                continue
            values = whole[piece.position : piece.position + piece.numel]
            if state is State.GRAD:
                self._parts.gradients.look(place.unit, place.position, piece.position, values)
                continue
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
            piece = next((piece for piece in self._pieces(place) if piece.rank == self._rank), Piece(0, 0, 0, 0))
            part = values[piece.position : piece.position + piece.numel]
            self._parts.gradients.replace(place.unit, place.position, piece.position, part)

        rounds, ranks = self._parts.rounds, self._parts.ranks
        with together(rounds, self._rank, self._size, Kind.LOOK, "set a gradient") as everyone:
            everyone.same({"parameter": place.name})
            if ranks is not None:
                ranks.broadcast(values, 0)
            if len(values):
                everyone.settle(mine)

    def _pieces(self, place: Place) -> list[Piece]:
        layout = self._parts.layouts[place.unit]
        return list(pieces(layout, self._size, layout.segments[place.position]))

    def _shape(self, place: Place) -> tuple[int, ...]:
        return self._parts.layouts[place.unit].segments[place.position].shape

    def _numel(self, place: Place) -> int:
        return self._parts.layouts[place.unit].segments[place.position].numel

    def _check_values(self, place: Place, values: Any) -> None:
        expected = f"values of parameter {place.name} must be a tensor of shape {list(self._shape(place))} in fp32"
        if not isinstance(values, torch.Tensor):
            raise UsageError(f"{expected}, got {type(values).__name__}")
        if tuple(values.shape) != self._shape(place):
            raise UsageError(f"{expected}, got shape {list(values.shape)}")
        if values.dtype not in _EXACT:
            raise UsageError(f"{expected}, or in bf16 or fp16, got {values.dtype}; convert it first: value.float()")

    def _check_room(self, place: Place) -> None:
        need = self._numel(place) * torch.float32.itemsize
        free = free_host_memory()
        if need > free:
            raise BudgetError(
                f"parameter {place.name} takes {format_size(need)} of RAM in fp32, {format_size(free)} is free; lower "
                f'"host_memory" in the "offload" block, or end what else needs memory'
            )


# -- what users call -------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """A copy of a parameter's fp32 master, of its shape, on the compute device; of a frozen one, of its weight.

    In bf16 the master is weight and residual together, bit for bit. All functions here take a parameter of a model that
    an engine has, are called between forwards and backwards, by every rank with the same parameter, and take memory
    for that one parameter outside of all budgets. They raise `UsageError` where that does not hold, and `BudgetError`
    where the RAM has no room.
    """
    looking, place = _find(param, "safe_get_full_fp32_param")
    return looking.read(place, State.WEIGHT)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """A copy in fp32 of the gradient that the next step will use, as added so far, of the parameter's shape.

    It is the mean over the ranks, divided by the accumulation, before the clip, with the precision in which the engine
    keeps gradients (`data_types.grad_accum_dtype`). None before a backward, after `step()`, and where none came.
    """
    looking, place = _find(param, "safe_get_full_grad")
    return looking.read(place, State.GRAD)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A copy in fp32 of an optimizer state such as "exp_avg", of the parameter's shape; None of a frozen parameter.

    Zeros before the first step. Raises `UsageError`, with the names that there are, for another one.
    """
    looking, place = _find(param, "safe_get_full_optimizer_state")
    return looking.read(place, looking.state(optim_state_key))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value`, of the parameter's shape, its fp32 master; the weight is rounded from it.

    Like every value that is set here it is copied; of several ranks, all of which come here, that of rank 0 counts.
    """
    looking, place = _find(param, "safe_set_full_fp32_param")
    looking.write(place, State.WEIGHT, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value`, of the parameter's shape, the gradient that the next step will use; later backwards add to it."""
    looking, place = _find(param, "safe_set_full_grad")
    looking.write(place, State.GRAD, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Make `value`, of the parameter's shape, an optimizer state such as "exp_avg". How often the parameter was updated
    stays."""
    looking, place = _find(param, "safe_set_full_optimizer_state")
    looking.write(place, looking.state(optim_state_key), value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that the forward of `module` uses `parameter`, which belongs to another module.

    Seldom needed: a parameter that is used anywhere is found when a function of torch is given it. Functions that torch
    does not see, such as those of a C++ extension that is called directly, read memory; what they are given must be
    registered, before `offload.initialize` (for modules of the model) or after. A second time changes nothing.
    """
    _check_external("register_external_parameter", module, parameter)
    if not _is_in(parameter, external_parameters(module)):
        set_external_parameters(module, [*external_parameters(module), parameter])
        owner = _owner(parameter)
        if owner is not None:
            owner[0].use_in(module, owner[1])


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take `register_external_parameter` back. Raises `UsageError` where there was none."""
    _check_external("unregister_external_parameter", module, parameter)
    if not _is_in(parameter, external_parameters(module)):
        raise UsageError(f"this parameter was not registered with this {type(module).__name__}")
    set_external_parameters(module, [other for other in external_parameters(module) if other is not parameter])
    owner = _owner(parameter)
    if owner is not None:
        owner[0].end_use_in(module, owner[1])


def _find(parameter: Any, call: str) -> tuple[Looking, Place]:
    """Whose `parameter` is, and where it lies. Raises `UsageError` where it cannot be looked at now."""
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"{call} expects a parameter of a model under an engine, got {type(parameter).__name__}")
    owner = _owner(parameter)
    if owner is None:
        place = place_of(parameter)
        if place is not None:
            _ = place.engine  # raises: it was destroyed
        raise UsageError(
            f"{call} expects a parameter of a model under an engine; this one, of shape {list(parameter.shape)}, is of "
            f"none: take it from engine.module"
        )
    owner[0].check_idle(owner[1], call)
    return owner


def _owner(parameter: nn.Parameter) -> tuple[Looking, Place] | None:
    """The engine that has a parameter now; None where there is none, or none any more."""
    for looking in list(_engines):
        place = looking.place(parameter)
        if place is not None and place.keeper is not None:
            return looking, place
    return None


def _check_external(call: str, module: Any, parameter: Any) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"{call} expects a module and a parameter, got {type(module).__name__} and {type(parameter).__name__}"
        )


def _is_in(parameter: nn.Parameter, parameters: list[nn.Parameter]) -> bool:
    """By identity: tensors compare element by element."""
    return any(other is parameter for other in parameters)
