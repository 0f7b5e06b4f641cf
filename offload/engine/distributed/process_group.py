"""Process groups of one run: the messages between ranks, and the detection of lost ranks.

    control    a few numbers of every rank to every rank, on the host, through gloo
    data       weights and gradients, between the devices' memories, through gloo on CPUs, NCCL on GPUs, and torch's
               default backend of any other accelerator

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
from offload.engine.distributed.heartbeat import Heartbeat, is_alive, machine_name
from offload.engine.distributed.rendezvous import _NOTICE, UNABLE, device_backend, ranks_store
from offload.engine.distributed.work import AllOf, Work
from offload.errors import RankError
from offload.interrupts import interruptible
from offload.swapper.memory.device import Device, Event

logger = logging.getLogger("offload")

_LONG = datetime.timedelta(days=7)
"""Timeout of the groups. A rank may evaluate alone for hours; the heartbeat shows whether it lives."""
_SLICE = datetime.timedelta(seconds=1)
"""Length of one wait, after which lost ranks are looked for."""
_SILENT = 120.0
"""Seconds without a pulse after which a rank counts as lost, even if no connection broke."""
_BLAME = 5.0
"""Seconds without a pulse after which a rank is blamed for a broken connection."""
_GRACE = datetime.timedelta(seconds=2)
"""Time that a collective still has to complete once the neighbour is found lost."""


class Ranks:
    """This process and others that train together, at least two in all. The module says which thread may call."""

    def __init__(self, device: Device) -> None:
        """Waits for all processes, and creates the process groups. Every process calls this."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.members = tuple(range(self.size))
        """The ranks in torch's default process group, by their rank here; see `divided`."""
        self._me, self._device = self.rank, device
        self._divisions: list[Ranks] = []
        """Groups that `divided` has made of these ranks."""
        self._lost: RankError | None = None
        self.sent = Communication()
        """All collectives so far, each counted when it begins."""
        self.on_gpu = device.torch.type != "cpu"
        # The heartbeat comes before any collective, so that the others notice if this rank ends during one.
        self._pulse = Heartbeat(ranks_store(), self.rank, self.size)
        try:
            self._places = self._meet()
            # Only after `_meet`: new_group blocks in C++ until every rank has called it.
            self._control, self._data = self._groups([self.members])
        except BaseException as error:
            self._pulse.close(f"{type(error).__name__}: {error}")  # the others must not wait for this rank
            raise
        self.here = sum(place[0] == machine_name() for place in self._places)
        """Number of processes on this machine, of all that train."""

    def _groups(self, divisions: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Creates the groups of `divisions`, and returns those of this process, for control and for data. Collective.

        Separate groups for control and data: gloo ends the process if messages of different lengths meet.
        """
        lists = [list(members) for members in divisions]
        backend, timeout = (device_backend(self._device.torch.type), None) if self.on_gpu else ("gloo", _LONG)
        control, _ = dist.new_subgroups_by_enumeration(lists, timeout=_LONG, backend="gloo")
        data, _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout, backend=backend)
        return control, data

    def divided(self, divisions: Sequence[Sequence[int]]) -> Ranks | None:
        """Returns this process's group of ranks that train together, with the watch over all processes. Collective.

        Args:
            divisions: all processes, in groups of one size, the same list on every process.

        Returns:
            The group; None if each process is alone in its own.
        """
        if all(len(members) == 1 for members in divisions):
            return None
        control, data = self._groups(divisions)
        group = copy.copy(self)
        group._control, group._data = control, data
        group.members = next(tuple(members) for members in divisions if self._me in members)
        group.rank, group.size = group.members.index(self._me), len(group.members)
        group.sent = Communication()
        group._divisions = []
        self._divisions.append(group)
        return group

    def _meet(self) -> list[tuple[str, int]]:
        """Waits until every rank has published itself, and returns the machine and the process of each.

        Creating a process group waits in C++ for all ranks, and would wait for ever for one that has ended.

        Raises:
            RankError: if a rank has ended before it arrived.
        """
        waiting = [rank for rank in range(len(self.members)) if rank != self.rank]
        began = noticed = time.monotonic()
        while waiting := [rank for rank in waiting if self._pulse.location(rank) is None]:
            for rank in waiting:
                ended = self._pulse.ended(rank)
                if ended is not None:
                    raise RankError(f"rank {rank} has ended before it created its engine: {ended}")
            now = time.monotonic()
            if now - noticed > _NOTICE:
                noticed = now
                logger.warning("rank %d has waited %.0f s for rank %s to initialize", self.rank, now - began, waiting)
            time.sleep(0.01 if now - began < 1 else 0.2)
        places = [self._pulse.location(rank) for rank in self.members]
        return [(place[0], int(place[1])) for place in places if place is not None]

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
        self._begin(lambda: _gather_into(everyone.view(-1), mine, self._control), to, kind, nbytes).wait()
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
            self._begin(lambda: _gather_into(everyone, mine, self._control), to, Kind.MESSAGES, nbytes).wait()
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
        """Sends each rank some elements, and receives some from each. The tensors are on the CPU, of one dtype.

        Args:
            received: (n,), filled with what each rank gives to this one, in rank order.
            got: number of elements from each rank.
            sent: (m,), what this rank gives, in rank order.
            gives: number of elements for each rank.
            to: the purpose, for messages.
        """
        size, out, into = sent.element_size(), received.view(torch.uint8), sent.view(torch.uint8)
        outs, ins = ([count * size for count in counts] for counts in (got, gives))
        start = functools.partial(dist.all_to_all_single, out, into, outs, ins, group=self._control, async_op=True)
        self._begin(start, to, Kind.PARAMETERS, sum(ins) - ins[self.rank]).wait()

    # -- weights and gradients ----------------------------------------------------------------------

    def gather(self, whole: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        """Fills `whole` with every rank's partition.

        Args:
            whole: (nbytes,) uint8 on the device; the caller keeps it allocated until the returned event is done.
            shard_ranges: this rank's byte ranges; those of all ranks are equally long and adjacent, in rank order.
            uploaded: event after which this rank's ranges are filled, by copies on the upload stream.

        Returns:
            An event that is done when all of `whole` is filled.
        """
        if not self.on_gpu:
            uploaded.wait()
            return AllOf([self._gather(whole, byte_range) for byte_range in shard_ranges])
        with self._device.uploading():  # on the upload stream, so the compute stream does not wait
            for byte_range in shard_ranges:
                self._gather(whole, byte_range).work.wait()
        return self._device.uploaded()

    def _gather(self, whole: torch.Tensor, mine: range) -> Work:
        """Starts the gather of one of this rank's byte ranges and the other ranks' ranges around it."""
        start = mine.start - self.rank * len(mine)
        region = whole[start : start + self.size * len(mine)]
        start_gather = functools.partial(_gather_into, region, whole[mine.start : mine.stop], self._data)
        return self._begin(start_gather, "gather weights", Kind.WEIGHTS, len(mine) * (self.size - 1))

    def exchange(self, received: torch.Tensor, sent: torch.Tensor | None, senders: Sequence[int]) -> Work:
        """Starts an exchange: row r of `sent` goes to each rank r, and a row comes from each of `senders`, in order.

        Several may be under way: gloo matches them by a number of their own, and NCCL carries them out on one stream,
        both in the order in which they began, which is the same on every rank.

        Args:
            received: (len(senders), numel) on the device, filled by the exchange.
            sent: (size, numel) on the device, of the same dtype, filled by compute that the calling thread has started;
                None on a rank that is no sender.
            senders: the ranks that contribute, the same list on every rank.

        Returns:
            The exchange. Neither tensor may change before compute is ordered behind it (`Work.order_compute`).
        """
        part, sends = received[0].nbytes, sent is not None
        out = received.view(-1).view(torch.uint8)
        into = out[:0] if sent is None else sent.view(-1).view(torch.uint8)
        return self._begin(
            lambda: dist.all_to_all_single(
                out,
                into,
                [part if rank in senders else 0 for rank in range(self.size)],
                [part if sends else 0] * self.size,
                group=self._data,
                async_op=True,
            ),
            "reduce gradients",
            Kind.GRADIENTS,
            part * (self.size - 1) if sends else 0,
        )

    # -- waits and lost ranks -----------------------------------------------------------------------

    def _begin(self, start: Callable[[], Any], to: str, kind: Kind, nbytes: int) -> Work:
        """Starts a collective in which this rank sends `nbytes`; raises `RankError` if a rank is lost."""
        if self._lost is not None:
            raise self._lost
        self.sent = self.sent.with_one(kind, nbytes)
        try:
            return Work(self, start(), to)
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
            if self._gone(_SILENT, [(self._me + 1) % len(self._places)]) and not self._ends(work, _GRACE):
                raise self._blame(None)
            now = time.monotonic()
            if now - noticed > _NOTICE:
                noticed = now
                logger.warning("rank %d has waited %.0f s for other ranks, to %s", self.rank, now - began, to)

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
        others = [rank for rank in range(len(self._places)) if rank != self._me]
        # A connection breaks before its rank has been silent for `_BLAME` seconds, so wait for the silence.
        while not (gone := self._gone(_BLAME, others)) and time.monotonic() < deadline:
            time.sleep(0.1)
        who = "; ".join(gone) or f"an unknown rank does not answer ({error})"
        # A rank that could not start would fail in the same way again; one that was killed may run the next time.
        unable = any((self._pulse.ended(rank) or "").startswith(UNABLE) for rank in others)
        self._lost = RankError(
            f"{who}. Rank {self._me} cannot continue alone; every rank keeps its last committed step: "
            f'{"fix that first, then " if unable else ""}start all of them again, with "resume": "auto"'
        )
        if self.on_gpu:  # an NCCL kernel would wait for the lost rank for ever, and block all later copies
            abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
            if abort is not None:
                abort(self._data)
        logger.error("%s", self._lost)  # a launcher may end this process before the error is raised
        return self._lost

    def _gone(self, silence: float, ranks: Sequence[int]) -> list[str]:
        """Returns a description of each of `ranks` that is lost, or silent for longer than `silence` seconds."""
        found: list[str] = []
        for rank in ranks:
            machine, process = self._places[rank]
            where = f"rank {rank} (process {process} on {machine.partition('/')[0]})"
            ended = self._pulse.ended(rank)
            if ended is not None:
                found.append(f"{where} has ended: {ended}")
            elif machine == machine_name() and not is_alive(process):
                found.append(f"{where} was killed or has crashed")
            elif self._pulse.silent(rank) > silence:
                found.append(f"{where} has sent no heartbeat for {self._pulse.silent(rank):.0f} s")
        return found

    @property
    def lost(self) -> bool:
        """True if this rank can no longer reach the others."""
        return self._lost is not None

    def fail(self, reason: str) -> RankError:
        """Returns the error of this rank, which has left a collective; publishes its end, so that others end too."""
        self.look()
        if self._lost is not None:
            return self._lost
        self.close(reason)
        self._lost = RankError(
            f"rank {self._me} has stopped, and the others with it: {reason}, after an earlier error; every rank keeps "
            f'its last committed step: start all of them again, with "resume": "auto"'
        )
        return self._lost

    def look(self) -> None:
        """Records and logs the loss of a rank whose end is known without a wait. Raises nothing."""
        if self._lost is None and self._gone(math.inf, [rank for rank in range(len(self._places)) if rank != self._me]):
            self._blame(None)

    def close(self, reason: str) -> None:
        """Publishes the end of this rank with its reason; destroys the groups, unless a rank was lost. Idempotent."""
        for division in self._divisions:
            division.close(reason)
        self._pulse.close(reason)
        if self._lost is None:
            self._lost = RankError(f"rank {self._me} has ended: {reason}")
            for group in (self._control, self._data):
                with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # the user may have destroyed them
                    dist.destroy_process_group(group)


def _gather_into(everyone: torch.Tensor, mine: torch.Tensor, group: Any) -> Any:
    """Starts an all-gather of `mine` into `everyone`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
    return gather(everyone, mine, group=group, async_op=True)


def join_ranks(device: Device) -> Ranks | None:
    """Returns the ranks of this run, those of torch's default process group; None for a process that trains alone."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Ranks(device) if several else None
