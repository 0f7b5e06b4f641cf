"""Compiled blocks train from the disk as in memory, and as blocks that are not compiled."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import offload
from offload.errors import BudgetError, ConfigError, UsageError
from tests.models.test_module_kinds import DISK, MEMORY
from tests.support import models, rounding_bounds
from tests.support.modules.module_kinds import WIDTH, Layers
from tests.support.oracle import Job, config, plain_loop, room_for, run, start, train_step


class Eager(Layers):
    def layer(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))


class Compiled(Eager):
    """Each layer is compiled by itself."""

    backend = "aot_eager"

    def layer(self, index: int) -> nn.Module:
        block = super().layer(index)
        block.compile(backend=self.backend)
        return block


class CompiledByFunction(Compiled):
    def layer(self, index: int) -> nn.Module:
        compiled: Any = torch.compile(Eager.layer(self, index), backend=self.backend)
        return compiled


class CompiledByInductor(Compiled):
    backend = "inductor"


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Compiled, marks=pytest.mark.works("Graphs", "`block.compile()`", "right")),
        pytest.param(CompiledByFunction, marks=pytest.mark.works("Graphs", "`torch.compile(block)`", "right")),
        pytest.param(CompiledByInductor, marks=pytest.mark.slow),
    ],
)
@pytest.mark.numeric
def test_compiled_blocks_train_with_the_same_bits(model: Callable[[], nn.Module], dtype: str, tmp_path: Path) -> None:
    job = Job(model, models.mixture_loss, dtype=dtype)
    on_disk = run(job, DISK, tmp_path / "disk", device_memory=room_for(job, 2))
    torch.compiler.reset()
    assert on_disk.losses == run(job, MEMORY, tmp_path / "memory").losses
    eager = plain_loop(job._replace(model=Eager))
    rounding_bounds.same_losses(on_disk.losses, eager.losses, job)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.works("Engines and processes", "compiled blocks, engine after engine", "right")
def test_compiled_blocks_of_engine_after_engine(tmp_path: Path) -> None:
    job = Job(Compiled, models.mixture_loss, steps=2)
    losses = []
    for turn in range(3):
        losses.append(run(job, DISK, tmp_path / str(turn)).losses)
        gc.collect()
    assert losses[0] == losses[1] == losses[2]


class Counted(Compiled):
    """Each layer is compiled by a backend that keeps its graphs."""

    graphs: ClassVar[list[Any]] = []

    @staticmethod
    def backend(graph: Any, inputs: Any) -> Any:  # type: ignore[override]
        Counted.graphs.append(graph.graph)
        return graph.forward


@pytest.mark.filterwarnings("ignore")
@pytest.mark.works("Graphs", "hooks stay outside of compiled graphs, which are made once", "right")
def test_a_compiled_block_is_one_graph_and_stays_it(tmp_path: Path) -> None:
    """Whatever address its weights have, step after step."""
    Counted.graphs.clear()
    job = Job(Counted, models.mixture_loss, steps=3)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 2))
    train_step(engine, job, 0)
    made = len(Counted.graphs)
    for step in (1, 2):
        train_step(engine, job, step)
    engine.destroy(remove=True)
    assert 1 <= made <= len(engine.module.layers) and len(Counted.graphs) == made
    for graph in Counted.graphs:
        calls = [node.target.__name__ for node in graph.nodes if node.op.startswith("call")]
        assert calls == ["linear", "gelu", "linear"], "all of a block"


def start_compiled(model: nn.Module, job: Job, folder: Path, **options: Any) -> offload.Engine:
    settings = config(job, DISK, folder, **options)
    return offload.initialize(model=model, config=settings | {"compile": {"enabled": True, "backend": "aot_eager"}})[0]


def is_compiled(model: Any) -> list[bool]:
    return [block._compiled_call_impl is not None for block in model.layers]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("config", marks=pytest.mark.works("Graphs", '`"compile"` of the config', "right")),
        pytest.param("call", marks=pytest.mark.works("Graphs", "`engine.compile()`", "right")),
    ],
)
def test_the_config_or_a_call_compiles_each_block(way: str, tmp_path: Path) -> None:
    """With the bits of blocks that the user has compiled."""
    job = Job(Eager, models.mixture_loss, steps=3)
    torch.manual_seed(job.seed)
    begin = start_compiled if way == "config" else started
    engine = begin(job.model(), job, tmp_path / "disk", device_memory=room_for(job, 2))
    if way == "call":
        engine.compile(backend="aot_eager", compile_kwargs={})
    assert all(is_compiled(engine.module))
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    torch.compiler.reset()
    assert losses == run(job._replace(model=Compiled), MEMORY, tmp_path / "memory").losses


def started(model: nn.Module, job: Job, folder: Path, **options: Any) -> offload.Engine:
    return offload.initialize(model=model, config=config(job, DISK, folder, **options))[0]


def test_what_cannot_be_compiled_is_an_error_and_leaves_the_model(tmp_path: Path) -> None:
    job = Job(Eager, models.mixture_loss)
    model = job.model()
    with pytest.raises(BudgetError):
        start_compiled(model, job, tmp_path, device_memory=1024)
    assert not any(is_compiled(model)), "a start that fails takes it back"
    engine = started(model, job, tmp_path)
    with pytest.raises(ConfigError, match="records CUDA graphs"):
        engine.compile(compile_kwargs={"mode": "reduce-overhead"})
    with pytest.raises(UsageError, match="leave schedule and compiled_autograd_enabled out"):
        engine.compile(compiled_autograd_enabled=True)
    assert not any(is_compiled(engine.module))
    engine.destroy(remove=True)
