"""Rendezvous of a launcher's ranks before they have an engine, and the notice of a rank that will create none."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from offload.engine.distributed.bounded_store import BoundedStore
from offload.errors import ConfigError, RankError
from offload.launch.environment import rank_number, ranks_environment
from offload.swapper.memory.device import accelerator_type

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
    """Returns torch's key-value store, with a prefix of its own for each call, the same one on every rank."""
    store = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(f"offload/{next(_engines)}", store)


def stay_away(reason: str) -> None:
    """Tells ranks that wait for this one that it will create no engine, if the key-value store can be reached."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):
            ranks_store().set(f"end/{dist.get_rank()}", reason)


def join_launcher() -> None:
    """Sets the variables of torchrun's if srun or mpirun has started this process as one of several.

    Raises:
        ConfigError: if MPI's ranks are on several machines and nothing says where rank 0 is, or a variable is not what
            srun and mpirun set.
    """
    os.environ.update(ranks_environment(os.environ))


def meet_others() -> None:
    """Creates torch's default process group if a launcher has started several ranks and there is none yet.

    Raises:
        ConfigError: if the group cannot be created, as where the port of rank 0 is in use.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    join_launcher()
    if rank_number(os.environ, "WORLD_SIZE", 1) == 1:
        return
    try:
        # Both backends, since tensors on either device are exchanged.
        found = accelerator_type()
        dist.init_process_group(
            "gloo" if found is None else f"cpu:gloo,{found}:{device_backend(found)}",
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
    """Returns store, rank and size of ranks that torchrun has started again on one machine; else nothing.

    torchrun keeps its store when it starts ranks again, with the addresses of those that were killed. A rank that reads
    one before it is overwritten waits for a process that is gone. On several machines torchrun counts restarts
    differently, so that the count is no prefix there: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start a store.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        return {}
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    own = dist.distributed_c10d.PrefixStore(f"restart/{restarts}", store)
    return {"store": own, "rank": rank, "world_size": size}


def _place_on_one_machine() -> dict[str, Any]:
    """Returns store, rank and size of ranks that meet at an address which no other machine reaches; else nothing.

    The store of torch's own rendezvous listens on all interfaces, whatever MASTER_ADDR is.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), rank_number(os.environ, "MASTER_PORT", 0)
    rank, size = rank_number(os.environ, "RANK", 0), rank_number(os.environ, "WORLD_SIZE", 1)
    # torchrun serves a store, and says so.
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
    """Returns on every rank the result of `decide` on rank 0, sent as JSON. A process that trains alone calls `decide`.

    All ranks call this, for decisions that ranks on machines of different kinds would make differently.

    Args:
        decide: called on rank 0 only.
        to: the purpose in words, for messages.

    Raises:
        RankError: if rank 0 has ended before its decision.
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
    """Returns the decision of rank 0, None before; raises `RankError` if rank 0 has ended instead, or is cut off."""
    try:
        decided = store.get("decided")
        ended = store.get("end/0") if decided is None else None
    except RuntimeError as error:  # the store's process is gone: rank 0, unless a launcher owns it
        ended = str(error)
    else:
        if ended is None:
            return decided
    raise RankError(f"rank 0 has ended before it could {to}: {ended}")
