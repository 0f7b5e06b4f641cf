"""Where ranks meet, nobody else comes in: one address of this machine, or states that count with a signature alone."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from offload.launch import torchrun
from tests import ROOT
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port

_SCRIPT = r"""
import json, os, pathlib, re, sys, torch, torch.distributed as dist
from offload.distributed.process_group import meet_others
dist.init_process_group("gloo") if sys.argv[1] == "torch" else meet_others()
total = torch.ones(1)
dist.all_reduce(total)
owned = set()
for process in (os.getpid(), os.getppid()):
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            owned.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{process}/fd/{name}")))
        except OSError:
            pass
lines = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}").read().splitlines()[1:]]
addresses = sorted({fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in owned})
restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
text = json.dumps([total.item(), addresses, os.environ["MASTER_ADDR"]])
pathlib.Path(f"rank{os.environ['RANK']}-{restart}").write_text(text)
dist.barrier()
if os.environ["RANK"] == "1" and restart == "0" and "TORCHELASTIC_RUN_ID" in os.environ:
    os._exit(3)
dist.barrier()
"""
_LOOPBACK = [2.0, ["0100007F"], "127.0.0.1"]
"""The sum of two ranks, and the only address on which they and their parent listen, as /proc writes 127.0.0.1."""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(300)
def test_ranks_of_one_machine_listen_on_loopback_alone_and_restart(tmp_path: Path) -> None:
    """Rank 1 ends in the first start: the second meets at a store that has not seen the first."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    python = warm_process.commands(tmp_path / "commands") / "python"
    place = f"127.0.0.1:{free_port()}"
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "offload-one-machine"]
    script = ["--no-python", "--", str(python), "train.py", "torch"]
    command = warm_process.begin(
        ["-m", "offload.launch.torchrun", *options, "--rdzv-endpoint", place, *script],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = command.communicate(timeout=250)
    assert command.returncode == 0, output
    for name in ("rank0-0", "rank1-0", "rank0-1", "rank1-1"):
        assert json.loads((tmp_path / name).read_text()) == _LOOPBACK, name


@pytest.mark.timeout(300)
def test_ranks_of_mpirun_on_one_machine_listen_on_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    port = {"MASTER_PORT": str(free_port())}
    ranks = [
        warm_process.begin(
            ["train.py", "engine"],
            cwd=tmp_path,
            env=environment()
            | port
            | {f"OMPI_COMM_WORLD_{name}SIZE": "2" for name in ("", "LOCAL_")}
            | {f"OMPI_COMM_WORLD_{name}RANK": str(rank) for name in ("", "LOCAL_")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=250)[0] for rank in ranks] == ["", ""]
    for name in ("rank0-0", "rank1-0"):
        assert json.loads((tmp_path / name).read_text()) == _LOOPBACK, name


@pytest.mark.parametrize(
    "options",
    [
        ["--rdzv-backend", "offload-one-machine", "--rdzv-endpoint", "127.0.0.1:PORT"],
        ["--nnodes", "2", "--node-rank", "0", "--master-addr", "alpha", "--master-port", "PORT"],
        [
            "--nnodes",
            "2",
            "--rdzv-backend",
            "offload-signed",
            "--rdzv-endpoint",
            "alpha:PORT",
            "--rdzv-conf",
            "is_host=1",
        ],
    ],
)
def test_a_port_that_is_taken_is_one_line_before_a_rank_starts(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFLOAD_LAUNCH_SECRET", "x")
    monkeypatch.setattr(torchrun.run, "main", lambda arguments: pytest.fail(f"torchrun has begun: {arguments}"))
    with socket.create_server(("", 0)) as taken, pytest.raises(SystemExit) as end:
        port = str(taken.getsockname()[1])
        torchrun.main([*(option.replace("PORT", port) for option in options), "train.py"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith(f"error: port {port} of ") and error.count("\n") == 1
    assert "is taken by another process, and the ranks meet there: give a free port, --master-port N" in error


def test_hosts_that_restart_without_a_secret_do_not_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OFFLOAD_LAUNCH_SECRET", raising=False)
    with pytest.raises(SystemExit):
        torchrun.main(["--rdzv-backend", "offload-signed", "--rdzv-endpoint", "alpha:1", "train.py"])
    assert "need the same secret in the variable OFFLOAD_LAUNCH_SECRET of each" in capsys.readouterr().err


class _Store(RendezvousBackend):
    """A backend whose state anybody may set."""

    state: bytes | None = None

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, bytes] | None:
        return None if self.state is None else (self.state, b"token")

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, bytes, bool]:
        self.state = state
        return state, b"token", True


class _Touch:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_a_state_that_no_host_has_signed_is_not_unpickled(tmp_path: Path) -> None:
    store = _Store()
    alpha, beta = torchrun.SignedBackend(store, "secret"), torchrun.SignedBackend(store, "secret")
    assert alpha.get_state() is None
    assert alpha.set_state(b"state") == (b"state", b"token", True) and beta.get_state() == (b"state", b"token")
    signed, forged, strange = store.state, pickle.dumps(_Touch(tmp_path / "made")), _Store()
    torchrun.SignedBackend(strange, "another").set_state(forged)
    assert signed is not None
    for state in (b"", forged, signed[:32] + forged, signed[:-1], signed[:-1] + b"f", strange.state):
        store.state = state
        with pytest.raises(RendezvousStateError, match="a state that no host of this run has signed"):
            beta.get_state()
    assert not (tmp_path / "made").exists()
