"""Access to the full fp32 values of one parameter: its master, its gradient, its optimizer states.

For calls between forwards and backwards, whatever the tier of the values; users call `tensor_api`. A read copies the
newest values, a few chunks at a time, from the parameter's own segment of each partition; with several ranks each of
them contributes what it holds. A write is an edit, like that of a weight (see `weight_edits`): it goes through the
update worker to the slot that the last commit does not name, together with other edits of its unit, and is committed
with the next step. A written gradient is that of the next step, and is included in its norm and clip.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload.aio import aligned_empty
from offload.aio.protocols import Future, wait_for_all
from offload.distributed.agreement import AllOrNothing, Collective, all_or_nothing
from offload.engine.callbacks import EngineCallbacks
from offload.engine.param_values import check_room, check_values
from offload.engine.params.paged_parameter import ParamHandle
from offload.engine.training.components import EngineComponents
from offload.errors import UsageError
from offload.layout import optimizer_states
from offload.layout.flat_layout import Segment, SegmentShard, segment_shards, unpack
from offload.layout.optimizer_states import join, master_sources, states_of, weights_of
from offload.layout.placement import CHUNK
from offload.states import State

# Weak, so that an engine that the user has dropped is not kept alive.
_engines: weakref.WeakSet[ParamAccess] = weakref.WeakSet()


def engines() -> list[ParamAccess]:
    """Returns the accessors of all engines of this process.

    A bound parameter does not name its engine, so all are asked.
    """
    return list(_engines)


class ParamAccess:
    """Reads and sets the values of the parameters of one engine. Belongs to the thread that runs the model."""

    def __init__(self, components: EngineComponents, callbacks: EngineCallbacks) -> None:
        """Registers the accessor for `engines`.

        Args:
            components: components of the engine.
            callbacks: the engine.
        """
        self._components, self._held, self._callbacks = components, components.shards, callbacks
        _engines.add(self)

    def handle(self, parameter: Any) -> ParamHandle | None:
        """Returns the handle of a parameter of this engine's model, bound or not, or None."""
        return self._components.weights.handle(parameter)

    def state(self, handle: ParamHandle, name: Any) -> State:
        """Returns the optimizer state of a name.

        Args:
            handle: handle of the parameter.
            name: a name such as "exp_avg". States of an optimizer without a kernel map to PACKED.

        Raises:
            UsageError: if the optimizer keeps no state of that name.
        """
        segment = self._segment(handle)
        states = states_of(self._held.mode, self._components.layouts[handle.unit], segment)
        states |= {each.name: State.PACKED for each in segment.kept}
        if name not in states:
            known = ", ".join(f'"{known}"' for known in states) or "none"
            raise UsageError(
                f"the optimizer of this engine keeps no state {name!r} of {handle.name}, whose states are: {known}"
            )
        return states[name]

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
        self._begin(state)
        self._finish()
        segment = self._segment(handle)
        # The states of torch's own optimizers are one blob for each parameter, stored as fp32 words whatever their
        # dtypes. Of several ranks one has it.
        words = torch.empty(len(segment.packed), dtype=torch.float32, device="cpu")

        def mine() -> None:
            if segment.packed_rank == self._components.rank:
                self._read_newest(handle, State.PACKED, segment.packed.start, words)

        with self._together("access a parameter", handle, state) as everyone:
            everyone.settle(mine)
            if self._components.ranks is not None:
                self._components.ranks.broadcast(words, segment.packed_rank)
        value = unpack(segment.kept, words.view(torch.uint8)).get(name)
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            # A float would have the default dtype of the process.
            value = torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None, device="cpu")
        return value.to(handle.device, torch.float32 if value.is_floating_point() else None, copy=True)

    def check_idle(self, handle: ParamHandle, call: str) -> None:
        """Raises `UsageError` if the model runs, or if the parameter is gathered. `call` names the public function."""
        if self._components.hooks.running:
            raise UsageError(f"{call} must be called between steps, not inside of a forward or a backward")
        if handle.gathered:
            raise UsageError(f"{call}: {handle.name} is gathered; leave `with offload.gathered(...)` first")

    def read_state_local(self, handle: ParamHandle, name: Any) -> torch.Tensor | None:
        """Returns this rank's partition of an optimizer state, flat, or None for a frozen parameter."""
        if not handle.trainable:
            return None
        state = self.state(handle, name)
        if state is not State.PACKED:
            return self.read_local(handle, state)
        value = self.read_state(handle, name)
        # Not partitioned: one rank of each replica has all of it.
        here = self._segment(handle).packed_rank == self._components.shard
        return None if value is None else value.view(-1) if here else value.view(-1)[:0]

    def read(self, handle: ParamHandle, state: State) -> torch.Tensor | None:
        """Returns a copy of a state, of the parameter's shape in fp32, on the compute device. Every rank calls it.

        For WEIGHT the copy is of the master.

        Args:
            handle: handle of the parameter.
            state: the state to read.

        Returns:
            The copy; None for a gradient if no rank holds one, and for any state except the weight of a frozen
            parameter.

        Raises:
            BudgetError: if the RAM has no room for the copy.
        """
        if not self._settled(handle, state):
            return None
        if self._segment(handle).form:
            return self._components.weights.read(handle.unit, handle.position).float()
        whole = torch.empty(0, dtype=torch.float32, device="cpu")

        def mine() -> None:
            nonlocal whole
            check_room(handle.name, self._numel(handle))
            whole = torch.empty(self._numel(handle), dtype=torch.float32, device="cpu")
            shard = self._own_shard(handle)
            self._read_own_shard(handle, state, shard, whole[shard.position : shard.position + shard.numel])

        with self._together("access a parameter", handle, state) as everyone:
            if not any(everyone.settle(lambda: self._has(handle, state))):
                return None
            everyone.settle(mine)
            self._complete(handle, whole)
        # The memory was allocated inside of the collective, so a rank without room has failed the call on all ranks.
        return whole.view(self._shape(handle)).to(handle.device)

    def read_weight(self, handle: ParamHandle) -> torch.Tensor:
        """Returns a copy of the weights that ranks store, as `read` does, in the dtype of the weights."""
        values = self.read(handle, State.WEIGHT)
        assert values is not None, "every parameter has weights"
        weights = weights_of(values.to("cpu").view(-1), self._held.mode.weights)
        return weights.to(handle.device).view(self._shape(handle))

    def write(self, handle: ParamHandle, state: State, values: torch.Tensor) -> None:
        """Replaces a state. With several ranks all of them call it, and the values of rank 0 count.

        Args:
            handle: handle of the parameter.
            state: the state to replace.
            values: of the parameter's shape, in fp32, bf16 or fp16, on any device; copied.

        Raises:
            UsageError: if the parameter is frozen, the values have another shape or dtype, or the state cannot be set.
            BudgetError: if the RAM has no room for a copy.
        """
        self._begin(state)
        if state is not State.WEIGHT and not handle.trainable:
            raise UsageError(f"parameter {handle.name} is frozen: it has no gradient and no optimizer states to set")
        check_values(handle.name, values, self._shape(handle), self._shape(handle))
        check_room(handle.name, self._numel(handle))
        if state is State.PACKED:
            raise UsageError(
                "the states of an optimizer without a kernel can be read but not set; engine.load_checkpoint loads them"
            )
        if state is State.GRAD:
            # No update may still read the gradient of the step before while that gradient is replaced.
            self._finish()
            self._set_gradient(handle, values.detach().to("cpu", torch.float32, copy=True).contiguous().view(-1))
        else:
            self._components.weights.edit(handle.unit, handle.position, values.detach().float(), state)

    def read_local(self, handle: ParamHandle, state: State) -> torch.Tensor | None:
        """Returns this rank's partition of the result of `read`, flat.

        No collective, with two exceptions. For a gradient all ranks must agree whether there is one. With a pending
        edit of this state all ranks write that edit together.

        Args:
            handle: handle of the parameter.
            state: the state to read.
        """
        if not self._settled(handle, state):
            return None
        if state is State.GRAD:
            with self._together("access a parameter", handle, state) as everyone:
                if not any(everyone.settle(lambda: self._has(handle, state))):
                    return None
        if form := self._segment(handle).form:
            if self._components.ranks is None:
                return self._components.weights.read(handle.unit, handle.position).float().view(-1)
            raise UsageError(
                f"no rank has values of {handle.name} of its own: it is stored in {form}, whose bytes ranks divide; "
                "read the whole parameter with safe_get_full_fp32_param"
            )
        shard = self._own_shard(handle)
        check_room(handle.name, shard.numel)
        values = torch.empty(shard.numel, dtype=torch.float32, device="cpu")
        self._read_own_shard(handle, state, shard, values)
        return values.to(handle.device)

    def write_local(self, handle: ParamHandle, state: State, values: torch.Tensor) -> None:
        """Replaces this rank's partition of a state. Every rank calls it with its own partition.

        Args:
            handle: handle of the parameter.
            state: the state to replace.
            values: (n,), the elements of this rank; copied.

        Raises:
            UsageError: as in `write`.
            BudgetError: if the RAM has no room for two copies of the whole parameter.
        """
        self._begin(state)
        whole = torch.empty(0, dtype=torch.float32, device="cpu")

        def mine() -> None:
            nonlocal whole
            shard = self._own_shard(handle)
            check_values(handle.name, values, (shard.numel,), self._shape(handle))
            check_room(handle.name, 2 * self._numel(handle))
            whole = torch.empty(self._numel(handle), dtype=torch.float32, device="cpu")
            whole[shard.position : shard.position + shard.numel] = values.detach().to("cpu", torch.float32)

        # Ranks hold segments of any length, so each fills its own into a copy of the whole, and `write` takes the whole
        # from there: one path for edits.
        with self._together("set a shard of a parameter", handle, state) as everyone:
            everyone.settle(mine)
            self._complete(handle, whole)
        self.write(handle, state, whole.view(self._shape(handle)))

    def state_dict(self, module: nn.Module, without_frozen: bool) -> dict[str, Any]:
        """Returns `module.state_dict()` with every tensor on the CPU, optionally without frozen parameters."""
        weights = self._components.weights
        with weights.leaving_out_frozen() if without_frozen else contextlib.nullcontext():
            state: dict[str, Any] = module.state_dict()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to("cpu")  # what is there already stays the same tensor: tied weights are one
        return state

    def use_in(self, module: nn.Module, handle: ParamHandle) -> None:
        """Binds the parameter's unit also whenever `module` runs."""
        self._components.hooks.use_in(module, handle.unit)

    def end_use_in(self, module: nn.Module, handle: ParamHandle) -> None:
        """Reverts one `use_in`."""
        self._components.hooks.end_use_in(module, handle.unit)

    # -- on the way ---------------------------------------------------------------------------------

    def _begin(self, state: State) -> None:
        self._callbacks.enter_weights()
        if state is State.GRAD:
            self._components.gradients.complete()  # gradients of an aborted backward count, as in torch

    def _settled(self, handle: ParamHandle, state: State) -> bool:
        """Returns True if a parameter has this state. Its newest values, with pending edits, are then on their tier."""
        self._begin(state)
        if state is not State.WEIGHT and not handle.trainable:
            return False
        # Edits of a unit are gathered before they are written: a read of an edited value must write them first.
        if self._components.weights.waits(handle.unit, handle.position, state):
            self._components.weights.flush()
        self._finish()
        return True

    def _finish(self) -> None:
        """Waits until all states are stored on their tier, and no update reads a gradient any more."""
        if self._components.update_worker is not None:
            self._components.update_worker.finish(commit=False)

    def _has(self, handle: ParamHandle, state: State) -> bool:
        return state is not State.GRAD or self._components.gradients.has(handle.unit, handle.position)

    @contextlib.contextmanager
    def _together(self, what: str, handle: ParamHandle, state: State) -> Iterator[AllOrNothing]:
        """Yields a collective in which every rank reads or sets the same state of the same parameter."""
        with all_or_nothing(self._components.agreement, Collective.LOOK, what) as everyone:
            everyone.same({"parameter": handle.name, "what": state.value})
            yield everyone

    def _complete(self, handle: ParamHandle, whole: torch.Tensor) -> None:
        """Receives the segments of other ranks into `whole`, which holds this rank's segment already."""
        if self._components.ranks is not None:
            for shard in self._shards_of(handle):
                self._components.ranks.broadcast(whole[shard.position : shard.position + shard.numel], shard.rank)

    def _read_own_shard(self, handle: ParamHandle, state: State, shard: SegmentShard, values: torch.Tensor) -> None:
        """Fills `values`, (shard.numel,) fp32 on the CPU, with the elements that this rank holds."""
        if state is State.GRAD:
            if shard.numel:
                self._components.gradients.look(handle.unit, handle.position, shard.position, values)
            return
        for first in range(0, shard.numel, CHUNK):
            self._read_newest(handle, state, shard.start + first, values[first : first + CHUNK])

    def _read_newest(self, handle: ParamHandle, state: State, start: int, values: torch.Tensor) -> None:
        """Fills `values` with the newest elements of a state in this rank's partition.

        Args:
            handle: handle of the parameter.
            state: the state to read.
            start: first element, counted in the partition of the unit.
            values: (n,) fp32 on the CPU.
        """
        # A bf16 weight and the low bits of its master are two states on disk that together are the fp32 master.
        joined, mode = state is State.WEIGHT and handle.trainable, self._held.mode
        found: dict[State, torch.Tensor] = {}
        futures: list[Future] = []
        try:
            for each in master_sources(mode.weights) if joined else optimizer_states.moment_sources(mode, state):
                part, dtype = mode.part(each, start, start + len(values)), mode.states[each]
                buffer = aligned_empty(len(part) * dtype.itemsize)
                found[each] = torch.frombuffer(buffer, dtype=dtype)
                futures += self._held.read(handle.unit, each, part.start * dtype.itemsize, buffer)
            for future in futures:
                future.wait()
        finally:
            wait_for_all(futures)  # no buffer is freed under a read
        values.copy_(join(found) if state is State.WEIGHT else optimizer_states.read(mode, found, state))

    def _set_gradient(self, handle: ParamHandle, values: torch.Tensor) -> None:
        def mine() -> None:
            shard = self._own_shard(handle)
            values_here = values[shard.position : shard.position + shard.numel]
            self._components.gradients.replace(handle.unit, handle.position, shard.position, values_here)

        # A collective, since rank 0's values go to all ranks and each keeps its own segment.
        with self._together("set a gradient", handle, State.GRAD) as everyone:
            if self._components.ranks is not None:
                self._components.ranks.broadcast(values, 0)
            if len(values):
                everyone.settle(mine)

    def _shards_of(self, handle: ParamHandle) -> list[SegmentShard]:
        """Returns the segments of a parameter. Their ranks are those of the first replica, which sends for all."""
        layout = self._components.layouts[handle.unit]
        return list(segment_shards(layout, self._components.mesh.shards, layout.segments[handle.position]))

    def _segment(self, handle: ParamHandle) -> Segment:
        return self._components.layouts[handle.unit].segments[handle.position]

    def _own_shard(self, handle: ParamHandle) -> SegmentShard:
        """Returns this rank's segment of a parameter, which may be empty."""
        own = self._components.shard
        return next((shard for shard in self._shards_of(handle) if shard.rank == own), SegmentShard(own, 0, 0, 0))

    def _shape(self, handle: ParamHandle) -> tuple[int, ...]:
        return self._segment(handle).shape

    def _numel(self, handle: ParamHandle) -> int:
        return self._segment(handle).value_numel
