"""DeepSpeed's names, so that a script of DeepSpeed trains by this library with another import, or unmodified.

    import offload.deepspeed as deepspeed

A name has DeepSpeed's signature and does what DeepSpeed documents, or its use is an error that says what to do instead.
`install()` lets `import deepspeed` mean this package in the process; `offload run train.py` does so for a script.

Like `import offload`, the import of this package is light: the module of a name is imported when the name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import offload
from offload.deepspeed.import_hook import VERSION, install

__version__ = version = VERSION
"""The version of DeepSpeed whose names these are, which scripts compare."""
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))
__git_branch__ = git_branch = "offload"
__git_hash__ = git_hash = offload.__version__
HAS_TRITON = False
dist = None

# Strings instead of imports, as in `offload`: a launcher and `find_spec` import this package without its torch.
_MODULE_OF = {
    "DeepSpeedConfig": "runtime.config",
    "DeepSpeedConfigError": "runtime.config",
    "DeepSpeedDataLoader": "runtime.dataloader",
    "DeepSpeedEngine": "runtime.engine",
    "DeepSpeedHybridEngine": "refused",
    "DeepSpeedInferenceConfig": "refused",
    "DeepSpeedOptimizer": "runtime.engine",
    "DeepSpeedTransformerConfig": "refused",
    "DeepSpeedTransformerLayer": "refused",
    "InferenceEngine": "inference",
    "OnDevice": "utils.init_on_device",
    "PipelineEngine": "pipe.engine",
    "PipelineModule": "pipe.module",
    "add_config_arguments": "initialization",
    "default_inference_config": "refused",
    "get_accelerator": "accelerator",
    "init_distributed": "comm",
    "init_inference": "inference",
    "initialize": "initialization",
    "log_dist": "utils.logging",
    "logger": "utils.logging",
    "replace_transformer_layer": "refused",
    "set_autotp_mode": "refused",
    "tp_model_init": "refused",
}
"""Module of each name, inside of this package."""

_PARTS = (
    "accelerator",
    "checkpoint",
    "checkpointing",
    "comm",
    "launcher",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
)
"""Submodules that are attributes of the package after its import alone, as DeepSpeed's are."""

__all__ = ["__version__", "install", *sorted(_MODULE_OF), *_PARTS]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Returns the object of a name, and stores it in this module.

        Args:
            name: a key of `_MODULE_OF`, or one of `_PARTS`.

        Raises:
            AttributeError: if there is no such name.
        """
        if name in _PARTS:
            return import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}; its page is reference/deepspeed-names"
            )
        # Kept in the module: Python asks `__getattr__` only for what it does not find there.
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Returns all names, imported or not."""
        return sorted({*globals(), *__all__})
