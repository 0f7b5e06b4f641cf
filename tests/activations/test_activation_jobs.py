"""Training with moved inputs keeps its bits: every dtype, module and library, several ranks and engines, a kill."""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload import testing
from offload.swapper.memory.device import Device
from tests.models.test_module_kinds import AREAS, Case
from tests.support import models
from tests.support.modules.checkpointed import JOB, MEMORY, Stack, batch, small_inputs_move
from tests.support.modules.checkpointed import TIERS as EVERY_TIER
from tests.support.modules.module_trees import TREES, Tree, job_of, room
from tests.support.oracle import (
    Job,
    Result,
    accumulated_step,
    assert_same,
    config,
    kill_and_resume,
    room_for,
    run,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, train
from tests.support.sampling import examples

AREA = "Activation checkpointing"
DISK = ("nvme", "nvme")
TIERS = ("device", "cpu", "nvme")


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


def _same(job: Job, folder: Path, tier: str, placement: tuple[str, str] = DISK, **options: Any) -> None:
    plain = run(job, MEMORY, folder / "plain")
    assert_same(plain, run(job, placement, folder / tier, activations=tier, **options))


# -- jobs ---------------------------------------------------------------------------------------------


def autocast_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    kind = "cpu" if not isinstance(model, offload.Engine) else model.device.type
    with torch.autocast(kind, dtype=torch.bfloat16):
        loss: torch.Tensor = model(batch(step, micro)).float().square().mean()
        return loss


TRAINING = {
    "accumulation over three micro-batches": JOB._replace(accumulation=3),
    "bf16": JOB._replace(dtype="bf16"),
    "fp16 with a loss scale": JOB._replace(dtype="fp16", accumulation=2),
    "torch's autocast": JOB._replace(loss=autocast_loss),
    "LoRA by peft": models.LORA,
    "dropout, GPT-2": models.SHALLOW_DROPOUT._replace(accumulation=2),
    "Lion": JOB._replace(optimizer="Lion"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in TRAINING]
)
def test_training_keeps_its_bits(name: str, tier: str, tmp_path: Path) -> None:
    job = TRAINING[name]._replace(steps=3)
    _same(job, tmp_path, tier, device_memory=room_for(job, 3))


class Attentions(TorchDispatchMode):
    """Counts the kernels of attention that run in a forward or a recomputation."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_scaled_dot_product_" in function.name() and "backward" not in function.name()
        return function(*args, **kwargs or {})


@pytest.mark.cpu_only("the device of tests has no kernel of attention")
@pytest.mark.works(AREA, "attention that is kept, and not computed again (`keep_attention`)", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_that_is_kept_runs_once(dtype: str, tmp_path: Path) -> None:
    job = Job(models.llama, models.language_loss, steps=2, accumulation=2, dtype=dtype)
    plain = run(job, MEMORY, tmp_path / "plain", accumulated_step)
    counts = []
    for placement, keep in ((MEMORY, False), (MEMORY, True), (DISK, True)):
        with Attentions() as attentions:
            folder = tmp_path / f"{placement[0]} {keep}"
            kept = run(job, placement, folder, accumulated_step, activations="device", keep_attention=keep)
        assert_same(plain, kept)
        counts.append(attentions.count)
    assert counts[0] == 2 * counts[1] == 2 * counts[2] > 0
    # Without the mode that counts, micro-batches take turns.
    assert_same(plain, run(job, DISK, tmp_path / "turns", accumulated_step, activations="cpu", keep_attention=True))


class CompiledStack(Stack):
    """Each block is compiled by itself."""

    depth = 3

    def block(self, index: int) -> nn.Module:
        block = super().block(index)
        block.compile(backend="aot_eager")
        return block


class CompiledByFunction(CompiledStack):
    def block(self, index: int) -> nn.Module:
        compiled: Any = torch.compile(Stack.block(self, index), backend="aot_eager")
        return compiled


COMPILED = {"`block.compile()`": CompiledStack, "`torch.compile(block)`": CompiledByFunction}


@pytest.mark.slow
@pytest.mark.cpu_only("the compiler has no code for another device of tests")
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in COMPILED]
)
def test_compiled_blocks_keep_their_bits(name: str, tier: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    try:
        _same(JOB._replace(model=COMPILED[name]), tmp_path, tier)
    finally:
        torch.compiler.reset()


# -- several ranks, a kill ----------------------------------------------------------------------------


def _on_a_rank(job: Job, folder: Path, tier: str) -> list[Result]:
    patch = pytest.MonkeyPatch()
    with patch.context() as within:
        small_inputs_move(within)
        plain = train(job, DISK, folder / "plain")
        return [plain, train(job, DISK, folder / tier, activations=tier)]


@pytest.mark.slow
@pytest.mark.cpu_only("the ranks are processes of the CPU")
@pytest.mark.works(AREA, "two ranks, each with inputs of its own", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["gpt2", "mixture"])
def test_two_ranks_keep_their_bits(name: str, tier: str, ranks: RankPool, tmp_path: Path) -> None:
    job = JOBS[name]._replace(steps=3)
    for plain, moved in ranks.run(_on_a_rank, job, tmp_path, tier):
        assert_same(plain, moved)


def _with_and_without_partitions(job: Job, folder: Path) -> list[Result]:
    results = []
    for keys in ({}, {"partition_activations": True}):
        engine = _with_keys(job, folder, **keys)
        results.append(trained(engine, job))
        engine.destroy(remove=True)
    return results


@pytest.mark.cpu_only("the ranks are processes of the CPU")
@pytest.mark.works(AREA, "`partition_activations` on two data-parallel ranks, which have nothing to divide", "right")
def test_data_parallel_ranks_have_no_input_to_partition(ranks: RankPool, tmp_path: Path) -> None:
    for without, divided in ranks.run(_with_and_without_partitions, JOBS["gpt2"]._replace(steps=2), tmp_path):
        assert_same(without, divided)


@pytest.mark.slow
@pytest.mark.cpu_only("the processes that are killed are of the CPU")
@pytest.mark.works(AREA, "SIGKILL at random, resume", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_run_that_is_killed_and_resumed_is_the_unbroken_one(tier: str, tmp_path: Path) -> None:
    job = models.SHALLOW_DROPOUT._replace(steps=20)
    unbroken = run(job, DISK, tmp_path / "plain")
    options = {"activations": tier, "activation_memory": None}
    resumed = kill_and_resume(job, DISK, tmp_path / "run", kills=1, late=0.002, **options)
    assert_same(unbroken, resumed)
    assert not list((tmp_path / "run").glob("**/.offload-spill*"))


# -- two engines --------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "two engines, one model's output is the other's input", "right")
@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "device")], ids=str)
def test_two_engines_keep_their_bits(tiers: tuple[str, str], tmp_path: Path) -> None:
    """Their graphs are one; each engine keeps the inputs of its own blocks."""

    def losses(folder: Path, *tiers: str | None) -> list[float]:
        options = [{} if tier is None else {"activations": tier} for tier in tiers]
        engines = [
            start(JOB._replace(seed=seed), MEMORY, folder / str(seed), **options[seed]) for seed in range(len(tiers))
        ]
        losses = []
        for step in range(3):
            loss = engines[1](engines[0](batch(step))).square().mean()
            loss.backward()
            for engine in engines:
                engine.step()
            losses.append(float(loss.detach()) + sum(engine.get_global_grad_norm() for engine in engines))
        for engine in engines:
            engine.destroy(remove=True)
        return losses

    assert losses(tmp_path / "tiers", *tiers) == losses(tmp_path / "plain", None, None)


# -- keys of the block "activation_checkpointing" -----------------------------------------------------


def _with_keys(job: Job, folder: Path, **keys: Any) -> offload.Engine:
    asked = config(job, MEMORY, folder)
    asked["activation_checkpointing"] = keys
    torch.manual_seed(job.seed)
    engine: offload.Engine = offload.initialize(model=job.model(), config=asked)[0]
    return engine


def _calls(engine: offload.Engine) -> Callable[[], list[int]]:
    """Returns a function that gives the calls of each block since the last asking."""
    counts = [0] * len(engine.module.blocks)

    def count(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[index] += 1

        return hook

    for index, block in enumerate(engine.module.blocks):
        block.register_forward_pre_hook(count(index))

    def since() -> list[int]:
        number = list(counts)
        counts[:] = [0] * len(counts)
        return number

    return since


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "DeepSpeed's keys, one by one", "right")
@pytest.mark.parametrize(
    ("keys", "again"),
    [
        ({"number_checkpoints": 3}, 3),
        ({"number_checkpoints": 100}, 8),
        ({"cpu_checkpointing": True}, 8),
        ({"cpu_checkpointing": True, "number_checkpoints": 5}, 5),
        ({"contiguous_memory_optimization": True, "cpu_checkpointing": True}, 8),
        ({"partition_activations": True}, 8),
        ({"synchronize_checkpoint_boundary": True, "number_checkpoints": 8}, 8),
        ({"profile": True, "number_checkpoints": 8}, 8),
        ({"profile": True}, 0),
        ({}, 0),
    ],
    ids=str,
)
def test_a_key_of_deepspeed_does_what_it_says(keys: dict[str, Any], again: int, tmp_path: Path) -> None:
    plain = run(JOB, MEMORY, tmp_path / "plain")
    engine = _with_keys(JOB, tmp_path / "keys", **keys)
    calls = _calls(engine)
    result = trained(engine, JOB)
    assert calls() == [2 * JOB.steps] * again + [JOB.steps] * (8 - again)
    engine.destroy(remove=True)
    assert_same(plain, result)


def test_a_profile_is_a_line_of_each_step_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = _with_keys(JOB, tmp_path, profile=True, number_checkpoints=2)
    for step in range(2):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "forward and recomputation" in line]
    figures = r"blocks\.0 \d+\.\d{4} and \d+\.\d{4}, blocks\.1 \d+\.\d{4} and \d+\.\d{4}"
    assert len(lines) == 2
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(rf"step {number}, seconds of forward and recomputation: {figures}", line)


def test_the_device_is_awaited_at_each_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _with_keys(JOB, tmp_path, synchronize_checkpoint_boundary=True, number_checkpoints=8)
    waits: list[None] = []
    device: Device = testing.inspect(engine).device
    monkeypatch.setattr(device, "synchronize", lambda: waits.append(None))
    loss = JOB.loss(engine, 0, 0)
    assert len(waits) == 2 * 8
    engine.backward(loss)
    assert len(waits) == 3 * 8
    engine.destroy(remove=True)


# -- modules that several names lead to ---------------------------------------------------------------


class Repeats(Stack):
    """One block in several places, of which each is a call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1]] * 4)


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "one block in several places", "right")
@pytest.mark.parametrize("tier", TIERS)
def test_a_block_in_several_places_keeps_the_bits(tier: str, tmp_path: Path) -> None:
    _same(JOB._replace(model=Repeats), tmp_path, tier)


def test_a_copy_of_the_model_is_an_ordinary_model(tmp_path: Path) -> None:
    """`copy.deepcopy` takes the hooks along; they act for the engine's model alone."""
    engine = start(JOB, MEMORY, tmp_path, activations="nvme")
    duplicate = copy.deepcopy(engine.module.blocks[0])
    hidden = torch.ones(2, 64, device=engine.device, requires_grad=True)
    with torch.no_grad():
        expected = engine.module.blocks[0](hidden)
    output = duplicate(hidden)
    output.sum().backward()
    assert torch.equal(output.detach(), expected) and hidden.grad is not None
    assert testing.inspect(engine).activation_bytes == 0
    weights_of(engine)
    engine.destroy(remove=True)


ROWS = [
    pytest.param(case, dtype, tier, id=f"{name}-{dtype}-{tier}")
    for cases in AREAS.values()
    for name, case in cases.items()
    for dtype in case.dtypes
    for tier in EVERY_TIER
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("case", "dtype", "tier"), ROWS)
def test_every_kind_of_module_keeps_its_bits(case: Case, dtype: str, tier: str, tmp_path: Path) -> None:
    job = case.job._replace(dtype=dtype)
    whole = run(job, MEMORY, tmp_path / "whole", **case.options)
    options: dict[str, Any] = {"device_memory": room_for(job, case.units), **case.options, "activations": tier}
    assert_same(whole, run(job, DISK, tmp_path / tier, **options))


PLACES = (MEMORY, ("cpu", "cpu"), DISK)
_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def check(tree: Tree, tier: str, place: tuple[str, str], root: Path) -> None:
    job = job_of(tree)
    folder = Path(tempfile.mkdtemp(dir=root))
    options: dict[str, Any] = (
        {"activations": tier, "device_memory": room(tree)} if place != MEMORY else {"activations": tier}
    )
    try:
        plain = run(job, MEMORY, folder / "plain")
        assert_same(plain, run(job, place, folder / "tier", **options), f"{tier} and {place}")
    finally:
        shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch, with a frozen embedding
@pytest.mark.works(AREA, "random trees of modules, with a tier by lot, two hundred of them", "right")
@pytest.mark.slow
@pytest.mark.timeout(1200)  # shrinking what fails takes longer than finding it
@settings(max_examples=examples(200), deadline=None, derandomize=True, database=None, suppress_health_check=_HEALTH)
@given(tree=TREES, tier=st.sampled_from(EVERY_TIER), place=st.sampled_from(PLACES))
def test_random_trees_keep_their_bits(
    tree: Tree, tier: str, place: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(tree, tier, place, tmp_path_factory.getbasetemp())
