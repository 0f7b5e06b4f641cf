"""DeepSpeed's learning-rate schedules, step for step.

A schedule sets the rates of the first step when it is constructed, and those of the next step in each `step()`, which
the engine calls at the end of a step. With n steps taken, N steps of warm-up and T steps in all, the next step uses

    WarmupLR         min + (max - min) * rise            rise = log(n) / log(N), or (n - 1) / N; 0 at n = 0, at most 1
    WarmupDecayLR    the same up to n = N, then min + (max - min) * (T - n + 1) / (T - N), and no less than min
    WarmupCosineLR   lr * (min + (1 - min) * rise) up to n = N, then lr * (end + (1 - end) * fall)
                                                         fall = (1 + cos(pi * (n - N) / (T - N))) / 2, then 0
    OneCycle         min + (max - min) * height          height: 0 at n = 0, up to 1, and back to 0 at the end
                     then min / (1 + rate * more)        more: decay intervals since the end of the cycle
    LRRangeTest      min * (1 + rate * n / size)         n / size rounded down with a staircase

N is at least 2. The first three count one behind, so that their first two steps both use the start value. DeepSpeed
counts the same way, so a run has the same learning rates under both. If DeepSpeed's behaviour differs from its
documentation, these classes follow the documentation:

    the first step of WarmupCosineLR is at warmup_min_ratio             DeepSpeed: at 0
    the first step of OneCycle has the momentum of both ends            DeepSpeed: that of the middle
    OneCycle changes betas[0] and leaves betas[1]                       DeepSpeed: betas[1] becomes 0.99

The state consists of `last_batch_iteration`, which is the number of steps taken less one, and of the groups' own
learning rates. The params are not part of it: after a resume those of the script apply, so that a run can be extended.

Scripts that import the classes from `deepspeed.runtime.lr_schedules` can import them from here:

    schedule = offload.schedules.WarmupLR(optimizer, warmup_num_steps=100)
    engine, *_ = offload.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
"""

from __future__ import annotations

from collections.abc import Callable

from offload.schedules.base import Schedule
from offload.schedules.cycles import LRRangeTest, OneCycle
from offload.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

MADE_BY: dict[str, Callable[..., Schedule]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
}
"""Class of each type that a config can name."""
