"""A billion weights in 4 bits train adapters in a process whose memory the kernel limits to less than they take."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from offload.kernels.blocks import BLOCK_FORMATS
from offload.sizes import GIB, MIB
from tests.frozen.limited_training import STEPS, in_memory
from tests.model_files.test_pretrained import write_folder
from tests.support.processes.memory_limit import memory_limit

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 28, "num_attention_heads": 32}
"""1.4 billion parameters: 1.2 in matrices of linear layers, the others in two tables of 32,000 words."""
LIMIT = 720 * MIB


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep the last three


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_codes_that_exceed_the_memory_limit_train_as_their_values_in_memory(folder: Path) -> None:
    if shutil.disk_usage(folder).free < 6 * GIB or psutil.virtual_memory().available < 5 * GIB:
        pytest.skip("needs 6 GiB of disk, and 5 GiB of RAM for the same in memory")
    written = write_folder(folder / "model", SIZES)
    hidden, wide, heads = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_attention_heads"]
    matrices = SIZES["num_hidden_layers"] * (2 * hidden * (hidden + 8 * hidden // heads) + 3 * hidden * wide)
    frozen = BLOCK_FORMATS["nf4"].stored_nbytes(matrices) + 2 * (written - matrices)
    assert written > 1e9 and frozen > LIMIT
    with memory_limit(LIMIT) as group:
        module = "tests.frozen.limited_training"
        returned = group.run([sys.executable, "-m", module, folder / "model", folder / "swap", folder])
        peak = group.peak.own
        print(
            f"\n{peak / MIB:.0f} MiB of its own, {group.charged / MIB:.0f} MiB charged; frozen {frozen / MIB:.0f} MiB"
        )
    assert not returned and peak < LIMIT
    steps = [torch.load(folder / f"{step}.pt") for step in range(STEPS)]
    print([step["read"] for step in steps])
    for mine, (loss, gradients) in zip(steps, in_memory(folder / "model", folder), strict=True):
        assert torch.equal(mine["loss"], loss)
        assert mine["gradients"].keys() == gradients.keys()
        assert all(torch.equal(gradients[name], found) for name, found in mine["gradients"].items())
    first, second = (step["adapters"] for step in steps)
    assert any(not torch.equal(first[name], second[name]) for name in first)
