"""`deepspeed.runtime.activation_checkpointing`: its module `checkpointing`."""

from offload.deepspeed import checkpointing

__all__ = ["checkpointing"]
