"""Blocks of DeepSpeed of which no key changes what this library does."""

from __future__ import annotations

from pydantic import Field

from offload.config.blocks.block import Block, split_names


class Checkpoint(Block):
    """How DeepSpeed writes and reads checkpoints: none of it has an effect on the ones of this library."""

    UNSUPPORTED = split_names("tag_validation use_node_local_storage parallel_write checkpoint_serialization writer")

    load_universal: bool = Field(
        False, description="universal checkpoints are recognized by their files, with this key and without it"
    )
