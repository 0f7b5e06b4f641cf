"""`offload launch` runs a torchrun on each host; all end when one fails, at a signal, and even at its own SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.launched_hosts import put_python, put_ssh
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port

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
    other = 1 - int(fails)
    assert command.returncode == 7 and (folder / f"ended{other}").exists(), errors
    names = ("alpha", "beta")
    assert errors == f"{names[int(fails)]} has ended with exit status 7; ending {names[other]}\n"


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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hostfile", "absent"), "there is no hostfile absent: name one"),
        (("--autotuning", "run"), "offload launch has no option --autotuning: offload plan says what fits"),
        (("--bind_cores_to_rank",), "offload launch has no option --bind-cores-to-rank: start the ranks under"),
        (("--hostfile", "hosts", "--launcher", "pdsh"), "there is no launcher pdsh here: ssh reaches each host"),
        (("--num_gpus", "0"), "invalid value for '--num-gpus'"),
        (("--master_port", "70000"), "invalid value for '--master-port': Input should be less than or equal to 65535"),
    ],
)
def test_wrong_input_is_one_line(folder: Path, options: tuple[str, ...], message: str) -> None:
    command = begin(folder, *options)
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 2 and errors is not None and errors.startswith(f"error: {message}"), errors


def test_a_program_that_is_missing_is_named(folder: Path) -> None:
    command = begin(folder, "--hostfile", "hosts", PATH=str(folder / "nowhere"))
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 2 and "ssh is not installed: install it, or start the ranks of each host" in str(
        errors
    )
