"""The bounds of other tests let other orders of additions pass, and no fault."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import models, rounding_bounds
from tests.support.oracle import Job, PlainEngine, Result, plain_loop, trained
from tests.support.param_states import GPT2

pytestmark = pytest.mark.numeric

ADAM = GPT2._replace(accumulation=2, clip=0.5)
RULES = {
    "AdamW": GPT2,
    "Lamb": GPT2._replace(optimizer="Lamb", lr=1e-2),
    "Lion": GPT2._replace(optimizer="Lion", lr=1e-4),
    "Adagrad": GPT2._replace(optimizer="Adagrad", lr=1e-2),
    "momentum": GPT2._replace(optimizer="SGD", lr=0.1, params=(("momentum", 0.9),), weight_decay=0.0),
}


# -- other orders ----------------------------------------------------------------------------------------


def backwards(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """The rows of each batch in the other order: the same means and gradients, added otherwise."""
    ids = models.tokens(step, micro).flip(0)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", RULES)
def test_another_order_of_the_rows_passes(name: str, dtype: str) -> None:
    job = RULES[name]._replace(dtype=dtype)
    rounding_bounds.same_training(plain_loop(job._replace(loss=backwards)), plain_loop(job), job, reordered=True)


# -- faults ----------------------------------------------------------------------------------------------


def drops(name: str, model: Callable[[], nn.Module]) -> nn.Module:
    """A model one of whose gradients is lost."""
    made = model()
    made.get_parameter(name).register_hook(torch.zeros_like)
    return made


def with_params(job: Job, **params: Any) -> Job:
    return job._replace(params=(*job.params, *params.items()))


BIAS = "transformer.h.1.mlp.c_fc.bias"
FAULTS: dict[str, Job] = {
    "beta1 is 0.89": with_params(ADAM, betas=(0.89, 0.999)),
    "beta2 is 0.995": with_params(ADAM, betas=(0.9, 0.995)),
    "eps is 1e-6": with_params(ADAM, eps=1e-6),
    "lr is a thousandth off": ADAM._replace(lr=ADAM.lr * 1.001),
    "no decay": ADAM._replace(weight_decay=0.0),
    "decay of Adam": ADAM._replace(optimizer="Adam"),
    "no clip": ADAM._replace(clip=0.0),
    "a clip that is a hundredth off": ADAM._replace(clip=0.505),
    "a bias without its gradient": ADAM._replace(model=functools.partial(drops, BIAS, GPT2.model)),
    "one micro-batch of two": ADAM._replace(accumulation=1),
    "one step less": ADAM._replace(steps=ADAM.steps - 1),
}
SEEN_IN_BF16 = ("a bias without its gradient", "one micro-batch of two")
"""Over several steps. `test_pytorch_parity` has single steps in bf16 from one state: roundings are those of fp32."""


@functools.lru_cache
def right(dtype: str) -> Result:
    return plain_loop(ADAM._replace(dtype=dtype))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("fault", "dtype"), [*((f, "fp32") for f in FAULTS), *((f, "bf16") for f in SEEN_IN_BF16)])
def test_a_fault_exceeds_the_bounds(fault: str, dtype: str) -> None:
    job = FAULTS[fault]._replace(dtype=dtype)
    wrong = trained(PlainEngine(job), job)
    with pytest.raises(AssertionError):
        rounding_bounds.same_weights(wrong.weights, right(dtype).weights, ADAM._replace(dtype=dtype))
