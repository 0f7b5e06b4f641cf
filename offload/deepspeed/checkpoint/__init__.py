"""`deepspeed.checkpoint`: names that offload.deepspeed.names lists, and the program `ds_to_universal`."""

from offload.deepspeed.names import attributes_of, public_names

__all__ = public_names("checkpoint")

__getattr__ = attributes_of("checkpoint")
