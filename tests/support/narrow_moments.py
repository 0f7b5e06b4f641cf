"""Runs whose moments have fewer bytes than fp32: one of each rule with a kernel."""

from __future__ import annotations

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
