"""The GPU benchmark runs all of its parts on a CPU with little data, so that the numbers mean nothing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import correctness, report
from bench.gpu import rates as rates_part
from bench.gpu.copies import copies
from bench.gpu.correctness import JOBS, bits
from bench.gpu.deepspeed import deepspeed_steps
from bench.gpu.exposure import Exposure, exposure, split
from bench.gpu.gpu_tests import FILES, gpu_tests
from bench.gpu.parts import PARTS, PLANNED, WAYS, Part, add_exposure, fitting, judge, run_child, run_parts
from bench.gpu.planned import Fitted, fit
from bench.gpu.training import Waits, Watch, measure_steps
from bench.gpu.work import PLACEMENTS, Work, config_for
from offload.engine.setup import initialize
from offload.hardware.probe import DtypeRates, Rates
from offload.planner.memory import Room
from offload.sizes import GIB, MIB

TIERS = ("none", "cpu", "nvme")
ROOT = Path(__file__).parents[1]
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
    "tokens_per_second",
    "exposed_copy_seconds",
    "exposed_io_seconds",
    "read_wait_seconds",
    "update_wait_seconds",
    "read_bytes_per_parameter",
    "written_bytes_per_parameter",
    "peak_device_bytes",
    "peak_host_bytes",
    "losses",
}


def small(folder: Path) -> Work:
    sizes: dict[str, Any] = {"batch_size": 1, "seq_len": 16, "steps": 2, "copy_nbytes": 1 << 16, "rounds": 1}
    return Work(torch.device("cpu"), folder, "gpt2-tiny", seconds=20, **sizes)


def numel_of(work: Work) -> int:
    return sum(parameter.numel() for parameter in work.build().parameters())


# -- what it decides ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_so_and_the_exit_code_is_0(tmp_path: Path) -> None:
    by_hand = [sys.executable, "-m", "bench.gpu", "--budget-minutes", "8", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(by_hand, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 and "skipped" in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_matters_most_fits_in_eight_minutes_and_all_nine_placements_are_parts() -> None:
    first = ["bits", "copies", "rates", "none/none", "nvme/nvme", "cpu/cpu", "13B layers"]
    assert [part.name for part in fitting(PARTS, 8 * 60)][:7] == first
    placements = [part.placement for part in PARTS if not part.changes and part.placement]
    assert sorted(placements) == sorted(f"{weights}/{states}" for weights in TIERS for states in TIERS)
    assert [part.name for part in PARTS if part.changes.get("limit")][-2:] == ["7B", "13B"]


def test_what_fits_in_a_budget() -> None:
    parts = [Part("a", 50), Part("b", 60), Part("c", 30)]
    assert fitting(parts, 1000) == parts
    assert [part.name for part in fitting(parts, 109)] == ["a", "c"], "a smaller part takes what b leaves"
    assert fitting(parts, 29) == []


def test_parts_run_in_order_while_there_is_time_and_the_others_are_named() -> None:
    clock, granted = [0.0], {}
    takes = {"a": 10.0, "b": 135.0, "c": 1.0, "d": 1.0}

    def run(part: Part, soft: float, hard: float) -> dict[str, Any]:
        granted[part.name] = (soft, hard)
        clock[0] += takes[part.name]
        return {"state": "done"}

    parts = [Part("a", 50), Part("b", 60), Part("c", 30), Part("d", 20)]
    ended = dict(run_parts(parts, 170, run, lambda: clock[0]))
    assert list(ended) == ["a", "b", "d", "c"]
    assert [part["state"] for part in ended.values()] == ["done", "done", "done", "skipped"]
    assert granted["a"] == (50 + 10 / 4, 170), "what nobody needs is shared"
    assert granted["b"][1] == 160 and granted["d"][1] == 25, "nobody may take more than is left"


def test_a_process_that_ends_well_that_fails_and_that_takes_too_long(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text('{"so": "far"}')
    well = run_child([sys.executable, "-c", "pass"], figures, 60)
    assert well["state"] == "done" and well["figures"] == {"so": "far"}
    failed = run_child([sys.executable, "-c", "print('a word'); raise SystemExit(3)"], figures, 60)
    assert (failed["state"], failed["exit_code"], failed["last_lines"]) == ("failed", 3, ["a word"])
    stopped = run_child([sys.executable, "-c", "import time; time.sleep(60)"], figures, 0.2)
    assert stopped["state"] == "stopped" and stopped["figures"] == {"so": "far"}


def test_the_exit_code_knows_other_bits_and_failed_parts_but_no_skipped_ones() -> None:
    def compared(**found: Any) -> dict[str, Any]:
        return {"state": "done", "figures": {"jobs": {"gpt2 fp32": {"different": {}, "failed": {}} | found}}}

    assert judge({"bits": compared(), "copies": {"state": "skipped"}, "none/none": {"state": "stopped"}}) == 0
    assert judge({"bits": compared(different={"cpu/cpu": ["loss 1 is 2.0, not 3.0"]})}) == 1
    assert judge({"bits": compared(failed={"cpu/cpu": "OSError: full"})}) == 1
    assert judge({"bits": compared(), "copies": {"state": "failed"}}) == 1
    assert judge({"copies": {"state": "done", "figures": {"upload": {"right": False}}}}) == 1
    assert judge({"copies": {"state": "done", "figures": {"both": {"right": False}}}}) == 1
    assert judge({"tests": {"state": "done", "figures": {"exit_code": 1}}}) == 1


# -- its parts ----------------------------------------------------------------------------------------


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
    for way in WAYS:
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
    assert 11.9 < disk["written_bytes_per_parameter"] < 12.5
    assert disk["update_wait_seconds"] > 0, "the next forward waits for updates of so small a model"

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


# -- as many layers as fit ----------------------------------------------------------------------------

GPU = 1 << 30
"""Bytes of the device, which has room enough."""


def placement_of(fitted: Fitted) -> tuple[str, str]:
    zero = fitted.settings["zero_optimization"]
    return zero["offload_param"]["device"], zero["offload_optimizer"]["device"]


def test_all_layers_are_in_ram_where_they_fit(tmp_path: Path) -> None:
    fitted = fit(small(tmp_path), Room(GIB, GPU, GIB))
    assert fitted.layers == 4 and fitted.words.startswith("all 4 layers of gpt2-tiny") and "0 B of disk" in fitted.words
    assert placement_of(fitted) == ("cpu", "cpu")


def test_what_ram_has_no_room_for_goes_to_disk(tmp_path: Path) -> None:
    fitted = fit(small(tmp_path), Room(72 * MIB, GPU, GIB))
    assert fitted.layers == 4 and "nvme" in placement_of(fitted)
    assert fitted.settings["offload"]["host_memory"] == 72 * MIB


def test_where_both_are_too_small_the_model_has_fewer_layers_and_a_note_says_so(tmp_path: Path) -> None:
    disks = (GIB, 28 * MIB, 0)
    found = [fit(small(tmp_path), Room(81 * MIB, GPU, disk)) for disk in disks]
    assert found[0].layers == 4 > found[1].layers > found[2].layers > 0
    assert f"{found[1].layers} of 4 layers" in found[1].words
    none = fit(small(tmp_path), Room(MIB, GPU, 0))
    assert none.layers == 0 and "not one layer of gpt2-tiny fits" in none.words


def test_a_planned_part_trains_what_fits_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, seen = Part("13B", 1, PLANNED), list[dict[str, Any]]()
    command.run_here(part, small(tmp_path), seen.append)
    assert seen[-1]["layers"] == 4 and "all 4 layers" in seen[-1]["fitted"]
    monkeypatch.setattr(command, "room_of", lambda work: Room(1 << 16, 0, 0))
    command.run_here(part, small(tmp_path), seen.append)
    assert seen[-1].keys() == {"skipped"}


# -- others -------------------------------------------------------------------------------------------


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


class FakeStream:
    """A stream on which waiting for an upload takes a quarter of a second, and nothing else takes time."""

    def __init__(self, *_: Any) -> None:
        self.clock = 0.0

    def record_event(self, event: Any) -> None:
        event.at = self.clock


class FakeEvent:
    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        self.at = -1.0

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


class FakeUpload:
    def __init__(self, stream: FakeStream, done: bool) -> None:
        self._stream, self._done = stream, done

    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        self._stream.clock += 0.25


def test_stalls_of_the_compute_stream_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = FakeStream()
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: compute)
    watch = Watch()
    with watch.watching():
        device = vars(initialize)["open_device"](torch.device("cuda"))
    for done in (False, True, False):
        device.wait_event(FakeUpload(compute, done))
    assert watch.take() == Waits(0.5, 0.0, 0.0)
    assert watch.take() == Waits(0.0, 0.0, 0.0)


def test_one_command_for_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PARTS", (Part("copies", 1), Part("none/none", 1e6)))
    figures, before = tmp_path / "figures.json", signal.getsignal(signal.SIGTERM)
    assert command.main(["--device", "cpu", "--nbytes", "1MiB", "--folder", str(tmp_path), "--json", str(figures)]) == 0
    written = json.loads(figures.read_text())
    assert written["parts"]["copies"]["figures"]["upload"]["right"]
    assert written["parts"]["none/none"]["state"] == "skipped" and written["machine"]["torch"] == torch.__version__
    assert "not run, since the budget was over: none/none" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [figures] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_placements_have_the_same_bits_on_the_gpu(tmp_path: Path) -> None:
    given = command._parser().parse_args([])
    result = command.run_part("bits", given, tmp_path, 240, 240)
    assert result["state"] == "done", result
    for job in JOBS:
        found = result["figures"]["jobs"][job]
        assert not found["different"] and not found["failed"], job
        assert found["equal"] == list(PLACEMENTS)
