"""Ranks send weights and gradients as codes of 8 bits (`zero_quantized_weights`, `zero_quantized_gradients`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.distributed.process_group import Sent
from offload.errors import RankError
from offload.kernels.blocks import BLOCK_FORMATS, dequantize, quantize
from offload.layout import memory_plan
from offload.layout.flat_layout import UnitLayout
from offload.sizes import align_up
from tests.ranks.test_ranks import least_budget, train_late
from tests.ranks.test_ranks_replicas import Step, second_step
from tests.ranks.test_ranks_replicas import train_and_look as train_and_sum
from tests.support import models
from tests.support.oracle import DTYPES, Job, assert_same, assert_same_tensors, rounded, weights_of
from tests.support.ranks.rank_jobs import JOBS, language_rows_loss
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size, shared_pool, start, train

MEMORY, HOST, DISK = ("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")
JOB = JOBS["gpt2"]._replace(steps=2, lr=3e-4)
ALL = "weights nontrainable_weights gradients"
BLOCK, BYTES = 128, 130


def through_codes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of the codes of `values`, (n,) with whole blocks: 127 steps up to the largest magnitude."""
    rows = values.float().view(-1, BLOCK)
    scale = rows.abs().amax(1, keepdim=True).bfloat16().float()
    share = torch.where(scale > 0, rows / scale, 0.0)
    codes = (share * 127).clamp(-127, 127).round()
    return (codes * (scale * torch.tensor(1 / 127))).to(dtype).view(-1)


def flat(layout: UnitLayout, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns a unit as its memory has it, zeros between the parameters."""
    memory = torch.zeros(layout.numel, dtype=next(iter(values.values())).dtype)
    for segment in layout.segments:
        memory[segment.start : segment.stop] = values[segment.name].reshape(-1)
    return memory


def look_on(module: nn.Module, seen: dict[str, torch.Tensor]) -> None:
    """Has each module note the weights that it computes with."""

    def note(prefix: str, module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen[prefix + name] = parameter.detach().clone()

    for path, submodule in module.named_modules():
        submodule.register_forward_pre_hook(functools.partial(note, f"{path}." if path else ""))


class Seen(NamedTuple):
    """Of one rank."""

    used: dict[str, torch.Tensor]
    """Weights in the second forward."""
    stored: dict[str, torch.Tensor]
    """Masters at that time."""
    state_dict: dict[str, torch.Tensor]
    layouts: tuple[UnitLayout, ...]


def train_and_look(job: Job, folder: Path, **options: Any) -> Seen:
    engine = start(job, DISK, folder, **options)
    engine.backward(job.loss(engine, 0, 0))
    engine.step()
    used: dict[str, torch.Tensor] = {}
    look_on(engine.module, used)
    stored = {}
    for name, parameter in engine.module.named_parameters():
        master = offload.safe_get_full_fp32_param(parameter)
        assert master is not None
        stored[name] = master
    with torch.no_grad():
        job.loss(engine, 1, 0)
    seen = Seen(used, stored, weights_of(engine), tuple(testing.inspect(engine).layouts))
    engine.destroy(remove=True)
    return seen


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_of_codes_have_the_codes_of_these_values(dtype: torch.dtype) -> None:
    """Every code beside every scale of a binade: a unit that is gathered again keeps its bits."""
    form = BLOCK_FORMATS["int8"]
    scales = torch.arange(128, 256) / 128 * 2.0 ** torch.tensor([-9.0, 0.0, 5.0])[:, None]
    codes = torch.arange(-127, 128, dtype=torch.float32)
    values = torch.zeros(scales.numel(), 2, 2, BLOCK)
    values[:, 0, :, 0] = values[:, 1, :, 0] = scales.view(-1, 1)
    values[:, 0, 0, 1:] = codes[:127] * scales.view(-1, 1) / 127
    values[:, 1, 1, 1:] = codes[128:] * scales.view(-1, 1) / 127
    once, twice = torch.empty(values.numel(), dtype=dtype), torch.empty(values.numel(), dtype=dtype)
    stored = torch.empty(form.stored_nbytes(values.numel()), dtype=torch.uint8)
    quantize(form, values.view(-1).to(dtype), stored)
    dequantize(form, stored, once)
    again = torch.empty_like(stored)
    quantize(form, once, again)
    dequantize(form, again, twice)
    assert torch.equal(once, twice) and torch.equal(stored, again)
    assert len(set(stored.view(-1, BYTES)[:, :BLOCK].reshape(-1).tolist())) == 255


@pytest.mark.sample(1)
@pytest.mark.numeric
@pytest.mark.works("Several ranks", "weights gathered as int8 codes (`zero_quantized_weights`), in any tier", "right")
@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("gpt2", "bf16", "weights"),
        ("adapters", "fp32", "weights"),
        ("adapters", "fp32", "nontrainable_weights"),
        ("adapters", "bf16", "weights nontrainable_weights"),
    ],
)
def test_every_rank_computes_with_the_values_of_the_codes(
    name: str, dtype: str, words: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Those of its own shard too; masters, and a state dict, stay exact."""
    job = JOBS[name]._replace(dtype=dtype, quantized=words)
    rank0, rank1 = ranks.run(train_and_look, job, tmp_path)
    assert_same_tensors(rank0.used, rank1.used)
    kind, changed = DTYPES[dtype], 0
    exact = {name: rounded(values, kind) for name, values in rank0.stored.items()}
    assert_same_tensors({name: rank0.state_dict[name] for name in exact}, exact, "a state dict")
    for layout in rank0.layouts:
        memory, stop = flat(layout, exact), layout.trainable_stop
        expected = memory.clone()
        if "weights" in words.split():
            expected[:stop] = through_codes(memory[:stop], kind)
        if "nontrainable_weights" in words:
            expected[stop:] = through_codes(memory[stop:], kind)
        changed += int((expected != memory).sum())
        for segment in (each for each in layout.segments if each.name in rank0.used):
            values = expected[segment.start : segment.stop].view(segment.shape)
            assert torch.equal(rank0.used[segment.name], values), segment.name
    assert changed and len(rank0.used) > len(rank0.layouts)


def read_alone(folder: Path) -> str:
    """Rank 0 reads weights while the other makes a step. Returns this rank's error."""
    engine = start(JOB._replace(quantized="weights"), MEMORY, folder)
    try:
        if rank_and_size()[0] == 0:
            engine.module.state_dict()
        else:
            engine.backward(JOB.loss(engine, 0, 0))
            engine.step()
    except RankError as error:
        return str(error)
    return ""


def test_a_rank_that_reads_stored_weights_alone_is_an_error_on_all(tmp_path: Path) -> None:
    with pool(2) as ranks:
        messages = ranks.run(read_alone, tmp_path)
    assert any("accesses a state of a parameter" in message for message in messages) and all(messages)


def edit_one(folder: Path, words: str) -> dict[str, torch.Tensor]:
    """Changes one element of a matrix. Returns masters."""
    job = JOB._replace(quantized=words, dtype="bf16")
    engine = start(job, HOST, folder)
    parameter = engine.module.get_parameter("transformer.h.0.mlp.c_fc.weight")
    with offload.gathered(parameter, modify=True):
        parameter.data.view(-1)[7] = 3.0
    engine.module.load_state_dict(engine.module.state_dict())
    masters = {name: offload.safe_get_full_fp32_param(each) for name, each in engine.module.named_parameters()}
    engine.destroy(remove=True)
    return {name: values for name, values in masters.items() if values is not None}


@pytest.mark.slow
def test_an_edit_changes_what_the_user_changed_alone(ranks: RankPool, tmp_path: Path) -> None:
    exact = ranks.run(edit_one, tmp_path, "")[0]
    for masters in ranks.run(edit_one, tmp_path, "weights"):
        assert_same_tensors(masters, exact)


class Made(NamedTuple):
    """Of one rank."""

    micro_batches: list[list[torch.Tensor]]
    """The gradient of each micro-batch on this rank, (numel,) for each unit."""
    mean: dict[str, torch.Tensor]
    """That of the step, which all ranks share."""
    norm: float
    layouts: tuple[UnitLayout, ...]


def local_gradients(job: Job, folder: Path) -> Made:
    engine = start(job, MEMORY, folder)
    made: dict[str, torch.Tensor] = {}

    def note(name: str, gradient: torch.Tensor) -> None:
        made[name] = gradient.detach().clone()

    for name, parameter in engine.module.named_parameters():
        parameter.register_hook(functools.partial(note, name))
    layouts, micro_batches = tuple(testing.inspect(engine).layouts), []
    for micro in range(job.accumulation):
        engine.backward(job.loss(engine, 0, micro))
        micro_batches.append([flat(layout, made) for layout in layouts])
        if micro < job.accumulation - 1:
            engine.step()
    mean = {name: offload.safe_get_full_grad(each) for name, each in engine.module.named_parameters()}
    engine.step()
    norm = engine.get_global_grad_norm() or 0.0
    engine.destroy(remove=True)
    return Made(micro_batches, {name: values for name, values in mean.items() if values is not None}, norm, layouts)


@pytest.mark.sample(1)
@pytest.mark.numeric
@pytest.mark.works("Several ranks", "gradients sent as int8 codes (`zero_quantized_gradients`), in any tier", "right")
@pytest.mark.parametrize(("stage", "accumulation"), [(3, 2), (1, 2)])
def test_a_gradient_is_the_mean_of_the_values_of_codes(
    stage: int, accumulation: int, ranks: RankPool, tmp_path: Path
) -> None:
    """Each rank's codes are of a micro-batch, in stages 0 and 1 of a step; the norm is that of the mean."""
    job = Job(models.llama, language_rows_loss, stage=stage, accumulation=accumulation, clip=0.0, quantized="gradients")
    results = ranks.run(local_gradients, job, tmp_path)
    squares = 0.0
    for unit, layout in enumerate(results[0].layouts):
        steps = [[rank.micro_batches[micro][unit] for rank in results] for micro in range(accumulation)]
        if stage < 2:
            steps = [[first + second for first, second in zip(*steps, strict=True)]]
        means = []
        for contributions in steps:
            total = through_codes(contributions[0], torch.float32)
            total += through_codes(contributions[1], torch.float32)
            means.append(total / 2)
        expected = means[0] if len(means) == 1 else means[0] + means[1]
        for segment in layout.segments:
            values = expected[segment.start : segment.stop]
            squares += float(values.double().square().sum())
            for rank in results:
                assert torch.equal(rank.mean[segment.name].view(-1), values), segment.name
    assert all(abs(rank.norm - squares**0.5) <= 1e-9 * rank.norm for rank in results)


def skip_a_step(job: Job, folder: Path) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """The gradients of the last rank are inf in the first step. Returns steps skipped so far, and weights."""
    engine = start(job, HOST, folder)
    rank, size = rank_and_size()
    skipped, weights = [], [weights_of(engine)]
    for step in range(2):
        engine.backward(job.loss(engine, step, 0) * (1e30 if rank == size - 1 and step == 0 else 1e-3))
        engine.step()
        skipped.append(engine.skipped_steps)
        weights.append(weights_of(engine))
    engine.destroy(remove=True)
    return skipped, weights


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, tmp_path: Path) -> None:
    job = JOB._replace(dtype="fp16", loss_scale=0.0, quantized="weights gradients")
    for skipped, (before, after, later) in ranks.run(skip_a_step, job, tmp_path):
        assert skipped == [1, 1]
        assert_same_tensors(before, after)
        assert any(not torch.equal(later[name], value) for name, value in before.items())


def codes(numel: int) -> int:
    """Returns the bytes of the codes of a shard."""
    assert numel % BLOCK == 0
    return numel // BLOCK * BYTES


def test_a_step_sends_a_byte_an_element_and_a_scale_a_block(ranks: RankPool, tmp_path: Path) -> None:
    """130 bytes for 128 elements: 0.508 of bf16. Each collective is one as before."""
    job = JOB._replace(dtype="bf16")
    exact = ranks.run(second_step, job, tmp_path)
    for quantized, plain in zip(
        ranks.run(second_step, job._replace(quantized="weights gradients"), tmp_path), exact, strict=True
    ):
        shard = sum(trainable for trainable, _ in quantized.units) // 2
        assert plain.sent.weights == Sent(len(quantized.units), shard * 2)
        assert quantized.sent.weights == quantized.sent.gradients == Sent(len(quantized.units), codes(shard))
        assert quantized.sent.messages == plain.sent.messages
        assert quantized.sent.agreement.collectives == plain.sent.agreement.collectives
    for quantized in ranks.run(second_step, job._replace(quantized="gradients"), tmp_path):
        assert (quantized.sent.weights, quantized.sent.gradients) == (
            plain.sent.weights,
            Sent(len(quantized.units), codes(shard)),
        )


@pytest.mark.slow
def test_replicas_send_codes_of_their_sums(four: RankPool, tmp_path: Path) -> None:
    """To each of the other replicas all of a shard's."""
    for result in four.run(second_step, JOB._replace(shard_size=2, quantized="weights gradients"), tmp_path):
        units, shard = len(result.units), sum(trainable for trainable, _ in result.units) // 2
        assert result.sent.weights == Sent(units, codes(shard))
        assert result.sent.gradients == Sent(2 * units, 2 * codes(shard))


def with_many_replicas(job: Job, folder: Path) -> Step:
    """Two replicas that take themselves for too many."""
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "size.coded_replicas", 1)
        return second_step(job, folder)


@pytest.mark.slow
def test_many_replicas_add_their_sums_up_in_fp32(four: RankPool, tmp_path: Path) -> None:
    """Where the codes of all sums would be more bytes than an all-reduce, 2 (r - 1) / r of 4 bytes an element."""
    coded, summed = (
        [each(r) for r in range(2, 12)] for each in (lambda r: (r - 1) * BYTES / BLOCK, lambda r: 8 - 8 / r)
    )
    fewer = [one < other for one, other in zip(coded, summed, strict=True)]
    assert fewer == [r <= memory_plan.MOST_CODED_REPLICAS for r in range(2, 12)]
    for result in four.run(with_many_replicas, JOB._replace(shard_size=2, quantized="gradients"), tmp_path):
        units, shard = len(result.units), sum(trainable for trainable, _ in result.units) // 2
        assert result.sent.gradients == Sent(2 * units, codes(shard) + 4 * shard)


def test_frozen_weights_are_sent_as_the_config_says(ranks: RankPool, tmp_path: Path) -> None:
    job = JOBS["adapters"]._replace(steps=2)
    sizes: list[tuple[str, Callable[[int], int], Callable[[int], int]]] = [
        ("weights", codes, lambda numel: 4 * numel),
        ("nontrainable_weights", lambda numel: 4 * numel, codes),
    ]
    for words, of_trainable, of_frozen in sizes:
        for result in ranks.run(second_step, job._replace(quantized=words), tmp_path):
            # A unit that never changes was gathered in the first step, and stays.
            changing = [(one // 2, other // 2) for one, other in result.units if one]
            expected = sum(of_trainable(one) + of_frozen(other) for one, other in changing)
            assert result.sent.weights.nbytes == expected, words


def frozen_in_blocks(job: Job, folder: Path) -> tuple[Step, Seen]:
    return second_step(job, folder / "step", frozen="int8"), train_and_look(job, folder / "look", frozen="int8")


@pytest.mark.slow
def test_frozen_weights_that_are_codes_already_are_sent_as_they_are(ranks: RankPool, tmp_path: Path) -> None:
    """Their blocks are no values of which codes could be made."""
    job = JOBS["adapters"]._replace(dtype="bf16")
    exact = ranks.run(frozen_in_blocks, job, tmp_path / "exact")
    coded = ranks.run(frozen_in_blocks, job._replace(quantized="nontrainable_weights"), tmp_path / "coded")
    for (step, seen), (plain, expected) in zip(coded, exact, strict=True):
        assert step.sent.weights == plain.sent.weights
        bases = [name for name in seen.used if "base" in name]
        assert len(bases) == 6 and any("weight" in name for name in bases)
        assert_same_tensors({name: seen.used[name] for name in bases}, {name: expected.used[name] for name in bases})


def least(folder: Path, job: Job) -> int:
    message = least_budget(folder, job)
    assert "for gradients and codes that ranks send each other" in message or not job.quantized
    return int(message.split("least that works is ")[1].split("(")[1].split(" bytes")[0])


def test_the_device_budget_holds_the_memory_of_codes(ranks: RankPool, tmp_path: Path) -> None:
    """For gradients a bucket, and the codes of two exchanges, sent and received; for weights the codes of a gather."""
    needs = {
        words: ranks.run(least, tmp_path, JOB._replace(quantized=words))[0] for words in ("", "weights", "gradients")
    }
    layouts = ranks.run(second_step, JOB, tmp_path)[0].units
    largest = max(trainable for trainable, _ in layouts)
    assert needs["weights"] - needs[""] == align_up(codes(largest))
    assert needs["gradients"] - needs[""] == 4 * align_up(codes(largest)) - 3 * align_up(4 * largest)


@pytest.mark.parametrize(
    ("name", "stage", "accumulation", "dtype"),
    [
        ("gpt2", 3, 2, "fp32"),
        pytest.param("gpt2", 1, 3, "bf16", marks=pytest.mark.slow),
        pytest.param("adapters", 2, 1, "bf16", marks=pytest.mark.slow),
    ],
)
def test_tiers_and_overlap_change_no_bit(
    name: str, stage: int, accumulation: int, dtype: str, ranks: RankPool, tmp_path: Path
) -> None:
    job = JOBS[name]._replace(steps=2, stage=stage, accumulation=accumulation, dtype=dtype, quantized=ALL)
    at_once = ranks.run(train, job._replace(overlap=False), MEMORY, tmp_path / "at once")
    beside = ranks.run(train_late, job._replace(overlap=True), DISK, tmp_path / "beside")
    for left, right in zip(at_once, beside, strict=True):
        assert_same(left, right)


@pytest.mark.slow
@pytest.mark.works("Several ranks", "int8 codes beside replicas of shards (`mics_shard_size`)", "right")
@pytest.mark.parametrize(("size", "shard_size"), [(2, 1), (4, 2)])
def test_replicas_stay_equal(size: int, shard_size: int, tmp_path: Path) -> None:
    """Each adds up the same codes of all replicas' sums, in the same order."""
    job = JOB._replace(shard_size=shard_size, accumulation=2, quantized=ALL)
    with shared_pool(size) as together:
        memory = together.run(train_and_sum, job._replace(overlap=False), MEMORY, tmp_path / "memory")
        disk = together.run(train_and_sum, job._replace(overlap=True), DISK, tmp_path / "disk")
        exact = together.run(train, job._replace(quantized=""), MEMORY, tmp_path / "exact")
    for rank, (result, checksums) in enumerate(memory):
        assert_same(result, disk[rank].result)
        assert checksums == memory[rank % shard_size].checksums
    assert memory[0].result.losses != exact[0].losses
    assert memory[0].result.losses == pytest.approx(exact[0].losses, rel=0.02)


def test_one_rank_sends_nothing_and_keeps_every_bit(tmp_path: Path) -> None:
    exact = train(JOB, MEMORY, tmp_path)
    assert_same(train(JOB._replace(quantized=ALL), MEMORY, tmp_path), exact)
