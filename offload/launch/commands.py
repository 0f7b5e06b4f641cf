"""The command of each host, computed from hosts, options and environment. This module runs nothing."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offload.errors import UsageError
from offload.launch.environment import ONE_MACHINE, PORT, SECRET, SIGNED, exported
from offload.launch.hosts import Host, select
from offload.launch.options import LaunchOptions, LocalMachine, allocated_nodes, check_options, launcher_of

_DEVICES = "CUDA_VISIBLE_DEVICES"

_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Makes torchrun create a new store for each start of the ranks, without the addresses of killed ranks."""

_MODULE = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    'runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)
"""Code that acts like `-m`, but without the working folder on the path: other users' modules there would run first."""

_SETTINGS = (_DEVICES, "PYTHONPATH", *_OWN_STORE)
"""Variables without secrets. They may be part of a command. Only their owner may read the others."""

_SSH = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=10")
"""No prompt at a terminal that several connections share, and an exit half a minute after a host disappears."""

# The lines are evaluated together, as a quoted value may contain line breaks. `read` takes no byte beyond its line.
_READ = (
    "_all=; _end=$(printf '\\nx'); _end=${{_end%x}}; _left={count}; while [ $_left -gt 0 ]; do IFS= read -r _line || "
    'exit 1; _all="$_all$_line$_end"; _left=$((_left-1)); done; eval "$_all"; unset _all _end _left _line; '
)

# When ssh ends, it ends no process of the other host, but closes the standard input there. The script below then ends
# torchrun, and torchrun ends its ranks. A shell gives background processes no standard input, hence descriptor 3.
_WATCH = (
    "cd {folder} || exit 1; {read}exec 3<&0; {command} </dev/null 3<&- & ranks=$!; "
    "(cat <&3; kill $ranks) >/dev/null 2>&1 & watch=$!; "
    "wait $ranks; status=$?; kill $watch 2>/dev/null; exit $status"
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that this machine runs, for one host or for all."""

    host: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to this process's environment."""
    ends_with_input: bool = False
    """True if closing the command's standard input ends it; otherwise it may replace this process."""
    first_input: str = field(default="", repr=False)
    """Lines that set variables on another host: sent by the standard input, as anybody there can read arguments."""
    shown: str = ""
    """The command as shell text, without the values of variables that may be secrets."""

    def __str__(self) -> str:
        return self.shown


def decide(
    options: LaunchOptions, hostfile: Sequence[Host] | None, exports: Mapping[str, str], machine: LocalMachine
) -> list[Command]:
    """Returns the commands to run: one that replaces this process, or one for each host.

    `exports` are variables for every rank on every host.
    """
    check_options(options, machine.environ)
    launcher = launcher_of(options, hostfile is not None, machine.environ)
    try:
        hosts = _hosts(options, hostfile if hostfile is not None else _without_hostfile(options, machine))
    except UsageError as error:
        # Compared with 0, since None means that the number of GPUs was not determined.
        if hostfile is not None or machine.gpus != 0 or not (options.include or options.exclude):
            raise
        raise UsageError(
            f"{error}. torch finds no GPU on this machine, which has one slot then: for two ranks on its CPU give "
            "--num-gpus 2 in the place of --include and --exclude"
        ) from error
    alone = len(hosts) == 1 and hosts[0].name in machine.names and not options.no_ssh and launcher == "ssh"
    if options.max_restarts and not alone:
        if options.no_ssh and SECRET not in machine.environ:
            raise UsageError(
                f"hosts that restart together and are started by hand need the same secret: set {SECRET} on each to "
                "what `openssl rand -hex 32` has printed once, or leave --max-restarts out"
            )
        exports = {**exports, **_OWN_STORE, SECRET: machine.secret}
    run = _Run(options, hosts, exports, machine)
    if options.no_ssh:
        return [run.this_node()]
    if launcher == "slurm":
        return [run.by_srun()]
    return [run.alone()] if alone else [run.watched(node) for node in range(len(hosts))]


# -- hosts --------------------------------------------------------------------------------------------


def _hosts(options: LaunchOptions, every: Sequence[Host]) -> list[Host]:
    hosts = select(every, options.include, options.exclude)
    if options.num_nodes is not None:
        if options.num_nodes > len(hosts):
            raise UsageError(
                f"--num-nodes {options.num_nodes}, and hosts: {len(hosts)}; name all in a --hostfile, or start this "
                "command on each with --no-ssh, --node-rank and --master-addr"
            )
        hosts = hosts[: options.num_nodes]
    if options.num_gpus is not None:
        for host in hosts:
            if options.num_gpus > len(host.slots):
                raise UsageError(f"--num-gpus {options.num_gpus}, and slots of {host.name}: {len(host.slots)}")
        hosts = [Host(host.name, host.slots[: options.num_gpus]) for host in hosts]
    return hosts


def _without_hostfile(options: LaunchOptions, machine: LocalMachine) -> list[Host]:
    """Returns the nodes of the Slurm job, as many nodes as --num-nodes, or this machine."""
    names, count = allocated_nodes(machine.environ), options.num_gpus or machine.gpus
    if len(names) > 1:
        on_node = machine.environ.get("SLURM_GPUS_ON_NODE", "")
        count = count or (int(on_node) if on_node.isdecimal() else None)
        if count is None:
            raise UsageError("Slurm's job says nothing about GPUs: give the number of ranks of each node, --num-gpus")
    elif options.no_ssh:
        if options.num_nodes is None or options.master_addr is None:
            raise UsageError("--no-ssh without a --hostfile needs --num-nodes and --master-addr, the same on each host")
        names = [f"node {rank}" for rank in range(options.num_nodes)]
    else:
        names = ["localhost"]
    # Without a GPU one rank computes on the CPU.
    return [Host(name, tuple(range(count or 1))) for name in names]


# -- commands -----------------------------------------------------------------------------------------


def _in_place(host: str, arguments: tuple[str, ...], variables: Mapping[str, str]) -> Command:
    before = [f"{name}={shlex.quote(value)} " for name, value in _settings(variables).items()]
    shown = "".join(before) + shlex.join(arguments) + _names_behind(variables)
    return Command(host=host, arguments=arguments, environment=variables, shown=shown)


def _settings(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in _SETTINGS}


def _secrets(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in _SETTINGS}


def _names_behind(variables: Mapping[str, str]) -> str:
    """Returns the end of a line of `--dry-run`: the names of variables whose values the line does not show."""
    names = ", ".join(_secrets(variables))
    return names and f"  # with the variables {names}"


class _Run(NamedTuple):
    """What the commands of all hosts are computed from."""

    options: LaunchOptions
    hosts: Sequence[Host]
    exports: Mapping[str, str]
    machine: LocalMachine

    def alone(self) -> Command:
        """Returns the torchrun command for this machine alone, whose rendezvous no other machine can reach."""
        host, address = self.hosts[0], self.options.master_addr or "127.0.0.1"
        place = f"[{address}]" if ":" in address else address
        # Port 0 is any free one.
        meeting = ["--rdzv-backend", ONE_MACHINE, "--rdzv-endpoint", f"{place}:{self.options.master_port or 0}"]
        arguments = (*self._torchrun(host), *self._restarts(), *meeting, *self._script())
        return _in_place(host.name, arguments, {**self.exports, **_devices(host, self.machine.environ)})

    def this_node(self) -> Command:
        """Returns the torchrun command of this host, if a user types `offload launch` on each host."""
        node = self.options.node_rank or 0
        if node >= len(self.hosts):
            raise UsageError(f"--node-rank {node}: the numbers of the hosts are 0 to {len(self.hosts) - 1}")
        host, arguments = self.hosts[node], self._torchrun_of(node)
        return _in_place(host.name, arguments, {**self.exports, **_devices(host, self.machine.environ)})

    def watched(self, node: int) -> Command:
        """Returns the command of one of several hosts: a shell that ends torchrun when its standard input closes."""
        options, machine, host = self.options, self.machine, self.hosts[node]
        here = host.name in machine.names
        # This machine's own commands inherit its environment.
        inherited = {} if here else exported(machine.environ)
        variables = {**inherited, **self.exports, **_devices(host, machine.environ if here else {})}
        settings = [f"{name}={value}" for name, value in _settings(variables).items()]
        command = shlex.join(["env", *settings, *self._torchrun_of(node)])
        lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in _secrets(variables).items())
        read = _READ.format(count=lines.count("\n")) if lines and not here else ""
        port = () if options.ssh_port is None else ("-p", str(options.ssh_port))
        # The shell of a user may be none that understands this script, so that `sh` is named there, too.
        ssh = ("ssh", *_SSH, *port, *shlex.split(options.launcher_args), host.name)

        def start(read: str) -> tuple[str, ...]:
            shell = ("sh", "-c", _WATCH.format(folder=shlex.quote(machine.folder), read=read, command=command))
            return shell if here else (*ssh, shlex.join(shell))

        return Command(
            host=host.name,
            arguments=start(read),
            environment=_secrets(variables) if here else {},
            ends_with_input=True,
            first_input="" if here else lines,
            # `shown` leaves these lines out, since a user does not type them.
            shown=shlex.join(start("")) + _names_behind(variables),
        )

    def by_srun(self) -> Command:
        """Returns the srun command that starts a torchrun on each node. Each torchrun reads its node's number there."""
        options, count = self.options, str(len(self.hosts))
        if ":" in options.include + options.exclude:
            raise UsageError("Slurm chooses the GPUs of a node: --include and --exclude name nodes here, without slots")
        srun = ["srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
        srun += ["--nodelist", ",".join(host.name for host in self.hosts), *shlex.split(options.launcher_args)]
        own = "--rdzv-conf is_host=$((SLURM_NODEID == 0))" if options.max_restarts else '--node-rank "$SLURM_NODEID"'
        begin = shlex.join([*self._torchrun(self.hosts[0]), *self._meeting_place()])
        shell = f"exec {begin} {own} {shlex.join(self._script())}"
        # srun passes the environment on through Slurm's own connections.
        return _in_place("the job's nodes", (*srun, "sh", "-c", shell), self.exports)

    def _torchrun_of(self, node: int) -> tuple[str, ...]:
        if not self.options.max_restarts:
            place = ["--node-rank", str(node)]
        else:
            # By default torchrun uses the host's own name, but other hosts may not be able to resolve that name.
            own = self._address() if node == 0 else self.hosts[node].name.rpartition("@")[2]
            place = ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", own]
        return (*self._torchrun(self.hosts[node]), *self._meeting_place(), *place, *self._script())

    def _torchrun(self, host: Host) -> list[str]:
        folder = self.options.enable_each_rank_log
        logs = [] if folder is None else ["--log-dir", folder, "--redirects", "3"]
        start = module_command(self.machine.python, "offload.launch.torchrun")
        return [*start, "--nproc-per-node", str(len(host.slots)), *logs]

    def _restarts(self) -> list[str]:
        return ["--max-restarts", str(self.options.max_restarts)] if self.options.max_restarts else []

    def _meeting_place(self) -> list[str]:
        """Returns torchrun's options for the rendezvous of the hosts.

        Without restarts, ranks are numbered in the order of the hosts. With restarts, the hosts use the c10d rendezvous
        with signatures, since only c10d restarts all hosts together. c10d numbers hosts in the order of their names.
        """
        address, port = self._address(), PORT if self.options.master_port is None else self.options.master_port
        count = ["--nnodes", str(len(self.hosts)), *self._restarts()]
        if self.options.max_restarts:
            # The id is equal on all hosts but differs between runs, so that two runs at one port by mistake stay apart.
            run = hashlib.sha256(self.exports[SECRET].encode()).hexdigest()[:16]
            return [*count, "--rdzv-backend", SIGNED, "--rdzv-id", run, "--rdzv-endpoint", f"{address}:{port}"]
        return [*count, "--master-addr", address, "--master-port", str(port)]

    def _address(self) -> str:
        """Returns an address at which the other hosts can reach the first one."""
        if self.options.master_addr is not None:
            return self.options.master_addr
        name = self.hosts[0].name.rpartition("@")[2]
        if len(self.hosts) > 1 and (name == "localhost" or name.startswith("127.")):
            raise UsageError(
                f"the first host is {name}, which other hosts cannot reach: give its address, --master-addr"
            )
        return name

    def _script(self) -> list[str]:
        options = self.options
        kind = ["--module"] if options.module else ["--no-python"] if options.no_python else []
        # "--" ends the options of torchrun, even if the script's name starts with a dash.
        return [*kind, "--", options.script, *options.arguments]


def module_command(python: str, module: str) -> list[str]:
    """Returns the command that runs a module of this library from any working folder."""
    return [python, "-c", _MODULE, module]


def _devices(host: Host, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that makes only a run's GPUs visible on a host; none if these are the first ones.

    Slots are counted within the GPUs that are visible in `environ`.
    """
    if host.slots == tuple(range(len(host.slots))):
        return {}
    shown = [device for device in environ.get(_DEVICES, "").split(",") if device]
    if shown and host.slots[-1] >= len(shown):
        raise UsageError(f"{_DEVICES} shows {len(shown)} GPUs, and slot {host.slots[-1]} of {host.name} is asked for")
    return {_DEVICES: ",".join(shown[slot] if shown else str(slot) for slot in host.slots)}
