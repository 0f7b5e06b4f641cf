"""`offload plan` takes the four files that DeepSpeed users have, and what accelerate does not read is an error.

The files are those of `tests/config/test_reference_configs.py`, nothing in them is changed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.deepspeed.config import check_comments
from offload.errors import ConfigError
from tests.config.test_reference_configs import MEANINGS, each_file, written

MACHINE = ("--gpu", "24GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
COMMENTED = "fp16 with comments"


@pytest.mark.sample(1)
@each_file
def test_a_plan_is_made_of_it(name: str, tmp_path: Path) -> None:
    meaning = MEANINGS[name]
    file = str(written(meaning, tmp_path))
    result = CliRunner().invoke(app, ["plan", "gpt2-tiny", "--details", "--config", file, *MACHINE])
    assert result.exit_code == 0, result.output
    assert f"weights on {meaning.tier}, states on {meaning.tier}" in result.stdout
    assert f"a step is {meaning.batch.accumulation} x {meaning.batch.micro} x 1024 tokens" in result.stdout


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
