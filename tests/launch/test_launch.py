"""`offload launch` starts ranks on hosts, which meet, restart after a kill, and end together."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from offload.cli.main import app
from offload.deepspeed import comm
from offload.errors import ConfigError, UsageError
from offload.launch.environment import exported, parse_environment_file, ranks_environment
from offload.launch.hosts import Host, expand_counts, expand_nodelist, parse_hostfile, select
from offload.launch.options import allocated_nodes
from tests import ROOT
from tests.support.oracle import assert_same_tensors
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port

# ssh is called with options of one or two words, the host, and one string for the host's shell.
_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
echo "$*" > "arguments-$host"
exec $BEFORE sh -c "$*"
"""
# Ends as the node is told to, or when it is asked to. It waits in short sleeps: a signal between the fork and the exec
# of one long sleep would not end it, and it would hold the pipes of the test open.
_PYTHON = """#!/bin/sh
node=$(echo "--node-rank 0 $*" | sed 's/.*--node-rank \\([0-9]*\\).*/\\1/')
trap 'echo ended > "ended$node"; exit 0' TERM
printf %s "$SETTING" > "setting$node"
echo "$*" > "began$node"
case $node in "$FAILS") while [ ! -e began0 ] || [ ! -e began1 ]; do sleep 0.05; done; exit 7;; esac
while :; do sleep 0.05; done
"""


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def put_ssh(folder: Path, before: str = "") -> Path:
    """Makes a folder with an `ssh` that runs the command on this machine, or behind the words `before` and `$host`."""
    return _write(folder / "ssh", _SSH.replace("$BEFORE", before)).parent


def put_python(folder: Path) -> Path:
    """Makes a Python that runs until it is asked to end, or ends with 7 on node FAILS of the environment."""
    return _write(folder / "python", _PYTHON)


HOSTS = "alpha slots=1\nbeta slots=1\n"
_LAUNCH = "import sys; sys.executable = sys.argv[1]; sys.argv[1:] = sys.argv[2:]; "
_LAUNCH += "from offload.cli.main import main; main()"

_SCRIPT = """
import deepspeed, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SETTING", "NCCL_DEBUG")
print(*(os.environ[name] for name in names), deepspeed.__name__, sys.argv[1:], os.getcwd())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text(HOSTS)
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {"PATH": f"{put_ssh(folder / 'bin')}:{os.environ['PATH']}", "HOME": str(folder), **more}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def begin(folder: Path, *options: str, **more: str) -> warm_process.Process:
    """Starts the command with a Python that is none, which takes a hundredth of torchrun's time."""
    return warm_process.begin(
        ["-c", _LAUNCH, str(put_python(folder / "fake")), "launch", *options, "train.py"],
        cwd=folder,
        env=environment(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):  # the test's timeout ends it
        time.sleep(0.02)


@pytest.mark.slow
def test_ranks_of_two_hosts_are_one_run_of_an_unmodified_script(folder: Path) -> None:
    """torchrun is the real one, ssh is not."""
    (folder / "train.py").write_text(_SCRIPT)
    (folder / ".deepspeed_env").write_text("SETTING=a 'b' $c\n")
    options = ["--hostfile", "hosts", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    done = warm_process.run(
        ["-m", "offload", "launch", *options, "train.py", "--lr", "1 2"],
        cwd=folder,
        env=environment(folder, NCCL_DEBUG="INFO"),
    )
    same = f"2 0 a 'b' $c INFO offload.deepspeed ['--lr', '1 2'] {folder}"
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"0 {same}", f"1 {same}"]


def test_variables_reach_other_hosts_without_being_seen(folder: Path) -> None:
    """Anybody on either machine reads the arguments of ssh and of the shell there."""
    value = "it's $(no) `command` \\n ; \\"
    (folder / ".deepspeed_env").write_text(f"SETTING={value}\nMLFLOW_TOKEN=hunter2\n")
    command = begin(folder, "--hostfile", "hosts", FAILS="no", OFFLOAD_LINES="two\nhunter2 lines")
    wait_for(folder / "began0", folder / "began1")
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=120)
    for number, host in enumerate(("alpha", "beta")):
        assert (folder / f"setting{number}").read_text() == value
        seen = (folder / f"arguments-{host}").read_text()
        assert "train.py" in seen and "hunter2" not in seen and "command" not in seen
    shown = begin(folder, "--hostfile", "hosts", "--dry-run").communicate(timeout=120)[0]
    assert shown is not None and "hunter2" not in shown
    assert shown.count(", SETTING, MLFLOW_TOKEN\n") == 2 and shown.count("  # with the variables ") == 2, shown


@pytest.mark.sample(1)
@pytest.mark.parametrize("fails", ["0", "1"])
def test_a_host_that_fails_ends_the_others_with_its_exit_status(folder: Path, fails: str) -> None:
    command = begin(folder, "--hostfile", "hosts", FAILS=fails)
    _, errors = command.communicate(timeout=120)
    other_host = 1 - int(fails)
    assert command.returncode == 7 and (folder / f"ended{other_host}").exists(), errors
    names = ("alpha", "beta")
    assert errors == f"{names[int(fails)]} has ended with exit status 7; ending {names[other_host]}\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_hosts(folder: Path, number: signal.Signals) -> None:
    command = begin(folder, "--hostfile", "hosts")
    wait_for(folder / "began0", folder / "began1")
    command.send_signal(number)
    _, errors = command.communicate(timeout=120)
    killed = number == signal.SIGKILL
    assert command.returncode == (-number if killed else 128 + number), errors
    assert "Traceback" not in (errors or "")
    wait_for(folder / "ended0", folder / "ended1")


def test_one_machine_is_torchrun_in_the_place_of_the_command(folder: Path) -> None:
    (folder / "train.py").touch()  # where this machine alone runs it, a script that is missing is an error
    command = begin(folder, "--num_gpus", "2", "--master_port", "7", FAILS="no")
    wait_for(folder / "began0")
    begun = "offload.launch.torchrun --nproc-per-node 2 --rdzv-backend offload-one-machine"
    assert (folder / "began0").read_text().endswith(f" {begun} --rdzv-endpoint 127.0.0.1:7 -- train.py\n")
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=120)
    assert command.returncode == 0 and (folder / "ended0").exists(), "the exit status is its own"


def test_a_dry_run_prints_commands_that_a_shell_takes(folder: Path) -> None:
    command = begin(folder, "--hostfile", "hosts", "--dry-run", FAILS="0")
    output, _ = command.communicate(timeout=120)
    assert output is not None and command.returncode == 0 and output.count("\n") == 2
    assert not (folder / "began0").exists()
    (folder / "began1").touch()
    # With an input that stays open: its end would end the command.
    first = subprocess.Popen(
        ["sh", "-c", output.splitlines()[0]], cwd="/", env=environment(folder, FAILS="0"), stdin=subprocess.PIPE
    )
    first.wait(120)
    assert first.stdin is not None
    first.stdin.close()
    assert first.returncode == 7 and (folder / "began0").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hostfile", "absent"), "there is no hostfile absent: name one"),
        (("--autotuning", "run"), "offload launch has no option --autotuning: offload plan says what fits"),
        (
            ("--profile",),
            'offload launch has no option --profile: "wall_clock_breakdown": true has the parts of a step',
        ),
        (("--bind_cores_to_rank",), "offload launch has no option --bind-cores-to-rank: start the ranks under"),
        (("--hostfile", "hosts", "--launcher", "pdsh"), "there is no launcher pdsh here: ssh reaches each host"),
        (("--num_gpus", "0"), "invalid value for '--num-gpus'"),
        (("--master_port", "70000"), "invalid value for '--master-port': Input should be less than or equal to 65535"),
    ],
)
def test_wrong_input_is_one_line(
    folder: Path, options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = run("launch", *options, "train.py")
    assert done.exit_code == 2 and done.stderr.startswith(f"error: {message}"), done.stderr


def test_a_program_that_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / "nowhere"))
    done = run("launch", "--hostfile", "hosts", "train.py")
    assert done.exit_code == 2 and "ssh is not installed: install it, or start the ranks of each host" in done.stderr


TEXT = """
# the workers
worker-0 slots=2
  user@worker-1   slots=4   # the larger one
"""
HOSTS_HOSTS = [Host("worker-0", (0, 1)), Host("worker-1", (0, 1, 2, 3)), Host("worker-2", (0,))]


def test_a_hostfile_has_its_hosts_in_order() -> None:
    assert parse_hostfile(TEXT, "hosts") == [Host("worker-0", (0, 1)), Host("user@worker-1", (0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb slots=x", r"hosts:2: expected a line `host slots=4`.* got 'b slots=x'"),
        ("a", r"hosts:1: expected a line"),
        ("a slots=0", r"hosts:1: .* with at least one slot"),
        ("-oProxyCommand=x slots=1", r"hosts:1: expected a line"),
        ("a slots=1\n\na slots=2", r"hosts:3: the host a has two lines"),
        ("# none\n", r"hosts names no host"),
        ("a slots=4097", r"hosts:1: .* at most 4096"),
        (f"a slots={10**12}", r"hosts:1: .* at most 4096"),
        (f"a slots={'9' * 5000}", r"hosts:1: .* at most 4096"),
        ("a\x1b[31m slots=1", r"hosts:1: .* got 'a\\x1b\[31m slots=1'"),
        ("a`id` slots=1", r"hosts:1: expected a line"),
    ],
)
def test_a_bad_line_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_hostfile(text, "hosts")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS_HOSTS),
        ("worker-1:3,1@worker-0", "", [Host("worker-0", (0, 1)), Host("worker-1", (1, 3))]),
        ("worker-1:0@worker-1:2", "", [Host("worker-1", (0, 2))]),
        ("", "worker-1:0", [HOSTS_HOSTS[0], Host("worker-1", (1, 2, 3)), HOSTS_HOSTS[2]]),
        ("", "worker-0@worker-2:0", [HOSTS_HOSTS[1]]),
    ],
)
def test_include_and_exclude_choose_hosts_and_slots(include: str, exclude: str, left: list[Host]) -> None:
    assert select(HOSTS_HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-0", "worker-1", "--include and --exclude cannot be combined"),
        ("worker-9", "", "there is no host 'worker-9' to include or exclude; the hosts are worker-0, worker-1"),
        ("worker-0:2", "", "worker-0 has no slot 2: it has 2"),
        (f"worker-0:{'9' * 5000}", "", "expected hosts and slots such as"),
        ("worker-0:a", "", "expected hosts and slots such as .* got 'worker-0:a'"),
        ("worker-0:", "", "expected hosts and slots such as"),
        ("", "worker-0@worker-1@worker-2", "leaves no slot of any host"),
    ],
)
def test_a_filter_that_fits_no_host_is_an_error(include: str, exclude: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select(HOSTS_HOSTS, include, exclude)


def test_lists_of_slurm_are_expanded() -> None:
    assert expand_nodelist("gpu[08-10,3],login,r[1-2]n[1,3]-ib") == [
        *("gpu08", "gpu09", "gpu10", "gpu3", "login"),
        *("r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"),
    ]
    assert expand_nodelist("") == []
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize("text", ["n[1-999999999]", "n[1-900]m[1-900]", f"n[{'1' * 5000}]"])
def test_a_list_of_more_nodes_than_a_cluster_has_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        expand_nodelist(text)
    with pytest.raises(ValueError, match="more than 100000 nodes"):
        expand_counts("4(x999999999)")


SCRIPT = ROOT / "tests" / "launch" / "launched_training.py"
STEPS, CUT_AT = 60, 5


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


def begin_network(folder: Path, hosts: Hosts, *options: str) -> subprocess.Popen[str]:
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


def assert_same_run(left: Path, right: Path) -> None:
    """Each step, those that ran twice too, has the same loss in both, and all weights are the same bits."""
    for rank in range(2):
        assert dict(map(tuple, steps_of(left, rank))) == dict(map(tuple, steps_of(right, rank)))
        weights = [torch.load(folder / f"weights{rank}", weights_only=True) for folder in (left, right)]
        assert_same_tensors(*weights)


@pytest.fixture(scope="module")
def whole(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(begin_network(folder, hosts))
    assert len(steps_of(folder, 0)) == STEPS
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.works("Several ranks", "two hosts, and a cable that is cut: named, resumed", "right")
def test_a_cut_cable_ends_all_ranks_and_they_resume_bit_for_bit(hosts: Hosts, whole: Path, tmp_path: Path) -> None:
    run = begin_network(tmp_path, hosts)
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
    finish(begin_network(tmp_path, hosts))
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_restarts_the_ranks_of_both_hosts(hosts: Hosts, whole: Path, tmp_path: Path) -> None:
    """By torchrun's rendezvous c10d, each start with a store of its own."""
    run = begin_network(tmp_path, hosts, "--max_restarts", "3")
    wait_for_steps(tmp_path, run)
    os.kill(int((tmp_path / "pid1").read_text()), 9)
    finish(run)
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.works("Several ranks", "two hosts, and a cable that is out for 45 s: the run goes on", "right")
def test_a_cable_that_is_put_back_ends_no_rank(hosts: Hosts, whole: Path, tmp_path: Path) -> None:
    run = begin_network(tmp_path, hosts)
    wait_for_steps(tmp_path, run)
    hosts.connect("down")
    try:
        time.sleep(45)  # as a switch that starts anew
    finally:
        hosts.connect("up")
    finish(run)
    assert len(steps_of(tmp_path, 0)) == STEPS
    assert_same_run(tmp_path, whole)


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
INTEL = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def test_a_step_of_slurm_has_ranks_and_meets_at_its_first_node() -> None:
    assert ranks_environment(SLURM) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(29500 + 711),
    }
    # A script of sbatch is one process, whatever the number of tasks of its job.
    assert ranks_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0"}) == {}


def test_ranks_of_mpi_meet_on_their_machine_or_at_the_address_that_is_given() -> None:
    environment = ranks_environment(OPEN_MPI | SLURM)  # mpirun inside of a job of Slurm
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")
    environment = ranks_environment(INTEL | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert [*environment.values()] == ["2", "4", "0", "2", "a", "1"]
    with pytest.raises(ConfigError, match="mpirun has started 4 ranks on several machines, and MASTER_ADDR does not"):
        ranks_environment(INTEL)
    # srun sets two of the variables, for programs of MPI.
    assert ranks_environment({"PMI_RANK": "9", "PMI_SIZE": "9"} | SLURM)["RANK"] == "3"


def test_torchrun_and_a_process_alone_are_left_as_they_are() -> None:
    assert ranks_environment({"WORLD_SIZE": "8", "RANK": "0"} | SLURM) == {}
    assert ranks_environment({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) == {}
    assert ranks_environment({}) == {}


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        *((SLURM, name, "eight") for name in SLURM if name != "SLURM_STEP_NODELIST"),
        (SLURM, "SLURM_PROCID", "-1"),
        (SLURM, "SLURM_NODEID", "3"),
        (SLURM, "SLURM_STEP_NODELIST", ""),
        (SLURM, "SLURM_STEP_NODELIST", "gpu[a-b]"),
        *((OPEN_MPI, name, "") for name in OPEN_MPI),
        *((INTEL, name, "1.5") for name in INTEL),
    ],
)
def test_a_variable_that_is_no_number_is_named(environ: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"the variable.* {name}.* {re.escape(repr(value))}.*, expected"):
        ranks_environment({**environ, name: value})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_a_script_of_deepspeed_is_told_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unset in a compose file comes as an empty text."""
    monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # another test may have begun a group here
    asks = {"RANK": comm.get_rank, "LOCAL_RANK": comm.get_local_rank, "WORLD_SIZE": comm.get_world_size}
    with pytest.raises(ConfigError, match=f"the variable {name} is '', expected a number"):
        asks[name]()


def test_a_list_of_nodes_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="the variable SLURM_JOB_NODELIST is 'gpu\\[a-b]', expected a list of nodes"):
        allocated_nodes({"SLURM_JOB_NODELIST": "gpu[a-b]"})


def test_a_deepspeed_env_has_variables_as_they_are_written() -> None:
    text = "# for NCCL\nNCCL_IB_DISABLE=1\n\n A = b=c d \n"
    assert parse_environment_file(text, "file") == {"NCCL_IB_DISABLE": "1", "A": "b=c d"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("export B=hunter2", "'export B' before the value"),
        ("hunter2", "7 characters without ="),
        ("B=hunter2\0", "'B' before the value"),
        ("B-C=hunter2", "'B-C' before the value"),
    ],
)
def test_a_line_of_a_deepspeed_env_that_is_wrong_is_named_without_its_value(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"file:2: expected a line NAME=value, got {words}") as error:
        parse_environment_file(f"A=1\n{line}\n", "file")
    assert "hunter2" not in str(error.value)


def test_other_hosts_receive_settings_and_no_secrets() -> None:
    settings = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/a", "OMP_NUM_THREADS": "4", "OFFLOAD_ISA": "avx2"}
    assert exported(settings | {"HF_TOKEN": "x", "HOME": "/root", "OMPI_COMM_WORLD_RANK": "0"}) == settings


def environment_of_ranks(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def unbroken(folder: Path, steps: int) -> None:
    """Trains on two ranks without a launcher."""
    folder.mkdir()
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [str(SCRIPT), str(folder), str(steps)]
    ranks = [
        warm_process.begin(arguments, env=environment_of_ranks(RANK=str(rank), LOCAL_RANK=str(rank), **meeting))
        for rank in range(2)
    ]
    assert [rank.wait(600) for rank in ranks] == [0, 0]


def begin_torchrun(folder: Path, steps: int, restarts: int) -> warm_process.Process:
    """Starts two ranks under torchrun; all three are forked, so that a start takes a tenth of a second."""
    python = warm_process.commands(folder / "commands") / "python"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    return warm_process.begin(
        ["-m", *torchrun, "--no-python", str(python), str(SCRIPT), str(folder), str(steps)],
        cwd=folder,
        env=environment_of_ranks(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kill(folder: Path, rank: int, before: set[int]) -> int:
    """Kills a rank that none has killed before, as soon as there is one, and returns its process."""
    path = folder / f"pid{rank}"
    while True:
        text = path.read_text() if path.exists() else ""
        if text and int(text) not in before:
            try:
                os.kill(int(text), signal.SIGKILL)
                return int(text)
            except ProcessLookupError:
                pass  # torchrun has ended it, since the other rank was killed
        time.sleep(0.005)


def killed(folder: Path, steps: int, kills: int, longest: float) -> None:
    """Trains under torchrun, and kills a rank so many times, each at a random moment after the one before.

    Args:
        folder: where the ranks leave what they did.
        steps: number of steps.
        kills: number of kills and of restarts.
        longest: seconds to the next kill, at most; 0 for the third step.
    """
    folder.mkdir()
    chance, done = random.Random(kills), set[int]()
    run = begin_torchrun(folder, steps, kills)
    try:
        for _ in range(kills):
            wait, began = chance.uniform(0, longest), time.monotonic()
            # Also while ranks start: a start takes part of these seconds.
            while time.monotonic() - began < wait or (not longest and len(steps_of(folder, 0)) < 3):
                assert run.poll() is None, run.communicate()[0]
                time.sleep(0.005)
            done.add(kill(folder, chance.randrange(2), done))
        output, _ = run.communicate(timeout=600)
    finally:
        run.terminate()
    assert run.returncode == 0, output


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize(("steps", "kills"), [(6, 1), (900, 30)], ids=["once", "30 times"])
@pytest.mark.works("Several ranks", "`torchrun --max-restarts`, SIGKILL of ranks, resume of all", "right")
def test_killed_ranks_continue_bit_for_bit(steps: int, kills: int, tmp_path: Path) -> None:
    unbroken(tmp_path / "whole", steps)
    killed(tmp_path / "killed", steps, kills, 4.0 if kills > 1 else 0.0)
    for rank in range(2):
        whole, again = (dict(map(tuple, steps_of(tmp_path / name, rank))) for name in ("whole", "killed"))
        assert again == whole and len(whole) == steps
        weights = [torch.load(tmp_path / name / f"weights{rank}", weights_only=True) for name in ("whole", "killed")]
        assert_same_tensors(*weights)
