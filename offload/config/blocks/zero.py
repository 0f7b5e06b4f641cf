"""Config blocks of ZeRO and of I/O: partitioning, tiers, and access to the swap files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from offload.config.blocks.block import CHANGES_TRAINING, Block, split_names
from offload.config.blocks.values import Count, Elements, Integer, Names, Number, Paths, Size, Tier


class OffloadParam(Block):
    """Tier of the weights."""

    TUNING = ("pin_memory",)
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"device": "cpu"}

    device: Tier = Field("none", description="tier of the weights: none (compute device), cpu, nvme")
    nvme_path: Paths = Field((), description="folder or list of folders for swap files; one per drive")
    max_in_cpu: Elements | None = Field(
        None,
        description="elements of weights on nvme that are also cached in host memory; default: as host_memory allows",
    )
    buffer_count: Count | None = Field(None, description="with buffer_size: another way to set max_in_cpu")
    buffer_size: Count | None = Field(None, description="elements of a buffer; units may be larger")


class OffloadOptimizer(Block):
    """Tier of the optimizer states."""

    TUNING = split_names(
        """pin_memory buffer_count buffer_size fast_init pipeline pipeline_read pipeline_write super_offload
        cpuadam_cores_perc"""
    )
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"device": "cpu"}

    device: Tier = Field("none", description="tier of master weights and moments: none (compute device), cpu, nvme")
    nvme_path: Paths = Field((), description="folder or list of folders for swap files; one per drive")
    ratio: Annotated[Number, Field(le=1)] = Field(
        1.0, description="fraction of the states in this tier, by bytes; those of the first units stay on the device"
    )


class LeafModule(Block):
    """Modules each of which is paged as one unit."""

    REFUSED: ClassVar[dict[str, str]] = {"name_suffixes": 'is not supported; give complete names in "names"'}

    classes: Names = Field((), description="class names of modules that are one unit each")
    names: Names = Field((), description="names of modules that are one unit each")


class ZeroOptimization(Block):
    """ZeRO: partitioning and tiers."""

    TUNING = split_names(
        """stage3_model_persistence_threshold model_persistence_threshold contiguous_gradients
        reduce_bucket_size reduce_scatter allgather_partitions allgather_bucket_size
        use_multi_rank_bucket_allreduce round_robin_gradients ignore_unused_parameters load_from_fp32_weights
        memory_efficient_linear override_module_apply stage3_module_granularity_threshold
        module_granularity_threshold stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params
        stage3_allgather_sequential allgather_sequential log_trace_cache_warnings enable_sanity_checks
        pipeline_loading_checkpoint elastic_checkpoint legacy_stage1 save_muon_momentum_buffer_in_memory
        mics_hierarchical_params_gather cpu_offload_use_pin_memory"""
    )
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "mics_hierarchical_params_gather": "a gather is one all-gather of the replica, whose path the backend chooses",
        "reduce_bucket_size": "gradients are reduced unit by unit, so that a bucket is as large as the largest unit",
        "reduce_scatter": "each rank gets its part of a sum, in every stage; replicas of mics_shard_size all-reduce",
        "contiguous_gradients": "the gradients of a unit that ranks reduce are always one piece of memory",
        "round_robin_gradients": "each rank has an equal part of every unit, so none has more to copy than another",
        "allgather_bucket_size": "weights are gathered unit by unit, where and when they are used",
        "allgather_partitions": "the weights of a unit are always gathered by an all-gather, never by broadcasts",
    }
    REFUSED: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("zeropp_loco_param", "zenflow"),
            CHANGES_TRAINING,
        ),
    }

    OLD_NAMES: ClassVar[dict[str, str]] = {
        name.removeprefix("stage3_"): name
        for name in split_names(
            """stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters
            stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save"""
        )
    } | {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"stage": 3}

    stage: Annotated[Integer, Field(ge=0, le=3)] = Field(
        0,
        description="0 to 3; on several ranks 0 and 1 reduce the gradients of a step's micro-batches once, 2 and 3 "
        "each, or once where the micro-batches take turns (schedule); all else is the same in all stages",
    )
    offload_param: OffloadParam = Field(OffloadParam(), description="see below")
    offload_optimizer: OffloadOptimizer = Field(OffloadOptimizer(), description="see below")
    leaf_module: LeafModule = Field(LeafModule(), description="see below")
    overlap_comm: bool | None = Field(
        None,
        description="whether the reduction of a unit goes on beside the backward of the next, on several ranks; takes "
        "a second set of buffers on the device; default: true in stage 3, false in the others",
    )
    mics_shard_size: Annotated[Integer, Field(ge=-1)] = Field(
        -1,
        description="ranks that hold one replica of weights, gradients and states, a divisor of their number; weights "
        "are gathered within a replica, and sums of gradients are added up over the replicas; -1 or 0: all ranks",
    )
    zero_hpz_partition_size: Count = Field(
        1,
        description="ranks of a node, a divisor of their number: each keeps its part of the node's copy of all weights "
        "on its device, so that a step gathers each weight over all ranks once, and within the node from then on; "
        "stage 3 alone; 1: no copy",
    )
    zero_quantized_weights: bool = Field(
        False,
        description="whether ranks gather weights that train as int8 codes, with a scale for each 128 of them, and "
        "compute with the values of the codes; see concepts/quantized-collectives.md",
    )
    zero_quantized_nontrainable_weights: bool = Field(False, description="the same for frozen weights")
    zero_quantized_gradients: bool = Field(
        False,
        description="whether ranks send gradients as such codes, whose values each rank adds up in fp32; not with "
        "communication_data_type",
    )
    sub_group_size: Count | None = Field(
        None, description="elements of a tile of the update at most; default: 16 MiB of all states"
    )
    stage3_prefetch_bucket_size: Elements | None = Field(
        None, description="elements prefetched at most, one unit at least; 0: none; default: as memory allows"
    )
    stage3_param_persistence_threshold: Elements = Field(
        0, description="units of at most so many elements stay on the compute device"
    )
    stage3_max_live_parameters: Count | None = Field(
        None, description="elements on the compute device at most, beside those whose tier is none; one unit at least"
    )
    stage3_max_reuse_distance: Elements | None = Field(
        None, description="a unit is evicted after its use if more elements than this are used before its next use"
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = Field(
        None,
        description="false: save_16bit_model writes nothing in stage 3, as in DeepSpeed; default: the model is written",
    )

    @property
    def sends_codes(self) -> bool:
        """True if ranks send codes of weights or gradients."""
        return self.zero_quantized_weights or self.zero_quantized_nontrainable_weights or self.zero_quantized_gradients


OLD_SWITCHES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
"""Older switches of "zero_optimization", each with the block that it puts on the CPU."""


class Aio(Block):
    """Settings of reads and writes of the swap files. `offload tune` measures the best values for a drive."""

    TUNING = ("single_submit", "overlap_events", "use_gds")
    OLD_NAMES: ClassVar[dict[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: Annotated[Size, Field(ge=4096)] | None = Field(
        None, description="bytes of one read or write; rounded down to a multiple of 4096"
    )
    queue_depth: Annotated[Count, Field(le=4096)] | None = Field(None, description="blocks in flight for each thread")
    intra_op_parallelism: Annotated[Count, Field(le=64)] | None = Field(
        None, description="threads that hand blocks to the kernel; older name: thread_count"
    )
