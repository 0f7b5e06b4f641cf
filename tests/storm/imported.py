"""What the server of the storms' processes does before it forks the first: each of them would do it again.

The models' code is imported when the first of each is made, and more of torch with its first forward. No backward is
made here: beside an accelerator it would start threads, which no fork has.
"""

from __future__ import annotations

import importlib
import logging
import warnings

import torch

from tests.storm import life, plan

LATER = (
    "numpy.ctypeslib",
    "offload.parallel.pipeline",
    "offload.planner.simulation.updater",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.tensor.parallel",
)
"""Modules that a life imports, and no model does."""


def _compute() -> None:
    """Computes a loss of each model."""
    torch.set_num_threads(1)  # a fork has no threads of a pool
    for model in plan.MODELS.values():
        for dtype in (torch.float32, torch.bfloat16):
            model.loss(model.make().to(dtype), 0, 0)


assert life  # it imports the engine
for _module in LATER:
    importlib.import_module(_module)
logging.disable(logging.CRITICAL)
with warnings.catch_warnings(action="ignore"):
    _compute()
logging.disable(logging.NOTSET)
