"""The same bits for every instruction set, number of threads, cut into calls, caller and process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from offload import kernels
from offload.errors import ConfigError
from offload.kernels import AdamWStep, _native, settings
from tests import ROOT
from tests.support.kernel_inputs import ISAS, default_settings

__all__ = ["default_settings"]  # fixtures

pytestmark = pytest.mark.numeric

NUMEL = 150_001  # five chunks of the team, the last one odd


def inputs(numel: int) -> list[torch.Tensor]:
    """weight, residual, exp_avg, exp_avg_sq, grad: with denormals, zeros and infinities among them."""
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-30, 4, (numel,), generator=generator)
    weight, residual = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    kernels.split_master(master, weight, residual)
    exp_avg = torch.randn(numel, generator=generator) * 1e-3
    exp_avg_sq = exp_avg.square() * torch.rand(numel, generator=generator)
    exp_avg_sq[::7] = 1e-41
    exp_avg[5::77] = float("inf")
    grad = torch.randn(numel, generator=generator) * 1e-2
    grad[::5] = 1e-40
    return [weight, residual, exp_avg, exp_avg_sq, grad]


def digest(tensors: list[torch.Tensor], sums: list[float]) -> str:
    sums_hash = hashlib.sha256(repr([total.hex() for total in sums]).encode())
    for tensor in tensors:
        # [Note: same bits] leaves the payload of a NaN free, so every NaN counts as one pattern.
        plain = tensor.nan_to_num(nan=0.125, posinf=None) if tensor.is_floating_point() else tensor
        sums_hash.update(plain.contiguous().view(torch.uint8).numpy().tobytes())
    return sums_hash.hexdigest()


def run_all(cuts: list[int]) -> str:
    """Every kernel on the same input, its range cut at `cuts`; a digest of all that came out."""
    weight, residual, exp_avg, exp_avg_sq, grad = inputs(NUMEL)
    grad_bf16, joined, out = grad.bfloat16(), torch.empty(NUMEL), torch.zeros(NUMEL, dtype=torch.bfloat16)
    uncut = torch.empty(NUMEL)
    kernels.join_master(weight, residual, uncut)
    uncut_moments = [exp_avg.clone(), exp_avg_sq.clone()]
    for start, stop in zip([0, *cuts], [*cuts, NUMEL], strict=True):
        part = slice(start, stop)
        for number in (1, 2):
            step = AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, number, 0.5)
            kernels.adamw(weight[part], residual[part], exp_avg[part], exp_avg_sq[part], grad[part], step)
            step = step._replace(decoupled=False, beta1=0.4)
            kernels.adamw(uncut[part], None, uncut_moments[0][part], uncut_moments[1][part], grad_bf16[part], step)
        kernels.join_master(weight[part], residual[part], joined[part])
        kernels.accumulate(out[part], grad[part], add=False)
        kernels.accumulate(out[part], grad_bf16[part], add=True)
    sums = [kernels.sum_squares(grad), kernels.sum_squares(out), kernels.accumulate(out, grad, add=True)]
    return digest([weight, residual, exp_avg, exp_avg_sq, joined, out, uncut, *uncut_moments], sums)


@pytest.fixture(scope="module")
def scalar_digest() -> str:
    _native.configure("scalar", 1)
    return run_all([])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("cuts", [[33, 4096, 70_001], [0, 149_999, 150_000]])
def test_no_setting_shows_in_the_result(isa: str, threads: int, cuts: list[int], scalar_digest: str) -> None:
    _native.configure(isa, threads)
    assert kernels.thread_count() == threads
    assert run_all(cuts) == scalar_digest


def test_concurrent_callers_do_not_disturb_each_other(scalar_digest: str) -> None:
    _native.configure(ISAS[-1], 3)
    digests: list[str] = []
    callers = [threading.Thread(target=lambda: digests.append(run_all([40_000]))) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert digests == [scalar_digest] * 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_team_of_its_own() -> None:
    _native.configure(ISAS[-1], 2)
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    expected = kernels.sum_squares(values)
    stop = threading.Event()

    def keep_the_team_busy() -> None:
        while not stop.is_set():
            kernels.sum_squares(values)

    caller = threading.Thread(target=keep_the_team_busy)
    caller.start()
    try:
        for _ in range(4):
            child = os.fork()
            if child == 0:  # no return into pytest from here
                os._exit(0 if all(kernels.sum_squares(values) == expected for _ in range(3)) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        caller.join()
    assert kernels.sum_squares(values) == expected


PRINT_SETTINGS = """
import torch
from offload import kernels
print(kernels.thread_count(), kernels.sum_squares(torch.arange(100_000.0)).hex())
"""


def run_python(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRINT_SETTINGS],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_chooses_threads_and_instruction_set() -> None:
    done = run_python(OFFLOAD_THREADS="3", OFFLOAD_ISA="scalar")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", kernels.sum_squares(torch.arange(100_000.0)).hex()]


def test_a_wrong_environment_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="OFFLOAD_ISA: expected 'scalar', 'avx2', 'avx512' or 'neon', got 'sse9'"):
        settings.isa_from({"OFFLOAD_ISA": "sse9"}, ["scalar", "avx2"])
    for text in ("0", "-1", "two", "²", "99999"):
        with pytest.raises(ConfigError, match="OFFLOAD_THREADS: expected a whole number from 1 to 1024"):
            settings.threads_from({"OFFLOAD_THREADS": text})
    with pytest.raises(ConfigError, match="OFFLOAD_ISA=avx512: this machine supports only scalar, avx2"):
        settings.isa_from({"OFFLOAD_ISA": "avx512"}, ["scalar", "avx2"])
    with pytest.raises(ValueError, match="does not support sse9"):
        _native.configure("sse9", 1)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_cgroup_quota_cuts_the_cores(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert settings._cgroup_quota(tmp_path) == quota
    if quota is not None:
        assert settings.available_cores(tmp_path) == 1


def test_a_list_of_processors() -> None:
    cpus: list[int]
    for text, cpus in (
        ("0", [0]),
        ("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]),
        ("", []),
        ("none", []),
        ("1000-5000", list(range(1000, 1024))),
    ):
        print(text)
        assert _native.parse_cpus(text) == cpus


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_a_thread_runs_beside_its_memory() -> None:
    """On the processors of a node that it may use; on all that it may use where the node has none of them."""
    mine = sorted(os.sched_getaffinity(0))
    affinities: list[set[int]] = []

    def work() -> None:
        for node, allowed in ((0, mine[:1]), (-1, mine), (9999, mine)):
            _native.run_beside(node, allowed)
            affinities.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert affinities == [set(mine[:1]), set(mine), set(mine)]
    assert os.sched_getaffinity(0) == set(mine)
