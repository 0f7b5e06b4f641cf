"""trl's trainers, unmodified in `offload run`, train as they do without it; reference models are paged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import rounding_bounds

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")

SCRIPT = Path(__file__).parent / "support" / "deepspeed_scripts" / "trl_trainers.py"
STEPS = 3


def bound() -> float:
    """How far numbers differ: each step adds the roundings of its sums."""
    sizes = {"vocab_size": 28, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    return STEPS * rounding_bounds.sum_error(rounding_bounds.roundings(model))


def trained(folder: Path, config: str | None, environment: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    runner = ["-m", "offload.deepspeed"] if config else []
    command = [sys.executable, *runner, str(SCRIPT), str(folder), *([config] if config else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow  # two processes that import trl, and five trainings each
@pytest.mark.works("Trainers", "trl's SFT, DPO, KTO, reward and GRPO trainers, in `offload run`", "right")
def test_losses_norms_and_samples_are_those_of_the_plain_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    place: dict[str, Any] = {"device": "nvme", "nvme_path": str(tmp_path)}
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    content = {
        **dict.fromkeys(keys, "auto"),
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(content))
    plain = trained(tmp_path, None, environment)
    paged = trained(tmp_path, str(config), environment)
    assert plain.keys() == paged.keys()
    error = bound()
    for kind, wanted in plain.items():
        assert len(wanted) == len(paged[kind]) == STEPS
        for one, other in zip(paged[kind], wanted, strict=True):
            assert one == pytest.approx(other, rel=error, abs=error), kind
        assert wanted[0]["grad_norm"] > 0.1
