"""All update rules, one row each. docs/architecture.md lists the places of a new optimizer."""

from __future__ import annotations

import torch

from offload.engine.optimizer import Rule
from offload.layout.optimizer_states import kernel_rule
from offload.optimizers.fused import FUSED
from offload.optimizers.lamb import LAMB_RULE
from offload.optimizers.matrices import MUON_RULE, SINKGD_RULE
from offload.optimizers.of_torch import by_itself
from offload.optimizers.one_bit import ONE_BIT_RULES

RULES: dict[str, Rule] = {rule.name: rule for rule in (*FUSED, LAMB_RULE, MUON_RULE, SINKGD_RULE, *ONE_BIT_RULES)}
"""Rules by name: those that need no optimizer of torch."""


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Returns the rule for a torch optimizer: a kernel's if one computes the same, else the optimizer's own code."""
    name = kernel_rule(type(optimizer), optimizer.param_groups)
    return RULES[name] if name in RULES else by_itself(optimizer)
