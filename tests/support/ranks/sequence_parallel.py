"""Jobs on ranks that share each sequence: the whole batch goes to every rank of a group."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from tests.support import models
from tests.support.oracle import Job, Result
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_pool import rank_and_size

IGNORED = -100


SIZES = models.DECODER | {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}


def llama(heads_of_keys: int = 2, attention: str = "sdpa", checkpointed: bool = False, *, heads: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": heads_of_keys}
    model = LlamaForCausalLM(LlamaConfig(**SIZES | shape, attn_implementation=attention))
    if checkpointed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a new name is coming; users have the old one
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def sliding(attention: str) -> nn.Module:
    """Returns a Mistral each of whose tokens sees ten."""
    from transformers import MistralConfig, MistralForCausalLM

    shape = SIZES | {"num_key_value_heads": 4, "sliding_window": 10}
    return MistralForCausalLM(MistralConfig(**shape, attn_implementation=attention))


def chunked() -> nn.Module:
    model = llama()
    offload.losses.chunk_loss_of(model, chunk_tokens=16)
    return model


def batch(step: int, micro: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """Returns a padded batch in which most tokens that count are in the last part of a row."""
    ids = models.tokens(step, micro, (rows, 32))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :14] = IGNORED
    labels[0, 29:], mask[0, 29:] = IGNORED, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def padded_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    return model(**batch(step, micro)).loss


def grouped_loss(model: nn.Module, step: int, micro: int, size: int) -> torch.Tensor:
    """Returns the loss of the rows of this rank's group of `size` ranks; the mean over the groups is that of all."""
    rank, ranks = rank_and_size()
    ids = models.tokens(step, micro, (4, 16)).chunk(max(1, ranks // size))[rank // size]
    return model(input_ids=ids, labels=ids).loss


JOBS = {
    "gpt2": models.GPT2._replace(accumulation=2, steps=3, lr=3e-4),
    "llama": Job(llama, padded_loss, steps=3, lr=3e-4),
    "three heads of keys": Job(functools.partial(llama, 3, heads=6), padded_loss, steps=2, lr=3e-4),
    "one head of keys": Job(functools.partial(llama, 1), padded_loss, steps=2, lr=3e-4),
    "eager": Job(functools.partial(llama, 2, "eager"), padded_loss, steps=2, lr=3e-4),
    "checkpointed": Job(functools.partial(llama, 2, "sdpa", True), models.language_loss, steps=2, lr=3e-4),
    "sliding window": Job(functools.partial(sliding, "sdpa"), models.language_loss, steps=2, lr=3e-4),
    "loss in chunks": Job(chunked, padded_loss, steps=2, lr=3e-4),
    "adapters": Job(models.lora, padded_loss, steps=2, lr=3e-4),
    "mixtral": Job(models.mixtral, padded_loss, steps=2, lr=3e-4),
    "sum of two": Job(llama, padded_loss, steps=2, lr=3e-4, accumulation=2, stage=1),
    "bf16": Job(llama, padded_loss, steps=3, lr=3e-4, dtype="bf16"),
}


def start(job: Job, size: int, placement: tuple[str, str], folder: Path, **options: Any) -> offload.Engine:
    """Starts an engine on this rank, `size` of which share each sequence."""
    return rank_pool.start(job._replace(sequence=size), placement, folder, **options)


def train(job: Job, size: int, placement: tuple[str, str], folder: Path, **options: Any) -> Result:
    """Trains `job` to its end on this rank, and removes the run."""
    return rank_pool.train(job._replace(sequence=size), placement, folder, **options)
