"""The ranks of a launcher before they have an engine: how they meet, and how one says that it will not come."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from offload.errors import ConfigError, RankError

_NOTICE = 60.0


_engines = itertools.count()

logger = logging.getLogger("offload")

UNABLE = "it could not start: "
"""With this begins the reason of a rank that has failed to make its engine."""


def ranks_store() -> Any:
    """Torch's key-value store, of which every engine has a corner of its own."""
    store = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(f"offload/{next(_engines)}", store)


def stay_away(reason: str) -> None:
    """Tell the ranks that wait for this one to initialize that it will not, where they can be told."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):
            ranks_store().set(f"end/{dist.get_rank()}", reason)


def meet_others() -> None:
    """Make torch's default process group where a launcher asks for several ranks and there is none yet.

    Raises `ConfigError` where it cannot be made.
    """
    if not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the ranks cannot meet: {error}; start them with torchrun, "
            f"or unset WORLD_SIZE"
        ) from error


def as_the_first(decide: Callable[[], Any], to: str) -> Any:
    """What `decide` returns on rank 0, as JSON tells it, on every rank; all call it. A process alone decides itself.

    Ranks on machines of different kinds would decide differently. Raises `RankError` where rank 0 has ended before.
    """
    meet_others()
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return decide()
    store = ranks_store()
    if dist.get_rank() == 0:
        try:
            store.set("decided", json.dumps(decide()))
        except Exception as error:
            store.set("end/0", f"{type(error).__name__}: {error}")
            raise
    began = noticed = time.monotonic()
    while not _is_there(store, "decided", to):
        now = time.monotonic()
        if now - noticed > _NOTICE:
            noticed = now
            logger.warning("rank %d has waited %.0f s for rank 0 to %s", dist.get_rank(), now - began, to)
        time.sleep(0.01 if now - began < 1 else 0.2)
    return json.loads(store.get("decided"))


def _is_there(store: Any, key: str, to: str) -> bool:
    """Whether rank 0 has set `key`; raises `RankError` where it has ended in place of that."""
    try:
        if store.check([key]):
            return True
        ended = store.get("end/0").decode() if store.check(["end/0"]) else None
    except RuntimeError as error:  # the store's own process is gone, which is rank 0 where no launcher has it
        ended = str(error)
    if ended is None:
        return False
    raise RankError(f"rank 0 has ended before it could {to}: {ended}")
