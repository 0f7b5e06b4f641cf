"""Grows the device arena after the first step, resizes it, and gives advice when the device is out of memory.

    first step     ─► torch's allocator shows the memory that activations took ─► the arena grows into the memory that
                      they left free, for all units, and beyond that for gradients that accumulate on the device
    first turns    ─► several micro-batches have activations at once, which no step has shown: grown memory goes back,
                      and the arena grows anew after the step
    out of memory  ─► units in grown memory are dropped, totals of gradients there are copied to the host ─► torch has
                      the memory again

The engine returns memory only between calls of the model, when no view of weights is alive in it: immediately if it is
about to repeat a forward or the user asks, else at its next call. The counters of torch's allocator show errors
that the engine does not see, such as errors in `model.generate`. If torch freed its own cache instead of raising,
memory is given back at the end of the step.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from offload.aio import resident_bytes
from offload.distributed.agreement import Collective, all_or_nothing
from offload.engine.components import EngineComponents
from offload.engine.gradients import GradientAccumulator
from offload.engine.snapshot import GeneratorStates
from offload.engine.unit_views import UnitViews
from offload.errors import BudgetError, UsageError
from offload.interrupts import uninterrupted
from offload.layout.peak_memory import PeakMemory
from offload.layout.placement import ArenaHistory, DeviceNeed, next_growth, room_for_share, taken_by_others
from offload.sizes import PAGE, align_up, count_of, format_size, parse_percent
from offload.states import State, Tier
from offload.swapper.memory.device import Device, DeviceRoom, empty_cache, memory_stats, shortages
from offload.swapper.memory.device_arena import DeviceArena, check_budget
from offload.swapper.memory.host_arena import HostArena, process_memory
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.pager import Pager
from offload.torch_internals import inside_backward, tree_leaves

# -- device growth -------------------------------------------------------------------------------------


logger = logging.getLogger("offload")

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of inputs, other than tensors, that a forward cannot change."""


Buffers = Mapping[str, torch.Tensor | None]
"""Buffers of one module, by name: the dict that the module keeps."""


_BACKWARD = (
    "The backward ended in the middle and cannot be resumed; gradients that it had made by then stay in the step. Call "
    "zero_grad() and run the forward and backward of every micro-batch of this step again"
)


class _Reason(NamedTuple):
    """The reason why grown memory is given back."""

    words: str
    short: bool
    """True if the device ran out of memory; False if the user asked."""


_ASKED = _Reason("as asked", short=False)
_TURNS = _Reason("several micro-batches keep their activations at once from now on", short=False)
_FAILED = _Reason("the device was out of memory", short=True)
_RETRIED = _Reason("the last step was short of device memory", short=True)
_REPEATED = _Reason("the device was out of memory in a forward, which runs once more", short=True)
_TAKEN = _Reason("another process has taken memory of the device that activations need", short=False)


class DeviceBudget:
    """The size of one engine's device arena. Belongs to the thread that runs the model."""

    def __init__(
        self, module: nn.Module, pager: Pager, gradients: GradientAccumulator, device: Device, need: DeviceNeed
    ) -> None:
        self._module, self._pager, self._gradients, self._device, self._need = module, pager, gradients, device, need
        self._history = ArenaHistory()
        self._added: tuple[int, ...] = ()
        """Units whose gradients are accumulated in grown memory."""
        self._buffers: list[Buffers] = []
        """Buffers of each module at the arena's last growth.

        They are kept because a walk over all modules takes too long.
        """
        self._seen = shortages(device.torch)
        """Counts of shortages at the arena's last growth. Only later shortages were caused by its present size."""
        self._at_once = 1
        """Most micro-batches so far whose activations were in memory at once."""
        self._owed: _Reason | None = None
        """The reason to give memory back as soon as no weights in it are in use; None if there is none."""

    def end_step(self) -> None:
        """Grows the arena into memory that steps leave free, or gives memory back if the step ran short of it."""
        self._history = self._history.after_step()
        if self._history.wait == 0:
            self._grow()
        elif self._owed is not None:
            self._give_back(self._owed)
        elif self._history.grown and shortages(self._device.torch) != self._seen:
            self._give_back(_RETRIED)
        elif taken_by_others(self._device.room(), self._history):
            self._give_back(_TAKEN)

    def relieve(self) -> None:
        """Returns memory to torch if an earlier call ran out of memory, or had to postpone a return.

        No forward or backward may run.
        """
        if self._owed is not None:
            self._give_back(self._owed)
        elif self._history.grown and shortages(self._device.torch).errors != self._seen.errors:
            self._give_back(_FAILED)

    def make_room(self, micro_batches: int) -> None:
        """Gives grown memory back before more micro-batches take turns than ever before.

        The arena may grow again after this step, which shows the memory that their activations take together.
        """
        if micro_batches <= self._at_once:
            return
        self._at_once = micro_batches
        self._give_back(_TURNS)
        if not self._history.grown:
            self._history = ArenaHistory(peak=self._history.peak)

    def room(self) -> DeviceRoom:
        """Returns the device's room, with the grown memory as free."""
        room = self._device.room()
        return room._replace(free=room.free + self._history.grown)

    def release(self) -> int:
        """Gives back the grown memory and all that torch caches; returns the bytes of the grown memory."""
        nbytes = self._give_back(_ASKED)
        empty_cache(self._device.torch)
        return nbytes

    def bytes_of(self, size: int | str) -> int:
        """Returns the bytes of a budget, given as bytes or as a percentage of the weights that stay on the device.

        Raises:
            BudgetError: The engine cannot have this budget, by the sizes alone.
            ConfigError: A percentage of the weights is asked for, and none come and go.
        """
        arena, kept, need = self._pager.arena, self._pager.device_kept(), self._need
        share = parse_percent(size)
        if share is None:
            nbytes = int(size)
        else:
            resident = sum(unit.nbytes for unit in self._pager.sizes if unit.device_resident)
            paged = sum(align_up(unit.nbytes) for unit in self._pager.sizes if not unit.device_resident)
            nbytes = kept + room_for_share(share, resident, paged, need.unit)
            nbytes = nbytes if arena.most is None else min(nbytes, max(arena.most, kept + need.together))
        check_budget(
            "the device budget",
            nbytes,
            min(kept + need.together, arena.nbytes),
            "it holds all that stays there, and the largest unit that comes and goes",
        )
        if arena.most is not None and nbytes > arena.most:
            raise BudgetError(
                f"the device budget of {format_size(nbytes)} is larger than that of the start, "
                f"{format_size(arena.most)}, and host memory is mapped at the start alone: start with a larger "
                '"device_memory", and make it smaller afterwards'
            )
        room = self._device.room()
        have = room.free + room.kept + arena.nbytes
        if 0 < sum(room) and have < nbytes:
            raise BudgetError(
                f"the device budget of {format_size(nbytes)} has no room: {format_size(have)} of the device are free, "
                "or this budget's already"
            )
        return nbytes // PAGE * PAGE

    @uninterrupted
    def resize(self, nbytes: int, unit_views: UnitViews) -> None:
        """Gives the arena `nbytes`, a result of `bytes_of`, for good. No view of weights is alive.

        Raises `BudgetError` if the device refuses the memory; the arena then keeps its size.
        """
        before = self._pager.arena.nbytes
        self._pager.forget()  # all ranks are here
        self.release()
        # Parameters of units that stay on the device use the arena's memory, even outside of forward and backward.
        unit_views.vacate()
        self._history = ArenaHistory(peak=self._history.peak, wait=None)
        self._pager.resize_device(nbytes)
        self._pager.prefetch()
        logger.info("device memory goes from %s to %s, as asked", format_size(before), format_size(nbytes))

    def _grow(self) -> None:
        arena, room = self._pager.arena, self._device.room()
        before = arena.nbytes
        nbytes = next_growth(before, self._need, room, self._history)
        added = self._need.added(before + nbytes) if nbytes else ()
        try:
            memory = self._pager.grow_device(nbytes, [values for _, values in added]) if nbytes else []
        # Another process may have allocated the memory since `room()` was read. The engine works without the growth.
        except BudgetError as error:
            logger.info("the device budget stays %s: %s", format_size(before), error)
            nbytes, added, memory = 0, (), []
        self._history = self._history.after_growth(nbytes, room)
        # A failed growth, or one for which torch emptied its cache, does not count as a shortage of a later step.
        self._seen = shortages(self._device.torch)
        if not nbytes:
            return
        self._added = tuple(unit for unit, _ in added)
        self._buffers = buffers_of(self._module)
        self._gradients.add_up_in(dict(zip(self._added, memory, strict=True)))
        logger.info(
            "device memory grows from %s to %s: activations took at most %s so far, and %s are free. "
            '"device_memory" in the "offload" block sets another size',
            format_size(before),
            format_size(before + nbytes),
            format_size(self._history.peak),
            format_size(room.free),
        )

    @uninterrupted
    def _give_back(self, reason: _Reason) -> int:
        """Gives grown memory back to torch, and returns its bytes; 0 if no memory was given back.

        If weights in grown memory are in use, the memory is given back later.
        """
        if not self._history.grown:
            return 0
        room, before = self._device.room(), self._pager.arena.nbytes
        memory = self._gradients.stop_adding_up_in(self._added) if self._added else {}
        nbytes = self._pager.shrink_device()
        if not nbytes:
            self._gradients.add_up_in(memory)
            self._owed = reason
            return 0
        del memory  # the last references to the allocation that the pager has given up
        self._history, self._added, self._owed = self._history.after_return(room, reason.short), (), None
        empty_cache(self._device.torch)
        logger.log(
            logging.WARNING if reason.short else logging.INFO,
            "%s: the engine gives back %s of the %s that it used on the device for weights",
            reason.words,
            format_size(nbytes),
            format_size(before),
        )
        return nbytes

    # -- calls of the model -------------------------------------------------------------------------

    def run(self, forward: Callable[[], Any], inputs: Any, alone: bool) -> Any:
        """Returns the result of `forward`, which runs again if device memory ran out and grown memory was given back.

        A forward is repeated only if the repetition changes no result. So no other rank may take part in it (`alone`),
        and the first run must not have changed a buffer of the model or an input. The random generators are restored
        first.
        """
        before = generators = None
        if self._history.grown and alone:
            before = _versions(self._buffers, inputs)
            generators = None if before is None else GeneratorStates.of(self._device.torch)
        try:
            return forward()
        except torch.OutOfMemoryError as error:
            if before is None or generators is None or inside_backward():
                raise
            # All present modules are looked at. A module with buffers that was added since the last growth counts as a
            # change.
            now = _versions(buffers_of(self._module), inputs)
            if now is None or [(id(tensor), version) for tensor, version in now] != [
                (id(tensor), version) for tensor, version in before
            ]:
                raise
            # Frames of the failed forward hold its activations, and perhaps views of weights in grown memory.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            if not self._give_back(_REPEATED):
                raise
        generators.restore(self._device.torch)
        return forward()

    @contextlib.contextmanager
    def advised(self, backward: bool = False) -> Iterator[None]:
        """Adds advice to an out-of-memory error that torch raises in the context. The error keeps its type.

        A backward is not repeated: by then it has freed the tensors that autograd had saved.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            # Memory is not given back here: the error's frames, or an unfinished backward, may hold views of weights.
            self._owed = _FAILED if self._history.grown else None
            words = f"{error} {advice(self._pager.arena.nbytes, self._need.least, self._history.grown)}"
            error.args = (f"{words} {_BACKWARD}" if backward else words,)
            raise


def buffers_of(module: nn.Module) -> list[Buffers]:
    """Returns the buffers of each module, by name, as the modules themselves keep them."""
    return [part._buffers for part in module.modules()]


def _versions(modules: Sequence[Buffers], inputs: Any) -> list[tuple[torch.Tensor, int]] | None:
    """Returns all buffers and input tensors, each paired with its count of in-place changes.

    Returns None if an input has an unknown type, such as a cache of keys and values, or a tensor does not count its
    changes.
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if not isinstance(leaf, _PLAIN)]
    buffers = [buffer for part in modules if part for buffer in part.values() if buffer is not None]
    tensors = [*buffers, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves) or any(tensor.is_inference() for tensor in tensors):
        return None
    return [(tensor, tensor._version) for tensor in tensors]


def advice(nbytes: int, least: int, returned: int = 0) -> str:
    """Returns advice for a device without room for both an arena of `nbytes` bytes and the activations.

    `least` is the size of the smallest arena that works. The engine's next call gives back `returned` bytes.
    """
    used = f"The engine uses {format_size(nbytes)} of the device for weights"
    pieces = (
        "Free memory in many pieces is joined by PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    )
    if returned:
        return (
            f"{used}, and gives back {format_size(returned)} of them with its next call: after zero_grad() the same "
            f"step has that much more memory. {pieces}"
        )
    ways = 'smaller micro-batches, shorter sequences, or "activations": "auto" in the "offload" block leave more room'
    if nbytes > least:
        ways += (
            '; so does a smaller "device_memory" in the "offload" block: the least that works is '
            f"{format_size(least)} ({least} bytes)"
        )
    return f"{used}. Activations, and gradients until they are copied to the host, use the rest: {ways}. {pieces}"


# -- report --------------------------------------------------------------------------------------------
#
# The report divides RSS and device memory of a process among owners. The parts add up.


class MemoryReport(dict[str, Any]):
    """Numbers of bytes by name; `str()` renders them as text."""

    def __str__(self) -> str:
        host, device = self["host"], self["device"]
        lines = [
            f"resident {format_size(host['rss'])} = {format_size(host['base'])} before training + "
            f"{format_size(host['arena'])} of the host budget + {format_size(host['device_arena'])} of a device that "
            f"is the CPU + {format_size(host['other_engines'])} of other engines + {format_size(host['other'])} of "
            "everything else"
        ]
        lines += [
            f"  {name}: {format_size(row['used'])} of {format_size(row['budget'])} in use, "
            f"{format_size(row['peak'])} at most"
            for name, row in self["classes"].items()
            if row["budget"]
        ]
        lines.append(
            f"device {format_size(device['allocated'])} = {format_size(device['arena'])} of the device budget "
            f"({format_size(device['in_use'])} in use) + {format_size(device['other'])} of everything else"
        )
        planned = PeakMemory(**self["planned"])
        lines.append(f"planned beside the {format_size(host['base'])}: {format_size(sum(planned))} = {planned}")
        activations = self["activations"]
        if any(row["peak"] for row in activations.values()):
            lines.append(
                "inputs of checkpointed units, now and at most: "
                + ", ".join(
                    f"{format_size(row['used'])} and {format_size(row['peak'])} on {tier}"
                    for tier, row in activations.items()
                )
            )
        allocator = self["allocator"]
        if allocator:
            lines.append(
                f"torch's allocator: {format_size(allocator['allocated'])} allocated, "
                f"{format_size(allocator['allocated_peak'])} at most, of {format_size(allocator['reserved'])} "
                f"reserved, {format_size(allocator['reserved_peak'])} at most; "
                f"{count_of(allocator['retries'], 'retry', 'retries')} after it freed its cache, "
                f"{count_of(allocator['out_of_memory'], 'error')} of no memory"
            )
        return "\n".join(lines)


def resident_of_arenas(components: EngineComponents) -> tuple[int, int]:
    """Returns resident bytes of the host arena, and of the device arena if the device is the CPU."""
    blocks = [memory for _, memory in components.pager.arena.blocks if memory.device.type == "cpu" and memory.numel()]
    on_cpu = sum(resident_bytes(memory.data_ptr(), memory.numel()) for memory in blocks)
    return _resident_host(components), on_cpu


def _own_arenas(components: EngineComponents) -> list[HostArena]:
    """Returns all host memory of the engine: its arena, and the memory of inputs of blocks."""
    return [components.arena, *components.activations.arenas]


def _resident_host(components: EngineComponents) -> int:
    return sum(resident_bytes(arena.address, arena.nbytes) for arena in _own_arenas(components))


def base_bytes(components: EngineComponents) -> int:
    """Returns resident bytes of this process outside of this engine's arenas and the other engines' host arenas."""
    return int(psutil.Process().memory_info().rss) - sum(resident_of_arenas(components)) - _others(components)


def memory_report(components: EngineComponents, base: int) -> MemoryReport:
    """Returns the memory of this process by owner, in bytes.

    `host`: rss = base + arena + device_arena + other_engines + other. "other" came after the engine was built:
    activations, gradients in flight, libraries. `device`: allocated = arena + other. `allocator`: figures of torch's
    allocator of the device, which counts the arena as allocated; empty on a CPU. `classes` lists, for each class, its
    budget in the host arena, the bytes in use now, and the peak. `activations` lists the inputs of checkpointed units
    by tier. `planned` lists what the start has counted in addition to the base: both budgets, and what a step takes
    beside them. `base` is the result of `base_bytes` when the engine was built.
    """
    arena, device_arena = resident_of_arenas(components)
    other_engines = _others(components)
    rss = int(psutil.Process().memory_info().rss)
    budget = components.pager.arena
    device = components.shards.device.torch
    # torch has no allocator for the CPU, so the arena stands for the whole device.
    on_cpu = device.type == "cpu"
    taken = 0 if budget.given_back else budget.nbytes
    allocated = taken if on_cpu else torch.get_device_module(device).memory_allocated(device)
    return MemoryReport(
        host={
            "rss": rss,
            "base": base,
            "arena": arena,
            "device_arena": device_arena,
            "other_engines": other_engines,
            "other": rss - base - arena - device_arena - other_engines,
        },
        host_memory=sum(own_arena.nbytes for own_arena in _own_arenas(components)),
        classes={
            name: {"budget": region.space.nbytes, "used": region.space.used_bytes, "peak": region.space.peak_bytes}
            for name, region in components.arena.regions.items()
        },
        device={
            "allocated": allocated,
            "arena": taken,
            "in_use": min(budget.used_bytes, taken),
            "other": allocated - taken,
        },
        activations=components.activations.bytes_by_tier(),
        allocator=_allocator(device),
        planned=components.peak._asdict(),
    )


def _allocator(device: torch.device) -> dict[str, int]:
    """Returns bytes and counts of torch's allocator of a device since the start of the process; empty on a CPU.

    A retry means that torch had to give its cache back to the driver before an allocation succeeded: memory is short.
    """
    stats = memory_stats(device)
    if not stats:
        return {}
    return {
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "allocated_peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "reserved_peak": stats.get("reserved_bytes.all.peak", 0),
        "retries": stats.get("num_alloc_retries", 0),
        "out_of_memory": stats.get("num_ooms", 0),
    }


def _others(components: EngineComponents) -> int:
    engine_arenas = _own_arenas(components)
    arenas = [arena for arena in process_memory().arenas if arena not in engine_arenas]
    return sum(resident_bytes(arena.address, arena.nbytes) for arena in arenas)


# -- sleep ---------------------------------------------------------------------------------------------
#
# A sleeping engine has given the memory of its arenas back, between two steps, while others need it.
#
#     sleep   cached weights are dropped ─► partitions that are in no file are set aside ─► the arenas give memory back
#     wake    the arenas take memory again ─► partitions are read from the swap files, or from where they were set aside
#
# Arenas keep their layout and lose only their memory. If the swap files contain a partition too, `wake` reads it from
# the files. The bytes of all other partitions stay in host memory: `sleep` copies a partition from the device to the
# host, and leaves a partition in the host arena where it is, unpinned.


_Partition = tuple[int, State]
"""A partition of this rank: the unit and the state."""


class FreedBytes(NamedTuple):
    """Bytes that a sleeping engine has given back."""

    device: int
    """Bytes of device memory; if the device is the CPU, resident bytes of host memory."""
    host: int
    """Resident bytes of pinned host memory."""


def check_unused(components: EngineComponents, call: str, micro_batches: int) -> None:
    """Raises `UsageError` if the memory of the device is in use, so that `call` cannot move it. Changes nothing."""

    def inputs_held() -> bool:
        return any(row["used"] for row in components.activations.bytes_by_tier().values())

    # Gradients of an aborted backward count, as in torch.
    components.gradients.end_backward()
    units = range(len(components.layouts))
    if micro_batches or any(components.gradients.present(unit) for unit in units):
        raise UsageError(
            f"{call} was called while gradients wait for step(): call it after step(), or drop the gradients by "
            "zero_grad()"
        )
    # A tensor over freed memory would read the bytes of its next owner, or end the process.
    components.unit_views.settle(stays=True)
    if inputs_held():
        gc.collect()  # a dead cycle, such as an exception's frames, may hold a graph
    if inputs_held():
        raise UsageError(
            f"{call} was called between a forward and its backward, for which the engine holds inputs of blocks: run "
            "the backward and step() first, or drop the loss"
        )


class Sleep:
    """The sleep of one engine. Belongs to the thread that runs the model."""

    def __init__(self, components: EngineComponents, device_budget: DeviceBudget) -> None:
        self._components, self._device_budget = components, device_budget
        self._aside: dict[_Partition, torch.Tensor] = {}
        """Copies in host memory of those partitions on the device that no file contains."""
        self._freed = FreedBytes(0, 0)
        self.asleep = False
        """True between `sleep` and `wake`."""

    def sleep(self, host: bool, micro_batches: int) -> FreedBytes:
        """Gives the device arena's memory back, and with `host` the host arena's too; see `Engine.sleep`.

        The caller has finished all updates and commits. If the engine is asleep already, this call gives back only the
        host arena.
        """
        if not self.asleep:
            # `sleep` is a collective, because a rank whose units are all on its device gathers nothing, and would not
            # notice that another rank sleeps.
            with all_or_nothing(self._components.agreement, Collective.SLEEP, "sleep") as ranks:
                ranks.settle(lambda: self._check(micro_batches))
        return self._sleep(host)

    def _check(self, micro_batches: int) -> None:
        """Raises if the engine cannot sleep now. Changes nothing."""
        check_unused(self._components, "sleep", micro_batches)
        need = sum(nbytes for _, nbytes in self._without_files(Tier.DEVICE))
        self._check_room(
            0 if self._components.shards.device.host_addressable else need, "what no file contains of the device"
        )

    @staticmethod
    def _check_room(nbytes: int, of: str) -> None:
        free = free_host_memory()
        if nbytes > free:
            raise BudgetError(
                f"sleep or wake needs {format_size(nbytes)} of host memory for {of}, {format_size(free)} are free: "
                "place states on nvme, or free some"
            )

    @uninterrupted
    def _sleep(self, host: bool) -> FreedBytes:
        try:
            self._components.shards.flush()  # what a file contains is dropped from memory
            device = self._freed.device if self.asleep else self._give_back_device()
            self._freed = FreedBytes(device, self._freed.host + (self._give_back_host() if host else 0))
            self.asleep = True
        except BaseException as error:  # memory and residencies may disagree
            self._components.pager.fail(error)
            raise
        logger.info(
            "the engine sleeps: %s of the device and %s of host memory are free; its next call takes them again",
            format_size(self._freed.device),
            format_size(self._freed.host),
        )
        return self._freed

    @uninterrupted
    def wake(self) -> None:
        """Takes the memory again and restores its contents. Does nothing if the engine is awake.

        Raises:
            BudgetError: if the device or the host has less free memory; the engine then sleeps on.
            IoError: if the swap files cannot be read; the engine is then stopped.
        """
        if not self.asleep:
            return
        components = self._components
        # Both checks come before the first change, so that a call that fails can be repeated.
        self._check_room(self._freed.host, "the host arena")
        components.pager.arena.take_back()
        try:
            for arena in _own_arenas(self._components):
                if arena.given_back:
                    arena.pin()
            # This includes promoted states, unless another engine of the process has taken their memory.
            components.shards.read_back()
            while self._aside:
                (unit, state), values = self._aside.popitem()
                components.shards.put(unit, state, 0, values.numpy().data)
            self._freed, self.asleep = FreedBytes(0, 0), False
            components.pager.end_load()
        except BaseException as error:
            components.pager.fail(error)
            raise
        components.pager.prefetch()
        logger.info("the engine is awake")

    # -- giving back ----------------------------------------------------------------------------------

    def _give_back_device(self) -> int:
        """Drops all cached weights, sets partitions aside, gives the device arena back, and returns the bytes."""
        components, arena = self._components, self._components.pager.arena
        before = _resident(arena)
        components.pager.forget()  # all ranks sleep
        self._device_budget.release()
        # Parameters of units that stay on the device use the arena's memory, even outside of forward and backward.
        components.unit_views.vacate()
        # From here on no thread prefetches weights: a late read would start an upload into memory that is gone.
        components.pager.begin_load()
        device, ranges = components.shards.device, []
        for (unit, state), nbytes in self._without_files(Tier.DEVICE):
            resident = components.shards.resident_of(unit, state)
            assert resident is not None, "a partition whose tier is the device"
            values = resident.tensor.view(torch.uint8)
            # If kernels work in host memory, a copy would free nothing, so the pages stay.
            if device.host_addressable:
                start = values.data_ptr() - arena.blocks[0][1].data_ptr()
                ranges.append((start, start + nbytes))
            else:
                self._aside[unit, state] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                device.copy(self._aside[unit, state], values)
        arena.give_back(ranges)
        return before - _resident(arena)

    def _give_back_host(self) -> int:
        arena, ranges = self._components.arena, []
        before = _resident_host(self._components)
        for (unit, state), nbytes in self._without_files(Tier.HOST):
            resident = self._components.shards.resident_of(unit, state)
            assert resident is not None, "a partition whose tier is the host"
            start = resident.tensor.data_ptr() - arena.address
            ranges.append((start, start + nbytes))
        for host_arena in _own_arenas(self._components):
            if not host_arena.given_back:
                host_arena.give_back(ranges if host_arena is arena else ())
        return before - _resident_host(self._components)

    def _without_files(self, tier: Tier) -> list[tuple[_Partition, int]]:
        """Returns the partitions in a tier that no file contains, with their bytes."""
        shards = self._components.shards
        return [
            ((unit, state), nbytes)
            for unit in range(len(shards.layouts))
            for state, nbytes in shards.states(unit).items()
            if nbytes and not shards.store.keeps(unit, state) and shards.tier_of(unit, state) is tier
        ]


def _resident(arena: DeviceArena) -> int:
    """Returns the bytes of a device arena; on the CPU only the resident bytes."""
    blocks = [memory for _, memory in arena.blocks]
    if blocks[0].device.type != "cpu":
        return sum(memory.untyped_storage().nbytes() for memory in blocks)
    return sum(resident_bytes(memory.data_ptr(), memory.numel()) for memory in blocks)
