"""A model's class decides what its files contain: names, parts and further tensors are those that it saves itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import offload
from offload.errors import ConfigError
from offload.model_io import save
from tests.support import models
from tests.support.exported_runs import DISK, exported, run, tensors
from tests.support.oracle import Job, assert_same_tensors, start, train_step

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


@pytest.mark.parametrize("model", STREAMED)
def test_files_have_what_the_class_saves(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = trained(STREAMED[model], tmp_path / "swap")
    engine.module.save_pretrained(tmp_path / "theirs")
    expected = tensors(tmp_path / "theirs")
    monkeypatch.setattr(save, "_CHUNK_NUMEL", 4096)  # some parts are in several chunks, some chunks in several parts
    monkeypatch.setattr(nn.Module, "state_dict", forbidden_of(engine.module))
    engine.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "ours").glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    assert_same_tensors(found, expected)
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
        assert all(each.is_meta for each in self.parameters())
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


def test_a_model_of_no_library_is_saved_by_its_hooks_too(tmp_path: Path) -> None:
    """Tied weights are one tensor in a folder, and the further name is in its metadata, as safetensors has it."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        built = models.Mixture()
        built.embedding.register_state_dict_post_hook(
            lambda _, state, prefix, __: state.update({f"{prefix}table": state.pop(f"{prefix}weight")})
        )
        return built

    engine = start(Job(model, models.MIXTURE.loss, dtype="fp32"), DISK, tmp_path / "swap")
    state = engine.module.state_dict()
    engine.save_pretrained(tmp_path / "ours")
    engine.destroy(remove=True)
    found = tensors(tmp_path / "ours")
    assert "embedding.table" in found and "embedding.weight" not in found and "head.weight" not in found
    assert_same_tensors(found, {name: value for name, value in state.items() if name != "head.weight"})
    with safetensors.safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "embedding.table"


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
    other = start(Job(lambda: again, loss, dtype="bf16"), ("none", "none"), tmp_path)
    assert_same_tensors(other.module.state_dict(), type(again).from_pretrained(tmp_path / "theirs").state_dict())
    other.destroy(remove=True)
