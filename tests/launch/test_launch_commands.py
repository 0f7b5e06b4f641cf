"""`offload launch` decides which torchrun runs on which host; contradictions are errors before anything starts."""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import UsageError
from offload.launch.commands import Command, decide, module_command
from offload.launch.hosts import Host
from offload.launch.options import LaunchOptions, LocalMachine

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
            {"num_gpus": 1, "rank_logs": "logs", "no_python": True, "master_port": 7},
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
    (one,) = commands(HOSTS, max_restarts=2, no_ssh=True, node_rank=1, **own)
    assert one.environment["OFFLOAD_LAUNCH_SECRET"] == "hush" and "hush" not in str(one)


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
