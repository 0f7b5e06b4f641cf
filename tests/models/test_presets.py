"""Presets have the sizes that were published."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offload
from offload.errors import ConfigError
from offload.finetune.model import find_folder
from offload.presets import PRESETS, build, check_folder

PUBLISHED = {
    "gpt2-tiny": 3.5e6,
    "gpt2-small": 124.44e6,
    "llama-1b": 1.236e9,
    "llama-3b": 3.213e9,
    "llama-7b": 6.738e9,
    "llama-8b": 8.030e9,
    "llama-13b": 13.016e9,
    "llama-70b": 68.977e9,
    "llama-3.1-8b": 8.030e9,
    "llama-3.2-1b": 1.236e9,
    "llama-3.2-3b": 3.213e9,
    "llama-3.3-70b": 70.554e9,
    "qwen3-8b": 8.191e9,
    "qwen3-14b": 14.768e9,
    "qwen3-32b": 32.762e9,
    "qwen3-30b-a3b": 30.532e9,
    "qwen3-235b-a22b": 235.094e9,
    "gemma-3-12b": 11.771e9,  # the language model alone, by the report on Gemma 3
    "gemma-3-27b": 27.016e9,
    "mistral-7b": 7.248e9,
    "mistral-small-24b": 23.572e9,
    "gpt-oss-20b": 20.915e9,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PRESETS)
def test_parameters_as_published(name: str) -> None:
    with offload.init():
        model = build(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert abs(parameters / PUBLISHED[name] - 1) < 0.01
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_llama_8b_is_the_published_model() -> None:
    """Its head is no copy of the embedding, and its positions reach as far as published."""
    with offload.init():
        model = build("llama-8b", layers=1)
    config: Any = model.config
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (4096, 14336, 128256)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 8)
    assert config.rope_parameters["rope_theta"] == 500000.0 and config.max_position_embeddings == 131072
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head is not embedding and head.shape == embedding.shape == (128256, 4096)


def test_a_saved_preset_generates_with_a_cache_though_it_trains_without(tmp_path: Path) -> None:
    build("gpt2-tiny").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not model.config.use_cache
    lengths: list[int] = []
    model.transformer.wte.register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[1]))
    model.generate(torch.arange(1, 9)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert lengths == [8, 1, 1, 1], "each token is computed once"


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"gpt2-smal'.*did you mean gpt2-small.*llama-70b"):
        build("gpt2-smal")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"model_type": "brandnew9"}',
            r"\"model_type\" of .*mine is 'brandnew9', which transformers .*pip install -U",
        ),
        (
            '{"model_type": "brandnew9", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}',
            "Code in the folder itself is never run",
        ),
        ('{"hidden_size": 4}', r'mine/config\.json contains no "model_type".*save_pretrained'),
        ('{"model_type": 3}', 'contains no "model_type"'),
        ("[1", r"cannot read .*mine/config\.json .*not a model folder"),
        (None, r"mine contains no config\.json"),
        ("[" * 9000, r"cannot read .*mine/config\.json \(the JSON is nested"),
        (" " * (17 << 20), r"cannot read .*mine/config\.json \(it has more than 16 MiB"),
        ('{"model_type": "llama", "quantization_config": 4}', '"quantization_config" is no object'),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "is 1000000000, expected at most 100000"),
        ('{"model_type": "llama", "num_hidden_layers": -1}', '"num_hidden_layers" is -1, expected at least 0'),
        ('{"model_type": "llama", "hidden_size": 0}', '"hidden_size" is 0, expected at least 1'),
        ('{"model_type": "mixtral", "text_config": {"num_local_experts": 200000}}', "is 200000, expected at most"),
        (
            '{"model_type": "llama", "_attn_implementation": "evil/attention"}',
            "'evil/attention', which .* fetch .*and run",
        ),
        ('{"model_type": "x", "a": [{"attn_implementation": {"": "b/c@d:e"}}]}', "'b/c@d:e', which transformers would"),
        ('{"model_type": "x", "experts_implementation": "paged|evil/experts"}', "'paged|evil/experts', which transf"),
    ],
)
def test_a_folder_of_a_model_that_is_not_known_is_an_error_of_ours(
    content: str | None, words: str, tmp_path: Path
) -> None:
    """Before anything is read of it, and without a question whether its code may run."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "configuration_mine.py").write_text("raise SystemExit('this was run')")
    if content is not None:
        (folder / "config.json").write_text(content)
    for find in (lambda: check_folder(folder), lambda: find_folder(str(folder))):
        with pytest.raises(ConfigError, match=words) as refused:
            find()
        assert "\n" not in str(refused.value)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'offload\[hf\]'"):
        build("gpt2-tiny")
