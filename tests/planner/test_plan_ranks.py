"""A plan of several GPUs counts the bytes that ranks send, and divides states as ZeRO's stages do."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import ConfigError
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import Room, settle
from offload.planner.model_shape import BY_BLOCKS, Shape, from_count, from_training
from offload.planner.ranks import (
    Cluster,
    RanksPlan,
    activations_of,
    fastest,
    gathers,
    gradients_of,
    plan_stages,
    stages_of,
    weights_of,
)
from offload.sizes import GIB
from tests.pages import claims_page
from tests.ranks.test_ranks import Chain, chain_loss
from tests.support import models
from tests.support.oracle import Job, config
from tests.support.ranks import pipelines, tensor_parallel
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


@pytest.mark.sample(2)
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


def saved_nbytes(outputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of this rank that the graphs of `outputs` keep for a backward, without weights."""

    def storage(tensor: Any) -> torch.UntypedStorage:
        local = getattr(tensor, "_local_tensor", tensor)
        return local.untyped_storage()

    known = {storage(weight).data_ptr() for weight in weights}
    nbytes: dict[int, int] = {}
    nodes = [output.grad_fn for output in outputs]
    seen = set(nodes)
    for node in nodes:  # grows
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for tensor in torch.utils._pytree.tree_leaves(saved):
            if isinstance(tensor, torch.Tensor) and (part := storage(tensor)).data_ptr() not in known:
                nbytes[part.data_ptr()] = part.nbytes()
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)
    return sum(nbytes.values())


def kept_by_a_row(job: Job, folder: Path) -> int:
    engine = tensor_parallel.start(job, "autotp", 2, ("none", "none"), folder)
    loss = tensor_parallel.row_loss(engine, 0, 0, 2)
    kept = saved_nbytes([loss], engine.module.parameters())
    engine.backward(loss)
    engine.destroy(remove=True)
    return kept


def numbered() -> pipelines.Layers:
    """A model whose blocks have numbers, which a plan finds."""
    named = pipelines.whole().named_children()
    return pipelines.Layers({name.removeprefix("block"): layer for name, layer in named})


class Whole(torch.nn.Module):
    """The model and its loss, as a plan calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = numbered()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return models.token_loss(self.layers(input_ids), labels)


def kept_by_stages(job: Job, folder: Path) -> tuple[int, int]:
    plan = pipelines.Plan()
    engine = pipelines.start(job, plan, ("none", "none"), folder)
    schedule, stage, most = pipelines.schedule_of(engine, job, plan), engine.module.indices[0], [0]
    run = schedule._stage.forward_one_chunk

    def counted(*args: Any, **more: Any) -> Any:
        done = run(*args, **more)
        outputs = [tensor for tensors, _ in schedule._stage.fwd_cache.values() for tensor in tensors]
        most[0] = max(most[0], saved_nbytes(outputs, engine.module.parameters()))
        return done

    schedule._stage.forward_one_chunk = counted
    pipelines.run(schedule, pipelines.mine(job, plan, 0), [stage], 1)
    engine.step()
    engine.destroy(remove=True)
    return stage, most[0]


def test_the_planned_activations_are_those_that_two_ranks_keep(ranks: RankPool, tmp_path: Path) -> None:
    """The tensors in the graphs of forwards: of one layer on two ranks, and of the micro-batches in each stage."""
    job = Job(tensor_parallel.qwen3, tensor_parallel.one_loss, accumulation=1)
    shape, load = from_training(job.model(), 16, torch.float32, BY_BLOCKS, {}), Load(4, 4)

    def planned(shape: Shape, cluster: Cluster) -> list[int]:
        return [
            load.batch * of.in_flight * sum(use.saved for use in part.uses)
            for part, of in stages_of(shape, load, cluster)
        ]

    (whole,), (divided,) = planned(shape, Cluster(1)), planned(shape, Cluster(2, tensor=2))
    assert ranks.run(kept_by_a_row, job, tmp_path / "row") == [pytest.approx(divided, rel=0.01)] * 2
    assert divided < 0.75 * whole
    first, last = planned(from_training(Whole(), 16, torch.float32, BY_BLOCKS, {}), Cluster(2, pipeline=2))
    logits = 4 * 16 * pipelines.VOCABULARY * 4  # that the loss keeps, which torch's schedule computes after the forward
    kept = dict(ranks.run(kept_by_stages, pipelines.JOB._replace(model=numbered), tmp_path / "stages"))
    assert kept == {0: pytest.approx(first, rel=0.01), 1: pytest.approx(last - logits, rel=0.01)}


def test_the_first_stage_has_most_activations_and_needs_a_block() -> None:
    """Four micro-batches of four blocks each, and buffers for what eight micro-batches receive."""
    shape, load = from_count(7 * 10**9, 32, 2048), Load(1, 8)
    alone, first = activations_of(shape, load, Cluster(4)), activations_of(shape, load, Cluster(4, pipeline=4))
    saved = sum(use.saved for use in shape.uses[1:9])
    assert first > 4 * saved > alone / 2
    assert activations_of(shape, load, Cluster(4, tensor=4)) < 0.6 * alone
    with pytest.raises(ConfigError, match=r"--pipeline is 16, and 7B in 8 layers has 8 repeated blocks"):
        plan_stages(
            from_count(7 * 10**9, 8, 2048), described("A100 80GB", 512 * GIB, []), load, Cluster(32, pipeline=16)
        )


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
    plans = planned(Cluster(8, link=300e9))
    assert 0 not in plans, "7B in fp32 states on each of 8 GPUs has no room in 512 GB"
    weights = 2 * 7e9 * 7 / 8
    assert plans[2].traffic.weights.nbytes == pytest.approx(weights, rel=0.02)
    assert plans[2].traffic.gradients.nbytes == pytest.approx(4 * weights, rel=0.02)
    assert plans[1].traffic.gradients.nbytes == pytest.approx(2 * weights, rel=0.02), "sums in fp32, once a step"
    two = planned(Cluster(8, 2, 25e9))
    assert two[2].device < plans[2].device and two[2].tokens == 2 * plans[2].tokens
    assert two[2].busy["links"] > plans[2].busy["links"] and two[2].busy["compute"] <= plans[2].busy["compute"] * 1.01
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
