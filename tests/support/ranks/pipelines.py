"""Models cut into stages, and their training by schedules of `torch.distributed.pipelining` on a grid of ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import offload
from tests.support import models
from tests.support.oracle import Job, Result, config
from tests.support.ranks.rank_pool import rank_and_size
from tests.support.ranks.tensor_parallel import Block, all_weights

VOCABULARY = 61


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


class Layers(nn.Module):
    """Some layers of a model, or all, one after the other, under the names that they have in the whole."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def whole(blocks: int = 6, width: int = 32) -> Layers:
    layers: dict[str, nn.Module] = {"embed": nn.Embedding(VOCABULARY, width)}
    layers |= {f"block{number}": Block(width) for number in range(blocks)}
    return Layers(layers | {"head": Head(width)})


def cut(model: nn.Module, stages: int, index: int) -> Layers:
    """Returns a stage of a model: equally many of its layers."""
    named = list(model.named_children())
    share = len(named) // stages
    return Layers(dict(named[index * share : (index + 1) * share]))


def batch(job: Job, step: int) -> torch.Tensor:
    """Returns all micro-batches of a step, one below the other."""
    return torch.cat([micro_batch(step, number) for number in range(job.accumulation)])


def micro_batch(step: int, micro: int) -> torch.Tensor:
    return models.tokens(step, micro, (4, 16), VOCABULARY)


def one_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """Returns the loss of a micro-batch, on a model that nothing divides."""
    ids = micro_batch(step, micro)
    return models.token_loss(model(ids), ids)


JOB = Job(whole, one_loss, steps=3, accumulation=4, clip=0.0, lr=3e-4)


class Plan(NamedTuple):
    """A grid of ranks, and the schedule on it."""

    schedule: str = "1F1B"
    pipeline: int = 2
    """Ranks of a pipeline."""
    stages: int = 2
    """Stages of the whole pipeline."""
    tensor: int = 1
    """Ranks that divide each layer."""

    def held(self, position: int) -> list[int]:
        """Returns the stages of the rank at a position."""
        if self.schedule == "ZBVZeroBubble":
            return [position, self.stages - 1 - position]
        return list(range(position, self.stages, self.pipeline))


@functools.cache
def mesh(plan: Plan) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    data = rank_and_size()[1] // plan.pipeline // plan.tensor
    return init_device_mesh("cpu", (plan.pipeline, data, plan.tensor), mesh_dim_names=("pp", "dp", "tp"))


def stages_of(job: Job, plan: Plan) -> offload.PipelineStages:
    """Returns this rank's stages of the job's model."""
    torch.manual_seed(job.seed)
    model, grid = job.model(), mesh(plan)
    held = {index: cut(model, plan.stages, index) for index in plan.held(grid.get_local_rank("pp"))}
    if plan.tensor > 1:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        divided = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        held = {index: parallelize_module(module, grid["tp"], divided) for index, module in held.items()}
    return offload.PipelineStages(held, plan.stages, grid["pp"].get_group())


def start(job: Job, plan: Plan, placement: tuple[str, str], folder: Path, **options: Any) -> offload.Engine:
    """Starts an engine over this rank's stages."""
    model = stages_of(job, plan)
    return offload.initialize(model=model, config=config(job, placement, folder, **options))[0]


def schedule_of(engine: offload.Engine, job: Job, plan: Plan, **options: Any) -> Any:
    """Returns torch's schedule over the engine's stages."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind, stages = get_schedule_class(plan.schedule), engine.pipeline_stages()
    stage = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(stage, job.accumulation, loss_fn=models.token_loss, **options)


def mine(job: Job, plan: Plan, step: int) -> torch.Tensor:
    """Returns the rows of a step that this rank's pipeline trains on."""
    data = mesh(plan)["dp"]
    parts = [part.chunk(data.size())[data.get_local_rank()] for part in batch(job, step).chunk(job.accumulation)]
    return torch.cat(parts)


def run(schedule: Any, ids: torch.Tensor, held: Sequence[int], last: int) -> list[float]:
    """Runs a schedule, and returns the loss of each micro-batch on the process of the last stage."""
    losses: list[torch.Tensor] = []
    schedule.step(*([ids] if 0 in held else []), target=ids if last in held else None, losses=losses)
    return [float(loss.detach()) for loss in losses]


def steps(engine: offload.Engine, job: Job, plan: Plan, first: int, last: int) -> Result:
    """Runs steps [first, last); losses are those of the last stage, weights those of this rank's stages."""
    schedule, held = schedule_of(engine, job, plan), engine.module.indices
    losses, norms = [], []
    for step in range(first, last):
        result = run(schedule, mine(job, plan, step), held, plan.stages - 1)
        engine.step()
        if plan.stages - 1 in held:
            loss = torch.zeros(())
            for stage_loss in result:
                loss = loss + torch.tensor(stage_loss) / job.accumulation
            losses.append(engine.mean(float(loss)))
        norms.append(engine.get_global_grad_norm() or 0.0)
    return Result(losses, norms, weights_of(engine))


def weights_of(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """Returns the weights of this rank's stages by their names in the whole model."""
    return {name.partition(".")[2]: value for name, value in all_weights(engine).items()}


def train(job: Job, plan: Plan, placement: tuple[str, str], folder: Path, **options: Any) -> Result:
    """Trains `job` to its end on this rank of a grid, and removes the run."""
    engine = start(job, plan, placement, folder, **options)
    try:
        return steps(engine, job, plan, 0, job.steps)
    finally:
        engine.destroy(remove=True)


def together(results: Sequence[Result]) -> Result:
    """Returns what the ranks of a grid have, as one training; ranks with the same stages must have the same weights."""
    weights: dict[str, torch.Tensor] = {}
    for result in results:
        for name, value in result.weights.items():
            assert torch.equal(weights.setdefault(name, value), value), f"{name} differs among ranks"
    assert len({tuple(result.norms) for result in results}) == 1, "the ranks of a grid have one norm"
    losses = {tuple(result.losses) for result in results if result.losses}
    assert len(losses) == 1, "pipelines beside each other have one mean"
    return Result(list(losses.pop()), results[0].norms, weights)
