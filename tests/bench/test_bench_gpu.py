"""`offload bench gpu` is one command for all parts, and refuses wrong options before anything is measured."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from offload.bench.gpu import __main__ as command
from offload.bench.gpu import report
from offload.bench.gpu.parts import Part
from offload.cli.main import app
from offload.errors import ConfigError
from offload.sizes import GIB
from tests import ROOT
from tests.support.processes import warm_process


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command",
    [
        ("-m", "bench.gpu", "--json"),
        ("-m", "offload.bench.gpu", "--json"),
        ("-m", "offload", "bench", "gpu", "--output"),
    ],
    ids=["bench.gpu", "offload.bench.gpu", "offload bench gpu"],
)
def test_without_a_gpu_the_command_is_an_error_that_touches_nothing(command: tuple[str, ...], tmp_path: Path) -> None:
    done = warm_process.run([*command, str(tmp_path / "figures.json")], cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "there is no GPU to measure" in done.stderr and not done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "tpu"), "expected --device cuda or cpu"),
        (("--device", "cpu", "--steps", "0"), "expected steps of at least 1"),
        (("--device", "cpu", "--budget-minutes", "0"), "expected minutes above 0"),
        (("--device", "cpu", "--nbytes", "many"), "many"),
        (("/none/such", "--device", "cpu"), "there is no folder /none/such"),
        (("--device", "cpu", "--output", "/none/such/file"), "there is no folder /none/such"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(options: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "gpu", *options])
    assert done.exit_code == 2 and words in done.output


def test_an_installation_without_transformers_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="transformers is not installed"):
        command.check_machine("cpu")


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
    figures, before = tmp_path / "figures.json", signal.getsignal(signal.SIGTERM)
    words = ["--device", "cpu", "--nbytes", "1MiB", "--output", str(figures), str(tmp_path)]
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
    assert list(tmp_path.iterdir()) == [figures] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("option", [["--only", "nonsense"], ["--model", "nonsense"]])
def test_a_part_or_a_model_that_does_not_exist_is_refused_before_anything_runs(
    option: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        command.main(["--device", "cpu", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json"), *option])
    assert list(tmp_path.iterdir()) == []
