"""Sleep: the memory of an engine's arenas, given back between steps while others need it, and taken again.

    sleep   cached weights are dropped ─► partitions that are in no file are set aside ─► the arenas give memory back
    wake    the arenas take memory again ─► partitions are read from the swap files, or from where they were set aside

Arenas keep their layout: only the memory behind them goes. A partition on the device or in host memory that the swap
files contain too is read from them. Of any other partition the bytes stay in host memory: one of the device is copied
there, one of the host arena remains where it is, unpinned.
"""

from __future__ import annotations

import gc
import logging
from typing import NamedTuple

import torch

from offload.aio import resident_bytes
from offload.distributed.agreement import Collective, all_or_nothing
from offload.engine.training.components import EngineComponents
from offload.engine.training.device_growth import DeviceBudget
from offload.errors import BudgetError, UsageError
from offload.interrupts import uninterrupted
from offload.sizes import format_size
from offload.states import State, Tier
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.memory.limits import free_host_memory

logger = logging.getLogger("offload")

_Partition = tuple[int, State]
"""A partition of this rank: the unit and the state."""


class FreedBytes(NamedTuple):
    """Bytes that a sleeping engine has given back."""

    device: int
    """Bytes of device memory; where the device is the CPU, resident bytes of host memory."""
    host: int
    """Resident bytes of pinned host memory."""


class Sleep:
    """The sleep of one engine. Belongs to the thread that runs the model."""

    def __init__(self, components: EngineComponents, device_budget: DeviceBudget) -> None:
        """Stores the components of an engine that is awake.

        Args:
            components: all components.
            device_budget: gives memory back by which the device arena has grown.
        """
        self._components, self._device_budget = components, device_budget
        self._aside: dict[_Partition, torch.Tensor] = {}
        """Bytes of partitions on the device that no file contains, in host memory."""
        self._freed: FreedBytes | None = None

    @property
    def asleep(self) -> bool:
        """True between `sleep` and `wake`."""
        return self._freed is not None

    def sleep(self, host: bool, micro_batches: int) -> FreedBytes:
        """Gives the memory of the device arena back, and with `host` that of the host arena; see `RunningApi.sleep`.

        All updates and commits are done. Of an engine that is asleep, only the host arena is left to give back.

        Args:
            host: True to give the host arena back too.
            micro_batches: backwards since the last optimizer step.
        """
        if not self.asleep:
            # Together: a rank whose units are all on its device asks no other rank, and would not learn that one slept.
            with all_or_nothing(self._components.agreement, Collective.SLEEP, "sleep") as ranks:
                ranks.settle(lambda: self._check(micro_batches))
        return self._sleep(host)

    def _check(self, micro_batches: int) -> None:
        """Raises if the engine cannot sleep now. Changes nothing."""
        components = self._components
        # Gradients of an aborted backward count, as in torch.
        components.gradients.end_backward()
        units = range(len(components.layouts))
        if micro_batches or any(components.gradients.present(unit) for unit in units):
            raise UsageError(
                "sleep was called while gradients wait for step(): call it after step(), or drop the gradients by "
                "zero_grad()"
            )
        # A tensor over memory that is gone would read what others write there, or end the process.
        components.unit_views.settle(stays=True)
        if self._inputs_held():
            gc.collect()  # a dead cycle, such as an exception's frames, may hold a graph
        if self._inputs_held():
            raise UsageError(
                "sleep was called between a forward and its backward, for which the engine holds inputs of blocks: run "
                "the backward and step() first, or drop the loss"
            )
        need = sum(nbytes for _, nbytes in self._without_files(Tier.DEVICE))
        self._check_room(
            0 if components.shards.device.host_addressable else need, "what no file contains of the device"
        )

    def _inputs_held(self) -> bool:
        """Returns whether inputs of blocks are held for a backward."""
        return any(each["used"] for each in self._components.activations.bytes_by_tier().values())

    @staticmethod
    def _check_room(nbytes: int, of: str) -> None:
        """Raises `BudgetError` if host memory has no room for `nbytes`."""
        free = free_host_memory()
        if nbytes > free:
            raise BudgetError(
                f"sleep or wake needs {format_size(nbytes)} of host memory for {of}, {format_size(free)} are free: "
                "place states on nvme, or free some"
            )

    @uninterrupted
    def _sleep(self, host: bool) -> FreedBytes:
        """Does as `sleep`, once every rank has passed the checks."""
        try:
            device = self._give_back_device() if self._freed is None else self._freed.device
            before = 0 if self._freed is None else self._freed.host
            self._freed = FreedBytes(device, before + (self._give_back_host() if host else 0))
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
        """Takes the memory again and fills it as it was. Does nothing if the engine is awake.

        Raises:
            BudgetError: if device or host have not as much free memory; the engine then sleeps on.
            IoError: if the swap files cannot be read; the engine is then stopped.
        """
        if self._freed is None:
            return
        components = self._components
        # Both checks come before the first change, so that a call that fails can be repeated.
        self._check_room(self._freed.host, "the host arena")
        components.pager.arena.take_back()
        try:
            for arena in self._host_arenas():
                if arena.given_back:
                    arena.pin()
            # Promoted states among them, if no other engine of the process took their memory meanwhile.
            components.shards.read_back()
            while self._aside:
                (unit, state), values = self._aside.popitem()
                components.shards.put(unit, state, 0, values.numpy().data)
            self._freed = None
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
        self._device_budget.release()
        # Parameters of units that stay have this memory even as placeholders.
        components.unit_views.vacate()
        # From here on no thread prefetches weights: a late read would start an upload into memory that is gone.
        components.pager.begin_load()
        device, kept = components.shards.device, []
        for (unit, state), nbytes in self._without_files(Tier.DEVICE):
            resident = components.shards.resident_of(unit, state)
            assert resident is not None, "a partition whose tier is the device"
            values = resident.tensor.view(torch.uint8)
            # Where kernels work in host memory a copy would free nothing, so the pages stay.
            if device.host_addressable:
                start = values.data_ptr() - arena.blocks[0][1].data_ptr()
                kept.append((start, start + nbytes))
            else:
                self._aside[unit, state] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                device.copy(self._aside[unit, state], values)
        arena.give_back(kept)
        return before - _resident(arena)

    def _give_back_host(self) -> int:
        """Gives the host arena back and returns the resident bytes that went."""
        arena, kept = self._components.arena, []
        before = self._resident_host()
        for (unit, state), nbytes in self._without_files(Tier.HOST):
            resident = self._components.shards.resident_of(unit, state)
            assert resident is not None, "a partition whose tier is the host"
            start = resident.tensor.data_ptr() - arena.address
            kept.append((start, start + nbytes))
        for each in self._host_arenas():
            if not each.given_back:
                each.give_back(kept if each is arena else ())
        return before - self._resident_host()

    def _host_arenas(self) -> list[HostArena]:
        """Returns all host memory of the engine: its arena, and the memory of inputs of blocks."""
        return [self._components.arena, *self._components.activations.arenas]

    def _resident_host(self) -> int:
        """Returns the resident bytes of the host arenas."""
        return sum(resident_bytes(arena.address, arena.nbytes) for arena in self._host_arenas())

    def _without_files(self, tier: Tier) -> list[tuple[_Partition, int]]:
        """Returns the partitions in a tier that no file contains, with their bytes."""
        shards = self._components.shards
        return [
            ((unit, state), nbytes)
            for unit in range(len(shards.layouts))
            for state, nbytes in shards.states(unit).items()
            if nbytes and not shards.stored(unit, state) and shards.tier_of(unit, state) is tier
        ]


def _resident(arena: DeviceArena) -> int:
    """Returns the bytes of a device arena: of all its memory, on the CPU of that which is resident."""
    blocks = [memory for _, memory in arena.blocks]
    if blocks[0].device.type != "cpu":
        return sum(memory.untyped_storage().nbytes() for memory in blocks)
    return sum(resident_bytes(memory.data_ptr(), memory.numel()) for memory in blocks)
