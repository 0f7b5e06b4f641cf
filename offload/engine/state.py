"""Takes and restores the state of training, without weights and moments, as the `Snapshot` of a commit.

A commit of step n must contain the state at the first engine call after step n. Before that call the loop may step a
schedule or change `client_state`, and such a change belongs to step n. The loop may also load the next batch before
that call, so the states of the random generators before the load are stored in addition (`before_next`).

Threads. All methods run on the thread that runs the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from offload.config import Config, Fp16
from offload.engine.data import Loader
from offload.engine.micro_batches import PassSchedule
from offload.engine.optimizer import GroupOptions, Optimizer, merge_values
from offload.engine.saved_state import ModuleEntries
from offload.engine.snapshot import (
    DECOUPLED,
    SAMPLES_OF_STEP,
    SIZES_OF_BATCH,
    Snapshot,
    is_held,
    persistent_buffers,
    read_generators,
    scheduler_state,
    write_buffers,
    write_generators,
)
from offload.errors import OffloadError, StoreError, UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import DeviceNeed
from offload.schedules import Schedule, set_values
from offload.sizes import count_of

# -- registered objects --------------------------------------------------------------------------------
#
# Each commit contains the states of the objects that the user has registered, in the order of registration.
#
#     a new run        objects may be registered at any time; each commit after that contains them
#     a resumed run    as many objects as the commit contains must be registered before the first step, of the same
#                      types and in the same order; each receives its state at once. More may follow after that step
#     a load           each registered object receives its state at once. Further objects of the checkpoint must be
#                      registered as in a resumed run; objects that the checkpoint lacks stay as they are
#
# A loader's state is taken at the end of the step, since the loop draws the next batch before it calls the engine
# again. The states of all other objects are taken at the first call after the step.


_ADVICE = (
    "a commit holds None, booleans, numbers, strings, and lists, tuples and dicts of them. Let state_dict() return "
    "such values, and tensors of the CPU of at most 64 KiB; larger ones can be buffers of the model, which each commit "
    "holds"
)


class RegisteredObjects:
    """Objects of `engine.register_for_checkpointing`."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._waiting: list[Mapping[str, Any]] = []
        """States in the resumed commit or checkpoint that wait for the registration of their objects."""
        self._positions: dict[int, Mapping[str, Any]] = {}
        """States of those objects that are loaders, at the end of the step. The keys are numbers of objects."""
        # True if objects may be registered that have no state in the commit.
        self._may_grow = True

    def check_fits(self, states: Sequence[Mapping[str, Any]], what: str) -> None:
        """Raises `StoreError` if the registered objects are not of the types of the first `states` of a checkpoint."""
        for position, (thing, saved) in enumerate(zip(self._objects, states, strict=False), 1):
            if saved["type"] != type(thing).__name__:
                raise StoreError(
                    f"{what} contains the registered objects {_names(states)}; number {position} of this engine is a "
                    f"{type(thing).__name__}: register the same objects in the same order, or load the weights alone "
                    "(load_module_only=True)"
                )

    def restore(self, states: Sequence[Mapping[str, Any]], may_grow: bool) -> int:
        """Gives each object its state. Returns the number of objects without a state, which stay as they are.

        States without an object wait for its registration. If `may_grow`, objects without a state may be registered
        before the next step.
        """
        for thing, saved in zip(self._objects, states, strict=False):
            thing.load_state_dict(from_plain(saved["state"]))
        # Objects without a state show that the user knows of more objects than the checkpoint, so others may follow.
        self._keep_positions()
        more = max(0, len(self._objects) - len(states))
        self._waiting, self._may_grow = list(states[len(self._objects) :]), may_grow or more > 0
        return more

    @property
    def complete(self) -> bool:
        """True if all objects of the resumed run or loaded checkpoint are registered."""
        return not self._waiting

    @property
    def schedules(self) -> bool:
        """True if any object can be stepped, as a learning-rate schedule can."""
        # Any object with `step` counts: schedules have no base class in common.
        return any(hasattr(thing, "step") for thing in self._objects)

    def add(self, objects: Sequence[Any]) -> None:
        """Registers `objects`, and on a resumed run loads their states.

        Raises `UsageError` if one of `objects` cannot be registered. After this and any error of an object's own
        `load_state_dict` none of them is registered, so that the same call may be repeated.
        """
        for position, thing in enumerate(objects, len(self._objects) + 1):
            missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(thing, name, None))]
            if missing:
                raise UsageError(
                    f"register_for_checkpointing expects objects with state_dict() and load_state_dict(), got a "
                    f"{type(thing).__name__} without {' and '.join(missing)}; put single values into "
                    f"engine.client_state"
                )
            # A bad state raises here, in a call that the user can change, and not at the first commit.
            _state(thing, position)
        # Before the first step of a resumed run an extra object is more likely a changed order than a new object.
        if not self._may_grow and len(objects) > len(self._waiting):
            raise UsageError(
                "the loaded commit or checkpoint contains "
                f"{count_of(len(self._objects) + len(self._waiting), 'registered object')}, and this would be number "
                f"{len(self._objects) + len(self._waiting) + 1}: register the same objects as in that run. A new "
                "object can be registered after the first step()"
            )
        for thing, saved in zip(objects, self._waiting, strict=False):
            if saved["type"] != type(thing).__name__:
                raise UsageError(
                    f"the loaded commit or checkpoint contains {_names(self._waiting)} next, got a "
                    f"{type(thing).__name__}: register the same objects in the same order"
                )
        # All checks have passed; only `load_state_dict` of an object can fail, and nothing is registered before that.
        for thing, saved in zip(objects, self._waiting, strict=False):
            thing.load_state_dict(from_plain(saved["state"]))
        self._waiting = self._waiting[len(objects) :]
        self._objects.extend(objects)
        self._keep_positions()

    def check_complete(self) -> None:
        """Raises `UsageError` if the next step would lose the state of an object that is not registered."""
        if self._waiting:
            raise UsageError(
                "the loaded commit or checkpoint contains "
                f"{count_of(len(self._objects) + len(self._waiting), 'registered object')}, of which "
                f"{count_of(len(self._objects), 'is', 'are')} registered: {_names(self._waiting)} would be lost with "
                "this step. Call engine.register_for_checkpointing with all of them before the step"
            )

    def stepped(self) -> None:
        """Takes the positions of loaders at a step's end, and allows new objects, also in a resumed run."""
        self._may_grow = True
        self._keep_positions()

    def states(self) -> list[Mapping[str, Any]]:
        """Returns the states for the next commit as JSON, including those whose objects are not registered yet."""
        numbered = enumerate(self._objects, 1)
        return [self._positions.get(number) or _state(thing, number) for number, thing in numbered] + self._waiting

    def _keep_positions(self) -> None:
        numbered = enumerate(self._objects, 1)
        self._positions = {number: _state(thing, number) for number, thing in numbered if hasattr(thing, "__iter__")}


def _state(thing: Any, number: int) -> Mapping[str, Any]:
    what = f"registered object {number}, {type(thing).__name__}: its state_dict()"
    return {"type": type(thing).__name__, "state": to_plain(thing.state_dict(), what, _ADVICE, tensors=True)}


def _names(states: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"a {state['type']}" for state in states)


# -- loss scale ----------------------------------------------------------------------------------------
#
# The loss scale of fp16 keeps small gradients above zero, and large gradients below infinity.


_FACTOR = 2.0
"""Factor by which the scale grows or shrinks."""


class LossScaler:
    """The loss scale. It is fixed, or, if the config sets 0, adapted during training as in Micikevicius et al. 2018.

    A gradient that is not finite is an overflow, and its step is skipped. The first `hysteresis` - 1 overflows keep the
    scale. Each further overflow halves the scale, down to `min_loss_scale`. After `loss_scale_window` steps in a row
    without overflow, the scale is doubled and the hysteresis restored. With `consecutive_hysteresis`, every step
    without overflow restores the hysteresis.
    """

    def __init__(self, config: Fp16) -> None:
        self._config = config
        self.dynamic = config.loss_scale == 0
        self.scale = 2.0**config.initial_scale_power if self.dynamic else config.loss_scale
        self._steps = 0
        self._overflowed_at = -1
        self._patience = config.hysteresis
        self._multiplied = 0
        """Number of losses that were multiplied and whose backward has not begun."""

    def multiply(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns `loss` times the scale, in fp32, for one backward."""
        self._multiplied += 1
        return loss.float() * self.scale

    def begin_backward(self) -> None:
        """Raises `UsageError` if no loss was multiplied for the backward that begins."""
        if not self._multiplied:
            raise UsageError(
                f"in fp16 the loss must be multiplied by the loss scale, {self.scale:g} now: call "
                "engine.backward(loss), or engine.scale(loss).backward(), for each backward; in a loop of Accelerate, "
                "use offload.hf.Accelerator"
            )
        self._multiplied -= 1

    def forget_multiplied(self) -> None:
        """Forgets multiplied losses at the end of a step, because their backwards will not come."""
        self._multiplied = 0

    @property
    def kind(self) -> str | float:
        """The fixed scale, or "dynamic"; empty without a loss scale."""
        return "dynamic" if self.dynamic else self.scale

    @property
    def refusal(self) -> str:
        """Advice if the next overflow would need a scale below the smallest; empty if the step may be skipped."""
        if not (self.dynamic and self._patience == 1 and self.scale <= self._config.min_loss_scale):
            return ""
        return (
            f"The loss scale is {self.scale:g} already, its minimum: lower the learning rate, look at the batch, or "
            "train in bf16"
        )

    def stepped(self, overflow: bool) -> None:
        """Adapts the scale after a step, which was skipped if the gradient was an `overflow`."""
        config = self._config
        if not self.dynamic:
            return
        if overflow:
            self._overflowed_at = self._steps
            if self._patience > 1:
                self._patience -= 1
            else:
                self.scale = max(self.scale / _FACTOR, config.min_loss_scale)
        else:
            window_is_over = (self._steps - self._overflowed_at) % config.loss_scale_window == 0
            if config.consecutive_hysteresis or window_is_over:
                self._patience = config.hysteresis
            if window_is_over:
                self.scale *= _FACTOR
        self._steps += 1

    def state(self) -> dict[str, Any] | None:
        """Returns the state as JSON, for `restore`; None without a loss scale."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "steps": self._steps,
            "overflowed_at": self._overflowed_at,
            "patience": self._patience,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`. A fixed scale stays as configured; a dynamic one ignores the state of a fixed one."""
        if self.dynamic and state.get("dynamic", True):  # older states lack this key
            # The lower bound may have been raised since.
            self.scale, self._steps = max(state["scale"], self._config.min_loss_scale), state["steps"]
            self._overflowed_at, self._patience = state["overflowed_at"], state["patience"]


class NoLossScaler(LossScaler):
    """The loss scaler of dtypes other than fp16. It does not change losses."""

    kind = ""
    refusal = ""

    def __init__(self, skips: bool) -> None:
        """Stores `skips`: True if a step whose norm is inf or NaN is skipped, False if it raises."""
        self.scale = 1.0
        if not skips:
            self.refusal = (
                'Lower the learning rate, look at the batch, or set "on_nonfinite": "skip" in the "offload" block'
            )

    def multiply(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def begin_backward(self) -> None:
        return

    def stepped(self, overflow: bool) -> None:
        return

    def state(self) -> None:
        return None

    def restore(self, state: dict[str, Any]) -> None:
        return


# -- step settings -------------------------------------------------------------------------------------
#
# An optimizer step has settings. `set_train_batch_size` may change them, and they may differ between two starts.


_LABELS = {"lr": "learning rates", "weight_decay": "weight decay"}
_WAITING = "dtype of complete gradients"
_OF_SCHEDULE = "the schedule's "
"""Prefix of the names of settings that are parameters of the schedule."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The config's settings of an optimizer step.

    `micro_batch_size` counts samples of one rank, `accumulation` the micro-batches of a step, and `total_batch_size`
    the samples of a step over all ranks.
    """

    micro_batch_size: int
    accumulation: int
    total_batch_size: int
    clip: float
    """Largest global norm of the gradient; 0 does not clip."""
    seed: int
    overlap: bool
    """True if updates run during the next forward (`Placement.overlaps_updates`)."""
    config: Config
    """The config, for all other settings."""
    gradients: torch.dtype
    """Dtype of a step's gradients, once they are complete."""
    scaler: LossScaler
    device_need: DeviceNeed


def resized(settings: StepSettings, total: int, ranks: int, gradients: torch.dtype | None) -> StepSettings:
    """Returns the settings for steps of `total` samples over all ranks.

    `gradients` is the dtype that the engine chose for the gradients; None if the config names one. Raises `UsageError`
    if `total` is no multiple of a micro-batch of all ranks, or several micro-batches would accumulate in 16 bits.
    """
    samples = settings.micro_batch_size * ranks
    if isinstance(total, bool) or not isinstance(total, int) or total < 1 or total % samples:
        raise UsageError(
            f"train_batch_size must be a multiple of train_micro_batch_size_per_gpu * ranks, which is "
            f"{settings.micro_batch_size} * {ranks}, got {total!r}"
        )
    accumulation = total // samples
    if accumulation > 1 and gradients is not None and gradients.itemsize < 4:
        raise UsageError(
            f"a step of {total} samples contains {accumulation} micro-batches, but gradients are kept in {gradients}, "
            "because the config has one micro-batch a step: to add up several, set data_types.grad_accum_dtype to fp32"
        )
    return replace(settings, accumulation=accumulation, total_batch_size=total)


def named_settings(
    settings: StepSettings, optimizer: Optimizer, configured: Sequence[Mapping[str, Any]], lr_scheduler: Any
) -> dict[str, Any]:
    """Returns the settings that may differ in a resumed run, each under its name in notices.

    `configured` are the values of the optimizer's groups as `initialize` found them; see `Optimizer.configured`.
    """
    parameters = lr_scheduler.parameters if isinstance(lr_scheduler, Schedule) else {}
    groups, config = optimizer.param_groups, settings.config
    return {
        "seed": settings.seed,
        "micro-batch size": settings.micro_batch_size,
        "accumulation": settings.accumulation,
        SAMPLES_OF_STEP: settings.total_batch_size,
        "gradient clipping": settings.clip,
        "autocast": config.torch_autocast.dtype if config.torch_autocast.enabled else "off",
        "dtype of sums of gradients": config.data_types.grad_accum_dtype or "auto",
        _WAITING: str(settings.gradients).removeprefix("torch."),
        **({"loss scale": settings.scaler.kind} if settings.scaler.kind else {}),
        "optimizer": optimizer.rule.known_as or optimizer.rule.name,
        **{_LABELS.get(key, key): [group.get(key) for group in configured] for key in optimizer.rule.scheduled},
        **({DECOUPLED: [group["decoupled"] for group in groups]} if "decoupled" in groups[0] else {}),
        "schedule": None if lr_scheduler is None else type(lr_scheduler).__name__,
        **{_OF_SCHEDULE + name: value for name, value in parameters.items()},
    }


def job_of(model: nn.Module, settings: StepSettings, optimizer: Optimizer, lr_scheduler: Any) -> dict[str, Any]:
    """Returns plain JSON that distinguishes this job from other jobs whose runs have the same layout.

    Call it before the first step, while settings and groups are still as `initialize` has made them.
    """
    # A transformers model includes its folder: a model of the same shape from another folder has other weights.
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    named = named_settings(settings, optimizer, optimizer.configured(), lr_scheduler)
    job = {"model": f"{type(model).__name__} {source}".strip(), **named}
    return cast(dict[str, Any], json.loads(json.dumps(job, default=str)))


class Differences:
    """Settings that differ between a commit and the run that resumes from it. Each name has both values."""

    def __init__(
        self,
        then: Mapping[str, Any],
        now: Mapping[str, Any],
        scheduled: bool = False,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Compares the settings that both mappings, results of `named_settings`, contain.

        `scheduled` is True if a restored schedule continues the learning rates, whatever the config contains. `groups`
        are the optimizer's groups, which a schedule outside the engine may have marked as its own.
        """
        # Earlier versions did not round the sum of several micro-batches, unless it was made in 16 bits.
        if _WAITING in now and then.get("dtype of sums of gradients") == "auto" and then.get("accumulation", 1) > 1:
            then = {_WAITING: "float32", **then}
        self.changed = {name: (then[name], now[name]) for name in now if name in then and then[name] != now[name]}
        self._scheduled = scheduled
        # torch's schedules store a group's first rate under "initial_lr". Only the loop knows if it restores such a
        # schedule.
        self._by_loop = not scheduled and now.get("schedule") is None and any("initial_lr" in group for group in groups)
        self._samples = [
            math.prod(settings.get(name, 1) for name in SIZES_OF_BATCH) for settings in ({**now, **then}, now)
        ]
        # Checkpoints of earlier versions, and of other programs, lack the total.
        self._has_total = SAMPLES_OF_STEP in then and SAMPLES_OF_STEP in now
        self._then, self._now = then, now

    def __bool__(self) -> bool:
        """Returns True if any setting differs."""
        return bool(self.changed)

    def __str__(self) -> str:
        """Returns all differences in words, each with both values."""
        return ", ".join(f"{name} {old} is now {new}{self._remark(name)}" for name, (old, new) in self.changed.items())

    @property
    def _divides_otherwise(self) -> bool:
        """True if a step has as many samples as before, and only their division into micro-batches has changed."""
        counts = {name for name in self.changed if not self._remark(name)} <= set(SIZES_OF_BATCH)
        return counts and self._has_total and SAMPLES_OF_STEP not in self.changed

    @property
    def _ranks(self) -> str:
        """Words for the number of ranks that the former values need; empty if it equals the present number."""
        if not self._has_total or not all(
            name in settings for name in SIZES_OF_BATCH for settings in (self._then, self._now)
        ):
            return ""
        then, now = (
            settings[SAMPLES_OF_STEP] // math.prod(settings[name] for name in SIZES_OF_BATCH)
            for settings in (self._then, self._now)
        )
        return "" if then == now else f", on {count_of(then, 'rank')}"

    def consequences(self) -> str:
        """Returns words for the consequences for the steps of a resumed run. The text is never empty."""
        consequences = []
        if not self._has_total and self._samples[0] != self._samples[1]:
            consequences.append(f"a step has {self._samples[1]} samples a rank in place of {self._samples[0]}")
        if "schedule" in self.changed and self.changed["schedule"][1] is not None:
            consequences.append(f"{self.changed['schedule'][1]} begins at its start")
        elif "schedule" in self.changed:
            consequences.append("without a schedule the optimizer's own learning rates count")
        if self._by_loop and all(self._remark(name) for name in self.changed):
            consequences.append(
                "the schedule of the loop makes the learning rates: those that the run would have had where the loop "
                "restores it, as the Trainer does, and the present ones where it begins anew"
            )
        elif all(self._remark(name) for name in self.changed):
            consequences.append(
                "the steps are those that the run would have made; the present rate would count without the schedule "
                "(offload train: --schedule constant), or in a new run of the weights that offload export writes"
            )
        elif self._divides_otherwise:
            consequences.append(
                f"a step has {self._now[SAMPLES_OF_STEP]} samples as before, in other micro-batches: where each sample "
                "weighs as much as any other, and without dropout, losses and weights differ by rounding alone from "
                "those that the run would have had"
            )
        else:
            but = " but for the learning rates" if any(self._remark(name) for name in self.changed) else ""
            consequences.append(
                f"the steps from here on take the present values{but}, so losses and weights are not those that the "
                f"run would have had; the former values give those{self._ranks}"
            )
        return "; ".join(consequences)

    def _remark(self, name: str) -> str:
        """Returns in brackets the reason why a setting has no effect; an empty text if the setting has an effect."""
        if name != _LABELS["lr"] or not (self._scheduled or self._by_loop):
            return ""
        return " (set by the schedule of the loop)" if self._by_loop else " (a schedule continues from the former)"


# -- training state ------------------------------------------------------------------------------------


_BEFORE_NEXT = "before_next."
"""Prefix of a generator's name in a blob, for the state before the next batch was loaded, if that differs.

If user code loads the batches, the state at the end of the step is stored instead.
"""


class TrainingState:
    """Counters, schedule, loader, random generators, buffers, and objects of the user."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        optimizer: Optimizer,
        lr_scheduler: Any,
        loader: Loader | None,
        settings: StepSettings,
        layouts: Sequence[UnitLayout],
        commits: bool,
    ) -> None:
        self._module, self.device, self.optimizer, self.settings = module, device, optimizer, settings
        self.entries = ModuleEntries(module, commits)
        self.commits = commits
        self.scaler = settings.scaler
        self.lr_scheduler, self.loader = lr_scheduler, loader
        self.global_steps, self.skipped_steps, self.micro_steps, self.global_samples = 0, 0, 0, 0
        """Counters, described at the engine's properties of the same names."""
        self._micro_steps = 0
        """Micro-steps at the last optimizer step. No commit contains gradients of later micro-batches."""
        self._names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.parameter_steps = [[0] * len(layout.segments) for layout in layouts]
        """Number of updates of each parameter, by unit."""
        self.client_state: dict[str, Any] = {}
        self.registered = RegisteredObjects()
        self.pass_schedule = PassSchedule()
        """The order of micro-batches. The engine, which builds its schedule later, sets it."""
        self._generators: Mapping[str, torch.Tensor] | None = None
        """States of the generators to restore at the next engine call."""
        self._before_next: Mapping[str, torch.Tensor] | None = None
        """States that `restore_generators` restores; None in a new run, and from the first step on."""
        self._at_end: Mapping[str, torch.Tensor] | None = None
        """States at the end of the last step, if user code loads the batches."""
        self.after_step: Snapshot | None = None
        """Content of a commit of the last step: the state at the first engine call after the step.

        None until that call, or in a run without commits.
        """
        self.after_step_is_due = False  # True from a step to the next engine call, if the run makes commits
        self.edited = False
        """True if the user has set weights or states since the last step or commit."""
        self._configured = optimizer.configured()
        self._options = GroupOptions(optimizer)
        self.job = job_of(module, settings, optimizer, lr_scheduler) if commits else {}
        """The job of this run, for the note of its end."""
        self._saved_step: int | None = 0
        """The step that a start may replace without a loss; None if edits or an earlier run exist in no other files."""
        self._due: Mapping[str, Any] | None = None
        """Facts of the resumed run until `put_values` has given their values to the groups; None afterwards."""
        self._schedule_changed = False
        """True if the schedule continues with other parameters than in the resumed run."""
        self._data = None if loader is None else loader.where()
        """Position of the loader at the last optimizer step."""

    @property
    def loss_scale(self) -> float:
        """Factor of the loss of the next backward; 1 except in fp16."""
        return self.scaler.scale

    def take(self) -> Snapshot:
        """Returns the present state, without weights and moments."""
        facts = {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self._micro_steps,
            "global_samples": self.global_samples,
            "parameter_steps": self.parameter_steps,
            "scheduler": scheduler_state(self.lr_scheduler),
            "loss_scale": self.scaler.state(),
            **self.of_the_user(),
            "data": self._data,
            # Until `put_values` the groups do not have the resumed values yet, but a commit must contain them.
            "groups": self.optimizer.values() if self._due is None else self._due["groups"],
            "configured": self._configured if self._due is None else self._due["configured"],
            "settings": self._settings(),
            **self._members(),
        }
        # Groups need the fact `options` only if their entries have changed since `initialize`.
        changes = self._options.changes() if self._due is None else self._due.get("options", ())
        if any(changes):
            facts["options"] = changes
        if self.pass_schedule.allows_turns is not None:
            facts["turns"] = self.pass_schedule.allows_turns
        generators = read_generators(self.device)
        before = self._at_end if self.loader is None else self.loader.before_next
        if before is not None:
            generators |= {
                _BEFORE_NEXT + name: state
                for name, state in before.items()
                if name not in generators or not torch.equal(state, generators[name])
            }
        # update thread: writes the buffers with the commit, while a forward may change them. So it receives clones.
        buffers = {
            name: buffer.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, buffer in persistent_buffers(self._module).items()
        }
        return Snapshot(facts, generators, buffers, self.entries.take())

    def notices(self) -> list[str]:
        """Returns notices for the start of a run, about state that no commit will contain."""
        lost = [f"no checkpoint of this run can be saved: {self.entries.problem}"] if self.entries.problem else []
        if not self.commits or self.lr_scheduler is None or is_held(self.lr_scheduler):
            return lost
        return [
            *lost,
            f"the schedule {type(self.lr_scheduler).__name__} has no state_dict() and load_state_dict(), so commits "
            "do not contain its position, and a resumed run starts the schedule anew. Add both methods, or step the "
            "schedule engine.global_steps times after initialize",
        ]

    def where_data_goes_on(self) -> str:
        """Returns words for the loader's position in a resumed run, which follow the step; empty without a position."""
        where = None if self.loader is None else self.loader.where()
        if where is None or not (where["epoch"] or where["batch"]):
            return ""
        sample = where["batch"] * where["samples_of_a_batch"]
        return f", and training_data after sample {sample} of pass {where['epoch']}: skip no batches in the loop"

    def restore(self, progress: Snapshot, schedule: bool = True, states: bool = True) -> list[str]:
        """Continues from `progress`; returns notices for the user.

        Random generators are restored at the next engine call, or earlier, before the loader loads a batch. For a
        snapshot at step 0 they are restored at once. If `schedule` is False, a schedule of `initialize` stays, and with
        it all values of the groups. If `states` is False, the values of the groups stay unless a schedule continues.
        """
        facts, settings, notices = progress.facts, self._settings(), list[str]()
        self._saved_step = None
        # A checkpoint of another program names no schedule and no optimizer. They count as equal to those of this run.
        then = {name: settings[name] for name in ("schedule", "optimizer")}
        then |= {name: value for name, value in facts["settings"].items() if name in settings}
        same_schedule = schedule and then["schedule"] == settings["schedule"]
        scheduled = (facts["scheduler"] is not None and same_schedule) or bool(facts["registered"])
        changed = Differences(then, settings, scheduled, self.optimizer.param_groups)
        # Until the first step a commit contains the restored state. Only the members of groups come from this script.
        self.after_step = progress._replace(facts={**facts, **self._members()})
        if changed:
            notices.append(f"resumed with other settings than the run had: {changed}; {changed.consequences()}")
        self.global_steps, self.skipped_steps = facts["global_steps"], facts["skipped_steps"]
        self.micro_steps = self._micro_steps = facts["micro_steps"]
        self.parameter_steps = facts["parameter_steps"]
        if facts["loss_scale"] is not None:
            self.scaler.restore(facts["loss_scale"])
            self.optimizer.record(self.optimizer.overflow, self.loss_scale)
        self.global_samples = facts["global_samples"]
        self.client_state = from_plain(facts["client_state"])
        # Parameters of the same schedule have changed: its state is restored, then the new parameters apply to it.
        self._schedule_changed = same_schedule and any(name.startswith(_OF_SCHEDULE) for name in changed.changed)
        notices += self._restore_schedule(facts["scheduler"]) if same_schedule else ()
        notices += self.pass_schedule.go_on(facts.get("turns"))
        # The first commit precedes every registration, so a run resumed from it may register any number of objects.
        more = self.registered.restore(facts["registered"], may_grow=not self.global_steps)
        if more:
            notices.append(
                f"the last {count_of(more, 'registered object was', 'registered objects were')} not saved and stay "
                "unchanged"
            )
        # Another schedule sets the values, from its own position. Values of another optimizer have no meaning here.
        takes = then["optimizer"] == settings["optimizer"] and (states or scheduled)
        self._due = facts if takes and (same_schedule or self.lr_scheduler is None) else None
        self.put_values()
        generators = {name: t for name, t in progress.generators.items() if not name.startswith(_BEFORE_NEXT)}
        before_next = {
            name.removeprefix(_BEFORE_NEXT): t for name, t in progress.generators.items() if name not in generators
        }
        self._at_end, self._before_next = None, None
        if self.global_steps:
            self._generators = generators
            self._before_next = {**generators, **before_next}
        else:
            write_generators(generators, self.device)  # a new run takes its first snapshot at this point too
        write_buffers(persistent_buffers(self._module), progress.buffers)
        notices += self.entries.restore(progress.entries, self.device)
        # The loader continues at its saved position, which a run without training_data does not have.
        notice = None
        if self.loader is None:
            self._data = facts["data"]
        elif facts["data"] is not None:
            notice = self.loader.go_on(facts["data"], self._before_next)
            self._data = self.loader.where()
        elif self.global_steps:
            notice = "the run had no training_data: the training_data of this engine begins at its first pass"
        return [*notices, *([notice] if notice else [])]

    def _restore_schedule(self, saved: Mapping[str, Any] | None) -> list[str]:
        """Restores `saved`, the state of the same schedule; None if it was not saved. Returns notices for the user."""
        if saved is not None and is_held(self.lr_scheduler):
            state = from_plain(saved)
            try:
                self.lr_scheduler.load_state_dict(state)
            except OffloadError:
                raise
            except Exception as error:  # code of torch or of the user, with values that nobody has checked
                raise StoreError(
                    f"the schedule {type(self.lr_scheduler).__name__} does not take its saved state "
                    f"({type(error).__name__}: {error}): give the schedule of the run, or another checkpoint"
                ) from error
        elif self.lr_scheduler is not None and self.global_steps:
            return [
                f"the schedule {type(self.lr_scheduler).__name__} keeps the state that this script created, at step "
                f"{self.global_steps}: the resumed run could not save the schedule's position"
            ]
        return []

    def enter(self) -> None:
        """Prepares an engine call: restores generators of a resumed run, and takes the state after a step if due."""
        if self._generators is not None:
            # If the loader was iterated meanwhile, it has restored the generators, and its batch may have drawn numbers
            # since. A restore for an earlier resume does not count: the loader ignores a checkpoint without a position
            # of data.
            if self.loader is None or self.loader.restored is not self._before_next:
                write_generators(self._generators, self.device)
            self._generators = None
        if self.after_step_is_due:
            self.after_step, self.after_step_is_due = self.take(), False

    def restore_generators(self) -> None:
        """Restores the generators' states before a resumed run's next batch; see `Engine.restore_generators`."""
        if self._before_next is not None:
            write_generators(self._before_next, self.device)
            self._generators = None  # the next engine call must not restore generators again

    def ended(self) -> None:
        """Reads the generators at the end of a step, because a resumed run repeats later draws of the user's loader."""
        if self.loader is None and self.after_step_is_due:
            self._at_end = read_generators(self.device)

    def for_commit(self) -> Snapshot:
        """Returns the content of a commit made now.

        The content is the state after the last step, because an abandoned forward may have drawn random numbers and
        changed buffers since. After an edit of weights, the content is the present state, except for the generators.
        """
        if self.after_step is None:
            return self.take()
        return self.take()._replace(generators=self.after_step.generators) if self.edited else self.after_step

    def stepped(self, micro_batches: int, overflow: bool) -> None:
        """Counts an optimizer step, and drops the snapshot that was taken after the step before."""
        self.after_step, self.after_step_is_due, self.edited = None, self.commits, False
        self._before_next = self._at_end = None
        self.global_steps += 1
        # A commit counts the micro-batches up to here. A resumed run repeats all later micro-batches.
        self._micro_steps = self.micro_steps
        self.skipped_steps += overflow
        self.scaler.stepped(overflow)
        self.optimizer.record(overflow, self.loss_scale)
        # `micro_batches` may differ from the accumulation: the user may set the boundary.
        self.global_samples += self.settings.total_batch_size // self.settings.accumulation * micro_batches
        self.registered.stepped()
        if self.loader is not None:
            self._data = self.loader.trained()

    def mark_edited(self, edited: bool = True) -> None:
        """Records whether the user has set weights or states since the last step or commit."""
        self.edited = edited
        if edited:
            self._saved_step = None

    def mark_saved(self) -> None:
        """Records that files of the user, a checkpoint or a model, contain the present weights."""
        self._saved_step = self.global_steps

    @property
    def saved(self) -> bool:
        """True if a start that replaces the run loses nothing: the user has saved the last step, or changed nothing."""
        return self._saved_step == self.global_steps

    def put_values(self) -> None:
        """Gives the groups the committed values if all objects of the resumed run are registered, else does nothing.

        Registered objects may be schedules, and the constructor of a schedule changes the groups' learning rates, so
        values that were set before would be lost.
        """
        if self._due is not None and self.registered.complete:
            # A schedule continues from its own state, whatever learning rate is configured now.
            scheduled = self.lr_scheduler is not None or self.registered.schedules
            left = not scheduled and self._due["settings"].get("schedule") is not None
            merged = merge_values(self._due["groups"], self._due["configured"], self._configured, scheduled, left)
            for group, values in zip(self.optimizer.param_groups, merged, strict=True):
                set_values(group, values)
            self._options.apply(self._due.get("options", ()))
            if self._schedule_changed:
                self.lr_scheduler.apply()
            self._due = None

    def regrouped(self) -> None:
        """Adapts schedule and settings to a group that was added to the optimizer.

        Raises `UsageError` if the groups of a resumed run are not restored yet, or the schedule has no learning rate
        for the group.
        """
        groups, schedule = self.optimizer.param_groups, self.lr_scheduler
        if self._due is not None:
            raise UsageError("a resumed run restores its groups once all objects are registered; add groups after that")
        # Our schedules adapt to a new group. A schedule of torch has a fixed list with one learning rate for each
        # group.
        if isinstance(schedule, Schedule):
            schedule.take_in()
        elif schedule is not None and len(getattr(schedule, "base_lrs", groups)) != len(groups):
            raise UsageError(
                f"the {type(schedule).__name__} was made for {count_of(len(schedule.base_lrs), 'group')} of "
                f"parameters, there would be {len(groups)} now: give the optimizer all groups before the schedule is "
                "made, and change the numbers in them later"
            )
        self._options.regrouped()  # may raise, so it comes first
        self._configured = [*self._configured, self.optimizer.configured()[-1]]

    def of_the_user(self) -> dict[str, Any]:
        """Returns the user's own state as JSON.

        Raises `UsageError` if `client_state` is not a dict, or a state contains objects that JSON cannot represent.
        """
        if not isinstance(self.client_state, dict):
            raise UsageError(f"engine.client_state must be a dict, got {type(self.client_state).__name__}")
        advice = (
            "a commit holds None, booleans, numbers, strings, and lists, tuples and dicts of them. Remove or convert "
            "the value (float(x), x.tolist()) and continue: nothing is lost"
        )
        state = to_plain(self.client_state, "engine.client_state", advice)
        return {"client_state": state, "registered": self.registered.states()}

    def _members(self) -> dict[str, Any]:
        """Returns the fact `members`; nothing if a single group contains all trainable parameters."""
        groups = self.optimizer.param_groups
        if len(groups) == 1:
            return {}
        # Computed anew each time: a user may move parameters from one group into another between steps.
        names_by_group = [[self._names.get(id(parameter)) for parameter in group["params"]] for group in groups]
        return {"members": [[name for name in names if name] for names in names_by_group]}

    def _settings(self) -> dict[str, Any]:
        return named_settings(self.settings, self.optimizer, self._configured, self.lr_scheduler)
