"""Process groups of one run: the messages between ranks, and the detection of lost ranks.

    control    a few numbers of every rank to every rank, on the host, through gloo
    replica    weights and gradients of one replica (`mesh`), between the devices' memories, through gloo on CPUs, NCCL
               on GPUs, and torch's default backend of any other accelerator
    across     sums of gradients of all replicas, in the same way, between the ranks that hold the same shard

One thread at a time may call: the thread that runs the model, or its backward, and the update worker while that thread
waits for it in `step()` (`optim.exchange`). Every wait is a series of waits of one
second, so that Ctrl-C can end it (but not inside of a backward that torch runs on a thread of its own, as on a GPU:
there the main thread waits in C++). Each rank also counts up every second in torch's own key-value store (`heartbeat`),
by which the remaining ranks can tell which rank has ended when a connection breaks.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from offload.engine.distributed.communication import Communication, Kind
from offload.engine.distributed.groups import LONG, DeviceGroups, gather_into, make_control, make_groups
from offload.engine.distributed.heartbeat import SILENT, Heartbeat
from offload.engine.distributed.mesh import check_same, mesh_of
from offload.engine.distributed.rendezvous import NOTICE, UNABLE, device_backend, ranks_store
from offload.engine.distributed.work import AllDone, Work, begin
from offload.errors import RankError
from offload.interrupts import interruptible
from offload.swapper.memory.device import Device, Event

logger = logging.getLogger("offload")

_SLICE = datetime.timedelta(seconds=1)
"""Length of one wait, after which lost ranks are looked for."""
_BLAME = 5.0
"""Seconds without a pulse after which a rank is blamed for a broken connection."""
_GRACE = datetime.timedelta(seconds=2)
"""Time that a collective still has to complete once the neighbour is found lost."""


class Ranks:
    """This process and others that train together, at least two in all. The module says which thread may call."""

    def __init__(self, device: Device, shard_size: int) -> None:
        """Waits for all processes, and creates the process groups. Every process calls this.

        Args:
            device: the compute device.
            shard_size: the config's "mics_shard_size".

        Raises:
            ConfigError: if `shard_size` does not fit the number of ranks, or ranks have different ones.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.members = tuple(range(self.size))
        """The ranks in torch's default process group, by their rank here; see `divided`."""
        self._device, self._shard_size = device, shard_size
        self._divisions: list[Ranks] = []
        """Groups that `divided` has made of these ranks."""
        self._lost: RankError | None = None
        self.sent = Communication()
        """All collectives so far, each counted when it begins."""
        self.on_gpu = device.torch.type != "cpu"
        # The heartbeat comes before any collective, so that the others notice if this rank ends during one.
        self._pulse = Heartbeat(ranks_store(), self.rank, self.size)
        try:
            self.mesh = mesh_of(shard_size, self.size)
            self._pulse.meet()
            # Only after `meet`: new_group blocks in C++ until every rank has called it.
            self._control = make_control([self.members])
            check_same([row[0] for row in self._collect([self.mesh.shards], "start", Kind.MESSAGES)])
            self._groups = self._device_groups([self.members])
        except BaseException as error:
            self._pulse.close(f"{type(error).__name__}: {error}")  # the others must not wait for this rank
            raise
        self.here = self._pulse.here
        """Number of processes on this machine, of all that train."""

    @property
    def shard(self) -> int:
        """The shard of each unit that this rank holds."""
        return self.mesh.shard_of(self.rank)

    def _device_groups(self, divisions: Sequence[Sequence[int]]) -> DeviceGroups:
        """Creates the groups for weights and gradients within `divisions`, and returns this rank's. Collective."""
        # Separate groups for control and data: gloo ends the process if messages of different lengths meet.
        backend, timeout = (device_backend(self._device.torch.type), None) if self.on_gpu else ("gloo", LONG)
        return make_groups(self.mesh, divisions, backend, timeout)

    def divided(self, divisions: Sequence[Sequence[int]], shard_size: int | None = None) -> Ranks | None:
        """Returns this process's group of ranks. Collective.

        The group has a mesh of its own, and watches all processes as these ranks do.

        Args:
            divisions: all processes, in groups of one size, the same list on every process.
            shard_size: ranks of a replica in the mesh; None for "mics_shard_size", -1 for all.

        Returns:
            The group; None if each process is alone in its own.

        Raises:
            ConfigError: on every process, if "mics_shard_size" does not fit the size of the groups.
        """
        size = self._shard_size if shard_size is None else shard_size
        mesh = mesh_of(size, len(divisions[0]), " with the same part of each divided parameter")
        if mesh.ranks == 1:
            return None
        group = copy.copy(self)
        group.members = next(tuple(members) for members in divisions if self.rank in members)
        group.rank, group.size, group.mesh = group.members.index(self.rank), mesh.ranks, mesh
        group._control, group._groups = make_control(divisions), group._device_groups(divisions)
        group.sent, group._divisions = Communication(), []
        self._divisions.append(group)
        return group

    # -- control messages ---------------------------------------------------------------------------

    def collect(self, numbers: Sequence[int], to: str) -> list[list[int]]:
        """Returns every rank's `numbers`, of the same length, in rank order; `to` is the purpose, for messages.

        For announcements alone, which are counted as such.
        """
        return self._collect(numbers, to, Kind.AGREEMENT)

    def _collect(self, numbers: Sequence[int], to: str, kind: Kind) -> list[list[int]]:
        """Exchanges the numbers, see `collect`."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # independent of torch's default device
        everyone = torch.empty(self.size, len(numbers), dtype=torch.int64, device="cpu")
        nbytes = mine.nbytes * (self.size - 1)
        self._begin(lambda: gather_into(everyone.view(-1), mine, self._control), to, kind, nbytes).wait()
        rows: list[list[int]] = everyone.tolist()
        return rows

    def collect_bytes(self, content: bytes, to: str) -> list[bytes]:
        """Returns every rank's `content`, of any length, in rank order."""
        lengths = [row[0] for row in self._collect([len(content)], to, Kind.MESSAGES)]
        longest = max(lengths)
        everyone = torch.empty(self.size * longest, dtype=torch.uint8, device="cpu")
        if longest:
            mine = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8)
            nbytes = longest * (self.size - 1)
            self._begin(lambda: gather_into(everyone, mine, self._control), to, Kind.MESSAGES, nbytes).wait()
        rows = everyone.view(self.size, -1)
        return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths, strict=True)]

    def share(self, value: Any, to: str = "start") -> list[Any]:
        """Returns every rank's `value`, which must be expressible in JSON."""
        return [json.loads(content) for content in self.collect_bytes(json.dumps(value).encode(), to)]

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Overwrites `values`, on the CPU, with those of rank `source`."""
        if not values.numel():
            return
        content = values.view(-1).view(torch.uint8)
        start = functools.partial(dist.broadcast, content, self.members[source], self._control, async_op=True)
        nbytes = content.nbytes * (self.size - 1) if source == self.rank else 0
        self._begin(start, "share weights", Kind.MESSAGES, nbytes).wait()

    def swap(
        self, received: torch.Tensor, got: Sequence[int], sent: torch.Tensor, gives: Sequence[int], to: str
    ) -> None:
        """Sends each rank of this replica some elements, and receives some from each.

        The tensors are on the CPU, of one dtype.

        Args:
            received: (n,), filled with what each shard's rank gives to this one, in the order of shards.
            got: number of elements from each of them.
            sent: (m,), what this rank gives, in the same order.
            gives: number of elements for each of them.
            to: the purpose, for messages.
        """
        size, out, into = sent.element_size(), received.view(torch.uint8), sent.view(torch.uint8)
        # All ranks take part in one exchange; those of other replicas give and receive nothing.
        before = [0] * self.mesh.replica(self.rank).start
        behind = [0] * (self.size - len(before) - len(got))
        outs, ins = ([*before, *(count * size for count in counts), *behind] for counts in (got, gives))
        start = functools.partial(dist.all_to_all_single, out, into, outs, ins, group=self._control, async_op=True)
        self._begin(start, to, Kind.PARAMETERS, sum(ins) - ins[self.rank]).wait()

    # -- weights and gradients ----------------------------------------------------------------------

    def gather(self, whole: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        """Fills `whole` with the partition of every rank of this replica.

        Args:
            whole: (nbytes,) uint8 on the device; the caller keeps it allocated until the returned event is done.
            shard_ranges: this rank's byte ranges; those of all shards are equally long and adjacent, in their order.
            uploaded: event after which this rank's ranges are filled, by copies on the upload stream.

        Returns:
            An event that is done when all of `whole` is filled.
        """
        if self.mesh.shards == 1:  # this rank's partition is all of the unit
            return uploaded
        if not self.on_gpu:
            uploaded.wait()
            return AllDone([self._gather(whole, byte_range) for byte_range in shard_ranges])
        with self._device.uploading():  # on the upload stream, so the compute stream does not wait
            for byte_range in shard_ranges:
                self._gather(whole, byte_range).work.wait()
        return self._device.uploaded()

    def _gather(self, whole: torch.Tensor, mine: range) -> Work:
        """Starts the gather of one of this rank's byte ranges and the other ranks' ranges around it."""
        start = mine.start - self.shard * len(mine)
        return self.gather_parts(whole[start : start + self.mesh.shards * len(mine)], whole[mine.start : mine.stop])

    def gather_parts(self, everyone: torch.Tensor, mine: torch.Tensor) -> Work:
        """Starts the gather of each shard's part into `everyone`, in their order; `mine` may be a view of it."""
        start = functools.partial(gather_into, everyone, mine, self._groups.replica)
        return self._begin(start, "gather weights", Kind.WEIGHTS, everyone.nbytes - mine.nbytes)

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor | None, senders: Sequence[int], kind: Kind = Kind.GRADIENTS
    ) -> Work:
        """Starts an exchange in this replica: row s of `sent` goes to shard s, and a row comes from each of `senders`.

        Several may be under way: gloo matches them by a number of their own, and NCCL carries them out on one stream,
        both in the order in which they began, which is the same on every rank.

        Args:
            received: (len(senders), numel) on the device, filled by the exchange.
            sent: (shards, numel) on the device, of the same dtype, filled by compute that the calling thread has
                started; None on a rank that is no sender.
            senders: the shards whose ranks contribute, in order; the same list on every rank of the replica.
            kind: what is sent.

        Returns:
            The exchange. Neither tensor may change before compute is ordered behind it (`Work.order_compute`).
        """
        if not senders or self.mesh.shards == 1:  # nothing comes from another rank
            if sent is not None:
                received.copy_(sent)
            return Work(self, None, kind.purpose)
        part, sends, shards = received[0].nbytes, sent is not None, self.mesh.shards
        out = received.view(-1).view(torch.uint8)
        into = out[:0] if sent is None else sent.view(-1).view(torch.uint8)
        return self._begin(
            lambda: dist.all_to_all_single(
                out,
                into,
                [part if shard in senders else 0 for shard in range(shards)],
                [part if sends else 0] * shards,
                group=self._groups.replica,
                async_op=True,
            ),
            kind.purpose,
            kind,
            part * (shards - 1) if sends else 0,
        )

    def all_reduce(self, values: torch.Tensor) -> Work:
        """Starts the sum of `values` over the ranks that hold the same shard.

        All of them receive the same bits, as the backend adds each element up on one rank and sends the sum to the
        others, on which the replicas of DistributedDataParallel rely too.

        Args:
            values: (n,) on the device, replaced by the sum; filled by compute that the calling thread has started.
        """
        start = functools.partial(dist.all_reduce, values, group=self._groups.across, async_op=True)
        # Once to add up and once to send the sums: each rank gives the others all but its own part.
        nbytes = 2 * values.nbytes * (self.mesh.replicas - 1) // self.mesh.replicas
        return self._begin(start, "reduce gradients", Kind.GRADIENTS, nbytes)

    def gather_sums(self, everyone: torch.Tensor, mine: torch.Tensor) -> Work:
        """Starts the gather of each replica's sum of this shard into `everyone`, in their order, as `gather_parts`."""
        start = functools.partial(gather_into, everyone, mine, self._groups.across)
        return self._begin(start, "reduce gradients", Kind.GRADIENTS, everyone.nbytes - mine.nbytes)

    # -- waits and lost ranks -----------------------------------------------------------------------

    def _begin(self, start: Callable[[], Any], to: str, kind: Kind, nbytes: int) -> Work:
        """Starts a collective in which this rank sends `nbytes`; raises `RankError` if a rank is lost."""
        if self._lost is not None:
            raise self._lost
        self.sent = self.sent.with_one(kind, nbytes)
        try:
            return Work(self, begin(start), to)
        except RuntimeError as error:
            raise self._blame(error) from error

    @interruptible
    def wait(self, work: Any, to: str) -> None:
        """Waits for `work`, and looks for lost ranks each second; raises `RankError` if a rank is lost."""
        began = noticed = time.monotonic()
        while not self._ends(work, _SLICE):
            if self._lost is not None:
                raise self._lost
            # Each rank watches its neighbour only, so that the news of a lost rank travels from rank to rank. A rank
            # that ends right after a collective has already contributed to it, hence the grace period.
            if self._pulse.gone(SILENT, [self._pulse.next]) and not self._ends(work, _GRACE):
                raise self._blame(None)
            now = time.monotonic()
            if now - noticed > NOTICE:
                noticed = now
                logger.warning("rank %d has waited %.0f s for other ranks, to %s", self._pulse.rank, now - began, to)

    def _ends(self, work: Any, within: datetime.timedelta) -> bool:
        """Returns True if `work` has succeeded within that time; raises `RankError` if it has failed."""
        try:
            work.wait(within)
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()  # completed just after the timeout, with success or failure
        except RuntimeError as error:
            raise self._blame(error) from error
        return True

    def _blame(self, error: Exception | None) -> RankError:
        """Records and logs a loss of ranks, and returns its error. Waits some seconds to learn which are lost."""
        # Several collectives may be under way, and fail one after the other: the loss is found, and logged, once.
        if self._lost is not None:
            return self._lost
        deadline = time.monotonic() + 2 * _BLAME
        others = self._pulse.others
        # A connection breaks before its rank has been silent for `_BLAME` seconds, so wait for the silence.
        while not (gone := self._pulse.gone(_BLAME, others)) and time.monotonic() < deadline:
            time.sleep(0.1)
        who = "; ".join(gone) or f"an unknown rank does not answer ({error})"
        # A rank that could not start would fail in the same way again; one that was killed may run the next time.
        unable = any((self._pulse.ended(rank) or "").startswith(UNABLE) for rank in others)
        self._lost = RankError(
            f"{who}. Rank {self._pulse.rank} cannot continue alone; every rank keeps its last committed step: "
            f'{"fix that first, then " if unable else ""}start all of them again, with "resume": "auto"'
        )
        if self.on_gpu:  # an NCCL kernel would wait for the lost rank for ever, and block all later copies
            abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
            if abort is not None:
                for group in self._groups.all:
                    abort(group)
        logger.error("%s", self._lost)  # a launcher may end this process before the error is raised
        return self._lost

    @property
    def lost(self) -> bool:
        """True if this rank can no longer reach the others."""
        return self._lost is not None

    @property
    def heartbeat(self) -> Heartbeat:
        """What the ranks have published about themselves."""
        return self._pulse

    def fail(self, reason: str) -> RankError:
        """Returns the error of this rank, which has left a collective; publishes its end, so that others end too."""
        self.look()
        if self._lost is not None:
            return self._lost
        self.close(reason)
        self._lost = RankError(
            f"rank {self._pulse.rank} has stopped, and the others with it: {reason}, after an earlier error; every "
            f'rank keeps its last committed step: start all of them again, with "resume": "auto"'
        )
        return self._lost

    def look(self) -> None:
        """Records and logs the loss of a rank whose end is known without a wait. Raises nothing."""
        if self._lost is None and self._pulse.gone(math.inf, self._pulse.others):
            self._blame(None)

    def close(self, reason: str) -> None:
        """Publishes the end of this rank with its reason; destroys the groups, unless a rank was lost. Idempotent."""
        for division in self._divisions:
            division.close(reason)
        self._pulse.close(reason)
        if self._lost is None:
            self._lost = RankError(f"rank {self._pulse.rank} has ended: {reason}")
            for group in (self._control, *self._groups.all):
                with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # the user may have destroyed them
                    dist.destroy_process_group(group)
            # The threads of a group of gloo end with its last reference, and wake a hundred times a second until then.
            self._control, self._groups = None, DeviceGroups(None, None)


def join_ranks(device: Device, shard_size: int) -> Ranks | None:
    """Returns the ranks of this run, those of torch's default process group; None for a process that trains alone.

    For the arguments and errors see `Ranks`.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not several:
        mesh_of(shard_size, 1)
        return None
    return Ranks(device, shard_size)
