"""`offload bench gpu` measures a card part by part, fits its budget, and its verdict names what is slow."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload.bench.gpu import __main__ as command
from offload.bench.gpu import parts as correctness
from offload.bench.gpu import parts as rates_part
from offload.bench.gpu import report
from offload.bench.gpu.parts import (
    FILES,
    JOBS,
    PARTS,
    Part,
    add_exposure,
    bits,
    bounds,
    fitting,
    gpu_tests,
    invalid,
    judge,
    refused,
    run_parts,
)
from offload.bench.gpu.training import (
    LOOPS,
    MICRO_BATCHES,
    PLACEMENTS,
    TRAIN_BATCH,
    Work,
    config_for,
    exposure,
    fit,
    measure_steps,
)
from offload.cli.main import app
from offload.errors import ConfigError
from offload.hardware.probe import DtypeRates, Rates
from offload.planner.memory import Room
from offload.sizes import GIB, MIB
from tests import ROOT
from tests.support.processes import warm_process


def small(folder: Path) -> Work:
    sizes: dict[str, Any] = {"batch_size": 1, "seq_len": 16, "steps": 2, "copy_nbytes": 1 << 16, "rounds": 1}
    return Work(torch.device("cpu"), folder, "gpt2-tiny", seconds=20, **sizes)


def numel_of(work: Work) -> int:
    return sum(parameter.numel() for parameter in work.build().parameters())


def placed(seconds: float, **more: Any) -> dict[str, Any]:
    work = {"model": "m", "layers": None, "parameters": 9, "tokens_per_step": 64, "recompute": False}
    return {"state": "done", "figures": work | {"step_seconds": seconds, "no_device_kernels": None} | more}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_is_an_error_that_touches_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "gpu", "--output", str(tmp_path / "figures.json")])
    assert done.exit_code == 2, done.output
    assert "there is no GPU to measure" in done.stderr and not done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "tpu"), "expected --device cuda or cpu"),
        (("--device", "cpu", "--steps", "0"), "expected --steps of at least 1"),
        (("--device", "cpu", "--loop", "accumulate"), "expected --loop of train_batch, micro_batches, both"),
        (("--device", "cpu", "--micro-batches", "0"), "expected --micro-batches of at least 1"),
        (("--device", "cpu", "--budget-minutes", "0"), "expected --budget-minutes above 0"),
        (("--device", "cpu", "--nbytes", "many"), "many"),
        (("/none/such", "--device", "cpu"), "there is no folder /none/such"),
        (("--device", "cpu", "--output", "/none/such/file"), "there is no folder /none/such"),
        (("--device", "cpu", "--output", "/proc/gpu"), "--output /proc/gpu cannot be written"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(options: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "gpu", *options])
    assert done.exit_code == 2 and words in done.output


def test_an_installation_without_transformers_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="transformers is not installed"):
        command.GpuSettings(device="cpu").check()


def test_the_file_names_the_gpu_and_not_one_specimen_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for the public: no UUID, path or PCI address."""
    about = SimpleNamespace(name="A card MIG 3g.20gb", total_memory=GIB, major=9, minor=0, uuid="a-uuid")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a-uuid")
    facts = report.machine(torch.device("cuda"))
    (device,) = facts["devices"]
    assert facts["gpu"] == about.name and device["slice"] == "3g.20gb" and device["memory_bytes"] == GIB
    words = json.dumps(facts)
    assert not [word for word in ("a-uuid", str(Path.home()), '"pci"') if word in words]


def test_one_command_for_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PARTS", (Part("copies", 1), Part("none/none", 1e6)))
    monkeypatch.setattr(sys, "executable", str(warm_process.commands(tmp_path / "bin") / "python"))
    folder = tmp_path / "folder"
    folder.mkdir()
    figures, before = folder / "figures.json", signal.getsignal(signal.SIGTERM)
    words = ["--device", "cpu", "--nbytes", "1MiB", "--output", str(figures), str(folder)]
    done = CliRunner().invoke(app, ["bench", "gpu", *words])
    assert done.exit_code == 0, done.output
    written = json.loads(figures.read_text())
    assert written["parts"]["copies"]["figures"]["upload"]["right"]
    assert written["parts"]["none/none"]["state"] == "skipped" and written["machine"]["torch"] == torch.__version__
    assert written["format"] == 1 and written["correct"] and written["invalid"] == {}
    assert "none/none" in written["refused"] and written["bounds"]["pinned_gigabytes_per_second"]["upload"] > 0
    assert "not run, since the budget was over: none/none" in done.output
    monkeypatch.setattr(command, "PARTS", ())
    done = CliRunner().invoke(app, ["bench", "gpu", "--json", *words])
    assert json.loads(done.stdout)["parts"] == {}, "nothing but JSON on stdout"
    assert list(folder.iterdir()) == [figures] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("option", [["--only", "nonsense"], ["--model", "nonsense"]])
def test_a_part_or_a_model_that_does_not_exist_is_refused_before_anything_runs(
    option: list[str], tmp_path: Path
) -> None:
    words = ["--device", "cpu", "--output", str(tmp_path / "out.json"), *option, str(tmp_path)]
    done = CliRunner().invoke(app, ["bench", "gpu", *words])
    assert done.exit_code == 2 and "nonsense" in done.stderr and list(tmp_path.iterdir()) == []


TIERS = ("none", "cpu", "nvme")


def test_what_matters_most_fits_in_eight_minutes_and_all_nine_placements_are_parts() -> None:
    first = ["bits", "copies", "rates", "none/none", "nvme/nvme", "cpu/cpu", "13B layers"]
    assert [part.name for part in fitting(PARTS, 8 * 60)][:7] == first
    placements = [part.placement for part in PARTS if not part.changes and part.placement]
    assert sorted(placements) == sorted(f"{weights}/{states}" for weights in TIERS for states in TIERS)
    assert [part.name for part in PARTS if part.changes.get("limit")][-4:] == ["7B", "8B", "13B in few bytes", "13B"]


def test_options_replace_what_a_part_says_of_its_steps() -> None:
    part = next(part for part in PARTS if part.name == "13B in few bytes")
    settings = command.GpuSettings(loop="both", micro_batches=8, moments="bf16", grad_dtype="bf16")
    forms = {"loops": LOOPS, "accumulation": 8, "moments": "bf16", "grad_dtype": "bf16"}
    assert command.chosen_forms(part, settings) == forms
    assert command.chosen_forms(part, command.GpuSettings()) == {"loops": (TRAIN_BATCH,)}
    assert command.chosen_forms(PARTS[0], settings) == {}, "it trains no preset"


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


GPU = 1 << 30
"""Bytes of the device, which has room enough."""


def test_where_both_are_too_small_the_model_has_fewer_layers_and_a_note_says_so(tmp_path: Path) -> None:
    disks = (GIB, 28 * MIB, 0)
    fits = [fit(small(tmp_path), Room(81 * MIB, GPU, disk)) for disk in disks]
    assert fits[0].layers == 4 > fits[1].layers > fits[2].layers > 0
    assert f"{fits[1].layers} of 4 layers" in fits[1].words
    none = fit(small(tmp_path), Room(MIB, GPU, 0))
    assert none.layers == 0 and "not one layer of gpt2-tiny fits" in none.words


FIGURES = {
    "parameters",
    "loop",
    "schedule",
    "micro_batches",
    "uploaded_bytes_per_parameter",
    "downloaded_bytes_per_parameter",
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
    figures = seen[-1]["jobs"]["gpt2 bf16"]
    assert figures["different"] == {
        "cpu/cpu": ["loss 2 is 1.5, not 2.0", "1 of 1 tensors of the state dict, the first is w"]
    }
    assert figures["failed"] == {"cpu/none": "ValueError: no room"} and figures["equal"] == ["nvme/nvme"]


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
    memory["profiled"] = exposure(2.0, [(0.0, 1.0)], [(0.5, 1.5)])
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


@pytest.mark.slow
@pytest.mark.test_device
def test_the_loop_of_trainers_fetches_weights_twice_a_step_and_sends_gradients_once(tmp_path: Path) -> None:
    work = small(tmp_path)._replace(
        device=torch.device("test"), accumulation=3, recompute=True, loops=LOOPS, grad_dtype="fp32"
    )
    settings = config_for("cpu/cpu", work, "bf16", work.accumulation)
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    settings["offload"]["device_memory"] = 4 * MIB  # of 7 of all weights
    seen: list[dict[str, Any]] = []
    measure_steps(work, settings, seen.append)
    loop = seen[-1]
    other_loop = loop["other_loops"][MICRO_BATCHES]
    assert (loop["loop"], loop["schedule"], other_loop["loop"]) == (TRAIN_BATCH, "layer_major", MICRO_BATCHES)
    assert loop.keys() - {"other_loops"} == other_loop.keys() == FIGURES
    weight, total = 2, 4
    assert loop["uploaded_bytes_per_parameter"] <= 2.01 * weight
    assert loop["downloaded_bytes_per_parameter"] <= 1.01 * total
    assert other_loop["uploaded_bytes_per_parameter"] > 2.5 * weight
    assert other_loop["downloaded_bytes_per_parameter"] >= 3 * weight, "with each micro-batch, in the weights' dtype"
    words = report.words(
        {"machine": report.machine(torch.device("cpu")), "parts": {"7B": {"figures": loop, "state": "done"}}}
    )
    assert "48 tokens in 3 micro-batches" in words and "7B by micro_batches" in words


def test_rates_are_measured_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Rates(*[1.0] * 5, {"bf16": DtypeRates(5e12, 1.0, 1.0, 2e9, 1.0)})
    monkeypatch.setattr(rates_part, "measure_rates", lambda device: given)
    seen: list[dict[str, Any]] = []
    rates_part.rates(small(tmp_path), seen.append)
    assert seen[-1]["matmul"] == 5e12 and seen[-1]["plain_matmul"] > 0 and seen[-1]["drive"]["read"] > 0
    output = report._rates_words(seen[-1])
    assert "TFLOP/s" in output and "2.00 G parameters/s" in output and "the drive reads" in output


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_placements_have_the_same_bits_on_the_gpu(tmp_path: Path) -> None:
    given = command.GpuSettings()
    result = command.run_part(PARTS[0], given, tmp_path, 240, 240)
    assert result["state"] == "done", result
    for job in JOBS:
        job_figures = result["figures"]["jobs"][job]
        assert not job_figures["different"] and not job_figures["failed"], job
        assert job_figures["equal"] == list(PLACEMENTS)


def test_the_exit_code_knows_other_bits_and_failed_parts_but_no_skipped_ones() -> None:
    def compared(**figures: Any) -> dict[str, Any]:
        return {"state": "done", "figures": {"jobs": {"gpt2 fp32": {"different": {}, "failed": {}} | figures}}}

    assert judge({"bits": compared(), "copies": {"state": "skipped"}, "none/none": {"state": "stopped"}}) == 0
    assert judge({"bits": compared(different={"cpu/cpu": ["loss 1 is 2.0, not 3.0"]})}) == 1
    assert judge({"bits": compared(failed={"cpu/cpu": "OSError: full"})}) == 1
    assert judge({"bits": compared(), "copies": {"state": "failed"}}) == 1
    assert judge({"copies": {"state": "done", "figures": {"upload": {"right": False}}}}) == 1
    assert judge({"copies": {"state": "done", "figures": {"both": {"right": False}}}}) == 1
    assert judge({"tests": {"state": "done", "figures": {"exit_code": 1}}}) == 1


def test_without_kernels_of_the_gpu_the_bound_is_invalid_and_nothing_is_held_against_it() -> None:
    """The host would update 12 bytes a parameter over the bus each way, and every exposed second would be nonsense."""
    why = {"no_device_kernels": "no libnvrtc"}
    parts = {"none/none": placed(9.0, **why), "cpu/none": placed(9.0, **why), "cpu/cpu": placed(2.0, **why)}
    parts["cpu/none in 24 GiB"] = placed(1.0, **why)
    add_exposure(parts)
    reasons = invalid(parts)
    assert reasons.keys() == {"none/none", "cpu/none", "cpu/none in 24 GiB"} and "no libnvrtc" in reasons["none/none"]
    assert "exposed_seconds" not in parts["cpu/cpu"]["figures"]
    assert bounds(parts)["step_seconds"] is None and bounds({"none/none": placed(9.0)})["step_seconds"] == 9.0
    assert judge(parts) == 0, "the bits were right"


def test_what_gave_no_figures_is_named_with_the_reason() -> None:
    parts: dict[str, dict[str, Any]] = {
        "bits": {"state": "failed", "exit_code": 1, "last_lines": ["a", "RuntimeError: no"], "figures": None},
        "copies": {"state": "stopped", "figures": None},
        "rates": {"state": "stopped", "figures": {"plain_matmul": 1.0}},
        "7B": {"state": "skipped", "needs_seconds": 240.0},
        "DeepSpeed": {"state": "done", "figures": {"skipped": "DeepSpeed is not installed"}},
        "none/none": placed(1.0),
    }
    assert refused(parts) == {
        "bits": "failed with exit code 1: RuntimeError: no",
        "copies": "stopped when the budget was over, without figures",
        "rates": "stopped when the budget was over",
        "7B": "not run: 240 s did not fit into the budget",
        "DeepSpeed": "DeepSpeed is not installed",
    }
