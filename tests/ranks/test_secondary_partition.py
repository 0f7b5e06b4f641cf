"""Ranks of a node keep a secondary partition of the weights (`zero_hpz_partition_size`) and gather again from it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.config import load_config
from offload.distributed.process_group import Communication, Sent
from offload.errors import BudgetError, ConfigError
from offload.layout.flat_layout import layouts_of
from offload.layout.tiers import NodeShards, check_room
from offload.layout.units import find_units
from offload.planner.memory import Memory, Room, settle
from offload.sizes import GIB, align_up
from tests.support import models
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, config, train_step, weights_of
from tests.support.ranks import sequence_parallel as sp
from tests.support.ranks.rank_jobs import JOBS, language_rows_loss, my_rows
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start

MEMORY, HOST, DISK = ("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")
JOB = JOBS["gpt2"]._replace(steps=2, lr=3e-4, dtype="bf16")
NODE = 2
"""Ranks of a node, of which four ranks are two."""


def no_room(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> str:
    """Returns the error of a start with no room on the device for a whole table of words."""
    with pytest.raises(BudgetError) as caught:
        start(job, placement, folder, device_memory=4096, vocabulary="whole", **options)
    return str(caught.value)


def least(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> int:
    """Returns the bytes of the smallest device memory that works."""
    match = re.search(r"least that works is .*?\((\d+) bytes\)", no_room(job, placement, folder, **options))
    assert match is not None
    return int(match[1])


# -- bits ---------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """What a rank has in the end."""

    result: Result
    sent: Communication
    notices: tuple[str, ...]


def train_in_little_room(job: Job, placement: tuple[str, str], folder: Path, room: int, **options: Any) -> Trained:
    """Trains with `room` bytes above the least, so that units leave the device between their uses."""
    engine = start(job, placement, folder, device_memory=least(job, placement, folder, **options) + room, **options)
    losses, norms = [], []
    for step in range(job.steps):
        losses.append(engine.mean(train_step(engine, job, step)))
        norms.append(engine.get_global_grad_norm() or 0.0)
    result = Result(losses, norms, weights_of(engine))
    summary = Trained(result, engine.communication(), tuple(map(str, engine.notices)))
    engine.destroy(remove=True)
    return summary


def train_with(job: Job, placement: tuple[str, str], folder: Path, options: dict[str, Any]) -> Trained:
    return train_in_little_room(job, placement, folder, 1 << 16, **options)


ADAPTERS = Job(models.lora, language_rows_loss, steps=2, accumulation=2, lr=3e-4, dtype="bf16")
SHARED = Job(sp.llama, functools.partial(sp.grouped_loss, size=2), steps=2, accumulation=2, lr=3e-4, sequence=2)
RUNS: dict[str, tuple[Job, tuple[str, str], dict[str, Any]]] = {
    "accumulation": (JOB._replace(accumulation=2), HOST, {}),
    "in memory": (JOB._replace(dtype="fp32"), MEMORY, {}),
    "frozen weights": (JOBS["adapters"]._replace(steps=2, dtype="bf16"), DISK, {}),
    "blocks computed again": (JOBS["recomputed"]._replace(steps=2), DISK, {}),
    "experts": (JOBS["mixture"]._replace(steps=2), HOST, {}),
    "codes": (JOB._replace(quantized="weights nontrainable_weights gradients"), DISK, {}),
    "adapters on frozen weights in 4 bits": (ADAPTERS, DISK, {"frozen": "nf4"}),
    "adapters on frozen weights in 8 bits": (ADAPTERS, HOST, {"frozen": "int8"}),
    "shared sequences": (SHARED, HOST, {}),
}


@pytest.mark.sample(1)
@pytest.mark.works("Several ranks", "a secondary partition in a node (`zero_hpz_partition_size`), in any tier", "right")
@pytest.mark.works(
    "Several ranks", "a secondary partition beside adapters, frozen weights in 4 or 8 bits, shared sequences", "right"
)
@pytest.mark.parametrize("name", RUNS)
def test_a_secondary_partition_changes_no_bit(name: str, four: RankPool, tmp_path: Path) -> None:
    job, placement, options = RUNS[name]
    plain = four.run(train_with, job, placement, tmp_path / "plain", options)
    kept = four.run(train_with, job._replace(node=NODE), placement, tmp_path / "kept", options)
    assert any("each rank keeps 1/2 of all weights on its device" in notice for notice in kept[0].notices)
    for (result, sent, _), (expected, without, _) in zip(kept, plain, strict=True):
        assert_same(result, expected)
        assert sent.node_weights.collectives and not without.node_weights.collectives
        assert sent.weights.nbytes < without.weights.nbytes


def change_all(job: Job, folder: Path) -> tuple[Result, Sent]:
    """Evaluates, edits, loads and sleeps between the uses of one and the same weights.

    A job with nodes does so on a device whose copies are late.
    """
    from tests.support.devices.late_device import LateDevice, use_device

    device = LateDevice(rank_and_size()[0], 0.5)
    with pytest.MonkeyPatch.context() as patch:
        if job.node > 1:
            use_device(patch, device)
        result = changed_between_uses(job, folder)
    assert device.broken == []
    return result


def changed_between_uses(job: Job, folder: Path) -> tuple[Result, Sent]:
    engine = start(job, DISK, folder, device_memory=least(job, DISK, folder) + (1 << 16))
    name = "transformer.h.1.mlp.c_fc.weight"
    losses: list[float] = []

    def look() -> None:
        engine.eval()
        with torch.no_grad():
            losses.append(engine.mean(float(job.loss(engine, 9, 0))))
        engine.train()

    def edit(value: float) -> None:
        parameter = engine.module.get_parameter(name)
        with offload.gathered(parameter, modify=True):
            if rank_and_size()[0] == 3:
                parameter.data.view(-1)[7] = value
        look()

    train_step(engine, job, 0)
    look()
    edit(3.0)
    engine.save_checkpoint(str(folder / "saved"))
    engine.backward(job.loss(engine, 1, 0))
    edit(-2.0)  # between the micro-batches of a step
    engine.zero_grad()
    offload.safe_set_full_fp32_param(engine.module.get_parameter(name), torch.full((32, 128), 0.125))
    look()
    engine.load_checkpoint(str(folder / "saved"))
    look()
    engine.sleep(host=True)
    look()
    train_step(engine, job, 1)
    engine.module.load_state_dict({key: value * 0.5 for key, value in engine.module.state_dict().items()})
    look()
    result = Result(losses, [], weights_of(engine)), engine.communication().node_weights
    engine.destroy(remove=True)
    return result


@pytest.mark.slow
def test_weights_that_change_between_two_uses_are_gathered_over_all_ranks(four: RankPool, tmp_path: Path) -> None:
    plain = four.run(change_all, JOB, tmp_path / "plain")
    kept = four.run(change_all, JOB._replace(node=NODE), tmp_path / "kept")
    for (result, within), (expected, _) in zip(kept, plain, strict=True):
        assert_same(result, expected)
        assert within.collectives
    losses = plain[0][0].losses
    assert len(set(losses)) == len(losses) - 2, "only the load, and what follows the sleep, bring known weights"


# -- bytes --------------------------------------------------------------------------------------------

LAYERS = 5


class Stack(nn.Module):
    """Layers of one size, each of which a backward needs again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.requires_grad_()
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def stack_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    torch.manual_seed(step * 10 + micro)
    return model(my_rows(torch.randn(4, 64))).square().mean()


class Step(NamedTuple):
    sent: Communication
    nbytes: int
    """Of all weights, in fp32."""
    unit_nbytes: int


def second_step(job: Job, folder: Path) -> Step:
    """Trains two steps with room for one unit."""
    engine = start(job, HOST, folder, device_memory=least(job, HOST, folder))
    before = engine.communication()
    for step in range(2):
        before = engine.communication()
        train_step(engine, job, step)
    sizes = [layout.numel * 4 for layout in testing.inspect(engine).layouts]
    traffic = Step(engine.communication().since(before), sum(sizes), max(sizes))
    engine.destroy(remove=True)
    return traffic


@pytest.mark.slow
def test_a_step_gathers_each_weight_over_all_ranks_once(four: RankPool, tmp_path: Path) -> None:
    """ZeRO++ (arXiv 2306.10209, section 3.2): 2 W in place of 3 W between nodes; W for each micro-batch more without.

    A gather of W bytes over n ranks makes each send (n - 1) / n of them, and so does the reduction of gradients; one
    within a node of s ranks makes it send (s - 1) / s. A backward finds the last unit of the forward on the device, and
    so does each later forward the first.
    """
    accumulation = 2
    job = Job(Stack, stack_loss, accumulation=accumulation, clip=0.0)
    gathers = 2 * LAYERS - 1 + (accumulation - 1) * (2 * LAYERS - 2)
    for sent, nbytes, unit in four.run(second_step, job, tmp_path):
        assert sent.weights == Sent(gathers, gathers * unit * 3 // 4) and sent.node_weights == Sent()
        assert sent.gradients == Sent(LAYERS * accumulation, nbytes * accumulation * 3 // 4)
    for sent, nbytes, unit in four.run(second_step, job._replace(node=NODE), tmp_path):
        assert sent.weights == Sent(LAYERS, nbytes * 3 // 4)
        assert sent.node_weights == Sent(gathers - LAYERS, (gathers - LAYERS) * unit // 2)
        assert sent.gradients == Sent(LAYERS * accumulation, nbytes * accumulation * 3 // 4)


# -- memory -------------------------------------------------------------------------------------------


def test_a_plan_counts_it() -> None:
    """A plan for four GPUs has it on each; one for a single node does not."""
    model = JOB.model()

    def planned(node: int) -> Memory:
        content = config(JOB._replace(node=node), HOST, Path("unused"))
        layouts = layouts_of(model, find_units(model), 4)
        return settle(layouts, content, Room(host=8 * GIB, device=8 * GIB, disk=None), world_size=4)

    numel = sum(layout.numel for layout in planned(1).request.layouts)
    without, kept = planned(1).placement, planned(NODE).placement
    assert kept.device_nbytes - without.device_nbytes == align_up(numel * 2 // NODE)
    assert kept.device_need.least - without.device_need.least == align_up(numel * 2 // NODE)
    assert planned(4).placement == without


def test_a_device_without_room_for_it_is_an_error_that_names_the_key() -> None:
    kept = NodeShards(8, 16, (1 << 30,))
    check_room(kept, 2 << 30, 2 << 30)
    check_room(NodeShards(), 3 << 30, 2 << 30)
    with pytest.raises(BudgetError, match=r"zero_hpz_partition_size is 8, so each rank keeps 1/8 .* 2.0 GiB is free"):
        check_room(kept, 3 << 30, 2 << 30)


# -- runs ---------------------------------------------------------------------------------------------


def go_on(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    """Trains one step more of a run on disk, and returns the weights."""
    engine = start(job, DISK, folder, resume="auto", device_memory=least(job, DISK, folder) + (1 << 16))
    train_step(engine, job, engine.global_steps)
    weights = weights_of(engine)
    engine.destroy()
    return weights


@pytest.mark.slow
@pytest.mark.works("Several ranks", "another `zero_hpz_partition_size` at a resume", "right")
def test_a_run_resumes_with_nodes_and_without(four: RankPool, tmp_path: Path) -> None:
    expected = [four.run(go_on, JOB, tmp_path / "plain") for _ in range(3)]
    for node, weights in zip((NODE, 1, NODE), expected, strict=True):
        for left, right in zip(four.run(go_on, JOB._replace(node=node), tmp_path / "nodes"), weights, strict=True):
            assert_same_tensors(left, right)


# -- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"stage": 2, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size is 2 in stage 2"),
        ({"stage": 3, "zero_hpz_partition_size": 2, "mics_shard_size": 2}, "leave one of them out"),
        ({"stage": 3, "zero_hpz_partition_size": 0}, "zero_hpz_partition_size"),
    ],
)
def test_a_config_that_contradicts_itself_is_an_error(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"zero_optimization": block})
