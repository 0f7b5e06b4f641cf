"""`offload bench card` says what a machine trains, what limits it, and that a killed run resumes with equal bits."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload.bench import card, card_page
from offload.bench.gpu.training import Profile, profiled
from offload.bench.measure import limit_device_memory
from offload.cli.main import app
from offload.errors import ConfigError
from offload.hardware.probe import DriveRates, DtypeRates, Probed, Rates, as_json
from offload.planner.hardware import Drive, Hardware, described
from offload.planner.model_shape import from_preset
from offload.planner.request import ready
from offload.presets import PRESETS
from offload.report.links import Span
from offload.sizes import GIB
from tests.support.drives import filesystems
from tests.support.processes import warm_process

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
TINY = card.Kind(("gpt2-tiny",), 16, (1,), 2, "gpt2-tiny", "gpt2-tiny", (1, 16), 1e8, {card.TEXT: 1.0, card.PEERS: 1.0})
OF_DTYPE = DtypeRates(matmul=1e11, weights=1e10, elementwise=1e10, optimizer=1e9, gradient=1e9)
RATES = Rates(1e10, 1e10, 2e10, 1e10, 1e10, dict.fromkeys(("fp32", "bf16", "fp16"), OF_DTYPE))


FIGURES: dict[str, Any] = {
    **{f"{way}_bytes_per_parameter": 0.0 for way in ("read", "written", "uploaded", "downloaded")},
    "parameters": 1_000_000,
    "step_seconds": 2.0,
    "tokens_per_second": 12_345.0,
    "profiled": None,
    "peak_host_bytes": GIB,
    "peak_device_bytes": None,
    "disk_bytes": 0,
    "divided": {"compute": 1.0, card.OTHER: 1.0},
}
"""Of a row's process on a CPU."""


def probed(folder: Path) -> Probed:
    machine = {"gpu": None, "gpu_memory_bytes": 0, "processor": "a processor", "cores": 2}
    return Probed(machine, RATES, (DriveRates(str(folder), "sda", 2e9, 1e9, 1e9),), "2026-11-29", 1.0)


@WITHOUT_GPU
@pytest.mark.slow  # the whole command, in six processes; its parts have tests of their own
def test_a_row_and_a_run_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CPU": TINY, "STEPS": 4, "KILLED_AFTER": 2, "_PROBE_SECONDS": 0.2, "_TIMED": 1}.items():
        monkeypatch.setattr(card, name, value)
    monkeypatch.setattr(sys, "executable", str(warm_process.commands(tmp_path / "bin") / "python"))
    folder, output = tmp_path / "drive", tmp_path / "card.json"
    folder.mkdir()
    words = ["--only", "text", "--only", "gpt2-tiny", "--output", str(output)]
    done = CliRunner().invoke(app, ["bench", "card", str(folder), *words])
    assert done.exit_code == 0, done.output
    report = json.loads(output.read_text())
    assert report["text"]["equal_bits"] and 0 < report["text"]["resumed_after"] <= 2
    assert report["text"]["largest_difference"] < 1e-2
    (row,) = report["rows"]
    divided = row["figures"]["divided"]
    assert divided["compute"] > 0 and row["resources"].keys() == {"products", "AdamW", "drive"}
    assert "equal bits of losses and weights" in done.output and "gpt2-tiny: predicted" in done.output
    assert list(folder.iterdir()) == [], "the folder is as it was"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("/none/such",), "there is no folder /none/such; make it with `mkdir -p /none/such`"),
        ((".", "--minutes", "0"), "expected --minutes above 0"),
        ((".", "--only", "llama-2b"), "--only llama-2b: expected text, peers or a preset: gpt2-tiny, gpt2-small"),
        ((".", "--only", "./folder"), "--only ./folder: expected text, peers or a preset"),
        ((".", "--output", "."), "--output . cannot be written: it is a folder; give a file"),
        ((".", "--output", "/proc/card"), "--output /proc/card cannot be written"),
        ((".", "--output", "/none/such/file"), "there is no folder /none/such; make it with `mkdir -p /none/such`"),
        pytest.param((".", "--gpu-memory", "24GiB"), "--gpu-memory limits a GPU", marks=WITHOUT_GPU),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(options: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", "card", *options])
    assert done.exit_code == 2 and words in done.output


def test_models_are_in_the_order_of_their_sizes() -> None:
    """The command takes the largest that fits as the last row, so the order must follow new presets."""
    known = [shape.parameters for shape in (from_preset(name, 16, 2) for name in card.MODELS) if shape is not None]
    assert len(known) > 8 and known == sorted(known) and set(card.MODELS) == set(PRESETS)


@WITHOUT_GPU
def test_parts_without_time_are_named_and_failed_ones_are_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "CPU", TINY)
    ended = [{"state": "done", "figures": as_json(probed(tmp_path))}]
    monkeypatch.setattr(card, "run_child", lambda *_, **__: ended.pop(0))
    report = card.measure(card.check(tmp_path, None, 0.001, ["text", "peers", "gpt2-tiny"]))
    assert report["left_out"].keys() == {"text", "peers", "gpt2-tiny"} and card.judge(report) == 0
    page = card_page.page(report)
    assert "s predicted)" in page and page.count("left out for time: it takes about") == 3
    ended += [{"state": "failed", "figures": None, "exit_code": 1, "last_lines": ["RuntimeError: no"]}]
    report = card.measure(card.check(tmp_path, None, 1, []))
    assert card.judge(report) == 1 and "probe FAILED: ended with exit code 1: RuntimeError: no" in card_page.page(
        report
    )


@WITHOUT_GPU
def test_a_full_folder_ends_a_part_and_the_page_keeps_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "CPU", TINY)
    with filesystems.mounted(tmp_path, "-t", "tmpfs", "-o", "nr_inodes=4", "none") as drive:

        def child(module: str, job: Any, figures: Path, *_: Any, **__: Any) -> dict[str, Any]:
            if job["part"] == "probe":
                return {"state": "done", "figures": as_json(probed(drive))}
            (figures.parent / "filler").touch()  # the file of figures takes the last inode
            return {"state": "done", "figures": FIGURES}

        monkeypatch.setattr(card, "run_child", child)
        output = drive / "card.json"
        report = card.measure(card.check(drive, None, 10, ["gpt2-tiny", "peers"]), output)
        assert list(drive.iterdir()) == [output] and json.loads(output.read_text())["failed"] == report["failed"]
        unwritten = card.measure(card.check(drive, None, 0.001, ["text"]), drive / "none" / "card.json")
    page = card_page.page(report)
    assert card.judge(report) == card.judge(unwritten) == 1
    assert report["failed"].keys() == {"peers"} and unwritten["failed"].keys() == {"--output"}
    assert "No space left on device" in page and f"{drive} needs free space and must be writable" in page
    assert report["rows"][0]["bound_seconds"] > 0 and "12,345" in page


def test_a_steps_time_adds_up_and_kernels_of_a_gpu_come_first() -> None:
    def span(row: str, name: str, start: float, end: float) -> Span:
        return Span(row=row, lane=0, name=name, start=1e6 * start, end=1e6 * end, nbytes=0)

    spans = [
        span("compute", "forward h", 10.0, 14.0),
        span("compute", "step 3", 18.0, 20.0),
        span("waits", "waits for update of h", 12.0, 13.0),
        span("waits", "waits for read of h", 13.5, 15.0),
        span("downloads", "h", 16.0, 17.0),
    ]
    on_cpu = card.divide(10, 20, card.layers(Profile(10, 20, None), spans))
    expected = {card.UPDATES: 1.0, card.READS: 1.5, "compute": 2.5, "copies": 0.0, "receiver": 1.0, card.OTHER: 4.0}
    assert on_cpu == pytest.approx(expected)
    on_gpu = card.divide(10, 20, card.layers(Profile(10, 20, [(9, 11), (12.5, 14)], [(13, 16.5)]), spans))
    expected = {"kernels": 2.5, card.UPDATES: 0.5, card.READS: 1.0, "copies": 1.5, "receiver": 0.5, card.OTHER: 4.0}
    assert on_gpu == pytest.approx(expected) and sum(on_gpu.values()) == pytest.approx(10)
    assert card_page.bar(on_gpu, 20) == "#" * 5 + "u" + "rr" + "ccc" + "g" + "." * 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_profilers_kernels_are_within_the_step() -> None:
    """Both clocks agree, so that kernels and spans of the timeline may be compared."""
    some = torch.ones(2048, 2048, device="cuda")
    profile = profiled(some.device, lambda: some @ some)
    assert profile.kernels
    assert all(profile.start <= start < end <= profile.end for start, end in profile.kernels)


def gpu() -> Hardware:
    """A card of 24 GiB with 128 GiB of RAM, as the planner takes it."""
    return described("RTX 4090", 128 * GIB, [Drive("/mnt/nvme", 7e9, 5e9, 5.8e9)], 75e9)


def test_the_page_of_a_gpu(tmp_path: Path) -> None:
    """Planned for a GPU, with figures as its processes write them; none of it was measured."""
    plan = card.CardPlan(tmp_path, torch.device("cuda"), 24 * GIB, 12.0, ())
    planned = card.prediction(card.planned_row(plan, gpu(), "llama-3b", tmp_path))
    assert (planned["batch_size"], planned["accumulation"], planned["tiers"]) == (4, 4, "none/cpu")
    ways = {
        f"{way}_bytes_per_parameter": nbytes
        for way, nbytes in zip(("read", "written", "uploaded", "downloaded"), (0.0, 0.0, 4.0, 2.0), strict=True)
    }
    divided = {"kernels": 6.0, card.UPDATES: 1.0, card.READS: 0.0, "copies": 0.5, "receiver": 0.25, card.OTHER: 0.25}
    figures = {"parameters": planned["parameters"], "step_seconds": 8.0, "tokens_per_second": 4096.0, **ways}
    figures |= {"profiled": {"kernels": 6.0}, "peak_device_bytes": 9 * GIB, "peak_host_bytes": 50 * GIB}
    figures |= {"disk_bytes": 0, "divided": divided}
    needed = card.resources(probed(tmp_path), planned, figures)
    assert needed == pytest.approx(
        {
            "kernels": 6.0,
            "copies up": 4 * planned["parameters"] / 2e10,
            "copies down": 2 * planned["parameters"] / 1e10,
            "AdamW": planned["parameters"] / 1e9,
            "drive": 0.0,
        }
    )
    peer = dict.fromkeys(("step_seconds", "loss_difference", "over_plain", "peak_device_bytes", "peak_host_bytes"))
    reasons = {
        "deepspeed cpu/cpu": "skipped: DeepSpeed is not installed",
        "plain": "OutOfMemoryError: CUDA out of memory",
    }
    peers: dict[str, Any] = {"model": "llama-3b", "micro_batches": 4, "batch_size": 4, "seq_len": 2048}
    peers["rows"] = [{"name": name, "refused": reason, **peer} for name, reason in reasons.items()]
    ours = {"step_seconds": 8.0, "tokens_per_second": 4096.0, "over_plain": 1.5, "loss_difference": 0.0}
    ours |= {"peak_device_bytes": 7 * GIB, "peak_host_bytes": 50 * GIB}
    peers["rows"].append({"name": "offload cpu/cpu", "refused": None, **ours})
    facts = {"gpu": "A card", "gpu_memory": 80 * GIB, "processor": "a processor", "cores": 16, "memory": 128 * GIB}
    row = {"model": "llama-3b", "planned": planned, "figures": figures}
    report: dict[str, Any] = {
        "machine": facts | {"torch": "2.13", "offload": "0.1"},
        "given": {"gpu_memory": 24 * GIB},
        "rows": [
            row | {"resources": needed, "bound_seconds": card.bound(needed)},
            {"model": "llama-70b", "does_not_fit": "a budget is too small"},
        ],
        "peers": peers,
        "left_out": {},
        "failed": {},
    }
    page = card_page.page(report)
    for words in (
        "A card, 80.0 GiB, held to 24.0 GiB",
        "75%",
        "copies down s",
        "9.0 GiB",
        "#" * 38 + "u" * 6,
        "not installed",
        "does not fit",
        "8.000 s     4,096        1.50  50.0 GiB   7.0 GiB   equal",
        "llama-70b does not fit: a budget is too small",
    ):
        assert words in page, (words, page)


def test_with_a_slow_processor_both_of_its_tasks_are_one_resource() -> None:
    assert card.bound({"products": 2.0, "AdamW": 1.0, "drive": 2.5}) == 3.0
    assert card.bound({"kernels": 2.0, "AdamW": 1.0, "drive": 2.5}) == 2.5


@pytest.mark.slow
@pytest.mark.test_device
def test_a_planned_step_runs_on_a_device_with_memory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "GPU", TINY)
    monkeypatch.setattr(card, "_TIMED", 1)
    plan = card.CardPlan(tmp_path, torch.device("test"), None, 12.0, ())
    planned = card.planned_row(plan, gpu(), "gpt2-tiny", tmp_path)
    settings = ready(planned)
    settings["zero_optimization"] |= {name: {"device": "cpu"} for name in ("offload_param", "offload_optimizer")}
    settings["offload"] |= {"device": "test", "run": "bench-card"}
    settings["offload"].pop("host_memory", None)  # of the plan, which has everything on the device
    seen: list[dict[str, Any]] = []
    about = card.prediction(planned)
    job = {name: about[name] for name in card._OF_WORK if name in about} | {"model": "gpt2-tiny", "limit": None}
    card.row(job | {"settings": settings, "folder": str(tmp_path), "device": "test", "until": math.inf}, seen.append)
    assert seen[-1]["uploaded_bytes_per_parameter"] > 0 and seen[-1]["divided"]["compute"] > 0


def test_an_installation_without_transformers_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="transformers is not installed"):
        card.check(tmp_path, None, 1.0, ())


def test_the_limit_of_a_gpu_that_is_named_without_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses such a device here alone."""
    limits: list[tuple[float, int]] = []
    for name, value in {
        "current_device": lambda: 1,
        "get_device_properties": lambda index: SimpleNamespace(total_memory=48 * GIB),
        "set_per_process_memory_fraction": lambda *given: limits.append(given),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    limit_device_memory(torch.device("cuda"), 24 * GIB)
    limit_device_memory(torch.device("cuda", 2), 96 * GIB)
    assert limits == [(0.5, 1), (1.0, 2)]
