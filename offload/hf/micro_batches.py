"""Runs all micro-batches of a Trainer's step in one call of its engine, if the schedule is layer_major.

    transformers' loop                 here
    get_batch_samples ─► batches       remembers the batches
    training_step(first)  ─► loss      `Engine.accumulate` runs all batches and keeps the results
    training_step(second) ─► loss      returns the kept result; nothing runs
    …

Each micro-batch runs through the Trainer's own `training_step`. In it, `accelerator.backward` hands the loss over in
place of a backward. So the Trainer's own code still computes and divides the losses.

A user's `training_step` would run in parts: the one of the second micro-batch would begin before the first one ends.
The same holds for a user's `compute_loss`, which may keep values meanwhile. With either, micro-batches run one by one,
and a log line gives the reason. "layer_major" in the config means that `compute_loss` keeps no values. Then
micro-batches run one by one only if the source of `compute_loss` stores something on the Trainer.

A model that draws random numbers, for example for dropout, draws other numbers here than under the stock Trainer, since
micro-batches take turns. The choice of "auto" depends on the weights' tiers, but losses must not depend on these tiers.
So with "auto" the first step runs one by one, and if the model draws in it, all further steps do.
"""

from __future__ import annotations

import ast
import contextvars
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import Trainer

from offload.engine.engine import Engine
from offload.engine.snapshot import read_generators
from offload.notices import announce
from offload.provenance import is_of

_DRAWS = (
    "it draws random numbers, such as dropout's, and draws them so as the stock Trainer does. "
    '"schedule": "layer_major" in the "offload" block moves fewer bytes, and draws others'
)

_LOSSES: contextvars.ContextVar[list[torch.Tensor] | None] = contextvars.ContextVar("_LOSSES", default=None)


def losses_to_hand_over() -> list[torch.Tensor] | None:
    """Returns the list to which `accelerator.backward` appends the loss; None if it runs the backward itself."""
    return _LOSSES.get()


class StepAtOnce:
    """The step under way of one Trainer."""

    def __init__(self) -> None:
        self._batches: list[Any] = []
        """Micro-batches that run as one call, from the one whose `training_step` the loop calls next."""
        self._results: list[torch.Tensor] = []
        """Results of `training_step` for these micro-batches; empty before they have run."""
        self._draws: bool | None = None
        """True if a watched micro-batch has drawn random numbers; None before a micro-batch was watched."""
        self._watches = False
        """True during a step whose micro-batches are watched."""
        self._announced = False

    def fetched(self, trainer: Any, batches: Sequence[Any]) -> None:
        """Begins a step of these micro-batches, which the calls of `training_step` receive one by one."""
        if self._watches and self._draws is not None:
            # All ranks use one order, also if the model draws on one rank only.
            draws = torch.tensor([float(self._draws)], dtype=torch.float32, device=trainer.accelerator.device)
            self._draws = bool(trainer.accelerator.gather(draws).max() > 0)
        at_once = len(batches) > 1 and self._is_possible(trainer)
        self._watches = at_once and self._draws is None and _is_auto(trainer.accelerator.engine)
        self._batches = list(batches) if at_once and not self._watches else []
        self._results = []

    def result(self, trainer: Any, inputs: Any, step: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Returns the result of `training_step` for a micro-batch, after running all of the step if it is the first.

        `step` is the method of the Trainer, which runs forward and backward of a micro-batch.
        """
        batches = self._batches
        if not batches or inputs is not batches[0]:
            return self._watched(trainer.accelerator.engine, inputs, step) if self._watches else step(inputs)
        if not self._results:
            self._results = _run(trainer.accelerator.engine, batches, step)
        self._batches = batches[1:]
        # As `accelerator.backward` would do: the loop has set whether this micro-batch is the last of the step.
        trainer.accelerator.engine.set_gradient_accumulation_boundary(bool(trainer.accelerator.sync_gradients))
        return self._results.pop(0)

    def _is_possible(self, trainer: Any) -> bool:
        """Returns True if the engine takes all micro-batches at once, and no code of the Trainer forbids it."""
        engine: Engine | None = trainer.accelerator.engine
        if engine is None or engine.schedule != "layer_major":
            return False
        reason = _DRAWS if self._draws else _own_code(trainer)
        if reason is not None and not self._announced:
            self._announced = True
            announce(f"micro-batches pass through the model one after the other: {reason}")
        return reason is None

    def _watched(self, engine: Engine, inputs: Any, step: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        before = read_generators(engine.device)
        result = step(inputs)
        after = read_generators(engine.device)
        self._draws = bool(self._draws) or any(not torch.equal(after[name], before[name]) for name in before)
        return result


def _is_auto(engine: Engine) -> bool:
    return bool(engine.config["offload"]["schedule"] == "auto")


def _run(engine: Engine, batches: Sequence[Any], step: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
    """Runs forward and backward of all micro-batches, and returns the result of `step` for each."""
    results: dict[int, torch.Tensor] = {}

    def loss_of(number: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        token = _LOSSES.set(losses)
        try:
            results[number] = step(batches[number])
        finally:
            _LOSSES.reset(token)
        (loss,) = losses
        return loss

    # The loop calls the optimizer's step after these micro-batches, even if there are fewer than the config sets, as at
    # the end of an epoch.
    engine.set_gradient_accumulation_boundary(True)
    engine.accumulate(range(len(batches)), loss_of, scale_wrt_gas=False)
    return [results[number] for number in range(len(batches))]


def own_method(trainer: Any, name: str) -> Any:
    """Returns the function that a Trainer runs in place of transformers' own; None if it runs transformers'."""
    function = _methods(trainer, name)[0]
    return None if function is vars(Trainer)[name] and is_of(function, "transformers") else function


def _methods(trainer: Any, name: str) -> list[Any]:
    """Returns the functions that a call of a Trainer's method may run, in method order, without this package's."""
    of_classes = [vars(kind)[name] for kind in type(trainer).__mro__ if name in vars(kind)]
    own = [vars(trainer)[name]] if name in vars(trainer) else []
    return own + [function for function in of_classes if not is_of(function, "offload.hf")]


def _own_code(trainer: Any) -> str | None:
    """Returns a clause that names code of the Trainer which must not run in parts; None if there is no such code."""
    step = own_method(trainer, "training_step")
    # trl's `training_step` only enters a context, which does nothing unless the arguments enable activation offload.
    plain = _is_sft(step, "training_step") and isinstance(trainer.maybe_activation_offload_context, nullcontext)
    if step is not None and not plain:
        return f"{_class_of(step)} has a training_step of its own, which would run in parts"
    losses = [function for function in _methods(trainer, "compute_loss") if not _is_known(function)]
    if losses and _is_auto(trainer.accelerator.engine):
        return (
            f"{losses[0].__qualname__} is code of its own, which may keep values of one micro-batch while others run. "
            '"schedule": "layer_major" in the "offload" block says that it keeps none'
        )
    for function in losses:
        if (stored := _stored_in(function)) is not None:
            return f"{function.__qualname__} {stored}, where another micro-batch may replace it before it is read"
    return None


def _class_of(function: Any) -> str:
    return str(function.__qualname__).rpartition(".")[0].removesuffix(".<locals>").rpartition(".")[2]


def _is_known(function: Any) -> bool:
    """Returns True for a `compute_loss` of transformers, or of trl, that keeps nothing of a micro-batch."""
    plain = function is vars(Trainer)["compute_loss"] and is_of(function, "transformers")
    return plain or _is_sft(function, "compute_loss")


def _is_sft(function: Any, name: str) -> bool:
    kind = getattr(sys.modules.get("trl"), "SFTTrainer", None)  # a script that uses it has imported it
    return kind is not None and function is vars(kind).get(name) and is_of(function, "trl")


def _stored_in(function: Callable[..., Any]) -> str | None:
    """Returns a clause on the values that a method's source stores on its object; None if it stores none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # no source: an interactive session, a compiled module
        return "has no source that can be read, and may store values on the Trainer"
    for node in ast.walk(tree):
        # A sum, `self.tokens += n`, is complete before another micro-batch runs.
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, _ASSIGNS) else []
        for part in (part for target in targets for part in ast.walk(target)):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                return f"stores self.{part.attr}"
    return None


_ASSIGNS = (ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor)
"""Nodes that assign to their `target`."""
