"""What an engine sets, says and leaves alone on a GPU: allocator, dtype, cores, capture. A fake torch answers here."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offload import kernels, precision, testing
from offload.cli.main import app
from offload.config import load_config
from offload.finetune import job
from offload.kernels import settings
from offload.notices import Remark
from offload.swapper.memory import device
from tests.support import models
from tests.support.devices.late_device import LateDevice, use_device
from tests.support.oracle import start
from tests.support.processes.cli_in_process import isolated_cache, run_folder

__all__ = ["isolated_cache", "run_folder"]  # fixtures

GROWING = "expandable_segments:True"

# -- torch's allocator --------------------------------------------------------------------------------


def test_segments_grow_by_default() -> None:
    asks, line = device.growing_segments({}, False)
    assert asks and isinstance(line, Remark) and f"PYTORCH_CUDA_ALLOC_CONF={GROWING}" in line


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:512", "backend:cudaMallocAsync"])
def test_what_the_user_has_set_stays(name: str, value: str) -> None:
    assert device.growing_segments({name: value}, False) == (False, None)


def test_a_gpu_that_is_in_use_already_is_left_alone() -> None:
    asks, line = device.growing_segments({}, True)
    assert not asks and isinstance(line, Remark) and "CUDA was in use before" in line


def test_the_environment_is_set_once_and_the_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # restored at the end, whatever is set below
    assert device.let_segments_grow("auto") == (), "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.let_segments_grow("cpu") == ()
    (line,) = device.let_segments_grow("auto")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == GROWING and not os.environ["PYTORCH_ALLOC_CONF"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device.let_segments_grow("cuda") == (line,)


def test_train_asks_before_it_uses_the_gpu(monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> None:
    """The choice of a dtype asks the GPU, and torch reads the setting with the first use."""
    calls: list[str] = []
    settle = job.settle
    monkeypatch.setattr(job, "let_segments_grow", lambda device: calls.append(device))
    monkeypatch.setattr(job, "settle", lambda content: calls.append("settle") or settle(content))
    small = ("--text", "text.py", "--batch-size", "2", "--seq-len", "32", "--device", "cpu", "--steps", "1")
    done = CliRunner().invoke(app, ["train", *small])
    assert done.exit_code == 0, done.output
    assert calls == ["cpu", "settle"]


# -- dtype --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_emulated_bf16_is_warned_of_once(
    native: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    testing.replace(monkeypatch, "dtype.warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    base: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with caplog.at_level(logging.WARNING, "offload"):
        for _ in range(2):
            precision.warn_if_slow(load_config(base | {"bf16": {"enabled": True}}), torch.device("cuda", 0), False)
        precision.warn_if_slow(load_config(base | {"fp16": {"enabled": True}}), torch.device("cuda", 0), False)
    words = [record.getMessage() for record in caplog.records]
    assert len(words) == (0 if native else 1)
    assert all("Tesla T4 has no arithmetic in bf16" in each and '"fp16": {"enabled": true}' in each for each in words)


# -- cores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (15, 14), (16, 14), (64, 62)])
def test_cores_are_left_to_the_threads_that_give_work_to_a_device(cores: int, threads: int) -> None:
    assert settings.threads_beside_device({}, cores) == threads
    assert settings.threads_beside_device({"OFFLOAD_THREADS": "5"}, cores) == 5


def test_only_an_engine_on_another_device_leaves_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_THREADS", raising=False)
    testing.replace(monkeypatch, "machine.kernel_cores", lambda: 6)
    before = kernels.thread_count()
    try:
        start(models.GPT2, ("cpu", "cpu"), tmp_path / "cpu", device="cpu").destroy(remove=True)
        assert kernels.thread_count() == before
        use_device(monkeypatch, LateDevice(0, 0.0))
        start(models.GPT2, ("cpu", "cpu"), tmp_path / "late").destroy(remove=True)
        assert kernels.thread_count() == 5
    finally:
        kernels._native.configure(kernels.isa_from(os.environ, kernels._native.supported_isas()), before)
