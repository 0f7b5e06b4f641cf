"""What a config asks for and is not done is said on stderr, in a script that has set up no logging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import warm

SCRIPT = """
import json, sys
import torch
import offload
config = json.loads(sys.argv[1])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if "own" in sys.argv else None
engine = offload.initialize(model=model, optimizer=optimizer, config=config)[0]
print("trains", flush=True)
engine.destroy()
"""
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "offload": {"device": "cpu"},
}


def said(folder: Path, given: dict[str, Any], *options: str) -> list[str]:
    """The lines on stderr of a script that trains by `given`."""
    done = warm.run(["-c", SCRIPT, json.dumps({**BASE, **given}), *options], cwd=folder)
    assert done.returncode == 0 and done.stdout == "trains\n", done.stderr
    return done.stderr.splitlines()


def test_nothing_where_all_is_done(tmp_path: Path) -> None:
    assert said(tmp_path, {"zero_optimization": {"stage": 3}}) == []


def test_one_line_for_all_that_changes_speed_alone(tmp_path: Path) -> None:
    zero = {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    (line,) = said(tmp_path, {"zero_optimization": zero, "aio": {"use_gds": True}})
    assert line.startswith("offload: decided by this library itself")
    for key in ("overlap_comm", "offload_optimizer.pin_memory", "aio.use_gds"):
        assert key in line


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"flops_profiler": {"enabled": True}}, "not supported and ignored: flops_profiler"),
        ({"sparse_gradients": True}, "not supported and ignored: sparse_gradients"),
        ({"gradient_clipping": "auto"}, "clipped to a global norm of 1"),
    ],
)
def test_a_line_for_what_is_not_done(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    (line,) = said(tmp_path, given)
    assert line.startswith("offload: ") and words in line


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    (line,) = said(tmp_path, {}, "own")
    assert line == "offload: the optimizer AdamW of the config is not used: optimizer= is given"
