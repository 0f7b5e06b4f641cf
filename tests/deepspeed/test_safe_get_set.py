"""DeepSpeed's safe_get_* and safe_set_* read and set every state of a parameter exactly, in any tier and on any ranks.

So do the engine's state dicts. Training goes on from what was set, and it is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import BudgetError, OffloadError, RankError, UsageError
from tests.support import models, rounding_bounds
from tests.support.drives.fault_injection import die
from tests.support.oracle import (
    Job,
    PlainEngine,
    dies,
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
)
from tests.support.param_states import (
    AREA,
    DISK,
    GPT2,
    JOBS,
    LOCAL,
    MEMORY,
    MIXTURE,
    PLACEMENTS,
    STATES,
    Found,
    Mixture,
    a_round,
    backward,
    differences,
    everything,
    everything_local,
    everything_of_torch,
    halved,
    little_room,
    on_cpu,
    same_but_for_roundings,
)
from tests.support.ranks.rank_pool import RankPool, rank_and_size
from tests.support.ranks.rank_pool import start as start_rank
from tests.support.sampling import drawn


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dtype"), [("GPT2", "bf16"), ("MIXTURE", "fp32"), ("MIXTURE", "bf16")])
@pytest.mark.works(AREA, "`safe_get_full_fp32_param`, `_grad`, `_optimizer_state`", "right")
@pytest.mark.numeric
def test_the_same_everywhere_and_as_in_torch(name: str, dtype: str, tmp_path: Path) -> None:
    """A tied weight, frozen ones, parameters that no loss reaches and scalars are among them."""
    job = JOBS[name]._replace(dtype=dtype)
    plain = PlainEngine(job)
    theirs = a_round(plain, job, lambda: everything_of_torch(plain))
    first: list[Found] | None = None
    for placement in drawn(PLACEMENTS, 3):
        engine = start(job, placement, tmp_path / "-".join(placement), **little_room(job, placement))
        result = a_round(engine, job, lambda engine=engine: everything(engine.module))  # type: ignore[misc]
        engine.destroy(remove=True)
        first = first or result
        for moment, (left, right) in enumerate(zip(first, result, strict=True)):
            assert differences(left, right) == [], f"{placement}, moment {moment}"
    assert first is not None
    for left, right in zip(first, theirs, strict=True):
        same_but_for_roundings(left, right, job._replace(steps=2))


@pytest.mark.slow
def test_spilled_gradients_and_small_chunks_are_read_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read goes over many chunks, tiles and windows of gradients on disk."""
    small_pieces(monkeypatch)
    testing.replace(monkeypatch, "size.parameter_access", 1024)
    job = MIXTURE._replace(dtype="bf16")
    least = least_host_memory(job, tmp_path)
    results = []
    for name, options in (("least", {"host_memory": least}), ("room", {})):
        engine = start(job, DISK, tmp_path / name, **options)
        assert testing.inspect(engine).gradients_spill(0) == (name == "least")
        results.append(a_round(engine, job, lambda engine=engine: everything(engine.module)))  # type: ignore[misc]
        backward(engine, job, 3)
        for number, parameter in enumerate(p for p in engine.module.parameters() if p.requires_grad):
            offload.safe_set_full_grad(parameter, torch.full(parameter.shape, 0.001 * number))
        results[-1].append(everything(engine.module))
        engine.step()
        results[-1].append(everything(engine.module))
        engine.destroy(remove=True)
    for left, right in zip(*results, strict=True):
        assert differences(left, right) == []


def test_the_master_has_the_bits_beyond_bf16(tmp_path: Path) -> None:
    job = GPT2._replace(dtype="bf16")
    torch.manual_seed(job.seed)
    exact = dict(job.model().named_parameters())
    engine = start(job, DISK, tmp_path)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(offload.safe_get_full_fp32_param(parameter).cpu(), exact[name].detach())
    train_step(engine, job, 0)
    weight = engine.module.transformer.h[0].mlp.c_fc.weight
    master = offload.safe_get_full_fp32_param(weight)
    assert master.dtype is torch.float32 and not torch.equal(master, weight.detach().float())
    computed = engine.state_dict()["transformer.h.0.mlp.c_fc.weight"]
    rounded = ((master.cpu().view(torch.int32) + 0x8000) >> 16).to(torch.int16)
    assert torch.equal(rounded, computed.view(torch.int16))
    engine.destroy(remove=True)


def test_a_read_takes_what_it_reads_and_nothing_else(tmp_path: Path) -> None:
    """From disk come the bytes of the one parameter; its tensor is the user's own."""
    engine = start(GPT2, DISK, tmp_path)
    train_step(engine, GPT2, 0)
    weight = engine.module.transformer.h[0].mlp.c_fc.weight
    engine.zero_grad()
    testing.settle(engine)
    before = engine.io_bytes().read
    state = offload.safe_get_full_optimizer_state(weight, "exp_avg")
    assert engine.io_bytes().read - before <= 4 * weight.numel() + 2 * 4096
    state.zero_()
    assert offload.safe_get_full_optimizer_state(weight, "exp_avg").any()
    engine.destroy(remove=True)


def test_state_dicts_of_the_engine(tmp_path: Path) -> None:
    job = MIXTURE
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    state = engine.state_dict()
    names = list(job.model().state_dict())
    assert list(state) == names == list(engine.module_state_dict())
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in state.values())
    assert state["head.weight"] is state["embedding.weight"] and state["calls"] == job.accumulation
    assert torch.equal(state["head.weight"], offload.safe_get_full_fp32_param(engine.module.head.weight).cpu())
    output = job.model()
    output.load_state_dict(state)
    before = engine.io_bytes().read
    trainable = engine.module_state_dict(exclude_frozen_parameters=True)
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    assert frozen and list(trainable) == [name for name in names if name not in frozen]
    assert list(engine.state_dict()) == names and engine.io_bytes().read >= before
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="destroyed"):
        engine.state_dict()


# --------------------------------------------------------------------------------------------------
# DeepSpeed's safe_set_* set every state of a parameter: training goes on from it, and it is committed.


def halved_in_torch(engine: PlainEngine) -> None:
    with torch.no_grad():
        trainable = [
            (p, m) for p, m in zip(engine.module.parameters(), engine._masters, strict=True) if m.requires_grad
        ]
        for number, (parameter, master) in enumerate(trainable):
            if number % 2 == 0 and engine.optimizer.state[master]:
                for state, factor in zip(STATES, (0.5, 0.25), strict=True):
                    engine.optimizer.state[master][state].mul_(factor)
            if number % 3 == 0:
                master.mul_(0.75)
                parameter.copy_(master)


def edited_round(engine: Any, job: Job, edit: Callable[[Any], None]) -> list[float]:
    losses = [train_step(engine, job, step) for step in range(2)]
    edit(engine)
    losses += [train_step(engine, job, step) for step in range(2, 4)]
    backward(engine, job, 4)
    edit(engine)
    engine.step()
    return [*losses, train_step(engine, job, 5)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.works(AREA, "`safe_set_full_fp32_param`, `safe_set_full_optimizer_state`", "right")
@pytest.mark.numeric
def test_training_goes_on_from_what_was_set(dtype: str, tmp_path: Path) -> None:
    """The same bits in every placement, and what torch does with the same moments and weights."""
    job = MIXTURE._replace(dtype=dtype)
    expected = edited_round(PlainEngine(job), job, halved_in_torch)
    first: tuple[list[float], Found] | None = None
    for placement in drawn(PLACEMENTS, 3):
        engine = start(job, placement, tmp_path / "-".join(placement), **little_room(job, placement))
        state = edited_round(engine, job, halved), everything(engine.module)
        engine.destroy(remove=True)
        first = first or state
        assert state[0] == first[0] and differences(state[1], first[1]) == [], placement
    assert first is not None and len(first[0]) == len(expected)
    rounding_bounds.same_losses(first[0], expected, job)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_set_is_read(dtype: str, tmp_path: Path) -> None:
    """Bit for bit, before it was written and after, of a scalar too; what was not set stays."""
    engine = start(MIXTURE._replace(dtype=dtype), DISK, tmp_path)
    train_step(engine, MIXTURE, 0)
    chance = torch.Generator().manual_seed(1)
    expected = everything(engine.module)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        for what in ("master", *STATES):
            value = torch.rand(parameter.shape, generator=chance)
            expected[f"{name} {what}"] = value.clone()
            if what == "master":
                offload.safe_set_full_fp32_param(parameter, value)
            else:
                offload.safe_set_full_optimizer_state(parameter, value, what)
            value.zero_()  # a copy was taken
    assert differences(everything(engine.module), expected) == []
    assert differences(everything(engine.module), expected) == []
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, MEMORY])
@pytest.mark.works(AREA, "`safe_set_full_grad`", "right")
@pytest.mark.numeric
def test_a_gradient_that_is_set_is_stepped_with(placement: tuple[str, str], tmp_path: Path) -> None:
    """Norm, clip and later backwards see it; also where there was none before, as in torch."""
    job = models.MIXTURE._replace(clip=0.5)
    engine, plain = start(job, placement, tmp_path, **little_room(job, placement)), PlainEngine(job)
    for step in range(2):
        for micro in range(job.accumulation):
            for trained in (engine, plain):
                trained.backward(job.loss(trained, step, micro))
            for mine, theirs in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
                if not mine.requires_grad:
                    continue
                gradient = on_cpu(offload.safe_get_full_grad(mine))
                wanted = torch.full(mine.shape, 0.01) if gradient is None else gradient * 2
                offload.safe_set_full_grad(mine, wanted)
                assert torch.equal(offload.safe_get_full_grad(mine).cpu(), wanted)
                theirs.grad = torch.full(theirs.shape, 0.01) if theirs.grad is None else theirs.grad * 2
            for trained in (engine, plain):
                trained.step()
        rounding_bounds.same_norms([engine.get_global_grad_norm()], [plain.get_global_grad_norm()], job)
    masters = {name: offload.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    rounding_bounds.same_weights(masters, dict(plain.module.named_parameters()), job._replace(steps=2))
    engine.destroy(remove=True)


def test_a_tied_weight_is_one(tmp_path: Path) -> None:
    engine = start(GPT2, DISK, tmp_path)
    head, embedding = engine.module.lm_head.weight, engine.module.transformer.wte.weight
    offload.safe_set_full_optimizer_state(head, torch.ones(head.shape), "exp_avg_sq")
    offload.safe_set_full_fp32_param(head, torch.ones(head.shape))
    assert offload.safe_get_full_optimizer_state(embedding, "exp_avg_sq").eq(1).all()
    state = engine.state_dict()
    assert state["lm_head.weight"] is state["transformer.wte.weight"] and bool(embedding.eq(1).all())
    engine.destroy(remove=True)


def test_a_master_that_was_set_outlives_the_weight_that_it_rounds_to(tmp_path: Path) -> None:
    """Where the two are set one after the other, before anything else is asked of the engine."""
    engine = start(GPT2._replace(dtype="bf16"), DISK, tmp_path)
    weight = engine.module.transformer.h[0].mlp.c_fc.weight
    master = torch.full(weight.shape, 1 + 2.0**-12)
    rounded = master.bfloat16()
    rounded[0] = 2.0
    offload.safe_set_full_fp32_param(weight, master)
    with torch.no_grad():
        weight.copy_(rounded)
    assert torch.equal(weight.detach().cpu(), rounded)
    master[0] = 2.0
    assert torch.equal(offload.safe_get_full_fp32_param(weight).cpu(), master)
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "cpu")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_set_is_committed_at_the_end(dtype: str, placement: tuple[str, str], tmp_path: Path) -> None:
    job = GPT2._replace(dtype=dtype)
    durable = {"durability": "step"}
    unbroken, cut = (start(job, placement, tmp_path / name, **durable) for name in ("whole", "cut"))
    for engine in (unbroken, cut):
        for step in range(3):
            train_step(engine, job, step)
        halved(engine)
    cut.destroy()
    cut = start(job, placement, tmp_path / "cut", resume="must", **durable)
    assert differences(everything(unbroken.module), everything(cut.module)) == []
    assert [train_step(unbroken, job, step) for step in (3, 4)] == [train_step(cut, job, step) for step in (3, 4)]
    unbroken.destroy(remove=True)
    cut.destroy(remove=True)


def _edit_and_die(job: Job, placement: tuple[str, str], folder: Path, steps: int) -> None:
    """Two steps, an edit that is written, and `steps` more; then the end of the process, of all without a word."""
    logging.disable(logging.CRITICAL)
    engine = start(job, placement, folder, durability="step")
    for step in range(2):
        train_step(engine, job, step)
    halved(engine)
    for step in range(2, 2 + steps):
        train_step(engine, job, step)
    everything(engine.module)  # the first call after a step, which its commit waits for, and all edits are carried out
    testing.settle(engine)
    die()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("placement", "steps"), [(DISK, 0), (DISK, 1), (("cpu", "cpu"), 1)])
@pytest.mark.works(AREA, "a state that was set, a kill and resume", "right")
def test_killed_after_an_edit(placement: tuple[str, str], steps: int, tmp_path: Path) -> None:
    """Before the next commit the run resumes without the edit, after it with it: never with half of it."""
    job = GPT2._replace(dtype="bf16")
    dies(_edit_and_die, job, placement, tmp_path / "cut", steps)
    unbroken = start(job, placement, tmp_path / "whole", durability="step")
    for step in range(2):
        train_step(unbroken, job, step)
    if steps:
        halved(unbroken)
    for step in range(2, 2 + steps):
        train_step(unbroken, job, step)
    cut = start(job, placement, tmp_path / "cut", resume="must", durability="step")
    assert cut.global_steps == 2 + steps
    assert differences(everything(unbroken.module), everything(cut.module)) == []
    assert [train_step(unbroken, job, step) for step in (3, 4)] == [train_step(cut, job, step) for step in (3, 4)]
    unbroken.destroy(remove=True)
    cut.destroy(remove=True)


# --------------------------------------------------------------------------------------------------
# safe_get_* and safe_set_* with wrong arguments, or while the model runs, are an error that harms nothing.


def _other_dtype(module: nn.Module) -> None:
    offload.safe_set_full_optimizer_state(module.embedding.weight, torch.ones(61, 33, dtype=torch.float64), "exp_avg")


def _no_tensor(module: nn.Module) -> None:
    offload.safe_set_full_grad(module.scale, 1.0)  # type: ignore[arg-type]


def _frozen_state(module: nn.Module) -> None:
    weight = module.blocks[2][0].weight
    offload.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg")


def _gathered(module: nn.Module) -> None:
    with offload.gathered(module.embedding.weight):
        offload.safe_get_full_fp32_param(module.embedding.weight)


def _loss(module: nn.Module) -> torch.Tensor:
    ids = models.tokens(0, 0, (4, 16), 61)
    return models.token_loss(module(ids.to(module.embedding.weight.device)), ids)


def _in_forward(module: nn.Module) -> None:
    hook = module.blocks[0].register_forward_hook(
        lambda called, _, output: offload.safe_get_full_fp32_param(called[0].weight)  # bound
    )
    try:
        _loss(module)
    finally:
        hook.remove()


def _in_forward_of_another(module: nn.Module) -> None:
    hook = module.blocks[0].register_forward_hook(lambda *_: offload.safe_get_full_grad(module.unused.weight))
    try:
        _loss(module)
    finally:
        hook.remove()


def _in_backward(module: nn.Module) -> None:
    hook = module.scale.register_hook(lambda _: offload.safe_set_full_grad(module.scale, torch.ones(())))
    try:
        _loss(module).backward()
    finally:
        hook.remove()
        module.zero_grad()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "of a parameter that no engine has": (
        lambda module: offload.safe_get_full_fp32_param(nn.Parameter(torch.ones(3))),
        "take the parameter from engine.module",
    ),
    "of what is no parameter": (
        lambda module: offload.safe_get_full_grad(module.embedding.weight.data),
        "expects a parameter",
    ),
    "of another shape": (
        lambda module: offload.safe_set_full_fp32_param(module.embedding.weight, torch.ones(61 * 33)),
        r"shape \[61, 33\] in fp32, got shape \[2013\]",
    ),
    "in float64": (_other_dtype, "convert it first"),
    "of a number": (_no_tensor, "must be a tensor of shape .* got float"),
    "of a state that the optimizer has not": (
        lambda module: offload.safe_get_full_optimizer_state(module.embedding.weight, "momentum"),
        '"exp_avg", "exp_avg_sq"',
    ),
    "of a frozen parameter's states": (_frozen_state, "is frozen"),
    "of a frozen parameter's gradient": (
        lambda module: offload.safe_set_full_grad(module.blocks[2][0].weight, torch.zeros(70, 33)),
        "is frozen",
    ),
    "of a part that is not flat": (
        lambda module: offload.safe_set_local_optimizer_state(module.embedding.weight, torch.ones(61, 33), "exp_avg"),
        r"this rank's shard of .* \[2013\] in fp32, got shape",
    ),
    "of a frozen parameter's part": (
        lambda module: offload.safe_set_local_grad(module.blocks[2][0].weight, torch.zeros(70 * 33)),
        "is frozen",
    ),
    "of a frozen weight": (
        lambda module: offload.safe_set_full_fp32_param(module.blocks[2][0].weight, torch.zeros(70, 33)),
        "is frozen",
    ),
    "inside of `gathered`": (_gathered, "is gathered"),
    "inside of a forward": (_in_forward, "not inside of a forward"),
    "inside of a forward, of a parameter of elsewhere": (_in_forward_of_another, "not inside of a forward"),
    "inside of a backward": (_in_backward, "not inside of a forward or a backward"),
}


@pytest.mark.works(AREA, "`safe_get_*` and `safe_set_*` with what cannot be, or while the model runs", "refused")
def test_refused_and_nothing_is_harmed(tmp_path: Path) -> None:
    job = models.MIXTURE
    engine = start(job, DISK, tmp_path / "refused", device_memory=room_for(job, 2))
    losses = [train_step(engine, job, 0)]
    for what, (action, message) in REFUSED.items():
        with pytest.raises(UsageError, match=message):
            action(engine.module)
            raise AssertionError(what)
    losses += [train_step(engine, job, step) for step in range(1, job.steps)]
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="its engine was destroyed"):
        offload.safe_get_full_fp32_param(engine.module.embedding.weight)
    assert losses == run(job, DISK, tmp_path / "plain").losses


def test_a_budget_error_where_the_ram_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(models.SHALLOW, DISK, tmp_path)
    weight = engine.module.lm_head.weight
    testing.replace(monkeypatch, "memory.free", lambda: 4 * weight.numel() - 1)
    with pytest.raises(BudgetError, match=r"transformer\.wte\.weight takes .* of RAM"):
        offload.safe_get_full_optimizer_state(weight, "exp_avg")
    with pytest.raises(BudgetError, match="of RAM"):
        offload.safe_set_full_grad(weight, torch.zeros(weight.shape))
    monkeypatch.undo()
    engine.destroy(remove=True)


# --------------------------------------------------------------------------------------------------
# DeepSpeed's safe_get_* and safe_set_* agree on several ranks: each gives its shard, or all the same.


def rows_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    rank, size = rank_and_size()
    ids = models.tokens(step, micro, (4, 16), 61).chunk(size)[rank]
    return models.token_loss(model(ids), ids)


ROWS = MIXTURE._replace(loss=rows_loss)


def different_places(folder: Path) -> list[str]:
    """What is said where the ranks look at different things, or one looks while the other steps."""
    engine = start_rank(ROWS, DISK, folder)
    rank, _ = rank_and_size()
    messages = []
    weight = engine.module.embedding.weight if rank else engine.module.scale
    with pytest.raises(RankError) as error:
        offload.safe_get_full_fp32_param(weight)
    messages.append(str(error.value))
    backward(engine, ROWS, 0)
    with pytest.raises(RankError) as error:
        if rank:
            offload.safe_set_full_grad(engine.module.scale, torch.ones(()))
        else:
            engine.step()
    messages.append(str(error.value))
    engine.destroy(remove=True)
    return messages


def test_ranks_at_different_places(ranks: RankPool, tmp_path: Path) -> None:
    for messages in ranks.run(different_places, tmp_path):
        assert "with different values of parameter: rank 0 with 'scale', rank 1 with 'embedding.weight'" in messages[0]
        assert "rank 0 is at step(); rank 1 accesses a state of a parameter" in messages[1]


def _is_divided(engine: offload.Engine, name: str) -> bool:
    """Returns True if this rank stores a part of a parameter, and not all of it."""
    inspected = testing.inspect(engine)
    for layout, part in zip(inspected.layouts, inspected.trainable, strict=True):
        for segment in layout.segments:
            if segment.name == name:
                return 0 < len(range(max(segment.start, part.start), min(segment.stop, part.stop))) < segment.numel
    raise AssertionError(f"no unit contains {name}")


def values_of_each(folder: Path) -> list[float]:
    """Each rank sets other values of a parameter of which both hold a part."""
    engine = start_rank(ROWS, DISK, folder)
    rank, _ = rank_and_size()
    weight = engine.module.blocks[2][2].weight
    assert _is_divided(engine, "blocks.2.2.weight")
    offload.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 1.0 + rank), "exp_avg")
    offload.safe_set_full_grad(weight, torch.full(weight.shape, 3.0 + rank))
    values = [offload.safe_get_full_optimizer_state(weight, "exp_avg"), offload.safe_get_full_grad(weight)]
    engine.destroy(remove=True)
    return [number for value in values if value is not None for number in value.unique().tolist()]


def test_the_values_of_the_first_rank_count(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(values_of_each, tmp_path) == [[1.0, 3.0], [1.0, 3.0]]


def shards_and_complete(job: Job, folder: Path) -> tuple[list[Found], list[Found], Found]:
    """Each rank's parts in a round, beside the whole; and the whole, which doubled with every part."""
    engine = start_rank(job, DISK, folder)
    looks: list[Found] = []

    def look() -> Found:
        looks.append(everything_local(engine.module))
        return everything(engine.module)

    complete = a_round(engine, job, look)
    backward(engine, job, 3)
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    expected = {
        name: value if value is None or name.split()[0] in frozen else value * 2
        for name, value in everything(engine.module).items()
    }
    for parameter in engine.module.parameters():
        for get, put in LOCAL.values():
            mine = get(parameter)
            if mine is not None and parameter.requires_grad:
                put(parameter, mine * 2)
    doubled = everything(engine.module)
    assert differences(doubled, expected) == []
    engine.step()
    engine.destroy(remove=True)
    return looks, complete, doubled


class OneBlock(Mixture):
    """Each parameter is read in so many ways here that one block, with a frozen weight, is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[1:2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.works(AREA, "`safe_get_local_*`, `safe_set_local_*`", "right")
def test_the_shards_of_all_ranks_are_complete(dtype: str, ranks: RankPool, tmp_path: Path) -> None:
    job = ROWS._replace(model=OneBlock, dtype=dtype)
    (rank0, complete, doubled), (rank1, _, also) = ranks.run(shards_and_complete, job, tmp_path / "parts")
    lengths = set()
    for first, second, expected in zip(rank0, rank1, complete, strict=True):
        for name, value in expected.items():
            mine, theirs = first[name], second[name]
            if value is None:
                assert mine is None and theirs is None
            else:
                assert mine is not None and theirs is not None
                lengths.add((len(mine) > 0, len(theirs) > 0))
                assert torch.equal(torch.cat([mine, theirs]), value.flatten()), name
    assert lengths >= {(True, True), (True, False), (False, True)}
    assert differences(doubled, also) == []


def alone_and_wrong(folder: Path) -> list[str]:
    """A rank that looks at its parts alone, and one that sets a part of another length."""
    engine = start_rank(ROWS, DISK, folder)
    rank, _ = rank_and_size()
    weight = engine.module.blocks[2][2].weight
    if rank:
        assert offload.safe_get_local_fp32_param(weight) is not None
        assert offload.safe_get_local_optimizer_state(weight, "exp_avg") is not None
    # With an edit that is pending the call waits for the others, who come to it with their forward.
    offload.safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))
    if rank:
        edited = offload.safe_get_local_fp32_param(weight)
        assert edited is not None and bool((edited == 0.25).all())
    backward(engine, ROWS, 0)
    mine = offload.safe_get_local_grad(weight)
    assert mine is not None
    with pytest.raises(OffloadError) as error:
        offload.safe_set_local_grad(weight, mine[rank:])
    same = offload.safe_get_local_grad(weight)
    assert same is not None and torch.equal(mine, same)
    engine.step()
    engine.destroy(remove=True)
    return [str(error.value)]


def test_a_single_rank_and_a_shard_of_another_length_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    (rank0,), (rank1,) = ranks.run(alone_and_wrong, tmp_path)
    assert "values of this rank's shard of the " in rank1 and "got shape" in rank1
    assert "rank 1 could not set a shard of a parameter, so no rank did: UsageError: values of" in rank0
