"""Access to the full fp32 values of one parameter: its master, its gradient, its optimizer states.

Users call `safe_get_*` and `safe_set_*`, at the end of this file, between forwards and backwards. The values may be in
any tier. A read copies the newest values, a few chunks at a time, from the parameter's own segment of each partition.
With several ranks, each rank contributes its shard. A write is an edit, like the edit of a weight (see `edits`): it
goes through the update worker to the slot that the last commit does not name, together with other edits of its unit,
and is committed with the next step. The next step uses a written gradient and includes it in norm and clip.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.aio import aligned_empty
from offload.aio.protocols import Future, wait_for_all
from offload.distributed.agreement import AllOrNothing, Collective, all_or_nothing
from offload.distributed.process_group import Communication
from offload.engine.callbacks import EngineCallbacks
from offload.engine.components import EngineComponents
from offload.engine.edits import WeightEdits
from offload.engine.hooks import ModuleHooks
from offload.engine.keywords import refuse
from offload.engine.params import ParamHandle, handle_of
from offload.errors import BudgetError, UsageError
from offload.layout import optimizer_states
from offload.layout.flat_layout import ParameterSegment, SegmentShard, segment_shards, unpack
from offload.layout.modes import TORCH, Mode
from offload.layout.optimizer_states import join, master_sources, states_of, weights_of
from offload.layout.placement import CHUNK
from offload.layout.units import external_parameters, set_external_parameters
from offload.sizes import count_of, format_size
from offload.states import State
from offload.swapper.memory.limits import free_host_memory

if TYPE_CHECKING:
    from offload.engine.state import TrainingState

# -- param values --------------------------------------------------------------------------------------
#
# Checks of values that a user gives for a parameter, and of the memory for a copy of it.


_EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that fp32 represents exactly."""


def check_values(name: str, values: Any, shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Raises `UsageError` for values that are no tensor of `shape`, or whose dtype fp32 does not represent.

    `whole` is the shape of the parameter; `shape` differs from it if the values are one rank's shard.
    """
    of = "" if shape == whole else f"this rank's shard of the {math.prod(whole)} elements of "
    expected = f"values of {of}parameter {name} must be a tensor of shape {list(shape)} in fp32"
    if not isinstance(values, torch.Tensor):
        raise UsageError(f"{expected}, got {type(values).__name__}")
    if tuple(values.shape) != shape:
        raise UsageError(f"{expected}, got shape {list(values.shape)}")
    if values.dtype not in _EXACT:
        raise UsageError(f"{expected}, or in bf16 or fp16, got {values.dtype}; convert it first: value.float()")


def check_room(name: str, numel: int) -> None:
    """Raises `BudgetError` if the RAM has no room for so many elements of a parameter in fp32."""
    need = numel * torch.float32.itemsize
    free = free_host_memory()
    if need > free:
        raise BudgetError(
            f"parameter {name} takes {format_size(need)} of RAM in fp32, {format_size(free)} is free; lower "
            '"host_memory" in the "offload" block, or end other programs that use memory'
        )


# -- param access --------------------------------------------------------------------------------------


# Weak, since an engine that the user has dropped shall not be kept alive.
_engines: weakref.WeakSet[ParamAccess] = weakref.WeakSet()


def engines() -> list[ParamAccess]:
    """Returns the accessors of all engines of this process: a bound parameter does not name its engine."""
    return list(_engines)


class ParamAccess:
    """Reads and sets the values of the parameters of one engine. Belongs to the thread that runs the model."""

    def __init__(self, components: EngineComponents, callbacks: EngineCallbacks) -> None:
        self._components, self._shards, self._callbacks = components, components.shards, callbacks
        _engines.add(self)

    @property
    def sent(self) -> Communication:
        """The collectives and bytes that this rank has sent for the engine, by kind."""
        return self._components.world.sent

    def handle(self, parameter: Any) -> ParamHandle | None:
        """Returns the handle of a parameter of this engine's model, bound or not, or None."""
        return self._components.weights.handle(parameter)

    def state(self, handle: ParamHandle, name: Any) -> State:
        """Returns the optimizer state of a name such as "exp_avg"; PACKED for packed states.

        Raises `UsageError` if the optimizer keeps no state of that name.
        """
        states = self.moments(handle) | dict.fromkeys(self.packed_states(handle), State.PACKED)
        if name not in states:
            known = ", ".join(f'"{known}"' for known in states) or "none"
            raise UsageError(
                f"the optimizer of this engine keeps no state {name!r} of {handle.name}, whose states are: {known}"
            )
        return states[name]

    def moments(self, handle: ParamHandle) -> dict[str, State]:
        """Returns the moments of a parameter by the names that torch gives them."""
        part = handle.parts[0]  # all have the same states
        return states_of(self._shards.mode, self._components.layouts[part.unit], self._segment(part))

    def packed_states(self, handle: ParamHandle) -> list[str]:
        """Returns the names of the packed states of a parameter: all of an optimizer without a kernel, or numbers."""
        return [field.name for field in self._segment(handle.parts[0]).kept]

    def read_state(self, handle: ParamHandle, name: Any) -> torch.Tensor | None:
        """Returns a copy of an optimizer state as `read` does, or None for a frozen parameter.

        A state of an optimizer without a kernel has the shape that torch gives it, and is None before the first update.
        All ranks call this.
        """
        if not handle.trainable:
            return None
        state = self.state(handle, name)
        if state is not State.PACKED:
            return self.read(handle, state)
        # Such an optimizer steps whole parameters, so no trainable parameter is in several parts.
        self._begin(state)
        self._finish()
        segment = self._segment(handle)
        # Packed states are one blob for each parameter, stored as fp32 words whatever their dtypes. One rank holds the
        # blob, or each.
        words = torch.empty(len(segment.packed), dtype=torch.float32, device="cpu")

        def read_words() -> None:
            if segment.packed_rank == self._components.world.ranks.rank:
                self._read_newest(handle, State.PACKED, segment.packed.start, words)

        with self._together("access a parameter", handle, state) as everyone:
            everyone.settle(read_words)
            self._components.world.ranks.broadcast(words, segment.packed_rank)
        value = unpack(segment.kept, words.view(torch.uint8)).get(name)
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            # A float would have the default dtype of the process.
            value = torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None, device="cpu")
        return value.to(handle.device, torch.float32 if value.is_floating_point() else None, copy=True)

    def read_state_local(self, handle: ParamHandle, name: Any) -> torch.Tensor | None:
        """Returns this rank's partition of an optimizer state, flat, or None for a frozen parameter."""
        if not handle.trainable:
            return None
        state = self.state(handle, name)
        if state is not State.PACKED:
            return self.read_local(handle, state)
        value = self.read_state(handle, name)
        # Not partitioned: one rank of each replica holds the whole state.
        here = self._segment(handle).packed_rank == self._components.world.ranks.shard
        return None if value is None else value.view(-1) if here else value.view(-1)[:0]

    def read(self, handle: ParamHandle, state: State) -> torch.Tensor | None:
        """Returns a copy of a state in fp32, in the parameter's shape, on the compute device. Every rank calls it.

        For WEIGHT the copy is of the master. If only some parts have a gradient, the other parts are zero. Returns None
        for a gradient that no rank holds, and for any state but the weight of a frozen parameter. Raises `BudgetError`
        if the RAM has no room for the copy.
        """
        return _joined(handle, [self._read_part(part, state) for part in handle.parts])

    def _read_part(self, handle: ParamHandle, state: State) -> torch.Tensor | None:
        if not self._settled(handle, state):
            return None
        if handle.form.content:
            return handle.read().float()
        numel, whole = math.prod(handle.shape), torch.empty(0, dtype=torch.float32, device="cpu")

        def read_shard() -> None:
            nonlocal whole
            check_room(handle.name, numel)
            whole = torch.empty(numel, dtype=torch.float32, device="cpu")
            shard = self._own_shard(handle)
            self._read_own_shard(handle, state, shard, whole[shard.position : shard.position + shard.numel])

        with self._together("access a parameter", handle, state) as everyone:
            if not any(everyone.settle(lambda: self._has(handle, state))):
                return None
            everyone.settle(read_shard)
            self._complete(handle, whole)
        # The memory was allocated inside of the collective, so a rank without room has failed the call on all ranks.
        return whole.view(handle.shape).to(handle.device)

    def read_weight(self, handle: ParamHandle) -> torch.Tensor:
        """Returns a copy of the weights that ranks store, as `read` does, in the dtype of the weights."""
        parts = []
        for part in handle.parts:
            values = self._read_part(part, State.WEIGHT)
            assert values is not None, "every parameter has weights"
            weights = weights_of(values.to("cpu").view(-1), self._shards.mode_of(part.unit).weights)
            parts.append(weights.to(handle.device).view(part.shape))
        return handle.form.join(parts)

    def write(self, handle: ParamHandle, state: State, values: torch.Tensor) -> None:
        """Replaces a state by a copy of `values`, on any device. All ranks call it, and the values of rank 0 are used.

        Raises:
            UsageError: if the parameter is frozen, the values have another shape or dtype, or the state cannot be set.
            BudgetError: if the RAM has no room for a copy.
        """
        self._begin(state)
        if state is not State.WEIGHT and not handle.trainable:
            raise UsageError(f"parameter {handle.name} is frozen: it has no gradient and no optimizer states to set")
        check_values(handle.name, values, handle.shape, handle.shape)
        check_room(handle.name, max(math.prod(part.shape) for part in handle.parts))
        if state is State.PACKED:
            raise UsageError(
                "packed states, as those of an optimizer without a kernel, can be read but not set; "
                "engine.load_checkpoint loads them"
            )
        if state is State.GRAD:
            # The gradient of the last step may be replaced only after no update reads it.
            self._finish()
        for part, part_values in zip(handle.parts, handle.form.divide(values.detach()), strict=True):
            if state is State.GRAD:
                self._set_gradient(part, part_values.to("cpu", torch.float32, copy=True).contiguous().view(-1))
            else:
                self._components.weights.edit(part.unit, part.position, part_values.float(), state)

    def read_local(self, handle: ParamHandle, state: State) -> torch.Tensor | None:
        """Returns this rank's partition of the result of `read`, flat.

        No collective, with two exceptions. For a gradient all ranks must agree whether there is one. With a pending
        edit of this state all ranks write that edit together.
        """
        values = _joined(handle, [self._read_own_part(part, state) for part in handle.parts])
        return None if values is None else values.view(-1)

    def _read_own_part(self, handle: ParamHandle, state: State) -> torch.Tensor | None:
        if not self._settled(handle, state):
            return None
        if state is State.GRAD:
            with self._together("access a parameter", handle, state) as everyone:
                if not any(everyone.settle(lambda: self._has(handle, state))):
                    return None
        if content := handle.form.content:
            if self._components.world.ranks.size == 1:
                return handle.read().float().view(-1)
            raise UsageError(
                f"no rank has values of {handle.name} of its own: it is stored in {content}, whose bytes ranks divide; "
                "read the whole parameter with safe_get_full_fp32_param"
            )
        shard = self._own_shard(handle)
        check_room(handle.name, shard.numel)
        values = torch.empty(shard.numel, dtype=torch.float32, device="cpu")
        self._read_own_shard(handle, state, shard, values)
        return values.to(handle.device)

    def write_local(self, handle: ParamHandle, state: State, values: torch.Tensor) -> None:
        """Replaces this rank's partition of a state by a copy of `values`, (n,), part by part. All ranks call it.

        Raises:
            UsageError: as in `write`.
            BudgetError: if the RAM has no room for two copies of the whole parameter.
        """
        self._begin(state)
        shards = [self._own_shard(part) for part in handle.parts]
        own_numel = [shard.numel for shard in shards]
        # All ranks refuse an invalid value of one rank, because the write of each part below is a collective.
        with self._together("set a shard of a parameter", handle, state) as everyone:
            everyone.settle(lambda: check_values(handle.name, values, (sum(own_numel),), handle.shape))
        for part, shard, own in zip(handle.parts, shards, values.detach().split(own_numel), strict=True):
            self._write_own_part(part, state, shard, own)

    def _write_own_part(self, handle: ParamHandle, state: State, shard: SegmentShard, values: torch.Tensor) -> None:
        """Replaces a state of one segment. Each rank passes the values of its own shard."""
        numel, whole = math.prod(handle.shape), torch.empty(0, dtype=torch.float32, device="cpu")

        def take_shard() -> None:
            nonlocal whole
            check_room(handle.name, 2 * numel)
            whole = torch.empty(numel, dtype=torch.float32, device="cpu")
            whole[shard.position : shard.position + shard.numel] = values.to("cpu", torch.float32)

        # Ranks hold segments of any length. Each rank fills its segment into a copy of the whole parameter, and `write`
        # takes that copy: one path for edits.
        with self._together("set a shard of a parameter", handle, state) as everyone:
            everyone.settle(take_shard)
            self._complete(handle, whole)
        self.write(handle, state, whole.view(handle.shape))

    def state_dict(self, module: nn.Module, without_frozen: bool) -> dict[str, Any]:
        """Returns `module.state_dict()` with every tensor on the CPU, optionally without frozen parameters."""
        weights = self._components.weights
        with weights.leaving_out_frozen() if without_frozen else contextlib.nullcontext():
            state: dict[str, Any] = module.state_dict()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to("cpu")  # tensors on the CPU stay the same objects: tied weights stay tied
        return state

    @property
    def mode(self) -> Mode:
        """The states of a trainable element."""
        return self._shards.mode

    @property
    def hooks(self) -> ModuleHooks:
        """The hooks that bind units when modules run."""
        return self._components.hooks

    # -- on the way ---------------------------------------------------------------------------------

    def _begin(self, state: State) -> None:
        self._callbacks.enter_weights()
        if state is State.GRAD:
            self._components.gradients.complete()  # gradients of an aborted backward count, as in torch

    def _settled(self, handle: ParamHandle, state: State) -> bool:
        """Returns True if a parameter has this state. The newest values, with pending edits, are then on their tier."""
        self._begin(state)
        if state is not State.WEIGHT and not handle.trainable:
            return False
        # Edits of a unit are collected and written together, so a read of an edited value must write them first.
        if self._components.weights.waits(handle.unit, handle.position, state):
            self._components.weights.flush()
        self._finish()
        return True

    def _finish(self) -> None:
        """Waits until all states are stored on their tier, and no update reads a gradient any more."""
        self._components.update_worker.finish(commit=False)

    def _has(self, handle: ParamHandle, state: State) -> bool:
        return state is not State.GRAD or handle.position in self._components.gradients.present(handle.unit)

    @contextlib.contextmanager
    def _together(self, what: str, handle: ParamHandle, state: State) -> Iterator[AllOrNothing]:
        """Yields a collective for all ranks to read or set the same state of the same parameter."""
        with all_or_nothing(self._components.agreement, Collective.LOOK, what) as everyone:
            everyone.same({"parameter": handle.name, "what": state.value})
            yield everyone

    def _complete(self, handle: ParamHandle, whole: torch.Tensor) -> None:
        """Receives the segments of other ranks into `whole`, which holds this rank's segment already."""
        for shard in self._shards_of(handle):
            self._components.world.ranks.broadcast(whole[shard.position : shard.position + shard.numel], shard.rank)

    def _read_own_shard(self, handle: ParamHandle, state: State, shard: SegmentShard, values: torch.Tensor) -> None:
        """Fills `values`, (shard.numel,) fp32 on the CPU, with the elements that this rank holds."""
        if state is State.GRAD:
            if shard.numel:
                self._components.gradients.look(handle.unit, handle.position, shard.position, values)
            return
        for first in range(0, shard.numel, CHUNK):
            self._read_newest(handle, state, shard.start + first, values[first : first + CHUNK])

    def _read_newest(self, handle: ParamHandle, state: State, start: int, values: torch.Tensor) -> None:
        """Fills `values`, (n,) fp32 on the CPU, with the newest elements from `start` of this rank's partition on."""
        # A bf16 weight and the low bits of its master are two states on disk that together are the fp32 master.
        joined, mode = state is State.WEIGHT and handle.trainable, self._shards.mode_of(handle.unit)
        parts: dict[State, torch.Tensor] = {}
        futures: list[Future] = []
        try:
            for source in master_sources(mode.weights) if joined else optimizer_states.moment_sources(mode, state):
                part, dtype = mode.part(source, start, start + len(values)), mode.states[source]
                buffer = aligned_empty(len(part) * dtype.itemsize)
                parts[source] = torch.frombuffer(buffer, dtype=dtype)
                futures += self._shards.read(handle.unit, source, part.start * dtype.itemsize, buffer)
            for future in futures:
                future.wait()
        finally:
            wait_for_all(futures)  # no buffer is freed under a read
        values.copy_(join(parts) if state is State.WEIGHT else optimizer_states.read(mode, parts, state))

    def _set_gradient(self, handle: ParamHandle, values: torch.Tensor) -> None:
        def replace_shard() -> None:
            shard = self._own_shard(handle)
            values_here = values[shard.position : shard.position + shard.numel]
            self._components.gradients.replace(handle.unit, handle.position, shard.position, values_here)

        # A collective, since rank 0's values go to all ranks and each keeps its own segment.
        with self._together("set a gradient", handle, State.GRAD) as everyone:
            self._components.world.ranks.broadcast(values, 0)
            if len(values):
                everyone.settle(replace_shard)

    def _shards_of(self, handle: ParamHandle) -> list[SegmentShard]:
        """Returns the segments of a parameter, with their ranks in the first replica, which sends for all replicas."""
        layout = self._components.layouts[handle.unit]
        return list(segment_shards(layout, self._components.world.ranks.mesh.shards, layout.segments[handle.position]))

    def _segment(self, handle: ParamHandle) -> ParameterSegment:
        return self._components.layouts[handle.unit].segments[handle.position]

    def _own_shard(self, handle: ParamHandle) -> SegmentShard:
        """Returns this rank's segment of a parameter, which may be empty."""
        own = self._components.world.ranks.shard
        return next((shard for shard in self._shards_of(handle) if shard.rank == own), SegmentShard(own, 0, 0, 0))


def _joined(handle: ParamHandle, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Returns the values of a parameter, joined from its parts' values; None if no part has any."""
    present = next((values for values in parts if values is not None), None)
    if present is None:
        return None
    return handle.form.join([torch.zeros_like(present) if values is None else values for values in parts])


# -- optimizer states ----------------------------------------------------------------------------------


_STEP = "step"
_MOST_STEPS = 2**53
"""Bound of a count: torch's optimizers keep it as a float, which is exact below."""


class OptimizerStates:
    """The states of parameters as in the `state_dict` of an optimizer of torch, in RAM, for `Optimizer.state_dict`.

    Every rank calls each method for the same parameters.
    """

    def __init__(self, param_access: ParamAccess, training_state: TrainingState) -> None:
        self._param_access, self._training_state = param_access, training_state

    def read(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Returns copies of the states on the CPU, by name; none before the first update and for a frozen parameter."""
        handle = self._handle(parameter)
        count = self._steps(handle)
        if not count:
            return {}
        states = {
            name: self._param_access.read_state(handle, name) for name in self._param_access.packed_states(handle)
        }
        values = {name: value.cpu() for name, value in states.items() if value is not None}
        # torch's own code keeps the count among its states, if it counts.
        if self._param_access.mode.optimizer == TORCH:
            return values
        # torch's optimizers keep the count as a floating-point tensor.
        values[_STEP] = torch.tensor(float(count), dtype=torch.float32, device="cpu")
        for name, state in self._param_access.moments(handle).items():
            value = self._param_access.read(handle, state)
            assert value is not None
            values[name] = value.cpu()
        return values

    def check(self, parameter: nn.Parameter, state: Mapping[str, Any], number: int) -> None:
        """Checks that `state` contains each moment of the optimizer in the parameter's shape, and a valid count.

        It is empty before the first step. `number` is the parameter's in the state dict. Raises `UsageError` if a
        moment is missing or has another shape; if "step" is not a whole number of at least 0; if the parameter is
        frozen, or the optimizer has no kernel.
        """
        handle = self._handle(parameter)
        if not state and not self._steps(handle):
            return
        if State.PACKED in self._param_access.mode.moments:
            raise UsageError(
                "packed states, as those of an optimizer without a kernel, can be read but not set; "
                "engine.load_checkpoint loads them"
            )
        # An empty state resets a parameter that was updated, so there is nothing to compare.
        names = list(self._param_access.moments(handle)) if state else []
        shape = handle.shape
        for name in names:
            value = state.get(name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                description = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise UsageError(
                    f"state {number}, of parameter {handle.name}, must contain {', '.join(names)}, each a tensor of "
                    f"shape {list(shape)}; its {name} is {description}"
                )
        if names and not handle.trainable:
            raise UsageError(
                f"state {number}, of parameter {handle.name}, cannot be set: the parameter is frozen and has no "
                "optimizer states; leave its state out of the dict"
            )
        # Here and not in `write`, which would have replaced moments by the time that it reads the count.
        if state and _count(state) is None:
            raise UsageError(
                f"state {number}, of parameter {handle.name}, may contain {_STEP!r}, the whole number of updates, got "
                f"{state[_STEP]!r}"
            )

    def write(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Replaces the states of a parameter by those that `check` has accepted. Other entries have no effect.

        An empty state resets the parameter to before the first step.
        """
        handle = self._handle(parameter)
        if not state and not self._steps(handle):
            return
        # A parameter that trained in an earlier run and is frozen now has a count to reset, but no moments.
        for name, moment in self._param_access.moments(handle).items() if handle.trainable else ():
            value = state[name].float() if state else torch.zeros(handle.shape, dtype=torch.float32, device="cpu")
            self._param_access.write(handle, moment, value)
        count = _count(state) if state else 0
        assert count is not None, "check has accepted the state"
        for part in handle.parts:
            self._training_state.parameter_steps[part.unit][part.position] = count

    def _steps(self, handle: ParamHandle) -> int:
        """Returns the largest number of updates of a parameter's parts; 0 if it is frozen."""
        return max(self._training_state.parameter_steps[part.unit][part.position] for part in handle.parts)

    def _handle(self, parameter: nn.Parameter) -> ParamHandle:
        handle = self._param_access.handle(parameter)
        assert handle is not None, "the groups contain the parameters of the engine"
        return handle


def _count(state: Mapping[str, Any]) -> int | None:
    """Returns the number of updates in a state that is not empty; None if its "step" is not a whole number >= 0."""
    # A state without a count, such as SGD's, counts as one update, so that `read` finds it again.
    count = state.get(_STEP, 1)
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    number: float
    if isinstance(count, numbers.Integral):
        number = int(count)
    elif isinstance(count, numbers.Real):
        number = float(count)
    else:
        return None
    # The bound is first: it is False for NaN and inf, which no integer represents.
    return int(number) if 0 <= number < _MOST_STEPS and number == int(number) else None


# -- gathered ------------------------------------------------------------------------------------------
#
# Ordinary memory for parameters between steps: `offload.gathered`.


@contextlib.contextmanager
def gathered(
    params: Any, modify: bool = False, *, modifier_rank: int | None = None, enabled: bool = True
) -> Iterator[None]:
    """Gives parameters ordinary memory inside of a `with` block, between steps.

    The memory is a copy on the compute device, outside of all budgets. `step()` must not be called. If all parameters
    of a model are gathered, the model runs on that memory, without paging and without gradients, for instance to
    generate. If only some are gathered, the model does not run. Parameters of an ordinary model are left alone.

    On several ranks, every rank enters with the same parameters if `modify` is set. For each unit, all ranks take the
    changes of the lowest rank that made any, so `if rank == 0:` may be used inside.

    Args:
        params: a parameter, an iterable of parameters, or a module.
        modify: True to write changes to the swap tiers at the end, also after an exception.
        modifier_rank: DeepSpeed's name for `modify`; only rank 0.
        enabled: False to do nothing.

    Yields:
        None, once, while the parameters are ordinary ones.

    Raises:
        BudgetError: if there is no room for the memory.
        UsageError: if called inside of a forward or a backward, or if a parameter changed shape or dtype, or changed at
            all without `modify`; such changes are dropped.
    """
    refuse(modifier_rank=modifier_rank)
    if not enabled:
        yield
        return
    modify = modify or modifier_rank is not None
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    elif not isinstance(params, Iterable):
        raise UsageError(f"gathered() takes parameters or a module, got {type(params).__name__}")
    placeholders = map(handle_of, params)
    handles = list(dict.fromkeys(handle for handle in placeholders if handle is not None))
    # `fetch` returns True only while a forward or a backward runs.
    for handle in handles:
        if handle.fetch():
            raise UsageError(
                "gathered() must be called outside of forwards and backwards; inside of them parameters are available"
            )
    taken: list[ParamHandle] = []
    try:
        _take(handles, taken)
        with contextlib.ExitStack() as stack:
            for engine in dict.fromkeys(handle.engine for handle in handles):
                stack.enter_context(engine.on_gathered({id(handle.parameter) for handle in handles}))
            yield
    finally:
        misfits, changed = _let_go(taken)
        if modify:
            _write_back(handles, changed)
    if misfits:
        raise misfits[0]
    if changed and not modify:
        raise UsageError(
            f"parameter {changed[0][0].name} was changed inside of gathered(), and the change is dropped: pass "
            "modify=True, or to GatheredParameters modifier_rank=0"
        )


def _write_back(handles: Sequence[ParamHandle], changed: Sequence[tuple[ParamHandle, torch.Tensor]]) -> None:
    """Writes changed values to the swap tiers, unit by unit, and ends the edits of each unit."""
    # Includes units without a change, and units for which this rank had no room: every rank must make the same
    # `end_edits` calls, in the same order.
    new = {
        part: part_values
        for handle, values in changed
        for part, part_values in zip(handle.parts, handle.form.divide(values), strict=True)
    }
    parts: dict[tuple[WeightEdits, int], list[ParamHandle]] = {}
    for part in (part for handle in handles for part in handle.parts):
        parts.setdefault((part.engine, part.unit), []).append(part)
    for (engine, unit), parts_of_unit in parts.items():
        for part in parts_of_unit:
            if part in new:
                part.edit(new[part])
        engine.end_edits(unit)


def _take(handles: Collection[ParamHandle], taken: list[ParamHandle]) -> None:
    """Gives parameters ordinary memory, and appends each to `taken`. Without room it takes none: `BudgetError`."""
    free = free_host_memory()
    # Linux kills a process that takes more, while an accelerator raises an error.
    if any(handle.device.type == "cpu" for handle in handles) and _nbytes(handles) > free:
        raise _no_room(handles, f"{format_size(free)} are")
    try:
        for handle in handles:
            handle.gather(handle.read())
            taken.append(handle)
    except torch.OutOfMemoryError as error:
        # The user has not seen these parameters, so they are dropped without a search for changes, which would need
        # memory.
        while taken:
            taken.pop().let_go()
        raise _no_room(handles, "less is") from error


def _let_go(taken: Iterable[ParamHandle]) -> tuple[list[UsageError], list[tuple[ParamHandle, torch.Tensor]]]:
    """Takes the memory away again. Returns an error for each misfit, or, without misfits, the changed values.

    The caller raises the errors after its `finally`; inside it they would replace an exception of the user. With a
    misfit no change is kept, but on several ranks this rank still takes part in the end of the edits.
    """
    released = [(handle, handle.let_go()) for handle in taken]
    misfits: list[UsageError] = []
    changed: list[tuple[ParamHandle, torch.Tensor]] = []
    # One after the other: otherwise a whole model would be in memory twice.
    while released:
        handle, values = released.pop(0)
        try:
            old = handle.read()
        except torch.OutOfMemoryError:
            # The user has taken the memory that was left. Moving the values to the CPU frees as much as the comparison
            # needs.
            values = values.cpu()
            old = handle.read().cpu()
        if values.shape != old.shape or values.dtype != old.dtype:
            kinds = f"{list(values.shape)} {values.dtype}, it was {list(old.shape)} {old.dtype}"
            misfits.append(UsageError(f"a gathered parameter became {kinds}"))
        elif not _same_bits(values, old):
            changed.append((handle, values))
        del values
    return misfits, [] if misfits else changed


def _nbytes(handles: Iterable[ParamHandle]) -> int:
    return sum(math.prod(handle.shape) * handle.parameter.element_size() for handle in handles)


def _no_room(handles: Collection[ParamHandle], free: str) -> BudgetError:
    return BudgetError(
        f"{count_of(len(handles), 'gathered parameter')} would take {format_size(_nbytes(handles))} of the device's "
        f"memory, {free} free: gather fewer at a time, or lower device_memory. trl gathers all to generate: set "
        "ds3_gather_for_generation=False, and the weights are paged"
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors of one kind are equal bit for bit: a NaN equals itself, and -0 differs from 0."""
    one, other = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


# -- tensor api ----------------------------------------------------------------------------------------
#
# Functions, named as in DeepSpeed, that read or set a parameter's values, or declare that a module uses a parameter.
#
# Each function finds the `ParamAccess` of the engine that owns the parameter, and calls it.


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy of a parameter's fp32 master, or of the weight if the parameter is frozen.

    In bf16 the stored weight and the stored low bits are together the master, bit for bit.

    All functions of this module that read or set values are called between forwards and backwards, and by every rank
    with the same parameter, unless the function says that a rank may call it alone. They allocate memory for that one
    parameter outside of all budgets.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        The copy, of the parameter's shape, on the compute device.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_full_fp32_param")
    return access.read(handle, State.WEIGHT)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns a copy in fp32 of the gradient that the next step will use, as accumulated so far.

    The gradient is the mean over the ranks, divided by the number of micro-batches of a step, before the clip. Its
    values have the precision of the engine's gradients (`data_types.grad_accum_dtype`).

    Args:
        param: a parameter of a model under an engine.

    Returns:
        The copy, of the parameter's shape, on the compute device. None before a backward, after `step()`, and if the
        parameter is frozen or received no gradient.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_full_grad")
    return access.read(handle, State.GRAD)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns a copy in fp32 of an optimizer state such as "exp_avg".

    Args:
        param: a parameter of a model under an engine.
        optim_state_key: name of the state.

    Returns:
        The copy, of the parameter's shape, on the compute device. Before the first step the copy is zeros. None if the
        parameter is frozen. A state of an optimizer without a kernel has the shape that torch gives the state, and is
        None before the first step.

    Raises:
        UsageError: if the optimizer keeps no such state (the message names those that exist); if `param` belongs to no
            engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_full_optimizer_state")
    return access.read_state(handle, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces a parameter's fp32 master; the weight is rounded from the master.

    Args:
        param: a parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. Every rank passes a value, and
            rank 0's value is used.

    Raises:
        UsageError: if `param` is frozen and `value` differs from the weight; if `value` has another shape or dtype; if
            `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for a copy.
    """
    access, handle = _find(param, "safe_set_full_fp32_param")
    access.write(handle, State.WEIGHT, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the gradient that the next step will use. Later backwards add to the new gradient.

    Args:
        param: a trainable parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. Every rank passes a value, and
            rank 0's value is used.

    Raises:
        UsageError: if `param` is frozen; if `value` has another shape or dtype; if `param` belongs to no engine, is
            gathered, or the model runs.
        BudgetError: if the RAM has no room for a copy.
    """
    access, handle = _find(param, "safe_set_full_grad")
    access.write(handle, State.GRAD, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces an optimizer state such as "exp_avg". The parameter's number of updates does not change.

    Args:
        param: a trainable parameter of a model under an engine.
        value: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied. Every rank passes a value, and
            rank 0's value is used.
        optim_state_key: name of the state.

    Raises:
        UsageError: if the optimizer keeps no such state or has no kernel; if `param` is frozen; if `value` has another
            shape or dtype; if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for a copy.
    """
    access, handle = _find(param, "safe_set_full_optimizer_state")
    access.write(handle, access.state(handle, optim_state_key), value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_fp32_param`.

    A rank may call this function alone, unless the parameter was set since the last forward or step. All ranks write
    such an edit together: the call then waits until the other ranks call this function too, or use the model again.

    A partition is a range of consecutive elements. Joined in the order of the ranks, the partitions are the parameter.
    Partitions may differ in length, because ranks divide units, not parameters.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        (n,) fp32 on the compute device; n is 0 if this rank holds no element of the parameter.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_local_fp32_param")
    return access.read_local(handle, State.WEIGHT)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_grad`.

    Every rank calls this function with the same parameter.

    Args:
        param: a parameter of a model under an engine.

    Returns:
        (n,) fp32 on the compute device, or None if the parameter has no gradient.

    Raises:
        UsageError: if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_local_grad")
    # All ranks must know whether a gradient exists, so this is always a collective, unlike the call for other states.
    return access.read_local(handle, State.GRAD)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns this rank's partition of the result of `safe_get_full_optimizer_state`.

    A rank may call this function alone, unless the state was set since the last forward or step. All ranks write such
    an edit together: the call then waits until the other ranks call this function too, or use the model again.

    Args:
        param: a parameter of a model under an engine.
        optim_state_key: name of the state.

    Returns:
        (n,) fp32 on the compute device, or None if the parameter is frozen.

    Raises:
        UsageError: if the optimizer keeps no such state; if `param` belongs to no engine, is gathered, or the model
            runs.
        BudgetError: if the RAM has no room for the copy.
    """
    access, handle = _find(param, "safe_get_local_optimizer_state")
    return access.read_state_local(handle, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's partition of a parameter's fp32 master.

    Every rank calls this function, with its own partition.

    Args:
        param: a parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.

    Raises:
        UsageError: if `param` is frozen and the values differ from the weight; if `value` has another shape or dtype;
            if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    access, handle = _find(param, "safe_set_local_fp32_param")
    access.write_local(handle, State.WEIGHT, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's partition of the gradient that the next step will use.

    Every rank calls this function, with its own partition.

    Args:
        param: a trainable parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.

    Raises:
        UsageError: if `param` is frozen; if `value` has another shape or dtype; if `param` belongs to no engine, is
            gathered, or the model runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    access, handle = _find(param, "safe_set_local_grad")
    access.write_local(handle, State.GRAD, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces this rank's partition of an optimizer state.

    Every rank calls this function, with its own partition.

    Args:
        param: a trainable parameter of a model under an engine.
        value: (n,), the elements of this rank, in fp32, bf16 or fp16; copied.
        optim_state_key: name of the state, such as "exp_avg".

    Raises:
        UsageError: if the optimizer keeps no such state or has no kernel; if `param` is frozen; if `value` has another
            shape or dtype; if `param` belongs to no engine, is gathered, or the model runs.
        BudgetError: if the RAM has no room for two copies of the parameter.
    """
    access, handle = _find(param, "safe_set_local_optimizer_state")
    access.write_local(handle, access.state(handle, optim_state_key), value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declares that the forward of `module` uses `parameter`, which belongs to another module.

    Seldom needed: a use of a parameter is detected if a function of torch receives it, or if its `data_ptr()` is read.
    A parameter must be registered if a function that torch does not see reads its memory, such as a function of a C++
    extension that is called directly. Registering twice has no further effect.

    Args:
        module: the module whose forward uses the parameter. A module of the model may be registered before or after
            `offload.initialize`, any other module only after it.
        parameter: the parameter.

    Raises:
        UsageError: if `module` is not a module, or `parameter` not a parameter.
    """
    _check_external("register_external_parameter", module, parameter)
    if not _is_in(parameter, external_parameters(module)):
        # The list stays on the module, for an engine that is built later.
        set_external_parameters(module, [*external_parameters(module), parameter])
        owner = _owner(parameter)
        if owner is not None:
            # The engine has placed its hooks already; a later `initialize` reads the list of the module.
            owner[0].hooks.use_in(module, owner[1].form.unit_for_others(owner[1]))


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Reverts `register_external_parameter`.

    Args:
        module: the module that was registered.
        parameter: the parameter that was registered with it.

    Raises:
        UsageError: if the parameter is not registered with the module, or if an argument is not of the annotated type.
    """
    _check_external("unregister_external_parameter", module, parameter)
    if not _is_in(parameter, external_parameters(module)):
        raise UsageError(f"this parameter was not registered with this {type(module).__name__}")
    # By identity: `list.remove` would compare tensors by value.
    set_external_parameters(
        module, [registered for registered in external_parameters(module) if registered is not parameter]
    )
    owner = _owner(parameter)
    if owner is not None:
        owner[0].hooks.end_use_in(module, owner[1].unit)


def _find(parameter: Any, call: str) -> tuple[ParamAccess, ParamHandle]:
    """Returns the accessor of the engine that owns a parameter, and the parameter's handle, for a public function.

    Raises `UsageError` if `parameter` is not a parameter, belongs to no engine or is gathered, or if the model runs.
    """
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"{call} expects a parameter of a model under an engine, got {type(parameter).__name__}")
    owner = _owner(parameter)
    if owner is None:
        # A parameter that still has a handle has outlived its engine.
        handle = handle_of(parameter)
        if handle is not None:
            _ = handle.engine  # raises, since the engine was destroyed
        raise UsageError(
            f"{call} expects a parameter of a model under an engine; this parameter, of shape "
            f"{list(parameter.shape)}, belongs to no engine: take the parameter from engine.module"
        )
    # A running model uses the parameter's device buffer; a gathered parameter has memory that the user may be changing.
    access, handle = owner
    if access.hooks.running:
        raise UsageError(f"{call} must be called between steps, not inside of a forward or a backward")
    if handle.gathered:
        raise UsageError(f"{call}: {handle.name} is gathered; leave `with offload.gathered(...)` first")
    return owner


def _owner(parameter: nn.Parameter) -> tuple[ParamAccess, ParamHandle] | None:
    """Returns the accessor of the engine that owns a parameter, and the handle; None if no engine owns it."""
    # A bound parameter is an ordinary parameter without a handle, so each engine looks it up in its own table.
    for access in engines():
        handle = access.handle(parameter)
        if handle is not None and handle.owner is not None:
            return access, handle
    return None


def _check_external(call: str, module: Any, parameter: Any) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"{call} expects a module and a parameter, got {type(module).__name__} and {type(parameter).__name__}"
        )


def _is_in(parameter: nn.Parameter, parameters: list[nn.Parameter]) -> bool:
    # By identity, not by `in`: tensors compare element by element.
    return any(member is parameter for member in parameters)
