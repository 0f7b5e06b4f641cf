"""`deepspeed.utils.groups`: all ranks are data-parallel, so each group is that of all ranks or of this one."""

from __future__ import annotations

from offload.deepspeed.comm import get_rank, get_world_group, get_world_size

get_data_parallel_group = _get_data_parallel_group = get_world_group
get_data_parallel_rank = _get_data_parallel_rank = get_rank
get_data_parallel_world_size = _get_data_parallel_world_size = get_world_size


def get_model_parallel_rank() -> int:
    """Returns 0: layers are not divided over ranks."""
    return 0


def get_model_parallel_world_size() -> int:
    """Returns 1: layers are not divided over ranks."""
    return 1


get_tensor_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = _get_sequence_parallel_world_size = get_model_parallel_world_size
