"""A plan of several GPUs counts the bytes that ranks send, and divides states as ZeRO's stages do."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import Room, settle
from offload.planner.model_shape import from_count
from offload.planner.ranks import Cluster, RanksPlan, fastest, gathers, gradients_of, plan_stages, weights_of
from offload.sizes import GIB
from tests.pages import claims_page
from tests.ranks.test_ranks import Chain, chain_loss
from tests.support.oracle import Job, config
from tests.support.ranks.rank_pool import RankPool, start

JOB = Job(Chain, chain_loss, steps=3, accumulation=4)


def sent_in_the_last_step(job: Job, options: dict[str, int], folder: Path) -> list[tuple[int, int]]:
    """Returns what this rank sends of weights, and of gradients: collectives and bytes."""
    engine = start(job, ("none", "cpu"), folder, schedule="micro_batch_major", **options)
    before = engine.communication()
    for step in range(job.steps):
        before = engine.communication()
        engine.accumulate(range(job.accumulation), functools.partial(job.loss, engine, step))
        engine.step()
    sent = engine.communication().since(before)
    engine.destroy(remove=True)
    return [tuple(sent.weights), tuple(sent.gradients)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("room", [{}, {"device_memory": 1 << 20}], ids=["by default", "room for all"])
def test_the_planned_bytes_are_those_that_two_ranks_send(
    stage: int, room: dict[str, int], ranks: RankPool, tmp_path: Path
) -> None:
    job = JOB._replace(stage=stage, shard_size=1 if stage == 0 else -1)
    model, shards = job.model(), 1 if stage == 0 else 2
    layouts, units = layouts_of(model, find_units(model), shards), range(8)
    content = config(job, ("none", "cpu"), tmp_path, schedule="micro_batch_major", **room)
    memory = settle(layouts, content, Room(1 << 34, 0, None), job.accumulation, shards, replicas=2 // shards)
    uses = [*units, *reversed(units)] * job.accumulation
    planned = [weights_of(memory, uses, 2), gradients_of(memory.parts, layouts, job.accumulation, 2)]
    sent = ranks.run(sent_in_the_last_step, job, room, tmp_path)[0]
    assert planned[1] == sent[1]
    if stage == 3 and not room:  # units come and go, and what the engine brings ahead may leave before its use
        assert planned[0][1] <= sent[0][1] <= 1.1 * planned[0][1]
    else:
        assert planned[0] == sent[0]


def test_the_unit_whose_next_use_is_furthest_leaves() -> None:
    forward_and_backward = [0, 1, 2, 3, 3, 2, 1, 0]
    assert gathers(forward_and_backward, [1] * 4, 4) == [0, 1, 2, 3]
    assert gathers(forward_and_backward, [1] * 4, 1) == [0, 1, 2, 3, 2, 1, 0]
    assert len(gathers(forward_and_backward, [1] * 4, 2)) == 6


def planned(cluster: Cluster, billions: int = 7, ram: int = 512) -> dict[int, RanksPlan]:
    machine = described("A100 80GB", ram * GIB, [parse_drive("7GB/s,4GB/s")])
    load = Load(1, 1, chunked_loss=True)
    return plan_stages(from_count(billions * 10**9, 32, 2048), machine, load, cluster, batch=2, accumulation=4)


def test_stages_divide_states_and_gradients_and_machines_share_a_link() -> None:
    one = planned(Cluster(8, link=300e9))
    assert 0 not in one, "7B in fp32 states on each of 8 GPUs has no room in 512 GB"
    weights = 2 * 7e9 * 7 / 8
    assert one[2].traffic.weights.nbytes == pytest.approx(weights, rel=0.02)
    assert one[2].traffic.gradients.nbytes == pytest.approx(4 * weights, rel=0.02)
    assert one[1].traffic.gradients.nbytes == pytest.approx(2 * weights, rel=0.02), "sums in fp32, once a step"
    two = planned(Cluster(8, 2, 25e9))
    assert two[2].device < one[2].device and two[2].tokens == 2 * one[2].tokens
    assert two[2].busy["links"] > one[2].busy["links"] and two[2].busy["compute"] <= one[2].busy["compute"] * 1.01
    assert fastest(two).seconds == max(fastest(two).busy.values())


def test_tensor_and_pipeline_parallelism_divide_what_a_gpu_has_and_sends() -> None:
    whole, divided = planned(Cluster(8, 2, 25e9))[2], planned(Cluster(8, 2, 25e9, tensor=4, pipeline=2))[2]
    assert divided.traffic.weights.nbytes < whole.traffic.weights.nbytes / 8
    layer_inputs = 32 * 4 * 4 * 2 * 2048 * 2 * 4096 * 2 * 3 // 4 // 2  # 4 all-reduces a layer of hidden 4,096, about
    assert divided.traffic.tensor.nbytes == pytest.approx(layer_inputs, rel=0.1)
    assert divided.tokens == whole.tokens // 8


def test_the_command_prints_each_stage_in_few_lines() -> None:
    arguments = ["plan", "llama-7b", "--gpu", "A100 80GB", "--ram", "512GB", "--gpus", "8", "--nodes", "2"]
    arguments += ["--link", "25GB/s", "--batch-size", "2", "--accumulation", "2"]
    done = CliRunner().invoke(app, arguments)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and len(lines) <= 15 and max(map(len, lines)) <= 80
    assert {line.split("  ")[0] for line in lines} >= {"fits", "speed", "step", "limit", "stage 0 does not fit"}
    content = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [plan["stage"] for plan in content["stages"]] == [1, 2, 3] and content["cluster"]["nodes"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "2"], "describe several GPUs: give --gpus too"),
        (["--gpus", "0"], "expected --gpus of at least 1, got 0"),
        (["--gpus", "8", "--tensor", "3"], "cannot be divided by --tensor 3"),
        (["--gpus", "8", "--tensor", "8"], "this division leaves one"),
        (["--gpus", "8", "--details"], "has no tables, writes and measures nothing"),
        (["--gpus", "8", "--activations", "cpu"], "is made without --activations"),
        (["--gpus", "8", "--batch-size", "4096"], "does not fit on 1 machine of 8 GPUs"),
    ],
)
def test_wrong_options_are_refused_by_name(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["plan", "llama-7b", "--gpu", "A100 80GB", "--ram", "512GB", *options])
    assert done.exit_code == 2 and words in " ".join(done.stderr.split()), done.stderr


def test_the_page_of_claims_has_the_numbers_of_the_planner() -> None:
    page = claims_page.PAGE.read_text(encoding="utf-8")
    small = claims_page.MODELS[4]
    for line in (*map(claims_page.states_row, (1, 8, 64)), claims_page.row(*small), claims_page.larger()):
        assert line in page, "run: python -m tests.pages.claims_page"
