"""A GPU keeps the promises of a device: no needless waits, no leaks, correct copies, the same bits.

All of it skips without one; `offload bench gpu` runs it where there is one.
"""

from __future__ import annotations

import gc
import os
import threading

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts, for sums in one order

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import offload
from offload import testing
from offload.sizes import GIB, MIB
from tests.support import models
from tests.support.oracle import (
    PLACEMENTS,
    Job,
    Result,
    assert_same,
    config,
    room_for,
    rounded,
    run,
    start,
    train_step,
    trained,
    weights_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:.*attention defaults to a non-deterministic algorithm"),
]

GPU = {"device": "cuda"}
BLOCKS, WIDTH = 6, 1024


class Blocks(nn.Module):
    """Of nothing that makes torch wait by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.float().pow(2).mean()


def blocks_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    values = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
    return model(values.to(torch.bfloat16))


JOB = Job(Blocks, blocks_loss, steps=3, dtype="bf16")


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def steps(engine: offload.Engine, job: Job, first: int, last: int) -> None:
    """As `train_step`, but that nobody asks for a loss."""
    for step in range(first, last):
        for micro in range(job.accumulation):
            engine.backward(job.loss(engine, step, micro))
            engine.step()


# -- nobody waits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_no_call_of_torch_waits_for_the_gpu(placement: tuple[str, str], accumulation: int, tmp_path: Path) -> None:
    """Forward, backward and step, the loader's batches included; `step()` waits for the norm, by an event."""
    job = JOB._replace(accumulation=accumulation)
    room = {"device_memory": room_for(job, 2)} if placement[0] != "none" and placement[1] != "none" else {}
    engine = start(job, placement, tmp_path, **GPU, **room)
    steps(engine, job, 0, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(engine, job, 3, 6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.destroy(remove=True)


def test_a_call_that_waits_would_be_seen() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_backward_does_not_wait_for_its_gradients(tmp_path: Path) -> None:
    """It has given the GPU all of its work while the GPU has most of that still to do."""
    engine = start(JOB, ("cpu", "cpu"), tmp_path, **GPU)
    steps(engine, JOB, 0, 3)
    loss = JOB.loss(engine, 3, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    before = torch.cuda.Event()
    before.record()
    testing.inspect(engine).gradients.downloads._most = 1 << 40  # its own wait is not what is meant
    engine.backward(loss)
    assert not before.query(), "the backward has waited for what came before it"
    engine.step()
    engine.destroy(remove=True)


# -- copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme"), ("cpu", "none")], ids="-".join)
def test_all_copies_are_of_pinned_memory(placement: tuple[str, str], tmp_path: Path) -> None:
    engine = start(JOB, placement, tmp_path, **GPU)
    arena = testing.inspect(engine).host_arena
    wanted = sum(part.nbytes for part in arena._parts.values())
    assert arena.pinned_bytes == wanted > 0, "this machine limits pinned memory"
    steps(engine, JOB, 0, 2)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        steps(engine, JOB, 2, 4)
        torch.cuda.synchronize()
    engine.destroy(remove=True)
    copies = {event.name for event in seen.events() if "HtoD" in event.name or "DtoH" in event.name}
    assert any("HtoD" in name for name in copies) and any("DtoH" in name for name in copies)
    assert not [name for name in copies if "Pageable" in name], copies


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_two_hundred_steps_leave_nothing_behind(placement: tuple[str, str], tmp_path: Path) -> None:
    def held() -> tuple[int, int, int, int]:
        gc.collect()
        torch.cuda.synchronize()
        process = psutil.Process()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), process.num_fds(), process.num_threads()

    job = JOB._replace(accumulation=2)
    engine = start(job, placement, tmp_path, **GPU)
    steps(engine, job, 0, 50)
    before, rss = held(), psutil.Process().memory_info().rss
    steps(engine, job, 50, 200)
    assert held() == before
    assert psutil.Process().memory_info().rss - rss <= 16 * MIB
    engine.destroy(remove=True)


def test_a_full_gpu_raises_an_error_with_the_fix_and_training_continues(tmp_path: Path) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path, **GPU)
    steps(engine, JOB, 0, 1)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"The engine uses \S+ MiB of the device for weights"):
            engine.backward(engine(torch.zeros(1 << 17, WIDTH, dtype=torch.bfloat16)))
        gc.collect()
        steps(engine, JOB, 1, 3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    engine.destroy(remove=True)


def test_the_default_device_budget_keeps_a_limit_that_the_user_has_set(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(GIB / total)
    try:
        engine = start(JOB, ("cpu", "cpu"), tmp_path, **GPU)
        steps(engine, JOB, 0, 3)
        assert torch.cuda.memory_allocated() <= GIB
        engine.destroy(remove=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# -- bits ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_placement_has_the_same_bits(accumulation: int, dtype: str, tmp_path: Path) -> None:
    job = models.GPT2._replace(steps=3, dtype=dtype, accumulation=accumulation)
    first: Result | None = None
    for placement in PLACEMENTS:
        room = {"device_memory": room_for(job, 2)} if "none" not in placement else {}
        result = run(job, placement, tmp_path / "-".join(placement), **GPU, **room)
        first = first or result
        assert_same(first, result, "-".join(placement))


def test_what_lives_on_the_gpu_is_updated_there(tmp_path: Path) -> None:
    engine = start(JOB, ("none", "none"), tmp_path, **GPU)
    units = range(len(testing.inspect(engine).layouts))
    assert all(testing.inspect(engine).gradients_stay(unit) for unit in units)
    engine.destroy(remove=True)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_what_the_gpu_adds_up_has_the_bits_of_the_hosts_sums(placement: tuple[str, str], tmp_path: Path) -> None:
    """And leaves it once: with four micro-batches the GPU copies fewer bytes away."""
    job, results, copied = JOB._replace(accumulation=4, steps=4), list[Result](), list[int]()
    for name, room in (("host", room_for(job, 3)), ("gpu", 1 << 28)):
        engine = start(job, placement, tmp_path / name, **GPU, device_memory=room)
        inspected, device = testing.inspect(engine), testing.inspect(engine).device
        assert all(
            inspected.gradients_add_up_on_device(unit) == (name == "gpu") for unit in range(len(inspected.layouts))
        )
        nbytes, real = [0], device.download

        def counted(target: Any, source: Any, *given: Any, nbytes: Any = nbytes, real: Any = real) -> Any:
            nbytes[0] += source.nbytes
            return real(target, source, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "download", counted)
            results.append(trained(engine, job))
        copied.append(nbytes[0])
        engine.destroy(remove=True)
    assert_same(*results)
    assert copied[1] < 0.6 * copied[0]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_compiled_blocks_have_the_same_bits_in_memory_and_on_disk(tmp_path: Path) -> None:
    class Compiled(Blocks):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.compile()

    job = JOB._replace(model=Compiled)
    torch.compiler.reset()
    in_memory = run(job, ("none", "none"), tmp_path / "memory", **GPU)
    room = room_for(JOB, 2)
    assert_same(in_memory, run(job, ("nvme", "nvme"), tmp_path / "disk", **GPU, device_memory=room))
    torch.compiler.reset()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("own", [False, True], ids=["by the config", "by a context of the user's"])
def test_autocast_has_the_same_bits_in_memory_and_on_disk(own: bool, tmp_path: Path) -> None:
    job = models.GPT2._replace(steps=3)
    results = []
    for placement, room in ((("none", "none"), {}), (("nvme", "nvme"), {"device_memory": room_for(job, 2)})):
        torch.manual_seed(job.seed)
        settings = config(job, placement, tmp_path / placement[0], **GPU, **room)
        if not own:
            settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        engine = offload.initialize(model=job.model(), config=settings)[0]
        losses = []
        for step in range(job.steps):
            with torch.autocast("cuda", torch.bfloat16, enabled=own):
                loss = job.loss(engine, step, 0)
            engine.backward(loss)
            losses.append(float(loss.detach()))
            engine.step()
        results.append((losses, engine.get_global_grad_norm()))
        engine.destroy(remove=True)
    assert results[0] == results[1]


@pytest.mark.usefixtures("deterministic")
def test_a_backward_has_the_same_bits_on_torchs_thread_and_on_the_callers(tmp_path: Path) -> None:
    """`loss.backward()` runs hooks and recomputations on torch's own thread, `engine.backward(loss)` on this one."""
    results = []
    for plain in (False, True):
        engine = start(JOB, ("nvme", "nvme"), tmp_path, device_memory=room_for(JOB, 2), **GPU)
        losses, threads = [], set[int]()
        for step in range(JOB.steps):
            loss = JOB.loss(engine, step, 0)
            assert loss.grad_fn is not None
            loss.grad_fn.register_prehook(lambda _, threads=threads: threads.add(threading.get_ident()))
            loss.backward() if plain else engine.backward(loss)
            losses.append(float(loss.detach()))
            engine.step()
        assert (threads == {threading.get_ident()}) is not plain
        results.append(Result(losses, [engine.get_global_grad_norm() or 0.0], weights_of(engine)))
        engine.destroy(remove=True)
    assert_same(*results)


def test_a_capture_of_a_graph_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path, **GPU)
    train_step(engine, JOB, 0)
    values = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(offload.UsageError, match="a CUDA graph cannot be captured"), torch.cuda.graph(graph):
        engine.module(values)
    train_step(engine, JOB, 1)
    engine.destroy(remove=True)


def test_the_memory_report_has_torchs_figures(tmp_path: Path) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path, **GPU)
    train_step(engine, JOB, 0)
    allocator = engine.memory_report()["allocator"]
    assert (
        allocator["allocated"]
        == torch.cuda.memory_allocated()
        <= allocator["allocated_peak"]
        <= allocator["reserved_peak"]
    )
    assert engine.memory_report()["device"]["arena"] <= allocator["allocated"]
    engine.destroy(remove=True)


def test_a_loss_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    """On the GPU, with weights as they are before the first update."""
    engine = start(JOB, ("nvme", "nvme"), tmp_path, **GPU)
    mine = train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    torch.manual_seed(JOB.seed)
    plain = Blocks()
    for parameter in plain.parameters():
        parameter.data = rounded(parameter, torch.bfloat16).cuda()  # `to` rounds ties to even
    values = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    assert mine == float(plain(values).detach())
