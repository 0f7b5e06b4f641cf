"""`offload plan`, `offload train` and the stock Trainer in `offload run` take the four files that DeepSpeed users have.

The files are those of `tests/config/test_reference_configs.py`, nothing in them is changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.deepspeed.config import check_comments
from offload.errors import ConfigError
from offload.presets import PRESETS
from tests import ROOT
from tests.config.test_reference_configs import MEANINGS, each_file, written
from tests.support import rounding_bounds

SCRIPT = ROOT / "tests" / "deepspeed" / "scripts" / "trainer_by_file.py"
MACHINE = ("--gpu", "24GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
COMMENTED = "fp16 with comments"


def called(*arguments: str) -> str:
    """Returns what a command that ends well has written to stdout."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.sample(1)
@each_file
def test_a_plan_is_made_of_it(name: str, tmp_path: Path) -> None:
    meaning = MEANINGS[name]
    text = called("plan", "gpt2-tiny", "--details", "--config", str(written(meaning, tmp_path)), *MACHINE)
    assert f"weights on {meaning.tier}, states on {meaning.tier}" in text
    assert f"a step is {meaning.batch.accumulation} x {meaning.batch.micro} x 1024 tokens" in text


@pytest.mark.slow
@pytest.mark.sample(1)
@each_file
def test_offload_train_takes_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, meaning = PRESETS["gpt2-tiny"], MEANINGS[name]
    monkeypatch.setitem(PRESETS, "gpt2-tiny", tiny._replace(settings=tiny.settings | {"n_layer": 2, "n_embd": 64}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    log, file = tmp_path / "log.jsonl", written(meaning, tmp_path)
    options = ["--config", str(file), "--log", str(log), "--steps", "2", "--seq-len", "8", "--device", "cpu"]
    called("train", *options, "--eval-every", "0")
    assert [json.loads(line)["lr"] for line in log.read_text().splitlines()] == pytest.approx(
        meaning.rates[:2] if meaning.optimizer else [3e-4] * 2
    )


@pytest.mark.slow  # processes that import transformers
@each_file
def test_the_trainer_takes_it_or_says_what_to_do(name: str, tmp_path: Path) -> None:
    """With the file's numbers as its arguments: the first loss is that of the plain Trainer in fp32."""
    meaning = MEANINGS[name]
    given = {
        "per_device_train_batch_size": meaning.batch.micro,
        "gradient_accumulation_steps": meaning.batch.accumulation,
        "learning_rate": meaning.job.lr,
        "weight_decay": meaning.job.weight_decay,
        "fp16": meaning.job.dtype == "fp16",
        "warmup_steps": 1000 if name == "warm-up" else 0,
    }
    file = written(meaning, tmp_path)
    command = [sys.executable, "-m", "offload.deepspeed", str(SCRIPT), str(tmp_path), str(file), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[3])
    if name == COMMENTED:
        assert done.returncode == 1 and "transformers and accelerate read the file themselves" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-4000:]
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses["paged"]) == 2
    rounding_bounds.same_losses(losses["paged"][:1], losses["plain"][:1], meaning.job)


def test_comments_that_accelerate_does_not_read_are_an_error_that_says_so(tmp_path: Path) -> None:
    deepspeed = pytest.importorskip("accelerate.utils.deepspeed")
    for content, words in ((MEANINGS[COMMENTED].text, "take these out"), ("{", "is not JSON")):
        file = tmp_path / "ds_config.json"
        file.write_text(content)
        with pytest.raises(json.JSONDecodeError) as caught:
            deepspeed.HfDeepSpeedConfig(str(file))
        with pytest.raises(ConfigError, match=words):
            check_comments(caught.value)
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads(content)
    check_comments(caught.value)  # of a script's own file
