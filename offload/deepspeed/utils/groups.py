"""`deepspeed.utils.groups`: ZeRO divides over all ranks, of which some may share each sequence."""

from __future__ import annotations

from typing import Any

from offload.deepspeed.comm import get_rank, get_world_group, get_world_size
from offload.deepspeed.runtime.sequence_parallel.parallel_state_sp import formed

get_data_parallel_group = _get_data_parallel_group = get_world_group
get_data_parallel_rank = _get_data_parallel_rank = get_rank
get_data_parallel_world_size = _get_data_parallel_world_size = get_world_size


def get_model_parallel_rank() -> int:
    """Returns 0: layers are not divided over ranks."""
    return 0


def get_model_parallel_world_size() -> int:
    """Returns 1: layers are not divided over ranks."""
    return 1


get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size


def _get_sequence_parallel_group() -> Any:
    """Returns the ranks that share each sequence with this one; None if none does."""
    groups = formed()
    return None if groups is None else groups.get_sequence_parallel_group()


def _get_sequence_parallel_rank() -> int:
    """Returns the part of each sequence that this rank has."""
    groups = formed()
    return 0 if groups is None else groups.get_sequence_parallel_rank()


def _get_sequence_parallel_world_size() -> int:
    """Returns the number of ranks that share each sequence."""
    groups = formed()
    return 1 if groups is None else groups.get_sequence_parallel_world_size()
