"""`transformers.Trainer` and Accelerate on an engine.

    trainer = OffloadTrainer(model=model, args=args, train_dataset=dataset, offload_config="ds_config.json")
    accelerator = Accelerator(offload_config="ds_config.json")

Requires `pip install 'offload[hf]'`.
"""

from __future__ import annotations

try:
    from offload.hf.accelerator import Accelerator
    from offload.hf.trainer import OffloadMixin, OffloadTrainer
except ModuleNotFoundError as error:
    if error.name not in ("accelerate", "transformers"):
        raise
    raise ImportError(f"offload.hf needs {error.name}: pip install 'offload[hf]'", name=error.name) from error

__all__ = ["Accelerator", "OffloadMixin", "OffloadTrainer"]
