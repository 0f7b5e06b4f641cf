"""`transformers.Trainer` and Accelerate on an engine.

    trainer = OffloadTrainer(model=model, args=args, train_dataset=dataset, offload_config="ds_config.json")
    accelerator = Accelerator(offload_config="ds_config.json")

Needs `pip install 'offload[hf]'`.
"""

from __future__ import annotations

from offload.hf.accelerator import Accelerator
from offload.hf.trainer import OffloadMixin, OffloadTrainer

__all__ = ["Accelerator", "OffloadMixin", "OffloadTrainer"]
