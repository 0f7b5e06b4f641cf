"""The large models of `offload bench gpu` have a million drawn values in each tensor, repeated."""

from __future__ import annotations

import torch

from offload.bench.gpu import training


def test_values_are_drawn_once_and_repeated() -> None:
    drawn, rows = training._DRAWN, torch.empty(3, training._DRAWN // 2 + 1)
    before = torch.Tensor.normal_
    with training.values_repeated():
        torch.nn.init.normal_(rows, std=0.02)
        few = torch.empty(7).normal_()
        across = torch.empty(4, 6).t().normal_()
    values = rows.view(-1)
    assert torch.equal(values[drawn:], values[: len(values) - drawn])
    assert 0.019 < float(values.std()) < 0.021 and len(values[:drawn].unique()) > drawn // 2
    assert len(few.unique()) == 7 and len(across.unique()) == 24
    assert torch.Tensor.normal_ is before
