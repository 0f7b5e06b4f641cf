"""Options of `offload launch`, and their checks that connect to no host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offload.errors import ConfigError, UsageError
from offload.launch.environment import ranks_environment
from offload.launch.hosts import expand_nodelist
from offload.options import argument, option, switch

_OTHER_LAUNCHERS = {
    "pdsh": "ssh reaches each host by a connection of its own; leave --launcher out",
    **dict.fromkeys(
        ("openmpi", "mvapich", "mpich", "impi", "jsrun"),
        "start the ranks by MPI's own command, as mpirun -np 8 offload run train.py, or leave --launcher out for ssh",
    ),
}
"""DeepSpeed's launchers that `offload` lacks, each with advice for its users."""

NOT_HERE = {
    "--autotuning": "offload plan says what fits and how long a step takes, offload tune measures a drive",
    "--profile": '"wall_clock_breakdown": true has the parts of a step, "trace" in the block "offload" a time line',
    "--elastic-training": "the number of ranks stays; --max-restarts restarts all of them from the last commit",
    "--min-elastic-nodes": "the number of hosts stays: give --num-nodes",
    "--max-elastic-nodes": "the number of hosts stays: give --num-nodes",
    "--bind-cores-to-rank": "start the ranks under numactl or taskset, or by torchrun --numa-binding node on GPUs",
    "--bind-core-list": "start the ranks under taskset --cpu-list",
    "--save-pid": "the process of this command is the one that the shell names, $!",
    "--force-multi": "leave it out: a single host of a hostfile is reached by ssh if it is another machine",
    "--comment": "give it to sbatch, or to srun by --launcher-args",
    "--account": "give it to sbatch, or to srun by --launcher-args",
}
"""Options of DeepSpeed's launcher that `offload` lacks, each with advice for its users."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of `offload launch`. None stands for an option that was not given."""

    script: str = argument("The script; with --module a module.")
    arguments: tuple[str, ...] = argument("Arguments of the script.", default=())
    hostfile: Path | None = option(
        "A line `host slots=4` for each host. Without: /job/hostfile if there is one, or the nodes of Slurm's job, "
        "or this machine.",
        "-H",
        group="Hosts",
    )
    include: str = option("Use these alone: worker-0@worker-1:0,2 is all of worker-0 and two slots.", "-i", default="")
    exclude: str = option("Use all but these, in the same form.", "-e", default="")
    num_nodes: int | None = option("Use the first N hosts.", min=1)
    launcher: str | None = option(
        "How hosts are reached: ssh, or slurm by srun. [default: slurm inside of a job of several nodes, without a "
        "hostfile; else ssh]"
    )
    launcher_args: str = option("More options of ssh or srun, in quotes.", default="")
    ssh_port: int | None = option("Port of ssh. [default: ssh's own]", min=1, max=65535)
    num_gpus: int | None = option(
        "Ranks of each host. [default: the slots of a hostfile; else one for each GPU]",
        "--num-accelerators",
        group="Ranks",
        min=1,
    )
    max_restarts: int = option(
        'Start all ranks again after one has failed, N times at most; "resume": "auto" continues from the last commit.',
        default=0,
        min=0,
    )
    enable_each_rank_log: str | None = option("Write the outputs of each rank into this folder.", metavar="PATH")
    master_addr: str | None = option("An address of the first host. [default: its name]", group="Meeting place")
    master_port: int | None = option("A port there that is free. [default: 29500; on one host any]", min=1, max=65535)
    no_ssh: bool = switch("Start the ranks of this host alone; the same command runs on each, with its number.")
    node_rank: int | None = option("Number of this host, from 0, with --no-ssh.", min=0)
    module: bool = switch("Run a module, as python -m does.", "-m", group="Start")
    no_python: bool = switch("Run the script itself, without Python.")
    no_local_rank: bool = switch("", hidden=True)
    no_ssh_check: bool = switch("", hidden=True)
    dry_run: bool = switch("Print the commands, and run nothing.")


@dataclass(frozen=True, kw_only=True)
class LocalMachine:
    """The machine on which the command was typed."""

    python: str
    """The interpreter; other hosts have it at the same path."""
    folder: str
    """The working folder; other hosts have it at the same path."""
    names: frozenset[str]
    """Names under which a hostfile may mean this machine."""
    environ: Mapping[str, str]
    gpus: int | None = None
    """Number of this machine's GPUs; None if `asks_for_gpus` is False, since the number is then not needed."""
    secret: str = field(default="", repr=False)
    """A secret that only the hosts of this run know. A user who starts each host by hand sets it in the environment."""


def check_options(options: LaunchOptions, environ: Mapping[str, str]) -> None:
    """Raises an error for options that are wrong on any hosts."""
    # `ranks_environment` asks for an address, which this check does not use and which may be unknown.
    if ranks_environment({"MASTER_ADDR": "", **environ}):
        raise UsageError(
            "srun or mpirun has started several of this command, and each would start all ranks: start it once, from "
            "the job's script; or leave it out, as srun offload run train.py"
        )
    limits_hosts = options.num_nodes is not None or options.num_gpus is not None
    if limits_hosts and (options.include or options.exclude):
        raise UsageError("--num-nodes and --num-gpus cannot be combined with --include and --exclude: give either")
    if options.module and options.no_python:
        raise UsageError("--module and --no-python cannot be combined: Python runs a module")
    if options.no_ssh != (options.node_rank is not None):
        raise UsageError(
            "--no-ssh and --node-rank go together: with both this command starts the ranks of one host, and is typed "
            "on each; without both it starts all"
        )


def launcher_of(options: LaunchOptions, has_hostfile: bool, environ: Mapping[str, str]) -> str:
    """Returns "ssh" or "slurm": the launcher of the options, else "slurm" inside a Slurm job of several nodes."""
    name = None if options.launcher is None else options.launcher.lower()
    if name is None:
        in_job = len(allocated_nodes(environ)) > 1 and not has_hostfile and not options.no_ssh
        return "slurm" if in_job else "ssh"
    if name not in ("ssh", "slurm"):
        cure = _OTHER_LAUNCHERS.get(name, "leave --launcher out for ssh, or give slurm")
        raise UsageError(f"there is no launcher {name} here: {cure}")
    if name == "slurm" and (has_hostfile or not allocated_nodes(environ)):
        raise UsageError(
            "--launcher slurm takes the nodes of its job: start this command in a script of sbatch or in salloc, "
            "without --hostfile"
        )
    return name


def allocated_nodes(environ: Mapping[str, str]) -> list[str]:
    """Returns the nodes of the Slurm job that this process belongs to; none outside of a job."""
    node_list = environ.get("SLURM_JOB_NODELIST", "")
    try:
        return expand_nodelist(node_list)
    except ValueError as error:
        raise ConfigError(
            f"the variable SLURM_JOB_NODELIST is {node_list!r}, expected a list of nodes such as gpu[01-03], which "
            "Slurm sets; start this command in a job of Slurm's, or unset the variable"
        ) from error


def asks_for_gpus(options: LaunchOptions, has_hostfile: bool, environ: Mapping[str, str]) -> bool:
    """Returns True if the number of ranks depends on the number of this machine's GPUs."""
    return not has_hostfile and options.num_gpus is None and len(allocated_nodes(environ)) < 2
