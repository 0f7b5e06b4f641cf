"""Ranks with batches of their own that own whole experts of each layer train as one rank with the whole batch."""

from __future__ import annotations

import copy
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import ConfigError, StoreError, UsageError
from offload.layout.fingerprint import describe, described_layouts
from offload.layout.flat_layout import layouts_of
from offload.layout.memory_plan import Division, divide
from offload.layout.modes import MODES
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, PlainEngine, Result, assert_same, assert_same_tensors, config
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size, start, train

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")


def own_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """Returns the loss of this rank's rows of the batch."""
    return tp.row_loss(model, step, micro, 1)


def half_frozen() -> nn.Module:
    """A mixture of which one projection of each expert trains, and the other does not."""
    model = tp.mixture()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" not in name)
    return model


JOB = Job(tp.mixture, own_loss, steps=2, accumulation=2, clip=0.05, lr=3e-4, experts=2)
TEN = JOB._replace(model=functools.partial(tp.mixture, 10), accumulation=1)
"""One rank has groups of two of the ten experts, and each of two ranks owns five."""


def train_in_memory_and_on_disk(job: Job, room: int, folder: Path) -> Result:
    """Both placements have the same bits. The device has room for some units, so that units come and go."""
    first = train(job, MEMORY, folder / "memory")
    assert_same(first, train(job, DISK, folder / "disk", device_memory=room), "disk")
    return first


def compare(job: Job, room: int, ranks: RankPool, folder: Path) -> None:
    """Compares ranks that own experts with each other, and with one rank."""
    alone = train(job._replace(experts=1), DISK, folder / "one")
    results = ranks.run(train_in_memory_and_on_disk, job, room, folder / "ranks")
    for result in results:
        assert_same(results[0], result, "the ranks")
    rounding_bounds.same_training(results[0], alone, job, reordered=True)


@pytest.mark.works(
    "Several ranks", '"expert_parallel": {"autoep_size": 2} over ranks with batches of their own', "right"
)
@pytest.mark.numeric
@pytest.mark.parametrize("model", [tp.mixture, pytest.param(half_frozen, marks=pytest.mark.slow)])
def test_two_ranks_that_own_half_of_the_experts_equal_one_rank(
    model: Callable[[], nn.Module], ranks: RankPool, tmp_path: Path
) -> None:
    compare(JOB._replace(model=model), 128 << 10, ranks, tmp_path)


FOUR: dict[str, dict[str, Any]] = {
    "two owners of each expert": {},
    "one owner": {"experts": 4},
    "stage 1": {"stage": 1},
    "stage 2, with small units together": {"stage": 2, "overlap": True, "bucket": 10**6},
}


@pytest.mark.works("Several ranks", "expert parallelism beside ZeRO among the owners of an expert", "right")
@pytest.mark.numeric
@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_that_own_experts_equal_one_rank(case: str, four: RankPool, tmp_path: Path) -> None:
    compare(JOB._replace(**FOUR[case]), 320 << 10, four, tmp_path)


# -- runs ----------------------------------------------------------------------------------------------


def stop_and_resume(job: Job, folder: Path) -> tuple[Result, str]:
    """Returns an unbroken run, and the error of a start that owns other experts than the run that it finds."""
    unbroken = train(job, DISK, folder / "unbroken")
    engine = start(job, DISK, folder / "run")
    tp.steps(engine, job, 1, 0, 1)
    engine.destroy()
    with pytest.raises(StoreError) as error:
        start(job._replace(experts=1), DISK, folder / "run", resume="auto")
    engine = start(job, DISK, folder / "run", resume="must")
    rest = tp.steps(engine, job, 1, 1, job.steps)
    engine.save_pretrained(folder / "whole")
    engine.save_checkpoint(folder / "checkpoint")
    engine.destroy(remove=True)
    assert (rest.losses, rest.norms) == (unbroken.losses[1:], unbroken.norms[1:])
    assert_same_tensors(rest.weights, unbroken.weights)
    return unbroken, str(error.value)


@pytest.mark.works("Several ranks", "resume of a run with expert parallelism; its checkpoint on one rank", "right")
def test_a_run_resumes_and_its_checkpoint_and_model_are_whole(ranks: RankPool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (unbroken, message), _ = ranks.run(stop_and_resume, TEN, tmp_path)
    assert '"experts", "vocabulary" and expert_parallel that the run had' in message
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert_same_tensors(exported.state_dict(), unbroken.weights)
    engine = start(TEN._replace(experts=1), DISK, tmp_path / "one")
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert_same_tensors(engine.module.state_dict(), unbroken.weights)
    engine.destroy(remove=True)


def begin(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    engine = start(job, DISK, folder)
    weights = tp.steps(engine, job, 1, 0, 1).weights
    engine.destroy()
    return weights


def go_on(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    engine = start(job, DISK, folder, resume="must")
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    tp.steps(engine, job, 1, 1, 2)
    engine.destroy(remove=True)
    return weights


@pytest.mark.works("Several ranks", "resume with expert parallelism on another number of ranks", "right")
@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks(ranks: RankPool, four: RankPool, tmp_path: Path) -> None:
    begun = four.run(begin, JOB, tmp_path)
    assert_same_tensors(ranks.run(go_on, JOB, tmp_path)[0], begun[0])


def die_in_the_third_step(job: Job, folder: Path) -> None:
    """One rank is killed between two steps, the other while tokens of its third forward wait for the first."""
    engine = start(job, DISK, folder)
    tp.steps(engine, job, 1, 0, 2)
    try:
        if rank_and_size()[0] == 0:
            tp.steps(engine, job, 1, 2, 3)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def resume_the_killed(job: Job, folder: Path) -> None:
    unbroken = train(job, DISK, folder / "unbroken")
    engine = start(job, DISK, folder, resume="must")
    first = engine.global_steps
    assert first in (1, 2)
    rest = tp.steps(engine, job, 1, first, job.steps)
    engine.destroy(remove=True)
    assert (rest.losses, rest.norms) == (unbroken.losses[first:], unbroken.norms[first:])
    assert_same_tensors(rest.weights, unbroken.weights)


@pytest.mark.works("Several ranks", "resume of ranks with expert parallelism that were killed in a step", "right")
@pytest.mark.slow
def test_killed_ranks_resume_with_the_bits_of_an_unbroken_run(tmp_path: Path) -> None:
    job = JOB._replace(steps=3)
    with pool(2) as two:
        two.run_to_the_death(die_in_the_third_step, job, tmp_path)
        two.run(resume_the_killed, job, tmp_path)


# -- tokens --------------------------------------------------------------------------------------------


def train_uneven(job: Job, folder: Path) -> tuple[list[float], list[float], tuple[int, int]]:
    """Returns losses of a plain loop over the batches of all ranks, losses of the ranks, and what each sends.

    A rank has two tokens, the other three, all of them equal, so that all choose the same experts.
    """
    rank, size = rank_and_size()
    batches = [torch.full((1, 2 + other), 5) for other in range(size)]
    torch.manual_seed(job.seed)
    plain: Any = PlainEngine(job)
    content = config(job, DISK, folder) | {"activation_checkpointing": {"partition_activations": True}}
    torch.manual_seed(job.seed)
    engine = offload.initialize(model=job.model(), config=content)[0]
    before, alone, divided = engine.communication().experts, list[float](), list[float]()
    for _ in range(3):
        for losses, trained, own in ((alone, plain, batches), (divided, engine, batches[rank : rank + 1])):
            loss = sum((models.token_loss(trained(ids).logits, ids) for ids in own), torch.zeros(())) / len(own)
            trained.backward(loss)
            losses.append(float(loss.detach()) if trained is plain else engine.mean(float(loss.detach())))
            trained.step()
    sent, layouts = engine.communication().experts, testing.inspect(engine).layouts
    # No gradient of an expert is sent, and half of all others by each of two ranks.
    dense = sum(layout.trainable_stop for layout in layouts if layout.ep_size == 1)
    assert engine.communication().gradients.nbytes == 3 * 4 * dense // 2
    engine.destroy(remove=True)
    return alone, divided, (sent.collectives - before.collectives, sent.nbytes - before.nbytes)


@pytest.mark.works("Several ranks", "expert parallelism where a rank's experts get no token", "right")
def test_ranks_with_other_numbers_of_tokens_and_experts_without_any(ranks: RankPool, tmp_path: Path) -> None:
    job = JOB._replace(model=functools.partial(tp.mixture, chosen=1), accumulation=1)
    for alone, divided, _ in ranks.run(train_uneven, job, tmp_path):
        assert divided == pytest.approx(alone, rel=1e-5) and divided[2] < divided[0]


def test_tokens_that_travel_are_counted(ranks: RankPool, tmp_path: Path) -> None:
    """Each token goes to all four experts: its two pairs for the other rank go there and back, in each direction.

    The blocks run twice and go back once: three all-to-alls each time they run, one of them of counts, and two back.
    """
    job = JOB._replace(model=functools.partial(tp.mixture, chosen=4), accumulation=1)
    pairs, nbytes, counts = 2 * (2 + 3), 32 * 4, 2 * 8
    expected = 3 * 2 * (2 * 3 + 2), 3 * 2 * (3 * pairs * nbytes + 2 * counts)
    for _, _, sent in ranks.run(train_uneven, job, tmp_path):
        assert sent == expected


# -- whole stacks ----------------------------------------------------------------------------------------


def use_whole_stacks(folder: Path) -> None:
    engine: Any = start(JOB, DISK, folder, units=["Qwen3MoeSparseMoeBlock"])
    stack = engine.module.model.layers[0].mlp.experts.down_proj
    owned = [unit for unit in testing.inspect(engine).layouts if unit.ep_size == 2]
    assert [2 * unit.device_numel for unit in owned] == [unit.numel for unit in owned] and len(owned) == 2
    for micro in range(2):
        engine.backward(own_loss(engine, 0, micro))
        if not micro:
            gradient = offload.safe_get_full_grad(stack)
            assert gradient is not None and all(row.any() for row in gradient)
        engine.step()
    before = offload.safe_get_full_fp32_param(stack)
    moment = offload.safe_get_full_optimizer_state(stack, "exp_avg")
    assert before is not None and moment is not None and moment.shape == before.shape == stack.shape
    with offload.gathered(stack, modify=True):
        stack.data.mul_(0.5)
    after = offload.safe_get_full_fp32_param(stack)
    assert after is not None and torch.equal(after, 0.5 * before)
    state = {name: 1.5 * value for name, value in engine.module.state_dict().items()}
    engine.module.load_state_dict(state)
    copies = [engine.module.state_dict()][rank_and_size()[0] :]  # one rank has copies, and reads again all the same
    assert_same_tensors(engine.module.state_dict(), state)
    del copies
    twin, ids = copy.deepcopy(engine.module), torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.allclose(twin(ids).logits, engine(ids).logits, atol=1e-5)
        stack.square().sum()
    with pytest.raises(UsageError, match="that other ranks own are used while the model runs, or with their gr"):
        stack.square().sum()
    engine.module.model.layers[0].register_forward_hook(lambda *_: stack[3 - 3 * engine.global_rank].sum())
    with pytest.raises(UsageError, match="and each rank owns 2 of 4"):
        own_loss(engine, 0, 0)
    engine.destroy(remove=True)


def test_stacks_are_whole_between_steps(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(use_whole_stacks, tmp_path)


def test_a_description_of_owned_experts_is_read_and_checked() -> None:
    model = tp.mixture()
    layouts = layouts_of(model, divide(model, Division(ep_size=2)).units, 4)
    description = describe(layouts, MODES["fp32"], 4)
    assert described_layouts(description) == layouts
    description["units"][-1]["ep_size"] = 3
    with pytest.raises(StoreError, match="2 groups of experts for 3 owners"):
        described_layouts(description)


# -- refused -------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ranks": ({"experts": 4}, {}, "autoep_size is 4, .* 2 ranks cannot be divided into such groups"),
    "experts": ({"model": functools.partial(tp.mixture, 3)}, {}, "does not divide the 3 experts of model.layers.0.mlp"),
    "dense": ({"model": tp.llama}, {}, "LlamaForCausalLM has no module that transformers marks as stacked experts"),
    "replicas": ({"shard_size": 1}, {}, "does not go together with replicas of all states: set stage 1, 2 or 3"),
    "sequences": ({"sequence": 2, "model": tp.mixture}, {}, "does not go together with sequence_parallel_size"),
    "codes": ({"quantized": "weights"}, {}, "does not go together with codes of weights and gradients"),
    "each": ({}, {"experts": "each"}, "does not go together with experts of another kind"),
    "rule": ({"optimizer": "Lamb"}, {}, "the optimizer's rule looks at whole parameters: it is for elementwise"),
    "order": ({}, {"schedule": "layer_major"}, "layer_major"),
}


def refuse(folder: Path) -> None:
    for changes, options, message in REFUSED.values():
        job = JOB._replace(**changes)
        with pytest.raises(ConfigError, match=message):
            start(job, DISK, folder, **options)


@pytest.mark.works(
    "Several ranks", "expert parallelism that does not fit the model, the ranks or another key", "refused"
)
def test_experts_that_ranks_cannot_own_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(refuse, tmp_path)
