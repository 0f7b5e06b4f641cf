"""Each way to the kernel is tried, falls back with a reason, and is tuned for a drive."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import offload
from offload import testing
from offload.aio import Bandwidth, DirectFile, IoQueue, aligned_empty
from offload.aio import backend as backend_module
from offload.aio.backend import refusals
from offload.bench.tune_io import Trial, choose, write_config
from offload.cli.main import app
from offload.config import read_json
from offload.errors import ConfigError
from offload.sizes import PAGE
from tests import ROOT
from tests.support.processes.seccomp import FILTER_ALL, refusing, run_python

WORK = """
from offload.aio import DirectFile, IoQueue
with DirectFile("file", create=True) as file, IoQueue() as queue:
    queue.write(file, 0, b"x" * 10000).wait()
    back = bytearray(10000)
    queue.read(file, 0, back).wait()
    assert back == b"x" * 10000
    print(queue.backend)
    print("; ".join(queue.refusals))
"""


NAMED = """
from offload.errors import ConfigError
try:
    IoQueue("io_uring")
except ConfigError as error:
    print(error)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("refused", "backend", "pattern"),
    [
        ({"io_uring_setup": errno.EPERM}, "libaio", ["io_uring is not available", "EPERM", "seccomp"]),
        (
            {"io_uring_setup": errno.EPERM, "io_setup": errno.EAGAIN},
            "threads",
            ["io_uring is not available", "libaio is not available", "aio-max-nr"],
        ),
    ],
    ids=["seccomp", "libaio exhausted"],
)
def test_the_next_backend_takes_over(tmp_path: Path, refused: dict[str, int], backend: str, pattern: list[str]) -> None:
    """Except of one that is named."""
    taken, reason, named = refusing(tmp_path, refused, WORK + NAMED)
    if taken != backend and refusals()[backend]:
        pytest.skip(str(refusals()[backend]))
    assert taken == backend
    assert all(word in reason for word in pattern), reason
    assert "io_uring is not available" in named and "auto" in named and "threads" in named


def test_a_refusal_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, call, number, words in (
        ("io_uring", "io_uring_setup", errno.ENOSYS, "Linux 5.1"),
        ("io_uring", "io_uring_setup", errno.ENOMEM, "RLIMIT_MEMLOCK"),
        ("libaio", "io_setup", errno.ENOSYS, "does not support libaio"),
    ):
        assert words in backend_module.refusal(backend, OSError(number, "", call))
    for disabled, words in (("2", "kernel.io_uring_disabled is 2"), ("0", "seccomp"), ("", "seccomp")):
        testing.replace(monkeypatch, "machine.system_file", lambda path, d=disabled: d if "_disabled" in path else "")
        assert words in backend_module.refusal("io_uring", OSError(errno.EPERM, "", "io_uring_setup"))


def test_the_real_limit_of_libaio(tmp_path: Path) -> None:
    """More events than the system has left: refused by the system, not by a filter."""
    if refusals()["libaio"]:
        pytest.skip(str(refusals()["libaio"]))
    most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    threads = most // 4096 + 1
    if threads > 256:
        pytest.skip(f"this system has {most} events, more than a queue can take")
    with pytest.raises(ConfigError, match="aio-max-nr"):
        IoQueue("libaio", threads=threads, depth=4096)
    with IoQueue("libaio", threads=1, depth=64) as queue:
        assert queue.backend == "libaio"


def test_threads_have_one_block_each_so_depth_makes_more_of_them() -> None:
    for given, threads in (({}, 4), ({"threads": 2}, 2), ({"depth": 8}, 8), ({"threads": 2, "depth": 32}, 16)):
        with IoQueue("threads", **given) as queue:
            assert (queue.threads, queue.depth) == (threads, 1)


def test_registered_memory_and_files_hold_the_same_bytes(backend: str, tmp_path: Path) -> None:
    """Inside of the memory, beside it, and across its edge."""
    nbytes = 8 << 20
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend, block_bytes=1 << 20) as queue:
        memory = aligned_empty(nbytes)
        known = queue.register(memory[: nbytes // 2], file)
        assert known == (nbytes // 2 if backend == "io_uring" else 0)
        memory[:] = os.urandom(nbytes)
        queue.write(file, 0, memory).wait()
        back = aligned_empty(nbytes)
        queue.read(file, 0, back).wait()
        assert back == memory
        memory[:] = bytes(nbytes)
        queue.read(file, 0, memory).wait()
        assert back == memory


def test_a_ring_registers_256_regions_of_memory_at_most(backend: str, tmp_path: Path) -> None:
    memory = aligned_empty(260 * PAGE)
    with IoQueue(backend) as queue:
        known = queue.register(*(memory[start : start + PAGE] for start in range(0, len(memory), PAGE)))
        assert known == (256 * PAGE if backend == "io_uring" else 0)
        with DirectFile(tmp_path / "file", create=True) as file:
            assert queue.write(file, 0, memory).wait() == len(memory), "those that have no slot move all the same"


def test_less_is_registered_where_memory_may_not_be_locked(tmp_path: Path) -> None:
    """As a user without privileges, with room for 4 MiB: smaller pieces, or none, and I/O all the same."""
    if os.geteuid() != 0 or refusals()["io_uring"]:
        pytest.skip("needs root, to become somebody else, and io_uring")
    code = """
import os, resource
from offload.aio import DirectFile, IoQueue, aligned_empty
os.chmod(".", 0o777)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
os.setresuid(65534, 65534, 65534)
memory = aligned_empty(64 << 20)
with DirectFile("file", create=True) as file, IoQueue("io_uring") as queue:
    print(queue.register(memory))
    memory[:] = os.urandom(1 << 20) * 64
    queue.write(file, 0, memory).wait()
    back = aligned_empty(64 << 20)
    queue.read(file, 0, back).wait()
    print(back == memory)
"""
    for parent in tmp_path.parents[:2]:
        os.chmod(parent, 0o755)
    registered, same = run_python(code, tmp_path).splitlines()
    assert 0 <= int(registered) <= 4 << 20 and same == "True"


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["before the first request", "later"])
def test_a_ring_that_is_refused_once_it_is_there(tmp_path: Path, when: str) -> None:
    """An error of each request, no spinning and no hanging."""
    refuse = "refuse_all({426: errno.EPERM})\n"
    code = f"""
{FILTER_ALL}
from offload.aio import DirectFile, IoQueue
file, queue = DirectFile("file", create=True), IoQueue("io_uring")
if {when!r} == "later":
    queue.write(file, 0, bytes(4096)).wait()
else:
    {refuse}
if {when!r} == "later":
    {refuse}
for _ in range(3):
    try:
        queue.write(file, 0, bytes(4096)).wait(120)
    except OSError as error:
        print(error.errno)
queue.close()
print("closed")
"""
    if platform.machine() != "x86_64" or refusals()["io_uring"]:
        pytest.skip("needs io_uring, on x86-64")
    assert run_python(code, tmp_path).split() == ["1", "1", "1", "closed"]


MIB = 1 << 20


def _trial(block_bytes: int, depth: int, rate: float) -> Trial:
    return Trial(block_bytes, depth, Bandwidth(rate, rate))


def test_the_least_in_flight_of_the_best_is_chosen() -> None:
    trials = [_trial(MIB, 64, 100), _trial(4 * MIB, 8, 98), _trial(MIB, 16, 97.5), _trial(MIB, 4, 90)]
    assert choose(trials) == trials[2]
    assert choose(trials[3:]) == trials[3]


def test_it_writes_the_block_into_a_config(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 8, "aio": {"thread_count": 1, "block_size": 4096}}))
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--config", str(config), "--size", "1MiB", "--json"])
    assert done.exit_code == 0, done.output
    answer, content = json.loads(done.stdout), json.loads(config.read_text())
    assert content == {"train_batch_size": 8, "aio": answer["aio"]}
    assert set(answer["aio"]) == {"block_size", "queue_depth", "intra_op_parallelism"}
    assert answer["trials"] and all(trial["read_gb_per_s"] > 0 for trial in answer["trials"])
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "message"), [('{"aio": {"depth": 1}}', "queue_depth"), ("[1]", "object")])
def test_a_config_that_cannot_be_written_is_named_first(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "ds.json"
    config.write_text(text)
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--config", str(config), "--size", "1MiB"])
    assert done.exit_code == 2 and message in done.stderr and done.stdout == ""
    assert config.read_text() == text


def test_a_copy_has_the_comments_too_and_the_config_is_untouched(tmp_path: Path) -> None:
    config, output = tmp_path / "ds.json", tmp_path / "tuned.json"
    config.write_text('{"train_batch_size": 8} // mine')
    arguments = ["tune", str(tmp_path), "--config", str(config), "--output", str(output), "--size", "1MiB"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert read_json(output)["train_batch_size"] == 8 and output.read_text().endswith("} // mine")
    assert config.read_text() == '{"train_batch_size": 8} // mine'


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text("{}")
    with pytest.raises(ConfigError, match="no folder"):
        write_config(config, tmp_path / "none" / "out.json", {"block_size": 4096})
    write_config(config, config, {"block_size": 4096})
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


def test_bad_input_is_refused(tmp_path: Path) -> None:
    for arguments in (
        ["tune", str(tmp_path / "none"), "--size", "1MiB"],
        ["tune", str(tmp_path), "--output", str(tmp_path / "out.json"), "--size", "1MiB"],
        ["tune", str(tmp_path), "--size", "no"],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2 and done.stderr.startswith("error: "), done.output


def test_the_engine_takes_the_block(tmp_path: Path) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        "aio": {"block_size": 65536, "queue_depth": 3, "intra_op_parallelism": 2},
        "offload": {"io_backend": "libaio" if refusals()["libaio"] is None else "threads"},
    }
    engine, *_ = offload.initialize(model=nn.Linear(64, 64), config=config)
    queue = testing.inspect(engine).queue._queue
    try:
        assert queue.block_bytes == 65536
        shape = (queue.threads, queue.depth)
        assert shape == ((2, 3) if queue.backend == "libaio" else (6, 1))
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 64)).sum())
            engine.step()
    finally:
        engine.destroy(remove=True)


def test_a_link_stays_one_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    before = '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "wandb": {"team": "Zoë"}}'
    real.write_text(before)
    real.chmod(0o600)
    link.symlink_to("real.json")
    write_config(link, link, {"block_size": 4096})
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o600
    assert real.read_text() == f'{before[:-1]}, "aio": {{"block_size": 4096}}}}'


NAMES = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
COMPILER = next((name for name in NAMES if name and shutil.which(name.split()[0])), None)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_every_native_test_passes(tmp_path: Path) -> None:
    """Built once for each state of the sources: the compiler takes half a minute beside other tests."""
    assert COMPILER is not None
    build = ROOT / "build" / "native-tests"
    environment = os.environ | {"CXX": COMPILER, "OPTIMIZE": "-O0", "BUILD": str(build), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "sanitize.sh"), "plain"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    listed = sum(path.read_text().count("\nTEST(") for path in (ROOT / "tests" / "native").glob("*_test.cpp"))
    assert done.returncode == 0 and f"\n{listed} passed\n" in done.stdout, done.stdout
