"""Hosts of a run: DeepSpeed's hostfile, its include and exclude syntax, and Slurm's lists of nodes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from offload.errors import UsageError

_Value = TypeVar("_Value")


class Host(NamedTuple):
    """A machine and the slots that a run uses there."""

    name: str
    """The host's name in the hostfile, by which ssh reaches it."""
    slots: tuple[int, ...]
    """Numbers of the host's GPUs, one for each rank."""


_MOST_SLOTS = 4096
"""Most slots of a host: more than any host has GPUs or processors."""
_MOST_NODES = 100_000
"""Most nodes, or numbers of nodes, in a Slurm list."""
# A leading dash would start an ssh option. The excluded characters occur in no host name, but could control a terminal.
_LINE = re.compile(r"([\w.:%\[][\w.:%@+\[\]-]*)\s+slots=([0-9]+)\s*(?:#.*)?")


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Returns the hosts of a hostfile, in its order.

    Empty lines and those that begin with # are comments. `path` is for messages.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        # The length is checked before the conversion: Python refuses to convert thousands of digits.
        count = int(match[2]) if match is not None and len(match[2]) <= len(str(_MOST_SLOTS)) else 0
        if match is None or not 0 < count <= _MOST_SLOTS:
            raise UsageError(
                f"{path}:{number}: expected a line `host slots=4`, with at least one slot and at most {_MOST_SLOTS}, "
                f"got {line[:99]!r}"
            )
        if match[1] in hosts:
            raise UsageError(f"{path}:{number}: the host {match[1]} has two lines; give it one, with all of its slots")
        hosts[match[1]] = Host(match[1], tuple(range(count)))
    if not hosts:
        raise UsageError(f"{path} names no host: expected a line `host slots=4` for each")
    return [*hosts.values()]


def select(hosts: Sequence[Host], include: str, exclude: str) -> list[Host]:
    """Returns the selected hosts and slots, in the order of `hosts`.

    `include` names the hosts and slots to use, `exclude` those not to use: `worker-0@worker-1:0,2` for all of worker-0
    and two slots of worker-1; "" for no selection.
    """
    if include and exclude:
        raise UsageError("--include and --exclude cannot be combined: give the one that is shorter")
    if not include and not exclude:
        return [*hosts]
    named = _parse_filter(include or exclude, {host.name: host for host in hosts})
    left = []
    for host in hosts:
        mine = named.get(host.name, ())
        slots = mine if include else tuple(slot for slot in host.slots if slot not in mine)
        if slots:
            left.append(Host(host.name, slots))
    if not left:
        raise UsageError(f"--exclude {exclude} leaves no slot of any host")
    return left


def _parse_filter(text: str, hosts: dict[str, Host]) -> dict[str, tuple[int, ...]]:
    """Returns the sorted slots that a filter names, by host."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if name not in hosts:
            raise UsageError(f"there is no host {name!r} to include or exclude; the hosts are {', '.join(hosts)}")
        if colon and not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", numbers):
            raise UsageError(f"expected hosts and slots such as worker-0@worker-1:0,2, got {part[:99]!r}")
        slots = {int(number) for number in numbers.split(",")} if colon else {*hosts[name].slots}
        if unknown := slots.difference(hosts[name].slots):
            raise UsageError(f"{name} has no slot {min(unknown)}: it has {len(hosts[name].slots)}, the first is 0")
        named.setdefault(name, set()).update(slots)
    return {name: tuple(sorted(slots)) for name, slots in named.items()}


# -- Slurm ----------------------------------------------------------------------------------------------

_OUTSIDE = re.compile(r",(?![^\[]*\])")
"""A comma outside brackets."""
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand_nodelist(text: str) -> list[str]:
    """Returns the names in a Slurm list such as `gpu[01-03,7],login`, in order; else raises `ValueError`."""
    names = (name for part in _OUTSIDE.split(text) if part for name in _expand(part))
    return _bounded(names)


def _bounded(values: Iterable[_Value]) -> list[_Value]:
    """Returns the values as a list; raises `ValueError` if there are more of them than nodes in any cluster."""
    bounded = [*itertools.islice(values, _MOST_NODES + 1)]
    if len(bounded) > _MOST_NODES:
        raise ValueError(f"more than {_MOST_NODES} nodes")
    return bounded


def _expand(part: str) -> Iterator[str]:
    pieces = _BRACKETS.split(part)
    # Plain text and bracket contents alternate; plain text has a single expansion.
    choices = [_bounded(_numbers(piece)) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    for choice in itertools.product(*choices):
        yield "".join(choice)


def _numbers(text: str) -> Iterator[str]:
    """Yields the numbers of a text such as `01-03,7`, with their leading zeros."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def expand_counts(text: str) -> list[int]:
    """Returns the numbers in a Slurm list; for `2(x3),1` these are 2, 2, 2, 1."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return _bounded(int(count) for count, times in pairs for _ in range(int(times or 1)))
