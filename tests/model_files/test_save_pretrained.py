"""`engine.save_pretrained` and `save_16bit_model` write what the class saves; old files stay until all is there."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import offload
from offload import testing
from offload.aio import IoQueue
from offload.cli.main import app
from offload.engine.shards import LocalShards
from offload.errors import BudgetError, ConfigError, IoError, OffloadError, StoreError, UsageError
from offload.model_io import save
from tests.support import models
from tests.support.exported_runs import DISK, FROZEN, exported, run, tensors, tied_by_hand
from tests.support.exported_runs import tensors as all_tensors
from tests.support.oracle import PLACEMENTS, Job, assert_same_tensors, start, train_step
from tests.support.oracle import weights_of as all_weights

JOB = models.SHALLOW
ON_DISK = ("nvme", "nvme")
NAMES = {"config.json", "generation_config.json", "model.safetensors"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[offload.Engine]:
    made = start(JOB, ON_DISK, tmp_path / "swap")
    train_step(made, JOB, 0)
    yield made
    made.destroy(remove=True)


def untied(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """The weights that a folder of a GPT-2 has: the head is the embedding."""
    return {name: value for name, value in engine.module.state_dict().items() if name != "lm_head.weight"}


def listed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [None, "fp32", "fp16", torch.bfloat16])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_every_placement_gives_its_weights_and_masters(placement: tuple[str, str], dtype: Any, tmp_path: Path) -> None:
    job = FROZEN._replace(dtype="bf16")
    engine = start(job, placement, tmp_path / "swap")
    train_step(engine, job, 0)
    engine.save_pretrained(tmp_path / "out", dtype=dtype)
    wanted = {None: torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}.get(dtype, dtype)
    tensors = all_tensors(tmp_path / "out")
    for name, parameter in engine.module.named_parameters():
        master = offload.safe_get_full_fp32_param(parameter)
        exact = engine.module.state_dict()[name] if wanted is torch.bfloat16 else master
        assert exact is not None and torch.equal(tensors[name], exact.cpu().to(wanted)), name
    assert tensors.keys() == set(engine.module.state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(wanted)[6:]
    engine.destroy(remove=True)


def test_an_engine_without_an_optimizer_saves_too(tmp_path: Path) -> None:
    model = models.shallow().requires_grad_(False)
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
    engine = start(job, ON_DISK, tmp_path / "swap")
    engine.save_pretrained(tmp_path / "out")
    tensors = all_tensors(tmp_path / "out")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    engine.destroy(remove=True)


def test_a_model_that_is_not_of_transformers_has_weights_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(models.MIXTURE, ON_DISK, tmp_path / "swap")
    with caplog.at_level(logging.WARNING, "offload"):
        engine.save_pretrained(tmp_path / "out")
    assert listed(tmp_path / "out") == {"model.safetensors"} and "only weights are saved" in caplog.text
    model = models.Mixture()
    safetensors.torch.load_model(model, tmp_path / "out" / "model.safetensors")
    assert_same_tensors(model.state_dict(), engine.module.state_dict())
    engine.destroy(remove=True)


def test_one_file_of_a_model_with_ties_has_every_name_that_load_state_dict_wants(
    engine: offload.Engine, tmp_path: Path
) -> None:
    plain = start(models.MIXTURE, ON_DISK, tmp_path / "plain-swap")
    plain.save_16bit_model(tmp_path / "plain")
    model = models.Mixture()
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "plain" / "model.safetensors"), strict=True)
    assert model.head.weight is model.embedding.weight
    assert_same_tensors(model.state_dict(), plain.module.state_dict())
    plain.destroy(remove=True)
    engine.save_16bit_model(tmp_path / "named")
    assert set(all_tensors(tmp_path / "named")) == set(untied(engine)), "transformers ties what its config says"


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


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"save_directory": None}, UsageError),
        ({"save_directory": 3}, UsageError),
        ({"dtype": "int8"}, ConfigError),
        ({"dtype": torch.int8}, ConfigError),
        ({"max_shard_size": "many"}, ConfigError),
        ({"max_shard_size": 0}, ConfigError),
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
    engine = start(job, ON_DISK, tmp_path / "swap")
    train_step(engine, job, 0)
    state = engine.module.state_dict()
    assert engine.save_16bit_model(tmp_path / "out") is True
    assert engine.save_16bit_model(tmp_path / "out", "trained.safetensors", exclude_frozen_parameters=True)
    assert listed(tmp_path / "out") == {"model.safetensors", "trained.safetensors"}
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert_same_tensors(tensors, state)
    trains = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    tensors = safetensors.torch.load_file(tmp_path / "out" / "trained.safetensors")
    assert_same_tensors(tensors, {name: state[name] for name in trains})
    engine.save_pretrained(tmp_path / "whole", max_shard_size="50KB")
    before = listed(tmp_path / "whole")
    engine.save_16bit_model(tmp_path / "whole", "trained.safetensors", exclude_frozen_parameters=True)
    assert listed(tmp_path / "whole") == {*before, "trained.safetensors"}, "nothing else is touched"
    for name, message in (
        ("pytorch_model.bin", r"ends with \.safetensors"),
        ("../model.safetensors", "a path; expected the name of a file in save_directory"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.save_16bit_model(tmp_path / "out", name)
    engine.destroy(remove=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("key", ["stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"])
@pytest.mark.parametrize("value", [None, True, False, "auto"])
def test_the_key_of_deepspeed_is_honoured(
    key: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its false writes nothing; here what is not said does not mean false."""
    zero = {"stage": 3} if value is None else {"stage": 3, key: value}
    engine = offload.initialize(
        model=models.shallow().requires_grad_(False),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero},
    )[0]
    with caplog.at_level(logging.WARNING, "offload"):
        saved = engine.save_16bit_model(tmp_path / "out")
    assert saved is (value is not False) is engine.zero_gather_16bit_weights_on_model_save()
    assert (tmp_path / "out").exists() == saved
    assert ("wrote nothing" in caplog.text) is not saved
    engine.destroy()


def test_a_state_dict_without_room_names_what_has_it(engine: offload.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "memory.free", lambda: 1000)
    with pytest.raises(BudgetError, match=r"engine\.save_pretrained"):
        engine.module.state_dict()


def test_the_models_own_save_pretrained_gathers(engine: offload.Engine, tmp_path: Path) -> None:
    engine.module.save_pretrained(tmp_path / "theirs")
    engine.save_pretrained(tmp_path / "ours")
    theirs, ours = all_tensors(tmp_path / "theirs"), all_tensors(tmp_path / "ours")
    assert_same_tensors(ours, theirs)
    assert listed(tmp_path / "theirs") == listed(tmp_path / "ours")
    for name in ("config.json", "generation_config.json"):
        left, right = (json.loads((tmp_path / folder / name).read_text()) for folder in ("theirs", "ours"))
        assert left == right


__all__ = ["engine"]


def test_files_of_others_stay_and_older_weights_go(engine: offload.Engine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-5").mkdir(parents=True)
    (out / "checkpoint-5" / "model.safetensors").write_text("dear")
    (out / "notes.txt").write_text("dear")
    engine.save_pretrained(out, max_shard_size="50KB")
    first = listed(out)
    assert len([name for name in first if name.startswith("model-")]) > 2
    engine.save_pretrained(out)
    foreign = {"checkpoint-5", "checkpoint-5/model.safetensors", "notes.txt"}
    assert listed(out) == NAMES | foreign
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
        testing.replace(monkeypatch, "folder.exchange", lambda *_: False)
    engine.save_pretrained(tmp_path / "out", max_shard_size="50KB")
    train_step(engine, JOB, 1)
    engine.save_pretrained(tmp_path / "out")
    assert listed(tmp_path / "out") == NAMES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    assert_same_tensors(all_tensors(tmp_path / "out"), untied(engine))


@pytest.mark.sample(3)
@pytest.mark.parametrize("foreign", [True, False])
@pytest.mark.parametrize("failure", ["room", "reserve", "head", "begin", "write", "config", "tokenizer"])
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

    write = IoQueue.write

    def full_file(queue: IoQueue, file: Any, *request: Any, **options: Any) -> Any:
        if "partial" not in file.path:  # the update of the step before
            return write(queue, file, *request, **options)
        if failure == "begin":
            raise IoError(file.path, 0, 0, errno.ENOSPC, "write")
        return Failing(write(queue, file, *request, **options))

    tokenizer = a_tokenizer()
    with monkeypatch.context() as patch:
        if failure == "room":
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        elif failure == "reserve":
            patch.setattr(os, "posix_fallocate", full)
        elif failure == "head":
            testing.replace(patch, "file.write_all", full)
        elif failure in ("begin", "write"):
            testing.replace(patch, "io.write", full_file)
        elif failure == "config":
            testing.replace(patch, "file.write_new", full)
        else:
            save = type(tokenizer).save_pretrained

            def full_tokenizer(tokenizer: Any, folder: str) -> Any:
                Path(folder, "tokenizer.json").symlink_to("/dev/full")  # the library in Rust writes this file
                return save(tokenizer, folder)

            patch.setattr(type(tokenizer), "save_pretrained", full_tokenizer)
        with pytest.raises((StoreError, OSError)) as error:
            engine.save_pretrained(out, tokenizer=tokenizer)
        assert isinstance(error.value, OffloadError)
        assert failure != "tokenizer" or "No space left on device" in str(error.value)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    engine.save_pretrained(out)
    assert_same_tensors(all_tensors(out), untied(engine))
    train_step(engine, JOB, 2)


@pytest.mark.sample(2)
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


def test_leftovers_of_a_kill_are_removed_and_reported(
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


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
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


def test_one_save_at_a_time_into_a_folder(
    engine: offload.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads one is refused, whatever the other has come to: while it writes, and where it changes names."""
    out, refused = tmp_path / "out", []

    def save_too() -> None:
        def attempt() -> None:
            with pytest.raises(StoreError, match=r"process .* is saving into .*out") as caught:
                engine.save_pretrained(out)
            refused.append(str(caught.value))

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()

    def between(*names: Any) -> Any:
        save_too()
        real(*names)
        save_too()

    real = save._arrive
    testing.replace(monkeypatch, "folder.arrive", between)
    for _ in range(2):  # where nothing is, and where a model is replaced
        engine.save_pretrained(out)
    assert len(refused) == 4 and str(os.getpid()) in refused[0]
    assert listed(out) == NAMES and sorted(path.name for path in tmp_path.iterdir()) == ["out", "swap"]
    monkeypatch.undo()
    (out / "notes.txt").write_text("dear")
    engine.save_pretrained(out)  # beside other files
    assert listed(out) == {*NAMES, "notes.txt"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_a_read_that_fails_leaves_none_in_flight(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are freed next; all reads fail here, so none may end the wait for the others."""
    engine = start(JOB._replace(dtype=mode), ("nvme", "nvme"), tmp_path / "swap")
    read, flying = LocalShards.read, list[Failing]()

    def fails(shards: LocalShards, *arguments: Any, **options: Any) -> list[Any]:
        flying.extend(futures := [Failing(future) for future in read(shards, *arguments, **options) for _ in range(2)])
        return futures

    with monkeypatch.context() as patch:
        testing.replace(patch, "state.read", fails)
        with pytest.raises(IoError):
            engine.save_pretrained(tmp_path / "out", dtype="fp32")
    assert flying and all(future.awaited for future in flying)
    engine.destroy(remove=True)


class Failing:
    """A request that fails, and knows if somebody has waited for it."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.awaited = inner, False

    def done(self) -> bool:
        return bool(self._inner.done())

    def wait(self, timeout: float | None = None) -> int:
        self.awaited = True
        self._inner.wait(timeout)
        raise IoError("states", 0, 0, errno.EIO, "read")


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama(kind: type = transformers.LlamaForCausalLM, tied: bool = False) -> Any:
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))


class Ignores(transformers.LlamaForCausalLM):
    _keys_to_ignore_on_save: ClassVar = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]


class Own(transformers.LlamaForCausalLM):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {
            f"the.{name}": value for name, value in super().state_dict(*args, **kwargs).items() if "norm" not in name
        }


def split() -> Any:
    """The matrix of a module is three tensors of unequal rows in its files, between others that keep their names."""
    model = llama()

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> dict[str, Any]:
        for name in [name for name in state if name.endswith("mlp.gate_proj.weight")]:
            rows = state.pop(name).split([7, 1, 40])
            state.update({name.replace("gate_proj", f"gate.{index}"): part for index, part in enumerate(rows)})
        return state

    model._register_state_dict_hook(hook)
    return model


class Extended(nn.Linear):
    """Saves its weight under another name, a constant, and tensors that are neither."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.arange(5)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert torch.equal(state, torch.arange(5))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kernel"] = destination.pop(f"{prefix}weight")
        destination[f"{prefix}version"] = torch.tensor([3], dtype=torch.int16)


def extended() -> Any:
    model = llama(tied=True)
    model.model.layers[0].mlp.up_proj = Extended(32, 48, bias=False)
    return model


def transposed() -> Any:
    model = llama()

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}head"] = state.pop(f"{prefix}lm_head.weight").t().contiguous() * 2

    model.register_state_dict_post_hook(hook)
    return model


class Saves(transformers.LlamaForCausalLM):
    def save_pretrained(self, folder: Any, **kwargs: Any) -> None:
        super().save_pretrained(folder, **kwargs)
        Path(folder, "note.txt").write_text("of the class")


STREAMED: dict[str, Callable[[], Any]] = {
    "keys to ignore": lambda: llama(Ignores),
    "its own state_dict": lambda: llama(Own),
    "a split": split,
    "names of a module": extended,
}
COMPUTED: dict[str, Callable[[], Any]] = {"a product": transposed, "a method": lambda: llama(Saves)}


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = models.tokens(step, 9) % 64
    return model(input_ids=ids, labels=ids).loss


def trained(model: Callable[[], Any], folder: Path) -> offload.Engine:
    job = Job(model, loss, dtype="bf16")
    engine = start(job, DISK, folder)
    train_step(engine, job, 0)
    return engine


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("model", STREAMED)
def test_files_have_what_the_class_saves(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = trained(STREAMED[model], tmp_path / "swap")
    engine.module.save_pretrained(tmp_path / "theirs")
    expected = tensors(tmp_path / "theirs")
    testing.replace(
        monkeypatch, "size.export_chunk", 4096
    )  # some parts are in several chunks, some chunks in several parts
    monkeypatch.setattr(nn.Module, "state_dict", forbidden_of(engine.module))
    engine.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    saved: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "ours").glob("*.safetensors"):
        saved |= safetensors.torch.load_file(path)
    assert_same_tensors(saved, expected)
    monkeypatch.undo()
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    (tmp_path / "out").mkdir()
    beside = {"model.layers.0.mlp.up_proj.version", "model.layers.0.mlp.up_proj._extra_state"}
    for source in ("swap/default", "saved"):
        told = exported(tmp_path / source, tmp_path / "out" / source.partition("/")[0])["notices"]
        assert_same_tensors(
            tensors(tmp_path / "out" / source.partition("/")[0]),
            {name: value for name, value in expected.items() if name not in beside},
        )
        assert any("version" in each and "is not in the files" in each for each in told) == (
            model == "names of a module"
        )


def forbidden_of(module: nn.Module) -> Callable[..., Any]:
    """Returns `state_dict`, which fails while the model has its weights: a stream must not gather them."""
    state_dict = nn.Module.state_dict

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert all(parameter.is_meta for parameter in self.parameters())
        return state_dict(self, *args, **kwargs)

    return call


@pytest.mark.parametrize("model", COMPUTED)
def test_what_a_class_computes_is_written_by_its_own_code(model: str, tmp_path: Path) -> None:
    engine = trained(COMPUTED[model], tmp_path / "swap")
    engine.module.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="the model's own code writes the files, in bf16"):
        engine.save_pretrained(tmp_path / "ours", dtype="fp32")
    engine.save_pretrained(tmp_path / "ours")
    assert_same_tensors(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        path.name for path in (tmp_path / "theirs").iterdir()
    }
    engine.destroy()
    result = run(tmp_path / "swap" / "default", tmp_path / "out")
    assert result.exit_code and "resume the run and call engine.save_pretrained" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_values_that_are_no_tensor_are_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Counts(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    def model() -> Any:
        built = llama()
        built.model.layers[1].mlp.up_proj = Counts(32, 48, bias=False)
        return built

    engine = trained(model, tmp_path / "swap")
    engine.save_pretrained(tmp_path / "ours")
    assert "model.layers.1.mlp.up_proj._extra_state of the model's state_dict() is not in the files" in caplog.text
    assert len(tensors(tmp_path / "ours")) == len(list(engine.module.parameters()))
    engine.destroy(remove=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", [llama, lambda: llama(tied=True), split, extended])
def test_deepspeeds_file_has_parameters_and_a_line_tells_where_the_class_has_others(
    model: Callable[[], Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine = start(Job(model, loss), DISK, tmp_path)
    engine.save_16bit_model(tmp_path / "one")
    entries = engine.state_dict().keys()
    written = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors").keys()
    parameters = {name for name, _ in engine.module.named_parameters()}
    engine.destroy(remove=True)
    assert written == parameters
    told = "saves entries of its own, or under names of its own" in caplog.text
    assert told == (not parameters <= entries)


def _mixtral() -> Any:
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2)
    )


def _neox() -> Any:
    torch.manual_seed(0)
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, pad_token_id=0))


def _camembert() -> Any:
    """Its tied head comes before the embedding, whose name is written."""
    torch.manual_seed(0)
    return transformers.CamembertForCausalLM(transformers.CamembertConfig(**SIZES, is_decoder=True, pad_token_id=0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [_mixtral, _neox, _camembert])
def test_files_of_a_family_are_those_of_transformers(model: Callable[[], Any], tmp_path: Path) -> None:
    """It has the experts of a layer as one parameter, and saves each; or has other names in memory than in files."""
    engine = trained(model, tmp_path / "swap")
    engine.module.save_pretrained(tmp_path / "theirs")
    expected = tensors(tmp_path / "theirs")
    engine.save_pretrained(tmp_path / "ours")
    assert_same_tensors(tensors(tmp_path / "ours"), expected)
    engine.destroy()
    exported(tmp_path / "swap" / "default", tmp_path / "out")
    assert_same_tensors(tensors(tmp_path / "out"), expected)
    again = offload.load_pretrained(type(engine.module), tmp_path / "out")
    other_engine = start(Job(lambda: again, loss, dtype="bf16"), ("none", "none"), tmp_path)
    assert_same_tensors(other_engine.module.state_dict(), type(again).from_pretrained(tmp_path / "theirs").state_dict())
    other_engine.destroy(remove=True)


LAYERS_DISK = ("nvme", "nvme")


def gpt2_with_a_shared_block() -> nn.Module:
    model: Any = models.gpt2(layers=3)
    model.transformer.h[2] = model.transformer.h[0]
    return model


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.again = self.norm
        self.register_buffer("turned", torch.tensor([1 + 2j]).conj())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.inner(self.norm(rows))))


def norm_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).float().square().mean()


GPT2 = Job(gpt2_with_a_shared_block, models.language_loss)
NORM = Job(SharedNorm, norm_loss)


def save_layers(engine: offload.Engine, out: Path) -> None:
    engine.save_pretrained(out)


def save_one_file(engine: offload.Engine, out: Path) -> None:
    engine.save_16bit_model(out)
    engine.module.config.save_pretrained(out)


def export(engine: offload.Engine, out: Path) -> None:
    engine.destroy()
    (run,) = out.parent.glob("swap/*")
    assert CliRunner().invoke(app, ["export", str(run), str(out)]).exit_code == 0


@pytest.mark.parametrize("way", [save_layers, save_one_file, export])
def test_a_shared_block_comes_back(way: Callable[[offload.Engine, Path], None], tmp_path: Path) -> None:
    engine = start(GPT2, LAYERS_DISK, tmp_path / "swap")
    train_step(engine, GPT2, 0)
    expected = all_weights(engine)
    way(engine, tmp_path / "out")
    engine.destroy()
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == set(expected) - {"lm_head.weight"}, "the head alone is transformers' own tie"
    assert_same_tensors(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict(), expected)


def test_a_shared_norm_comes_back_with_its_buffers(tmp_path: Path) -> None:
    engine = start(NORM, LAYERS_DISK, tmp_path / "swap")
    train_step(engine, NORM, 0)
    expected = all_weights(engine)
    engine.save_16bit_model(tmp_path / "one")
    engine.save_pretrained(tmp_path / "folder")
    engine.destroy(remove=True)
    model = SharedNorm()
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "one" / "model.safetensors"), strict=True)
    assert model.again is model.norm
    assert_same_tensors(model.state_dict(), expected)
    # A folder has each tensor once, and their ties in its metadata. `safetensors.torch.load_model` takes the count of
    # batches of a shared BatchNorm for unexpected, in files of its own too.
    file, loaded = tmp_path / "folder" / "model.safetensors", SharedNorm()
    loaded.load_state_dict(safetensors.torch.load_file(file), strict=False)
    assert_same_tensors(loaded.state_dict(), expected)
    with safetensors.safe_open(file, "pt") as opened:
        again = {name for name in expected if name.startswith("again.")}
        assert set(opened.keys()) == expected.keys() - again and opened.metadata().keys() >= again
