"""`deepspeed.comm`: the collectives of torch.distributed, also for a process started without a launcher.

In a process that trains alone, the first collective creates a group of one, so that each call has its ordinary result.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ReduceOp as ReduceOp

from offload.distributed.process_group import Communication, device_backend, join_launcher, meet_others
from offload.engine.access import engines
from offload.launch.environment import rank_number
from offload.swapper.memory.device import accelerator_type

logger = logging.getLogger(__name__)

__path__: list[str] = []  # a package of DeepSpeed, so that Python asks for `deepspeed.comm.comm`

_OF_THE_PROFILER = ("prof", "log_name", "debug")
"""Keywords of DeepSpeed that measure a call; torch's functions lack them."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the ranks that the launcher has started, or creates a group of this process alone.

    Does nothing if a process group exists already, or with `dist_init_required=False`. `dist_backend`, by default gloo
    for the CPU and the accelerator's own, `timeout`, `init_method`, `rank` and `world_size` are as in torch. With
    `auto_mpi_discovery=False` a process that srun or mpirun has started trains alone. The launcher's MASTER_PORT
    counts, not `distributed_port`. The other arguments have no effect.

    Raises:
        ConfigError: if the ranks of the launcher cannot meet.
    """
    if not dist.is_available() or dist.is_initialized() or dist_init_required is False:
        return
    if auto_mpi_discovery:
        join_launcher()
    # A script that sets a backend or an init method expects torch's own call; otherwise the engine chooses both.
    if init_method is not None or rank >= 0 or (dist_backend is not None and _launched() > 1):
        dist.init_process_group(dist_backend, init_method, timeout, world_size, rank)
    elif _launched() > 1:
        meet_others()
    else:
        # A store in memory uses no port, so that it cannot collide with other processes.
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        device_type = accelerator_type()
        backends = "gloo" if device_type is None else f"cpu:gloo,{device_type}:{device_backend(device_type)}"
        dist.init_process_group(backends, store=store, rank=0, world_size=1)


def _launched() -> int:
    return rank_number(os.environ, "WORLD_SIZE", 1)


def _with_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a torch.distributed function: the wrapper creates the group first, and accepts DeepSpeed's keywords."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        init_distributed()
        return function(*args, **{key: value for key, value in kwargs.items() if key not in _OF_THE_PROFILER})

    return call


# Some collectives have two names in DeepSpeed, and scripts use both.
all_gather = _with_group(dist.all_gather)
all_gather_into_tensor = allgather_fn = _with_group(dist.all_gather_into_tensor)
all_gather_object = _with_group(dist.all_gather_object)
all_reduce = inference_all_reduce = _with_group(dist.all_reduce)
all_to_all = _with_group(dist.all_to_all)
all_to_all_single = _with_group(dist.all_to_all_single)
barrier = _with_group(dist.barrier)
broadcast = _with_group(dist.broadcast)
broadcast_object_list = _with_group(dist.broadcast_object_list)
gather = _with_group(dist.gather)
get_all_ranks_from_group = _with_group(dist.get_process_group_ranks)
irecv = _with_group(dist.irecv)
isend = _with_group(dist.isend)
monitored_barrier = _with_group(dist.monitored_barrier)
new_group = _with_group(dist.new_group)
recv = _with_group(dist.recv)
reduce = _with_group(dist.reduce)
reduce_scatter = _with_group(dist.reduce_scatter)
reduce_scatter_tensor = reduce_scatter_fn = _with_group(dist.reduce_scatter_tensor)
scatter = _with_group(dist.scatter)
send = _with_group(dist.send)
# Functions that end or query a group do not create one.
destroy_process_group = dist.destroy_process_group
is_available = dist.is_available
is_initialized = dist.is_initialized


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Any = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Does nothing: the engines of this process always count their collectives."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Prints, on rank 0, the number and bytes of the collectives that the engines of this process have sent, by kind.

    Calls of a script's own are not counted. Unlike DeepSpeed's, the function is not collective: each rank has its
    counts. Messages are neither told apart by size nor timed, so `show_straggler` has no effect.

    Args:
        show_straggler: without effect, as a line says.
        return_dict: True to return the counts too.

    Returns:
        None, or {"summary": {kind: {"count": collectives, "bytes": bytes sent}}, "straggler_analysis": None,
        "metadata": {"world_size": ..., "rank": ...}}.
    """
    counts = functools.reduce(Communication.plus, (engine.sent for engine in engines()), Communication())
    if get_rank() == 0:
        print(f"collectives of rank 0 since its engines were created:\n{counts.table()}", flush=True)
        if show_straggler:
            logger.warning('log_summary times no collective; "trace" in the "offload" block draws them on each rank')
    if not return_dict:
        return None
    summary = {name: {"count": sent.collectives, "bytes": sent.nbytes} for name, sent in counts._asdict().items()}
    return {
        "summary": {name: sent for name, sent in summary.items() if sent["count"]},
        "straggler_analysis": None,
        "metadata": {"world_size": get_world_size(), "rank": get_rank()},
    }


def get_world_group() -> Any:
    """Returns the group of all ranks."""
    init_distributed()
    return dist.group.WORLD


def get_rank(group: Any = None) -> int:
    """Returns the rank of this process; before a group exists the launcher's RANK, or 0 without a launcher."""
    # A query creates no group: the script may be about to create its own.
    return dist.get_rank(group) if dist.is_initialized() else rank_number(os.environ, "RANK", 0)


def get_world_size(group: Any = None) -> int:
    """Returns the number of ranks; before a group exists the launcher's WORLD_SIZE, or 1 without a launcher."""
    return dist.get_world_size(group) if dist.is_initialized() else _launched()


def get_local_rank() -> int:
    """Returns the rank of this process on its machine."""
    # Only the launcher knows which ranks share a machine.
    return rank_number(os.environ, "LOCAL_RANK", 0)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Returns the global rank of rank `group_rank` of a group; `group` None is the group of all ranks."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)
