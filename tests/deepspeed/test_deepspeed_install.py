"""`import deepspeed` means `offload.deepspeed` once it is installed, and libraries find it; not before, nor beside it.

The scripts are unmodified scripts of DeepSpeed, each in a process of its own, which `offload run` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.processes import warm_process

pytest.importorskip("accelerate")

_QUESTIONS = """
import importlib.metadata, importlib.util, os, pickle, sys
import offload.deepspeed
assert importlib.util.find_spec("deepspeed") is None
try:
    offload.deepspeed.install()
except offload.UsageError as error:
    assert "transformers.integrations.deepspeed is imported already" in str(error) or "accelerate" in str(error), error
else:
    raise AssertionError("transformers has asked already")
for name in [name for name in sys.modules if name.split(".")[0] in ("accelerate", "transformers")]:
    del sys.modules[name]
offload.deepspeed.install()
offload.deepspeed.install()
assert importlib.util.find_spec("deepspeed") is not None and "deepspeed" not in sys.modules
assert importlib.metadata.version("deepspeed") == "0.19.8" and importlib.metadata.version("torch")
import deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
import deepspeed.runtime.zero.partition_parameters as parameters
assert deepspeed is offload.deepspeed and deepspeed.__version_minor__ == 19
assert parameters.Init is deepspeed.zero.Init and pickle.loads(pickle.dumps(FusedAdam)) is FusedAdam
try:
    import deepspeed.profiling
except ModuleNotFoundError as error:
    assert "has no counterpart of deepspeed.profiling; docs/reference/deepspeed-names.md" in str(error)
else:
    raise AssertionError("deepspeed.profiling")
print("right")
"""

_BESIDE = """
import sys, types
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
import offload.deepspeed
try:
    offload.deepspeed.install()
except offload.UsageError as error:
    assert "DeepSpeed itself is imported already" in str(error)
    print("right")
"""

_ARGUMENTS = """
import os, sys
import deepspeed
print([*sys.argv, __file__, __name__, os.environ["RANK"], os.environ["WORLD_SIZE"], deepspeed.__version__])
sys.exit(7)
"""

_CHILD = """
import importlib.metadata, importlib.util, multiprocessing, sys
def version(_):
    import deepspeed.launcher.runner
    return deepspeed.__version__, deepspeed.__name__
if __name__ == "__main__":
    found = importlib.util.find_spec("deepspeed")
    assert found and "deepspeed" not in sys.modules and importlib.metadata.version("deepspeed") == "0.19.8"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print([version(0), *pool.map(version, [1]), sys.argv[1:]], flush=True)
    import offload.deepspeed, deepspeed
    offload.deepspeed.install()
    assert deepspeed is offload.deepspeed and deepspeed.__spec__.name == "offload.deepspeed"
    sys.exit(3)
"""

_SPAWNS = """
import offload.deepspeed
if __name__ == "__main__":
    offload.deepspeed.install()
    import multiprocessing, os
    from module import version
    os.environ.pop("PYTHONPATH", None)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(version, [1]))
"""

_AS_PROGRAMS = """
import pkgutil, runpy, sys, warnings
import offload.deepspeed
for name in [name for name in sys.modules if name.split(".")[0] in ("accelerate", "transformers")]:
    del sys.modules[name]  # they have asked already
offload.deepspeed.install()
warnings.simplefilter("ignore", RuntimeWarning)  # that a module is imported already, and runs a second time
found = [each for each in pkgutil.walk_packages(offload.deepspeed.__path__, "deepspeed.") if not each.ispkg]
for each in found:
    ours = runpy.run_module("offload." + each.name, run_name="program")
    theirs = runpy.run_module(each.name, run_name="program")
    assert ours.keys() == theirs.keys() and ours["__file__"] == theirs["__file__"], each.name
print("right" if "deepspeed.utils.zero_to_fp32" in [each.name for each in found] else found)
"""


def test_the_name_is_given_once_asked_for_and_is_the_package_itself() -> None:
    for code in (_QUESTIONS, _BESIDE):
        done = warm_process.python(code)
        assert done.stdout == "right\n", done.stderr


def test_a_script_has_its_arguments_its_name_and_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_ARGUMENTS)
    # A script's own folder is on its path, the working folder is not: this module hides none of Python's.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "socket.py").write_text("raise SystemExit('imported from the working folder')")
    done = subprocess.run(
        [Path(sys.executable).with_name("offload"), "run", "../script.py", "--lr", "1", "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=elsewhere,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"{[str(script), '--lr', '1', '--help', str(script), '__main__', '0', '1', '0.19.8']}\n"
    missing = warm_process.run(["-m", "offload", "run", str(tmp_path / "absent.py")])
    assert missing.returncode == 2 and "is no file and no command: expected a script" in missing.stderr
    launcher = warm_process.run(["-m", "offload", "run", "deepspeed", "--num_gpus", "2", str(script)])
    assert launcher.returncode == 2 and "there is no launcher deepspeed here" in launcher.stderr


def test_the_processes_of_a_command_find_the_package_and_so_do_spawned_workers(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(_CHILD)
    # A launcher: a shell, whose child is Python.
    offload, child = Path(sys.executable).with_name("offload"), f'"{sys.executable}" "{module}" --lr 1; exit $?'
    done = subprocess.run([offload, "run", "sh", "-c", child], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    found = ("0.19.8", "offload.deepspeed")
    assert done.stdout == f"{[found, found, ['--lr', '1']]}\n"
    (tmp_path / "spawns.py").write_text(_SPAWNS)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, tmp_path / "spawns.py"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == f"{[found]}\n", done.stderr


def test_every_module_runs_as_a_program_by_both_names() -> None:
    done = warm_process.python(_AS_PROGRAMS)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize("name", ["offload.deepspeed.utils.zero_to_fp32", "deepspeed.utils.zero_to_fp32"])
def test_a_module_that_is_a_command_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    command = ["-m", name, str(tmp_path), str(tmp_path / "weights")]
    if name.startswith("deepspeed"):
        # A new process: who gives the name refuses where accelerate has been imported.
        command = ["-m", "offload", "run", *command]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    else:
        done = warm_process.run(command)
    assert done.returncode == 1 and done.stdout == "", done.stderr
    assert (
        done.stderr
        == f"error: {tmp_path} contains no checkpoint of an engine: expected the folder of save_checkpoint\n"
    )


@pytest.mark.numeric
@pytest.mark.works("Trainers", '`Trainer` with `TrainingArguments(deepspeed="ds.json")`, in `offload run`', "right")
@pytest.mark.works("Trainers", "accelerate with a `DeepSpeedPlugin`, in `offload run`", "right")
def test_libraries_train_save_and_resume_as_without_deepspeed(tmp_path: Path) -> None:
    """The scripts compare what they have trained."""
    command = [sys.executable, "-m", "offload.deepspeed", "-m", "tests.deepspeed.scripts", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.endswith("right\n"), done.stdout[-2000:] + done.stderr[-6000:]
