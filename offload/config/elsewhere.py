"""Blocks of DeepSpeed of which no key has an effect: a key is ignored, or refused if it is switched on."""

from __future__ import annotations

from typing import ClassVar

from offload.config.blocks.block import Block, missing, split_names


class Checkpoint(Block):
    """How DeepSpeed writes checkpoints: none of it has an effect on the ones of this library."""

    UNSUPPORTED = split_names("tag_validation use_node_local_storage parallel_write checkpoint_serialization writer")
    REFUSED: ClassVar[dict[str, str]] = {
        "load_universal": missing(
            "reads a universal checkpoint of DeepSpeed", "read its weights by offload.load_pretrained, and remove it"
        )
    }
