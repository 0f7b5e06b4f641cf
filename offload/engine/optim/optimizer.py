"""The optimizer that users and learning-rate schedules hold: groups of parameters, and no state of its own."""

from __future__ import annotations

import math
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NoReturn, Protocol, overload

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.engine.optim.algorithms import RULES, Rule
from offload.engine.params.paged_parameter import place_of
from offload.errors import UsageError
from offload.notices import tell
from offload.sizes import count_of
from offload.swapper.modes import ADAM, TORCH

_OTHER_GROUPS = (
    "parameters cannot be added to the optimizer after offload.initialize, nor taken from it: give it all parameters "
    "that will ever train, and let requires_grad_(False) keep them as they are until they shall; add_param_group may "
    "then give them a group of their own"
)


class States(Protocol):
    """Reads and sets what there is of a parameter, which may be nothing; see `OptimizerStates`."""

    def read(self, parameter: nn.Parameter) -> dict[str, Any]: ...
    def check(self, parameter: nn.Parameter, state: Mapping[str, Any], number: int) -> None: ...
    def write(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None: ...


class Optimizer(torch.optim.Optimizer):
    """One of the rules of `rules.py`, whose moments live in the swap tiers.

    `param_groups` are read at each boundary, so schedules and users may change the numbers in them between steps.
    `step` is the engine's to call.
    """

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any], rule: Rule = RULES[ADAM]
    ) -> None:
        self._engine_step: Callable[[], None] | None = None
        self.rule = rule
        self.overflow = False
        """Whether the last boundary was not applied, since its gradient norm was not finite."""
        self.loss_scale = 1.0
        """By which the loss of the next backward is multiplied; other than 1 in fp16 alone."""
        self._taken: Set[int] = frozenset()
        """The parameters that an engine took over, by id."""
        super().__init__([dict(group) for group in groups], dict(defaults))
        self._engine_zero_grad: Callable[[], None] | None = None
        self._engine_regrouped: Callable[[], None] = lambda: None
        self.replaced: torch.optim.Optimizer | None = None
        """The optimizer of torch whose groups these are."""
        self.states: States | None = None
        """What an engine keeps of each parameter."""

    def attach(
        self,
        step: Callable[[], None],
        zero_grad: Callable[[], None],
        regrouped: Callable[[], None] = lambda: None,
        states: States | None = None,
    ) -> None:
        """Makes this the optimizer of an engine, which trains the parameters that the groups have now.

        Args:
            step: ends a step of the engine.
            zero_grad: drops the gradients since the last boundary.
            regrouped: is called after a group was added, and may refuse it.
            states: reads and sets the optimizer states of each parameter.
        """
        self._engine_step, self._engine_zero_grad, self._engine_regrouped = step, zero_grad, regrouped
        self.states = states
        self._taken = self.settings().keys()
        if self.replaced is not None:
            self._replace(self.replaced)

    def _replace(self, replaced: torch.optim.Optimizer) -> None:
        """Whoever steps the optimizer that was given, as a loop of torch does, steps this one."""
        replaced.state.clear()  # Adagrad has made its sums by now

        def step(_: torch.optim.Optimizer, closure: Any = None) -> None:
            self.step(closure)

        vars(step)["_wrapped_by_lr_sched"] = True  # a schedule over it asks for that
        replaced.__dict__["step"] = types.MethodType(step, replaced)
        replaced.__dict__["zero_grad"] = self.zero_grad

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Under an engine: give parameters that it trains a group of their own, out of those that had them.

        So what was frozen for a while can train on with other numbers. Raises `UsageError` for any other parameter, or
        where the schedule has no learning rate for another group; then nothing has changed.
        """
        if self._engine_step is None:
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise UsageError(f'a group of parameters is a dict with "params", got {type(param_group).__name__}')
        given = param_group["params"]
        moved = [given] if isinstance(given, torch.Tensor) else list(given)
        if {id(parameter) for parameter in moved} - self._taken:
            raise UsageError(_OTHER_GROUPS)
        before = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, parameters in before:
                group["params"] = [p for p in parameters if all(p is not other for other in moved)]
            group = (
                {key: before[0][0][key] for key in self.rule.keys if key in before[0][0]} | self.defaults | param_group
            )
            check_numbers([group], self.rule)
            super().add_param_group({**group, "params": moved})
            self._engine_regrouped()
        except BaseException:
            self.param_groups[:] = [group for group, _ in before]
            for group, parameters in before:
                group["params"] = parameters
            raise

    def record(self, overflow: bool, loss_scale: float) -> None:
        """Sets what users read of the last boundary: `overflow`, and the `loss_scale` of the next backward."""
        self.overflow, self.loss_scale = overflow, loss_scale

    def check_groups(self) -> None:
        """Raise `UsageError` where no step can be made with the groups, which a replaced optimizer shares."""
        if self.replaced is not None and self.replaced.param_groups is not self.param_groups:
            raise UsageError(
                "the optimizer that offload.initialize was given has other groups than the engine's by now, as "
                "load_state_dict gives it; load into engine.optimizer"
            )
        if self.settings().keys() != self._taken:
            raise UsageError(_OTHER_GROUPS)
        check_numbers(self.param_groups, self.rule)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with copies on the CPU of all that is kept of every parameter. Every rank calls it.

        For what fits into the RAM, one parameter after the other; `BudgetError` where one does not. Commits and
        `save_checkpoint` hold all of it without this.
        """
        found: dict[str, Any] = super().state_dict()
        if self.states is not None:
            states = [self.states.read(parameter) for parameter in self._numbered()]
            found["state"] = {number: state for number, state in enumerate(states) if state}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, of this optimizer or of torch's of the same kind; the groups stay the same objects.

        Raises `UsageError`, and nothing is changed, where it does not fit. Every rank calls it.
        """
        if self.states is None:
            super().load_state_dict(state_dict)
            return
        groups, states = _checked(state_dict, [len(group["params"]) for group in self.param_groups])
        check_numbers([{**mine, **theirs} for mine, theirs in zip(self.param_groups, groups, strict=True)], self.rule)
        parameters = self._numbered()
        numbers = [number for group in groups for number in group["params"]]
        if strangers := [number for number in states if number not in set(numbers)]:
            raise UsageError(
                f"load_state_dict expects states of parameters that a group has, by their numbers there, got "
                f"{count_of(len(strangers), 'state')} of others, the first is {strangers[0]!r}; give what state_dict() "
                f"gives, as it is"
            )
        work = [(each, states.get(number, {}), number) for each, number in zip(parameters, numbers, strict=True)]
        for parameter, state, number in work:
            self.states.check(parameter, state, number)
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        for parameter, state, _ in work:
            self.states.write(parameter, state)
        trained = [bool(state) for parameter, state, _ in work if parameter.requires_grad]
        if any(trained) and not all(trained):
            without = count_of(trained.count(False), "parameter")
            tell(
                f"load_state_dict: what was given has no state of {without}, of {len(trained)} that train: moments "
                f"begin at zero there"
            )

    def _numbered(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Any]) -> NoReturn: ...
    def step(self, closure: Any = None) -> None:
        """Apply the gradients of this boundary. Call `engine.step()`, which also counts micro-batches."""
        if closure is not None:
            raise UsageError("a closure is not supported: the gradients are in the engine")
        if self._engine_step is None:
            raise UsageError("this optimizer has no engine yet; offload.initialize gives it one")
        self._engine_step()
        if self.replaced is not None:
            vars(self.replaced)["_opt_called"] = True  # a schedule bound to it asks for that

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that were added since the last boundary."""
        if self._engine_zero_grad is not None:
            self._engine_zero_grad()

    def checksum(self, clip: float) -> int:
        """Of all groups' settings and the largest norm, to compare those of several ranks."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return zlib.crc32(repr([clip, *(sorted(group.items()) for group in groups)]).encode())

    def notices(self) -> tuple[str, ...]:
        """What a user should know of how it runs."""
        if self.rule.name != TORCH:
            return ()
        return (
            f"{self.rule.known_as} has no kernel here, at least with its options: its own code updates parameter by "
            f"parameter, on the CPU",
        )

    def values(self) -> list[dict[str, Any]]:
        """What may change between steps, of each group: floats, and a list of two for the betas."""
        return [{key: plain(group[key]) for key in self.rule.scheduled if key in group} for group in self.param_groups]

    def configured(self) -> list[dict[str, Any]]:
        """The same as it was before a schedule moved the learning rates, where torch has noted that."""
        return [
            {**values, "lr": plain(group.get("initial_lr", group["lr"]))} if "lr" in values else values
            for values, group in zip(self.values(), self.param_groups, strict=True)
        ]

    def settings(self) -> dict[int, Mapping[str, Any]]:
        """The group of each parameter, by the parameter's id."""
        return {id(parameter): group for group in self.param_groups for parameter in group["params"]}


def refuse_others() -> None:
    """From now on a step of an optimizer that holds an engine's parameters, and is not the engine's, is an error."""
    if not _refusing:
        _refusing.append(register_optimizer_step_pre_hook(_refuse))


_refusing: list[Any] = []
"""The handle of the hook of all optimizers of this process."""


def _refuse(optimizer: Any, *_: Any) -> None:
    if isinstance(optimizer, Optimizer):
        return
    for group in optimizer.param_groups:
        if any(place_of(parameter) is not None for parameter in group["params"]):
            raise UsageError(
                f"this {type(optimizer).__name__} holds parameters of a model under an engine, whose gradients are in "
                f"the engine, so its step would do nothing: give it to offload.initialize, call engine.step(); with "
                f"Accelerate, `from offload.hf import Accelerator` and prepare model and optimizer together"
            )


def _checked(state_dict: Any, sizes: Sequence[int]) -> tuple[list[dict[str, Any]], Mapping[int, Mapping[str, Any]]]:
    """Groups and states of a state dict. Raises `UsageError` where it is of other groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise UsageError(
            f'load_state_dict expects what state_dict() of an optimizer gives, a dict with "state" and "param_groups", '
            f"got {sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__}"
        )
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    if theirs != list(sizes):
        raise UsageError(f"the state is of groups of {theirs} parameters, this optimizer has groups of {list(sizes)}")
    return state_dict["param_groups"], state_dict["state"]


def check_numbers(groups: Iterable[Mapping[str, Any]], rule: Rule) -> None:
    """Raise `UsageError` where a group has no numbers to step with, or asks for more than its kernel does."""
    for number, group in enumerate(groups):
        for key in (key for key in rule.scheduled if key in group):
            value = group[key]
            items = list(value) if isinstance(value, list | tuple) else [value]
            numbers = [item for item in items if item is not None or rule.name != TORCH]  # some of torch have none
            if not all(_is_finite(item) for item in numbers) or (key == "betas" and len(items) < 2):
                expected = "two finite numbers" if key == "betas" else "a finite number"
                raise UsageError(f"{key} of group {number} is {value!r}, expected {expected}; nothing was changed")
        refused = rule.refused(group)
        if refused is not None:
            raise UsageError(
                f"group {number} has {refused}={group[refused]!r} now, which its kernel does not do; give it to the "
                f"optimizer before offload.initialize, which then takes another kernel, or runs it by torch"
            )


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError):
        return False


def merge_values(
    committed: Sequence[Mapping[str, Any]],
    then: Sequence[Mapping[str, Any]],
    now: Sequence[Mapping[str, Any]],
    scheduled: bool,
) -> list[dict[str, Any]]:
    """The groups' values of a resumed run: those `committed`, but for what is configured otherwise now than then.

    A learning rate that is `scheduled` is the schedule's, and as it was committed.
    """
    merged = []
    for values, old, new in zip(committed, then, now, strict=True):
        kept = {key: old[key] == new[key] or (scheduled and key == "lr") for key in new}
        group = {key: values[key] if kept[key] else new[key] for key in new}
        merged.append({key: tuple(value) if isinstance(value, list) else value for key, value in group.items()})
    return merged


def plain(value: Any) -> Any:
    """Numbers of a group, which may be tensors, as floats; several as a list of them."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if value is None else float(value)
