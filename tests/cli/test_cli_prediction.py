"""`offload train` predicts its steps where the machine was probed; log, report and summary compare."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from offload.cli.main import app
from offload.finetune import model as language_model
from offload.finetune.model import adapt, parse_lora
from offload.hardware import probe
from offload.hardware.probe import Others
from offload.model_io.load import init
from offload.planner import hardware
from offload.planner.model_shape import from_name, from_training
from offload.presets import build
from tests.support.model_folders import make_folder
from tests.support.processes.cli_in_process import isolated_cache, run_folder

__all__ = ["isolated_cache", "run_folder"]  # fixtures

SMALL = ("--text", "text.py", "--batch-size", "2", "--seq-len", "32", "--device", "cpu", "--no-output")
_OF = probe.DtypeRates(1e11, 1e10, 1e10, 1e9, 2e9)
RATES = probe.Rates(2e10, 1e10, 5e9, 5e9, 4e9, dict.fromkeys(probe.DTYPES, _OF))


def keep(folder: str = ".") -> None:
    """A probe of this machine, with rates of another."""
    drive = probe.DriveRates(str(Path(folder).resolve()), "/dev/some", 2e9, 1e9, 1.5e9)
    probe.keep(probe.Probed(probe.machine_of(torch.device("cpu")), RATES, (drive,), "2026-01-01", 1.0))


def call(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["train", *SMALL, *arguments])
    assert result.exit_code == 0, result.output
    return result


def facts(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(call(*arguments, "--json").stdout)
    return content


def reported(log: str) -> list[dict[str, Any]]:
    found = CliRunner().invoke(app, ["report", log, "--json"])
    assert found.exit_code == 0, found.output
    rows: list[dict[str, Any]] = json.loads(found.stdout)["predicted"]
    return rows


def test_without_a_probe_one_line_names_the_command() -> None:
    output = call("--steps", "2", "--log", "log").stdout
    assert [line for line in output.splitlines() if "offload probe" in line or "predict" in line] == [
        "no prediction: `offload probe` was not run on this machine; it takes a minute, once"
    ]
    assert "predicted" not in json.loads(Path("log").read_text().splitlines()[0])["about"]
    assert reported("log") == [] and not probe.cache_path().exists(), "a run never probes by itself"


def test_the_report_shows_what_was_foreseen_beside_what_came() -> None:
    keep()
    found = facts("--steps", "4", "--eval-every", "0", "--log", "log")["predicted"]
    assert reported("log") == found
    by_name = {row["name"]: row for row in found}
    assert by_name.keys() >= {"seconds", "tokens", "read_bytes", "written_bytes", "host_peak_bytes", "compute"}
    assert by_name["tokens"]["ratio"] == 1.0
    assert by_name["written_bytes"]["ratio"] == pytest.approx(1.0, abs=0.5)  # a late write is of the step after
    (predicted,) = (json.loads(line)["about"]["predicted"] for line in Path("log").read_text().splitlines()[:1])
    assert sum(predicted["parts_seconds"].values()) == pytest.approx(predicted["seconds"])
    call_report = CliRunner().invoke(app, ["report", "log", "-o", "page.html"])
    assert call_report.exit_code == 0 and "Predicted and measured" in Path("page.html").read_text()


def test_a_person_reads_it_before_the_first_step_and_after_the_last() -> None:
    keep()
    output = call("--steps", "2").stdout
    assert output.index("\npredicted: ") < output.index("\nstep 1/2") < output.index(" predicted, measured ")
    assert output.count("bytes written a step: ") == output.count("forward and backward: ") == 1


def test_a_probe_that_was_disturbed_is_named_beside_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    found = probe.kept()
    assert found is not None
    doubt = (
        "other processes took 60% of the cores during the probe; run `offload probe` again while the machine is idle"
    )
    probe.keep(found._replace(doubts=(doubt,)))
    monkeypatch.setattr(Others, "share", lambda _: 0.4)
    done = call("--steps", "2", "--json")
    told = json.loads(done.stdout)
    assert told["doubts"] == [doubt] and told["others_share"] == pytest.approx(0.4)
    text = " ".join(done.stderr.split())
    assert text.count(doubt) == 2, "with the prediction at the start, and beside what came"


def test_a_run_that_goes_on_is_foreseen_again() -> None:
    keep()
    facts("--steps", "2", "--log", "log", "--keep")
    facts("--steps", "4", "--log", "log", "--resume", "auto")
    lines = [json.loads(line) for line in Path("log").read_text().splitlines() if '"loss"' in line]
    assert [line["step"] for line in lines if "predicted" in line.get("about", {})] == [1, 3]


def test_the_room_of_a_run_that_is_replaced_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    facts("--steps", "1", "--keep")
    full = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=1))
    monkeypatch.setattr(hardware, "shutil", full)  # of the plan alone: the store looks by itself
    facts("--steps", "1", "--log", "log", "--keep", "--resume", "restart")
    assert "predicted" in json.loads(Path("log").read_text().splitlines()[0])["about"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [(), ("--activation-checkpointing", "--lora", "r=2,dropout=0.5,targets=all-linear")])
def test_losses_are_the_same_with_a_prediction(more: tuple[str, ...]) -> None:
    make_folder(Path("model"))
    arguments = ("--model", "model", "--steps", "2", *more)
    before = facts(*arguments)
    keep()
    after = facts(*arguments)
    assert not before["predicted"] and after["predicted"]
    assert after["losses"] == before["losses"] and after["grad_norms"] == before["grad_norms"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            {"gpu": "H200", "gpu_memory_bytes": 1 << 37},
            "the probe measured another device: run `offload probe --device",
        ),
        ({}, "the drive of ./swap was not measured: run `offload probe ./swap`"),
    ],
)
def test_a_probe_of_another_machine_is_reported(
    machine: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("/proc")
    found = probe.kept()
    assert found is not None
    monkeypatch.setattr(probe, "kept", lambda: found._replace(machine=found.machine | machine))
    output = call("--steps", "1", "--log", "log").stdout
    assert "no prediction: " in output and message in output and reported("log") == []


def test_a_model_whose_code_needs_values_is_trained_without(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()

    class Choosy(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values * 2 if values.sum().item() > 1e9 else values

    real = language_model.build

    def built(name: str) -> nn.Module:
        model: Any = real(name)
        model.transformer.drop = Choosy()
        return model

    monkeypatch.setattr(language_model, "build", built)
    assert "no prediction: cannot run GPT2LMHeadModel without its weights" in call("--steps", "1").stdout


def test_counting_leaves_the_model_as_it_is_and_counts_what_the_plan_counts() -> None:
    with init():
        model: Any = build("gpt2-tiny")
    language_model.make_ready(model, gradient_checkpointing=True)
    model.eval()
    again = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    before = {name: (id(value), value.requires_grad) for name, value in model.named_parameters()}
    state = torch.random.get_rng_state()
    found = from_training(model, 32, torch.bfloat16, (), {"use_cache": False})
    assert {name: (id(value), value.requires_grad) for name, value in model.named_parameters()} == before
    assert not any(module.training for module in model.modules())
    assert again and all(model.get_submodule(name).gradient_checkpointing for name in again)
    assert torch.equal(torch.random.get_rng_state(), state)
    planned = from_name("gpt2-tiny", 32)
    assert found.uses == planned.uses and found.temporary == planned.temporary
    assert [layout.numel for layout in found.layouts] == [layout.numel for layout in planned.layouts]


def test_adapters_are_counted_with_their_model() -> None:
    complete = from_name("gpt2-tiny", 32)
    with init():
        model: Any = build("gpt2-tiny")
    language_model.make_ready(model, gradient_checkpointing=False)
    model = adapt(model, parse_lora("r=2"))
    found = from_training(model, 32, torch.bfloat16, (), {})
    assert sum(layout.trainable_stop for layout in found.layouts) < 0.2 * complete.parameters < found.parameters
    assert sum(use.flops for use in found.uses) > sum(use.flops for use in complete.uses)
