"""LLaMA-Factory, unmodified in `offload run`, trains by its YAML's key `deepspeed` as it does without the key."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
import yaml

from tests.support import rounding_bounds

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "llama-factory.md"
WORDS = 48
LOGGED = ("loss", "grad_norm", "learning_rate")


def begun() -> torch.nn.Module:
    """Writes into the working folder what the page's YAML names: a model with its tokenizer, texts, the JSON."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    model.save_pretrained("model")
    names = ["[PAD]", "[EOS]", *(f"w{number}" for number in range(2, WORDS))]
    words = tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[PAD]")
    plain = tokenizers.Tokenizer(words)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "bos_token": "[EOS]", "eos_token": "[EOS]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained("model")
    draw = torch.randint(2, WORDS, (16, 2, 10), generator=torch.Generator().manual_seed(1)).tolist()
    texts = [[" ".join(f"w{number}" for number in text) for text in row] for row in draw]
    Path("data").mkdir()
    Path("data/chat.json").write_text(json.dumps([{"instruction": one, "output": other} for one, other in texts]))
    Path("data/dataset_info.json").write_text(
        json.dumps({"chat": {"file_name": "chat.json", "columns": {"prompt": "instruction", "response": "output"}}})
    )
    Path("ds.json").write_text(block("json"))
    return model


def block(language: str) -> str:
    """Returns the page's block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def trained(name: str, content: dict[str, Any], environment: dict[str, str]) -> list[dict[str, float]]:
    """Trains by a YAML; returns what was logged at each step."""
    content = {**content, "output_dir": name, "use_cpu": True}
    Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    offload = [str(Path(sys.executable).with_name("offload")), "run"] if "deepspeed" in content else [sys.executable]
    command = [*offload, "-m", "llamafactory.cli", "train", f"{name}.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    rows = json.loads(Path(name, "trainer_state.json").read_text())["log_history"]
    return [{key: row[key] for key in LOGGED} for row in rows if "loss" in row]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Texts have no use for torchaudio, which LLaMA-Factory imports, and whose wheels need CUDA's libraries."""
    try:
        import torchaudio  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except (ImportError, OSError):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "torchaudio.py").touch()
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path / "empty")}


@pytest.mark.slow  # three processes that import LLaMA-Factory
@pytest.mark.skipif(importlib.util.find_spec("llamafactory") is None, reason="LLaMA-Factory is not installed")
@pytest.mark.works("Trainers", "LLaMA-Factory with `deepspeed:` in its YAML, in `offload run`", "right")
def test_losses_and_norms_are_those_without_the_key(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, content = begun(), yaml.safe_load(block("yaml"))
    paged = trained("paged", content, environment)
    assert Path("paged/checkpoint-2/latest").is_file()  # an engine's, which stock training does not write
    resumed = trained("resumed", {**content, "resume_from_checkpoint": "paged/checkpoint-2"}, environment)
    assert resumed == paged
    del content["deepspeed"]
    plain = trained("plain", content, environment)
    error = len(plain) * rounding_bounds.sum_error(rounding_bounds.roundings(model))
    assert len(plain) == len(paged) == 4 and plain[0]["grad_norm"] > 0.1
    for one, other in zip(paged, plain, strict=True):
        assert one == pytest.approx(other, rel=error, abs=error)
