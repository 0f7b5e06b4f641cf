"""Inputs of floating point into a model of 16 bits: cast, with one line, unless the config says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import UsageError


def begin(mode: str, folder: Path, **block: Any) -> offload.Engine:
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "offload": {"device": "cpu", "nvme_path": str(folder)},
    }
    if mode != "fp32":
        content[mode] = {"enabled": True, **block}
    torch.manual_seed(0)
    return offload.initialize(model=nn.Linear(4, 1), config=content)[0]


def cast_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "are cast to" in record.getMessage()]


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_inputs_are_cast_and_one_line_reports_it(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, rows = begin(mode, tmp_path), torch.randn(2, 4)
    for _ in range(3):
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        engine.step()
    (line,) = cast_lines(caplog)
    assert line.startswith(f"offload: inputs of fp32 are cast to {mode}, ") and '"auto_cast": true' in line
    engine.destroy()


@pytest.mark.parametrize(("mode", "block"), [("bf16", {"auto_cast": True}), ("fp32", {})])
def test_not_a_word_where_it_is_asked_for_or_not_needed(
    mode: str, block: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = begin(mode, tmp_path, **block)
    assert engine(torch.ones(2, 4)).dtype == (torch.float32 if mode == "fp32" else torch.bfloat16)
    assert cast_lines(caplog) == []
    engine.destroy()


def test_what_fits_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin("bf16", tmp_path)
    engine(torch.ones(2, 4, dtype=torch.bfloat16))
    assert cast_lines(caplog) == []
    engine.destroy()


def test_false_leaves_them_and_the_error_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin("bf16", tmp_path, auto_cast=False)
    with pytest.raises(UsageError, match=r'inputs of fp32 .*weights are bf16; set "auto_cast": true') as caught:
        engine(torch.ones(2, 4))
    assert isinstance(caught.value.__cause__, RuntimeError) and cast_lines(caplog) == []
    engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    engine.step()
    engine.destroy()


def test_an_error_of_the_model_is_its_own(tmp_path: Path) -> None:
    engine = begin("bf16", tmp_path, auto_cast=False)
    with pytest.raises(RuntimeError, match="shapes"):
        engine(torch.ones(2, 5, dtype=torch.bfloat16))
    engine.destroy()
