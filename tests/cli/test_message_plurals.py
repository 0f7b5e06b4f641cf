"""Messages use the singular for one, and no number for none."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import ConfigError, UsageError

CONFIG: dict[str, Any] = {"offload": {"device": "cpu"}, "gradient_clipping": 0}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def one(**more: Any) -> nn.Module:
    return nn.Linear(4, 1, bias=False, **more)


def test_one_parameter_is_singular() -> None:
    with pytest.raises(ConfigError, match=r"^1 parameter is trainable, but there is no optimizer"):
        offload.initialize(model=one(), config=CONFIG)
    with pytest.raises(ConfigError, match=r"^2 parameters are trainable, but"):
        offload.initialize(model=nn.Linear(4, 1), config=CONFIG)
    with pytest.raises(ConfigError, match=r"1 parameter that is not the model's: make the optimizer from"):
        offload.initialize(model=one(), optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), config=CONFIG)
    model = nn.Linear(4, 1)
    with pytest.raises(ConfigError, match=r"^1 parameter that requires gradients is in no group .* first is bias"):
        offload.initialize(model=model, optimizer=torch.optim.SGD([model.weight], lr=1.0), config=CONFIG)


class Quantized(nn.Parameter):
    quant_state: object = None


def test_a_weight_that_is_not_quantized_yet_is_one() -> None:
    model = one()
    model.codes = Quantized(torch.ones(2), requires_grad=False)
    with pytest.raises(
        ConfigError, match=r"^1 weight is of a class of bitsandbytes and not quantized yet, the first is"
    ):
        offload.initialize(model=model, config=CONFIG | ADAM)


@pytest.mark.parametrize(("clip", "message"), [(0, "not clipped"), (0.5, "clipped to a norm of 0.5")])
def test_the_line_of_a_start(clip: float, message: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offload")
    engine = offload.initialize(model=one(), config=CONFIG | ADAM | {"gradient_clipping": clip})[0]
    try:
        assert f"gradients {message}\n" in caplog.text
        assert "config: 1 sample a step = 1 in a micro-batch * 1 micro-batch * 1 rank" in caplog.text
        assert not re.search(r"\b1 \w+s\b(?! (a|of))", caplog.text.replace("1 is", "")), caplog.text
    finally:
        engine.destroy()


def test_one_backward_is_singular() -> None:
    engine = offload.initialize(model=one(), config=CONFIG | ADAM | {"gradient_accumulation_steps": 2})[0]
    try:
        engine.backward(engine(torch.ones(1, 4)).mean())
        engine.step()
        with pytest.raises(UsageError, match=r"1 micro-batch of this step ran: call it after step\(\)"):
            engine.set_train_batch_size(4)
    finally:
        engine.destroy()
