"""Ranks that srun or mpirun starts without torchrun find each other; what torchrun has set is left alone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from offload.deepspeed import comm
from offload.errors import ConfigError, UsageError
from offload.launch.environment import exported, parse_environment_file, ranks_environment
from offload.launch.options import allocated_nodes
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port

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
    found = ranks_environment(OPEN_MPI | SLURM)  # mpirun inside of a job of Slurm
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")
    found = ranks_environment(INTEL | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert [*found.values()] == ["2", "4", "0", "2", "a", "1"]
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
    monkeypatch.setattr(comm.dist, "is_initialized", lambda: False)  # another test may have begun a group here
    asks = {"RANK": comm.get_rank, "LOCAL_RANK": comm.get_local_rank, "WORLD_SIZE": comm.get_world_size}
    with pytest.raises(ConfigError, match=f"the variable {name} is '', expected a number"):
        asks[name]()


def test_a_list_of_nodes_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="the variable SLURM_JOB_NODELIST is 'gpu\\[a-b]', expected a list of nodes"):
        allocated_nodes({"SLURM_JOB_NODELIST": "gpu[a-b]"})


_TRAINS = """
import os, torch, offload
engine = offload.initialize(model=torch.nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}})[0]
print(engine.global_rank, engine.world_size, engine.local_rank)
engine.destroy()
"""


def test_two_processes_of_mpirun_train_as_two_ranks(tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        warm_process.begin(
            ["-c", _TRAINS],
            cwd=tmp_path,
            env=os.environ | OPEN_MPI | port | {f"OMPI_COMM_WORLD_{name}RANK": str(rank) for name in ("", "LOCAL_")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["0 2 0\n", "1 2 1\n"]


def test_a_deepspeed_env_has_variables_as_they_are_written() -> None:
    text = "# for NCCL\nNCCL_IB_DISABLE=1\n\n A = b=c d \n"
    assert parse_environment_file(text, "file") == {"NCCL_IB_DISABLE": "1", "A": "b=c d"}


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("export B=hunter2", "'export B' before the value"),
        ("hunter2", "7 characters without ="),
        ("B=hunter2\0", "'B' before the value"),
        ("B-C=hunter2", "'B-C' before the value"),
    ],
)
def test_a_line_of_a_deepspeed_env_that_is_wrong_is_named_without_its_value(line: str, got: str) -> None:
    with pytest.raises(UsageError, match=f"file:2: expected a line NAME=value, got {got}") as error:
        parse_environment_file(f"A=1\n{line}\n", "file")
    assert "hunter2" not in str(error.value)


def test_other_hosts_receive_settings_and_no_secrets() -> None:
    settings = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/a", "OMP_NUM_THREADS": "4", "OFFLOAD_ISA": "avx2"}
    assert exported(settings | {"HF_TOKEN": "x", "HOME": "/root", "OMPI_COMM_WORLD_RANK": "0"}) == settings
