"""`engine.save_pretrained` and `save_16bit_model`: what was there stays until all of the new is there."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from typer.testing import CliRunner

import offload
from offload.cli import app
from offload.engine import model_folder, tensor_file, weights
from offload.errors import BudgetError, ConfigError, IoError, OffloadError, StoreError, UsageError
from tests import models
from tests.oracle import PLACEMENTS, Job, assert_same_tensors, start, train_step
from tests.test_export import FROZEN, tied_by_hand
from tests.test_export import tensors as all_tensors

JOB = models.GPT2
DISK = ("nvme", "nvme")
NAMES = {"config.json", "generation_config.json", "model.safetensors"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[offload.Engine]:
    made = start(JOB, DISK, tmp_path / "swap")
    train_step(made, JOB, 0)
    yield made
    made.destroy(remove=True)


def untied(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """The weights that a folder of a GPT-2 has: the head is the embedding."""
    return {name: value for name, value in engine.module.state_dict().items() if name != "lm_head.weight"}


def listed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("dtype", [None, "fp32", "fp16", torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_every_placement_gives_its_weights_and_masters(placement: tuple[str, str], dtype: Any, tmp_path: Path) -> None:
    job = FROZEN._replace(dtype="bf16")
    engine = start(job, placement, tmp_path / "swap")
    train_step(engine, job, 0)
    engine.save_pretrained(tmp_path / "out", dtype=dtype)
    wanted = {None: torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}.get(dtype, dtype)
    found = all_tensors(tmp_path / "out")
    for name, parameter in engine.module.named_parameters():
        master = offload.safe_get_full_fp32_param(parameter)
        exact = engine.module.state_dict()[name] if wanted is torch.bfloat16 else master
        assert exact is not None and torch.equal(found[name], exact.to(wanted)), name
    assert found.keys() == set(engine.module.state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(wanted)[6:]
    engine.destroy(remove=True)


def test_an_engine_without_an_optimizer_saves_too(tmp_path: Path) -> None:
    model = models.gpt2().requires_grad_(False)
    engine = offload.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})[0]
    engine.save_pretrained(tmp_path / "out", max_shard_size=20_000)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_tensors(back.state_dict(), engine.module.state_dict())
    engine.destroy()


def test_it_is_the_same_as_an_export_of_the_store(engine: offload.Engine, tmp_path: Path) -> None:
    engine.save_pretrained(tmp_path / "ours", max_shard_size="50KB", dtype="fp32")
    engine.destroy()
    arguments = [str(tmp_path / "swap" / "default"), str(tmp_path / "theirs"), "--dtype", "fp32"]
    result = CliRunner().invoke(app, ["export", *arguments, "--max-shard-size", "50KB"])
    assert result.exit_code == 0, result.output
    assert listed(tmp_path / "ours") == listed(tmp_path / "theirs")
    for name in listed(tmp_path / "ours"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


def test_a_tie_that_the_config_does_not_know_is_written_twice(tmp_path: Path) -> None:
    job = Job(tied_by_hand, models.language_loss)
    engine = start(job, DISK, tmp_path / "swap")
    engine.save_pretrained(tmp_path / "out")
    found = all_tensors(tmp_path / "out")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    engine.destroy(remove=True)


def test_a_model_that_is_not_of_transformers_has_weights_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(models.MIXTURE, DISK, tmp_path / "swap")
    with caplog.at_level(logging.WARNING, "offload"):
        engine.save_pretrained(tmp_path / "out")
    assert listed(tmp_path / "out") == {"model.safetensors"} and "weights alone" in caplog.text
    model = models.Mixture()
    safetensors.torch.load_model(model, tmp_path / "out" / "model.safetensors")
    assert_same_tensors(model.state_dict(), engine.module.state_dict())
    engine.destroy(remove=True)


def test_generation_settings_come_along(engine: offload.Engine, tmp_path: Path) -> None:
    engine.module.generation_config.max_new_tokens = 17
    engine.save_pretrained(tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.generation_config.max_new_tokens == 17
    assert offload.load_pretrained(type(back), tmp_path / "out").generation_config.max_new_tokens == 17


def a_tokenizer() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "word": 1}, unk_token="?"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")


def test_a_tokenizer_comes_along(engine: offload.Engine, tmp_path: Path) -> None:
    engine.save_pretrained(tmp_path / "out", tokenizer=a_tokenizer())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("word").input_ids == [1]
    engine.save_pretrained(tmp_path / "out")  # without one: it stays
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("word").input_ids == [1]
    engine.destroy()
    swap = str(tmp_path / "swap" / "default")
    result = CliRunner().invoke(app, ["export", swap, str(tmp_path / "two"), "--tokenizer", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "two")("word").input_ids == [1]
    result = CliRunner().invoke(app, ["export", swap, str(tmp_path / "three"), "--tokenizer", str(tmp_path / "swap")])
    assert result.exit_code == 2 and "no file of a tokenizer" in result.output
    assert not (tmp_path / "three").exists()


# -- a folder that is there ---------------------------------------------------------------------------


def test_files_of_others_stay_and_older_weights_go(engine: offload.Engine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-5").mkdir(parents=True)
    (out / "checkpoint-5" / "model.safetensors").write_text("dear")
    (out / "notes.txt").write_text("dear")
    engine.save_pretrained(out, max_shard_size="50KB")
    first = listed(out)
    assert len([name for name in first if name.startswith("model-")]) > 2
    engine.save_pretrained(out)
    others = {"checkpoint-5", "checkpoint-5/model.safetensors", "notes.txt"}
    assert listed(out) == NAMES | others
    assert (out / "checkpoint-5" / "model.safetensors").read_text() == (out / "notes.txt").read_text() == "dear"
    engine.save_pretrained(out, max_shard_size="50KB")
    assert listed(out) == first
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert_same_tensors(model.state_dict(), engine.module.state_dict())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_of_an_earlier_save_is_replaced(
    can_exchange: bool, engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(model_folder, "exchange", lambda *_: False)
    engine.save_pretrained(tmp_path / "out", max_shard_size="50KB")
    train_step(engine, JOB, 1)
    engine.save_pretrained(tmp_path / "out")
    assert listed(tmp_path / "out") == NAMES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    assert_same_tensors(all_tensors(tmp_path / "out"), untied(engine))


@pytest.mark.parametrize("foreign", [True, False])
@pytest.mark.parametrize("failure", ["room", "reserve", "write", "config", "tokenizer"])
def test_a_disk_that_is_full_leaves_what_was_there(
    failure: str, foreign: bool, engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    engine.save_pretrained(out)
    if foreign:
        (out / "notes.txt").write_text("dear")
    before = {path: path.read_bytes() for path in out.iterdir()}
    train_step(engine, JOB, 1)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_file(*_: Any) -> None:
        raise IoError(str(out), 0, 0, errno.ENOSPC, "write")

    tokenizer, opened = a_tokenizer(), Path.open
    with monkeypatch.context() as patch:
        if failure == "room":
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        elif failure == "reserve":
            patch.setattr(os, "posix_fallocate", full)
        elif failure == "write":
            patch.setattr(tensor_file.Writer, "write", full_file)
        elif failure == "config":
            patch.setattr(
                Path, "open", lambda path, *mode, **how: full() if "x" in mode else opened(path, *mode, **how)
            )
        else:
            patch.setattr(type(tokenizer), "save_pretrained", full)
        with pytest.raises((StoreError, OSError)) as error:
            engine.save_pretrained(out, tokenizer=tokenizer)
        assert isinstance(error.value, OffloadError)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    engine.save_pretrained(out)
    assert_same_tensors(all_tensors(out), untied(engine))
    train_step(engine, JOB, 2)


@pytest.mark.parametrize("moves", range(4))
def test_a_kill_between_two_moves_leaves_nothing_that_loads_as_a_mixture(
    moves: int, engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("dear")
    engine.save_pretrained(out, max_shard_size="100KB")
    train_step(engine, JOB, 1)
    done = 0
    replace = os.replace

    class Killed(BaseException):
        pass

    def stop(source: Any, target: Any) -> None:
        nonlocal done
        if done == moves:
            raise Killed
        done += 1
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(Killed):
            engine.save_pretrained(out, max_shard_size="100KB")
    assert not (out / "config.json").exists() and not (out / "model.safetensors.index.json").exists()
    with pytest.raises(StoreError):
        offload.load_pretrained(transformers.AutoModelForCausalLM, out)
    with pytest.raises((OSError, ValueError), match=r"config\.json|model"):
        transformers.AutoModelForCausalLM.from_pretrained(out)


def test_what_a_kill_has_left_is_removed_and_told(
    engine: offload.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(5000))
    with caplog.at_level(logging.WARNING, "offload"):
        engine.save_pretrained(tmp_path / "out")
    assert f"removed {left}" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    left.mkdir()
    (left / "thesis").write_text("dear")
    with pytest.raises(StoreError, match="thesis"):
        engine.save_pretrained(tmp_path / "out")
    assert (left / "thesis").read_text() == "dear"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"save_directory": None}, UsageError),
        ({"save_directory": 3}, UsageError),
        ({"dtype": "int8"}, ConfigError),
        ({"dtype": torch.int8}, ConfigError),
        ({"max_shard_size": "many"}, ConfigError),
        ({"tokenizer": "gpt2"}, UsageError),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_written(
    arguments: dict[str, Any], kind: type[Exception], engine: offload.Engine, tmp_path: Path
) -> None:
    with pytest.raises(kind):
        engine.save_pretrained(**{"save_directory": tmp_path / "out", **arguments})
    (tmp_path / "file").write_text("dear")
    with pytest.raises(StoreError, match="not a folder"):
        engine.save_pretrained(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "swap"]
    train_step(engine, JOB, 1)


def test_it_is_for_between_steps(engine: offload.Engine, tmp_path: Path) -> None:
    engine.module.transformer.h[0].register_forward_hook(lambda *_: engine.save_pretrained(tmp_path / "out"))
    with pytest.raises(UsageError, match="between steps"):
        models.language_loss(engine, 0, 0)
    assert not (tmp_path / "out").exists()


# -- DeepSpeed's --------------------------------------------------------------------------------------


def test_save_16bit_model_writes_one_file(tmp_path: Path) -> None:
    job = FROZEN._replace(dtype="bf16")
    engine = start(job, DISK, tmp_path / "swap")
    train_step(engine, job, 0)
    state = engine.module.state_dict()
    assert engine.save_16bit_model(tmp_path / "out") is True
    assert engine.save_16bit_model(tmp_path / "out", "trained.safetensors", exclude_frozen_parameters=True)
    assert listed(tmp_path / "out") == {"model.safetensors", "trained.safetensors"}
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert_same_tensors(found, state)
    trains = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    found = safetensors.torch.load_file(tmp_path / "out" / "trained.safetensors")
    assert_same_tensors(found, {name: state[name] for name in trains})
    engine.save_pretrained(tmp_path / "whole", max_shard_size="50KB")
    before = listed(tmp_path / "whole")
    engine.save_16bit_model(tmp_path / "whole", "trained.safetensors", exclude_frozen_parameters=True)
    assert listed(tmp_path / "whole") == {*before, "trained.safetensors"}, "nothing else is touched"
    for name in ("pytorch_model.bin", "../model.safetensors"):
        with pytest.raises(UsageError, match=r"ends with \.safetensors"):
            engine.save_16bit_model(tmp_path / "out", name)
    engine.destroy(remove=True)


@pytest.mark.parametrize("key", ["stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"])
@pytest.mark.parametrize("value", [None, True, False, "auto"])
def test_the_key_of_deepspeed_is_honoured(
    key: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its false writes nothing; here what is not said does not mean false."""
    zero = {"stage": 3} if value is None else {"stage": 3, key: value}
    engine = offload.initialize(
        model=models.gpt2().requires_grad_(False),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero},
    )[0]
    with caplog.at_level(logging.WARNING, "offload"):
        saved = engine.save_16bit_model(tmp_path / "out")
    assert saved is (value is not False) is engine.zero_gather_16bit_weights_on_model_save()
    assert (tmp_path / "out").exists() == saved
    assert ("has written nothing" in caplog.text) is not saved
    engine.destroy()


def test_a_state_dict_without_room_names_what_has_it(engine: offload.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "free_host_memory", lambda: 1000)
    with pytest.raises(BudgetError, match=r"engine\.save_pretrained"):
        engine.module.state_dict()


def test_the_models_own_save_pretrained_gathers(engine: offload.Engine, tmp_path: Path) -> None:
    engine.module.save_pretrained(tmp_path / "theirs")
    engine.save_pretrained(tmp_path / "ours")
    theirs, ours = all_tensors(tmp_path / "theirs"), all_tensors(tmp_path / "ours")
    assert_same_tensors(ours, theirs)
    assert listed(tmp_path / "theirs") == listed(tmp_path / "ours")
    for name in ("config.json", "generation_config.json"):
        one, other = (json.loads((tmp_path / folder / name).read_text()) for folder in ("theirs", "ours"))
        assert one == other


@pytest.mark.parametrize("there", [(), ("config.json", "model.safetensors")])
def test_the_folder_that_the_process_is_in_stays(
    there: tuple[str, ...], engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    (folder / "below").mkdir(parents=True)
    (folder / "below").rmdir()
    for name in there:
        (folder / name).write_text("old")
    monkeypatch.chdir(folder)
    engine.save_pretrained(".")
    assert Path.cwd() == folder and listed(folder) == NAMES
    engine.save_pretrained(folder)
    assert os.listdir(".") and os.stat(".").st_ino == folder.stat().st_ino


@pytest.mark.parametrize("there", [(), ("config.json", "model.safetensors")])
def test_a_folder_that_is_exchanged_keeps_its_mode(
    there: tuple[str, ...], engine: offload.Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in there:
        (folder / name).write_text("old")
    folder.chmod(0o2770)
    engine.save_pretrained(folder)
    assert listed(folder) == NAMES and folder.stat().st_mode & 0o7777 == 0o2770


def test_an_empty_name_is_no_folder(engine: offload.Engine) -> None:
    with pytest.raises(UsageError, match="save_directory is an empty string"):
        engine.save_pretrained("")
