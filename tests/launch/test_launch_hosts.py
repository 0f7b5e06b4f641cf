"""Hosts and slots come from DeepSpeed's hostfile and filters, and from Slurm's lists; what is malformed is named."""

from __future__ import annotations

import pytest

from offload.errors import UsageError
from offload.launch.hosts import Host, expand_counts, expand_nodelist, parse_hostfile, select

TEXT = """
# the workers
worker-0 slots=2
  user@worker-1   slots=4   # the larger one
"""
HOSTS = [Host("worker-0", (0, 1)), Host("worker-1", (0, 1, 2, 3)), Host("worker-2", (0,))]


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
        ("", "", HOSTS),
        ("worker-1:3,1@worker-0", "", [Host("worker-0", (0, 1)), Host("worker-1", (1, 3))]),
        ("worker-1:0@worker-1:2", "", [Host("worker-1", (0, 2))]),
        ("", "worker-1:0", [HOSTS[0], Host("worker-1", (1, 2, 3)), HOSTS[2]]),
        ("", "worker-0@worker-2:0", [HOSTS[1]]),
    ],
)
def test_include_and_exclude_choose_hosts_and_slots(include: str, exclude: str, left: list[Host]) -> None:
    assert select(HOSTS, include, exclude) == left


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
        select(HOSTS, include, exclude)


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
