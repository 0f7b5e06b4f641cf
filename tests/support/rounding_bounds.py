"""How far apart two runs of the same arithmetic may be: from the arithmetic alone, never from what one machine gave.

    unit            the largest relative error of one rounding
    sum_error       what many roundings come to
    roundings       how many lie behind a number of a training step
    step_error      what the numbers of a step may differ by, relative to the size of what is added
    path            how far a rule can have moved a tensor
    same_training   asserts that two runs of one job are the same but for roundings; same_losses, same_weights: of parts

Processors, instruction sets, ranks and splits of a batch add the same numbers in other orders, so that each sum is
rounded otherwise. One rounding is at most `unit` of its value and spread evenly within that: its deviation is
`unit / sqrt(3)`. n of them, one after another, come to `sqrt(n)` times that (N. Higham and T. Mary, A new approach to
probabilistic rounding error analysis, 2019), and two runs to `sqrt(2)` times as much: `sqrt(2 n / 3)` units. Six
deviations, which chance exceeds once in 10**9, are `5 sqrt(n)` units.

A rule of an optimizer divides a gradient by its own size, so the direction of a step has the gradient's relative
error, and the weights are apart by that share of the way that they have gone. It is stated for tensors, by their
2-norms: one element may have a gradient of nothing but noise. A real fault changes more than such a share;
`tests/harness/test_rounding_bounds.py` has those that are seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from tests.support.models import without_key_bias
from tests.support.oracle import DTYPES, Job, Result

POSITIONS = 512
"""No step of a test has more tokens, rows or pixels, over which a gradient is summed."""


def unit(dtype: str = "fp32") -> float:
    """Returns the largest relative error of one rounding to nearest: half the spacing of numbers at one."""
    return float(torch.finfo({**DTYPES, "fp64": torch.float64}[dtype]).eps) / 2


def sum_error(terms: float, dtype: str = "fp32") -> float:
    """Returns how far two sums of `terms` numbers in other orders differ, relative to the sum of their sizes.

    `5 sqrt(terms)` units, see above. For few terms that is more than each of both sums can be off, `terms` units.
    """
    return min(2 * terms, 5 * terms**0.5) * unit(dtype)


def roundings(model: nn.Module, dtype: str = "fp32") -> int:
    """Returns how many roundings follow one another in a number of a step.

    In fp32 each number that is added is one. A matrix adds over its columns on the way forward and over its rows on the
    way back, and a gradient adds over the positions. In 16 bits products are added in fp32 and rounded when they leave
    it: some four times on the way through a matrix and what follows it (a bias, an activation, a norm, the residual),
    and as often on the way back.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    if dtype == "fp32":
        return POSITIONS + sum(sum(matrix.shape) for matrix in matrices)
    return 8 * len(matrices)


def step_error(job: Job) -> float:
    """Returns how far numbers of a step of `job` differ, relative to the sizes of what is added."""
    return sum_error(_roundings_of(job.model, job.dtype), job.dtype)


@functools.lru_cache(maxsize=64)
def _roundings_of(make: Callable[[], nn.Module], dtype: str) -> int:
    """Returns the roundings of the model that `make` makes: a comparison asks once for each of its tensors."""
    with torch.device("meta"):
        return roundings(make(), dtype)


def loss_error(job: Job) -> float:
    """Returns how far a cross-entropy differs, relative to itself.

    The logits, as large as `job.logits`, are each off by their share of that, and the derivative of a loss by all of
    them together is 2 (1 - p), which is at most 2 (-log p): two losses. In 16 bits each position has logits of its
    own, so that a mean over positions is off by no more than one rounding of one of them.
    """
    logit = step_error(job) if job.dtype == "fp32" else unit(job.dtype)
    return 2 * logit * job.logits


def norm_error(job: Job) -> float:
    """Returns how far the norm of all gradients differs, relative to itself: by the logits, and by the way back."""
    return 2 * loss_error(job)


def path(job: Job, weight: torch.Tensor, norms: Sequence[float] = ()) -> float:
    """Returns how far `job` can have moved `weight` at most: a 2-norm.

    An element goes about lr in a step by a rule that divides a gradient by its size or takes its sign. Lamb takes lr
    of the tensor's own norm, but from zero, in the first step, lr of each element. SGD takes lr of the clipped
    gradient, whose norms before the clip are `norms`, and a momentum adds all that were before.
    """
    if job.optimizer == "Lamb":
        return job.lr * (job.steps * norm(weight) + weight.numel() ** 0.5)
    if job.optimizer == "SGD":
        gradients = sum(min(each, job.clip or each) for each in norms)
        return job.lr * gradients / (1 - dict(job.params).get("momentum", 0.0))
    return job.lr * job.steps * weight.numel() ** 0.5


def sign_error(job: Job, numel: int, reordered: bool) -> float:
    """Returns the error that differing signs of directions cause.

    A direction within its error of zero may have either sign, and goes lr to one side or to the other. Directions
    are spread about zero, so it is a share of them that is no larger than the error; or one of them. Lion takes signs
    in each step. So do rules that divide a gradient by its size, in their first step, when there is no other gradient;
    but where nothing was added in another order yet (not `reordered`) those are the same.
    """
    steps = job.steps if job.optimizer == "Lion" else int(reordered and job.optimizer != "SGD")
    return 2 * job.lr * (steps * max(step_error(job) * numel, 1.0)) ** 0.5


def weight_error(job: Job, weight: torch.Tensor, norms: Sequence[float] = (), reordered: bool = False) -> float:
    """What a weight differs by after training: its share of the way, signs, a rounding a step, its own last bit."""
    last = unit(job.dtype) if job.dtype != "fp32" else 0.0
    bound = step_error(job) * path(job, weight, norms) + 2 * (job.steps * unit() + last) * norm(weight)
    return bound + sign_error(job, weight.numel(), reordered)


def likely_error(job: Job, weight: torch.Tensor, norms: Sequence[float] = (), reordered: bool = False) -> float:
    """Returns one tensor's share of the difference of all weights of a model.

    Over so many numbers the root of the mean square is their deviation, of which two are allowed, not six. A 16-bit
    weight rounds to the neighbour, 2 units away, where its master is within its error of the edge: a share of
    the weights that is the error by the 2 units, so that the mean square is the product of both.
    """
    signs = sign_error(job, weight.numel(), reordered)
    master = step_error(job) / 3 * path(job, weight, norms) + 2 * job.steps * unit() * norm(weight) + signs
    last = 2 * unit(job.dtype) * norm(weight) if job.dtype != "fp32" else 0.0
    return float(master**2 + master * last) ** 0.5


def norm(tensor: torch.Tensor) -> float:
    """Returns the 2-norm, in fp64."""
    return float(tensor.detach().double().norm())


def near(mine: float, theirs: float, error: float) -> bool:
    """Returns whether two losses or norms differ by a relative `error` and the roundings of log(1 + tiny) at most."""
    return abs(mine - theirs) <= error * abs(theirs) + 4 * unit()


def same_numbers(mine: Sequence[float], theirs: Sequence[float], error: float) -> None:
    """Asserts that losses, or norms, of two runs are the same but for a relative `error`."""
    assert len(mine) == len(theirs)
    for step, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        assert near(left, right, error), (
            f"step {step}: {left} and {right}, {abs(left - right):.1e} apart, not {error:.1e}"
        )


def same_losses(mine: Sequence[float], theirs: Sequence[float], job: Job) -> None:
    """Asserts that the losses of two runs of `job` are the same but for roundings."""
    same_numbers(mine, theirs, loss_error(job))


def same_norms(mine: Sequence[float], theirs: Sequence[float], job: Job) -> None:
    """Asserts that the norms of the gradients of two runs of `job` are the same but for roundings."""
    same_numbers(mine, theirs, norm_error(job))


def same_tensor(mine: torch.Tensor, theirs: torch.Tensor, error: float, scale: torch.Tensor | None = None) -> None:
    """Asserts that two tensors differ by `error` times the norm of `scale`, or else of `theirs`."""
    apart, allowed = norm(mine.cpu().double() - theirs.cpu().double()), error * norm(theirs if scale is None else scale)
    assert apart <= allowed, f"{apart:.2e} apart, roundings come to {allowed:.2e}"


def same_weights(
    mine: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    job: Job,
    norms: Sequence[float] = (),
    reordered: bool = False,
) -> None:
    """Asserts that the weights after two runs of `job` are the same but for roundings, tensor by tensor.

    `reordered`: the runs add in other orders from the first step on. `norms` of the gradients are for SGD.
    """
    with torch.device("meta"):
        trained = [name for name, p in job.model().named_parameters() if p.requires_grad]
    squares = [0.0, 0.0]
    for name in trained:
        expected, actual = (without_key_bias(name, each[name].detach().cpu().double()) for each in (theirs, mine))
        apart, allowed = norm(actual - expected), weight_error(job, expected, norms, reordered)
        assert apart <= allowed, f"{name}: {apart:.2e} apart, roundings come to {allowed:.2e}"
        squares = [squares[0] + apart**2, squares[1] + likely_error(job, expected, norms, reordered) ** 2]
    assert squares[0] <= squares[1], f"all: {squares[0] ** 0.5:.2e} apart, roundings come to {squares[1] ** 0.5:.2e}"


def same_training(mine: Result, plain: Result, job: Job, reordered: bool = False) -> None:
    """Asserts that two runs of `job` have the same losses, norms and weights but for roundings."""
    same_losses(mine.losses, plain.losses, job)
    same_norms(mine.norms, plain.norms, job)
    same_weights(mine.weights, plain.weights, job, plain.norms, reordered)
