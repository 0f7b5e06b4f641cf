"""A warm process is a real process: its streams, environment, folder, exit status and signals are its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import warm_process


def test_a_program_runs_as_main(tmp_path: Path) -> None:
    code = (
        "import os, sys, atexit; atexit.register(lambda: print('end'))\n"
        "print(__name__, os.getcwd(), os.environ['HERE'], sys.argv); print('word', file=sys.stderr); sys.exit(3)"
    )
    done = warm_process.python(code, cwd=tmp_path, env={"HERE": "there"})
    assert done.stdout == f"__main__ {tmp_path} there ['-c']\nend\n"
    assert (done.stderr, done.returncode) == ("word\n", 3)


_ENDS = """
import atexit, sys, threading, time
atexit.register(lambda: print("exit function"))
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("main")
{}
"""


@pytest.mark.parametrize("whole_end", [False, True])
@pytest.mark.parametrize(
    ("last", "status", "error"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_script_waits_for_threads_and_runs_exit_functions(
    last: str, status: int, error: str, whole_end: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_ENDS.format(last))
    process = warm_process.begin([script], whole_end=whole_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert (out, process.returncode) == ("main\nthread\nexit function\n", status)
    assert err is not None and err.endswith(error) and bool(err) == bool(error)


@pytest.mark.parametrize("whole_end", [False, True])
def test_a_script_that_cannot_write_its_last_words_ends_as_python_does(whole_end: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('words')")
    with open("/dev/full", "w") as full:
        process = warm_process.begin([script], whole_end=whole_end, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate()
    assert process.returncode == 120 and err is not None and "No space left on device" in err


def test_a_command_has_the_descriptors_that_its_parent_left_open(tmp_path: Path) -> None:
    python = warm_process.commands(tmp_path / "bin") / "python"
    # So many that the server's own have some of their numbers.
    pipes = [os.pipe() for _ in range(12)]
    write = "import os, sys\nfor end in sys.argv[1:]: os.write(int(end), end.encode())"
    ends = [writing for _, writing in pipes]
    subprocess.run([python, "-Wignore", "-c", write, *map(str, ends)], pass_fds=ends, check=True)
    for reading, writing in pipes:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert pipe.read() == str(writing)


def test_torch_is_there_already_and_globals_of_one_are_not_seen_by_the_next() -> None:
    code = "import sys, torch, offload; print('torch' in sys.modules, hasattr(offload, 'mark')); offload.mark = 1"
    assert [warm_process.python(code).stdout for _ in range(2)] == ["True False\n"] * 2


def test_an_error_has_its_traceback() -> None:
    done = warm_process.python("raise ValueError('what')")
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and done.stderr.endswith("ValueError: what\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_the_process(number: signal.Signals) -> None:
    process = warm_process.begin(
        ["-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert process.poll() is None and os.path.exists(f"/proc/{process.pid}")
        process.send_signal(number)
    assert process.returncode == -number


def test_ctrl_c_is_python_s() -> None:
    code = "import signal\ntry:\n signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: print('interrupted')"
    assert warm_process.python(code).stdout == "interrupted\n"


def test_the_command_runs_in_a_warm_process() -> None:
    assert warm_process.run(["-m", "offload", "--version"]).stdout.count(".") == 2


def test_a_mutant_is_in_warm_processes_too() -> None:
    """`tests` puts it in when it is imported, which must come before anything of ours is."""
    code = "import sys; names = list(sys.modules); print(names.index('tests') < names.index('offload'))"
    assert warm_process.python(code).stdout == "True\n"
