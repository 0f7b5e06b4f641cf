"""DeepSpeed's schedules of learning rates, step for step.

A schedule sets the rates of the first step when it is made, and those of the next in each `step()`, which the engine
calls at the end of a step. With n steps taken, N steps of warm-up and T steps in all, the next step has

    WarmupLR         min + (max - min) * rise            rise = log(n) / log(N), or (n - 1) / N; 0 at n = 0, at most 1
    WarmupDecayLR    the same up to n = N, then min + (max - min) * (T - n + 1) / (T - N), and no less than min
    WarmupCosineLR   lr * (min + (1 - min) * rise) up to n = N, then lr * (end + (1 - end) * fall)
                                                         fall = (1 + cos(pi * (n - N) / (T - N))) / 2, then 0
    OneCycle         min + (max - min) * height          height: 0 at n = 0, up to 1, and back to 0 at the end
                     then min / (1 + rate * more)        more: intervals since
    LRRangeTest      min * (1 + rate * n / size)         n / size rounded down with a staircase

The first three count one behind, so that their first two steps are both at the start. DeepSpeed counts so, and the
learning rates of a run are the same there and here. Where DeepSpeed does otherwise than it says, this does as it says:

    the first step of WarmupCosineLR is at warmup_min_ratio             there at 0
    the first step of OneCycle has the momentum of both ends            there that of the middle
    OneCycle moves betas[0] and leaves betas[1]                         there it becomes 0.99
    warmup_max_lr "auto" is each group's own learning rate              there all have that of the first
    a list of one value for each group works for OneCycle too           there it fails

The state is how many steps were taken (`last_batch_iteration`, one less) and the groups' own learning rates. What the
params say now counts after a resume, so that a longer run can be asked for.

Scripts that make them as of `deepspeed.runtime.lr_schedules` import them from here:

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
"""By the type that a config names."""
