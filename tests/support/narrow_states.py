"""Runs whose moments or masters have fewer bytes than fp32: one of each rule with a kernel."""

from __future__ import annotations

from typing import Any

from tests.support import models

JOB = models.GPT2._replace(dtype="bf16", steps=4)
RULES = {
    "AdamW": JOB,
    "Adam": JOB._replace(optimizer="Adam", params=(("adam_w_mode", False),)),
    "Lion": JOB._replace(optimizer="Lion", lr=1e-4),
    "Lamb": JOB._replace(optimizer="Lamb", lr=1e-2),
    "Adagrad": JOB._replace(optimizer="Adagrad", lr=1e-2),
    "momentum": JOB._replace(optimizer="SGD", lr=0.05, params=(("momentum", 0.9),)),
}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"moments": "bf16"},
    "int8": {"moments": "int8"},
    "bf24": {"master": "bf24"},
    "bf24, int8": {"master": "bf24", "moments": "int8"},
}
"""Options of the block "offload"."""
