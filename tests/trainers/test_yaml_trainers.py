"""LLaMA-Factory and axolotl, unmodified in `offload run`, train by their YAML's key `deepspeed` as without the key."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
import transformers
import yaml

from tests import ROOT
from tests.support import rounding_bounds

GUIDES = ROOT / "docs" / "guides"
WORDS = 48
LOGGED = ("loss", "grad_norm", "learning_rate")


class Trainer(NamedTuple):
    """How one starts in this process, and what its YAML says in addition to compute in fp32 on a CPU."""

    command: tuple[str, ...]
    settings: dict[str, Any]


TRAINERS = {
    "llama-factory": Trainer(("llamafactory.cli", "train"), {"use_cpu": True}),
    "axolotl": Trainer(("axolotl.cli.train",), {"bf16": False, "special_tokens": {"pad_token": "[PAD]"}}),
}


def case(name: str, package: str, title: str) -> Any:
    """Returns a case of the test, which is skipped where the package is not installed."""
    missing = importlib.util.find_spec(package) is None
    works = pytest.mark.works("Trainers", f"{title} with `deepspeed:` in its YAML, in `offload run`", "right")
    return pytest.param(name, marks=[pytest.mark.skipif(missing, reason=f"{title} is not installed"), works])


def begun() -> torch.nn.Module:
    """Writes into the working folder what the pages' YAMLs name: a model with its tokenizer, and texts."""
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
    Path("data/texts.json").write_text(json.dumps([{"text": " ".join(row)} for row in texts]))
    return model


def block(page: str, language: str) -> str:
    """Returns a page's block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", (GUIDES / page).read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def trained(
    trainer: Trainer, name: str, content: dict[str, Any], environment: dict[str, str]
) -> list[dict[str, float]]:
    """Trains by a YAML; returns what was logged at each step."""
    Path(f"{name}.yaml").write_text(yaml.safe_dump({**content, **trainer.settings, "output_dir": name}))
    offload = [str(Path(sys.executable).with_name("offload")), "run"] if "deepspeed" in content else [sys.executable]
    command = [*offload, "-m", *trainer.command, f"{name}.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    rows = json.loads(Path(name, "checkpoint-4", "trainer_state.json").read_text())["log_history"]
    return [{key: row[key] for key in LOGGED} for row in rows if "loss" in row]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Texts have no use for torchaudio, which LLaMA-Factory imports, and whose wheels need CUDA's libraries."""
    try:
        import torchaudio  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except (ImportError, OSError):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "torchaudio.py").touch()
    alone = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "PYTHONPATH": str(tmp_path / "empty")}
    return {**os.environ, **alone}


@pytest.mark.slow  # three processes that import such a package
@pytest.mark.parametrize(
    "name", [case("llama-factory", "llamafactory", "LLaMA-Factory"), case("axolotl", "axolotl", "axolotl")]
)
def test_losses_and_norms_are_those_without_the_key(
    name: str, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files of the page."""
    monkeypatch.chdir(tmp_path)
    model, trainer, content = begun(), TRAINERS[name], yaml.safe_load(block(f"{name}.md", "yaml"))
    Path("ds.json").write_text(block(f"{name}.md", "json"))
    paged = trained(trainer, "paged", content, environment)
    assert Path("paged/checkpoint-2/latest").is_file()  # an engine's, which stock training does not write
    middle = {**content, "resume_from_checkpoint": "paged/checkpoint-2"}
    assert trained(trainer, "resumed", middle, environment) == paged
    del content["deepspeed"]
    plain = trained(trainer, "plain", content, environment)
    error = len(plain) * rounding_bounds.sum_error(rounding_bounds.roundings(model))
    assert len(plain) == len(paged) == 4 and plain[0]["grad_norm"] > 0.1
    for one, other in zip(paged, plain, strict=True):
        assert one == pytest.approx(other, rel=error, abs=error)
