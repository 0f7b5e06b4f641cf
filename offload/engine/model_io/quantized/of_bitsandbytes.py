"""Folders that bitsandbytes has quantized: layers of its classes are built, whose codes `initialize` reads later.

In such a folder a weight of 4 bits is several tensors: its codes under the weight's name, and below that name scales,
the code book, the same of scales that are quantized themselves, and a JSON text in bytes. One of 8 bits is its codes,
and the scales of its rows beside them. Codes and scales are paged tensors, whose bytes stay in the files until then:
code that asks for them before, as DoRA's does, reads them. What is small is read now.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from offload.engine.model_io.safetensors_folder import Stored
from offload.engine.params.opaque.paged_tensor import PagedTensor, paged, paged_kind
from offload.errors import ConfigError, StoreError

_METHOD = "bitsandbytes"
_STATE = ".quant_state.bitsandbytes__"
"""Part of the name of the tensor that contains the JSON text of a weight of 4 bits."""


class FileBytes:
    """A tensor in a file, as the source of paged tensors; implements `Source`."""

    def __init__(self, stored: Stored) -> None:
        self.name, self.device, self.stored = stored.name, torch.device("cpu"), stored

    def tensor(self, kind: type[PagedTensor] = PagedTensor) -> PagedTensor:
        """Returns a paged tensor of a class with all elements."""
        return paged(kind, self, torch.empty(self.stored.shape, dtype=self.stored.dtype, device="meta"))

    def read(self, geometry: torch.Tensor) -> torch.Tensor:
        """Reads the file, and returns the elements of `geometry`."""
        values = self.stored.whole().view(geometry.dtype)
        return values.as_strided(geometry.size(), geometry.stride(), geometry.storage_offset())


def build_layers(model: Any, folder: Path, stored: Mapping[str, Stored], built: bool) -> set[str]:
    """Puts layers of bitsandbytes into a model whose folder bitsandbytes has quantized.

    Args:
        model: a model of transformers, by its config quantized or not.
        folder: the folder, for messages.
        stored: the tensors of the folder.
        built: True if `load_pretrained` has built the model, so that its layers may be replaced.

    Returns:
        The names of all tensors of quantized weights, which need no further treatment.

    Raises:
        ConfigError: if the model is quantized in another way, or a module was given.
        StoreError: if the folder lacks a part of a weight.
    """
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings is None:
        return set()
    if not built or _method(settings) != _METHOD:
        raise ConfigError(
            f"{folder} holds quantized weights, of which load_pretrained reads those of bitsandbytes, for a model that "
            "it builds; load it by from_pretrained of transformers outside of offload.init, freeze it and give the "
            "model to offload.initialize, or give a folder in bf16, fp16 or fp32"
        )
    _replace(model, settings, folder)
    taken: set[str] = set()
    for name, module in list(model.named_modules()):
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "Linear4bit" in kinds:
            taken |= _four_bits(f"{name}.weight", module, stored, folder)
        elif "Linear8bitLt" in kinds:
            taken |= _eight_bits(name, module, stored, folder)
    return taken


def _method(settings: Any) -> str:
    """Returns the method of quantization that a config names."""
    found = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(found, "value", found))


def _replace(model: Any, settings: Any, folder: Path) -> None:
    """Lets transformers replace linear layers by those of bitsandbytes, as its own `from_pretrained` does."""
    from transformers import quantizers

    theirs: Any = quantizers
    try:
        quantizer = theirs.AutoHfQuantizer.from_config(settings, pre_quantized=True)
        quantizer.validate_environment(device_map={"": "cpu"})
        quantizer.preprocess_model(model, device_map={"": "cpu"})
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    # The quantizer is transformers' own code, and says which package is missing.
    except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"transformers cannot build the quantized layers of {folder}: {error}") from error


def _four_bits(name: str, module: Any, stored: Mapping[str, Stored], folder: Path) -> set[str]:
    """Gives a Linear4bit its weight, and returns the names of its tensors."""
    from bitsandbytes import functional, nn

    parts = {key[len(name) + 1 :]: stored[key] for key in stored if key.startswith(f"{name}.")}
    if name not in stored or "absmax" not in parts or not any(_STATE in f".{key}" for key in parts):
        raise _lacks(name, folder)
    # The scales stay in the file, so the state is made with others.
    small = {key: part.whole() for key, part in parts.items() if key != "absmax"}
    state: Any = functional.QuantState.from_dict(
        {**small, "absmax": torch.empty(0, dtype=torch.float32, device="cpu")}, device=torch.device("cpu")
    )
    state.absmax = FileBytes(parts["absmax"]).tensor()
    weight: Any = FileBytes(stored[name]).tensor(paged_kind(cast(Any, nn).Params4bit))
    weight.quant_state, weight.module, weight.bnb_quantized = state, module, True
    weight.blocksize, weight.compress_statistics = state.blocksize, state.nested
    weight.quant_type, weight.quant_storage = state.quant_type, stored[name].dtype
    module.weight, module.quant_state = weight, state
    return {name, *(f"{name}.{key}" for key in parts)}


def _eight_bits(name: str, module: Any, stored: Mapping[str, Stored], folder: Path) -> set[str]:
    """Gives a Linear8bitLt its weight, and returns the names of its tensors."""
    from bitsandbytes import nn

    codes, scales = stored.get(f"{name}.weight"), stored.get(f"{name}.SCB")
    if codes is None or scales is None or codes.dtype is not torch.int8:
        raise _lacks(f"{name}.weight", folder)
    source = FileBytes(codes)
    weight: Any = source.tensor(paged_kind(cast(Any, nn).Int8Params))
    weight.CB, weight.SCB, weight.has_fp16_weights = source.tensor(), FileBytes(scales).tensor(), False
    module.weight = weight
    return {f"{name}.{key}" for key in ("weight", "SCB", "weight_format")}


def _lacks(name: str, folder: Path) -> StoreError:
    return StoreError(
        f"{folder} lacks codes or scales of {name}, though its config says that bitsandbytes has quantized it; save "
        "the quantized model again with save_pretrained"
    )
