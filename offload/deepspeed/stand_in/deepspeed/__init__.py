"""Becomes `offload.deepspeed`, in a process whose path leads here and in which nobody has called `install`."""

import sys
from importlib import import_module

from offload.deepspeed import import_hook

# Modules below `deepspeed` are found by the finder. The import system returns what stands under this name behind it.
import_hook.put_in_front()
sys.modules[__name__] = import_module("offload.deepspeed")
