"""Contradictions between blocks of a config, each of which is right by itself."""

from __future__ import annotations

from collections.abc import Iterator

from offload.config.schema import Config
from offload.errors import ConfigError


def find_contradictions(config: Config) -> Iterator[ConfigError]:
    """Yields an error for each contradiction between blocks that are right: a wrong key may be what makes one."""
    yield from _of_precision(config)
    yield from _of_ranks(config)
    yield from _of_tiers(config)


def _of_precision(config: Config) -> Iterator[ConfigError]:
    """Yields an error for each two keys that ask for different dtypes of weights, moments or computation."""
    if config.fp16.enabled and config.bf16.enabled:
        yield ConfigError("fp16 and bf16 are both enabled; leave one of them on")
    if config.torch_autocast.enabled and config.dtype != "fp32":
        yield ConfigError(
            f"torch_autocast and {config.dtype} are both enabled: autocast is for fp32 weights; leave one of them on"
        )
    if config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16":
        yield ConfigError(
            "torch_autocast.dtype is fp16, whose gradients need a loss scale that only the fp16 block has; set it to "
            "bf16, or enable fp16 in place of torch_autocast"
        )
    if config.bf16.enabled and config.bf16.bf16_optimizer_states and config.moments != "bf16":
        yield ConfigError(
            'bf16.bf16_optimizer_states asks for moments in bf16, and "moments" in the block "offload" for '
            f"{config.moments}; leave one of them out"
        )
    if config.moments != "fp32" and config.optimizer is not None and config.optimizer.params.fp32_optimizer_states:
        yield ConfigError(
            f"optimizer.params.fp32_optimizer_states asks for moments in fp32, and another key for {config.moments}; "
            "leave one of them out"
        )
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != config.dtype:
        mode = "switch bf16 and fp16 off" if wanted == "fp32" else f'set "{wanted}": {{"enabled": true}}'
        yield ConfigError(
            f"data_types.param_dtype is {wanted}, but the weights are {config.dtype}; {mode}, or leave it out"
        )


def _of_ranks(config: Config) -> Iterator[ConfigError]:
    """Yields an error for each two keys that have ranks divide weights, or send gradients, in different ways."""
    zero = config.zero_optimization
    # Codes have a format of their own, so no dtype can be asked of them beside.
    if zero.zero_quantized_gradients and config.communication_data_type is not None:
        yield ConfigError(
            "zero_optimization.zero_quantized_gradients has ranks send gradients as int8 codes, and "
            f"communication_data_type in {config.communication_data_type}; leave one of them out"
        )
    if zero.zero_hpz_partition_size > 1 and zero.stage < 3:
        yield ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {zero.zero_hpz_partition_size} in stage {zero.stage}, and "
            'ranks divide weights in stage 3: set "stage" to 3, or leave it out'
        )
    elif zero.zero_hpz_partition_size > 1 and zero.mics_shard_size > 0:
        yield ConfigError(
            "zero_optimization.zero_hpz_partition_size keeps a copy of the weights in each node, and mics_shard_size "
            "the weights and states themselves; leave one of them out"
        )


def _of_tiers(config: Config) -> Iterator[ConfigError]:
    """Yields an error for each block that places states on drives where no folder is given."""
    for name, tier in (("offload_param", config.weight_tier), ("offload_optimizer", config.optimizer_tier)):
        if tier == "nvme" and not config.drives:
            yield ConfigError(
                f'zero_optimization.{name}.device is nvme, but no "nvme_path" is given; set it beside the device, or '
                'once in the "offload" block'
            )
