"""Under `offload run` the name deepspeed is this package: scripts of DeepSpeed and of trainers run unmodified."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import nn

from tests import ROOT
from tests.support import rounding_bounds
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
    import deepspeed.autotuning.tuner
except ModuleNotFoundError as error:
    assert "has no counterpart of deepspeed.autotuning: `offload plan MODEL` predicts" in str(error)
    assert error.name == "deepspeed.autotuning"
else:
    raise AssertionError("deepspeed.autotuning")
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

_RUN_OF_A_MODULE = """
import runpy, sys
libraries = ("accelerate", "transformers", "peft", "trl", "tests")
for name in [name for name in sys.modules if name.split(".")[0] in libraries]:
    del sys.modules[name]  # they have asked for DeepSpeed already
sys.argv = ["offload.deepspeed", "-m", *{arguments}]
runpy.run_module("offload.deepspeed", run_name="__main__", alter_sys=True)
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


def test_the_command_deepspeed_of_a_tutorial_is_the_launcher(tmp_path: Path) -> None:
    """As a command of `offload run`, and in a script of a shell, without the virtual environment on the path."""
    (tmp_path / "run.sh").write_text('deepspeed --num_gpus 1 --dry_run "$@"\n')
    (tmp_path / "train.py").write_text("")
    offload, options = Path(sys.executable).with_name("offload"), ["train.py", "--deepspeed_config", "ds.json"]
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    printed = []
    for command in (["run", "deepspeed", "--num_gpus", "1", "--dry_run"], ["run", "sh", "run.sh"]):
        done = subprocess.run(
            [offload, *command, *options], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        printed.append(re.sub(r"--rdzv\S+", "", done.stdout))
    assert printed[0] == printed[1] and " train.py --deepspeed_config ds.json" in printed[0], printed
    assert "offload.launch.torchrun" in printed[0]


def test_the_command_deepspeed_can_be_installed(tmp_path: Path) -> None:
    """By a distribution of its own, which no extra names; built and installed without a network."""
    source, bin_of_venv = Path(__file__).parents[2] / "packaging" / "deepspeed-command", Path(sys.executable).parent
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", tmp_path]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [tmp_path / "bin" / "deepspeed", "--num_gpus", "1", "--dry_run", "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{bin_of_venv}:/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "offload.launch.torchrun" in done.stdout


def test_the_processes_of_a_command_find_the_package_and_so_do_spawned_workers(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(_CHILD)
    # A launcher: a shell, whose child is Python.
    offload, child = Path(sys.executable).with_name("offload"), f'"{sys.executable}" "{module}" --lr 1; exit $?'
    done = subprocess.run([offload, "run", "sh", "-c", child], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    package = ("0.19.8", "offload.deepspeed")
    assert done.stdout == f"{[package, package, ['--lr', '1']]}\n"
    (tmp_path / "spawns.py").write_text(_SPAWNS)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, tmp_path / "spawns.py"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == f"{[package]}\n", done.stderr


def test_every_module_runs_as_a_program_by_both_names() -> None:
    done = warm_process.python(_AS_PROGRAMS)
    assert done.stdout == "right\n", done.stderr


def test_a_module_that_is_a_command_says_what_is_wrong(tmp_path: Path) -> None:
    done = warm_process.run(["-m", "offload.deepspeed.utils.zero_to_fp32", str(tmp_path), str(tmp_path / "weights")])
    assert done.returncode == 1 and done.stdout == "", done.stderr
    assert (
        done.stderr
        == f"error: {tmp_path} contains no checkpoint of an engine: expected the folder of save_checkpoint\n"
    )


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.works("Trainers", '`Trainer` with `TrainingArguments(deepspeed="ds.json")`, in `offload run`', "right")
@pytest.mark.works("Trainers", "accelerate with a `DeepSpeedPlugin`, in `offload run`", "right")
def test_libraries_train_save_and_resume_as_without_deepspeed(tmp_path: Path) -> None:
    """The scripts compare what they have trained."""
    done = warm_process.python(_RUN_OF_A_MODULE.format(arguments=["tests.deepspeed.scripts", str(tmp_path)]), cwd=ROOT)
    assert done.returncode == 0 and done.stdout.endswith("right\n"), done.stdout[-2000:] + done.stderr[-6000:]


FOLDER = ROOT / "tests" / "deepspeed" / "scripts"
BY_DEEPSPEED = [4.847640037536621, 4.875646114349365, 4.736739158630371]
BY_DEEPSPEED += [4.761690139770508, 4.690145492553711, 4.739435195922852]
"""Losses of DeepSpeed 0.19.8: `DS_ACCELERATOR=cpu torchrun hello_deepspeed.py --checkpoint_dir OUT`, one rank."""
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")


def printed(script: str, *arguments: str, by: str = "offload run", cwd: Path) -> Any:
    """Returns what a script has printed as JSON in its last line."""
    tools = Path(sys.executable).parent
    command = [str(tools / "offload"), "run"] if by == "offload run" else [sys.executable]
    done = subprocess.run(
        [*command, str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def placed(folder: Path, **content: Any) -> dict[str, Any]:
    """Returns a config in which all is on NVMe."""
    place = {"device": "nvme", "nvme_path": str(folder / "drive")}
    (folder / "drive").mkdir(exist_ok=True)
    return {**content, "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place}}


# -- transformers -------------------------------------------------------------------------------------


def begun(folder: Path, kind: Any) -> tuple[Path, nn.Module]:
    """Writes a model and a tokenizer of letters. The model has its head: a new one would come of another draw."""
    torch.manual_seed(0)
    words = {"[PAD]": 0, "[EOS]": 1, **{chr(code): code for code in range(2, 127)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", eos_token="[EOS]")
    sizes = {"vocab_size": 127, "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = kind(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model", model


def sentences(folder: Path) -> list[str]:
    """Writes what is a comment and what is code, and returns the options of the files."""
    names = {}
    lines = [line.strip() for line in inspect.getsource(textwrap).splitlines() if line.strip()]
    for name, some in (("train", lines[:-20]), ("validation", lines[-20:])):
        rows = [{"sentence1": line, "label": int(line.startswith("#"))} for line in some]
        names[name] = folder / f"{name}.json"
        names[name].write_text("\n".join(map(json.dumps, rows)))
    return [text for name, path in names.items() for text in (f"--{name}_file", str(path))]


@pytest.mark.slow  # processes that import torch and transformers
@pytest.mark.works("Trainers", "scripts in the form of `run_clm.py` and `run_glue.py`, in `offload run`", "right")
@pytest.mark.parametrize(
    ("script", "kind"),
    [("run_clm.py", transformers.GPT2LMHeadModel), ("run_glue.py", transformers.GPT2ForSequenceClassification)],
)
def test_a_script_of_the_trainer_gives_what_it_gives_without_the_option(script: str, kind: Any, tmp_path: Path) -> None:
    """Losses, norms, rates and metrics; and with DeepSpeed's option it goes on from the middle as if unbroken."""
    folder, model = begun(tmp_path, kind)
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    (tmp_path / "ds.json").write_text(json.dumps(placed(tmp_path, **dict.fromkeys(keys, "auto"))))
    texts = Path(tmp_path / "text.py")
    texts.write_text(inspect.getsource(types))
    data = ["--train_files", str(texts), "--max_samples", "60"] if script == "run_clm.py" else sentences(tmp_path)
    usual = "--do_train --do_eval --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --learning_rate 1e-3"
    steps = "--max_steps 4 --logging_steps 1 --save_steps 2 --warmup_steps 1 --report_to none --use_cpu"
    common = ["--model_name_or_path", str(folder), *data, *usual.split(), *steps.split()]

    def logs(out: str, *more: str, by: str = "offload run") -> list[dict[str, float]]:
        rows = printed(script, *common, "--output_dir", str(tmp_path / out), *more, by=by, cwd=tmp_path)
        return [{key: row[key] for key in LOGGED if key in row} for row in rows if "loss" in row or "eval_loss" in row]

    plain, paged = logs("plain", by="python"), logs("paged", "--deepspeed", str(tmp_path / "ds.json"))
    error = 4 * rounding_bounds.sum_error(rounding_bounds.roundings(model))
    assert len(plain) == len(paged) == 5 and plain[0]["grad_norm"] > 0.1 and "eval_loss" in plain[-1]
    for left, right in zip(paged, plain, strict=True):
        assert left == pytest.approx(right, rel=error, abs=error)
    middle = ["--resume_from_checkpoint", str(tmp_path / "paged" / "checkpoint-2")]
    assert logs("paged", "--deepspeed", str(tmp_path / "ds.json"), *middle) == paged


# -- DeepSpeed ----------------------------------------------------------------------------------------


OPTIONS = {
    "cifar10.py": ((), ("--stage", "3", "--nvme", "drive")),
    "hello_deepspeed.py": (("--checkpoint_dir", "saved"), ("--stage", "3", "--offload", "nvme")),
    "bert_classification.py": (("--deepspeed", "--deepspeed_config", "ds.json"), ()),  # the file changes
}
"""Of each script: its options, and those that it takes in addition to have all on NVMe."""


@pytest.mark.slow  # processes that import torch and transformers
@pytest.mark.works("Trainers", "scripts of DeepSpeed: images, a masked language model, BERT fine-tuned", "right")
@pytest.mark.parametrize("script", OPTIONS)
def test_a_script_of_deepspeed_prints_the_same_with_all_on_nvme(script: str, tmp_path: Path) -> None:
    """Losses, and what else it prints, bit for bit."""
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    usual, more = OPTIONS[script]
    (tmp_path / "ds.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 2}}))
    memory = printed(script, *usual, cwd=tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(placed(tmp_path, **config)))
    assert printed(script, *usual, *more, cwd=tmp_path) == memory
    if script == "hello_deepspeed.py":
        rounding_bounds.same_numbers(memory["losses"], BY_DEEPSPEED, 1e-6)


@pytest.mark.slow  # processes that import torch and transformers
def test_a_script_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Of DeepSpeed's call: `load_checkpoint` and its client state."""
    arguments = ("--stage", "3", "--offload", "nvme", "--checkpoint_dir", "saved")
    whole = printed("hello_deepspeed.py", *arguments, cwd=tmp_path)["losses"]
    resumed = printed("hello_deepspeed.py", *arguments, "--load_checkpoint_dir", "saved", cwd=tmp_path)["losses"]
    assert len(resumed) == 3 and resumed == whole[3:]
