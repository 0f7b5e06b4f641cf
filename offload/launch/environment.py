"""Environment variables: for ranks that srun or mpirun has started, and from DeepSpeed's `.deepspeed_env`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from offload.errors import ConfigError, UsageError
from offload.launch.hosts import expand_counts, expand_nodelist

PORT = 29500
"""Default port of the rendezvous, as in torch and DeepSpeed."""

ONE_MACHINE, SIGNED = "offload-one-machine", "offload-signed"
"""The rendezvous of `offload.launch.torchrun`, as `--rdzv-backend` names them."""
SECRET = "OFFLOAD_LAUNCH_SECRET"
"""Variable with the secret by which hosts that restart together authenticate one another."""
LOOPBACK_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables that make gloo and NCCL listen only on the loopback interface."""

_EXPORTED = ("GLOO_", "MLFLOW", "MV2_", "NCCL_", "OFFLOAD_", "OMP_", "PYTHON", "TORCH", "UCX_")
"""Prefixes of the variables that other hosts receive: DeepSpeed's, torch's and ours."""
_DIGITS = 18
"""Most digits of a number in the environment, such as a job's number."""


class _Place(NamedTuple):
    """A process among those that were started with it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    first_host: str | None = None
    """Address of rank 0, if the launcher sets it."""


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPEN_MPI, _MVAPICH = "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"
_MPI = (
    (f"{_OPEN_MPI}RANK", f"{_OPEN_MPI}SIZE", f"{_OPEN_MPI}LOCAL_RANK", f"{_OPEN_MPI}LOCAL_SIZE"),
    (f"{_MVAPICH}RANK", f"{_MVAPICH}SIZE", f"{_MVAPICH}LOCAL_RANK", f"{_MVAPICH}LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
)
"""Variables of the rank and the number of ranks, in all and on this machine, for each implementation of MPI."""
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
"""Variables of a Slurm step. sbatch sets the first one for its script, too; only srun sets the others."""


def ranks_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables, such as RANK and WORLD_SIZE, for a process that srun or mpirun has started.

    There are none if torchrun has set them, or if the process was started alone.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return {}
    # MPI comes first: inside Slurm, mpirun starts its helpers by srun, and ranks inherit the helpers' variables.
    place = _of_mpi(environ) or _of_slurm(environ)
    if place is None or place.size == 1:
        return {}
    first = "127.0.0.1" if place.local_size == place.size else place.first_host
    address = environ.get("MASTER_ADDR", first)
    if address is None:
        raise ConfigError(
            f"mpirun has started {place.size} ranks on several machines, and MASTER_ADDR does not say where rank 0 is: "
            "give the name of its machine to all, by mpirun -x MASTER_ADDR=HOST or -genv MASTER_ADDR HOST"
        )
    # Slurm jobs that share a node must not share a port.
    port = PORT + rank_number(environ, "SLURM_JOB_ID", 0) % 1000
    alone = LOOPBACK_INTERFACE if address == first == "127.0.0.1" else {}
    return {
        **{name: interface for name, interface in alone.items() if name not in environ},
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def rank_number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    """Returns a number that a launcher has set, such as the rank or the number of ranks, or else `otherwise`."""
    text = environ.get(name, str(otherwise))
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise ConfigError(
            f"the variable {name} is {text[:99]!r}, expected a number, which torchrun, srun and mpirun set; start the "
            "ranks with one of them, or unset the variable"
        )
    return int(text)


def _of_mpi(environ: Mapping[str, str]) -> _Place | None:
    for names in _MPI:
        # srun sets some of these variables too, for MPI programs.
        if all(name in environ for name in names):
            rank, size, local_rank, local_size = (rank_number(environ, name, 0) for name in names)
            return _Place(rank, size, local_rank, local_size)
    return None


def _of_slurm(environ: Mapping[str, str]) -> _Place | None:
    """Returns the place that srun gave this process; None without srun."""
    if not all(name in environ for name in _SLURM):
        return None
    rank, size, local_rank = (rank_number(environ, name, 0) for name in _SLURM[:3])
    counts, nodes = (environ[name] for name in _SLURM[3:])
    node = rank_number(environ, "SLURM_NODEID", 0)
    try:
        return _Place(rank, size, local_rank, expand_counts(counts)[node], expand_nodelist(nodes)[0])
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"the variables SLURM_NODEID, {_SLURM[3]} and {_SLURM[4]} are '{node}', {counts!r} and {nodes!r}, expected "
            "a node, the tasks of each node and their names, as srun sets them; start the ranks with srun, or unset "
            "the variables"
        ) from error


def parse_environment_file(text: str, path: str) -> dict[str, str]:
    """Returns the variables of a `.deepspeed_env`.

    Lines are `NAME=value`. Empty lines and lines that begin with # are skipped. Values are taken unchanged.
    """
    variables = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            if not equals or not _NAME.fullmatch(name.strip()) or "\0" in value:
                # A value may be a secret, and must not appear on a terminal or in a log.
                words = f"{name!r:.99} before the value" if equals else f"{len(line)} characters without ="
                raise UsageError(
                    f"{path}:{number}: expected a line NAME=value, got {words}; a name has letters, digits and _, and "
                    "no `export` before it"
                )
            variables[name.strip()] = value.strip()
    return variables


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of this process that ranks on other hosts receive."""
    # A shell on the other host sets them, and accepts only such names.
    return {name: value for name, value in environ.items() if name.startswith(_EXPORTED) and _NAME.fullmatch(name)}
