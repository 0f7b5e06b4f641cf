"""Implementation of `offload replay`: steps of `offload train` computed again from a kept commit, and compared.

    RUN@100 ─► fork ─► steps 101, 102, … 120 ─► loss and gradient norm of each: the bits of the log's?
                                             └► the states after step 120: the checksums of RUN@120's?

The run is only read: the steps are computed in a fork, which is removed at the end. The fork computes by the options
that the commit contains, so in the run's own placement unless another one is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offload.aio.protocols import Queue
from offload.errors import StoreError, UsageError
from offload.fileio import real_path
from offload.finetune.job import WARNING, Job, prepare
from offload.finetune.loop import StepReport, steps
from offload.finetune.options import from_record
from offload.finetune.output import arithmetic
from offload.launch.environment import rank_number
from offload.model_io.source import StoreSource, commits_of_all, lock_and_look, ranks_of
from offload.notices import shell_command
from offload.report.log import Log, read_log
from offload.runs.fork import fork, history
from offload.sizes import count_of
from offload.swapper.store import remove_run
from offload.swapper.store.format import joined
from offload.swapper.store.inspection import RankFiles

COMPARED = ("loss", "grad_norm")
"""Fields of a log's line that are compared. JSON contains every bit of their fp64 values."""
_KEPT_OPTIONS = frozenset(
    "model text data eval_data eval_every train_on seq_len steps epochs schedule warmup lora load_in_4bit load_in_8bit "
    "gradient_checkpointing chunked_loss kernels".split()
)
"""Options of the run that its config does not contain. All others are in the config, or change no bit."""

_OUTPUTS = ("tensorboard", "wandb", "csv_monitor", "flops_profiler", "comms_logger", "trace", "log")
"""Blocks and keys of a config for files and services that a run writes to."""

_OTHER_DATA = "the data differ"
"""Words of a line of `prepare`."""


def parse_steps(text: str) -> range:
    """Returns the steps that a user writes as "100..120", or as "100".

    Raises:
        UsageError: `text` is neither, or the steps are in the wrong order.
    """
    match = re.fullmatch(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?", text)
    first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= first <= last:
        raise UsageError(f"expected steps as 100..120, from 1 on and in this order, got {text!r}")
    return range(first, last + 1)


def replay(
    path: Path,
    wanted: range,
    queue: Queue,
    *,
    log: Path | None = None,
    placement: Mapping[str, str] = MappingProxyType({}),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Computes the steps `wanted` of the run at `path` again, and returns the certificate, a JSON object.

    Its "equal" is True if the loss and the gradient norm of each step have the bits of the log, and if the states after
    the last step have the checksums of the commit of that step, where there is one.

    Args:
        log: The log of the run. None for the one that its options name.
        placement: Options of `offload train` for tiers, by name, that replace those of the run.
        say: Receives a line for each step that was computed.

    Raises:
        StoreError: No commit before the first step is kept, or the run is not of `offload train`, or has several ranks.
        UsageError: The log lacks a step or is of another run, or this process is one of several ranks.
    """
    if rank_number(os.environ, "WORLD_SIZE", 1) > 1:
        raise UsageError("offload replay computes in one process: start it without torchrun")
    path = real_path(path)
    commits = commits_of(path)
    start = max((step for step in commits if step < wanted[0]), default=None)
    if start is None:
        first = min(commits)
        raise StoreError(
            f"no commit before step {wanted[0]} of {path} is kept: the first is of step {first}, so steps from "
            f"{first + 1} on can be computed again; `{shell_command('log', path)}` lists all"
        )
    with contextlib.ExitStack() as locks:
        run_id = _run_id(*_one_rank(commits[start], locks))  # before anything is copied
    client_states = _client_states(commits, start, wanted, queue)
    log = log or next(iter(client_states.values()))["command"]["options"].get("log")
    if log is None:
        raise UsageError(
            "the run was trained without --log, so there is nothing to compare with: give its log by --log"
        )
    base = path.name.partition("@")[0]
    run_log = read_log(Path(log))
    logged = _logged(run_log, wanted)
    begins = [step for step, _ in run_log.abouts]
    first = max((step for step in begins if step <= wanted[0]), default=0)
    abouts = [about for step, about in run_log.abouts if first <= step <= wanted[-1]]
    ids = {about["run_id"] for about in abouts if isinstance(about.get("run_id"), str)}
    if run_id is not None and ids - {run_id}:
        raise UsageError(
            f"this log is of another run: {log} is of the run with the id {min(ids - {run_id}):.99}, and {base} has "
            f"the id {run_id}; give the log of {base} by --log"
        )
    # The name alone, which a log of an earlier version has, is another one after a rename or a fork.
    of_run = str(abouts[0].get("run")) if abouts else "unknown"
    certain = of_run == base or bool(ids)
    client_state = client_states[_of_process(commits, client_states, start, wanted, begins, queue)]
    command = client_state["command"]
    if command["arithmetic"] != (now := arithmetic()):
        differing = [
            f"{name} {was}, now {now.get(name)}" for name, was in command["arithmetic"].items() if now.get(name) != was
        ]
        say(f"bits may differ, since the steps were computed with {'; '.join(differing)}")
    if not certain:
        say(f"this log is of another run: {log} is of {of_run}, and not of {base}, unless that was renamed or forked")
    name = f"{base}.replay-{os.getpid()}"
    computed: dict[int, dict[str, float]] = {}
    with _removed(commits[start].with_name(name)):
        forked = fork(commits[start], name, queue)
        with contextlib.closing(_reports(command, name, drives_of(forked.run), placement, say)) as reports:
            for report in reports:
                computed[report.step] = {"loss": report.loss, "grad_norm": report.grad_norm}
                say(f"step {report.step}: loss {report.loss!r}, gradient norm {report.grad_norm!r}")
                if not certain and not _compared(report.step, logged[report.step], computed[report.step])["equal"]:
                    raise UsageError(
                        f"this log is of another run: {log} is of {of_run}, and step {report.step} of {base} has other "
                        f"bits, which says nothing of {base}; give the log of {base} by --log"
                    )
                if report.step == wanted[-1]:
                    break
        end = commits.get(wanted[-1])
        states = None if end is None else _compared_states(sums_of(end), sums_of(forked.run))
    rows = [_compared(step, logged[step], computed[step]) for step in wanted]
    equal = all(row["equal"] for row in rows) and (states is None or states["equal"])
    return {
        "run": str(path),
        "from": {"commit": commits[start].name, "step": start},
        "equal": equal,
        "steps": rows,
        "states": states,
        "log": {"path": str(log), "sha256": hashlib.sha256(Path(log).read_bytes()).hexdigest()},
        "data": dict(client_state.get("job", {}).get("text", {})),
        "model": command["options"].get("model"),
        "placement": dict(placement),
        "trained_with": command["arithmetic"],
        "replayed_with": arithmetic(),
    }


def commits_of(path: Path) -> dict[int, Path]:
    """Returns the folder of each step of a run that can be forked: its kept steps, and its last commit."""
    base = path.name.partition("@")[0]
    folders: dict[int, Path] = {}
    for row in history(path):
        name, at, _ = row["run"].partition("@")
        if name == base and (at or row["step"] not in folders):
            folders[row["step"]] = path.with_name(row["run"])
    if not folders:
        raise StoreError(f"{path} has no commit of its own, only those of its forks; give the folder of one of them")
    return folders


def drives_of(run: Path) -> list[str]:
    """Returns the folder of the run's parent on each drive."""
    with contextlib.ExitStack() as locks:
        (rank,) = _one_rank(run, locks)
        return [str(folder.parent.parent) for folder in rank.folders]


def sums_of(run: Path) -> dict[str, str]:
    """Returns the CRC-32C of each state of each unit in the last commit of a run, by a name such as "3 weight"."""
    with contextlib.ExitStack() as locks:
        (commit,) = commits_of_all(_one_rank(run, locks))
        return {
            f"{unit} {state.value}": f"{whole.crc:08x}"
            for (unit, state), slot in sorted(commit.table.items(), key=lambda item: (item[0][0], item[0][1].value))
            for whole in joined(slot, sum(part.nbytes for part in slot))
        }


def _one_rank(run: Path, locks: contextlib.ExitStack) -> list[RankFiles]:
    ranks = ranks_of(run, lock_and_look(run, locks), replicas=True)
    if len(ranks) != 1:
        raise StoreError(f"{run} was trained by {len(ranks)} ranks; offload replay computes runs of one process again")
    return ranks


def _run_id(rank: RankFiles) -> str | None:
    """Returns the id of the run that made a commit; None if an earlier version has made it."""
    assert rank.manifest is not None, "a commit has one"
    origin: Mapping[str, Any] = rank.manifest.spec.about.get("forked_from", {})
    return origin.get("run_id") if "@" in rank.folder.parent.name else rank.run_id


def _client_states(
    commits: Mapping[int, Path], start: int, wanted: range, queue: Queue
) -> dict[int, Mapping[str, Any]]:
    """Returns what the first commit after the steps and the one before them contain beside the states, by step.

    Each contains the command of the process that made it.
    """
    states = {}
    for step in dict.fromkeys((min((step for step in commits if step >= wanted[0]), default=start), start)):
        try:
            client_state = _client_state(commits[step], queue)
        except StoreError:
            if step == start:
                raise
            continue  # a process trains the run: the earlier commit is kept apart from it
        command = client_state.get("command")
        if isinstance(command, Mapping) and isinstance(command.get("options"), Mapping):
            states[step] = client_state
    if not states:
        raise StoreError(
            f"{commits[start]} does not contain the command that trained it: offload replay computes runs of "
            "`offload train` again, of this version on; fork it, and train it by its own script"
        )
    return states


def _of_process(
    commits: Mapping[int, Path],
    states: Mapping[int, Any],
    start: int,
    wanted: range,
    begins: Sequence[int],
    queue: Queue,
) -> int:
    """Returns the step of the commit, of `states`, that the process of the steps from `start` to the last has made.

    Args:
        begins: The first step of each process, as the log has them.

    Raises:
        StoreError: Processes with other options have computed some of the steps, or no commit is of their process.
    """
    later: int = next(iter(states))
    if not _changes(commits, start, wanted, queue):
        return later
    within = [step for step in begins if start + 1 < step <= wanted[-1]]
    after = [step for step in begins if wanted[-1] < step <= later]
    if begins and not within and (not after or (start in states and start + 1 not in begins)):
        return start if after else later
    stop = min((step for step in commits if step >= wanted[-1]), default=wanted[-1])
    raise StoreError(
        f"the run was resumed with other options between steps {start} and {stop}, and no commit is of the process of "
        "all steps: expected steps between two commits of one command"
    )


def _client_state(commit: Path, queue: Queue) -> Mapping[str, Any]:
    with contextlib.closing(StoreSource(commit, queue)) as source:
        state: Mapping[str, Any] = source.client_state
        return state


def _computing(command: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options and the config that compute the steps, without what a run writes besides its states."""
    options = {key: value for key, value in command["options"].items() if key in _KEPT_OPTIONS}
    config = {key: block for key, block in command["config"].items() if key not in _OUTPUTS}
    config["offload"] = {key: value for key, value in config.get("offload", {}).items() if key not in _OUTPUTS}
    return options, config


def _changes(commits: Mapping[int, Path], start: int, wanted: range, queue: Queue) -> bool:
    """Returns True if the commits from `start` to the first one after the steps do not all have the same command."""
    last = min((step for step in commits if step >= wanted[-1]), default=wanted[-1])
    commands = []
    for step, commit in commits.items():
        if start <= step <= last:
            with contextlib.suppress(StoreError):  # a process trains the run
                command = _client_state(commit, queue).get("command")
                if command is not None:
                    options, config = _computing(command)
                    config["offload"].pop("resume", None)
                    commands.append((options, config))
    return any(command != commands[0] for command in commands[1:])


def _logged(log: Log, wanted: range) -> dict[int, Mapping[str, Any]]:
    """Returns the log's line of each step."""
    lines = {line["step"]: line for line in log.steps}
    for step in wanted:
        if step not in lines:
            raise UsageError(f"{log.path} has no line of step {step}: expected steps {wanted[0]} to {wanted[-1]}")
        lacking = next((name for name in COMPARED if name not in lines[step]), None)
        if lacking is not None:  # absent, null or no number: `read_log` leaves all of them out
            raise UsageError(
                f"{log.path} has no number as {lacking} of step {step}: expected the log of a run, unchanged"
            )
    return lines


@contextlib.contextmanager
def _removed(run: Path) -> Iterator[None]:
    """Removes a fork at the end, and what an interrupted one has left."""
    if run.exists():
        raise StoreError(f"{run} is left from a replay that was killed: remove it with `{shell_command('rm', run)}`")
    try:
        yield
    finally:
        if run.exists():
            remove_run(run)


def _reports(
    command: Mapping[str, Any],
    name: str,
    drives: list[str],
    placement: Mapping[str, str],
    say: Callable[[str], None],
) -> Generator[StepReport, None, None]:
    """Yields a report of each step of a fork. Once the caller leaves the loop, the last step is committed."""
    kept, config = _computing(command)
    # A run that was left to choose has commits, or there would be no fork of one.
    durability = config["offload"].get("durability") or "auto"
    options = replace(
        from_record(kept | dict(placement)),
        durability="step" if durability == "auto" else None,
        run=name,
        resume="must",
        nvme_path=tuple(drives),
        no_output=True,
        keep_every=0,
    )
    # Other lines of a start are about a training that goes on. Other data cannot give the bits of the log.
    job = prepare(options, config, lambda line: say(line) if _OTHER_DATA in line or line.startswith(WARNING) else None)
    assert isinstance(job, Job), "a run that must be resumed is no finished one"
    try:
        # Neither evaluations nor saves change a bit of a step.
        for report in steps(replace(job, eval_every=0, save_every=None)):
            if isinstance(report, StepReport):
                yield report
    finally:
        job.engine.destroy(remove=False)


def _compared(step: int, logged: Mapping[str, Any], computed: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "equal": True}
    for name in COMPARED:
        before, now = float(logged[name]).hex(), computed[name].hex()
        row[name] = {"log": before, "replay": now, "equal": before == now}
        row["equal"] &= before == now
    return row


def _compared_states(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, Any]:
    different = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    whole = hashlib.sha256(repr(sorted(before.items())).encode()).hexdigest()
    return {"equal": not different, "compared": len(before), "different": different, "sha256_of_checksums": whole}


def lines_of(certificate: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a certificate says, for people: each difference, then the result."""
    rows, states = certificate["steps"], certificate["states"]
    different = [row for row in rows if not row["equal"]]
    for row in different:
        for name in COMPARED:
            if not row[name]["equal"]:
                yield f"step {row['step']}: {name} {row[name]['replay']}, in the log {row[name]['log']}"
    first, last = rows[0]["step"], rows[-1]["step"]
    count = f"{len(rows) - len(different)} of {count_of(len(rows), 'step')}"
    yield f"steps {first} to {last}, from {certificate['from']['commit']}: {count} equal the log in every bit"
    if states is None:
        yield f"the states after step {last} were not compared: the run has kept no commit of that step"
    elif states["equal"]:
        yield f"the states after step {last} equal those of the kept commit: {states['compared']} checksums"
    else:
        yield (
            f"the states after step {last} differ from the kept commit: {len(states['different'])} of "
            f"{states['compared']} checksums, the first of unit {states['different'][0]}"
        )
