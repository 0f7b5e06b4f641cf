"""State of training besides weights and moments: all that a commit contains, taken and restored as a `Snapshot`.

A commit of step n must contain the state as of the first engine call after step n: before that call the loop may step a
schedule or change `client_state`, which belongs to step n. Random generators are the exception: the next batch may be
loaded before that call too, so their states before the load are stored in addition (`before_next`).

Threads. Everything runs on the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.optim.algorithms import merge_values
from offload.engine.optim.optimizer import Optimizer
from offload.engine.training.data_loader import Loader
from offload.engine.training.group_options import GroupOptions
from offload.engine.training.module_entries import ModuleEntries
from offload.engine.training.registered_objects import RegisteredObjects
from offload.engine.training.snapshot import (
    Snapshot,
    is_held,
    persistent_buffers,
    read_generators,
    scheduler_state,
    write_buffers,
    write_generators,
)
from offload.engine.training.step_settings import Differences, StepSettings, job_of, named_settings
from offload.errors import UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.layout.flat_layout import UnitLayout
from offload.schedules.base import Schedule, set_values
from offload.sizes import count_of

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
        """Starts a new run; `restore` continues another one.

        Args:
            module: the model, whose persistent buffers each commit contains.
            device: the compute device, for its random generator.
            optimizer: the engine's optimizer, whose groups' values each commit contains.
            lr_scheduler: the schedule, or None.
            loader: the loader of `training_data`, or None.
            settings: settings of a step.
            layouts: the layout of each unit.
            commits: True if the run makes commits.
        """
        self._module, self.device, self.optimizer, self.settings = module, device, optimizer, settings
        self.entries = ModuleEntries(module, commits)
        self.commits = commits
        self.scaler = settings.scaler
        self.lr_scheduler, self.loader = lr_scheduler, loader
        self.global_steps, self.skipped_steps, self.micro_steps, self.global_samples = 0, 0, 0, 0
        """Counters, described at the engine's properties of the same names."""
        self._micro_steps = 0
        """Micro-steps at the last optimizer step: gradients of later micro-batches are in no commit."""
        self._names = {id(each): name for name, each in module.named_parameters() if each.requires_grad}
        self.parameter_steps = [[0] * len(layout.segments) for layout in layouts]
        """Number of updates of each parameter, by unit."""
        self.client_state: dict[str, Any] = {}
        self.registered = RegisteredObjects()
        self._generators: Mapping[str, torch.Tensor] | None = None
        """States of the generators to restore at the next engine call."""
        self._before_next: Mapping[str, torch.Tensor] | None = None
        """States that `restore_generators` restores; None in a new run, and from the first step on."""
        self._at_end: Mapping[str, torch.Tensor] | None = None
        """States at the end of the last step, if user code loads the batches."""
        self._after_step: Snapshot | None = None
        """Content of a commit of the last step: the state as of the first engine call after that step."""
        self.after_step_is_due = False  # True from a step to the next engine call, if the run makes commits
        self.edited = False
        """True if the user has set weights or states since the last step or commit."""
        self._configured = optimizer.configured()
        self._options = GroupOptions(optimizer)
        self.job = job_of(module, settings, optimizer, lr_scheduler) if commits else {}
        """The job of this run, for the note of its end."""
        self._saved_step: int | None = 0
        """The step that may be replaced without a loss; None if edits, or a run before, are in no other files."""
        self._due: Mapping[str, Any] | None = None
        """Facts of the resumed run until `put_values` has given their values to the groups; None afterwards."""
        self._schedule_changed = False
        """True if the schedule continues with other parameters than in the resumed run."""
        self._data = None if loader is None else loader.where()
        """Position of the loader at the last optimizer step."""

    @property
    def loss_scale(self) -> float:
        """Factor of the loss of the next backward; 1 except in fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def take(self) -> Snapshot:
        """Returns the present state besides weights and moments."""
        facts = {
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self._micro_steps,
            "global_samples": self.global_samples,
            "parameter_steps": self.parameter_steps,
            "scheduler": scheduler_state(self.lr_scheduler),
            "loss_scale": None if self.scaler is None else self.scaler.state(),
            **self.of_the_user(),
            "data": self._data,
            # Until `put_values` the groups do not have the resumed values yet, but a commit must contain them.
            "groups": self.optimizer.values() if self._due is None else self._due["groups"],
            "configured": self._configured if self._due is None else self._due["configured"],
            "settings": self._settings(),
            **self._members(),
            **self._changed_options(),
        }
        generators = read_generators(self.device)
        before = self._at_end if self.loader is None else self.loader.before_next
        if before is not None:
            generators |= {
                _BEFORE_NEXT + name: state
                for name, state in before.items()
                if name not in generators or not torch.equal(state, generators[name])
            }
        # Clones, because a forward may change the buffers before the commit writes them.
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
        """Returns words on the loader's position in a resumed run, to follow those on its step; none without one."""
        where = None if self.loader is None else self.loader.where()
        if where is None or not (where["epoch"] or where["batch"]):
            return ""
        sample = where["batch"] * where["samples_of_a_batch"]
        return f", and training_data after sample {sample} of pass {where['epoch']}: skip no batches in the loop"

    def restore(self, progress: Snapshot, schedule: bool = True, states: bool = True) -> list[str]:
        """Continues from `progress`; returns notices for the user.

        Random generators are restored at the next engine call, or earlier, before the loader loads a batch; those of a
        snapshot at step 0 are restored at once.

        Args:
            progress: the snapshot of a commit or checkpoint.
            schedule: False to keep the schedule of `initialize` and, if there is one, all values of the groups.
            states: False to keep all values of the groups where no schedule continues.
        """
        facts, mine, notices = progress.facts, self._settings(), list[str]()
        self._saved_step = None
        # A checkpoint of another program says neither, and is taken for one of the same schedule and optimizer.
        then = {name: mine[name] for name in ("schedule", "optimizer")}
        then |= {name: value for name, value in facts["settings"].items() if name in mine}
        same_schedule = schedule and then["schedule"] == mine["schedule"]
        scheduled = (facts["scheduler"] is not None and same_schedule) or bool(facts["registered"])
        changed = Differences(then, mine, scheduled, self.optimizer.param_groups)
        # Until the first step a commit contains exactly what was restored; the parameters of a group are this script's.
        self._after_step = progress._replace(facts={**facts, **self._members()})
        if changed:
            notices.append(f"resumed with other settings than the run had: {changed}; {changed.consequences()}")
        self.global_steps, self.skipped_steps = facts["global_steps"], facts["skipped_steps"]
        self.micro_steps = self._micro_steps = facts["micro_steps"]
        self.parameter_steps = facts["parameter_steps"]
        if self.scaler is not None and facts["loss_scale"] is not None:
            self.scaler.restore(facts["loss_scale"])
            self.optimizer.record(self.optimizer.overflow, self.loss_scale)
        self.global_samples = facts["global_samples"]
        self.client_state = from_plain(facts["client_state"])
        # Parameters of the same schedule have changed: its state is restored, then the new parameters apply to it.
        self._schedule_changed = same_schedule and changed.of_schedule
        notices += self._restore_schedule(facts["scheduler"]) if same_schedule else ()
        # The first commit precedes every registration, so a run resumed from it may register any number of objects.
        more = self.registered.restore(facts["registered"], may_grow=not self.global_steps)
        if more:
            notices.append(
                f"the last {count_of(more, 'registered object was', 'registered objects were')} not saved and stay "
                "unchanged"
            )
        # Another schedule sets the values, from its own position. Those of another optimizer have no meaning here.
        takes = then["optimizer"] == mine["optimizer"] and (states or scheduled)
        self._due = facts if takes and (same_schedule or self.lr_scheduler is None) else None
        self.put_values()
        self._restore_generators(progress.generators)
        write_buffers(persistent_buffers(self._module), progress.buffers)
        notices += self.entries.restore(progress.entries, self.device)
        return notices + self._restore_data(facts["data"])

    def _restore_schedule(self, saved: Mapping[str, Any] | None) -> list[str]:
        """Restores the state of the same schedule, None if it was not saved; returns notices for the user."""
        if saved is not None and is_held(self.lr_scheduler):
            self.lr_scheduler.load_state_dict(from_plain(saved))
        elif self.lr_scheduler is not None and self.global_steps:
            return [
                f"the schedule {type(self.lr_scheduler).__name__} keeps the state that this script created, at step "
                f"{self.global_steps}: the resumed run could not save the schedule's position"
            ]
        return []

    def _restore_data(self, saved: dict[str, int] | None) -> list[str]:
        """Continues the loader at its saved position, None if the run had no loader; returns notices for the user."""
        notice = None
        if self.loader is None:
            self._data = saved
        elif saved is not None:
            notice = self.loader.go_on(saved, self._before_next)
            self._data = self.loader.where()
        elif self.global_steps:
            notice = "the run had no training_data: the training_data of this engine begins at its first pass"
        return [notice] if notice else []

    def _restore_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restores random generators at the next engine call or load of a batch; those of step 0 at once."""
        generators = {name: t for name, t in states.items() if not name.startswith(_BEFORE_NEXT)}
        before = {n.removeprefix(_BEFORE_NEXT): t for n, t in states.items() if n not in generators}
        self._at_end, self._before_next = None, None
        if self.global_steps:
            self._generators = generators
            self._before_next = {**generators, **before}
        else:
            write_generators(generators, self.device)  # a new run takes its first snapshot at this point too

    def enter(self) -> None:
        """Prepares an engine call: restores generators of a resumed run, and takes the state after a step, if due."""
        if self._generators is not None:
            # If the loader was iterated meanwhile, it has restored them, and its batch may have drawn numbers since.
            # Those of an earlier resume do not count: a checkpoint without a position of data is no news to the loader.
            if self.loader is None or self.loader.restored is not self._before_next:
                write_generators(self._generators, self.device)
            self._generators = None
        if self.after_step_is_due:
            self._after_step, self.after_step_is_due = self.take(), False

    def restore_generators(self) -> None:
        """Restores the generators as before the load of a resumed run's next batch: `Engine.restore_generators`."""
        if self._before_next is not None:
            write_generators(self._before_next, self.device)
            self._generators = None  # the next engine call must not restore generators again

    def ended(self) -> None:
        """Reads the generators at the end of a step, because a resumed run repeats later draws of the user's loader."""
        if self.loader is None and self.after_step_is_due:
            self._at_end = read_generators(self.device)

    @property
    def after_step(self) -> Snapshot | None:
        """Content of a commit of the last step; None until an engine call takes it, or in a run without commits."""
        return self._after_step

    def for_commit(self) -> Snapshot:
        """Returns the content of a commit made now.

        This is the state after the last step: a forward that was abandoned since may have drawn random numbers and
        changed buffers. If weights were edited since, it is the present state, except for the generators.
        """
        if self._after_step is None:
            return self.take()
        return self.take()._replace(generators=self._after_step.generators) if self.edited else self._after_step

    def stepped(self, micro_batches: int, overflow: bool) -> None:
        """Counts an optimizer step, and drops the snapshot that was taken after the step before.

        Args:
            micro_batches: micro-batches of the step.
            overflow: True if the norm was not finite and the step was skipped.
        """
        self._after_step, self.after_step_is_due, self.edited = None, self.commits, False
        self._before_next = self._at_end = None
        self.global_steps += 1
        # A commit counts the micro-batches up to here; later ones are repeated by a resumed run.
        self._micro_steps = self.micro_steps
        self.skipped_steps += overflow
        if self.scaler is not None:
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
        """Records that the weights are now those in files of the user's: of a checkpoint, or a model."""
        self._saved_step = self.global_steps

    @property
    def saved(self) -> bool:
        """True if a start that replaces the run loses nothing: the user has saved the last step, or changed nothing."""
        return self._saved_step == self.global_steps

    def count_micro_steps(self, passed: int) -> None:
        """Adds the micro-batches of a `step()` to the count."""
        self.micro_steps += passed

    def change_settings(self, settings: StepSettings) -> None:
        """Continues with other settings of a step."""
        self.settings = settings

    def set_client_state(self, value: dict[str, Any]) -> None:
        """Replaces the user's dict that each commit contains."""
        self.client_state = value

    def set_lr_scheduler(self, value: Any) -> None:
        """Replaces the schedule that each step advances."""
        self.lr_scheduler = value

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

        Raises:
            UsageError: the groups of a resumed run are not restored yet, or the schedule has no learning rate for the
                group.
        """
        groups, schedule = self.optimizer.param_groups, self.lr_scheduler
        if self._due is not None:
            raise UsageError("a resumed run restores its groups once all objects are registered; add groups after that")
        # Our schedules adapt to a new group; one of torch has a fixed list of learning rates, one for each group.
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

        Raises:
            UsageError: `client_state` is not a dict, or a state contains objects that JSON cannot represent.
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
        """Returns the fact `members`, which a single group, of all that trains, does not need."""
        groups = self.optimizer.param_groups
        if len(groups) == 1:
            return {}
        # Asked for anew each time: a user may move parameters from one group into another between steps.
        found = [[self._names.get(id(each)) for each in group["params"]] for group in groups]
        return {"members": [[name for name in names if name] for names in found]}

    def _changed_options(self) -> dict[str, Any]:
        """Returns the fact `options`, which groups need whose entries have changed since `initialize`."""
        changes = self._options.changes() if self._due is None else self._due.get("options", ())
        return {"options": changes} if any(changes) else {}

    def _settings(self) -> dict[str, Any]:
        """Returns settings that may differ in a resumed run; see `named_settings`."""
        return named_settings(self.settings, self.optimizer, self._configured, self.lr_scheduler)
