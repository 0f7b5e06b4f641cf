"""A model that torch divides into stages trains as a whole one, by any schedule and beside ZeRO, and resumes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import testing
from offload.errors import ConfigError, OffloadError, StoreError, UsageError
from offload.parallel.pipeline import split
from tests.support import rounding_bounds
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, config, room_for
from tests.support.oracle import run as train_alone
from tests.support.ranks import pipelines
from tests.support.ranks.pipelines import Plan
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size, shared_pool

DISK, HOST, MEMORY = ("nvme", "nvme"), ("cpu", "cpu"), ("none", "none")
JOB = pipelines.JOB._replace(steps=2)
THREE_STEPS = pipelines.JOB
CLIPPED = JOB._replace(clip=0.05)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., Result]]:
    """One process that trains the whole model, with as many threads as a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda job, **options: train_alone(job, DISK, tmp_path / "one", **options)
    torch.set_num_threads(threads)


def in_memory_and_on_disk(job: Job, plan: Plan, folder: Path) -> Result:
    """Both have the same bits. On disk the device has room for two units, so that units come and go.

    Beside ZeRO the room has the buffers of reductions too.
    """
    room = room_for(job, 2 if plan.pipeline == rank_and_size()[1] else 6 if job.stage == 3 else 24)
    first = pipelines.train(job, plan, MEMORY, folder / "memory")
    assert_same(first, pipelines.train(job, plan, DISK, folder / "disk", device_memory=room))
    return first


def same_bits(result: Result, alone: Result) -> None:
    """Equal losses and weights; the norm is added up stage by stage, in float64."""
    assert result.losses == alone.losses
    assert_same_tensors(result.weights, alone.weights)
    assert result.norms == pytest.approx(alone.norms, rel=1e-12)


@pytest.mark.works("Several ranks", "a pipeline of torch (`torch.distributed.pipelining`): GPipe, 1F1B", "right")
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", [pytest.param("GPipe", marks=pytest.mark.slow), "1F1B"])
def test_two_stages_train_as_one_process_bit_for_bit(
    schedule: str, dtype: str, ranks: RankPool, alone: Callable[..., Result], tmp_path: Path
) -> None:
    job = JOB._replace(dtype=dtype)
    results = ranks.run(in_memory_and_on_disk, job, Plan(schedule), tmp_path / "two")
    same_bits(pipelines.together(results), alone(job))


@pytest.mark.works("Several ranks", "the clip over all stages of a pipeline, in fp16 too", "right")
@pytest.mark.numeric
def test_the_clip_is_that_of_the_whole_model(ranks: RankPool, alone: Callable[..., Result], tmp_path: Path) -> None:
    job = CLIPPED._replace(dtype="fp16", accumulation=3)
    result = pipelines.together(ranks.run(pipelines.train, job, Plan(), DISK, tmp_path / "two"))
    rounding_bounds.same_training(result, alone(job), job, reordered=True)


def overflow_on_the_first_stage(folder: Path) -> list[int]:
    """A gradient that is inf on one stage alone, in the second of three steps."""
    job = JOB._replace(accumulation=2)
    engine = pipelines.start(job, Plan(), DISK, folder, on_nonfinite="skip")
    schedule, held, broken = pipelines.schedule_of(engine, job, Plan()), engine.module.indices, []
    if 0 in held:
        engine.module[0].block0.up.bias.register_hook(lambda gradient: gradient * (torch.inf if broken else 1))
    skipped, before = [], pipelines.weights_of(engine)
    for step in range(3):
        broken[:] = [step] if step == 1 else []
        pipelines.run(schedule, pipelines.mine(job, Plan(), step), held, 1)
        engine.step()
        skipped.append(engine.skipped_steps)
        weights = pipelines.weights_of(engine)
        assert all(torch.equal(weights[name], before[name]) for name in weights) is (step == 1)
        before = weights
    engine.destroy(remove=True)
    return skipped


@pytest.mark.works("Several ranks", "a step skipped on all stages, if one of them overflows", "right")
def test_a_step_that_overflows_on_one_stage_is_skipped_on_all(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(overflow_on_the_first_stage, tmp_path) == [[0, 1, 1]] * 2


def _beside(job: Job, plan: Plan, size: int, words: str) -> Any:
    return pytest.param(job, plan, size, marks=pytest.mark.works("Several ranks", words, "right"), id=words)


@pytest.mark.numeric
@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan", "size"),
    [
        _beside(CLIPPED._replace(stage=1), Plan(), 4, "a pipeline beside ZeRO, on two by two ranks"),
        _beside(CLIPPED._replace(stage=3), Plan(), 4, "a pipeline beside ZeRO, on two by two ranks"),
        _beside(CLIPPED._replace(shard_size=1), Plan(), 4, "a pipeline beside replicas of shards (`mics_shard_size`)"),
        _beside(CLIPPED, Plan(tensor=2), 8, "a pipeline, tensor parallelism and ZeRO, on two by two by two ranks"),
    ],
)
def test_pipelines_beside_each_other_equal_one_process(
    job: Job, plan: Plan, size: int, alone: Callable[..., Result], tmp_path: Path
) -> None:
    with shared_pool(size) as grid:
        result = pipelines.together(grid.run(pipelines.train, job, plan, DISK, tmp_path / "grid"))
    rounding_bounds.same_training(result, alone(job._replace(shard_size=-1)), job, reordered=True)


AGAIN = {"activations": "nvme", "units": ["Block"]}
OTHERS: dict[str, tuple[Job, dict[str, Any]]] = {
    "blocks computed again": (JOB, AGAIN),
    "LAMB": (JOB._replace(optimizer="Lamb"), {}),
    "Muon": (JOB._replace(optimizer="Muon"), {}),
    "one micro-batch": (JOB._replace(accumulation=1), {}),
}


def train_with(job: Job, schedule: str, folder: Path, options: dict[str, Any]) -> Result:
    return pipelines.train(job, Plan(schedule), DISK, folder, **options)


@pytest.mark.slow
@pytest.mark.works("Several ranks", "a pipeline with LAMB, Muon, or blocks computed again from inputs on disk", "right")
@pytest.mark.parametrize("name", OTHERS)
def test_a_pipeline_keeps_the_bits_of_one_process_with_other_settings(
    name: str, ranks: RankPool, alone: Callable[..., Result], tmp_path: Path
) -> None:
    job, options = OTHERS[name]
    schedule = "GPipe" if job.accumulation == 1 else "1F1B"
    result = pipelines.together(ranks.run(train_with, job, schedule, tmp_path / "two", options))
    same_bits(result, alone(job, **options))


def die_in_the_third_step(folder: Path) -> None:
    """The process of the last stage is killed between two steps, the other one while it waits for that one."""
    engine = pipelines.start(THREE_STEPS, Plan(), DISK, folder)
    pipelines.steps(engine, THREE_STEPS, Plan(), 0, 2)
    try:
        if rank_and_size()[0] == 0:
            pipelines.steps(engine, THREE_STEPS, Plan(), 2, 3)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def resume_the_killed(folder: Path) -> None:
    """The bits of an unbroken run, whose folders a start without a pipeline leaves alone."""
    unbroken = pipelines.train(THREE_STEPS, Plan(), DISK, folder / "unbroken")
    assert (folder / f"default-pp{rank_and_size()[0]}of2" / "rank0").is_dir()
    with pytest.raises(StoreError, match="is a run with a pipeline of 2 and no tensor parallelism"):
        offload.initialize(model=THREE_STEPS.model(), config=config(THREE_STEPS, DISK, folder, resume="auto"))
    engine = pipelines.start(THREE_STEPS, Plan(), DISK, folder, resume="must")
    first = engine.global_steps
    assert first in (1, 2)
    rest = pipelines.steps(engine, THREE_STEPS, Plan(), first, THREE_STEPS.steps)
    engine.destroy(remove=True)
    assert rest.losses == unbroken.losses[first:]
    assert_same_tensors(rest.weights, unbroken.weights)


@pytest.mark.slow
@pytest.mark.works("Several ranks", "resume of a pipeline's run from its swap files", "right")
@pytest.mark.works("Several ranks", "resume of a pipeline whose processes were killed in a step", "right")
def test_a_killed_pipeline_resumes_with_the_bits_of_an_unbroken_one(tmp_path: Path) -> None:
    with pool(2) as two:
        two.run_to_the_death(die_in_the_third_step, tmp_path)
        two.run(resume_the_killed, tmp_path)


def draw_first_values(folder: Path) -> dict[str, torch.Tensor]:
    """The values of a layer that has none until the engine draws them."""
    with offload.init(config=config(JOB, DISK, folder)):
        stage = nn.Linear(8, 8)
    index = rank_and_size()[0]
    model = offload.PipelineStages({index: stage}, 2)
    engine = offload.initialize(model=model, config=config(JOB, DISK, folder))[0]
    values = {name.partition(".")[2]: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy(remove=True)
    return values


def test_equal_layers_of_two_stages_begin_with_other_values(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(draw_first_values, tmp_path)
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[name], second[name]) for name in first)


# -- what is refused -----------------------------------------------------------------------------------


def use_it_wrongly(folder: Path) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    job = JOB._replace(accumulation=2)
    engine = pipelines.start(job, Plan(), HOST, folder)
    ids, held = pipelines.mine(job, Plan(), 0), engine.module.indices
    with pytest.raises(UsageError, match="called by a schedule"):
        engine(ids)
    with pytest.raises(UsageError, match=r"over engine\.pipeline_stages"):
        engine.backward(torch.zeros((), requires_grad=True))
    with pytest.raises(UsageError, match="0 of 2 micro-batches are complete"):
        engine.step()
    other_schedule = pipelines.schedule_of(engine, job._replace(accumulation=4), Plan())
    with pytest.raises(UsageError, match=r"n_microbatches=4, and gradient_accumulation_steps is 2"):
        pipelines.run(other_schedule, ids, held, 1)
    pipelines.run(pipelines.schedule_of(engine, job, Plan(), scale_grads=False), ids, held, 1)
    with pytest.raises(UsageError, match="scale_grads=False"):
        engine.step()
    engine.zero_grad()
    index = held[0]
    foreign = PipelineStage(engine.module[index], index, 2, engine.device, group=engine.module.group)
    pipelines.run(Schedule1F1B(foreign, 2, loss_fn=engine_free_loss), ids, held, 1)
    with pytest.raises(UsageError, match="0 of 2 micro-batches are complete"):
        engine.step()
    engine.zero_grad()
    # Nothing is left of all that.
    pipelines.run(pipelines.schedule_of(engine, job, Plan()), ids, held, 1)
    engine.step()
    engine.destroy(remove=True)


def engine_free_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_each_wrong_use_is_an_error_and_the_engine_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(use_it_wrongly, tmp_path)


def twice_the_same(model: offload.PipelineStages) -> offload.PipelineStages:
    return offload.PipelineStages({0: model[model.indices[0]]}, 2, model.group)


def frozen(model: offload.PipelineStages) -> offload.PipelineStages:
    return model.requires_grad_(False)


def as_it_is(model: offload.PipelineStages) -> offload.PipelineStages:
    return model


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a stage twice": (twice_the_same, {}, "expected each of 0 to 1 once"),
    "nothing that trains": (frozen, {}, "none of whose parameters train: it has stage"),
    "autocast": (as_it_is, {"torch_autocast": {"enabled": True}}, "torch_autocast"),
    "layer_major": (as_it_is, {"offload": {"schedule": "layer_major"}}, "layer_major"),
}


def refuse(folder: Path) -> None:
    for name, (change, keys, words) in REFUSED.items():
        model = change(pipelines.stages_of(JOB, Plan()))
        content = config(JOB, DISK, folder)
        content = {**content, **keys, "offload": {**content["offload"], **keys.get("offload", {})}}
        kinds = [type(parameter) for parameter in model.parameters()]
        with pytest.raises(OffloadError, match=words):
            offload.initialize(model=model, config=content)
            pytest.fail(name)
        assert [type(parameter) for parameter in model.parameters()] == kinds and not folder.exists()


@pytest.mark.works(
    "Several ranks", "a pipeline with layer_major, torch_autocast or a stage that trains nothing", "refused"
)
def test_what_does_not_go_together_is_refused_before_anything_changes(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(refuse, tmp_path / "run")


@pytest.mark.parametrize(
    ("stages", "words"),
    [({}, "an empty dict"), ([], "got list"), ({2: nn.Linear(1, 1)}, "got stage 2 of 2 stages"), ({0: 1}, "got int")],
)
def test_stages_that_are_none_are_refused(stages: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        offload.PipelineStages(stages, 2)


class Shared(nn.Module):
    """Weights that are used twice, one below the other, and a weight beside the path."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.first(self.second(hidden) + hidden) * (self.scale * 2).exp()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def test_each_half_computes_its_own_gradients() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(4, 8, requires_grad=True)
    given = torch.randn(4, 8)
    model(x).backward(given)
    whole, of_inputs = gradients(model), x.grad
    model.zero_grad()
    output = model(x)
    halves = split([output], [x, "no tensor"], model.parameters())
    assert halves is not None
    gradients_of = halves.inputs([output], [given], [x, "no tensor"])
    assert torch.equal(gradients_of[0], of_inputs) and gradients_of[1] is None and gradients(model) == {}
    halves.weights()
    # The gradients of a weight of two uses are added up, in one order or the other.
    torch.testing.assert_close(gradients(model), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(gradients(model)["second.weight"], whole["second.weight"])


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, x: Doubled.apply(model(x)),
        lambda model, x: checkpoint(model, x, use_reentrant=True),
        lambda model, x: model(x.detach()),
    ],
    ids=["a function of Python", "a forward that is computed again", "inputs without a gradient"],
)
def test_what_would_give_other_gradients_is_not_split(forward: Callable[..., torch.Tensor]) -> None:
    model, x = Shared(), torch.randn(4, 8, requires_grad=True)
    assert split([forward(model, x)], [x], model.parameters()) is None


def test_an_output_beside_the_path_is_not_split() -> None:
    model, x = Shared(), torch.randn(4, 8, requires_grad=True)
    outputs = [model.second(x), model.first(torch.ones(8))]
    assert split(outputs, [x], model.parameters()) is None
    assert split(outputs[:1], [x], model.parameters()) is not None


class DoubledBlock(pipelines.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Doubled.apply(x))


def doubled() -> nn.Module:
    model = pipelines.whole()
    return pipelines.Layers(
        {name: DoubledBlock(32) if name.startswith("block") else each for name, each in model.named_children()}
    )


def in_both_schedules(job: Job, folder: Path, options: dict[str, Any]) -> tuple[Result, list[bool]]:
    """Returns the training, and for each backward of a stage behind the first True if it ran in two halves."""
    plain = pipelines.train(job, Plan("Interleaved1F1B", stages=4), DISK, folder / "plain", **options)
    ran: list[bool] = []

    def counted(*arguments: Any) -> Any:
        halves = split(*arguments)
        ran.append(halves is not None)
        return halves

    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "pipeline.split_backward", counted)
        result = pipelines.train(job, Plan("InterleavedZeroBubble", stages=4), DISK, folder / "zero", **options)
    assert_same(result, plain)
    return result, ran


CASES: dict[str, tuple[Job, dict[str, Any], bool]] = {
    "as it is": (JOB, {}, True),
    "clipped, in bf16": (JOB._replace(clip=0.05, dtype="bf16"), {}, True),
    "a function of Python": (JOB._replace(model=doubled), {}, False),
    "blocks computed again": (JOB, {"activations": "nvme", "units": ["Block"]}, True),
}


@pytest.mark.works("Several ranks", "interleaved and zero-bubble schedules, of several stages a process", "right")
@pytest.mark.works("Several ranks", "zero-bubble schedules with a backward in two halves, and as one", "right")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "as it is" else pytest.mark.slow) for each in CASES]
)
def test_several_stages_a_process_train_by_the_bits_of_whole_backwards(
    name: str, ranks: RankPool, alone: Callable[..., Result], tmp_path: Path
) -> None:
    job, options, splits = CASES[name]
    (rank0, first), (rank1, second) = ranks.run(in_both_schedules, job, tmp_path / "two", options)
    if job is JOB:
        same_bits(pipelines.together([rank0, rank1]), alone(job, **options))
    # Stage 0 has no inputs with gradients: torch runs all of its backward in the second half.
    assert len(first) == JOB.steps * JOB.accumulation and len(second) == 2 * len(first)
    assert set(first + second) == {splits}
