"""DeepSpeed's schedules of learning rates, for scripts that make them, as in `deepspeed.runtime.lr_schedules`.

schedule = offload.schedules.WarmupLR(optimizer, warmup_num_steps=100)
engine, *_ = offload.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
"""

from __future__ import annotations

from offload.schedules.deepspeed import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
