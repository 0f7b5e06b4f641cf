"""What the constructors of DeepSpeed's optimizers share: groups of parameters, and options without a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.engine.optimizer import Optimizer, Rule
from offload.errors import ConfigError

_ADVICE = {
    "amsgrad": "it keeps a third moment; pass torch.optim.AdamW(amsgrad=True), which runs by torch's own code",
    "bias_correction": "the kernel corrects the bias of the moments",
    "eps_inside_sqrt": "the kernel adds eps to the root",
    "fp32_optimizer_states": 'moments are fp32; the key "moments" of the "offload" block stores them in fewer bits',
    "max_grad_norm": 'the engine clips: set "gradient_clipping" in the config',
}


class SharedGroups(Optimizer):
    """An optimizer for an engine, over the very dicts of groups that it receives, which torch's constructors keep too.

    accelerate makes such an optimizer from the groups of the user's, whose schedule still writes into them.
    """

    def __init__(self, params: Iterable[Any], numbers: Mapping[str, Any], rule: Rule) -> None:
        """Makes the optimizer.

        Args:
            params: parameters, or groups of them.
            numbers: numbers for groups that lack them.
            rule: the update rule.
        """
        given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        super().__init__(groups, numbers, rule)
        for group, mine in zip(groups, self.param_groups, strict=True):
            group.update(mine)
        self.param_groups[:] = groups


def refuse_options(kind: str, **asked: bool) -> None:
    """Raises `ConfigError` for the first option that is asked for.

    Args:
        kind: name of the optimizer.
        **asked: for each option, True if its value is not the one that the kernel computes with.
    """
    for name, wanted in asked.items():
        if wanted:
            raise ConfigError(f"{kind}: this value of {name} is not supported: {_ADVICE[name]}")
