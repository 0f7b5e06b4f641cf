"""Commands of Slurm, Kubernetes and ssh, and the place where hosts meet."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import UsageError
from offload.launch import torchrun
from offload.launch.commands import Command, decide, module_command
from offload.launch.hosts import Host
from offload.launch.options import LaunchOptions, LocalMachine
from tests import ROOT
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port

HOSTS = [Host("alpha", (0, 1)), Host("beta", (0, 1, 2))]
JOB = {"SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_GPUS_ON_NODE": "4"}
TORCHRUN = f"{shlex.join(module_command('python', 'offload.launch.torchrun'))} --nproc-per-node"
ALONE = "--rdzv-backend offload-one-machine --rdzv-endpoint 127.0.0.1:"


def commands(
    hosts: list[Host] | None = None, *, gpus: int | None = None, environ: dict[str, str] | None = None, **options: Any
) -> list[Command]:
    machine = LocalMachine(
        python="python",
        folder="/my work",
        names=frozenset({"localhost"}),
        environ=environ or {},
        gpus=gpus,
        secret="hush",
    )
    asked = LaunchOptions(script="train.py", arguments=("--lr", "1"), **options)
    return decide(asked, hosts, {"A": "b c"}, machine)


def shown(*arguments: Any, **options: Any) -> list[str]:
    return [shlex.join(command.arguments) for command in commands(*arguments, **options)]


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"gpus": 4}, f"4 {ALONE}0 -- train.py --lr 1"),
        ({"gpus": 0}, f"1 {ALONE}0 -- train.py --lr 1"),
        ({"num_gpus": 2, "max_restarts": 3}, f"2 --max-restarts 3 {ALONE}0 -- train.py --lr 1"),
        ({"num_gpus": 2, "module": True}, f"2 {ALONE}0 --module -- train.py --lr 1"),
        (
            {"num_gpus": 1, "enable_each_rank_log": "logs", "no_python": True, "master_port": 7},
            f"1 --log-dir logs --redirects 3 {ALONE}7 --no-python -- train.py --lr 1",
        ),
        (
            {"num_gpus": 1, "master_addr": "fd00::1"},
            f"1 {ALONE.replace('127.0.0.1', '[fd00::1]')}0 -- train.py --lr 1".replace("[fd00::1]:0", "'[fd00::1]:0'"),
        ),
    ],
)
def test_one_machine_is_one_torchrun(options: dict[str, Any], command: str) -> None:
    assert shown(**options) == [f"{TORCHRUN} {command}"]
    assert str(commands(**options)[0]) == f"{TORCHRUN} {command}  # with the variables A"
    assert commands(**options)[0].environment == {"A": "b c"}


def test_slots_that_are_not_the_first_ones_are_shown_to_their_ranks() -> None:
    assert commands(gpus=4, include="localhost:1,3")[0].environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    shows = {"environ": {"CUDA_VISIBLE_DEVICES": "4,6"}, "gpus": 2}
    assert commands(include="localhost:1", **shows)[0].environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert "CUDA_VISIBLE_DEVICES" not in commands(num_gpus=1, **shows)[0].environment
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES shows 2 GPUs, and slot 2 of localhost is asked for"):
        commands([Host("localhost", (0, 1, 2))], include="localhost:2", environ=shows["environ"])


def test_each_host_of_a_hostfile_has_a_torchrun_by_ssh() -> None:
    local, remote = commands(
        [Host("localhost", (0, 1)), *HOSTS[1:]],
        master_addr="10.0.0.1",
        exclude="beta:0",
        ssh_port=2222,
        launcher_args="-i 'my key'",
        environ={"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "7,8", "SECRET": "x"},
    )
    assert local.arguments[:2] == ("sh", "-c") and local.ends_with_input and remote.ends_with_input
    meet = "--nnodes 2 --master-addr 10.0.0.1 --master-port 29500 --node-rank"
    assert f"; env {TORCHRUN} 2 {meet} 0 -- train.py --lr 1 </dev/null" in local.arguments[2]
    assert local.environment == {"A": "b c"} and not local.first_input
    assert remote.arguments[-6:-1] == ("-p", "2222", "-i", "my key", "beta")
    shell = shlex.split(remote.arguments[-1])
    variables = "CUDA_VISIBLE_DEVICES=1,2"
    assert remote.first_input == "export NCCL_DEBUG=INFO\nexport A='b c'\n" and not remote.environment
    assert shell[:2] == ["sh", "-c"] and shell[2].startswith("cd '/my work' || exit 1; ")
    assert f"; env {variables} {TORCHRUN} 2 {meet} 1 -- train.py --lr 1 </dev/null" in shell[2]


def test_one_host_that_is_another_machine_is_reached_by_ssh() -> None:
    (only,) = commands(HOSTS[:1])
    assert only.arguments[0] == "ssh" and "--nnodes 1 --master-addr alpha" in only.arguments[-1]


def test_hosts_that_restart_meet_at_the_first_by_c10d() -> None:
    for node, command in enumerate(shown(HOSTS, max_restarts=2, num_gpus=1)):
        own = f"--rdzv-conf is_host={int(node == 0)} --local-addr {HOSTS[node].name} -- train"
        run = hashlib.sha256(b"hush").hexdigest()[:16]
        rendezvous = f"offload-signed --rdzv-id {run} --rdzv-endpoint alpha:29500 {own}"
        assert f"torchrun --nproc-per-node 1 --nnodes 2 --max-restarts 2 --rdzv-backend {rendezvous}" in command
        assert "--node-rank" not in command and "hush" not in command
    secrets = [command.first_input for command in commands(HOSTS, max_restarts=2, num_gpus=1)]
    assert all(text.endswith("export OFFLOAD_LAUNCH_SECRET=hush\n") for text in secrets)
    own = {"environ": {"OFFLOAD_LAUNCH_SECRET": "hush"}}
    (launch,) = commands(HOSTS, max_restarts=2, no_ssh=True, node_rank=1, **own)
    assert launch.environment["OFFLOAD_LAUNCH_SECRET"] == "hush" and "hush" not in str(launch)


def test_without_ssh_each_host_has_its_own_command() -> None:
    assert shown(HOSTS, no_ssh=True, node_rank=1) == [
        f"{TORCHRUN} 3 --nnodes 2 --master-addr alpha --master-port 29500 --node-rank 1 -- train.py --lr 1"
    ]
    alone = {"no_ssh": True, "node_rank": 2, "num_nodes": 3, "num_gpus": 8, "master_addr": "head"}
    assert shown(**alone) == [
        f"{TORCHRUN} 8 --nnodes 3 --master-addr head --master-port 29500 --node-rank 2 -- train.py --lr 1"
    ]


@pytest.mark.parametrize("restarts", [0, 1])
def test_nodes_of_a_job_of_slurm_are_reached_by_srun(restarts: int) -> None:
    (srun,) = commands(environ=JOB, max_restarts=restarts, launcher_args="--mpi=none")
    tasks = "--nodes 2 --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1 --nodelist gpu1,gpu2 --mpi=none sh -c"
    assert list(srun.arguments[:-1]) == ["srun", *tasks.split()] and not srun.ends_with_input
    own = "--rdzv-conf is_host=$((SLURM_NODEID == 0))" if restarts else '--node-rank "$SLURM_NODEID"'
    assert srun.arguments[-1].startswith(f"exec {TORCHRUN} 4 --nnodes 2 ")
    assert srun.arguments[-1].endswith(f" {own} -- train.py --lr 1") and "gpu1" in srun.arguments[-1]
    # One node needs no srun, and a hostfile says who is meant.
    assert ALONE in shown(environ=JOB | {"SLURM_JOB_NODELIST": "gpu1"}, gpus=2)[0]
    assert shown(HOSTS, environ=JOB)[0].startswith("ssh ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpus": 1, "include": "alpha"}, "--num-nodes and --num-gpus cannot be combined with --include"),
        ({"module": True, "no_python": True}, "--module and --no-python cannot be combined"),
        (
            {"no_ssh": True, "node_rank": 0, "max_restarts": 1},
            "started by hand need the same secret: set OFFLOAD_LAUNCH_SECRET on each",
        ),
        ({"no_ssh": True}, "--no-ssh and --node-rank go together"),
        ({"node_rank": 0}, "--no-ssh and --node-rank go together"),
        ({"no_ssh": True, "node_rank": 2}, "--node-rank 2: the numbers of the hosts are 0 to 1"),
        ({"num_nodes": 3}, "--num-nodes 3, and hosts: 2; name all in a --hostfile"),
        ({"num_gpus": 3}, "--num-gpus 3, and slots of alpha: 2"),
        ({"launcher": "OpenMPI"}, "there is no launcher openmpi here: start the ranks by MPI's own command"),
        ({"launcher": "x"}, "there is no launcher x here: leave --launcher out"),
        ({"launcher": "slurm"}, "--launcher slurm takes the nodes of its job"),
        ({"hosts": None, "num_gpus": 1, "num_nodes": 2}, "--num-nodes 2, and hosts: 1"),
        ({"hosts": None, "no_ssh": True, "node_rank": 0, "num_gpus": 1}, "needs --num-nodes and --master-addr"),
        ({"hosts": None, "launcher": "slurm"}, "start this command in a script of sbatch or in salloc"),
        ({"hosts": None, "environ": {"SLURM_JOB_NODELIST": "a[1-2]"}}, "Slurm's job says nothing about GPUs"),
        ({"hosts": None, "environ": JOB, "include": "gpu1:0"}, "Slurm chooses the GPUs of a node"),
        (
            {"hosts": None, "gpus": 0, "include": "localhost:0,1"},
            "localhost has no slot 1.*torch finds no GPU on this machine.* give --num-gpus 2 in the place of --include",
        ),
        ({"hosts": None, "gpus": 1, "include": "localhost:0,1"}, "localhost has no slot 1: it has 1, the first is 0$"),
        ({"hosts": [Host("localhost", (0,)), *HOSTS]}, "the first host is localhost, which other hosts cannot reach"),
        (
            {"environ": {f"OMPI_COMM_WORLD_{each}": "2" for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}},
            "srun or mpirun has started several of this command",
        ),
    ],
)
def test_what_cannot_be_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        commands(**{"hosts": HOSTS, **options})


def test_a_script_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["launch", "--num-gpus", "2", "trian.py"])
    assert done.exit_code == 2 and done.stderr.startswith(f"error: there is no script trian.py in {tmp_path}")


@pytest.mark.parametrize("name", ["hosts", ".deepspeed_env", "mine"])
def test_a_file_that_is_not_utf8_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"alpha slots=\xff1")
    result = CliRunner().invoke(
        app,
        ["launch", "--dry-run", *(("--hostfile", "hosts") if name == "hosts" else ()), "--num-gpus", "1", "train.py"],
        env={"DS_ENV_FILE": "mine"} if name == "mine" else {},
    )
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {name} is not UTF-8: "), result.output
    assert result.stderr.count("\n") == 1


def test_an_empty_folder_for_logs_is_not_the_working_folder() -> None:
    result = CliRunner().invoke(app, ["launch", "--dry-run", "--enable-each-rank-log", "", "train.py"])
    assert result.exit_code == 2 and "--enable-each-rank-log is empty: give a folder" in result.stderr


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("hosts", lambda path: os.truncate(path, 10 * 2**40), "hosts cannot be read: it has more than 1048576 bytes"),
        (
            ".deepspeed_env",
            lambda path: os.truncate(path, 10 * 2**40),
            ".deepspeed_env cannot be read: it has more than",
        ),
        (".deepspeed_env", lambda path: path.chmod(0o666), ".deepspeed_env belongs to another user, or everybody may"),
        (".deepspeed_env", lambda path: os.chown(path, 12345, -1), ".deepspeed_env belongs to another user, or"),
    ],
)
def test_a_file_that_another_could_have_put_there_is_refused(
    name: str, spoil: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("")
    try:
        spoil(Path(name))
    except PermissionError:
        pytest.skip("root alone makes files of another user")
    hostfile = ("--hostfile", "hosts") if name == "hosts" else ()
    result = CliRunner().invoke(app, ["launch", "--dry-run", *hostfile, "--num-gpus", "1", "train.py"])
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {message}"), result.output


def test_a_module_in_the_working_folder_does_not_run_in_the_place_of_ours(tmp_path: Path) -> None:
    """Others may write there, as in /tmp. `-m` would look there first, for modules of Python too."""
    for place, module in itertools.product(("ours", "theirs"), ("runpy", "package/__init__", "package/module")):
        path = tmp_path / place / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import sys; print({module!r}, *sys.argv[1:])")
    (tmp_path / "ours" / "runpy.py").unlink()
    done = subprocess.run(
        [*module_command(sys.executable, "package.module"), "--option"],
        cwd=tmp_path / "theirs",
        env=os.environ | {"PYTHONPATH": str(tmp_path / "ours")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "package/__init__ --option\npackage/module --option\n"


GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def faults(manifest: dict[str, Any]) -> list[str]:
    """What does not fit together among the parts of a manifest."""
    service, job = manifest["Service"], manifest["Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = shlex.split(container["args"][0])
    option = {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}
    volumes = {each["name"] for each in pod["volumes"]}
    name = job["metadata"]["name"]
    same = {
        "the service has no name of its own for each pod": service["spec"]["clusterIP"] == "None",
        "the service chooses other pods": service["spec"]["selector"] == {"job-name": name},
        "the pods are in another subdomain": pod["subdomain"] == service["metadata"]["name"],
        "the pods have no numbers": spec["completionMode"] == "Indexed",
        "not all pods run at once": spec["completions"] == spec["parallelism"] == int(option["--num_nodes"]),
        "rank 0 is somewhere else": option["--master_addr"] == f"{name}-0.{service['metadata']['name']}",
        "the command has another number of GPUs": container["resources"]["limits"]["nvidia.com/gpu"]
        == int(option["--num_gpus"]),
        "a volume is missing": {each["name"] for each in container["volumeMounts"]} == volumes,
    }
    return [what for what, right in same.items() if not right]


def test_its_parts_fit_together(manifest: dict[str, Any]) -> None:
    assert faults(manifest) == []


@pytest.mark.parametrize("number", [0, 1])
def test_each_pod_starts_the_torchrun_of_its_number(number: int, manifest: dict[str, Any]) -> None:
    (container,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c"]
    command = shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", str(number)))
    assert command[:3] == ["exec", "offload", "launch"]
    result = CliRunner(env={"COLUMNS": "500"}).invoke(app, ["launch", "--dry_run", *command[3:]])
    assert result.exit_code == 0, result.output
    words = shlex.split(result.output)
    for option in ("--nnodes=2", "--nproc-per-node=8", f"--node-rank={number}", "--master-addr=train-0.train"):
        name, _, value = option.partition("=")
        assert option in words or words[words.index(name) + 1] == value
    assert "train.py" in words


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
    monkeypatch.setattr("torch.distributed.run.main", lambda arguments: pytest.fail(f"torchrun has begun: {arguments}"))
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
