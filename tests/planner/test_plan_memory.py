"""Bytes of a plan are those of the run, in each memory."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.errors import BudgetError, ConfigError
from offload.finetune.model import make_ready
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.losses import chunk_loss_of
from offload.planner import memory, recommend
from offload.planner import memory as planning
from offload.planner.activations import Load, need
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import Memory, Room, settle
from offload.planner.model_shape import BY_BLOCKS, Shape, from_name, from_training
from offload.sizes import GIB, MIB
from offload.swapper.memory.limits import free_host_memory
from offload.torch_internals import TorchDispatchMode, tree_leaves
from tests.support import models
from tests.support.frozen_blocks import deep
from tests.support.oracle import config, start
from tests.support.sampling import examples


class Net(nn.Module):
    def __init__(self, widths: list[int], frozen: list[str]) -> None:
        super().__init__()
        sizes = zip(widths, [*widths[1:], 8], strict=True)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in sizes)
        for layer, still in zip(self.layers, frozen, strict=False):
            layer.requires_grad_(still != "all")
            if still == "weight":
                layer.weight.requires_grad_(False)


class Case(NamedTuple):
    widths: list[int]
    frozen: list[str]
    """What of each layer: "all", "weight" or "nothing"."""
    content: dict[str, Any]
    share: float | None
    """Of what lies between the least host memory and the default; None for the default."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Net(self.widths, self.frozen)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    alike = st.integers(20, 40).map(lambda count: [100] * count)  # so many that gradients spill with little memory
    widths = draw(alike | st.lists(st.sampled_from((3, 64, 200, 500)), min_size=1, max_size=6))
    frozen = [draw(st.sampled_from(("all", "weight", "nothing", "nothing", "nothing"))) for _ in widths]
    frozen[0] = "nothing"
    tiers = st.sampled_from(("none", "cpu", "nvme"))
    content = planning.settings(
        draw(tiers),
        draw(tiers),
        dtype=draw(st.sampled_from(("bf16", "fp32", "fp16"))),
        durability=draw(st.sampled_from(("auto", "none", "step"))),
        accumulation=draw(st.integers(1, 2)),
    )
    content["offload"] |= {"device": "cpu", "speculate": draw(st.booleans())}
    content["optimizer"]["type"] = draw(st.sampled_from(("AdamW", "SGD", "Lion")))
    return Case(widths, frozen, content, draw(st.sampled_from((None, 0.0, 0.1, 0.6, 3.0))))


def plan(case: Case) -> Memory:
    model = case.model()
    layouts, accumulation = layouts_of(model, find_units(model)), case.content["gradient_accumulation_steps"]
    memory = settle(layouts, case.content, Room(free_host_memory(), 0, None), accumulation)
    if case.share is not None:
        budget = memory.least_host + int(case.share * (memory.host - memory.least_host))
        case.content["offload"]["host_memory"] = budget
        memory = settle(layouts, case.content, Room(free_host_memory(), 0, None), accumulation)
    return memory


@settings(max_examples=examples(50), deadline=None)
@given(cases())
def test_bytes_add_up_and_are_those_of_the_run(case: Case) -> None:
    folder = Path(tempfile.mkdtemp(prefix="offload-plan"))
    case.content["offload"]["nvme_path"] = [str(folder)]
    try:
        memory = plan(case)
        total = memory.total
        assert (total.host, total.device, total.disk) == (memory.host, memory.device, memory.stored + memory.spilled)
        assert memory.least_host <= memory.host
        engine = offload.initialize(model=case.model(), config=case.content)[0]
        parts = testing.inspect(engine)
        try:
            assert parts.host_arena.classes == memory.placement.classes
            assert engine.host_memory == memory.host and engine.device_memory == memory.device
            assert (parts.store.spec.nbytes if parts.store else 0) == memory.stored
            assert (parts.store.spec.slots if parts.store else 0) == memory.slots
            assert parts.makes_early_updates is bool(memory.early_units)
            spill = parts.gradients.spill
            files = spill.scratch._files if spill._windows else []  # a run without a spill has no windows
            assert sum(Path(f"/proc/self/fd/{_number(file)}").stat().st_size for file in files) == memory.spilled
            taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if parts.store is not None and memory.slots == 1:  # whose files have no name
                taken += parts.store._files.states.size()
            assert memory.stored <= taken <= memory.stored + 8 * MIB, "and little beside: records, checksums"
        finally:
            engine.destroy(remove=True)
    finally:
        shutil.rmtree(folder)


def _number(file: Any) -> int:
    return int(file.descriptors.buffered)


def blocks(count: int, numel: int) -> Any:
    net = nn.Module()
    net.layers = nn.ModuleList(
        nn.ParameterList([nn.Parameter(torch.empty(numel, device="meta"))]) for _ in range(count)
    )
    return layouts_of(net, find_units(net))


def test_a_drive_without_room_for_two_slots_takes_one() -> None:
    layouts, count = blocks(8, 1 << 20), 8 << 20
    memory = settle(layouts, planning.settings(), Room(GIB, GIB, 20 * count))
    assert memory.slots == 1 and memory.stored == 12 * count and not memory.early_units
    assert "durability none" in memory.notices[-2]
    assert "a second slot of the states on disk would need 192.0 MiB in all, 160.0 MiB are free" in memory.notices[-1]


def test_what_a_run_refuses_is_refused_by_the_plan() -> None:
    """In the same words: durable steps need a drive, and a drive that has not the room is no drive."""
    layouts, count = blocks(8, 1 << 20), 8 << 20
    content = {**planning.settings("cpu", "cpu"), "offload": {"durability": {"every": 2}}}
    with pytest.raises(ConfigError, match='needs a store, but no "nvme_path" is given') as planned:
        settle(layouts, content, Room(GIB, GIB, None))
    with pytest.raises(ConfigError) as ran:
        offload.initialize(model=nn.Linear(8, 8), config=content)
    assert str(planned.value) == str(ran.value)
    with pytest.raises(ConfigError, match='"durability" needs'):
        settle(layouts, planning.settings(durability="step"), Room(GIB, GIB, 20 * count))


TOKENS = 256


class _Alive(TorchDispatchMode):
    """The peak of all bytes of tensors that were made inside and are alive, weights aside."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._known = {parameter.untyped_storage()._cdata for parameter in (*model.parameters(), *model.buffers())}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [128, 4096])
@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_holds_the_planned_bytes(tmp_path: Path, words: int, in_chunks: bool, recompute: bool) -> None:
    """Small tensors, such as the labels, are not counted, and the gradients of the head and of others are a few more.

    Of few words the MLP of a block is the peak, of many the loss.
    """
    sizes = models.WIDTHS | {"hidden_size": 256, "intermediate_size": 896, "vocab_size": words}
    config = transformers.LlamaConfig(**sizes, use_cache=False)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    make_ready(model, recompute)
    if in_chunks:
        chunk_loss_of(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    with _Alive(model) as alive:
        model(input_ids=ids, labels=ids).loss.backward()
    shape = from_name(str(tmp_path), TOKENS)
    planned = need(shape, Load(1, 1, recompute, in_chunks)).device
    largest = 2 * max(layout.numel for layout in shape.layouts)
    assert 0.98 * alive.peak <= planned + 0.01 * largest
    # The head's gradient is there twice in the plan of chunks: while it is summed, and while it is scaled.
    assert planned <= 1.02 * alive.peak + 2 * largest * in_chunks


@pytest.mark.sample(1)
@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("name", ["gpt2-small", "llama-1b"])
def test_the_peak_of_a_plan_that_fits_is_within_the_ram(name: str, in_chunks: bool) -> None:
    on = replace(described("RTX 4090", 0, [parse_drive("7GB/s,5GB/s,4TB")]), gpu_memory=0)
    shape, load = from_name(name, 256, torch.bfloat16), Load(1, chunked_loss=in_chunks)
    content = memory.settings("nvme", "nvme")
    content["offload"]["device"] = "cpu"
    fitting = []
    for ram in range(512 * MIB, 12288 * MIB, 1024 * MIB):
        machine = replace(on, ram=ram)
        try:
            planned = recommend.plan(shape, machine, load, content)
        except BudgetError:
            continue
        fitting.append(ram)
        assert planned.host_peak <= ram
    assert fitting and fitting[0] > 512 * MIB, "the sizes are on both sides of the least that fits"


DISK = ("nvme", "nvme")
JOB = models.LORA._replace(dtype="bf16", model=partial(deep, 6))
ROOM = Room(host=8 << 30, device=0, disk=1 << 40)


def shape_of(form: str | None) -> Shape:
    return from_training(JOB.model(), 16, torch.bfloat16, BY_BLOCKS, {"use_cache": False}, form)


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


def command(*options: str) -> Any:
    machine = ("--gpu", "24GB", "--ram", "16GB", "--drive", "7GB/s,4GB/s", "--seq-len", "64")
    return CliRunner().invoke(app, ["plan", *machine, *options])


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
