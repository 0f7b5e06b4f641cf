"""`offload plan` turns descriptions of a model and a machine into bytes, advice and a config, and names wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.errors import BudgetError
from offload.finetune.options import Options, merge, schedule
from offload.planner import memory, recommend, request
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.planner.output import Asked, lines
from offload.sizes import GIB, format_size
from tests.planner.plan_command import found, run

MACHINE = ("--gpu", "24GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
COUNT = ("--parameters", "13B", "--layers", "10")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def plan(shape: Shape, machine: Hardware, load: Load, **options: Any) -> recommend.Planned:
    return recommend.plan(shape, machine, load, memory.settings(**options))


def test_a_described_machine_needs_no_measurement() -> None:
    report = found(*COUNT, *MACHINE, "--tokens", "1B", "--tbw", "1200TB")
    *rows, total = report["tiers"]
    for tier in ("device", "host", "disk"):
        assert sum(row[tier] for row in rows) == total[tier]
    assert (total["host"], total["device"], total["disk"]) == (
        report["host_memory"],
        report["device_memory"],
        report["disk"],
    )
    assert report["model"]["parameters"] == 13 * 10**9
    assert report["disk"] == pytest.approx(24 * 13e9, rel=0.001), "two slots"
    assert report["least_host_memory"] < report["host_memory"] < 64 * GIB
    step = report["step"]
    assert step["limit"] == "NVMe" and step["seconds"] > step["compute_seconds"]
    assert step["written_bytes"] == pytest.approx(12 * 13e9, rel=0.001)
    assert report["run_seconds"] == pytest.approx(1e9 / step["tokens_per_second"], rel=0.001)
    steps = 1200e12 / step["written_bytes"]
    assert report["drive_years"] * 365.25 * 86400 == pytest.approx(steps * step["seconds"], rel=1e-3)
    assert any("RTX 3090" in message for message in report["machine"]["assumed"])
    assert report["changes"] == sorted(report["changes"], key=lambda change: -change["gain"])


@pytest.mark.parametrize(
    ("host_memory", "why"),
    [(None, 'without "host_memory" a budget is at most 80%'), (8 * GIB, '"host_memory" of the config is 8.0 GiB')],
)
def test_ram_that_stays_free_beside_gradients_on_disk_has_a_reason(host_memory: int | None, why: str) -> None:
    machine = described("RTX 4090", 16 * GIB, [parse_drive("7GB/s,4GB/s")])
    planned = plan(from_count(13 * 10**9, 10, 128), machine, Load(1), host_memory=host_memory)
    spare = f"{format_size(machine.ram - planned.host_peak)} of RAM stay free beside "
    (line,) = [each for each in lines(planned, recommend.Advice((), 0), Asked()) if spare in each]
    assert f"{format_size(planned.memory.spilled)} of gradients on disk: {why}" in line


def test_drives_too_small_for_the_swap_files_are_named(shape: Shape) -> None:
    # One slot of 145.3 GiB, and 100 GB are 93.1.
    small = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s,100GB")])
    with pytest.raises(BudgetError, match=r"the swap files take 52\.2 GiB more than is free on the drives"):
        plan(shape, small, Load(1))


def test_hardware_descriptions_are_parsed() -> None:
    done = run(*COUNT, *MACHINE, "--tokens", "1B", "--tbw", "1200TB")
    assert done.exit_code == 0, done.output
    for message in (
        "weights on",
        "buffers of the optimizer",
        "low bits of masters",
        "minimum",
        "NVMe limits",
        "what to change first",
    ):
        assert message in done.stdout
    assert "assumed:" in done.stdout and "1B tokens take" in done.stdout and "rated 1200 TB" in done.stdout


def test_help_has_an_example() -> None:
    for command in ("plan", "probe"):
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0 and f"Example: offload {command}" in done.stdout


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "not probed"),
        (MACHINE, "expected a model"),
        ((*MACHINE, "--parameters", "13B"), "--parameters needs --layers"),
        ((*MACHINE, *COUNT, "--model", "llama-1b"), "not both"),
        ((*MACHINE, "--model", "lama-1b"), "did you mean llama-1b"),
        ((*MACHINE, "--model", "owner/name-8B"), "hf download owner/name-8B config.json --local-dir name-8B"),
        ((*COUNT, "--gpu", "9000XT"), "there is no GPU"),
        ((*COUNT, "--gpu", "24GB", "--drive", "fast"), "expected a drive"),
        ((*COUNT, "--gpu", "24GB", "--drive", "7,4"), "expected a drive"),
        ((*COUNT, "--gpu", "24GB", "--drive", "7Gb/s,4Gb/s"), "bits a second"),
        ((*COUNT, "--gpu", "24GB", "--drive", "2TB"), "'2TB' is a size, not a rate; write 2TB/s if it is a rate"),
        ((*COUNT, "--gpu", "24GB", "--drive", "7GB/s,4GB/s,2"), "expected a size with its unit, got '2'"),
        ((*COUNT, "--gpu", "24GB", "--drive", " "), "expected a drive"),
        ((*COUNT, "--gpu", "24GB", "--drive", ""), "an argument is empty, that of --drive"),
        ((*COUNT, "--gpu", "24GB", "--pcie", "25"), "expected a rate"),
        ((*COUNT, "--gpu", "0GB"), "there is no GPU"),
        ((*COUNT, *MACHINE, "--tbw", "0"), "such as 1200TB"),
        ((*MACHINE, "--model", " "), "unknown model"),
        ((*MACHINE, "--model", ""), "an argument is empty, that of --model"),
        ((*MACHINE, "--model", "gpt2-tiny", "--seq-len", "2000"), "1024 positions"),
        ((*MACHINE, "--parameters", "1", "--layers", "1"), "too few"),
        ((*MACHINE, "--parameters", "100", "--layers", "40"), "too few"),
        ((*MACHINE, "--parameters", "0.1", "--layers", "1"), "1.5B or 2T"),
        ((*MACHINE, "--parameters", "1e30", "--layers", "4"), "at most 1e15"),
        ((*MACHINE, "--parameters", "13B", "--layers", "1000000"), "at most 1e15"),
        ((*COUNT, "--gpu", "24GB", "--nvme-path", "/x"), "describe drives by --drive"),
        ((*COUNT, *MACHINE, "--batch-size", "0"), "at least 1"),
        ((*COUNT, *MACHINE, "--batch-size", "4096"), "--batch-size"),
        ((*COUNT, *MACHINE, "--accumulation", "9999999999999999"), "at most 4096 micro-batches a step, got 9999999"),
        ((*COUNT, *MACHINE, "--dtype", "int4"), "there is no dtype"),
        ((*COUNT, *MACHINE, "--moments", "int4"), "expected --moments of fp32, bf16, int8"),
        ((*COUNT, *MACHINE, "--master", "bf16"), "expected --master of fp32, bf24"),
        ((*COUNT, *MACHINE, "--config", "/none/such.json"), "cannot read the config"),
        ((*COUNT, *MACHINE, "--write", "/none/such/file.json"), "there is no folder"),
    ],
)
def test_wrong_descriptions_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.output, done.output


def test_the_written_config_contains_the_plan(tmp_path: Path) -> None:
    folder, target = tmp_path / "model", tmp_path / "ds_config.json"
    shape = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=512
    )
    shape.save_pretrained(folder)
    report = found("--model", str(folder), *MACHINE, "--seq-len", "64", "--write", str(target))
    content = json.loads(target.read_text())
    assert run("--model", str(folder), *MACHINE, "--write", str(target)).exit_code == 2, "it is not written over"
    mine, theirs = (schedule(merge(file, Options())[0], Options(), 100)[0] for file in (content, None))
    assert all(mine[key] == theirs[key] for key in ("optimizer", "gradient_clipping", "scheduler")), "as train does"
    content["offload"] |= {"nvme_path": str(tmp_path), "device": "cpu"}
    with offload.init(content):
        model = transformers.LlamaForCausalLM(shape)
    engine = offload.initialize(model=model, config=content)[0]
    try:
        assert engine.parameter_count == report["model"]["parameters"]
        assert "device_memory" not in content["offload"], "of a GPU it is measured in the first step"
        assert engine.host_memory <= report["host_memory"], "no staging where the device is the CPU"
    finally:
        engine.destroy(remove=True)


def test_a_config_is_planned_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    content = memory.settings("cpu", "nvme", durability="none", accumulation=3, batch=2)
    file.write_text(json.dumps(content))
    report = found(*COUNT, *MACHINE, "--config", str(file), "--seq-len", "512", "--gradient-checkpointing")
    assert report["slots"] == 1 and report["config"] == content
    assert report["step"]["tokens"] == 3 * 2 * 512


def test_a_model_that_is_no_language_model_is_one_line(tmp_path: Path) -> None:
    transformers.T5Config(d_model=64, d_ff=64, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    done = run("--model", str(tmp_path), *MACHINE)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and "T5Config" in done.stderr


def test_a_small_model_is_counted_in_its_own_unit() -> None:
    assert "3.49 million parameters" in run("--model", "gpt2-tiny", "--seq-len", "64", *MACHINE).stdout


def test_a_config_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "written.json"

    def full(path: Path, *options: Any, **more: Any) -> Any:
        path.touch()
        return Path("/dev/full").open("w")

    monkeypatch.setattr(request, "open", full, raising=False)
    done = run("--model", "gpt2-tiny", "--seq-len", "64", *MACHINE, "--write", str(target))
    assert done.exit_code == 1 and f"cannot write the config {target}: No space left" in done.stderr
    assert not target.exists()


def test_auto_is_the_dtype_that_it_takes_by_itself() -> None:
    assert found(*COUNT, *MACHINE, "--dtype", "auto") == found(*COUNT, *MACHINE)
