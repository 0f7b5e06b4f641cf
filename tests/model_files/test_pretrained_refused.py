"""A wrong model folder is an error before the model is changed or a file is written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import offload
from offload.errors import ConfigError, IoError, StoreError, UsageError
from tests import ROOT
from tests.support import models
from tests.support.oracle import assert_same_tensors
from tests.support.pretrained_models import CAUSAL, FAMILIES, T, engine_of, written

pytestmark = pytest.mark.usefixtures("engines_end")


def spoil_wrong_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def spoil_truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_head(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def spoil_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.ckpt")


def spoil_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def spoil_empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def spoil_adapter(folder: Path) -> None:
    spoil_empty(folder)
    (folder / "adapter_config.json").write_text("{}")


def spoil_config(folder: Path) -> None:
    models.gpt2().config.save_pretrained(folder)


def spoil_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_config_text(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    places = {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def spoil_index_tensor(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"ghost": "a.safetensors"}}))


def spoil_index_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head": "../a.safetensors"}}))


def spoil_index_text(folder: Path) -> None:
    spoil_empty(folder)
    (folder / "model.safetensors.index.json").write_text("[]")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    change(stored)
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})


def spoil_shape(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({"model.norm.weight": torch.ones(63)}))


def spoil_dtype(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))


def spoil_float8(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}))


def spoil_config_code(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "_attn_implementation": "evil/attention"}))


def spoil_config_values(folder: Path) -> None:
    """transformers divides by it."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "head_dim": 0}))


def spoil_quantized(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": quantization}))


def spoil_other_model(folder: Path) -> None:
    """The config says Llama, the weights are a GPT-2's."""
    tensors = safetensors.torch.load_file(folder.parent / "gpt2" / "model.safetensors")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


SPOILS = {
    spoil_wrong_folder: (StoreError, "there is no folder .*hf download OWNER/NAME"),
    spoil_truncated: (StoreError, "not a complete safetensors file"),
    spoil_head: (StoreError, "not a complete safetensors file"),
    spoil_pickle: (StoreError, r"model\.ckpt, a pickle"),
    spoil_bin: (StoreError, "not a complete file of torch.save"),
    spoil_empty: (StoreError, "contains neither"),
    spoil_adapter: (StoreError, "an adapter of peft"),
    spoil_config: (ConfigError, "describes a gpt2 model, but LlamaForCausalLM takes llama"),
    spoil_no_config: (StoreError, r"contains no config\.json"),
    spoil_config_text: (ConfigError, "not a model folder"),
    spoil_config_code: (ConfigError, "'evil/attention', which transformers would fetch from the hub, and run"),
    spoil_config_values: (ConfigError, "cannot be built from"),
    spoil_index: (StoreError, r"names model-00002-of-00002\.safetensors, which is missing"),
    spoil_index_tensor: (StoreError, "assigns ghost to"),
    spoil_index_outside: (StoreError, "not the name of a file beside it"),
    spoil_index_text: (StoreError, "not an index of safetensors files"),
    spoil_shape: (ConfigError, r"model\.norm\.weight: \[63\], not \[64\]"),
    spoil_dtype: (ConfigError, r"model\.norm\.weight is stored as torch\.int8"),
    spoil_float8: (ConfigError, "float8"),
    spoil_quantized: (ConfigError, "quantized"),
    spoil_other_model: (ConfigError, "no tensor of .* belongs to this LlamaForCausalLM"),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__.removeprefix("spoil_"))
def test_a_folder_that_is_not_right_is_an_error(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    """Nothing is written, and nothing of a model that was given is changed."""
    given = written(tmp_path / "given")
    written(tmp_path / "gpt2", models.gpt2())
    spoil(tmp_path / "given")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    kind, message = SPOILS[spoil]
    with pytest.raises(kind, match=message):
        offload.load_pretrained(T.LlamaForCausalLM, tmp_path / "given")
    if "config" not in spoil.__name__ and spoil is not spoil_quantized:
        model = models.llama()
        model.load_state_dict(given)
        with pytest.raises(kind, match=message):
            offload.load_pretrained(model, tmp_path / "given")
        assert_same_tensors(given, model.state_dict())
        assert not any(parameter.is_meta for parameter in model.parameters())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"device_map": "auto"}, UsageError, "device_map is for from_pretrained"),
        ({"dtype": "half a bit"}, UsageError, "dtype expects"),
        ({"model_or_class": 3}, UsageError, "a class of transformers or a torch.nn.Module"),
        ({"model_or_class": nn.Linear}, UsageError, "a class of transformers or a torch.nn.Module"),
        ({"model_or_class": nn.Linear(1, 1), "vocab_size": 3}, UsageError, "a module was given"),
        ({"model_or_class": T.AutoModelForImageClassification}, ConfigError, "cannot be built from"),
    ],
)
def test_arguments_that_cannot_be_honoured(
    arguments: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    written(tmp_path / "given")
    arguments = {"model_or_class": CAUSAL, "folder": tmp_path / "given", **arguments}
    with pytest.raises(kind, match=message):
        offload.load_pretrained(**arguments)


def test_files_that_change_before_initialize_are_an_error(tmp_path: Path) -> None:
    written(tmp_path / "given")
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    written(tmp_path / "given", seed=2)
    with pytest.raises(StoreError, match="has changed since"):
        engine_of(model, tmp_path / "swap", FAMILIES["llama"].job())
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    (tmp_path / "given" / "model.safetensors").unlink()
    with pytest.raises(IoError, match="open"):
        engine_of(model, tmp_path / "swap", FAMILIES["llama"].job())
    assert not (tmp_path / "swap" / "default").exists()


def test_a_module_that_was_put_on_meta_beside_absent_ones_is_an_error(tmp_path: Path) -> None:
    """Its values are gone, and another draw of them would be wrong in silence."""
    written(tmp_path / "given")
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    model.extra = nn.Linear(4, 4, device="meta")
    with pytest.raises(ConfigError, match=r"extra\.weight was put on the meta device"):
        engine_of(model, tmp_path / "swap", FAMILIES["llama"].job())


@pytest.mark.parametrize("given", ["auto", "bfloat16", torch.bfloat16, None])
def test_a_dtype_as_from_pretrained_takes_it(given: Any, tmp_path: Path) -> None:
    written(tmp_path / "model")
    model = offload.load_pretrained(CAUSAL, tmp_path / "model", dtype=given)
    assert model.dtype is (torch.bfloat16 if given in ("bfloat16", torch.bfloat16) else torch.float32)


def test_a_transformers_that_does_not_tell_names_is_an_error_with_the_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The range of the package, which the page of installation has too."""
    root = ROOT
    found = re.findall(r'"transformers(>=[\d.]+,<\d+)"', (root / "pyproject.toml").read_text())
    assert len(found) == 3 and len(set(found)) == 1
    oldest = found[0].partition(",")[0].removeprefix(">=")
    assert f"transformers {oldest} or a later" in (root / "docs" / "install.md").read_text()
    written(tmp_path)
    monkeypatch.delattr("transformers.core_model_loading", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)  # transformers 4 has no such module
    with pytest.raises(ConfigError, match=re.escape(f"pip install 'transformers{found[0]}'")):
        offload.load_pretrained(T.LlamaForCausalLM, tmp_path)


@pytest.mark.parametrize("settings", [{"init_lora_weights": "olora"}, {"use_dora": True}], ids=["olora", "dora"])
def test_adapters_that_are_made_from_weights_are_told_how_to_load(settings: dict[str, Any], tmp_path: Path) -> None:
    """The advice can be followed: the model of `from_pretrained` trains."""
    peft, lora = pytest.importorskip("peft"), {"r": 2, "target_modules": ["v_proj"]}
    model, job = models.llama(), FAMILIES["llama"].job("fp32")
    model.save_pretrained(tmp_path / "folder")
    deferred = offload.load_pretrained(type(model), tmp_path / "folder")
    with pytest.raises(UsageError, match=r"needs the values .* takes a model of from_pretrained"):
        peft.get_peft_model(deferred, peft.LoraConfig(**lora, **settings))
    eager = peft.get_peft_model(type(model).from_pretrained(tmp_path / "folder"), peft.LoraConfig(**lora, **settings))
    engine = engine_of(eager, tmp_path, job)
    loss = job.loss(engine, 0, 0)
    engine.backward(loss)
    engine.step()
    assert loss.isfinite()
