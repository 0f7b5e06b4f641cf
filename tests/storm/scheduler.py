"""A scheduler that owns the order of threads: exactly one runs at a time, and a chooser decides which one goes on.

Threads are real. Each stops at named points: before a lock is taken, after it is released, at a wait, at the start and
the end of a thread, and wherever a test calls `point`. There the chooser lets the thread go on, or chooses another one,
or an event of the world, such as the end of a request. So a seed, or a list of choices, fixes the whole order:

    thread A   ──● point ──┐                 ┌── goes on
    thread B               └──● point ─┐     │
    the drive                          └─ ends a request

A thread that waits names the condition for which it waits, so the scheduler knows when nobody can go on: that is a
deadlock, found at once. Time is simulated: it passes only where every thread waits and one of them has a limit. A
number of points without `progress` is a livelock.

`threads` stands for the module `threading` in modules of the package (the point "threads.module" of `offload.testing`):
locks, events and threads that are made there belong to the scheduler.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

PATIENCE = 20_000
"""Points without progress until the order of threads is taken for a livelock. A step of a storm passes some hundred."""


_LOOP = 1_000
"""Points of a thread after which it does not end by itself."""


class Stuck(Exception):
    """No thread can go on, or none has made progress."""


class Abandoned(BaseException):
    """Ends a wait of a thread after the scheduler has given up. A `BaseException`, so that no handler goes on."""


class Event(NamedTuple):
    """Something that the world can do now, without a thread: a request that ends, a copy that is carried out."""

    actor: str
    """Who acts; events of one actor have one pace."""
    act: Callable[[], None]


# -- choices -------------------------------------------------------------------------------------------


class Chooser(Protocol):
    """Decides who goes on. Choice 0 is the calm one: the running thread, else the first that can run, else an event."""

    def moves(self, now: int) -> bool:
        """Returns True if another than the running thread may go on at point `now`."""

    def pick(self, now: int, actors: Sequence[str]) -> int:
        """Returns the index of one of `actors`, all of which could go on."""


class Listed:
    """Makes the choices of a list, and the calm one where the list has none."""

    def __init__(self, choices: Mapping[int, int] | None = None) -> None:
        self.choices = dict(choices or {})

    def moves(self, now: int) -> bool:
        return now in self.choices

    def pick(self, now: int, actors: Sequence[str]) -> int:
        index = self.choices.get(now, 0)
        return index if index < len(actors) else 0


class Seeded:
    """Draws choices from a seed, and lists those that are not calm in `choices`.

    A switch comes at a rate, and each actor has a pace. Both are drawn anew now and then: an even choice at each point
    would let all actors advance alike, and a fault that needs a slow one would hardly be met. In half of the seeds
    paces are so far apart that they are priorities, which few choices change, as in PCT (Burckhardt and others, 2010).
    """

    def __init__(self, seed: int) -> None:
        self.choices: dict[int, int] = {}
        self._chance = random.Random(f"order {seed}")
        self._paces: dict[str, float] = {}
        self._powers, self._changes = self._chance.choice([2, 6]), self._chance.choice([0.01, 0.002])
        self._change()

    def _change(self) -> None:
        self._rate = self._chance.choice([0.0, 0.003, 0.03, 0.1, 0.3])
        self._paces.clear()

    def moves(self, now: int) -> bool:
        return self._chance.random() < self._rate

    def pick(self, now: int, actors: Sequence[str]) -> int:
        if self._chance.random() < self._changes:
            self._change()
        for actor in actors:
            if actor not in self._paces:
                self._paces[actor] = 10 ** self._chance.uniform(-self._powers, 0)
        weights = [self._paces[actor] for actor in actors]
        index = self._chance.choices(range(len(actors)), weights)[0]
        if index:
            self.choices[now] = index
        return index


def shrunk(choices: Mapping[int, int], fails: Callable[[dict[int, int]], bool], most: int = 400) -> dict[int, int]:
    """Returns the fewest choices found in `most` runs with which `fails` is still true (Zeller's ddmin)."""
    kept, parts, runs = dict(choices), 2, 0
    while kept and runs < most:
        points = sorted(kept)
        size = -(-len(points) // parts)
        # The end first: what comes after the fault is of no use.
        for start in range((len(points) - 1) // size * size, -1, -size):
            fewer = {point: kept[point] for point in points[:start] + points[start + size :]}
            runs += 1
            if fails(fewer):
                kept, parts = fewer, max(2, parts - 1)
                break
            if runs >= most:
                break
        else:
            if size == 1:
                break
            parts = min(len(points), 2 * parts)
    return kept


def _no() -> bool:
    return False


# -- scheduler -----------------------------------------------------------------------------------------


class _Task:
    """A thread of the scheduler."""

    def __init__(self, name: str) -> None:
        self.name, self.ended = name, False
        self.ready: Callable[[], bool] | None = None
        """The condition for which the thread waits; None if it can go on."""
        self.until: float | None = None
        """Simulated time at which its wait ends in any case."""
        self.at = "start"
        self.refused = 0
        """Number of its points since the scheduler has given up."""
        self.turn = threading.Lock()
        self.turn.acquire()


class Scheduler:
    """Lets one thread at a time run. The thread that makes it is the first; `close` ends it."""

    def __init__(self, chooser: Chooser, patience: int = PATIENCE) -> None:
        self.now = 0
        """Number of points that were passed."""
        self.time = 1_000.0
        """Simulated seconds."""
        self.trace: list[str] = []
        """Who went on, where it was another than before."""
        self.failure: str | None = None
        """Why the scheduler has given up."""
        self.world: list[Callable[[], list[Event]]] = []
        """Functions that return what can happen now without a thread, in a fixed order."""
        self._chooser, self._patience, self._progress = chooser, patience, 0
        self._running = _Task("caller")
        self._tasks = [self._running]
        self._thread = threading.get_ident()
        self._real: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self.threads = SimpleNamespace(
            Lock=lambda: _Lock(self, False),
            RLock=lambda: _Lock(self, True),
            Event=lambda: _Flag(self),
            Thread=lambda *args, **kwargs: _Thread(self, *args, **kwargs),
            local=threading.local,
            current_thread=threading.current_thread,
            main_thread=threading.main_thread,
            get_ident=threading.get_ident,
        )
        """Stands for the module `threading`."""
        self.queues = SimpleNamespace(Queue=lambda most=0: _Queue(self, most))
        """Stands for the module `queue`."""
        self.clock = SimpleNamespace(
            monotonic=lambda: self.time, sleep=lambda seconds: self.point("sleep", _no, seconds)
        )
        """Stands for the module `time`."""

    def progress(self) -> None:
        """Notes that the program has come further."""
        self._progress = self.now

    def point(self, at: str, ready: Callable[[], bool] | None = None, seconds: float | None = None) -> None:
        """Lets others go on, until `ready()` is true or `seconds` of simulated time have passed.

        Raises:
            Stuck: nobody can go on.
            Abandoned: the same, on every other thread.
        """
        if threading.get_ident() != self._thread:
            raise AssertionError(f"{threading.current_thread().name} does not belong to the scheduler, and is at {at}")
        task = self._running
        if self.failure is None:
            task.at, task.ready = at, ready
            task.until = None if seconds is None else self.time + seconds
            self._hand_over(self._next())
        if self.failure is not None:
            self._refuse(task, ready)
        task.ready = None

    def _refuse(self, task: _Task, ready: Callable[[], bool] | None) -> None:
        """Ends the thread's loop, which may make no progress, or a wait that no thread will end."""
        task.refused += 1
        if task.refused % _LOOP == 1 or (ready is not None and not ready()):
            raise Stuck(self.failure) if task is self._tasks[0] else Abandoned

    def close(self) -> None:
        """Waits until every other thread has ended, and raises the error that has ended one."""
        self.point("the end", lambda: all(task.ended for task in self._tasks[1:]))
        if self._errors:
            raise self._errors[0]

    def join(self) -> None:
        """Joins the real threads, which end by themselves after `close` or a failure."""
        for thread in self._real:
            thread.join()

    def waiting(self) -> list[str]:
        """Returns where the threads that have not ended are."""
        return [f"{task.name} at {task.at}" for task in self._tasks if not task.ended]

    # -- choices ------------------------------------------------------------------------------------

    def _next(self) -> _Task:
        """Returns the thread that goes on, after the events of the world that were chosen before it."""
        running = self._running
        while True:
            self.now += 1
            self.time += 1e-6
            if self.now - self._progress > self._patience:
                return self._give_up("no progress")
            stays = self._can_run(running)
            if stays and not self._chooser.moves(self.now):
                return running
            tasks = [task for task in self._tasks if task is not running and self._can_run(task)]
            if stays:
                tasks.insert(0, running)
            events = [event for some in self.world for event in some()]
            if not tasks and not events:
                limits = [task.until for task in self._tasks if task.until is not None and not task.ended]
                if not limits:
                    return self._give_up("nobody can go on")
                self.time = max(self.time, min(limits))
                continue
            index = self._chooser.pick(self.now, [*(task.name for task in tasks), *(event.actor for event in events)])
            if index < len(tasks):
                return tasks[index]
            event = events[index - len(tasks)]
            self.trace.append(event.actor)
            event.act()

    def _can_run(self, task: _Task) -> bool:
        if task.ended:
            return False
        return task.ready is None or (task.until is not None and self.time >= task.until) or task.ready()

    def _give_up(self, why: str) -> _Task:
        """Ends all waits: every other thread ends first, the calling one of the test at last."""
        self.failure = f"{why}: {'; '.join(self.waiting())}"
        return self._heir()

    def _heir(self) -> _Task:
        return next((task for task in reversed(self._tasks) if not task.ended), self._tasks[0])

    def _hand_over(self, task: _Task) -> None:
        """Lets `task` run, and returns when it is the turn of the calling thread again."""
        running = self._running
        if task is running:
            return
        self.trace.append(task.name)
        self._running = task
        task.turn.release()
        if not running.ended:
            running.turn.acquire()
            self._thread = threading.get_ident()

    # -- threads ------------------------------------------------------------------------------------

    def _begin(self, name: str, run: Callable[[], None]) -> _Task:
        names = {task.name for task in self._tasks}
        task = _Task(name if name not in names else f"{name} {len(self._tasks)}")

        def body() -> None:
            task.turn.acquire()
            self._thread = threading.get_ident()
            try:
                run()
            except Abandoned:
                pass
            except BaseException as error:
                self._errors.append(error)
            finally:
                task.ended = True
                self._hand_over(self._heir() if self.failure is not None else self._next())

        self._tasks.append(task)
        self._real.append(threading.Thread(target=body, name=name, daemon=True))
        self._real[-1].start()
        return task


# -- what stands for the module threading -----------------------------------------------------------------


class _Lock:
    """A `Lock` or `RLock` whose waits the scheduler knows."""

    def __init__(self, scheduler: Scheduler, reentrant: bool) -> None:
        self._scheduler, self._reentrant = scheduler, reentrant
        self._owner: _Task | None = None
        self._count = 0
        frame = sys._getframe(2)
        self._name = f"lock of {frame.f_globals['__name__'].rpartition('.')[2]}:{frame.f_lineno}"

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if self._reentrant and self._owner is scheduler._running:
            self._count += 1
            return True
        if blocking:
            scheduler.point(self._name, self._is_free, None if timeout < 0 else timeout)
        if self._count and scheduler.failure is None:
            return False
        self._owner, self._count = scheduler._running, 1
        return True

    def release(self) -> None:
        assert self._count or self._scheduler.failure is not None, "a lock is released that nobody has"
        self._count = max(0, self._count - 1)
        if not self._count:
            self._owner = None
            self._scheduler.point(f"{self._name}, released")

    def locked(self) -> bool:
        return self._count > 0

    def _is_owned(self) -> bool:
        return self._owner is self._scheduler._running

    def _is_free(self) -> bool:
        return not self._count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Flag:
    """An `Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._scheduler.point("an event, set")

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._scheduler.point("an event", self.is_set, timeout)
        return self._set


class _Queue:
    """A `Queue`."""

    def __init__(self, scheduler: Scheduler, most: int) -> None:
        self._scheduler, self._most, self._things = scheduler, most, list[Any]()

    def put(self, thing: Any) -> None:
        self._scheduler.point("room in a queue", lambda: not self._most or len(self._things) < self._most)
        self._things.append(thing)

    def get(self) -> Any:
        self._scheduler.point("a queue", lambda: bool(self._things))
        return self._things.pop(0)


class _Thread:
    """A `Thread` that runs in its turn."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., Any],
        name: str,
        args: Sequence[Any] = (),
        daemon: bool | None = None,
    ) -> None:
        self._scheduler, self._target, self._args, self.name, self.daemon = scheduler, target, args, name, daemon
        self._task: _Task | None = None

    def start(self) -> None:
        self._task = self._scheduler._begin(self.name, lambda: self._target(*self._args))
        self._scheduler.point(f"start of {self.name}")

    def join(self, timeout: float | None = None) -> None:
        self._scheduler.point(f"end of {self.name}", lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended
