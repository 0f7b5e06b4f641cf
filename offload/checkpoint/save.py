"""Saving a checkpoint: each rank of one replica streams its partitions into files of its own.

With tensor parallelism or a pipeline the ranks with the same part of the model write into the folder of their part.

Each tensor is the rank's partition of one state of one unit, with its elements in the order of the store. A partition
that the store keeps comes from its newest slot. The file system shares the bytes (reflink) if it can. Otherwise they
are copied, and compared with the checksums that were computed as the store wrote them. Any other partition comes from
its tier in memory.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from offload.aio import DirectFile, IoQueue, aligned_empty, crc32c, crc32c_joined
from offload.aio.protocols import Future, Queue
from offload.checkpoint.directory import (
    begin_folder,
    counted_units,
    described_part,
    drop_partial,
    end_folder,
    holds_run,
    make_folder,
    only_save,
    prune,
)
from offload.checkpoint.files import (
    MANIFEST,
    Manifest,
    Saved,
    check_folder,
    check_tag,
    progress_file,
    states_file,
    tensor_name,
    tensors_of,
    time_of_save,
)
from offload.distributed.agreement import AllOrNothing
from offload.distributed.world import World
from offload.engine.shards import LocalShards
from offload.errors import StoreError, UsageError
from offload.fileio import sync_folder, write_new
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers
from offload.fileio.safetensors_stream import SafetensorsWriter, Tensor
from offload.sizes import MIB, format_size
from offload.states import State
from offload.swapper.store import find_shortage
from offload.swapper.store.inspection import is_rank

# -- save request --------------------------------------------------------------------------------------
# Content and place of a save: its checked arguments, and a rank's state other than its partitions.


class SaveRequest(NamedTuple):
    """Content and destination of a save."""

    folder: Path
    tag: str
    latest: bool
    """True to write the tag into `latest`."""
    frozen: bool
    """True to save frozen weights."""
    keep_last: int | None
    """Number of checkpoints to keep in the folder; None for all."""

    @property
    def checkpoint(self) -> Path:
        return self.folder / self.tag

    @classmethod
    def checked(cls, folder: Any, tag: Any, latest: bool, frozen: bool, keep_last: Any) -> SaveRequest:
        """Returns the request for a user's arguments; raises `UsageError` if one is not valid."""
        # `operator.index` accepts integers of numpy, which are valid, and True, which is a mistake.
        with contextlib.suppress(TypeError):
            if keep_last is not None and not isinstance(keep_last, bool):
                keep_last = int(operator.index(keep_last))
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise UsageError(
                f"keep_last must be a whole number of at least 1, got {keep_last!r}: the new checkpoint is always "
                "kept; give None to keep all"
            )
        path = check_folder(folder, "save_dir")
        if holds_run(path) or is_rank(path):
            raise UsageError(
                f"save_dir is {path}, which holds the swap files of a run: give a folder of checkpoints beside it, "
                f"such as {path.absolute().parent / 'checkpoints'}"
            )
        return cls(path, check_tag(tag), bool(latest), bool(frozen), keep_last)


class TrainingPosition(NamedTuple):
    """State of a rank at the time of the save, without its partitions."""

    step: int
    contents: Mapping[str, torch.Tensor]
    """This rank's progress and client state."""
    layout: Mapping[str, Any]
    about: Mapping[str, Any]


# -- save ----------------------------------------------------------------------------------------------


_SLACK = 4 * MIB
"""Bytes reserved for the manifest, headers and folders."""


class _PartitionChunk(NamedTuple):
    """Bytes [start, stop) of one partition."""

    name: str
    unit: int
    state: State
    start: int
    stop: int
    compare: bool
    """True if the read must be compared, because the store has no checksum for a comparison with the write."""


@contextlib.contextmanager
def own_or_shared(queue: Queue | None) -> Iterator[Queue]:
    """Yields the engine's queue, or a temporary one if the engine has none."""
    if queue is not None:
        yield queue
        return
    with IoQueue() as own:
        yield own


def save(
    shards: LocalShards,
    order: SaveRequest,
    take: Callable[[], TrainingPosition],
    queue: Queue,
    ranks: AllOrNothing,
    world: World,
) -> None:
    """Writes a checkpoint, completely or not at all. Collective.

    Args:
        take: Returns all that this rank saves in addition to its partitions.
        ranks: All processes that train together.
        world: The place of this process among them. The first replica of each part saves the states.

    Raises:
        StoreError: If there is not enough room, a name is taken, or another process saves into the folder.
        IoError: If something cannot be written. Existing checkpoints are unchanged. Only if the last renames fail, a
            checkpoint of the same tag may be replaced already, or have its `.old` name.
    """
    # Ranks with different arguments would write files that do not belong together.
    ranks.same({"folder": str(order.folder), "tag": order.tag, "frozen": order.frozen, "keep_last": order.keep_last})
    rank, shard_count = world.ranks.rank, world.ranks.mesh.shards
    saves_states = rank < shard_count
    tensors: Mapping[str, Tensor] = (
        tensors_of(shards.layouts, shards.mode, rank, shard_count, order.frozen) if saves_states else {}
    )
    taken: list[tuple[TrainingPosition, bytes]] = []

    def prepare() -> int:
        position = take()
        taken.append((position, safetensors.torch.save(dict(position.contents))))
        return sum(tensor.nbytes for tensor in tensors.values()) + len(taken[0][1])

    # Room is checked once, on rank 0, for the files of all ranks.
    need = sum(ranks.settle(prepare)) + _SLACK
    position, progress = taken[0]
    # Only rank 0 puts a lock on this stack.
    with contextlib.ExitStack() as locks:
        partial = Path(ranks.by_first(lambda: str(_begin(order, need, locks, world.parts))))
        folder = partial / world.part

        def write() -> tuple[str, dict[str, tuple[int, dict[str, int]]]]:
            if not folder.is_dir():
                raise StoreError(
                    f"rank {rank} does not see {folder}, which rank 0 has created: save to a folder that all ranks "
                    "share"
                )
            files: dict[str, tuple[int, dict[str, int]]] = {}
            if saves_states:
                files[states_file(rank)] = _write_states(shards, folder / states_file(rank), tensors, queue)
            write_new(folder / progress_file(rank), progress)
            return world.part, {**files, progress_file(rank): (len(progress), {"": crc32c(progress)})}

        def end_part(files: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
            # The first process of a part writes the part's manifest. The whole manifest names it with its checksum.
            if rank:
                return {}
            layout, about = described_part(world, position.layout, position.about)
            data = _manifest(order, position._replace(layout=layout, about=about), files).pack()
            write_new(folder / MANIFEST, data)
            sync_folder(folder)
            units = counted_units(position.layout, shards.layouts, world)
            return {"file": f"{world.part}/{MANIFEST}", "size": [len(data), {"": crc32c(data)}], "units": units}

        def end() -> None:
            write_new(partial / MANIFEST, _manifest(order, position, written).pack())
            end_folder(order.checkpoint, order.latest)
            if order.keep_last is not None:
                prune(order.folder, order.keep_last, order.tag)
            # Before the other ranks resume: the next save of any of them must find the folder unlocked.
            locks.close()

        try:
            # `settle` returns after all ranks have written and synced their files, so the manifest comes last.
            rows = ranks.settle(write)
            written = {
                name: size_and_sums for part, row in rows if part == world.part for name, size_and_sums in row.items()
            }
            if world.parts:
                heads = [head for head in ranks.settle(lambda: end_part(written)) if head]
                units = [unit for head in heads for unit in head["units"]]
                layout = {**position.layout, "parts": list(world.parts)}
                layout.pop("units")
                position = position._replace(layout={**layout, "units": units})
                written = {head["file"]: head["size"] for head in heads}
            ranks.by_first(end)
        except BaseException:
            # The folder is shared, so one rank deletes it.
            if ranks.rank == 0:
                drop_partial(order.checkpoint)
            raise


def _begin(order: SaveRequest, need: int, locks: contextlib.ExitStack, parts: Sequence[str]) -> Path:
    """Locks the folder, creates the checkpoint's own folder in it, and checks that there is room. Runs on rank 0.

    Args:
        need: Bytes of all ranks' files.
        locks: Receives the lock; other saves are kept out until it is closed.
    """
    make_folder(order.folder)
    locks.enter_context(only_save(order.folder, order.tag))
    partial = begin_folder(order.checkpoint, order.latest)  # also frees the room of killed saves
    short = find_shortage([order.folder], need)
    if short is not None:
        drop_partial(order.checkpoint)
        raise StoreError(
            f"the checkpoint {order.tag} needs {format_size(short.need)}, {short.path} has {format_size(short.free)} "
            "free (the existing checkpoints stay until the new one is written); free some room, save elsewhere, or "
            "keep fewer of them (keep_last of save_checkpoint, save_total_limit of a Trainer)"
        )
    # Made by one process: if each process made its own, others might see the shared folder too late.
    for part in parts:
        make_folder(partial / part)
    return partial


def _manifest(order: SaveRequest, position: TrainingPosition, written: Mapping[str, Sequence[Any]]) -> Manifest:
    files = {name: Saved(*size_and_sums) for name, size_and_sums in written.items()}
    return Manifest(position.step, time_of_save(order.folder), order.frozen, position.layout, position.about, files)


def _write_states(
    shards: LocalShards, path: Path, tensors: Mapping[str, Tensor], queue: Queue
) -> tuple[int, dict[str, int]]:
    """Writes this rank's file of states; returns its size in bytes, and the CRC-32C of each tensor."""
    sums: dict[str, int] = {}
    store = shards.store
    # Nothing is reserved here: on Btrfs, reserved space that shared extents then replace would stay allocated.
    with SafetensorsWriter(path, tensors, reserved=False) as writer, DirectFile(path) as file:

        def begin(chunk: _PartitionChunk, buffer: memoryview) -> Sequence[Future]:
            nbytes = chunk.stop - chunk.start
            return shards.read(chunk.unit, chunk.state, chunk.start, buffer[:nbytes], compare=chunk.compare)

        def end(chunk: _PartitionChunk, buffer: memoryview) -> Sequence[Future]:
            offset = writer.places[chunk.name].offset + chunk.start
            return [queue.write(file, offset, buffer[: chunk.stop - chunk.start], checksum=True)]

        def ended(chunk: _PartitionChunk, futures: Sequence[Future]) -> None:
            # The queue computes the CRC-32C as it writes, so no byte is read a second time.
            sums[chunk.name] = crc32c_joined(sums.get(chunk.name, 0), futures[0].crc32c(), chunk.stop - chunk.start)
            if chunk.stop == tensors[chunk.name].nbytes:
                _compare(shards, chunk, sums[chunk.name], path)

        def chunks() -> Iterator[_PartitionChunk]:
            for unit in range(len(shards.layouts)):
                for state in shards.states(unit):
                    name = tensor_name(unit, state)
                    if name not in tensors:
                        continue
                    nbytes = tensors[name].nbytes
                    expected = _expected(shards, unit, state, nbytes)
                    # A shared partition is not read at all: the store's checksum is saved as the tensor's. Without a
                    # checksum the file could not be verified later, so the partition is copied and summed.
                    if expected is not None:
                        offset = writer.places[name].offset
                        if store.clone(unit, state, nbytes, writer.descriptor, offset):
                            sums[name] = expected
                            continue
                    writer.reserve(name)
                    # Each byte gets one checksum: the write's checksum is compared, so the read needs none.
                    compare = expected is None
                    for start in range(0, nbytes, BUFFER_NBYTES):
                        yield _PartitionChunk(name, unit, state, start, min(start + BUFFER_NBYTES, nbytes), compare)

        flow(flow_buffers(), chunks(), begin, end, ended)
    return writer.nbytes, sums


def _expected(shards: LocalShards, unit: int, state: State, nbytes: int) -> int | None:
    """Returns the CRC-32C of the store's write of a partition; None if the store has no checksum."""
    # The bytes of a store with one slot change in place, so no other file shares them.
    shares = shards.stored(unit, state) and shards.store.spec.slots == 2
    return shards.store.sum_of(unit, state, nbytes) if shares else None


def _compare(shards: LocalShards, chunk: _PartitionChunk, crc: int, path: Path) -> None:
    """Compares the checksum of a partition with the checksum of the store's write.

    Raises:
        IoError: If the swap files are damaged; names the bytes.
        StoreError: If the bytes have changed in memory.
    """
    expected = _expected(shards, chunk.unit, chunk.state, chunk.stop)
    if expected is None or expected == crc:
        return
    # Read again and compared by the store, which names the bytes and remembers that its files are suspect.
    buffer = aligned_empty(min(BUFFER_NBYTES, chunk.stop))
    for start in range(0, chunk.stop, BUFFER_NBYTES):
        part = buffer[: min(BUFFER_NBYTES, chunk.stop - start)]
        for future in shards.read(chunk.unit, chunk.state, start, part):
            future.wait()
    raise StoreError(
        f"{chunk.state.value} of {shards.sizes[chunk.unit].title} does not match its checksum, but its swap files do: "
        f"bytes have changed in memory, and {path.parent} was not saved; save again, and test the machine's memory"
    )
