"""`deepspeed.runtime.activation_checkpointing.checkpointing`, which `deepspeed.checkpointing` is."""

from offload.deepspeed.checkpointing import *  # noqa: F403
from offload.deepspeed.checkpointing import __all__ as __all__
