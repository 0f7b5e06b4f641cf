"""Code in the form of older transformers and peft, for `older` to load as a part of the package it stands for."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import transformers
from torch import nn

from tests.support import models


def older(package: str) -> Any:
    """Returns this module again, under a name below `package`: the library knows code by the module it is of."""
    name = f"{package}.older"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, __file__)
        assert spec is not None and spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


class OfTransformers50(transformers.LlamaForCausalLM):
    """A forward in the form of transformers 5.0."""

    def forward(self, input_ids: Any, labels: Any = None, logits_to_keep: int = 0, **more: Any) -> Any:  # type: ignore[override]
        hidden_states = self.model(input_ids=input_ids).last_hidden_state
        slice_indices = slice(-logits_to_keep, None)
        logits = self.lm_head(hidden_states[:, slice_indices, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **more)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class OfPeft018(nn.Module):
    """Adapters in the form of peft 0.18: the model inside is not called, its forward is."""

    peft_config = "of adapters"

    def __init__(self) -> None:
        super().__init__()
        self.base_model: Any = models.llama()

    def get_base_model(self) -> nn.Module:
        return self.base_model  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.forward(*args, **kwargs)
