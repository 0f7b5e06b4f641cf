"""Small mixtures of experts of transformers, whose experts are stacked, and the experts that a forward visits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from tests.support import models

DECODER = {**models.DECODER, "use_cache": False, "experts_implementation": "eager"}
"""A loop over the experts, whose bits are those of experts that are units."""


def mixtral(experts: int = 8) -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=experts))


def qwen(experts: int = 8, layers: int = 2, per_token: int = 2) -> nn.Module:
    stacks = {"moe_intermediate_size": 48, "num_experts": experts, "num_experts_per_tok": per_token}
    sizes = DECODER | {"num_hidden_layers": layers}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **stacks, head_dim=8))


def gpt_oss(experts: int = 8) -> nn.Module:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **DECODER, head_dim=8, sliding_window=8, num_local_experts=experts, num_experts_per_tok=2
        )
    )


FAMILIES: dict[str, Callable[[], nn.Module]] = {"mixtral": mixtral, "qwen": qwen, "gpt_oss": gpt_oss}


def grouped(make: Callable[[], Any]) -> nn.Module:
    """Returns a model that makes grouped products, as models of transformers do by default."""
    model = make()
    model.set_experts_implementation("grouped_mm")
    return model


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of stacked experts by name."""
    return {name: module for name, module in model.named_modules() if name.endswith("mlp.experts")}


@contextmanager
def visits(model: nn.Module) -> Iterator[set[str]]:
    """Yields the names of experts, such as "model.layers.0.mlp.experts[3]", that the forwards in the context visit."""
    names: set[str] = set()

    def record(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            chosen = next(tensor for tensor in (*args, *kwargs.values()) if tensor.dtype is torch.int64)
            names.update(f"{name}[{expert}]" for expert in chosen.unique().tolist())

        return before

    hooks = [
        module.register_forward_pre_hook(record(name), with_kwargs=True) for name, module in stacks_of(model).items()
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def few_tokens(model: Any, step: int, micro: int) -> torch.Tensor:
    """The loss of four tokens, which visit some experts of sixteen."""
    ids = torch.randint(128, (1, 4), generator=torch.Generator().manual_seed(100 * step + micro))
    return model(input_ids=ids, labels=ids).loss
