"""Every benchmark runs and reports its figures; on little data, so that the numbers mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import checkpoint, host_time, measure, score
from bench.memory_limit import MemoryLimit, Usage, controller
from tests.support.oracle import processes


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own, from one that has imported torch: their memory would not be a new one's."""
    context = processes()
    monkeypatch.setattr(measure, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def _figures(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    figures: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["machine"]
    return figures


def test_bench_score_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model", "gpt2-tiny", "--seq-len", "16", "--rounds", "3", "--micro-batches", "3"]
    score._write("gpt2-tiny", None, "bfloat16", tmp_path / "bench-score-gpt2-tiny-bfloat16")  # else a new Python does
    score.main([str(tmp_path), *sizes])
    figures = _figures(capsys)
    # The last round may have read ahead for a fourth, and the first have found less of that.
    assert 0 < figures["read_bytes_a_round"] <= 1.1 * figures["file_bytes"] and figures["over_bound"] > 0


def test_bench_host_time_reports_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        host_time.main(["--units", "6", "--rounds", "1"])
    finally:
        torch.set_num_threads(threads)
    assert _figures(capsys)["plain_forward_us"] > 0


@pytest.mark.slow
def test_bench_checkpoint_reports_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.main([str(tmp_path), "--model", "gpt2-tiny", "--layers", "2", "--rounds", "1"])
    figures: dict[str, dict[str, float]] = _figures(capsys)  # type: ignore[assignment]
    assert all(figures[name]["seconds"] > 0 and figures[name]["kept"] for name in ("save", "load"))
    assert not list(tmp_path.glob("bench-checkpoint-saved")), "it cleans up"


VERSIONS = {
    "1": {
        "memory.limit_in_bytes": "max",
        "memory.memsw.limit_in_bytes": "max",
        "memory.stat": "cache 50\nrss 300\nshmem 20\n",
        "memory.kmem.usage_in_bytes": "7",
        "memory.max_usage_in_bytes": "400",
    },
    "2": {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.stat": "anon 300\nfile 50\nkernel 7\nshmem 20\n",
        "memory.peak": "400",
    },
}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_limit_is_set_and_usage_read_in_both_versions_of_cgroups(version: str, tmp_path: Path) -> None:
    files = VERSIONS[version]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    group = MemoryLimit(tmp_path)
    group.limit(1 << 20)
    assert {(tmp_path / name).read_text() for name, content in files.items() if content == "max"} <= {"0", "1048576"}
    assert (tmp_path / next(iter(files))).read_text() == "1048576"
    assert group.usage() == Usage(own=320, kernel=7, files=30)
    assert group.charged == 400


def test_the_place_of_a_new_group_is_below_a_group_of_version_1_and_beside_one_of_version_2(tmp_path: Path) -> None:
    groups, place = tmp_path / "groups", tmp_path / "memory" / "slice" / "session"
    place.mkdir(parents=True)
    groups.write_text("4:cpu,memory:/slice/session\n0::/\n")
    assert controller(tmp_path, str(groups)) == place
    groups.write_text("4:cpu:/slice/session\n0::/memory/slice\n")
    assert controller(tmp_path, str(groups)) is None, "the memory controller is in neither version"
    (tmp_path / "memory" / "cgroup.controllers").write_text("cpu memory")
    assert controller(tmp_path, str(groups)) == tmp_path / "memory"
