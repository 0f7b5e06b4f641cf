"""Process groups of one run: the messages between ranks, and the detection of lost ranks.

    control    numbers of each rank, sent to all ranks between the hosts, through gloo
    replica    weights and gradients of one replica (`mesh`), between the devices' memories, through gloo on CPUs, NCCL
               on GPUs, and torch's default backend of any other accelerator
    across     sums of gradients of all replicas, in the same way, between the ranks that hold the same shard

Only one thread at a time may call: the thread that runs the model or its backward, or the update worker while that
thread waits in `step()` (`optimizers.matrices.ParameterExchange`). Every wait is a series of waits of one second, so
that Ctrl-C can end it. The exception is a backward that torch runs on a thread of its own, as on a GPU: there the main
thread waits in C++. Each rank also counts up every second in torch's own key-value store (`Heartbeat`). When a
connection breaks, these counts show the remaining ranks which rank has ended.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import enum
import functools
import itertools
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from offload.errors import ConfigError, RankError
from offload.interrupts import interruptible, uninterrupted
from offload.launch.environment import rank_number, ranks_environment
from offload.sizes import count_of, format_size
from offload.swapper.memory.device import Device, Event, accelerator_type
from offload.threads import Thread
from offload.torch_internals import without_saved_tensor_hooks

# -- communication -------------------------------------------------------------------------------------
#
# These counts contain the collectives and the bytes that one rank sends to other ranks, by kind.
#
# Bytes are this rank's own payload, counted once for each rank that receives it. Headers, and other ranks' bytes that a
# ring or a tree of the backend passes on, are not counted, so the numbers are the same with any backend. With n ranks,
# a unit of W bytes of weights and G bytes of gradients:
#
#     gather of weights          W / n to each of n - 1 ranks:  W (n - 1) / n
#     reduction of gradients     G / n to each of n - 1 ranks:  G (n - 1) / n; 0 bytes from a rank without gradients
#
# With r replicas of s shards (`mesh`), s takes the place of n, and an all-reduce over the replicas follows a reduction:
#
#     sum of S bytes             S / r to each of r - 1 ranks, twice:  2 S (r - 1) / r
# With a secondary partition over nodes of s ranks, a gather within a node sends W (s - 1) / s bytes.
#
# Where codes are sent (`payload`), W and G are their bytes, 130 for 128 elements, and the codes of a sum of S elements
# go to each of r - 1 ranks once.
#
# ZeRO's paper counts the volume of an all-gather and of a reduce-scatter in the same way (arXiv 1910.02054, section 7).
# A collective in which this rank sends nothing is counted too, since the rank takes part and waits.


class Kind(enum.Enum):
    """A purpose of collectives. Values are fields of `Communication`."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    AGREEMENT = "agreement"
    PARAMETERS = "parameters"
    SEQUENCE = "sequence"
    ACTIVATIONS = "activations"
    EXPERTS = "experts"
    MESSAGES = "messages"

    @property
    def purpose(self) -> str:
        """The purpose of such a collective, in messages about waits and lost ranks."""
        purposes = {
            "gradients": "reduce gradients",
            "sequence": "exchange parts of sequences",
            "activations": "gather inputs of blocks",
            "experts": "exchange tokens of experts",
        }
        return purposes.get(self.value, self.value)


class Sent(NamedTuple):
    """Collectives of one kind, and the bytes that this rank sent in them."""

    collectives: int = 0
    nbytes: int = 0


class Communication(NamedTuple):
    """The collectives and bytes that this rank has sent since its engine was created, by kind; 0 with one rank."""

    weights: Sent = Sent()
    """Gathers of weights for forwards, backwards and reads: one for a unit's trainable part, one for its frozen part.

    `node_weights` counts the gathers within a node.
    """
    node_weights: Sent = Sent()
    """Gathers of weights within a node, from a secondary partition (`zero_hpz_partition_size`)."""
    gradients: Sent = Sent()
    """Reductions of gradients: one whenever the gradients of a unit are complete or must make room.

    With several replicas there are two each time, or one if a replica has only one shard.
    """
    agreement: Sent = Sent()
    """Rounds, in which every rank announces its next action."""
    parameters: Sent = Sent()
    """Values that optimizers exchange in their steps: parts of parameters that Muon, SinkGD and optimizers of torch
    step as a whole, and signs of OneBitAdam."""
    sequence: Sent = Sent()
    """Parts of sequences, heads and losses that the ranks of sequence parallelism exchange, mostly around attention."""
    activations: Sent = Sent()
    """Parts of inputs of blocks that are computed again, of ranks of tensor parallelism (`partition_activations`)."""
    experts: Sent = Sent()
    """Tokens, results and their gradients that ranks with batches of their own exchange (`expert_parallel`)."""
    messages: Sent = Sent()
    """All other collectives: decisions on a step, norms of LAMB, edits and reads of states, checkpoints, the start."""

    @property
    def total(self) -> Sent:
        """All kinds together."""
        return Sent(sum(sent.collectives for sent in self), sum(sent.nbytes for sent in self))

    def table(self) -> str:
        """Returns a line for each kind with collectives, and one for all."""
        rows = [(name.replace("_", " "), sent) for name, sent in self._asdict().items() if sent.collectives]
        return "\n".join(
            f"  {name:<13} {sent.collectives:>9,} collectives {format_size(sent.nbytes):>10} sent"
            for name, sent in (*rows, ("in all", self.total))
        )

    def since(self, before: Communication) -> Communication:
        """Returns the counts since `before` was taken."""
        return self.plus(Communication(*(Sent(-then.collectives, -then.nbytes) for then in before)))

    def plus(self, other: Communication) -> Communication:
        """Returns the sums of both counts."""
        return Communication(
            *(
                Sent(one.collectives + two.collectives, one.nbytes + two.nbytes)
                for one, two in zip(self, other, strict=True)
            )
        )

    def with_one(self, kind: Kind, nbytes: int) -> Communication:
        """Returns the counts after one more collective that sends `nbytes` bytes from this rank."""
        sent: Sent = getattr(self, kind.value)
        return self._replace(**{kind.value: Sent(sent.collectives + 1, sent.nbytes + nbytes)})


# -- mesh ----------------------------------------------------------------------------------------------
#
# A mesh arranges ranks as replicas of the model. Each replica is divided into shards.
#
#     four ranks, "mics_shard_size": 2          shard 0     shard 1
#
#                                   replica 0    rank 0      rank 1     gathers, reduce-scatters
#                                   replica 1    rank 2      rank 3     gathers, reduce-scatters
#                                                  │           │
#                                              all-reduce  all-reduce
#
# This is torch's `init_device_mesh(type, (replicas, shards), mesh_dim_names=("replicate", "shard"))`: the ranks of a
# replica are consecutive, as torchrun numbers the ranks of a machine. A shard has the number of the rank that holds it
# in replica 0. Work that needs only one copy of the states, such as a checkpoint, is done in replica 0.


class Mesh(NamedTuple):
    """The number of replicas, and the number of shards in a replica."""

    replicas: int = 1
    shards: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards

    def shard_of(self, rank: int) -> int:
        """Returns the shard that `rank` holds."""
        return rank % self.shards

    def replica_of(self, rank: int) -> int:
        return rank // self.shards

    def replica(self, rank: int) -> range:
        """Returns the ranks of the replica of `rank`, in the order of their shards."""
        first = rank - self.shard_of(rank)
        return range(first, first + self.shards)

    def shards_among(self, ranks: Iterable[int], rank: int) -> list[int]:
        """Returns the shard of every member of `ranks` that is in the replica of `rank`."""
        own = self.replica(rank)
        return [self.shard_of(member) for member in ranks if member in own]

    def __str__(self) -> str:
        ranks = count_of(self.ranks, "rank")
        if self.replicas == 1:
            return ranks
        return f"{ranks} ({self.replicas} replicas of {count_of(self.shards, 'shard')})"


def mesh_of(shard_size: int, ranks: int, which: str = "") -> Mesh:
    """Returns the arrangement of `ranks` ranks.

    `shard_size` is the config's "mics_shard_size"; 0 or less for one replica. `which` describes the ranks in the error,
    after their number; empty for all ranks of the run. Raises `ConfigError` if the ranks cannot be divided into
    replicas of this size.
    """
    if shard_size <= 0:
        return Mesh(shards=ranks)
    if ranks % shard_size:
        raise ConfigError(
            f"zero_optimization.mics_shard_size is {shard_size}, the number of ranks that hold one replica of the "
            f"model, and {count_of(ranks, 'rank')}{which} cannot be divided into such replicas: set it to a divisor "
            f"of {ranks}, or to -1 for one replica"
        )
    return Mesh(ranks // shard_size, shard_size)


def check_same(setting: str, values: Sequence[int]) -> None:
    """Raises `ConfigError` if ranks differ in a setting: they would create different groups and wait for each other."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"the {setting} of rank {rank} and of rank 0 differ: {value}, not {values[0]}; give every rank the "
                "same model and config"
            )


# -- groups --------------------------------------------------------------------------------------------
#
# The process groups of ranks: for messages between hosts, and for weights and gradients between devices.
#
# Groups are made for *divisions* of all processes: one of all, or the columns of tensor parallelism.


class DeviceGroups(NamedTuple):
    """One rank's groups in a two-dimensional mesh; None for a group that would contain this rank alone."""

    replica: Any
    """The ranks of this rank's replica."""
    across: Any
    """The ranks that hold the same shard."""

    @property
    def all(self) -> list[Any]:
        return [group for group in self if group is not None]


LONG = datetime.timedelta(days=7)
"""Timeout of groups of gloo. A rank may evaluate alone for hours; the heartbeat shows whether it lives."""


def make_control(divisions: Sequence[Sequence[int]]) -> Any:
    """Creates one group for control messages per division, and returns this process's group. Collective."""
    return _own([list(members) for members in divisions], "gloo", LONG)


def _own(groups: list[list[int]], backend: str, timeout: datetime.timedelta | None) -> Any:
    # `init_device_mesh` is not used: for a dimension of all ranks it takes torch's default group, which carries the
    # user's own messages. There, older versions of torch also accept no timeout.
    return dist.new_subgroups_by_enumeration(groups, timeout=timeout, backend=backend)[0]


def gather_into(everyone: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
    """Starts an all-gather of `own` into `everyone`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
    return gather(everyone, own, group=group, async_op=True)


# -- bounded store -------------------------------------------------------------------------------------
# torch's key-value store with a time limit for every call.
# torch's own calls have no limit. After a cable was cut, a call that waits for an answer returns when TCP gives up,
# after some 15 minutes, and no Ctrl-C is obeyed until then. torch makes one call at a time, so all later ones wait for
# it.
#
#     any thread    get, set ─► calls ─► waits `LONGEST` seconds at most
#     own thread                calls ─► torch's store, one call after the other
#
# The thread exists from the beginning: Python starts no thread while it shuts down, when a rank publishes the reason
# for its end.


LONGEST = 150.0
"""Seconds for one call of the store.

The limit is longer than `SILENT`, the silence after which a rank is taken for lost. The ranks that still reach the
store therefore name the rank with the cut cable before that rank ends by itself. A launcher may end them afterwards.
"""

_SLICE_OF_CALL, _MOST_APART = 5.0, 10.0
"""Seconds of one wait for a call, and between two looks at `Awake`: in the rest of a longer time it was stopped."""
_MOST_CALLS = 8
"""Calls that may wait for the thread. Each caller waits for its own call, so a caller has at most one."""


class Awake:
    """A clock that stands while this process is stopped, as by SIGSTOP or a frozen cgroup.

    All ranks of a machine may be stopped together, for any time, and none of them is lost then.
    """

    def __init__(self) -> None:
        self._state = time.monotonic(), 0.0

    def time(self) -> float:
        """Returns the seconds in which this process ran. Some thread must call it every few seconds."""
        # any thread, without a lock: of two that call at a time, both go on from one state, and one of their two stays.
        before, sum_ = self._state
        now = time.monotonic()
        sum_ += min(now - before, _MOST_APART)
        self._state = now, sum_
        return sum_


class _StoreCall:
    """A call of the store. It has an outcome as soon as the lock `ended` is free."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act
        self.result: Any = None
        self.error: BaseException | None = None
        # A lock, not an event: an event is written in Python, and a Ctrl-C would find it between two of its lines.
        self.ended = threading.Lock()
        self.ended.acquire()


class BoundedStore:
    """A key-value store of torch whose calls end in time. After a call that did not, this object refuses all calls.

    Any thread may call it. Errors are `RuntimeError`, as torch's own errors if no process serves the store.
    """

    def __init__(self, store: Any, longest: float = LONGEST) -> None:
        """Starts the thread. `longest` is the seconds for a call."""
        self._store, self._longest, self.clock = store, longest, Awake()
        self._calls: queue.Queue[_StoreCall | None] = queue.Queue(_MOST_CALLS)
        self.refusal: str | None = None
        """The reason why this object makes no calls any more; None while it makes calls."""
        self._closed = False
        self._thread = Thread(target=self._serve, name="offload-store", daemon=True)
        self._thread.start()

    def get(self, key: str) -> str | None:
        """Returns the value of `key`, or None if there is none.

        Raises `RuntimeError` if the store cannot be reached, or has not answered in time.
        """

        def read() -> str | None:
            return str(self._store.get(key).decode()) if self._store.check([key]) else None

        value: str | None = self._within(read)
        return value

    def set(self, key: str, value: str) -> None:
        """Sets the value of `key`. Raises as `get` does."""
        self._within(lambda: self._store.set(key, value))

    def close(self) -> None:
        """Ends the thread, without a wait for a call that has not ended in time. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._calls.put(None)
        if self.refusal is None:
            self.refusal = "the connection to torch's key-value store was closed"
            self._thread.join(self._longest)

    @uninterrupted
    def _within(self, act: Callable[[], Any]) -> Any:
        """Returns the result of `act`, called on the thread of this object, or raises its error."""
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        call = _StoreCall(act)
        self._calls.put(call)
        if not self._ends(call):
            self.refusal = f"torch's key-value store has not answered for {self._longest:g} s"
            raise RuntimeError(self.refusal)
        if call.error is not None:
            raise call.error
        return call.result

    @interruptible
    def _ends(self, call: _StoreCall) -> bool:
        """Waits for the end of a call; returns False if there is none in time, while this process runs."""
        end = self.clock.time() + self._longest
        while (left := end - self.clock.time()) > 0:
            if call.ended.acquire(timeout=min(left, _SLICE_OF_CALL)):
                return True
        return False

    def _serve(self) -> None:
        """Runs on the thread until `close`."""
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.act()
            except BaseException as error:  # raised by the thread that waits
                call.error = error
            call.ended.release()
            del call  # a value, or the frames of an error, would live until the next call


# -- rendezvous ----------------------------------------------------------------------------------------
#
# Rendezvous of a launcher's ranks before they have an engine, and the notice of a rank that will create none.


NOTICE = 60.0
"""Seconds between two warnings about a wait for other ranks."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_LONGEST_START = datetime.timedelta(minutes=30)
"""Time in which all ranks must have begun; torch's own."""


_engines = itertools.count()
"""Numbers of the users of the store. They are the same on every rank because all ranks take them in the same order."""

logger = logging.getLogger("offload")

UNABLE = "it could not start: "
"""Prefix of the reason that a rank publishes if it has failed to make its engine."""


def ranks_store() -> Any:
    """Returns torch's key-value store, with a prefix that is new at each call and the same on every rank."""
    store = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(f"offload/{next(_engines)}", store)


def stay_away(reason: str) -> None:
    """Publishes that this rank will create no engine, so that other ranks do not wait for it.

    Does nothing if the key-value store cannot be reached.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):
            ranks_store().set(f"end/{dist.get_rank()}", reason)


def join_launcher() -> None:
    """Sets torchrun's environment variables if srun or mpirun has started this process as one of several.

    Raises `ConfigError` if MPI's ranks are on several machines and the address of rank 0 is unknown, or if a variable
    has a value that srun and mpirun do not set.
    """
    os.environ.update(ranks_environment(os.environ))


def meet_others() -> None:
    """Creates torch's default process group if a launcher has started several ranks and there is none yet.

    Raises `ConfigError` if the group cannot be created, for example because the port of rank 0 is in use.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    join_launcher()
    if rank_number(os.environ, "WORLD_SIZE", 1) == 1:
        return
    try:
        # Both backends, since tensors on either device are exchanged.
        accelerator = accelerator_type()
        dist.init_process_group(
            "gloo" if accelerator is None else f"cpu:gloo,{accelerator}:{device_backend(accelerator)}",
            **(_place_after_restart() or _place_on_one_machine()),
        )
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        cure = "start them with torchrun, srun or mpirun, or unset WORLD_SIZE"
        if "EADDRINUSE" in str(error):
            cure = "another process has this port: set MASTER_PORT to a free one, the same for all ranks"
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the ranks cannot meet at {place}: {error}; {cure}"
        ) from error


def _place_after_restart() -> dict[str, Any]:
    """Returns the store, rank and size of ranks that torchrun has restarted on one machine; otherwise {}.

    After a restart torchrun's store still contains the addresses of the killed ranks. A rank that reads such an address
    before it is overwritten waits for a process that is gone. On several machines torchrun counts restarts differently,
    so the count cannot be a prefix there: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start its own store.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        return {}
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    own = dist.distributed_c10d.PrefixStore(f"restart/{restarts}", store)
    return {"store": own, "rank": rank, "world_size": size}


def _place_on_one_machine() -> dict[str, Any]:
    """Returns the store, rank and size of ranks that meet at an address of this machine alone; otherwise {}.

    The store of torch's own rendezvous listens on all interfaces, whatever MASTER_ADDR is.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), rank_number(os.environ, "MASTER_PORT", 0)
    rank, size = rank_number(os.environ, "RANK", 0), rank_number(os.environ, "WORLD_SIZE", 1)
    # torchrun sets this variable if it serves a store itself.
    if not address.startswith("127.") or not 0 < port < 2**16 or os.environ.get(_AGENT_STORE) == "True":
        return {}
    served: dict[str, Any] = {}
    if rank == 0:
        try:
            served = {"master_listen_fd": socket.create_server((address, port), backlog=2048).detach()}
        except OSError:
            # This process may serve a store there already, which torch shares; else torch says that the port is taken.
            return {}
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, size, rank == 0, _LONGEST_START, wait_for_workers=False, **served
    )
    return {"store": store, "rank": rank, "world_size": size}


def device_backend(device_type: str) -> str:
    """Returns the backend of torch.distributed for tensors on this type of device."""
    return "nccl" if device_type == "cuda" else str(dist.get_default_backend_for_device(device_type))


def as_the_first(decide: Callable[[], Any], to: str) -> Any:
    """Returns rank 0's result of `decide` on every rank, sent as JSON; a process that trains alone returns its own.

    Collective. For decisions that machines of different kinds would make differently. Raises `RankError` if rank 0 has
    ended before its decision.
    """
    meet_others()
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return decide()
    # Called on all ranks, so that the next prefix is the same on all of them.
    with contextlib.closing(BoundedStore(ranks_store())) as store:
        if dist.get_rank() == 0:
            try:
                store.set("decided", json.dumps(decide()))
            except Exception as error:
                # Otherwise the other ranks would wait for a decision that never comes.
                store.set("end/0", f"{type(error).__name__}: {error}")
                raise
        began = noticed = time.monotonic()
        # Polled: a wait on the key would block in C++ with torch's timeout, and would not notice the end of rank 0.
        while (decided := _decided(store, to)) is None:
            now = time.monotonic()
            if now - noticed > NOTICE:
                noticed = now
                logger.warning("rank %d has waited %.0f s for rank 0 to %s", dist.get_rank(), now - began, to)
            time.sleep(0.01 if now - began < 1 else 0.2)
        return json.loads(decided)


def _decided(store: BoundedStore, to: str) -> str | None:
    """Returns the decision of rank 0, or None if there is none yet; raises `RankError` if rank 0 is lost."""
    try:
        decided = store.get("decided")
        ended = store.get("end/0") if decided is None else None
    except RuntimeError as error:  # the store's process is gone: rank 0, unless a launcher owns it
        ended = str(error)
    else:
        if ended is None:
            return decided
    raise RankError(f"rank 0 has ended before it could {to}: {ended}")


# -- heartbeat -----------------------------------------------------------------------------------------
#
# Each rank counts up in torch's key-value store. Its count shows all other ranks that it lives.
#
# Ranks are those of torch's default process group here.


_DIFFERENT = "have reached different calls"
"""Words in the error of `Rounds` if no rank can go on."""
PULSE = 1.0
"""Seconds between two counts."""
SILENT = 120.0
"""Seconds without a count until a rank is taken for lost."""


class Heartbeat:
    """Counts up in the store, on a thread of its own, and reads the counts of other ranks."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Publishes this rank's machine and process, and starts the thread. `store` adds this engine's prefix."""
        self._store, self.rank = BoundedStore(store), rank
        self.others = [peer for peer in range(size) if peer != rank]
        """All other ranks."""
        self.places: list[tuple[str, int]] = []
        """Machine and process of each rank, once all have met."""
        self._seen = {peer: ("", 0.0) for peer in range(size)}
        self._closing = threading.Event()
        self._store.set(f"place/{rank}", f"{machine_name()}\n{os.getpid()}")
        self._thread = Thread(target=self._run, name="offload-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Counts up every `PULSE` seconds until `close`. Runs on the heartbeat's thread."""
        for count in itertools.count():
            self._store.clock.time()
            try:
                self._store.set(f"pulse/{self.rank}", str(count))
            except RuntimeError:
                pass  # the process that serves the store may be gone; the ranks notice that by broken connections
            if self._closing.wait(PULSE):
                return

    def meet(self) -> None:
        """Waits until every rank has published its machine and process.

        The creation of a process group waits in C++ for all ranks, and would wait for ever if one of them has ended.
        Raises `RankError` if a rank has ended before it arrived.
        """
        waiting = self.others
        began = noticed = time.monotonic()
        while waiting := [rank for rank in waiting if self.location(rank) is None]:
            if self.cut_off is not None:
                raise RankError(f"{self.cut_off}, so rank {self.rank} cannot meet the other ranks")
            for rank in waiting:
                ended = self.ended(rank)
                if ended is not None:
                    raise RankError(f"rank {rank} has ended before it created its engine: {ended}")
            now = time.monotonic()
            if now - noticed > NOTICE:
                noticed = now
                late = f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}"
                logger.warning("rank %d has waited %.0f s for %s to initialize", self.rank, now - began, late)
            time.sleep(0.01 if now - began < 1 else 0.2)
        places = [self.location(rank) for rank in range(len(self._seen))]
        self.places = [(place[0], int(place[1])) for place in places if place is not None]

    @property
    def here(self) -> int:
        """Number of ranks on this machine."""
        return sum(machine == machine_name() for machine, _ in self.places)

    @property
    def next(self) -> int:
        """The rank after this one; the first follows the last."""
        return (self.rank + 1) % len(self.places)

    def gone(self, silence: float, ranks: Sequence[int]) -> list[str]:
        """Returns a description of each of `ranks` that is lost, or silent for longer than `silence` seconds."""
        losses: list[str] = []
        for rank in ranks:
            machine, process = self.places[rank]
            where = f"rank {rank} (process {process} on {machine.partition('/')[0]})"
            ended = self.ended(rank)
            if self.cut_off is not None:  # nothing is known of any rank then
                return [f"{self.cut_off}: this machine, or the one that serves the store, is cut off"]
            if ended is not None:
                losses.append(f"{where} has ended: {ended}")
            elif machine == machine_name() and not is_alive(process):
                losses.append(f"{where} was killed or has crashed")
            elif self.silent(rank) > silence:
                losses.append(f"{where} has sent no heartbeat for {self.silent(rank):.0f} s")
        return losses

    @property
    def cut_off(self) -> str | None:
        """The reason why the store makes no calls any more; None while its calls end, even with errors."""
        return self._store.refusal

    def location(self, rank: int) -> list[str] | None:
        """Returns the machine and the process of `rank`, or None while the rank has not published them."""
        message = self._get(f"place/{rank}")
        return None if message is None else message.split("\n")

    def silent(self, rank: int) -> float:
        """Returns the seconds since this method last saw a new count of `rank`.

        A count that changed since the last call is 0 seconds old, however long ago that call was.
        """
        count = self._get(f"pulse/{rank}")
        before, since = self._seen[rank]
        if count is not None and count != before:
            self._seen[rank] = count, self._store.clock.time()
            return 0.0
        return self._store.clock.time() - since

    def ended(self, rank: int) -> str | None:
        """Returns the reason that `rank` gave for its end, or None while it has not ended."""
        return self._get(f"end/{rank}")

    def explain(self, error: str) -> None:
        """Publishes the exception that is about to end this rank, for the other ranks' messages."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"error/{self.rank}", error)

    def tell(self, ranks: Sequence[int], calls: Sequence[str]) -> str:
        """Returns the next call of every rank, with the exception that the rank has published, if any."""
        rows = [(rank, call, self._get(f"error/{rank}")) for rank, call in zip(ranks, calls, strict=True)]
        # A rank may have published the error about these very calls, and the error's text would then contain itself.
        return "; ".join(
            f"rank {rank} {call}{'' if error is None or _DIFFERENT in error else f', after {error}'}"
            for rank, call, error in rows
        )

    def _get(self, key: str) -> str | None:
        with contextlib.suppress(RuntimeError):  # the process that serves the store may be the lost one
            return self._store.get(key)
        return None

    def close(self, reason: str) -> None:
        """Publishes the reason for this rank's end, and joins the thread. Idempotent."""
        if not self._closing.is_set():
            with contextlib.suppress(RuntimeError):
                self._store.set(f"end/{self.rank}", reason)
            self._closing.set()
        self._thread.join()
        self._store.close()


def machine_name() -> str:
    """Returns the name of this host with its process namespace: containers of one host number processes separately."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def is_alive(process: int) -> bool:
    """Returns True if a process of this machine exists and is no zombie."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# -- work ----------------------------------------------------------------------------------------------
#
# An event stands for a collective that is under way.


@uninterrupted  # a Ctrl-C between the hooks' going and coming would lose them
def begin(start: Callable[[], Any]) -> Any:
    """Calls `start`, which begins a collective, and returns the collective's work.

    The work of gloo keeps the state of the thread that began it, saved-tensor hooks included. A gather may begin within
    the checkpointing of one unit and be waited for in another unit. Its work would keep the graph alive until then.
    """
    with without_saved_tensor_hooks():
        return start()


class CollectiveWork:
    """A collective under way, as an `Event`. If `work` is None, the collective has ended already."""

    def __init__(self, ranks: Ranks, work: Any = None, to: str = "") -> None:
        self.work, self._ranks, self._to = work, ranks, to

    def done(self) -> bool:
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> None:
        """Waits for the collective, and raises `RankError` if a rank is lost."""
        if self.work is not None:
            self._ranks.wait(self.work, self._to)  # also after completion, which may be a failure

    def order_compute(self) -> None:
        """Makes all later compute of the calling thread wait for the collective.

        On a CPU the thread itself waits, and `RankError` is raised if a rank is lost. On a GPU the thread continues.
        The next message between hosts then notices a lost rank, and aborts the collective.
        """
        if self._ranks.on_gpu and self.work is not None:
            self.work.wait()  # NCCL: the current stream waits, the host does not
        else:
            self.wait()


class AllDone:
    """Several events as one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def done(self) -> bool:
        return all(event.done() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.wait()


# -- ranks ---------------------------------------------------------------------------------------------


class Ranks:
    """The processes that train together. The module's docstring names the threads that may call the methods.

    An object of this class is a world of one process: its collectives return at once, with this process's own values.
    `ProcessGroup` joins several processes, and overrides the collectives.
    """

    on_gpu = False
    alone = True
    """True if the collectives return at once."""
    here = 1
    """Number of processes on this machine, among all processes that train."""

    def __init__(self, member: int = 0) -> None:
        """Makes a world of one process. `member` is its rank in torch's default process group, if there is one."""
        self.rank, self.size, self.mesh = 0, 1, Mesh()
        self.members: tuple[int, ...] = (member,)
        """The ranks in torch's default process group, by their rank here; see `divided`."""
        self.sent = Communication()
        """Counts of all collectives so far. A collective is counted when it begins."""

    @property
    def shard(self) -> int:
        """The shard of each unit that this rank holds."""
        return self.mesh.shard_of(self.rank)

    @property
    def gathers(self) -> bool:
        """True if weights are gathered: each rank holds a shard of a unit."""
        return not self.alone and (self.mesh.shards > 1 or self.size == 1)

    def divided(self, divisions: Sequence[Sequence[int]], shard_size: int | None = None) -> Ranks:
        """Returns this process's group of ranks. Collective.

        The group has a mesh of its own, and watches all processes as these ranks do. `divisions` are groups of equal
        size that together contain all processes. The list must be the same on every process. `shard_size` is the number
        of ranks in a replica of the mesh; None for "mics_shard_size", -1 for all ranks. Raises `ConfigError` on every
        process if "mics_shard_size" does not fit the size of the groups.
        """
        return Ranks(self.members[0])

    # -- control messages ---------------------------------------------------------------------------

    def collect(self, numbers: Sequence[int], to: str) -> list[list[int]]:
        """Returns every rank's `numbers`, of equal length, in rank order. `to` is the purpose, for messages.

        Use this only for announcements, since `Communication.agreement` counts the call.
        """
        return [list(numbers)]

    def collect_bytes(self, content: bytes, to: str) -> list[bytes]:
        """Returns every rank's `content`, of any length, in rank order."""
        return [content]

    def share(self, value: Any, to: str = "start") -> list[Any]:
        """Returns every rank's `value`, which must be expressible in JSON."""
        return [value]

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Overwrites `values`, on the CPU, with the values of rank `source`."""

    def swap(
        self,
        received: torch.Tensor,
        received_counts: Sequence[int],
        sent: torch.Tensor,
        sent_counts: Sequence[int],
        to: str,
    ) -> None:
        """Sends elements to each rank of this replica, and receives elements from each; or to and from all ranks.

        The tensors are on the CPU, of one dtype. `sent`, (m,), contains the elements for each shard's rank, in the
        order of shards. `received`, (n,), is filled with the elements from each shard's rank, in the same order.
        `received_counts` and `sent_counts` count them by shard; if they have a count for each rank, all ranks take the
        place of shards.
        """
        received.copy_(sent)

    # -- weights and gradients ----------------------------------------------------------------------

    def gather(self, unsharded: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        """Fills `unsharded` with the partition of every rank of this replica.

        `unsharded` is (nbytes,) uint8 on the device; the caller keeps it allocated until the returned event is done.
        Around each of this rank's byte ranges, the ranges of all shards are equally long and adjacent, in the order of
        the shards. Copies on the upload stream have filled this rank's ranges after the event `uploaded`. The returned
        event is done when all of `unsharded` is filled.
        """
        return uploaded

    def gather_parts(self, everyone: torch.Tensor, own: torch.Tensor) -> CollectiveWork:
        """Starts the gather of all shards' parts into `everyone`, in shard order. `own` may be a view of `everyone`."""
        everyone.copy_(own)
        return CollectiveWork(self)

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor | None, senders: Sequence[int], kind: Kind = Kind.GRADIENTS
    ) -> CollectiveWork:
        """Starts an exchange in this replica: row s of `sent` goes to shard s, and a row comes from each of `senders`.

        Several exchanges may be under way. gloo matches them by number, and NCCL runs them on one stream: both keep the
        order in which the exchanges began, and this order is the same on every rank.

        Args:
            received: (len(senders), numel) on the device, filled by the exchange.
            sent: (shards, numel) on the device, of the same dtype, filled by compute that the calling thread has
                started; None on a rank that is no sender.
            senders: the shards whose ranks contribute, in order; the same list on every rank of the replica.

        Returns:
            The exchange. Neither tensor may change before compute is ordered after it (`CollectiveWork.order_compute`).
        """
        if sent is not None:
            received.copy_(sent)
        return CollectiveWork(self)

    def route(self, rows: torch.Tensor, gives: Sequence[int], takes: Sequence[int]) -> torch.Tensor:
        """Sends consecutive rows to each rank of this replica, and returns the rows of all ranks, in their order.

        Compute of the calling thread that begins later is ordered after the exchange.

        Args:
            rows: (sum of `gives`, ...) on the device, contiguous.
            gives: the number of rows for each rank.
            takes: the number of rows from each rank.
        """
        return rows

    def all_reduce(self, values: torch.Tensor) -> CollectiveWork:
        """Starts the sum of `values` over the ranks that hold the same shard.

        All of these ranks receive the same bits: the backend sums each element on one rank and sends the sum to the
        others. The replicas of DistributedDataParallel rely on this too. `values`, (n,) on the device, were filled by
        compute that the calling thread has started; the sum replaces them.
        """
        return CollectiveWork(self)

    def gather_sums(self, everyone: torch.Tensor, own: torch.Tensor) -> CollectiveWork:
        """Starts the gather of all replicas' sums of this shard into `everyone`; otherwise as `gather_parts`."""
        everyone.copy_(own)
        return CollectiveWork(self)

    # -- waits and lost ranks -----------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """True if this rank can no longer reach the others."""
        return False

    def wait(self, work: Any, to: str) -> None:
        """Waits for `work`, and looks for lost ranks each second; raises `RankError` if a rank is lost."""

    def explain(self, error: str) -> None:
        """Publishes the exception that is about to end this rank, for the other ranks' messages."""

    def described(self, calls: Sequence[str]) -> str:
        """Returns words for each rank's next call, from `calls`, and the exception that the rank has published."""
        return f"rank {self.rank} {calls[0]}"

    def fail(self, reason: str) -> RankError:
        """Publishes that this rank has left a collective and ends, so that other ranks end too. Returns the error."""
        raise AssertionError("a process that trains alone has left nobody in a collective")

    def look(self) -> None:
        """Records and logs the loss of a rank whose end is known without a wait. Raises nothing."""

    def close(self, reason: str) -> None:
        """Publishes the end of this rank with its reason; destroys the groups, unless a rank was lost. Idempotent."""


# -- process group -------------------------------------------------------------------------------------


_SLICE = datetime.timedelta(seconds=1)
"""Length of one wait; each is followed by a look for lost ranks."""
_BLAME = 5.0
"""Seconds without a pulse after which a rank is blamed for a broken connection."""
_GRACE = datetime.timedelta(seconds=2)
"""Time in which a collective may still complete after the neighbour was found lost."""


class ProcessGroup(Ranks):
    """The processes that train together, this process among them: two or more, or one whose collectives are tried."""

    alone = False

    def __init__(self, device: Device, shard_size: int) -> None:
        """Waits for all processes, and creates the process groups. Every process calls this.

        Raises `ConfigError` if `shard_size` does not fit the number of ranks, or differs between ranks.
        """
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.members = tuple(range(self.size))
        self._device, self._shard_size = device, shard_size
        self._divisions: list[ProcessGroup] = []
        """Groups that `divided` has made of these ranks."""
        self._lost: RankError | None = None
        self.on_gpu = device.torch.type != "cpu"
        # The heartbeat starts before any collective, so that other ranks notice if this rank ends during a collective.
        self._pulse = Heartbeat(ranks_store(), self.rank, self.size)
        try:
            self.mesh = mesh_of(shard_size, self.size)
            self._pulse.meet()
            # Only after `meet`: new_group blocks in C++ until every rank has called it.
            self._control = make_control([self.members])
            rows = self._collect([self.mesh.shards], "start", Kind.MESSAGES)
            check_same("mics_shard_size", [row[0] for row in rows])
            self._groups = self._device_groups([self.members])
        except BaseException as error:
            self._pulse.close(f"{type(error).__name__}: {error}")  # the others must not wait for this rank
            raise
        self.here = self._pulse.here

    def _device_groups(self, divisions: Sequence[Sequence[int]]) -> DeviceGroups:
        """Creates the groups for weights and gradients within `divisions`; returns this rank's groups. Collective."""
        # Separate groups for control and data: gloo ends the process if messages of different lengths meet.
        backend, timeout = (device_backend(self._device.torch.type), None) if self.on_gpu else ("gloo", LONG)

        def own(groups: list[range]) -> Any:
            in_all = [[members[rank] for rank in group] for members in divisions for group in groups]
            return _own(in_all, backend, timeout)

        mesh = self.mesh
        replicas = [mesh.replica(first) for first in range(0, mesh.ranks, mesh.shards)]
        same_shard = [range(shard, mesh.ranks, mesh.shards) for shard in range(mesh.shards)]
        return DeviceGroups(own(replicas) if self.gathers else None, None if mesh.replicas == 1 else own(same_shard))

    def divided(self, divisions: Sequence[Sequence[int]], shard_size: int | None = None) -> Ranks:
        size = self._shard_size if shard_size is None else shard_size
        mesh = mesh_of(size, len(divisions[0]), " with the same part of each divided parameter")
        if mesh.ranks == 1:
            return Ranks(self.rank)
        group = copy.copy(self)
        group.members = next(tuple(members) for members in divisions if self.rank in members)
        group.rank, group.size, group.mesh = group.members.index(self.rank), mesh.ranks, mesh
        group._control, group._groups = make_control(divisions), group._device_groups(divisions)
        group.sent, group._divisions = Communication(), []
        self._divisions.append(group)
        return group

    # -- control messages ---------------------------------------------------------------------------

    def collect(self, numbers: Sequence[int], to: str) -> list[list[int]]:
        return self._collect(numbers, to, Kind.AGREEMENT)

    def _collect(self, numbers: Sequence[int], to: str, kind: Kind) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # independent of torch's default device
        everyone = torch.empty(self.size, len(numbers), dtype=torch.int64, device="cpu")
        nbytes = own.nbytes * (self.size - 1)
        self._begin(lambda: gather_into(everyone.view(-1), own, self._control), to, kind, nbytes).wait()
        rows: list[list[int]] = everyone.tolist()
        return rows

    def collect_bytes(self, content: bytes, to: str) -> list[bytes]:
        lengths = [row[0] for row in self._collect([len(content)], to, Kind.MESSAGES)]
        longest = max(lengths)
        everyone = torch.empty(self.size * longest, dtype=torch.uint8, device="cpu")
        if longest:
            own = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8)
            nbytes = longest * (self.size - 1)
            self._begin(lambda: gather_into(everyone, own, self._control), to, Kind.MESSAGES, nbytes).wait()
        rows = everyone.view(self.size, -1)
        return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths, strict=True)]

    def share(self, value: Any, to: str = "start") -> list[Any]:
        return [json.loads(content) for content in self.collect_bytes(json.dumps(value).encode(), to)]

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        if not values.numel():
            return
        content = values.view(-1).view(torch.uint8)
        start = functools.partial(dist.broadcast, content, self.members[source], self._control, async_op=True)
        nbytes = content.nbytes * (self.size - 1) if source == self.rank else 0
        self._begin(start, "share weights", Kind.MESSAGES, nbytes).wait()

    def swap(
        self,
        received: torch.Tensor,
        received_counts: Sequence[int],
        sent: torch.Tensor,
        sent_counts: Sequence[int],
        to: str,
    ) -> None:
        size, out, into = sent.element_size(), received.view(torch.uint8), sent.view(torch.uint8)
        # All ranks take part in one exchange. Ranks of other replicas send and receive nothing if they are not counted.
        before = [0] * (self.mesh.replica(self.rank).start if len(received_counts) < self.size else 0)
        behind = [0] * (self.size - len(before) - len(received_counts))
        outs, ins = (
            [*before, *(count * size for count in counts), *behind] for counts in (received_counts, sent_counts)
        )
        start = functools.partial(dist.all_to_all_single, out, into, outs, ins, group=self._control, async_op=True)
        self._begin(start, to, Kind.PARAMETERS, sum(ins) - ins[self.rank]).wait()

    # -- weights and gradients ----------------------------------------------------------------------

    def gather(self, unsharded: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        if not self.gathers:  # this rank's partition is all of the unit
            return super().gather(unsharded, shard_ranges, uploaded)
        if not self.on_gpu:
            uploaded.wait()
            return AllDone([self._gather(unsharded, byte_range) for byte_range in shard_ranges])
        with self._device.uploading():  # on the upload stream, so the compute stream does not wait
            for byte_range in shard_ranges:
                self._gather(unsharded, byte_range).work.wait()
        return self._device.uploaded()

    def _gather(self, unsharded: torch.Tensor, own: range) -> CollectiveWork:
        """Starts the gather of one of this rank's byte ranges and the other ranks' ranges around it."""
        start = own.start - self.shard * len(own)
        return self.gather_parts(
            unsharded[start : start + self.mesh.shards * len(own)], unsharded[own.start : own.stop]
        )

    def gather_parts(self, everyone: torch.Tensor, own: torch.Tensor) -> CollectiveWork:
        start = functools.partial(gather_into, everyone, own, self._groups.replica)
        return self._begin(start, "gather weights", Kind.WEIGHTS, everyone.nbytes - own.nbytes)

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor | None, senders: Sequence[int], kind: Kind = Kind.GRADIENTS
    ) -> CollectiveWork:
        if not senders or not self.gathers:  # nothing comes from another rank
            return super().exchange(received, sent, senders, kind)
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

    def route(self, rows: torch.Tensor, gives: Sequence[int], takes: Sequence[int]) -> torch.Tensor:
        received = rows.new_empty(sum(takes), *rows.shape[1:])
        nbytes = math.prod(rows.shape[1:]) * rows.element_size()
        out, into = received.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8)
        outs, ins = ([count * nbytes for count in counts] for counts in (takes, gives))
        start = functools.partial(
            dist.all_to_all_single, out, into, outs, ins, group=self._groups.replica, async_op=True
        )
        self._begin(start, Kind.EXPERTS.purpose, Kind.EXPERTS, sum(ins) - ins[self.rank]).order_compute()
        return received

    def all_reduce(self, values: torch.Tensor) -> CollectiveWork:
        start = functools.partial(dist.all_reduce, values, group=self._groups.across, async_op=True)
        # Once to add up and once to send the sums: each rank gives the others all but its own part.
        nbytes = 2 * values.nbytes * (self.mesh.replicas - 1) // self.mesh.replicas
        return self._begin(start, "reduce gradients", Kind.GRADIENTS, nbytes)

    def gather_sums(self, everyone: torch.Tensor, own: torch.Tensor) -> CollectiveWork:
        start = functools.partial(gather_into, everyone, own, self._groups.across)
        return self._begin(start, "reduce gradients", Kind.GRADIENTS, everyone.nbytes - own.nbytes)

    # -- waits and lost ranks -----------------------------------------------------------------------

    def _begin(self, start: Callable[[], Any], to: str, kind: Kind, nbytes: int) -> CollectiveWork:
        if self._lost is not None:
            raise self._lost
        self.sent = self.sent.with_one(kind, nbytes)
        try:
            return CollectiveWork(self, begin(start), to)
        except RuntimeError as error:
            raise self._blame(error) from error

    @interruptible
    def wait(self, work: Any, to: str) -> None:
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
        """Records and logs a loss of ranks. Waits some seconds to find the lost ranks. Returns the error to raise."""
        # Several collectives may be under way, and fail one after the other: the loss is found, and logged, once.
        if self._lost is not None:
            return self._lost
        deadline = time.monotonic() + 2 * _BLAME
        peers = self._pulse.others
        # A connection breaks before its rank has been silent for `_BLAME` seconds, so wait for the silence.
        while not (gone := self._pulse.gone(_BLAME, peers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        who = "; ".join(gone) or f"an unknown rank does not answer ({error})"
        # A rank that could not start would fail in the same way again. A rank that was killed may run the next time.
        unable = any((self._pulse.ended(rank) or "").startswith(UNABLE) for rank in peers)
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
        return self._lost is not None

    def explain(self, error: str) -> None:
        self._pulse.explain(error)

    def described(self, calls: Sequence[str]) -> str:
        return self._pulse.tell(self.members, calls)

    def fail(self, reason: str) -> RankError:
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
        if self._lost is None and self._pulse.gone(math.inf, self._pulse.others):
            self._blame(None)

    def close(self, reason: str) -> None:
        for division in self._divisions:
            division.close(reason)
        self._pulse.close(reason)
        if self._lost is None:
            self._lost = RankError(f"rank {self._pulse.rank} has ended: {reason}")
            for group in (self._control, *self._groups.all):
                with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # the user may have destroyed them
                    dist.destroy_process_group(group)
            # The threads of a gloo group wake a hundred times a second, and end only with the group's last reference.
            self._control, self._groups = None, DeviceGroups(None, None)


def join_ranks(device: Device, shard_size: int, collectives: bool = False) -> Ranks:
    """Returns the ranks of torch's default process group, or a world of one process if there is no group.

    With `collectives`, a process that trains alone gets a group too, so that it calls what several ranks call. For the
    other arguments and errors see `ProcessGroup`.
    """
    if collectives and dist.is_available() and not dist.is_initialized():
        # Nobody has to be met, so the store needs no address.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if dist.is_available() and dist.is_initialized() and (collectives or dist.get_world_size() > 1):
        return ProcessGroup(device, shard_size)
    mesh_of(shard_size, 1)
    return Ranks()
