"""`offload export MODEL OUT.gguf` writes a model's folder as a file of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from typer.testing import CliRunner

from offload.cli.main import app

LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 320,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


def tokenizer(split: str, bos: bool) -> Any:
    inner = Tokenizer(models.BPE(ignore_merges=bos))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    text = ["the weights of a model lie in files, and the model is larger than the memory 1234"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(text, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens(["<think>"])
    if bos:
        inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", inner.token_to_id("<s>"))])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = "{{ messages }}"
    return made


def make_model(folder: Path, family: str) -> Any:
    kind, more = FAMILIES[family]
    words = tokenizer(LLAMA_SPLIT if family == "llama" else LLAMA_SPLIT.replace("{1,3}", ""), family == "llama")
    words.save_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES, **more)).to(torch.bfloat16)
    with torch.no_grad():  # norms and biases too
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size="40KB")  # several files
    return model


def export(folder: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["export", str(folder), str(out), "--json", *more])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_weights_the_shape_and_the_tokenizer(family: str, tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "model", family), tmp_path / "model.gguf"
    done = export(tmp_path / "model", out)
    assert done.exit_code == 0, done.output

    read = gguf.GGUFReader(out)
    assert json.loads(done.stdout)["nbytes"] == sum(int(tensor.n_bytes) for tensor in read.tensors)
    tensors = {tensor.name: tensor for tensor in read.tensors}
    assert len(tensors) == len(list(model.parameters())) + (family == "llama")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), 2)
    for name, weight in model.named_parameters():
        values = weight.detach()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            # Rows i and i + half of a head become neighbours.
            heads = 4 if "q_proj" in name else 2
            values = values.view(heads, 2, -1, 64).transpose(1, 2).reshape(values.shape)
        stored = tensors.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if weight.dim() == 1:
            assert torch.equal(torch.from_numpy(stored.data.copy()), values.float()), name
        else:
            assert stored.tensor_type is gguf.GGMLQuantizationType.BF16
            assert stored.data.tobytes() == values.contiguous().view(torch.uint8).numpy().tobytes(), name
    if family == "llama":
        factors = torch.from_numpy(tensors["rope_freqs.weight"].data.copy())
        assert factors[0] == 1 and factors[-1] == 8 and factors.isfinite().all() and len(factors) == 8

    def value(key: str) -> Any:
        return read.fields[key].contents()

    config, words = model.config, transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert value("general.architecture") == family
    assert value(f"{family}.attention.head_count_kv") == 2
    assert value(f"{family}.attention.key_length") == (32 if family == "qwen3" else 16)
    assert value(f"{family}.rope.freq_base") == config.rope_parameters["rope_theta"]
    assert value(f"{family}.attention.layer_norm_rms_epsilon") == pytest.approx(config.rms_norm_eps)
    assert value("tokenizer.ggml.pre") == ("llama-bpe" if family == "llama" else "qwen2")
    assert value("tokenizer.ggml.tokens")[: len(words)] == words.convert_ids_to_tokens(range(len(words)))
    assert len(value("tokenizer.ggml.tokens")) == config.vocab_size
    kinds = value("tokenizer.ggml.token_type")
    assert [kinds[words.convert_tokens_to_ids(token)] for token in ("a", "<s>", "<think>")] == [1, 3, 4]
    assert kinds[-1] == 5
    assert value("tokenizer.ggml.bos_token_id") == words.bos_token_id
    assert value("tokenizer.ggml.add_bos_token") == (family == "llama")
    assert value("tokenizer.chat_template") == "{{ messages }}"


def refused(folder: Path, out: Path, *more: str) -> str:
    done = export(folder, out, *more)
    assert done.exit_code == 2, done.output
    assert not out.exists() and not list(out.parent.glob(".*"))
    return str(done.stderr)


def test_what_llama_cpp_would_compute_differently_is_refused(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out" / "model.gguf"
    out.parent.mkdir()
    make_model(folder, "qwen3")
    assert "is for a run" in refused(folder, out, "--dtype", "bf16")
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"hidden_act": "gelu"}, "sets hidden_act to 'gelu'; use llama.cpp's own converter"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "of the kind 'linear'"),
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "it is a GemmaForCausalLM, and offload"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert message in refused(folder, out)
    (folder / "config.json").write_text(json.dumps(config))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "not the byte-level BPE" in refused(folder, out)
    out.write_text("there already")
    assert "exists already" in str(export(folder, out).stderr)
