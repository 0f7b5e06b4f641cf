"""A model in numbers: layouts of its units, the work of each, and the bytes saved for the backward.

A preset or a folder's config is built and run once on fake tensors, which allocate no memory. A count of parameters
needs no model.
"""

from __future__ import annotations

from offload.planner.model_shape.experts import drawn
from offload.planner.model_shape.from_count import from_count
from offload.planner.model_shape.from_model import Adapters, config_of, from_adapted, from_name, from_training, model_of
from offload.planner.model_shape.shape import Block, Choice, Experts, Shape, Use

__all__ = [
    "Adapters",
    "Block",
    "Choice",
    "Experts",
    "Shape",
    "Use",
    "config_of",
    "drawn",
    "from_adapted",
    "from_count",
    "from_name",
    "from_training",
    "model_of",
]
