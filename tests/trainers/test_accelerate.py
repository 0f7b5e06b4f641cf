"""Accelerate's loop, its launcher and YAML files of trainers train as without this package."""

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
from torch import nn

from tests import ROOT
from tests.support import rounding_bounds
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port

pytest.importorskip("accelerate")

SCRIPT = ROOT / "tests" / "deepspeed" / "scripts" / "accelerate_ranks.py"

_RANK = """
import os, runpy, sys
import torch
torch.set_num_threads(1)
# The server of these processes has imported them, and they have looked for DeepSpeed.
asked = "transformers.integrations.deepspeed"
for name in [name for name in sys.modules if name.split(".")[0] == "accelerate" or name == asked]:
    del sys.modules[name]
import offload.deepspeed
offload.deepspeed.install()
from accelerate.state import AcceleratorState
script, folder, config = sys.argv[1:]

def message(config, *backend):
    sys.argv = [script, folder, *backend]
    os.environ.pop("ACCELERATE_DEEPSPEED_CONFIG_FILE", None)
    os.environ.update({} if config is None else {"ACCELERATE_DEEPSPEED_CONFIG_FILE": config})
    AcceleratorState._reset_state(True)
    try:
        runpy.run_path(script, run_name="__main__")
    except offload.ConfigError as error:
        return str(error)

for places in (["PARAM", "OPTIMIZER"], ["OPTIMIZER"]):
    for place in ("PARAM", "OPTIMIZER"):
        os.environ[f"ACCELERATE_DEEPSPEED_OFFLOAD_{place}_DEVICE"] = "nvme" if place in places else "none"
    wanted = f"ACCELERATE_DEEPSPEED_OFFLOAD_{places[0]}_NVME_PATH=/mnt/nvme in the environment"
    found = message(None, "gloo")
    assert found and wanted in found and f"does not pass offload_{places[0].lower()}_nvme_path" in found, found
for backend, wanted in ((), "accelerate counts 1 process, and there are 2 ranks"), (("gloo",), ""):
    found = message(config, *backend)
    assert wanted in found if wanted else found is None, found
"""


def config(folder: Path) -> str:
    place = {"device": "nvme", "nvme_path": str(folder / "drive")}
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    (folder / "drive").mkdir()
    (folder / "ds.json").write_text(json.dumps(content))
    return str(folder / "ds.json")


def check(line: str) -> None:
    """Compares what the script has printed: the plain run on one rank, and the steps behind the saved state."""
    report: dict[str, Any] = json.loads(line)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    steps = len(report["plain"])
    error = 2 * steps * rounding_bounds.sum_error(rounding_bounds.roundings(model))
    assert report["ranks"] == 2 and steps == 4
    rounding_bounds.same_numbers(report["losses"], report["plain"], error)
    assert report["resumed"] == report["losses"][steps // 2 :]


@pytest.mark.numeric
def test_ranks_divide_the_rows_or_say_what_accelerate_lacks(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **meeting, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    ranks = [
        warm_process.begin(
            ["-c", _RANK, SCRIPT, tmp_path, config(tmp_path) if rank == 0 else tmp_path / "ds.json"],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    results = [rank.communicate(120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(str(errors)[-3000:] for _, errors in results)
    check(str(results[0][0]).splitlines()[-1])


@pytest.mark.slow  # four processes that import torch
@pytest.mark.works("Trainers", "`offload run accelerate launch` with its YAML, two CPU ranks, `save_state`", "right")
def test_the_launcher_with_its_own_file(tmp_path: Path) -> None:
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": config(tmp_path), "zero3_init_flag": False},
        "num_machines": 1,
        "num_processes": 2,
        "main_process_port": free_port(),
    }
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    tools = Path(sys.executable).parent
    launcher = [tools / "accelerate", "launch", "--config_file", tmp_path / "accelerate.yaml"]
    done = subprocess.run(
        [tools / "offload", "run", *launcher, SCRIPT, tmp_path, "gloo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    check(done.stdout.splitlines()[-1])


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
    (matches,) = re.findall(rf"```{language}\n(.*?)```", (GUIDES / page).read_text(encoding="utf-8"), re.DOTALL)
    return str(matches)


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
    for left, right in zip(paged, plain, strict=True):
        assert left == pytest.approx(right, rel=error, abs=error)
