"""`offload merge` writes the model that peft's own merge makes, in pieces; other commands run adapters unmerged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from offload.cli.main import app
from offload.offline import merge
from tests.support.drives.fault_injection import flip_bit
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, write_lines

ADAPTERS: dict[str, dict[str, Any]] = {
    "every linear layer": {"target_modules": "all-linear"},
    "alphas and ranks of their own": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {r"^model\.layers\.0\.self_attn\.v_proj": 7, "q_proj": 3},
    },
    "rsLoRA, an embedding, a whole head": {
        "target_modules": ["embed_tokens", "down_proj"],
        "modules_to_save": ["lm_head", "norm"],
        "use_rslora": True,
    },
    "DoRA, token rows": {"target_modules": ["up_proj"], "use_dora": True, "trainable_token_indices": [0, 5, 30]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_folder(folder, MARKING_TEMPLATE, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="20KB")  # several files
    (folder / "model.safetensors").unlink(missing_ok=True)
    return folder


def adapted(base: Path, out: Path, embeddings: bool = False, **settings: Any) -> Any:
    """A model of peft with an adapter of random values, saved in `out` with or without its whole embeddings."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    fan = isinstance(model, transformers.GPT2LMHeadModel)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, fan_in_fan_out=fan, **settings))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(out, save_embedding_layers=embeddings)
    return made


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


def generated(folder: Path, *arguments: Any) -> Any:
    """Greedy tokens as text, which are equal if the weights are, up to their last bits."""
    command = ["generate", str(folder), "--prompt", "Count to", "--max-new-tokens", "12", *map(str, arguments)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result


def assert_merged(made: Any, out: Path) -> None:
    expected = made.merge_and_unload()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    for (name, theirs), (_, ours) in zip(expected.named_parameters(), loaded.named_parameters(), strict=True):
        # peft adds the product in another order: a few roundings of numbers below 8.
        assert float((theirs - ours).detach().abs().max()) <= 8 * 2**-23 * 8, name


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ADAPTERS)
def test_it_is_the_merge_of_peft(name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "_PIECE_NBYTES", 4096)  # several pieces of a weight
    made = adapted(base, tmp_path / "adapter", embeddings="embedding" in name, **ADAPTERS[name])
    result = call(tmp_path / "adapter", tmp_path / "out", "--base", base, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["nbytes"] == sum(path.stat().st_size for path in tensors_of(base)) - heads(base)
    assert len(tensors_of(tmp_path / "out")) == len(tensors_of(base)) > 1
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert_merged(made, tmp_path / "out")
    answer = generated(tmp_path / "adapter", "--base", base)
    assert answer.stdout == generated(tmp_path / "out").stdout != generated(base).stdout
    # Where the adapter is but products of linear layers, all weights are read where they are.
    assert ("kept in host memory" in answer.stderr) == (name not in list(ADAPTERS)[:2])


def tensors_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def heads(folder: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in tensors_of(folder))


def test_weights_in_bf16_are_rounded_once_and_others_keep_their_bytes(base: Path, tmp_path: Path) -> None:
    half = transformers.AutoModelForCausalLM.from_pretrained(base).bfloat16()
    half.save_pretrained(tmp_path / "half")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "half")
    made = adapted(tmp_path / "half", tmp_path / "adapter", target_modules=["q_proj"])
    result = call(tmp_path / "adapter", tmp_path / "out")  # the adapter names its base
    assert result.exit_code == 0, result.output
    before, after = load_file(tmp_path / "half/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    layers = dict(made.base_model.model.named_modules())
    for name, values in before.items():
        expected = values
        if "q_proj" in name:
            layer = layers[name.removesuffix(".weight")]
            a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
            expected = (values.double() + 1.5 * b @ a).bfloat16()
            wrong = (after[name] != expected).sum()
            assert wrong <= 0.01 * values.numel(), "fp32 sums round as exact ones but at ties"
            continue
        assert torch.equal(after[name], expected), name
    # An adapter in fp32 computes in fp32 beside them, and is read where it is too.
    assert "kept in host memory" not in generated(tmp_path / "adapter").stderr


@pytest.mark.parametrize("lora", [(), ("--lora", "r=2,targets=all-linear")], ids=["model", "adapter"])
def test_a_run_answers_as_what_it_has_saved(lora: tuple[str, ...], base: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Count to"}, {"role": "assistant", "content": "3"}]
    write_lines(tmp_path / "rows.jsonl", [{"messages": chat}] * 8)
    model = shutil.copytree(base, tmp_path / "base")
    command = ["train", "--model", model, "--data", tmp_path / "rows.jsonl", "--nvme-path", tmp_path / "swap", *lora]
    command += ["--dtype", "fp32", "--steps", "2", "--lr", "0.05", "--eval-every", "0", "--output", tmp_path / "saved"]

    def train(*more: str) -> Path:
        result = CliRunner().invoke(app, [*map(str, command), *more])
        assert result.exit_code == 0, result.output
        return tmp_path / "swap" / "default"

    run = train("--keep")
    answer = generated(run)
    assert answer.stdout == generated(tmp_path / "saved").stdout != generated(base).stdout
    assert f"its {'adapter' if lora else 'model'} (" in answer.stderr
    assert sorted(path.name for path in run.parent.iterdir()) == ["default"]  # what was written is gone
    if lora:
        last = tensors_of(model)[-1]
        flip_bit(last, last.stat().st_size - 1)
        refused = CliRunner().invoke(app, ["generate", str(run), "--prompt", "Count to"])
        assert refused.exit_code == 2 and f"{last} has other bytes of the same size" in refused.output
        flip_bit(last, last.stat().st_size - 1)
        shutil.rmtree(tmp_path / "saved")
        train("--resume", "restart")  # and ends without swap files
        assert generated(run).stdout == answer.stdout


def test_layers_whose_weight_is_transposed(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    made = adapted(tmp_path / "base", tmp_path / "adapter", target_modules=["c_attn"], bias="lora_only")
    result = call(tmp_path / "adapter", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert_merged(made, tmp_path / "out")


def _other_base(adapter: Path, base: Path) -> None:
    config = json.loads((base / "config.json").read_text()) | {"intermediate_size": 24}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    shutil.rmtree(base)
    model.save_pretrained(base)


def _setting(adapter: Path, **settings: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def _renamed(adapter: Path, old: str, new: str) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({name.replace(old, new): values for name, values in load_file(path).items()}, path)


REFUSED: dict[str, tuple[Any, str]] = {
    "another kind": (lambda a, b: _setting(a, peft_type="IA3"), "peft_type is 'IA3', and offload merges LORA"),
    "PiSSA": (lambda a, b: _setting(a, init_lora_weights="pissa"), "changes the base model's weights"),
    "stacked experts": (lambda a, b: _setting(a, target_parameters=["experts"]), "sets target_parameters"),
    "a regular expression": (lambda a, b: _setting(a, alpha_pattern={"(a+)+": 2}), "no name of modules"),
    "another base": (_other_base, "does not fit model.layers.0.mlp"),
    "another model": (lambda a, b: _renamed(a, "mlp", "mixer"), "does not have: give the folder"),
    "half of a product": (lambda a, b: _renamed(a, "lora_A", "lora_C"), "expected matrices A"),
    "another rank": (lambda a, b: _setting(a, r=8), "of rank 4 for"),
    "no adapter": (lambda a, b: (a / "adapter_config.json").unlink(), "expected the folder of an adapter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_model_is_an_error_and_writes_nothing(case: str, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    adapted(tmp_path / "base", tmp_path / "adapter", target_modules=["up_proj"])
    spoil, words = REFUSED[case]
    spoil(tmp_path / "adapter", tmp_path / "base")
    result = call(tmp_path / "adapter", tmp_path / "out")
    assert result.exit_code == 2 and words in result.output
    assert not (tmp_path / "out").exists()


def test_what_is_not_finite_is_no_model_and_a_link_to_nothing_no_folder(base: Path, tmp_path: Path) -> None:
    adapted(base, tmp_path / "adapter", target_modules=["up_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    result = call(tmp_path / "adapter", tmp_path / "link", "--base", base)
    assert result.exit_code == 2 and "link to a folder that is not there" in result.output
    save_file({name: values.fill_(torch.nan) for name, values in load_file(path).items()}, path)
    result = call(tmp_path / "adapter", tmp_path / "out", "--base", base)
    assert result.exit_code == 1 and "has inf or NaN after the merge" in result.output
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
def test_a_tied_head_is_not_changed_with_the_embedding(tmp_path: Path) -> None:
    make_folder(tmp_path / "base", tie_word_embeddings=True)
    adapted(tmp_path / "base", tmp_path / "adapter", target_modules=["embed_tokens"])
    result = call(tmp_path / "adapter", tmp_path / "out")
    assert result.exit_code == 2 and "tied to another parameter" in result.output
