"""Host memory and disk for inputs of checkpointed units: blocks, slots, and the reads and writes between them.

    download ──► block ──write──► slot          a block whose bytes are in a slot may be given to another input
    upload  ◄── block ◄──read─── slot

The lock of `KeptInputs` guards every call. A call that needs a block waits for I/O alone. A Ctrl-C may end such a wait:
the request is then still in flight, and whoever asks for its memory next waits for it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.engine.activations import policy
from offload.engine.activations.disk_slots import DiskSlots
from offload.engine.activations.host_blocks import Block, HostBlocks
from offload.engine.activations.kept_input import KeptInput, Memory
from offload.errors import BudgetError, IoError, UsageError
from offload.sizes import format_size
from offload.swapper.memory.host_arena import HostArena
from offload.timeline import OFF, Row, Timeline


class Staging:
    """The blocks and slots of one engine's inputs."""

    def __init__(self, blocks: HostBlocks, slots: DiskSlots | None, timeline: Timeline = OFF) -> None:
        """Takes over the two.

        Args:
            blocks: host memory.
            slots: room on the drives; None without a drive.
            timeline: records waits.
        """
        self._blocks, self._slots, self._timeline = blocks, slots, timeline
        self._ending: list[Memory] = []
        """Memory of dropped inputs that a read or write still uses."""
        self.closed = False

    @property
    def arenas(self) -> list[HostArena]:
        """Host memory that is mapped for blocks."""
        return self._blocks.arenas

    # -- towards the disk ---------------------------------------------------------------------------

    def write_ahead(self, kept: Sequence[KeptInput]) -> None:
        """Starts writes of the oldest inputs in host memory, so that the next inputs find free blocks.

        Args:
            kept: all inputs, oldest first.
        """
        if self._slots is None:
            return
        in_host = [each for each in kept if each.memory.block is not None and each.memory.slot is None]
        for count, each in enumerate(in_host):
            room = self._blocks.room(each.nbytes)
            # The tensor of one that is leaving still has a download in flight, for which no thread shall wait.
            if each.memory.tensor is not None or not policy.writes(len(in_host) - count, room, each.nbytes):
                return
            self._write(each)

    def take_block(self, nbytes: int, kept: Sequence[KeptInput]) -> Block | None:
        """Returns a block, for which the oldest of `kept` goes to DISK if necessary; None if there is no room.

        Raises:
            IoError: if an input could not be written.
            StoreError: if a drive has no room for the file.
        """
        while (block := self._blocks.take(nbytes)) is None:
            if self._slots is None or not self._free_a_block(nbytes, kept):
                return None
        return block

    def _free_a_block(self, nbytes: int, kept: Sequence[KeptInput]) -> bool:
        """Frees the block of the oldest input, if possible a large one of an input that is not on its way back."""
        if self._ending:
            self.give_back(self._ending[0])
            self._ending.pop(0)
            return True
        found = [each for each in kept if _has_block(each.memory)]
        if not found:
            return False
        # Smaller blocks make room too, when all of a slab are free. `min` returns the first of equals, the oldest.
        oldest = min(found, key=lambda each: _cost_of_block(each.memory, nbytes))
        memory = oldest.memory
        self._end_read(memory)
        if memory.slot is None:
            self._write(oldest)
        self._end_write(memory)
        block, memory.block = memory.block, None
        assert block is not None
        self._blocks.give(block)
        return True

    def _write(self, kept: KeptInput) -> None:
        """Starts the write of an input from its block.

        Raises:
            StoreError: if a drive has no room for the file.
        """
        memory = kept.memory
        assert self._slots is not None and memory.block is not None and memory.slot is None
        memory.downloaded.wait()  # the drive reads what the device has written
        slot = self._slots.take(kept.nbytes)
        try:
            memory.writing = slot.write(memory.block.buffer.buffer[: kept.nbytes])
        except BaseException:
            self._slots.give(slot)
            raise
        memory.slot = slot

    def _end_write(self, memory: Memory) -> None:
        """Waits for the write of an input. After an error the block alone has the bytes."""
        if memory.writing is None:
            return
        try:
            with self._timeline.span(Row.WAITS, "waits for the write of an input"):
                memory.writing.wait()
        except IoError:  # no other error: after a Ctrl-C the drive still reads the block
            slot, memory.slot, memory.writing = memory.slot, None, None
            if slot is not None and self._slots is not None:
                self._slots.give(slot)
            raise
        self.check_open()
        memory.writing = None

    # -- from the disk ------------------------------------------------------------------------------

    def read_ahead(self, kept: KeptInput) -> bool:
        """Starts the read of an input that is on DISK alone, if a block is free; returns False if none is."""
        if kept.memory.block is not None:
            return True
        block = self._blocks.take(kept.nbytes)
        if block is None:
            return False
        self._read(kept, block)
        return True

    def to_block(self, kept: KeptInput, others: Sequence[KeptInput]) -> Block:
        """Returns the block of an input after the read of its bytes; for `others` see `take_block`.

        Raises:
            IoError: if the input could not be read, or another one not be written.
            StoreError: if a drive has no room for the file.
            BudgetError: if other engines have taken the memory through which the input went to DISK.
        """
        memory = kept.memory
        if memory.block is None:
            block = self.take_block(kept.nbytes, others)
            if block is None:
                raise BudgetError(
                    f"host memory has no room for {format_size(kept.nbytes)} of an input of a checkpointed unit, which "
                    'is on disk: raise "host_memory", or call destroy() on engines that are no longer used'
                )
            self._read(kept, block)
        self._end_read(memory)
        assert memory.block is not None
        return memory.block

    def _read(self, kept: KeptInput, block: Block) -> None:
        """Starts the read of an input into `block`."""
        memory = kept.memory
        assert memory.slot is not None, "an input is in a block or on DISK"
        try:
            for event in block.after:  # the drive overwrites what the device may still read
                event.wait()
            memory.reading = memory.slot.read(block.buffer.buffer[: kept.nbytes])
        except BaseException:
            self._blocks.give(block)
            raise
        memory.block = block

    def _end_read(self, memory: Memory) -> None:
        """Waits for the read of an input. After an error DISK alone has the bytes."""
        if memory.reading is None:
            return
        try:
            with self._timeline.span(Row.WAITS, "waits for the read of an input"):
                memory.reading.wait()
        except IoError:  # no other error: after a Ctrl-C the drive still writes to the block
            block, memory.block, memory.reading = memory.block, None, None
            if block is not None:
                self._blocks.give(block)
            raise
        self.check_open()
        memory.reading = None

    # -- the end of an input ------------------------------------------------------------------------

    def recover(self, dropped: Sequence[Memory]) -> None:
        """Takes back the memory of dropped inputs, as soon as no read or write uses it."""
        self._ending += dropped
        for memory in [each for each in self._ending if each.transfers_done]:
            self.give_back(memory)
            self._ending.remove(memory)  # afterwards: a Ctrl-C may end the call before

    def give_back(self, memory: Memory) -> None:
        """Waits for the transfer of a dropped input, whose error no longer matters, and frees block and slot."""
        memory.settle()
        self.check_open()
        if memory.slot is not None and self._slots is not None:
            self._slots.give(memory.slot)
        if memory.block is not None:
            self._blocks.give(memory.block)
        memory.slot = memory.block = None

    def close(self, memories: Sequence[Memory]) -> None:
        """Waits for the transfers of `memories` and of dropped inputs, and frees host memory and files. Idempotent."""
        self.closed = True
        for memory in (*memories, *self._ending):
            memory.settle()
        self._blocks.close()
        if self._slots is not None:
            self._slots.close()

    def check_open(self) -> None:
        """Raises `UsageError` after `close`, which the handler of a signal may call during a wait in here."""
        if self.closed:
            raise UsageError("this engine was destroyed, and with it the activations of its graphs")


def _has_block(memory: Memory) -> bool:
    """Returns True if an input has a block that it could give: its tensor has left the device."""
    return memory.block is not None and memory.tensor is None


def _cost_of_block(memory: Memory, nbytes: int) -> tuple[bool, bool]:
    """Returns a key that orders blocks which a request for `nbytes` may take: the least one first."""
    assert memory.block is not None
    return memory.block.buffer.nbytes < nbytes, memory.arriving is not None or memory.reading is not None
