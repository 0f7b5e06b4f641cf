"""The layer-major schedule: all micro-batches of a step pass through one block before the next block is fetched.

    forward     what precedes the blocks of mb 0, 1, …    block 0 of mb 0, 1, …    block 1 of mb 0, 1, …    …
    turn        head and loss of mb 0, and its backward as far as the last block; the same of mb 1; …
    backward    last block of mb 0, 1, …    …    block 0 of mb 0, 1, …

So the weights of a block cross each link twice a step, whatever the number of micro-batches. The block's gradients are
complete when the last micro-batch has left the block. The logits of only one micro-batch exist at a time. Gradients are
added up in the order of the micro-batches, as in a loop: the sums have the same bits.

Each micro-batch waits at the border of a block, on a thread of its own (`micro_batch`), until all others have arrived
there. Hooks on the blocks are the borders: a forward waits before each block and after the last one of a list, a
backward waits before the autograd node that has made a block's output, or the input of a list. The schedule knows
nothing else of the model: computations between blocks run with the preceding block. The micro-batch at the earliest
border runs next. So a micro-batch that leaves out a block waits for the other micro-batches, and each block receives
its micro-batches in order. One that leaves out the last block waits for them before its backward. One that uses no
block of a list meets no border there: what is before the list has its gradients with what is behind it.

In the first step the modules are watched during the first micro-batch's forward, for which all others wait. A model
that keeps values on its modules between blocks (`ModuleState`) must not let micro-batches take turns. If the first
forward leaves values, it may have made them for good, as a cache: then all micro-batches of this step pass one after
the other, and the second one's forward decides. If that step is made again, it keeps its order. A model with forward
hooks of the user never takes turns, unless the config asks for turns by name. Commits contain what the first step has
shown. If the config asks by name, the first step of a resumed run takes turns as the unbroken run would have, since
ranks add gradients in another order without turns.

Where no weight can leave the device to make room, all micro-batches of the first step pass one after the other too: the
step shows whether the activations of all of them fit.

Threads. A micro-batch's forward and backward run on its thread: `EngineCore.run_backward` asks torch for that, since
torch would run all backwards of a GPU on one thread. All code except the hooks belongs to the thread that runs the
step. Ctrl-C is obeyed when a micro-batch has reached its border.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from offload.engine.micro_batches import MicroBatchGenerators, PassSchedule, Turns
from offload.errors import UsageError
from offload.interrupts import let_deferred_in, uninterrupted
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR, Schedule, choose_schedule
from offload.notices import Remark, announce
from offload.provenance import foreign_hooks
from offload.swapper.memory.device import Device, DeviceRoom
from offload.threads import Thread
from offload.torch_internals import (
    inside_backward,
    outside_of_compiled_code,
    tensors_in,
    top_saved_tensor_hooks,
    under_modes,
)

# -- openmp --------------------------------------------------------------------------------------------
#
# The OpenMP team of a thread: a thread that waits for its turn must not keep one.
#
# torch computes on a CPU with OpenMP, which gives each thread that computes a team of its own. GNU's libgomp counts the
# threads of all teams. Once they are more than the cores, no team waits actively for its next piece of work any longer:
# it sleeps, and each operation of the model wakes it. Eight micro-batches that take turns have eight teams, and only
# one works: a step of gpt2-small on two cores took 4 to 15 % longer than with one team, in single runs.


_LIBRARY = ctypes.CDLL(None)
"""All functions of the process."""
_SOFT = 1
"""omp_pause_soft of OpenMP 5.0, section 3.2.43: state that the program has set survives."""


def end_team() -> None:
    """Ends the calling thread's OpenMP team; its next parallel operation makes a new team (0.1 ms)."""
    # torch loads its OpenMP library for the whole process. A torch that was built without OpenMP loads none.
    with contextlib.suppress(AttributeError):
        _LIBRARY.omp_pause_resource_all(_SOFT)


# -- micro batch ---------------------------------------------------------------------------------------
#
# A micro-batch that runs until the next border of a block and waits there until it is resumed.
#
#     owner's thread     resume ─► waits ──────────────────────────► resume ─► …
#     micro-batch's      ........► forward up to a border: pause ...........► …      one thread at a time runs
#
# A micro-batch has a thread of its own because its place between two blocks is a stack: of the model's Python code in a
# forward, of autograd's engine in a backward. So masks, positions and whatever else a model passes to its blocks stay
# where the model keeps them, and no code of the model is known or changed. A border is a border of the forward or of
# the backward alike.
#
# torch keeps settings by thread: a micro-batch's thread takes over its owner's settings (`ThreadSettings`).


_T = TypeVar("_T")


class Abandoned(Exception):
    """Ends a micro-batch at a border: its step will not be completed.

    An `Exception`, since torch runs the last hooks of a module after no other `BaseException`.
    """


class ThreadSettings:
    """torch's settings of the thread that constructs this object."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        kinds = dict.fromkeys(("cpu", device.torch.type))
        self._autocasts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._stream = None
        if device.torch.type not in ("cpu", "meta"):
            self._stream = torch.accelerator.current_stream(device.torch)

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Applies the settings to the calling thread, which is a new one."""
        self._device.enter_thread(computes=True)
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        with contextlib.ExitStack() as entered:
            entered.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocasts:
                entered.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            yield


class Border(NamedTuple):
    """A place in a micro-batch's forward or backward; borders are in the order of their visits."""

    backward: bool
    passed: float
    """Number of times that the model has gone back to an earlier block; negative in the backward."""
    block: float
    """Number of the block that comes next, or its negative in the backward; the end of a list is half a block later."""


START = Border(False, -1, -1)


class MicroBatch(Generic[_T]):
    """One micro-batch in flight. `resume` and `abandon` belong to the owner's thread, `pause` to the micro-batch's."""

    def __init__(self, work: Callable[[], _T], settings: ThreadSettings, name: str) -> None:
        """Starts nothing before the first `resume`.

        `work` runs the forward and the backward, under the settings of the owner's thread.
        """
        self._work, self._settings = work, settings
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False
        self.border = START
        """The border where the micro-batch waits."""
        self.ended = False
        self._result: list[_T] = []
        self._error: BaseException | None = None
        # Each micro-batch has its own context variables, such as those that transformers collects outputs in.
        context = contextvars.copy_context()
        self._thread = Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._started = False

    @property
    def result(self) -> _T:
        """The result of the work. The micro-batch must have ended without an error."""
        return self._result[0]

    def resume(self) -> None:
        """Runs the micro-batch up to its next border, or to its end. Raises the work's error."""
        if not self._started:
            self._thread.start()
            self._started = True
        end_team()
        self._may_run.release()
        self._has_stopped.acquire()
        if self.ended:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # a cycle of this frame and the error's would hold the graph until Python looks for cycles

    def abandon(self) -> None:
        """Ends the micro-batch where it waits, and joins its thread. Idempotent. Errors of the end are ignored."""
        self._abandoned = True
        while self._started and not self.ended:
            with contextlib.suppress(BaseException):  # the step has failed already, by another error
                self.resume()

    def pause(self, border: Border) -> None:
        """Waits at a border until `resume`.

        Raises `Abandoned` if the micro-batch must end here, and `UsageError` if the calling thread is another
        micro-batch's, whose backward has come into this one's graph.
        """
        if threading.current_thread() is not self._thread:
            raise UsageError(
                "the backward of one micro-batch has come to a block of another, whose values it uses: something, such "
                "as a forward hook of yours, keeps values where other micro-batches find them. Set "
                '"schedule": "micro_batch_major" in the "offload" block, or keep them by thread (threading.local)'
            )
        self.border = border
        if not self._abandoned:
            end_team()
            self._has_stopped.release()
            self._may_run.acquire()
        if self._abandoned:
            raise Abandoned

    def _run(self) -> None:
        """Runs the work on the micro-batch's thread."""
        self._may_run.acquire()
        try:
            with self._settings.on_this_thread():
                self._result.append(self._work())
        except BaseException as error:
            self._error = error
        self.ended = True
        self._has_stopped.release()


# -- module state --------------------------------------------------------------------------------------
#
# Values that modules store on themselves between two blocks of a forward, where other micro-batches would find them.
#
# A model may store a value on a module and read it later in the same forward: a depth, a mask, the auxiliary loss of
# each block. When micro-batches take turns, one would read a value that another has stored. So one forward is watched:
# assignments to attributes of modules, and changes in their dictionaries, lists, other plain objects, and buffers. A
# value that a module changes in place and only another run of the same module reads, such as the statistics of a norm,
# does no harm: the micro-batches pass through each module in their order.
#
# Many models set something up in their first forward, so a second one is watched before a model is said to keep values.
# Values that a user's hook stores elsewhere cannot be seen, so `_mind_hooks` finds the hook itself.


_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of each module that hold its parts and hooks."""
_LIBRARIES = ("torch", "transformers", "accelerate", "peft")
"""Packages whose hooks keep nothing, or keep it by thread."""


class ModuleState:
    """Watches the modules of a model during one forward. Belongs to the thread that runs the step."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names = {id(module): name for name, module in modules.items()}
        self._modules = modules
        self._assigned: str | None = None
        self._before: dict[str, Any] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notes assignments to attributes of the modules while the context is open."""
        self._before = self._contents()
        # A user's class with its own `__setattr__` calls this one too, or it could set nothing.
        own = nn.Module.__setattr__

        def noted(module: nn.Module, key: str, value: Any) -> None:
            name = self._names.get(id(module))
            if name is not None and key not in _INTERNAL:
                self._assigned = self._assigned or (f"{name}.{key}" if name else key)
            own(module, key, value)

        nn.Module.__setattr__ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = own  # type: ignore[method-assign]

    def changed(self) -> str | None:
        """Returns the name of an attribute that was assigned or whose content has changed, or None."""
        if self._assigned is not None:
            return self._assigned
        now = self._contents()
        return next((key for key, value in now.items() if self._before.get(key) != value), None)

    def _contents(self) -> dict[str, Any]:
        """Returns identities of the contents of all attributes. Values, perhaps activations, are not kept."""
        contents = {}
        for name, module in self._modules.items():
            for key, value in vars(module).items():
                if key not in _INTERNAL and (content := _content(value)) is not None:
                    contents[f"{name}.{key}" if name else key] = content
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                for key, buffer in module._buffers.items():
                    contents[f"{name}.{key}" if name else key] = (id(buffer), getattr(buffer, "_version", 0))
        for kind in {kind for module in self._modules.values() for kind in type(module).__mro__}:
            if kind.__module__.partition(".")[0] not in ("builtins", *_LIBRARIES):
                for key, value in vars(kind).items():
                    if not key.startswith("__"):
                        contents[f"{kind.__qualname__}.{key}"] = (id(value), _content(value))
        return contents


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[str | None]]:
    """Yields a list to which each forward of `model` adds the name of a value that it has left on a module, or None."""
    state, names, entered = ModuleState(dict(model.named_modules())), list[str | None](), contextlib.ExitStack()

    def end(*_: Any) -> None:
        entered.close()
        names.append(state.changed())

    begins = model.register_forward_pre_hook(lambda *_: entered.enter_context(state.watching()), prepend=True)
    ends = model.register_forward_hook(end, always_call=True)
    try:
        yield names
    finally:
        begins.remove()
        ends.remove()


def _content(value: Any) -> Any:
    """Returns the identities of the items of a container or a plain object; None for any other value."""
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items() if isinstance(key, str | int)}
    if isinstance(value, list | tuple | set):
        return [id(item) for item in value]
    if isinstance(value, torch.Tensor | nn.Module | type) or callable(value):
        return None
    attributes = getattr(value, "__dict__", None)
    return None if attributes is None else {key: id(item) for key, item in attributes.items()}


# -- layer major ---------------------------------------------------------------------------------------


_END = 0.5
"""Distance from the border before a block to the border after it, in blocks."""


class _ThreadPosition(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.micro_batch: MicroBatch[Any] | None = None
        """The micro-batch that the thread belongs to."""
        self.border = START
        """The last border of its forward."""


class LayerMajor(PassSchedule):
    """The borders of one model's blocks, and the micro-batches that wait there."""

    def __init__(
        self,
        blocks: Sequence[str],
        device: Device,
        wanted: bool,
        room: Callable[[], DeviceRoom] | None = None,
        line: str | None = None,
        anywhere: Callable[[bool], bool] = bool,
    ) -> None:
        """Makes a schedule without borders; see `install`.

        Args:
            blocks: names of the repeated blocks, in the order of the model.
            device: the device that the model computes on.
            wanted: True if the user asks for turns by name.
            room: returns the device's room, if the first step must show that all activations fit.
            line: line for the user whose loop runs each micro-batch by itself.
            anywhere: takes a fact of this rank, and returns whether it is true on any rank; a collective.
        """
        self._blocks, self._device, self._wanted = blocks, device, wanted
        self._room, self._line, self._anywhere = room, line, anywhere
        self._modules: Mapping[str, nn.Module] = {}
        self._local = _ThreadPosition()
        self._owner: threading.Thread | None = None
        """The thread that runs the step under way."""
        self._waiting: list[MicroBatch[Any]] = []
        """The micro-batches of the step under way."""
        self._micro_batch = 0
        self._watched = False
        """True once the first step has shown whether the model keeps values between blocks."""
        self._shared_value: str | None = None
        """Name of such a value."""
        self._one_by_one = False
        """True while the first step runs one micro-batch after the other."""
        self._first_apart = False
        """True from there to the end of that step, however often it is made again."""
        self._full = False
        """True once the first step has shown that the activations of all micro-batches do not fit."""
        self._removers: list[Callable[[], None]] = []

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        for _, run in itertools.groupby(enumerate(self._blocks), lambda block: block[1].rpartition(".")[0]):
            members = list(run)  # the blocks of one `ModuleList`
            for number, name in members:
                self._add_border(modules[name], number, first=members[0][0], last=members[-1][0])

    @property
    def name(self) -> Schedule:
        return MICRO_BATCH_MAJOR if self._full or self._shared_value is not None else LAYER_MAJOR

    @property
    def possible(self) -> bool:
        """False if micro-batches do not take turns.

        Either a step has shown that the model, or a user's hook, may keep values between blocks. Or the user has set
        hooks or modes on the calling thread, which other threads would lack.
        """
        return self.name == LAYER_MAJOR and top_saved_tensor_hooks() is None and not under_modes()

    @property
    def trial(self) -> bool:
        """True if the next step is the first: its first forward shows whether the model keeps values between blocks."""
        return self.possible and not self._watched

    @property
    def interleaves(self) -> bool:
        return bool(self._waiting)

    @property
    def micro_batch(self) -> int:
        return self._micro_batch

    @property
    def leaves_block(self) -> bool:
        """True if the last micro-batch runs, or none takes turns, as in the first step.

        Otherwise the sums of all gradients of the model would be on the device until the last micro-batch.
        """
        return not self._waiting or self._one_by_one or self._micro_batch == len(self._waiting) - 1

    @property
    def on_this_thread(self) -> bool:
        return self._local.micro_batch is not None

    def run(self, works: Iterable[Callable[[], _T]], generators: MicroBatchGenerators, turns: Turns) -> list[_T]:
        """Runs the micro-batches of a step, and returns their results.

        Raises `UsageError` if a signal's handler has entered the engine, which ends the micro-batches.
        """
        if generators.micro_batches > 1 and not self._watched:
            self._mind_hooks()
        # Ranks with two orders would add gradients in a third. A value, a hook or a mode of one rank counts for all.
        if generators.micro_batches < 2 or self._anywhere(not self.possible):
            return super().run(works, generators, turns)
        works, settings = list(works), ThreadSettings(self._device)
        with turns(len(works)):
            self._owner = threading.current_thread()
            self._waiting = waiting = [
                MicroBatch(self._as_mine(work), settings, f"offload-micro-batch-{number}")
                for number, work in enumerate(works)
            ]
            try:
                if not self._watched or self._first_apart:
                    self._watch(generators)
                while running := [entry for entry in enumerate(waiting) if not entry[1].ended]:
                    earliest = min(running, key=lambda entry: (entry[1].border, entry[0]))
                    self._resume(*(running[0] if self._one_by_one else earliest), generators)
                if not self._watched:
                    self._mind_room(len(works))
                    self._watched = True
                return [finished.result for finished in waiting]
            finally:
                self._end()

    def _mind_hooks(self) -> None:
        """Reports a forward hook of the user, which may keep values where other micro-batches find them."""
        hooked = (
            name or "the model"
            for name, module in self._modules.items()
            if any(kind.startswith("forward") for kind, _ in foreign_hooks(module, *_LIBRARIES))
        )
        if self._shared_value is not None or (owner := next(hooked, None)) is None:
            return
        what = f"a forward hook of yours on {owner} may keep values between two blocks, where another micro-batch finds"
        if self._wanted:
            announce(f'{what} them: if it does, set "schedule" to "micro_batch_major"')
        else:
            self._shared_value = "a hook"
            announce(
                f"micro-batches pass through the model one after the other: {what} them. If it keeps none, set "
                '"schedule" to "layer_major"'
            )

    def _mind_room(self, micro_batches: int) -> None:
        """Keeps the order of one after the other if the activations of all micro-batches do not fit."""
        if self._room is None or self.name != LAYER_MAJOR:
            return
        room = self._room()
        # At a border a micro-batch holds no more than it held at most in a whole pass.
        choice = choose_schedule(
            asked="auto",
            micro_batches=micro_batches,
            blocks=len(self._blocks),
            moves=False,
            sends=True,
            checkpointed=False,
            activation_nbytes=micro_batches * room.kept,
            free_nbytes=room.free + room.kept,
        )
        if choice.schedule != LAYER_MAJOR:
            self._full = True
            announce(Remark(f"micro-batches pass through the model one after the other: {choice.reason}"))

    def go_on(self, allows_turns: bool | None) -> list[str]:
        """Keeps the order of the run if the config asks for turns by name: "auto" has the same bits in either order."""
        super().go_on(allows_turns)
        if not self._wanted or self._watched or allows_turns is not False:
            return []
        self._shared_value = "a value"
        return [
            "micro-batches pass through the model one after the other, as in this run so far: its first step has found "
            "a value that the model keeps on a module between two blocks. A new run looks again"
        ]

    def ran_by_itself(self) -> None:
        """Tells the user once of `accumulate` and `train_batch`, if nothing has called them yet."""
        if self._line is not None and self.possible and not self._watched:
            announce(self._line)
            self._line = None

    def _watch(self, generators: MicroBatchGenerators) -> None:
        """Runs the first forward of the first step, and decides the order of this step's micro-batches.

        They pass one after the other if the forward leaves a value on any rank, or to show whether all activations fit.
        The second forward then decides the order of all further steps.
        """
        first, *others = enumerate(self._waiting)
        # The first step of the run has found no such value, before this process.
        known = self._wanted and self.allows_turns and not self._first_apart
        # Values that an earlier try has left, as a cache, are no longer new.
        keeps = self._anywhere(self._kept_in_forward(*first, generators) is not None or self._first_apart)
        self._one_by_one = self._first_apart = not known and (keeps or self._room is not None)
        while self._one_by_one and not first[1].ended:
            self._resume(*first, generators)
        value = self._kept_in_forward(*others[0], generators) if others and (keeps or self._one_by_one) else None
        if not known:
            self._shared_value, self.allows_turns = value, value is None
        if known and value is not None:
            announce(
                f"the model keeps {value} on a module between two blocks, where another micro-batch finds it. The "
                "first step of this run found no such value, so micro-batches take turns as before: set "
                '"schedule" to "micro_batch_major" if a block reads it'
            )
        elif value is not None:
            announce(
                f"micro-batches pass through the model one after the other: it keeps {value} on a module between two "
                "blocks, where another micro-batch would find it"
            )

    def end_step(self) -> None:
        self._first_apart = False

    def _kept_in_forward(
        self, number: int, micro_batch: MicroBatch[Any], generators: MicroBatchGenerators
    ) -> str | None:
        """Runs the forward of a micro-batch; returns the name of a value that is new on a module at a border of it."""
        state, kept = ModuleState(self._modules), None
        with state.watching():
            while not micro_batch.ended and not micro_batch.border.backward:
                try:
                    self._resume(number, micro_batch, generators)
                except BaseException:
                    if not self.allows_turns and state.changed() is not None:
                        self._first_apart = True  # the next try would find nothing new
                    raise
                forward = not micro_batch.ended and not micro_batch.border.backward
                if forward and kept is None:
                    kept = state.changed()
        return kept

    @uninterrupted
    def _resume(self, number: int, micro_batch: MicroBatch[_T], generators: MicroBatchGenerators) -> None:
        """Runs one micro-batch up to its next border, after the handlers of signals that came meanwhile."""
        let_deferred_in()
        if not self._waiting:
            raise UsageError("the engine was called within a step of several micro-batches, which has ended them")
        self._micro_batch = number
        with generators.of(number):
            micro_batch.resume()

    @uninterrupted
    def _end(self) -> None:
        """Ends the micro-batches that wait at a border. Idempotent."""
        while self._waiting:
            self._waiting[-1].abandon()
            self._waiting.pop()
        self._micro_batch, self._one_by_one = 0, False

    def abandon(self) -> None:
        """Ends micro-batches that wait while the thread that runs them enters the engine, in a signal's handler."""
        if self._waiting and self._owner is threading.current_thread():
            self._end()

    def remove(self) -> None:
        self._end()
        while self._removers:
            self._removers.pop()()

    # -- the thread of a micro-batch ----------------------------------------------------------------

    def _as_mine(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Returns `work` wrapped so that its thread belongs to the micro-batch that runs."""

        def run() -> _T:
            self._local.micro_batch, self._local.border = self._waiting[self._micro_batch], START
            return work()

        return run

    def _add_border(self, module: nn.Module, number: int, first: int, last: int) -> None:
        """Installs the hooks of block `number`, in a list with the blocks from `first` to `last`."""

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is module:
                before_it = self._local.border.block
                begins = before_it % 1 != 0 or not first <= before_it < number
                self._wait_in_forward(number)
                if begins:  # code before the blocks also takes micro-batches in order
                    self._mark((args, kwargs), first - _END)

        def after(called: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if called is module:
                self._mark(output, number)
                if number == last:
                    self._wait_in_forward(number + _END)

        pre, post = outside_of_compiled_code(before), outside_of_compiled_code(after)
        self._removers.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(post).remove)

    def begin_backward(self) -> None:
        # A micro-batch that leaves out the last block has not waited behind it. What follows the blocks must have its
        # gradients in the order of the micro-batches too.
        end = len(self._blocks) - 1 + _END
        if self._local.border.block < end:
            self._wait_in_forward(end)

    def _wait_in_forward(self, block: float) -> None:
        """Waits at a border of the forward. A recomputation, that is a forward in a backward, does not wait."""
        local = self._local
        if local.micro_batch is None or inside_backward():
            return
        passed = local.border.passed + (block <= local.border.block)
        local.border = Border(False, max(passed, 0), block)
        local.micro_batch.pause(local.border)

    def _mark(self, tensors: Any, number: float) -> None:
        """Makes the backward wait before it enters the block with this number, which has made these tensors."""
        micro_batch = self._local.micro_batch
        if micro_batch is None or inside_backward():
            return
        border = Border(True, -self._local.border.passed, -number)
        for node in {leaf.grad_fn for leaf in tensors_in(tensors) if leaf.grad_fn is not None}:
            node.register_prehook(lambda grads: micro_batch.pause(border))
