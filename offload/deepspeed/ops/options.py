"""What the constructors of DeepSpeed's optimizers share: groups of parameters, and options without a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.errors import ConfigError

_ADVICE = {
    "amsgrad": "it keeps a third moment; pass torch.optim.AdamW(amsgrad=True), which runs by torch's own code",
    "bias_correction": "the kernel corrects the bias of the moments",
    "eps_inside_sqrt": "the kernel adds eps to the root",
    "fp32_optimizer_states": 'moments are fp32; the key "moments" of the "offload" block stores them in fewer bits',
    "max_grad_norm": 'the engine clips: set "gradient_clipping" in the config',
}


def groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns parameters or groups, as torch's optimizers take them, as groups.

    Args:
        params: parameters, or dicts with "params".
    """
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    if given and isinstance(given[0], Mapping):
        return [dict(group) for group in given]
    return [{"params": given}]


def refuse_options(kind: str, **asked: bool) -> None:
    """Raises `ConfigError` for the first option that is asked for.

    Args:
        kind: name of the optimizer.
        **asked: for each option, True if its value is not the one that the kernel computes with.
    """
    for name, wanted in asked.items():
        if wanted:
            raise ConfigError(f"{kind}: this value of {name} is not supported: {_ADVICE[name]}")
