"""The optimizer that users and learning-rate schedules hold: parameter groups, without states of its own."""

from __future__ import annotations

import collections
import math
import types
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, overload

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.config import OptimizerBlock
from offload.engine.params import handle_of
from offload.errors import ConfigError, UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.layout.flat_layout import StateField
from offload.layout.optimizer_states import WITHOUT_KERNEL
from offload.notices import announce
from offload.schedules import set_values
from offload.sizes import count_of
from offload.swapper.memory.device import Device

if TYPE_CHECKING:
    from offload.distributed.agreement import Agreement
    from offload.engine.access import OptimizerStates
    from offload.engine.gradients import GradientAccumulator
    from offload.engine.shards import LocalShards
    from offload.engine.update import UpdateWorker
    from offload.engine.update_strategy import UnitUpdate, UpdateSetting, UpdateStrategy

# -- rules ---------------------------------------------------------------------------------------------


class SharedStep(NamedTuple):
    """An optimizer step of several ranks: what a rule may read to complete its updates."""

    number: int
    """Number of the step, from 1, without skipped ones."""
    groups: Sequence[dict[str, Any]]
    shards: LocalShards
    """Only read."""
    gradients: GradientAccumulator
    updater: UpdateWorker
    """Its tiles may serve as buffers."""
    agreement: Agreement


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """An update rule: all that an engine asks of an optimizer.

    Each rule has its file in `offload.optimizers`, and its row in `optimizers.registry`. Its row in
    `layout.modes.RULE_LAYOUTS` describes it to the layout of memory.
    """

    name: str
    """Name of the rule in the mode, which determines the states."""
    scheduled: tuple[str, ...]
    """Keys of a group's numbers that may change between steps (OneCycleLR moves the betas too)."""
    fixed: tuple[str, ...] = ()
    """Keys of a group's numbers that are constant."""
    flags: tuple[str, ...] = ()
    """Keys of a group that are True or False."""
    known_as: str = ""
    """Name of the optimizer, if it is not the capitalized name of the rule."""
    defaults: tuple[str, ...] = ()
    """Further keys of every group, such as options in words, that come from the optimizer's defaults."""
    mark: str = ""
    """Flag that decides which states the parameters of a group have; empty if all have the same."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a group that the rule reads."""
        return (*self.scheduled, *self.fixed, *self.flags)

    @property
    def required(self) -> tuple[str, ...]:
        """Keys of every group."""
        return (*self.defaults, *self.keys)

    # -- groups -------------------------------------------------------------------------------------

    def title(self, group: Mapping[str, Any]) -> str:
        """Returns the config's name of the optimizer of `group`."""
        return self.known_as or self.name.capitalize()

    def refused(self, group: Mapping[str, Any]) -> str | None:
        """Returns an option that the group asks for and the rule does not implement, or None.

        The rule is chosen at `initialize`, but users may set options on a group later.
        """
        return next((option for option in WITHOUT_KERNEL if group.get(option)), None)

    def is_valid(self, key: str, value: Any) -> bool:
        """Returns True if a group's entry is a finite number, or as many of them as the rule reads."""
        if not isinstance(value, list | tuple):
            return key != "betas" and is_finite(value)
        return key == "betas" and len(value) == 2 and all(map(is_finite, value))

    def plain(self, value: Any) -> Any:
        """Returns a group's number, which may be a tensor, as a float; several as a list of floats; None as None."""
        if isinstance(value, list | tuple):
            return [Rule.plain(self, item) for item in value]
        return None if value is None else float(value)

    # -- construction -------------------------------------------------------------------------------

    def settings(self, block: OptimizerBlock) -> dict[str, Any]:
        """Returns the numbers and flags that a config's block asks for, by their keys in a group."""
        return block.settings

    def configured(self, groups: Sequence[Mapping[str, Any]], block: OptimizerBlock, model: nn.Module) -> Optimizer:
        """Returns the optimizer that a config's block asks for.

        Raises `ConfigError` if the learning rate is missing, or the rule cannot step a parameter as the user asks.
        """
        if block.params.lr is None:
            raise no_rate()
        settings = self.settings(block)
        defaults = {"lr": block.params.lr, **{key: settings[key] for key in self.keys if key != "lr"}}
        return Optimizer(groups, defaults, self)

    def beside(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries that the rule reads in addition to torch's keys, for a group of a torch optimizer."""
        return {}

    def packed(self, names: Mapping[int, str]) -> dict[str, tuple[StateField, ...]]:
        """Returns the packed states of each parameter, by name; empty unless the rule's own code decides on them.

        `names` maps the ids of the trainable parameters to their names. Raises `ConfigError` if the rule's own code
        cannot run parameter by parameter.
        """
        return {}

    def facts(self, device: Device) -> dict[str, Any]:
        """Returns further facts that must be equal on all ranks, besides groups and config, by name."""
        return {}

    def notices(self) -> tuple[str, ...]:
        """Returns lines about the rule's way to run that a user should read."""
        return ()

    # -- steps --------------------------------------------------------------------------------------

    @abstractmethod
    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> Any:
        """Returns the arguments of one step of a parameter, which the rule's strategy reads while the update runs.

        The parameter is without values. `count` includes this step. `grad_scale` is the factor of the gradient: the
        clip coefficient over the loss scale.
        """

    def steps_whole(self, step: Any) -> bool:
        """Returns True if `step` needs the whole parameter, so that ranks that divide it step it together."""
        return False

    def keeps_gradients(self, groups: Sequence[Mapping[str, Any]], step: int) -> bool:
        """Returns True if ranks do not add up the gradients of a step, since its updates exchange other values.

        Asked only if each rank holds whole units. `step` is the number of the step, from 1, without skipped ones.
        """
        return False

    def complete(self, updates: list[UnitUpdate], step: SharedStep) -> list[UnitUpdate]:
        """Returns the updates, completed with data of other ranks. Collective: every rank updates the same units.

        Updates of this rank may lack segments that are on other ranks. No update is in flight.
        """
        return updates

    @abstractmethod
    def strategy(self, setting: UpdateSetting) -> UpdateStrategy:
        """Returns the strategy by which the update worker of an engine steps units."""


def no_rate() -> ConfigError:
    """Returns the error about a missing learning rate."""
    return ConfigError('the learning rate is "auto" or absent; give optimizer.params.lr a number')


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns numbers and flags of a group without its parameters. A tensor of one element becomes a number."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params"
    }


def is_finite(value: Any) -> bool:
    """Returns True if `value` is a finite number; False for objects that are no number."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


# -- numbers of groups ------------------------------------------------------------------------------


def check_numbers(groups: Iterable[Mapping[str, Any]], rule: Rule) -> None:
    """Checks the groups before a step reads them.

    Raises `UsageError` if a group lacks a key, or has a number that is not finite, or an option that its kernel lacks.
    """
    for number, group in enumerate(groups):
        for key in rule.required:
            if key not in group:
                raise UsageError(f"group {number} has no {key} any more; set it again; nothing was changed")
        # A NaN in a group would reach every weight of the group with the next update.
        for key in (key for key in (*rule.scheduled, *rule.fixed) if key in group):
            if not rule.is_valid(key, group[key]):
                expected = "two finite numbers" if key == "betas" else "a finite number"
                raise UsageError(f"{key} of group {number} is {group[key]!r}, expected {expected}; nothing was changed")
        refused = rule.refused(group)
        if refused is not None:
            raise UsageError(
                f"group {number} has {refused}={group[refused]!r} now, which its kernel does not support; set the "
                "option before offload.initialize, which then chooses another kernel or torch's own code"
            )


_SET_BY_SCHEDULES = {"lr", "betas", "momentum"}


def merge_values(
    committed: Sequence[Mapping[str, Any]],
    then: Sequence[Mapping[str, Any]],
    now: Sequence[Mapping[str, Any]],
    scheduled: bool,
    unscheduled: bool,
) -> list[dict[str, Any]]:
    """Returns the groups' values of a resumed run.

    The committed value of a key is kept if its configured value is the same in both runs, `then` and `now`. The new
    value is taken if the configured value has changed, or if the commit lacks the key because the value was None. If a
    run is `scheduled`, the learning rates always are the committed ones. If it is `unscheduled`, a schedule set values
    in the run that made the commit, and none does now: the committed values are a point on its curve, often near 0, so
    keys that schedules set take the new values.
    """
    merged = []
    for values, old, new in zip(committed, then, now, strict=True):
        unchanged = {key for key in old if key in new and (old[key] == new[key] or (scheduled and key == "lr"))}
        unchanged -= _SET_BY_SCHEDULES if unscheduled else set()
        group = {key: values[key] if key in unchanged and key in values else new[key] for key in new}
        merged.append({key: tuple(value) if isinstance(value, list) else value for key, value in group.items()})
    return merged


# -- optimizer -----------------------------------------------------------------------------------------


_OTHER_GROUPS = (
    "parameters cannot be added to the optimizer or removed from it after offload.initialize: give the optimizer all "
    "parameters that will ever train, and freeze with requires_grad_(False) those that train later; add_param_group "
    "may then move them to a group of their own"
)


class Optimizer(torch.optim.Optimizer):
    """Optimizer of an engine, whose states are stored in the tiers of the engine's memory.

    `param_groups` are read at each optimizer step, so schedules and users may change the numbers in them between steps.
    Call `engine.step()` in place of `step()`.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any], rule: Rule) -> None:
        """Makes an optimizer without an engine; `attach` gives it one."""
        self._engine_step: Callable[[], None] | None = None
        self.rule = rule
        self.overflow = False
        """True if the last optimizer step was skipped, because the norm of its gradient was not finite."""
        self._loss_scale = 1.0
        self._taken: Set[int] = frozenset()
        """Ids of the parameters that an engine trains."""
        self._marked: Set[int] = frozenset()
        """Ids of the parameters whose states are stored as the rule's mark asks."""
        # torch's constructor calls `add_param_group`, which reads `_engine_step`.
        super().__init__([dict(group) for group in groups], dict(defaults))
        self._engine_zero_grad: Callable[[], None] = lambda: None  # nothing has accumulated gradients yet
        self._engine_regrouped: Callable[[], None] = lambda: None
        self.replaced: torch.optim.Optimizer | None = None
        """The user's torch optimizer that shares these groups, or None."""
        self.states: OptimizerStates | None = None
        """Access to the engine's states of each parameter; None without an engine."""

    def attach(
        self,
        step: Callable[[], None],
        zero_grad: Callable[[], None],
        regrouped: Callable[[], None] = lambda: None,
        states: OptimizerStates | None = None,
    ) -> None:
        """Makes this the optimizer of an engine, which trains the parameters that the groups contain now.

        `regrouped` runs after a group was added, and may raise to refuse the group.
        """
        self._engine_step, self._engine_zero_grad, self._engine_regrouped = step, zero_grad, regrouped
        self.states = states
        self._taken = self.settings().keys()
        self.state = _StatesOfEngine()
        self._marked = self._marked_now()
        replaced = self.replaced
        if replaced is None:
            return
        # The user may still hold the torch optimizer that was passed, so its calls are redirected to this optimizer.
        # Its own states are dropped: Adagrad's constructor makes sums.
        replaced.state = _StatesOfEngine()

        def step_engine(_: torch.optim.Optimizer, closure: Any = None) -> None:
            self.step(closure)

        vars(step_engine)["_wrapped_by_lr_sched"] = True  # else a schedule warns that step() was replaced
        replaced.__dict__["step"] = types.MethodType(step_engine, replaced)
        replaced.__dict__["zero_grad"] = self.zero_grad
        # Its own methods would save a dict without states, and replace the list of groups that both share.
        replaced.__dict__["state_dict"] = self.state_dict
        replaced.__dict__["load_state_dict"] = self.load_state_dict

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Moves parameters of the engine into a new group, out of the groups that contained them.

        Parameters that were frozen for a while can thus train on with other numbers. If the call raises, nothing has
        changed. Before `attach` the call acts as torch's.

        Args:
            param_group: a dict with "params", parameters that the engine trains, and numbers; those that are missing
                are taken from the defaults, else from the first group.

        Raises:
            UsageError: a parameter is none of the engine's, or the schedule has no learning rate for another group.
        """
        if self._engine_step is None:
            super().add_param_group(param_group)
            return
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise UsageError(f'a group of parameters is a dict with "params", got {type(param_group).__name__}')
        parameters = param_group["params"]
        moved = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # Other parameters have no states in the store, whose layout is fixed.
        ids = {id(parameter) for parameter in moved}
        if ids - self._taken:
            raise UsageError(_OTHER_GROUPS)
        before = [(group, group["params"]) for group in self.param_groups]
        try:
            for group, parameters in before:
                group["params"] = [p for p in parameters if id(p) not in ids]
            if mark := self.rule.mark:  # without a mark the parameters stay what they are
                param_group = {mark: ids <= self._marked, **param_group}
            group = (
                {key: before[0][0][key] for key in self.rule.keys if key in before[0][0]} | self.defaults | param_group
            )
            check_numbers([group], self.rule)
            self._check_marks(ids & self._marked, ids if group.get(self.rule.mark) else set())
            super().add_param_group({**group, "params": moved})
            self._engine_regrouped()
        # Also after a Ctrl-C: a parameter that has left its group and is in no other yet would be lost.
        except BaseException:
            self.param_groups[:] = [group for group, _ in before]
            for group, parameters in before:
                group["params"] = parameters
            raise

    @property
    def loss_scale(self) -> float:
        """Factor of the loss of the next backward; other than 1 in fp16 only, whose block of the config chooses it."""
        return self._loss_scale

    @property
    def cur_scale(self) -> float:
        """DeepSpeed's name of `loss_scale`."""
        return self.loss_scale

    def record(self, overflow: bool, loss_scale: float) -> None:
        """Records, for users, facts about the last optimizer step; `overflow` means that it was skipped."""
        self.overflow, self._loss_scale = overflow, loss_scale

    def check_groups(self) -> None:
        """Checks that a step is possible with the groups, which a replaced optimizer shares.

        Raises `UsageError` if parameters were added or removed, a number is not finite, a group has an option that its
        kernel lacks, or the replaced optimizer has other groups.
        """
        # A schedule that holds the passed optimizer would act on groups that the engine does not read.
        if self.replaced is not None and self.replaced.param_groups is not self.param_groups:
            raise UsageError(
                "the optimizer that was passed to offload.initialize no longer has the groups of the engine: its list "
                "param_groups was replaced; change the groups in the list instead"
            )
        if self.settings().keys() != self._taken:
            raise UsageError(_OTHER_GROUPS)
        check_numbers(self.param_groups, self.rule)
        self._check_marks(self._marked, self._marked_now())

    def _marked_now(self) -> set[int]:
        marked = (group for group in self.param_groups if group.get(self.rule.mark))
        return {id(parameter) for group in marked for parameter in group["params"]}

    def _check_marks(self, then: Set[int], now: Set[int]) -> None:
        """Raises `UsageError` if the parameters that were marked `then` differ from those marked `now`."""
        if then != now:
            raise UsageError(
                f"the {self.rule.mark} of a group differs from that at offload.initialize for "
                f"{count_of(len(then ^ now), 'parameter')}, whose states are stored already; set it back, and mark "
                "parameters before offload.initialize"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict, with copies of all states on the CPU. Collective: every rank calls it.

        The states must fit into the RAM. Commits and `save_checkpoint` store all states without this call.

        Raises:
            BudgetError: the memory for a parameter's states is not free.
        """
        if self.states is None:
            return super().state_dict()
        # Hooks run after the states are added, so that they receive the states too.
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, collections.OrderedDict()
        try:
            content: dict[str, Any] = super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        states = [self.states.read(parameter) for parameter in self._numbered()]
        content["state"] = {number: state for number, state in enumerate(states) if state}
        for hook in hooks.values():
            replaced = hook(self, content)
            content = content if replaced is None else replaced
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer, or of a torch optimizer of its kind. Collective: every rank calls it.

        The group objects stay the same.

        Args:
            state_dict: groups and states, with the parameters' numbers as keys of the states.

        Raises:
            UsageError: the state dict does not fit; nothing has changed.
        """
        # Without an engine no states exist, so only torch's own bookkeeping is needed.
        if self.states is None:
            super().load_state_dict(state_dict)
            return
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, states = _checked(state_dict, [len(group["params"]) for group in self.param_groups])
        check_numbers([{**group, **loaded} for group, loaded in zip(self.param_groups, groups, strict=True)], self.rule)
        parameters = self._numbered()
        numbers = [number for group in groups for number in group["params"]]
        known = set(numbers)
        if strangers := [number for number in states if number not in known]:
            raise UsageError(
                "load_state_dict expects states of parameters by their numbers in the groups, got "
                f"{count_of(len(strangers), 'state')} of other numbers, the first is {strangers[0]!r}; pass the "
                "result of state_dict() unchanged"
            )
        work = [
            (parameter, states.get(number, {}), number) for parameter, number in zip(parameters, numbers, strict=True)
        ]
        # All states are checked before the first is written, so that an error leaves everything as it was.
        for parameter, state, number in work:
            self.states.check(parameter, state, number)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            set_values(group, {key: value for key, value in loaded.items() if key != "params"})
        for parameter, state, _ in work:
            self.states.write(parameter, state)
        trained = [bool(state) for parameter, state, _ in work if parameter.requires_grad]
        if any(trained) and not all(trained):
            without = count_of(trained.count(False), "parameter")
            announce(
                f"load_state_dict: the given dict lacks the state of {without}, of {len(trained)} that train; their "
                "moments begin at zero"
            )
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _numbered(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Any]) -> NoReturn: ...
    def step(self, closure: Any = None) -> None:
        """Applies the gradients of this optimizer step. Call `engine.step()` instead, which also counts micro-batches.

        Args:
            closure: must be None; the parameter exists for torch's signature.

        Raises:
            UsageError: a closure is given, or no engine has this optimizer.
        """
        if closure is not None:
            raise UsageError("a closure is not supported: the gradients are in the engine")
        if self._engine_step is None:
            raise UsageError("this optimizer has no engine yet; pass the optimizer to offload.initialize first")
        self._engine_step()
        # A schedule that was made for the torch optimizer reads this flag, and warns if no step preceded its own.
        if self.replaced is not None:
            vars(self.replaced)["_opt_called"] = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that were accumulated since the last optimizer step.

        Args:
            set_to_none: has no effect; the parameter exists for torch's signature.
        """
        self._engine_zero_grad()

    def checksum(self, clip: float) -> int:
        """Returns a checksum of the clip and of all groups' settings, for comparison between ranks."""
        groups = [numbers_of(group) for group in self.param_groups]
        return zlib.crc32(repr([clip, *(sorted(group.items()) for group in groups)]).encode())

    def values(self) -> list[dict[str, Any]]:
        """Returns the numbers of each group that may change between steps, also lists such as the betas."""
        rule = self.rule
        return [{key: rule.plain(group[key]) for key in rule.scheduled if key in group} for group in self.param_groups]

    def configured(self) -> list[dict[str, Any]]:
        """Returns `values`, with learning rates as they were before a schedule moved them, if torch has noted them."""
        return [
            # torch's schedules store the learning rate under "initial_lr" before they change it.
            {**values, "lr": self.rule.plain(group.get("initial_lr", group["lr"]))} if "lr" in values else values
            for values, group in zip(self.values(), self.param_groups, strict=True)
        ]

    def settings(self) -> dict[int, Mapping[str, Any]]:
        """Returns the group of each parameter, by the parameter's id."""
        # Keys are ids, because tensors compare element by element.
        return {id(parameter): group for group in self.param_groups for parameter in group["params"]}


class _StatesOfEngine(collections.defaultdict[torch.Tensor, Any]):
    """`state` of an optimizer that was passed: empty, and a look at a parameter's states is an error.

    torch's own would make an empty dict, so that code of the optimizer, or a logger, would go on without states.
    """

    def __missing__(self, parameter: Any) -> NoReturn:
        raise UsageError(
            "the states of this optimizer are in the engine, so its state contains none: read them by "
            "offload.safe_get_full_optimizer_state or engine.optimizer.state_dict()"
        )


def refuse_others() -> None:
    """Makes every step of a foreign optimizer that holds parameters of an engine an error, from now on."""
    # The hook is global to torch, and must be registered once for all engines of the process.
    if not _refusing:
        _refusing.append(register_optimizer_step_pre_hook(_refuse))


_refusing: list[Any] = []
"""Handle of the hook that sees all optimizers of this process; empty until it is registered."""


def _refuse(optimizer: Any, *_: Any) -> None:
    """Raises `UsageError` if `optimizer` is not an engine's but holds parameters of an engine's model."""
    if isinstance(optimizer, Optimizer):
        return
    for group in optimizer.param_groups:
        if any(handle_of(parameter) is not None for parameter in group["params"]):
            raise UsageError(
                f"this {type(optimizer).__name__} holds parameters of a model under an engine, whose gradients are in "
                "the engine, so its step would do nothing: pass the optimizer to offload.initialize and call "
                "engine.step(); with Accelerate, `from offload.hf import Accelerator` and prepare model and optimizer "
                "together"
            )


def _checked(state_dict: Any, sizes: Sequence[int]) -> tuple[list[dict[str, Any]], Mapping[int, Mapping[str, Any]]]:
    """Returns groups and states of a state dict.

    Raises `UsageError` if the state dict has other keys, or groups of other sizes than `sizes`.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise UsageError(
            'load_state_dict expects the result of an optimizer\'s state_dict(), a dict with "state" and '
            '"param_groups", got '
            f"{sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__}"
        )
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    if saved != list(sizes):
        raise UsageError(
            f"the state contains groups of {saved} parameters, this optimizer contains groups of {list(sizes)}"
        )
    return state_dict["param_groups"], state_dict["state"]


# -- group options -------------------------------------------------------------------------------------
#
# Entries of an optimizer's groups other than the numbers of its rule: flags, words, and a script's own counters.
#
# torch saves every entry of a group, and so does a commit. Nearly all are constants that the script sets anew, so a
# commit contains only entries that differ from their values at `initialize`, each with both values.


_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "base_momentum", "max_momentum")
"""Entries that torch's schedules make for themselves, from the learning rates of their start."""
_ADVICE = (
    "a commit holds None, booleans, numbers, strings, small tensors, and lists, tuples and dicts of them. Keep other "
    "objects outside of the optimizer's groups, and register those that change by engine.register_for_checkpointing"
)


_CONSTANT = (bool, int, float, str)
_ABSENT = object()


class GroupOptions:
    """Changes of a group's other entries since `initialize`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first = [self._of(group) for group in optimizer.param_groups]
        """The entries of each group as they were, as JSON; functions and classes as they are."""
        self._objects = [dict(group) for group in optimizer.param_groups]

    def _of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a group other than its rule's numbers."""
        return {key: _plain(key, group[key]) for key in group if self._has(key)}

    def _has(self, key: str) -> bool:
        return key not in ("params", "param_names", *self._optimizer.rule.scheduled, *_OF_SCHEDULES)

    def changes(self) -> list[dict[str, Any]]:
        """Returns the changed entries of each group, as JSON: the first value, if there was one, and the present one.

        Raises `UsageError` if an entry is no plain value.
        """
        changes: list[dict[str, Any]] = []
        for first, objects, group in zip(self._first, self._objects, self._optimizer.param_groups, strict=True):
            changes.append({})
            for key in group:
                # Runs at each step, so an object that cannot change is compared by identity.
                same = group[key] is objects.get(key) and (group[key] is None or isinstance(group[key], _CONSTANT))
                if same or not self._has(key) or (now := _plain(key, group[key])) == first.get(key, _ABSENT):
                    continue
                if _is_code(now) or _is_code(first.get(key)):
                    raise UsageError(
                        f"{key} of a group of the optimizer is another {type(now).__name__} now; {_ADVICE}"
                    )
                changes[-1][key] = [*([first[key]] if key in first else ()), now]
        return changes

    def apply(self, changes: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        """Gives the groups the entries of a commit, except those whose first values differ in this script."""
        for first, group, changed in zip(self._first, self._optimizer.param_groups, changes, strict=False):
            for key, (*former, value) in changed.items():
                if former == ([first[key]] if key in first else []):
                    group[key] = from_plain(value)

    def regrouped(self) -> None:
        """Adds a new group, whose present entries become its first values."""
        added = self._optimizer.param_groups[len(self._first) :]
        self._first += [self._of(group) for group in added]
        self._objects += [dict(group) for group in added]


def check_options(optimizer: Optimizer) -> None:
    """Raises `ConfigError` if a group contains an object that no commit could contain."""
    try:
        GroupOptions(optimizer)
    except UsageError as error:
        raise ConfigError(str(error)) from None


def _is_code(value: Any) -> bool:
    """Returns True for functions, classes and the like, which the script makes anew."""
    return callable(value) and not isinstance(value, torch.Tensor)


def _plain(key: str, value: Any) -> Any:
    """Returns an entry as JSON; functions, classes and the like as they are."""
    if _is_code(value):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    return to_plain(value, f"{key} of a group of the optimizer", _ADVICE, tensors=True)
