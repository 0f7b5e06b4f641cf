"""Blocks of DeepSpeed of which no key has an effect: a key is ignored, or refused if it is switched on."""

from __future__ import annotations

from typing import ClassVar

from offload.config.blocks.block import Block, missing, split_names

_RECOMPUTE = "call model.gradient_checkpointing_enable(), or torch.utils.checkpoint in the model, and switch it off"


class ActivationCheckpointing(Block):
    """DeepSpeed's own checkpointing of activations: nothing of it may be switched on."""

    UNSUPPORTED = ("number_checkpoints",)
    REFUSED: ClassVar[dict[str, str]] = {
        "partition_activations": missing("splits kept activations over ranks", _RECOMPUTE),
        "cpu_checkpointing": missing("keeps activations in host memory", _RECOMPUTE),
        "contiguous_memory_optimization": missing("copies kept activations into one buffer", _RECOMPUTE),
        "synchronize_checkpoint_boundary": missing("waits for the device at each checkpoint", _RECOMPUTE),
        "profile": missing("measures each checkpoint", 'the timeline has them: "offload": {"trace": FILE}'),
    }


class Checkpoint(Block):
    """How DeepSpeed writes checkpoints: none of it has an effect on the ones of this library."""

    UNSUPPORTED = split_names("tag_validation use_node_local_storage parallel_write checkpoint_serialization writer")
    REFUSED: ClassVar[dict[str, str]] = {
        "load_universal": missing(
            "reads a universal checkpoint of DeepSpeed", "read its weights by offload.load_pretrained, and remove it"
        )
    }
