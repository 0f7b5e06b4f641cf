"""A plan of a run whose frozen weights are in 4 or 8 bits has the bytes of that run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload import testing
from offload.cli.main import app
from offload.layout.frozen import stored_as_blocks
from offload.layout.tiers import Partitions
from offload.planner.activations import Load
from offload.planner.hardware import described
from offload.planner.memory import Room, settle
from offload.planner.model_shape import Shape, from_training
from offload.planner.step_time import predict
from offload.states import State, Tier
from tests.support import models
from tests.support.frozen_blocks import deep
from tests.support.model_folders import make_folder
from tests.support.oracle import config, start

DISK = ("nvme", "nvme")
JOB = models.LORA._replace(dtype="bf16", model=deep)
ROOM = Room(host=8 << 30, device=0, disk=1 << 40)


def shape_of(form: str | None) -> Shape:
    return from_training(JOB.model(), 16, torch.bfloat16, (), {"use_cache": False}, form)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_bytes_are_those_of_the_run(form: str, tmp_path: Path) -> None:
    shape = shape_of(form)
    memory = settle(shape.layouts, config(JOB, DISK, tmp_path, frozen=form), ROOM)
    engine = start(JOB, DISK, tmp_path, frozen=form)
    inspected = testing.inspect(engine)
    assert shape.layouts == inspected.layouts
    assert inspected.store is not None
    assert memory.stored == inspected.store.spec.nbytes
    assert (memory.host, memory.device) == (engine.host_memory, engine.device_memory)
    assert shape.parameters == engine.parameter_count == sum(p.numel() for p in JOB.model().parameters())
    engine.destroy(remove=True)


def test_a_step_reads_the_codes_alone() -> None:
    read = {}
    for form in (None, "int8", "nf4"):
        shape = shape_of(form)
        memory = settle(shape.layouts, config(JOB, DISK, Path("swap"), frozen=form, device_memory="4MiB"), ROOM)
        machine = replace(described("24GB", 64 << 30), gpu_memory=0)
        read[form] = predict(memory, shape, machine, Load(1)).moved.weights_read
    assert 1.8 < read[None] / read["int8"] < 2.0 and 3.2 < read[None] / read["nf4"] < 3.8


def command(*options: str) -> Any:
    machine = ("--gpu", "24GB", "--ram", "16GB", "--drive", "7GB/s,4GB/s", "--seq-len", "64")
    return CliRunner().invoke(app, ["plan", *machine, *options])


def test_the_command_plans_adapters_over_codes(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", weights=False, hidden_size=128, intermediate_size=512)
    given = ("--model", str(tmp_path / "model"), "--lora", "r=4", "--write", str(tmp_path / "config.json"))
    done = command(*given, "--load-in-4bit")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["offload"]["frozen"] == "nf4" and content["optimizer"]["params"]["lr"] == 2e-4
    stored = {
        option: json.loads(command(*given[:4], option, "--json").stdout)["model"]["parameters"]
        for option in ("--load-in-4bit", "--load-in-8bit")
    }
    assert len(set(stored.values())) == 1, "parameters are counted, not codes"
    assert command(*given[:4], "--config", str(tmp_path / "config.json")).exit_code == 0


WRONG = {
    "--model llama-1b --load-in-4bit": "--load-in-4bit or --load-in-8bit goes with --lora",
    "--model llama-1b --lora r=4 --load-in-4bit --load-in-8bit": "goes with --lora",
    "--parameters 1B --layers 4 --lora r=4": "--lora needs the layers of a model: give --model",
    "--model llama-1b --lora r=0": "--lora r must be",
}


@pytest.mark.parametrize("options", WRONG)
def test_options_of_the_command_that_do_not_fit_are_refused(options: str) -> None:
    refused = command(*options.split())
    assert refused.exit_code == 2 and WRONG[options] in refused.output, refused.output


def test_a_unit_in_codes_comes_and_goes_on_its_own_device() -> None:
    """Its partition stays there, and its values are made for each use."""
    parts = Partitions(
        nbytes=({State.WEIGHT: 4096}, {State.WEIGHT: 4096}),
        trainable_numel=(0, 0),
        unit_nbytes=(4096, 12288),
        largest_gradient=0,
        gradient_dtype=torch.bfloat16,
        alone=True,
    )
    assert [parts.device_resident(unit, {State.WEIGHT: Tier.DEVICE}) for unit in (0, 1)] == [True, False]
    assert stored_as_blocks(JOB.model(), None, torch.bfloat16) == {}
