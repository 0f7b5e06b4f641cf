"""Models whose frozen weights went through a block format in advance: the reference for runs that store them so."""

from __future__ import annotations

import functools
from collections.abc import Callable

import peft
import torch
import transformers
from torch import nn

from offload.kernels.blocks import BLOCK_FORMATS, dequantize, quantize
from offload.layout.frozen import stored_as_blocks
from tests.support.model_folders import llama_config
from tests.support.oracle import DTYPES, Job


def deep(blocks: int = 24) -> nn.Module:
    """A model of many blocks with adapters."""
    config = llama_config(num_hidden_layers=blocks, hidden_size=128, intermediate_size=512)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)  # type: ignore[arg-type]


def through_blocks(values: torch.Tensor, form: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns `values` as a run in `dtype` has them that stores them in `form`."""
    made, flat = BLOCK_FORMATS[form], values.detach().contiguous().view(-1)
    blocks = torch.empty(made.stored_nbytes(len(flat)), dtype=torch.uint8)
    quantize(made, flat, blocks)
    values_made = torch.empty(len(flat), dtype=dtype)
    dequantize(made, blocks, values_made)
    return values_made.view(values.shape)


def _dequantized(model: Callable[[], nn.Module], form: str, dtype: torch.dtype) -> nn.Module:
    made = model()
    for name in stored_as_blocks(made, form, dtype):
        parameter = made.get_parameter(name)
        parameter.data = through_blocks(parameter, form, dtype).to(parameter.dtype)
    return made


def dequantized(job: Job, form: str) -> Job:
    """Returns the job over the model whose frozen matrices are what blocks make of them."""
    return job._replace(model=functools.partial(_dequantized, job.model, form, DTYPES[job.dtype]))
