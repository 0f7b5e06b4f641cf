"""A device without room for a tied head's gradient of each micro-batch takes micro-batches one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.layout.units import tied_numel
from tests.device.module import mem_get_info
from tests.support import models
from tests.support.oracle import Job, start

pytestmark = pytest.mark.test_device

UNTIED = Job(models.llama, models.language_loss)


def test_parameters_of_several_modules_are_counted_once_where_they_are_trained() -> None:
    head = models.gpt2().lm_head.weight
    assert tied_numel(models.gpt2()) == head.numel() == 128 * 64
    assert tied_numel(models.llama()) == 0
    frozen = models.gpt2().requires_grad_(False)
    assert tied_numel(frozen) == 0


@pytest.mark.parametrize(
    ("job", "full", "schedule"),
    [
        pytest.param(models.GPT2, False, LAYER_MAJOR, id="tied, room"),
        pytest.param(models.GPT2, True, MICRO_BATCH_MAJOR, id="tied, no room"),
        pytest.param(UNTIED, True, LAYER_MAJOR, id="untied"),
    ],
)
def test_auto_counts_them_for_each_micro_batch(job: Job, full: bool, schedule: str, tmp_path: Path) -> None:
    each, total = 128 * 64 * torch.float32.itemsize, mem_get_info()[1]
    # In half of all memory, or in an eighth: some is in use, and that of activations and of the budget is left out.
    accumulation = total // each // (2 if full else 8) + 2
    engine = start(job._replace(accumulation=accumulation), ("cpu", "cpu"), tmp_path, activations="cpu")
    try:
        assert engine.device.type == "test" and engine.schedule == schedule
    finally:
        engine.destroy(remove=True)
