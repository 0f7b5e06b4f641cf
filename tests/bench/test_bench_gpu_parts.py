"""Each part of the GPU benchmark gives all its figures; on a CPU with little data the numbers mean nothing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from offload.bench.gpu import __main__ as command
from offload.bench.gpu import parts as correctness
from offload.bench.gpu import parts as rates_part
from offload.bench.gpu import report
from offload.bench.gpu.parts import (
    DIRECTIONS,
    FILES,
    JOBS,
    PARTS,
    add_exposure,
    bits,
    copies,
    deepspeed_steps,
    gpu_tests,
)
from offload.bench.gpu.training import PLACEMENTS, Exposure, Waits, Work, config_for, exposure, measure_steps, split
from offload.hardware.probe import DtypeRates, Rates
from tests import ROOT
from tests.bench.gpu_bench import numel_of, small

FIGURES = {
    "parameters",
    "tokens_per_step",
    "model",
    "layers",
    "recompute",
    "limit",
    "teraflops_6n",
    "teraflops_8n",
    "profiled",
    "host_memory",
    "device_memory",
    "notices",
    "steps",
    "step_seconds",
    "all_step_seconds",
    "no_device_kernels",
    "tokens_per_second",
    "exposed_io_seconds",
    "read_wait_seconds",
    "update_wait_seconds",
    "read_bytes_per_parameter",
    "written_bytes_per_parameter",
    "peak_device_bytes",
    "peak_host_bytes",
    "losses",
}


def test_the_bits_of_all_placements_are_compared(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    bits(small(tmp_path), seen.append, jobs=["gpt2 bf16", "llama fp32"], placements=("none/none", "nvme/cpu"), steps=2)
    for found in seen[-1]["jobs"].values():
        assert found == {"equal": ["none/none", "nvme/cpu"], "different": {}, "failed": {}}
    assert not list(tmp_path.rglob("states")) and not torch.are_deterministic_algorithms_enabled()


def test_differing_bits_are_reported_and_the_comparison_continues_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(job: str, placement: str, work: Work, steps: int) -> Any:
        if placement == "cpu/none":
            raise ValueError("no room")
        wrong = placement == "cpu/cpu"
        return correctness._Result(
            [1.0, 1.5 if wrong else 2.0], [3.0, 4.0], {"w": torch.tensor([-0.0 if wrong else 0.0])}
        )

    monkeypatch.setattr(correctness, "_train", train)
    seen: list[dict[str, Any]] = []
    bits(small(tmp_path), seen.append, jobs=["gpt2 bf16"], placements=("cpu/cpu", "cpu/none", "nvme/nvme"))
    found = seen[-1]["jobs"]["gpt2 bf16"]
    assert found["different"] == {
        "cpu/cpu": ["loss 2 is 1.5, not 2.0", "1 of 1 tensors of the state dict, the first is w"]
    }
    assert found["failed"] == {"cpu/none": "ValueError: no room"} and found["equal"] == ["nvme/nvme"]


def test_copies_are_measured_in_both_directions(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    copies(small(tmp_path), seen.append)
    for way in DIRECTIONS:
        assert seen[-1][way]["right"] and seen[-1][way]["fraction_of_pinned"] > 0
    assert (seen[-1]["host_bytes"], seen[-1]["pinned_bytes"]) == (seen[-1]["nbytes"], 0), "a CPU pins nothing"
    assert "0 B of the engine's" in report._copies_words(seen[-1])


def test_steps_have_all_their_figures_and_the_table_shows_them(tmp_path: Path) -> None:
    parts: dict[str, dict[str, Any]] = {}
    for placement in ("none/none", "nvme/nvme"):
        seen: list[dict[str, Any]] = []
        work = small(tmp_path)
        measure_steps(work, config_for(placement, work, "bf16"), seen.append)
        assert seen[-1].keys() == FIGURES and seen[-1]["steps"] == 2
        parts[placement] = {"state": "done", "figures": seen[-1]}
    assert not list(tmp_path.rglob("states")), "the swap files are gone"
    memory, disk = (part["figures"] for part in parts.values())
    assert memory["losses"] == disk["losses"], "the same job in both"
    assert memory["read_bytes_per_parameter"] == 0 < disk["read_bytes_per_parameter"] <= 14.1
    # Of two steps. What a step writes under its own backward, and what under the next forward, differs a little.
    assert 8.9 < disk["written_bytes_per_parameter"] < 14.1

    add_exposure(parts)
    assert disk["exposed_seconds"] == disk["step_seconds"] - memory["step_seconds"]
    parts["bits"] = {"state": "stopped", "figures": None}
    parts["copies"] = {"state": "failed", "figures": None, "exit_code": 1, "last_lines": ["RuntimeError: no"]}
    parts["cpu/cpu"] = {"state": "skipped", "needs_seconds": 60.0}
    parts["7B"] = {"state": "done", "figures": {"skipped": "not one layer of llama-7b fits"}}
    parts["rates"] = {"state": "done", "figures": {"plain_matmul": 1e12, "optimizer": 1e9}}
    memory["profiled"] = exposure(2.0, [(0.0, 1.0)], [(0.5, 1.5)])._asdict()
    output = report.words({"machine": report.machine(torch.device("cpu")), "parts": parts})
    for word in (
        f"gpt2-tiny, {numel_of(small(tmp_path)):,} parameters, bf16, a step is 16 tokens",
        "nvme/nvme",
        "bits was stopped",
        "RuntimeError: no",
        "budget was over: cpu/cpu (60 s)",
        "7B was skipped: not one layer",
        "25.0%",
    ):
        assert word in output
    assert max(map(len, output.splitlines())) < 200


def test_what_a_step_of_a_gpu_came_to() -> None:
    """Two copies, of which one kernel hides a part; a kernel inside of another."""
    seen = exposure(10.0, [(1.0, 4.0), (2.0, 3.0), (6.0, 7.0)], [(3.5, 5.0), (8.0, 8.5)])
    assert seen == Exposure(seconds=10.0, kernels=4.0, copies=2.0, exposed_copies=1.5, idle=4.5)
    assert exposure(1.0, [], []) == Exposure(1.0, 0.0, 0.0, 0.0, 1.0)


def test_events_of_the_profiler_are_sorted_by_kind() -> None:
    def event(name: str, start: float, device: str = "CUDA") -> Any:
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=device),
            time_range=SimpleNamespace(start=start, end=start + 1e6),
        )

    names = ["gemm", "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memcpy DtoD"]
    events = [event(name, 1e6 * number) for number, name in enumerate(names)]
    assert split([*events, event("aten::add", 0.0, "CPU")]) == ([(0.0, 1.0), (3.0, 4.0)], [(1.0, 2.0), (2.0, 3.0)])


def test_rates_are_measured_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Rates(*[1.0] * 5, {"bf16": DtypeRates(5e12, 1.0, 1.0, 2e9, 1.0)})
    monkeypatch.setattr(rates_part, "measure_rates", lambda device: given)
    seen: list[dict[str, Any]] = []
    rates_part.rates(small(tmp_path), seen.append)
    assert seen[-1]["matmul"] == 5e12 and seen[-1]["plain_matmul"] > 0 and seen[-1]["drive"]["read"] > 0
    output = report._rates_words(seen[-1])
    assert "TFLOP/s" in output and "2.00 G parameters/s" in output and "the drive reads" in output


def test_a_model_is_measured_with_recomputation_and_accumulation(tmp_path: Path) -> None:
    work = small(tmp_path)._replace(layers=2, accumulation=2, recompute=True, steps=1)
    seen: list[dict[str, Any]] = []
    measure_steps(work, config_for("cpu/cpu", work, "bf16", work.accumulation), seen.append)
    figures = seen[-1]
    assert figures["parameters"] == numel_of(work) < numel_of(small(tmp_path))
    assert figures["tokens_per_step"] == 32
    assert figures["teraflops_8n"] == pytest.approx(8 * figures["parameters"] * 32 / figures["step_seconds"] / 1e12)
    assert "2 layers of gpt2-tiny" in report._head(figures) and "computed again" in report._head(figures)


def test_tests_are_run_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "def test_good() -> None:\n    pass\n\n\ndef test_bad() -> None:\n    raise ValueError('it is bad')\n"
    )
    seen: list[dict[str, Any]] = []
    gpu_tests(small(tmp_path), seen.append, (str(file),), "not slow")
    assert (seen[-1]["exit_code"], seen[-1]["passed"], seen[-1]["failed"]) == (1, 1, 1)
    assert "1 passed, 1 failed" in report._tests_words(seen[-1]) and "it is bad" in report._tests_words(seen[-1])
    assert all((ROOT / name).exists() for name in FILES)


class FakeDeepSpeed(ModuleType):
    """Trains by torch alone."""

    def __init__(self) -> None:
        super().__init__("deepspeed")
        self.zero = SimpleNamespace(Init=lambda config_dict_or_path: nullcontext())
        self.__spec__ = importlib.machinery.ModuleSpec("deepspeed", None)
        self.config: Any = None

    def initialize(self, model: Any, config: Any) -> Any:
        self.config = config
        return (TorchEngine(model),)


class TorchEngine:
    def __init__(self, model: Any) -> None:
        self._model, self._optimizer = model, torch.optim.AdamW(model.parameters())

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()


def test_deepspeed_trains_the_same_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    deepspeed_steps(small(tmp_path), seen.append)
    assert seen[-1] == {"skipped": "DeepSpeed is not installed"}
    fake = FakeDeepSpeed()
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake.__spec__)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    deepspeed_steps(small(tmp_path), seen.append)
    assert (
        seen[-1]["steps"] == 2 and seen[-1]["parameters"] == numel_of(small(tmp_path)) and len(seen[-1]["losses"]) == 4
    )
    assert "offload" not in fake.config and fake.config["zero_optimization"]["offload_param"]["pin_memory"]
    report.words(
        {"machine": report.machine(torch.device("cpu")), "parts": {"DeepSpeed": {"state": "done", "figures": seen[-1]}}}
    )


def test_waits_are_those_that_the_engine_measures() -> None:
    measured = {"wait_for_reads_seconds": 0.25, "wait_for_updates_seconds": 0.5, "wait_for_memory_seconds": 1.0}
    assert Waits.of(measured | {"seconds": 9.0}) == Waits(0.25, 0.5, 1.0)
    assert Waits.of({}) == Waits(0.0, 0.0, 0.0)


def test_tests_are_a_checkouts(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    gpu_tests(small(tmp_path), seen.append, ("tests/none_such.py",))
    assert seen[-1].keys() == {"skipped"} and "there is no tests/none_such.py" in seen[-1]["skipped"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_placements_have_the_same_bits_on_the_gpu(tmp_path: Path) -> None:
    given = command._parser().parse_args([])
    result = command.run_part(PARTS[0], given, tmp_path, 240, 240)
    assert result["state"] == "done", result
    for job in JOBS:
        found = result["figures"]["jobs"][job]
        assert not found["different"] and not found["failed"], job
        assert found["equal"] == list(PLACEMENTS)
