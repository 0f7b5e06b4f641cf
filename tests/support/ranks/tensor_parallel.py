"""Models that torch's tensor parallelism divides, and their training on a grid of ranks: rows by columns."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offload
from tests.support import models
from tests.support.oracle import Job, Result, config
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_pool import rank_and_size

KEYS = ("autotp", "experts")
"""Divisions for which the config of an engine asks."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An MLP on tokens: every kind of parameter that a plan divides or copies."""

    def __init__(self, width: int = 32, vocabulary: int = 61) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


SIZES = models.DECODER | {"intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 32}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def qwen3(tied: bool = False) -> nn.Module:
    """A model of transformers with a norm over each head, whose gradient is a sum over the ranks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=tied))


def mixture(experts: int = 4, chosen: int = 2) -> nn.Module:
    """A model of transformers with stacked experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    stacks = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **stacks, head_dim=8))


def plan(name: str) -> dict[str, Any]:
    """Returns a plan for `parallelize_module`.

    "weights" divides the weights of blocks, and all else is whole, as ordinary parameters. "sequence" divides all
    weights, the vocabulary unevenly, and the sequence around blocks, so that norms have a part of their gradients.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if name == "weights":
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


@functools.cache
def mesh(size: int) -> Any:
    """Returns the mesh of all ranks, with `size` of them in a row."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (rank_and_size()[1] // size, size), mesh_dim_names=("dp", "tp"))


def divided(model: nn.Module, name: str, size: int) -> nn.Module:
    """Returns `model`, divided by the plan `name` over `size` ranks, or by transformers, or leaves that to a key."""
    if name in KEYS:
        return model
    if name == "transformers":
        from transformers.distributed import DistributedConfig

        # Transformers saves on rank 0 alone, and reads on each.
        with tempfile.TemporaryDirectory() as own:
            folders = [own]
            if rank_and_size()[0] == 0:
                model.save_pretrained(own)  # type: ignore[operator]
            dist.broadcast_object_list(folders)
            model_part = type(model).from_pretrained(folders[0], distributed_config=DistributedConfig(tp_size=size))
            dist.barrier()
            return model_part
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(model, mesh(size)["tp"], plan(name))


def row_loss(model: nn.Module, step: int, micro: int, size: int) -> torch.Tensor:
    """Returns the loss of the rows of the batch that the ranks of one row of the grid share."""
    rank, ranks = rank_and_size()
    ids = models.tokens(step, micro, (4, 16), 61).chunk(ranks // size)[rank // size]
    output = model(ids)
    return models.token_loss(output if isinstance(output, torch.Tensor) else output.logits, ids)


def one_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """Returns the loss of the whole batch, on a model that nothing divides."""
    return row_loss(model, step, micro, rank_and_size()[1])


def whole(value: torch.Tensor) -> torch.Tensor:
    """Returns all of a DTensor, or another tensor as it is. Collective."""
    full = getattr(value, "full_tensor", None)
    return value.clone() if full is None else full()


def start(
    job: Job,
    name: str,
    size: int,
    placement: tuple[str, str],
    folder: Path,
    checkpointing: Mapping[str, Any] = {},
    **options: Any,
) -> offload.Engine:
    """Starts an engine over the job's model, divided by the plan `name`; `options` are of the block "offload"."""
    torch.manual_seed(job.seed)
    model = divided(job.model(), name, size)
    content = {**config(job, placement, folder, **options), "activation_checkpointing": dict(checkpointing)}
    if name in KEYS:
        content["tensor_parallel"] = {"autotp_size": size}
    if name == "experts":
        content["expert_parallel"] = {"enabled": True, "autoep_size": size}
    return offload.initialize(model=model, model_parameters=model.parameters(), config=content)[0]


def steps(engine: offload.Engine, job: Job, size: int, first: int, last: int) -> Result:
    """Runs steps [first, last); losses are the mean over the rows, weights are whole."""
    return rank_pool.steps(engine, job._replace(loss=functools.partial(row_loss, size=size)), first, last, all_weights)


def all_weights(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """Returns the whole of each divided weight."""
    return {name: whole(value) for name, value in engine.module.state_dict().items()}


def train(job: Job, name: str, size: int, placement: tuple[str, str], folder: Path, **options: Any) -> Result:
    """Trains `job` to its end on this rank of a grid, and removes the run."""
    engine = start(job, name, size, placement, folder, **options)
    try:
        return steps(engine, job, size, 0, job.steps)
    finally:
        engine.destroy(remove=True)
