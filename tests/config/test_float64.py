"""Weights of float64 train in the dtype of the config, and a line reports it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from tests.support.oracle import Job, config

JOB = Job(nn.Module, lambda model, step, micro: model(torch.ones(1, 4)).sum())


@pytest.mark.parametrize(
    ("dtype", "message"), [("fp32", "trained in fp32;"), ("bf16", "bf16, with masters of 32 bits;")]
)
def test_float64_is_named_once(dtype: str, message: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 1).double())
    content = config(JOB._replace(dtype=dtype), ("none", "none"), tmp_path)
    engine = offload.initialize(model=model, config=content)[0]
    (line,) = [line for line in engine.notices if "float64" in line]
    assert line.startswith("1.weight is float64, which is not supported") and message in line
    assert next(engine.parameters()).dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert not isinstance(line, offload.notices.Remark)
    engine.backward(JOB.loss(engine, 0, 0))
    engine.step()
    engine.destroy()


def test_other_dtypes_are_not_reported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1).bfloat16())
    engine = offload.initialize(model=model, config=config(JOB, ("none", "none"), tmp_path))[0]
    assert not [line for line in engine.notices if "float64" in line]
    engine.destroy()
