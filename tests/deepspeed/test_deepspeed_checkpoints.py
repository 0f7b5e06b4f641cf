"""Checkpoints that DeepSpeed 0.19.8 has written: training goes on from them as it did there, and nothing is executed.

`tests/data/deepspeed_checkpoints.tar.xz` contains them, with the losses that DeepSpeed had afterwards;
`tests/deepspeed/deepspeed_run.py` has made them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import offload
from offload import testing
from offload.checkpoint.deepspeed import OFFLOADED
from offload.cli.main import app
from offload.deepspeed.utils import zero_to_fp32
from offload.errors import StoreError
from tests import ROOT
from tests.support import rounding_bounds
from tests.support.oracle import Job, assert_same_tensors
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import RankPool

pytest.importorskip("transformers")
from tests.deepspeed.deepspeed_run import AFTER, BEFORE, VOCABULARY, config, losses, model

DATA = ROOT / "tests" / "data" / "deepspeed_checkpoints.tar.xz"
TAG = f"global_step{BEFORE}"
CASES = "z1-fp32-1 z2-fp32-2 z2-fp32-frozen-2 z3-fp32-2 z3-fp32-frozen-2 z1-bf16-2 z3-bf16-2".split()
"""Stage, dtype, and number of ranks."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all checkpoints, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(DATA) as archive:
        archive.extractall(folder, filter="data")
    return folder


def start(folder: Path, dtype: str = "fp32", frozen: bool = False, **block: Any) -> offload.Engine:
    """Returns an engine over other weights than those of a checkpoint."""
    made = model(frozen)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.5)
    place = {"device": "nvme", "nvme_path": str(folder)}
    content = config(3, dtype) | {"offload": {"device": "cpu", **block}}
    content["zero_optimization"] |= {"offload_param": place, "offload_optimizer": place}
    return offload.initialize(model=made, config=content)[0]


def states(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """Returns masters and moments by parameter and state."""
    states = {}
    for name, parameter in engine.module.named_parameters():
        states[name] = offload.safe_get_full_fp32_param(parameter)
        for state in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            states[f"{name}/{state}"] = offload.safe_get_full_optimizer_state(parameter, state)
    return states


def run(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*map(str, arguments)])


# -- going on -----------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_losses_go_on_as_deepspeeds(case: str, data: Path, tmp_path: Path) -> None:
    dtype, theirs = case.split("-")[1], json.loads((data / case / "losses.json").read_text())
    engine = start(tmp_path, dtype, "frozen" in case)
    path, client_state = engine.load_checkpoint(data / case)
    assert path == str(data / case / TAG) and (client_state["best"], client_state["names"]) == (0.25, ["a", None])
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (BEFORE, BEFORE, 0)
    mine = losses(engine, range(BEFORE, BEFORE + AFTER))
    if dtype == "fp32":
        assert mine == pytest.approx(theirs["after"], abs=1e-5)
    else:
        rounding_bounds.same_losses(mine, theirs["after"], Job(model, lambda *_: torch.zeros(()), dtype=dtype))
    assert engine.get_lr() == pytest.approx(theirs["lr"])
    engine.destroy(remove=True)


def go_on(saved: Path, folder: Path) -> list[float]:
    """Returns the losses after a checkpoint, of one rank of several."""
    engine = start(folder)
    engine.load_checkpoint(saved)
    later = losses(engine, range(BEFORE, BEFORE + AFTER))
    engine.destroy(remove=True)
    return later


@pytest.mark.slow
def test_several_ranks_go_on(data: Path, ranks: RankPool, tmp_path: Path) -> None:
    """From a checkpoint of one rank. All have the same batches, as in DeepSpeed then."""
    theirs = json.loads((data / "z1-fp32-1" / "losses.json").read_text())
    for mine in ranks.run(go_on, data / "z1-fp32-1", tmp_path):
        assert mine == pytest.approx(theirs["after"], abs=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["z2-fp32-2", "z3-bf16-2"])
def test_masters_and_moments_are_those_of_deepspeeds_own_converter(case: str, data: Path, tmp_path: Path) -> None:
    """Also in an engine of another dtype, and by way of a universal checkpoint and of `offload import`."""
    run("import", data / case, tmp_path / "imported")
    assert run("verify", tmp_path / "imported").exit_code == 0
    expected = {}
    for file in (data / case / "universal" / "zero").glob("*/*.pt"):
        content = torch.load(file, weights_only=False)
        if file.stem != "step":
            name = file.parent.name if file.stem == "fp32" else f"{file.parent.name}/{file.stem}"
            expected[name] = content["param"] if isinstance(content, dict) else content
    for folder in (data / case, data / case / "universal", tmp_path / "imported"):
        engine = start(tmp_path / "run")
        engine.load_checkpoint(folder)
        assert engine.global_steps == BEFORE and {
            each for row in testing.inspect(engine).parameter_steps for each in row
        } == {BEFORE}
        loaded = {name: value.flatten() for name, value in states(engine).items()}
        assert_same_tensors(loaded, {name: expected[name].flatten() for name in loaded})
        engine.destroy(remove=True)


def test_weights_alone(data: Path, tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.load_checkpoint(data / "z3-bf16-2", load_module_only=True)
    weights, moments = states(engine), [value for name, value in states(engine).items() if "/" in name]
    assert engine.global_steps == 0 and not any(value.any() for value in moments)
    name = "transformer.wpe.weight"
    theirs = torch.load(data / "z3-bf16-2" / "universal" / "zero" / name / "fp32.pt", weights_only=True)
    assert torch.equal(weights[name].flatten(), theirs.flatten())
    engine.destroy(remove=True)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_universal_checkpoint_of_ours_holds_the_run(dtype: str, tmp_path: Path) -> None:
    """From a run and from a checkpoint. `tests/deepspeed/deepspeed_run.py --universal` has DeepSpeed go on from it."""
    engine = start(tmp_path / "one", dtype)
    losses(engine, range(BEFORE))
    engine.save_checkpoint(tmp_path / "saved", client_state={"best": 0.5})
    expected = states(engine)
    engine.destroy(remove=False)
    (path,) = (tmp_path / "one").iterdir()
    for index, source in enumerate((path, tmp_path / "saved")):
        result = run("export", source, tmp_path / f"out{index}", "--format", "deepspeed-universal")
        assert result.exit_code == 0, result.output
        again = start(tmp_path / "two", dtype)
        assert again.load_checkpoint(tmp_path / f"out{index}")[1] == ({"best": 0.5} if index else {})
        assert again.global_steps == BEFORE and again.lr_scheduler.last_batch_iteration == BEFORE - 1
        assert_same_tensors(states(again), expected)
        again.destroy(remove=True)
    zero = tmp_path / "out0" / TAG / "zero"
    content = torch.load(zero / "transformer.wte.weight" / "exp_avg.pt", weights_only=True)["param"]
    assert torch.equal(content, expected["transformer.wte.weight/exp_avg"])
    assert int(torch.load(zero / "transformer.wte.weight" / "step.pt", weights_only=True)) == BEFORE


def test_the_program_ds_to_universal_takes_a_checkpoint_of_ours_alone(data: Path, tmp_path: Path) -> None:
    engine = start(tmp_path / "run")
    losses(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    expected = states(engine)
    program = ["-m", "offload.deepspeed.checkpoint.ds_to_universal", "--num_merge_workers", "1"]
    done = warm_process.run(
        [*program, "--input_folder", str(tmp_path / "saved"), "--output_folder", str(tmp_path / "out")]
    )
    assert done.returncode == 0, done.stderr
    losses(engine, range(1))
    engine.load_checkpoint(tmp_path / "out")
    assert_same_tensors(states(engine), expected)
    engine.destroy(remove=True)
    for folder, words in (
        (data / "z3-fp32-2", "is a checkpoint of another program"),
        (tmp_path / "run", "no checkpoint of an"),
    ):
        done = warm_process.run([*program, "--input_folder", str(folder), "--output_folder", str(tmp_path / "other")])
        assert done.returncode == 1 and words in done.stderr and not (tmp_path / "other").exists()


# -- what does not fit changes nothing ----------------------------------------------------------------


class Code:
    """An object whose pickle makes a file when an ordinary unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def with_code(folder: Path) -> None:
    """Puts code into model states, where the user's values are."""
    file = folder / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    torch.save({**content, "mine": Code(folder / "executed")}, file)


def test_code_in_a_pickle_is_not_executed(data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data / "z3-fp32-2", tmp_path / "saved"))
    with_code(folder)
    engine = start(tmp_path / "run")
    _, client_state = engine.load_checkpoint(folder)
    assert "mine" not in client_state and any("client state mine" in line for line in engine.notices)
    assert not (folder / "executed").exists()
    engine.destroy(remove=True)
    torch.load(folder / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert (folder / "executed").exists(), "the code does something"


def spoil_length(folder: Path) -> None:
    file = next(folder.glob("*_optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-100])


def spoil_byte(folder: Path) -> None:
    file = next(folder.glob("*_optim_states.pt"))
    data = bytearray(file.read_bytes())
    largest = max(
        zipfile.ZipFile(file).infolist(), key=lambda entry: entry.file_size if "/data/" in entry.filename else 0
    )
    data[data.index(b"PK", largest.header_offset + 1) - 40] ^= 4  # the record before the next one, but for its end
    file.write_bytes(data)


def spoil_tensors(folder: Path) -> None:
    file = next(folder.glob("zero_pp_rank_0_*_model_states.pt"))
    shutil.copy(file, folder / file.name.replace("mp_rank_00", "mp_rank_01"))


def spoil_save(folder: Path) -> None:
    """Model states of another save, with a larger parameter."""
    file = next(folder.glob("zero_pp_rank_0_*_model_states.pt"))
    content = torch.load(file, weights_only=False)
    content["param_shapes"][0]["transformer.wte.weight"] = torch.Size((100 * VOCABULARY, 9))
    torch.save(content, file)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    engine = start(tmp_path_factory.mktemp("run"))
    yield engine
    engine.destroy(remove=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_length, "is not a complete file of torch.save"),
        (spoil_byte, "does not match its checksum"),
        (
            lambda folder: next(folder.glob("zero_pp_rank_1_*_optim_states.pt")).unlink(),
            "lacks the files of optimizer states of rank 1 of 2",
        ),
        (
            lambda folder: next(folder.glob("zero_pp_rank_1_*_model_states.pt")).unlink(),
            "lacks the files of model states of rank 1 of 2",
        ),
        (spoil_tensors, "was saved with tensor parallelism"),
        (
            lambda folder: (folder / "layer_00-model_00-model_states.pt").write_bytes(b""),
            "was saved with pipeline parallelism",
        ),
        (lambda folder: (folder / OFFLOADED).mkdir(), "was saved with the optimizer on NVMe"),
        (
            lambda folder: torch.save([1, 2], next(folder.glob("zero_pp_rank_0_*_model_states.pt"))),
            "does not have the contents of a checkpoint of DeepSpeed: .*an entry is of another type; fetch",
        ),
        (
            lambda folder: torch.save({"param_groups": []}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
            "and the entry 'optimizer_state_dict' is missing; fetch all of its files",
        ),
        (spoil_save, "do not belong together"),
        (
            lambda folder: (folder.parent / "latest").write_text("../elsewhere"),
            f"must contain the tag .* in the folder: {TAG}",
        ),
    ],
)
def test_what_is_damaged_or_not_supported_changes_nothing(
    spoil: Callable[[Path], None], message: str, engine: offload.Engine, data: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(data / "z3-fp32-2", tmp_path / "saved"))
    spoil(folder / TAG)
    before = states(engine)
    with pytest.raises(StoreError, match=message):
        engine.load_checkpoint(folder)
    result = run("import", folder, tmp_path / "imported")
    assert result.exit_code == 2 and not (tmp_path / "imported" / TAG).exists()
    assert_same_tensors(states(engine), before)


def test_a_parameter_without_moments_is_named(data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data / "z3-bf16-2" / "universal", tmp_path / "saved"))
    (folder / "zero" / "transformer.wte.weight" / "exp_avg.pt").unlink()
    result = run("import", folder, tmp_path / "imported")
    assert result.exit_code == 2 and "wte.weight contains no exp_avg.pt: fetch all files" in result.stderr
    (folder / "zero" / "transformer.wte.weight" / "exp_avg_sq.pt").unlink()
    file = tmp_path / "file"
    file.write_text("")
    result = run("import", folder, file)
    assert result.exit_code == 2 and f"{file} is a file; expected a folder of checkpoints" in result.stderr
    result = run("import", folder, tmp_path / "imported")
    assert "has no moments of transformer.wte.weight: they begin at zero" in result.output, result.output
    assert result.output.count("has no moments") == 1


def test_another_model_is_refused_by_its_names(data: Path, tmp_path: Path) -> None:
    layer = torch.nn.Linear(VOCABULARY, 3)
    engine, *_ = offload.initialize(model=layer, config=config(3, "fp32") | {"offload": {"device": "cpu"}})
    with pytest.raises(StoreError, match=r"Missing key\(s\): weight, bias"):
        engine.load_checkpoint(data / "z2-fp32-2")
    engine.destroy(remove=True)


@pytest.mark.parametrize("path", ["z2-fp32-2", "z2-fp32-2/global_step5", "z2-fp32-2/universal"])
def test_commands_for_checkpoints_of_ours_name_the_import(path: str, data: Path, tmp_path: Path) -> None:
    folder = data / path
    words = re.escape(f"is a checkpoint of another program, such as DeepSpeed: `offload import {data}")
    for command in (["export", str(folder), str(tmp_path / "out")], ["verify", str(folder)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2 and re.search(words, done.stderr), done.output
    with pytest.raises(StoreError, match=words):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert not (tmp_path / "out").exists()
