"""`engine.save_pretrained` and `save_16bit_model` write the weights, the config and what goes with them."""

from __future__ import annotations

import json
import logging
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
from offload import testing
from offload.cli.main import app
from offload.errors import BudgetError, ConfigError, StoreError, UsageError
from tests.support import models
from tests.support.exported_runs import FROZEN, tied_by_hand
from tests.support.exported_runs import tensors as all_tensors
from tests.support.oracle import PLACEMENTS, Job, assert_same_tensors, start, train_step

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


@pytest.mark.sample(2)
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
        assert exact is not None and torch.equal(found[name], exact.cpu().to(wanted)), name
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
    assert listed(tmp_path / "out") == {"model.safetensors"} and "only weights are saved" in caplog.text
    model = models.Mixture()
    safetensors.torch.load_model(model, tmp_path / "out" / "model.safetensors")
    assert_same_tensors(model.state_dict(), engine.module.state_dict())
    engine.destroy(remove=True)


def test_one_file_of_a_model_with_ties_has_every_name_that_load_state_dict_wants(
    engine: offload.Engine, tmp_path: Path
) -> None:
    plain = start(models.MIXTURE, DISK, tmp_path / "plain-swap")
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
    for name, message in (
        ("pytorch_model.bin", r"ends with \.safetensors"),
        ("../model.safetensors", "a path; expected the name of a file in save_directory"),
    ):
        with pytest.raises(UsageError, match=message):
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
        one, other = (json.loads((tmp_path / folder / name).read_text()) for folder in ("theirs", "ours"))
        assert one == other


def test_an_empty_name_is_no_folder(engine: offload.Engine) -> None:
    with pytest.raises(UsageError, match="save_directory is an empty string"):
        engine.save_pretrained("")
