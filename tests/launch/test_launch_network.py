"""Two hosts, as two network namespaces with a cable: after a cut or a kill ranks are named, and resume.

torchrun, gloo and the kernel's TCP are real; `ip netns exec` stands for ssh. Run as root, with `pytest -m slow`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.launch.launched_hosts import put_ssh
from tests.support.oracle import assert_same_tensors

SCRIPT = ROOT / "tests" / "launch" / "launched_training.py"
STEPS, CUT_AT = 60, 5
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Two network namespaces, alpha and beta with a suffix, whose interfaces `eth0` are the ends of one cable."""

    def __init__(self) -> None:
        suffix = os.getpid()
        self.names = [f"alpha-{suffix}", f"beta-{suffix}"]
        for name in self.names:
            ip("netns", "add", name)
        ends = [f"va{suffix}", f"vb{suffix}"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(self.names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name, "name", "eth0")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
        self.connect("up")

    def connect(self, state: str) -> None:
        """Plugs the cable in ("up"), or pulls it out of beta ("down")."""
        for name in self.names if state == "up" else self.names[1:]:
            ip("-n", name, "link", "set", "eth0", state)

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        made = Hosts()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and `ip netns`: {error}")
    yield made
    made.close()


def begin(folder: Path, hosts: Hosts, *options: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in hosts.names))
    ssh = put_ssh(folder / "bin", before="ip netns exec $host")
    more = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    meeting = ["--hostfile", str(folder / "hosts"), "--master_addr", "10.77.0.1", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "offload", "launch", *meeting, str(SCRIPT), str(folder), str(STEPS)],
        cwd=folder,
        env=os.environ | more | {"PATH": f"{ssh}:{os.environ['PATH']}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(run: subprocess.Popen[str]) -> None:
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output


def steps_of(folder: Path, rank: int) -> list[list[float]]:
    path = folder / f"steps{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_steps(folder: Path, run: subprocess.Popen[str]) -> None:
    while len(steps_of(folder, 0)) < CUT_AT:
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.01)


def assert_same_run(one: Path, other: Path) -> None:
    """Each step, those that ran twice too, has the same loss in both, and all weights are the same bits."""
    for rank in range(2):
        assert dict(map(tuple, steps_of(one, rank))) == dict(map(tuple, steps_of(other, rank)))
        weights = [torch.load(folder / f"weights{rank}", weights_only=True) for folder in (one, other)]
        assert_same_tensors(*weights)


@pytest.fixture(scope="module")
def whole(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(begin(folder, hosts))
    assert len(steps_of(folder, 0)) == STEPS
    return folder


@pytest.mark.works("Several ranks", "two hosts, and a cable that is cut: named, resumed", "right")
def test_a_cut_cable_ends_all_ranks_and_they_resume_bit_for_bit(hosts: Hosts, whole: Path, tmp_path: Path) -> None:
    run = begin(tmp_path, hosts)
    wait_for_steps(tmp_path, run)
    hosts.connect("down")
    try:
        output, _ = run.communicate(timeout=300)
    finally:
        hosts.connect("up")
    assert run.returncode == 1 and f"{hosts.names[0]} has ended with exit status 1" in output, output
    pid = int((tmp_path / "pid1").read_text())
    lost = (tmp_path / "error0").read_text()
    assert lost.startswith(f"rank 1 (process {pid} on ") and "has sent no heartbeat for 12" in lost, lost
    assert CUT_AT <= len(steps_of(tmp_path, 0)) < STEPS
    finish(begin(tmp_path, hosts))
    assert_same_run(tmp_path, whole)


def test_a_killed_rank_restarts_the_ranks_of_both_hosts(hosts: Hosts, whole: Path, tmp_path: Path) -> None:
    """By torchrun's rendezvous c10d, each start with a store of its own."""
    run = begin(tmp_path, hosts, "--max_restarts", "3")
    wait_for_steps(tmp_path, run)
    os.kill(int((tmp_path / "pid1").read_text()), 9)
    finish(run)
    assert_same_run(tmp_path, whole)


@pytest.mark.works("Several ranks", "two hosts, and a cable that is out for 45 s: the run goes on", "right")
def test_a_cable_that_is_put_back_ends_no_rank(hosts: Hosts, whole: Path, tmp_path: Path) -> None:
    run = begin(tmp_path, hosts)
    wait_for_steps(tmp_path, run)
    hosts.connect("down")
    try:
        time.sleep(45)  # as a switch that starts anew
    finally:
        hosts.connect("up")
    finish(run)
    assert len(steps_of(tmp_path, 0)) == STEPS
    assert_same_run(tmp_path, whole)
