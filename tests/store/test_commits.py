"""A commit is whole or not there, whatever moment a kill chooses."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import offload
from offload import testing
from offload.engine.snapshot import Snapshot, as_bytes, read_generators
from offload.engine.update import UpdateWorker
from offload.errors import EngineFailed, StoreError
from offload.fileio.plain_json import from_plain, to_plain
from offload.swapper.store import Store, run_status
from offload.swapper.store import store as swap_files
from offload.swapper.store.format import read_records
from tests.support import models
from tests.support.drives.fault_injection import die, die_after_writes
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, dies, run, start, train_step, weights_of

STEPS = 6


class Breaks(lr_scheduler.LambdaLR):
    """Moves the learning rate each step; once, it is interrupted before or after it has."""

    whens: ClassVar[list[str]] = []  # no part of its state

    def step(self, epoch: Any = None) -> None:
        when = self.whens.pop() if self.last_epoch == 2 and self.whens else ""
        if when == "before":
            raise KeyboardInterrupt
        super().step(epoch)
        if when:
            raise KeyboardInterrupt


class Halves:
    """A schedule as a script writes it: where it is nobody can ask."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2


def breaks(optimizer: torch.optim.Optimizer) -> Breaks:
    return Breaks(optimizer, lambda step: 1 / (1 + step))


def begin(folder: Path, schedule: Callable[[Any], Any] | None = breaks, **options: Any) -> offload.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(folder), "device": "cpu", "resume": "auto", **options},
    }

    return offload.initialize(model=nn.Linear(4, 1), lr_scheduler=schedule, config=config).engine


def stepped(engine: offload.Engine) -> tuple[float, float, int]:
    rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(engine.global_steps))
    loss = engine(rows).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item(), engine.get_lr()[0], getattr(engine.lr_scheduler, "last_epoch", 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("leave", ["destroy", "exit"])
def test_a_step_whose_schedule_was_interrupted_is_not_committed(when: str, leave: str, tmp_path: Path) -> None:
    unbroken = begin(tmp_path / "whole")
    expected = [stepped(unbroken) for _ in range(STEPS)]
    unbroken.destroy()
    engine = begin(tmp_path / "cut")
    Breaks.whens.append(when)
    seen = [stepped(engine) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        stepped(engine)
    with pytest.raises(EngineFailed):
        stepped(engine)
    engine.destroy() if leave == "destroy" else testing.leave(engine)
    again = begin(tmp_path / "cut")
    assert again.global_steps == again.lr_scheduler.last_epoch == 2
    seen += [stepped(again) for _ in range(2, STEPS)]
    again.destroy()
    assert seen == expected


def test_a_worker_that_is_late_commits_no_step_before_its_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked for a commit, found no work, and lies asleep until the next step and its blob are there."""
    late, delivered, commits = threading.Event(), threading.Event(), []

    def look_late(look: Callable[[UpdateWorker], bool], self: UpdateWorker) -> bool:
        if late.is_set() and not self._busy and self._commit_step is None:
            late.clear()
            assert delivered.wait(60)
        return look(self)

    def deliver_and_say(deliver: Callable[..., None], self: UpdateWorker, blob: Any) -> None:
        deliver(self, blob)
        delivered.set()

    def remember(commit: Callable[..., None], self: Store, epoch: int, contents: Any) -> None:
        commits.append((epoch, self.durable is None or self.newest != list(self.durable.slots)))
        commit(self, epoch, contents)

    testing.intercept(monkeypatch, "update.commit", look_late)
    testing.intercept(monkeypatch, "update.deliver", deliver_and_say)
    engine = begin(tmp_path, None)
    stepped(engine)
    testing.settle(engine)
    testing.intercept(monkeypatch, "store.commit", remember)
    delivered.clear()
    late.set()
    while late.is_set():  # until the worker has looked
        with testing.inspect(engine).pager.lock:
            testing.inspect(engine).update_worker._wake()
        time.sleep(0.001)
    stepped(engine)
    stepped(engine)
    engine.destroy()
    assert commits == [(2, True), (3, True)]


def test_a_step_that_was_not_counted_stops_nothing(tmp_path: Path) -> None:
    """What raises before the step is decided is a mistake of the loop, and it goes on."""
    engine = begin(tmp_path)
    stepped(engine)
    engine.backward(engine(torch.full((2, 4), torch.inf)).square().mean())
    with pytest.raises(offload.errors.NumericsError):
        engine.step()
    assert engine.lr_scheduler.last_epoch == 1
    stepped(engine)
    engine.destroy()


def test_the_final_message_names_the_committed_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin(tmp_path / "whole")
    for _ in range(3):
        stepped(engine)
    with caplog.at_level(logging.WARNING, "offload"):
        testing.leave(engine)
    assert "at step 3: " in caplog.text and "a start without it begins anew" in caplog.text
    caplog.clear()
    engine = begin(tmp_path / "failed", durability={"every": 2})
    for _ in range(4):
        stepped(engine)
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    testing.fail(engine, RuntimeError("of the test"))
    with caplog.at_level(logging.WARNING, "offload"):
        testing.leave(engine)
    assert "at step 4, the last committed one of 5: " in caplog.text
    assert "a start without it is refused while the run is there" in caplog.text
    again = begin(tmp_path / "failed")
    assert again.global_steps == 4
    again.destroy()


def test_a_schedule_that_cannot_be_saved_is_reported_at_the_start_and_at_the_resume(tmp_path: Path) -> None:
    engine = begin(tmp_path / "run", Halves)
    assert sum("Halves has no state_dict()" in line for line in engine.notices) == 1
    stepped(engine)
    engine.destroy()
    again = begin(tmp_path / "run", Halves)
    assert sum("Halves keeps the state that this script created, at step 1" in line for line in again.notices) == 1
    again.destroy()
    for engine in (begin(tmp_path / "held"), begin(tmp_path / "none", None)):
        assert not any("schedule" in line for line in engine.notices)
        engine.destroy()
    free = begin(tmp_path / "free", Halves, durability="none", resume="never")
    assert not any("Halves" in line for line in free.notices), "nothing is held there at all"
    free.destroy()


DISK = ("nvme", "nvme")
JOB = models.DROPOUT._replace(dtype="bf16", steps=8, accumulation=2)
EVERY = {"durability": {"every": 3}}


@functools.cache
def each_step(placement: tuple[str, str]) -> Result:
    """What a run gives that commits each step: trained once, for all tests that compare with it."""
    with tempfile.TemporaryDirectory() as folder:
        return run(JOB, placement, Path(folder), durability="step")


def recorded_epochs(folder: Path) -> list[int]:
    """The epochs of the two records, newest first."""
    return [record.step for record in read_records(folder / "default" / "rank0" / "commit").valid]


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that this process commits, in order."""
    epochs: list[int] = []

    def recorded(commit: Callable[..., None], store: Store, epoch: int, blob: Any) -> None:
        epochs.append(epoch)
        commit(store, epoch, blob)

    testing.intercept(monkeypatch, "store.commit", recorded)
    return epochs


def test_a_commit_every_third_step_and_at_the_end(
    tmp_path: Path, commits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third is counted from the first step of the run; how often is no property of the store."""
    expected = each_step(DISK).losses
    del commits[:]
    syncs: list[str] = []
    testing.intercept(monkeypatch, "file.sync", lambda sync, file: (syncs.append(file.path), sync(file))[1])

    def part(steps: range, **options: Any) -> list[float]:
        engine = start(JOB, DISK, tmp_path, **options)
        assert engine.global_steps == steps.start
        losses = [train_step(engine, JOB, step) for step in steps]
        engine.destroy(remove=steps.stop == JOB.steps)
        return losses

    losses = part(range(5), **EVERY)
    assert commits == [0, 3, 5] and recorded_epochs(tmp_path) == [5, 3]
    assert len(syncs) == len(commits), "nothing is synced between commits"
    losses += part(range(5, 6), resume="must", **EVERY)
    assert commits[3:] == [6], "a run that ends on a commit is not committed twice"
    losses += part(range(6, 8), resume="must", durability="step")
    assert commits[4:] == [7, 8] and losses == expected


# -- killed within a window ---------------------------------------------------------------------------


def _die_after(folder: Path, placement: tuple[str, str], steps: int, writes: int, options: dict[str, Any]) -> None:
    """Train `steps` steps, then die when so many writes of the updates of the last one have ended."""
    logging.disable(logging.CRITICAL)
    engine = start(JOB, placement, folder, **options)
    for step in range(steps - 1):
        train_step(engine, JOB, step)
    if testing.inspect(engine).update_worker is not None:
        testing.settle(engine, commit=False)
    die_after_writes(writes)
    train_step(engine, JOB, steps - 1)
    engine.destroy()


@pytest.mark.sample(1)
@pytest.mark.parametrize("writes", [1, 6])
@pytest.mark.parametrize(("steps", "committed"), [(1, 0), (3, 0), (5, 3), (6, 3)])
@pytest.mark.parametrize("placement", [DISK, ("cpu", "cpu")])
def test_a_kill_loses_the_steps_since_the_last_commit(
    placement: tuple[str, str], steps: int, committed: int, writes: int, tmp_path: Path
) -> None:
    dies(_die_after, tmp_path / "cut", placement, steps, writes, EVERY)
    unbroken = each_step(placement)
    engine = start(JOB, placement, tmp_path / "cut", resume="must", **EVERY)
    assert engine.global_steps == committed
    losses = [train_step(engine, JOB, step) for step in range(committed, JOB.steps)]
    weights = engine.module.state_dict()
    assert losses == unbroken.losses[committed:]
    assert_same_tensors(weights, unbroken.weights)
    engine.destroy(remove=True)


# -- edits --------------------------------------------------------------------------------------------


def _edit(engine: offload.Engine, value: float) -> None:
    for parameter in list(engine.module.parameters())[:3]:
        with offload.gathered(parameter, modify=True):
            parameter.data.add_(value)


def _train_with_edits(engine: offload.Engine, steps: range) -> list[float]:
    """An edit before steps 1, 4 and 5: in the first window, and two in the second."""
    losses = []
    for step in steps:
        if step in (1, 4, 5):
            _edit(engine, 0.01 * step)
        losses.append(train_step(engine, JOB, step))
    return losses


@functools.cache
def edited_in_memory() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all steps with their edits, and the weights: in memory, where nothing is committed."""
    engine = start(JOB, ("none", "none"), Path())
    try:
        return _train_with_edits(engine, range(8)), weights_of(engine)
    finally:
        engine.destroy()


def test_edits_in_a_window(tmp_path: Path, commits: list[int]) -> None:
    """They belong to the next commit, or to that of `destroy`; one that has no step behind it too."""
    expected, _ = edited_in_memory()
    engine = start(JOB, DISK, tmp_path / "disk", **EVERY)
    losses = _train_with_edits(engine, range(5))
    _edit(engine, 0.25)  # then another process goes on: it must find it
    edited = weights_of(engine)
    engine.destroy()
    assert commits[-2:] == [3, 5]
    engine = start(JOB, DISK, tmp_path / "disk", resume="must", **EVERY)
    states = engine.module.state_dict()
    assert_same_tensors(states, edited)
    assert losses == expected[:5]
    engine.destroy(remove=True)


def _die_after_edits(folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    engine = start(JOB, DISK, folder, **EVERY)
    _train_with_edits(engine, range(5))
    _edit(engine, 0.5)
    engine.module.state_dict()  # the edit has been carried out, into the slots of the window
    testing.settle(engine)
    die()


@pytest.mark.slow
def test_a_kill_takes_edits_of_the_window_with_it(tmp_path: Path) -> None:
    expected, weights = edited_in_memory()
    dies(_die_after_edits, tmp_path / "disk")
    engine = start(JOB, DISK, tmp_path / "disk", resume="must", **EVERY)
    assert engine.global_steps == 3
    assert _train_with_edits(engine, range(3, 8)) == expected[3:]
    states = engine.module.state_dict()
    assert_same_tensors(states, weights)
    engine.destroy(remove=True)


# -- a forward that is given up -----------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("durability", ["step", {"every": 3}], ids=str)
def test_ctrl_c_in_a_forward_and_another_process(durability: Any, tmp_path: Path) -> None:
    """The commit of the end is of the moment after the last step: what the forward has drawn since is drawn again."""
    job, expected = JOB._replace(accumulation=1), []
    engine = start(job, ("none", "none"), tmp_path)
    for step in range(job.steps):
        if step == 5:
            _edit(engine, 0.01)
        expected.append(train_step(engine, job, step))
    engine.destroy()
    engine = start(job, DISK, tmp_path / "disk", durability=durability)
    losses = [train_step(engine, job, step) for step in range(5)]
    _edit(engine, 0.01)
    engine.module.transformer.h[2].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.loss(engine, 5, 0)
    engine.destroy()
    engine = start(job, DISK, tmp_path / "disk", resume="must", durability=durability)
    assert engine.global_steps == 5
    losses += [train_step(engine, job, step) for step in range(5, job.steps)]
    engine.destroy(remove=True)
    assert losses == expected


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# -- states that no commit has ------------------------------------------------------------------------


FACTS: dict[str, Any] = {
    **dict.fromkeys(("global_steps", "skipped_steps", "micro_steps", "global_samples"), 0),
    **{key: [] for key in ("parameter_steps", "registered", "groups", "configured")},
    **dict.fromkeys(("scheduler", "loss_scale", "data"), None),
}
"""What the facts of a step have besides."""


def strict(text: bytes) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [math.inf, [-math.inf, (1.0, math.inf)], {math.inf: {"best": -math.inf}}])
def test_infinities_come_back(value: Any) -> None:
    plain = to_plain({"mine": value}, "it", "")
    assert from_plain(strict(json.dumps(plain).encode())) == {"mine": value}
    facts = {**FACTS, "client_state": plain, "settings": {"gradient clipping": math.inf, "nan": math.nan}}
    packed = Snapshot(facts, {}, {}).pack()
    strict(bytes(packed["facts"].numpy()))
    snapshot = Snapshot.unpack(packed).facts
    assert from_plain(snapshot["client_state"]) == {"mine": value}
    assert snapshot["settings"]["gradient clipping"] == math.inf and math.isnan(snapshot["settings"]["nan"])


@pytest.mark.parametrize(
    "change",
    [
        {"torch": torch.zeros(16, dtype=torch.uint8)},
        {"torch": torch.zeros(5056)},
        {"python": as_bytes(b"[3, [1, 2], null]")},
        {"python": as_bytes(b"{")},
        {"numpy": as_bytes(b'["MT19937", [-1], 0, 0, 0.0]')},
    ],
)
def test_a_generator_that_cannot_be_restored_is_an_error_before_one_is(change: dict[str, torch.Tensor]) -> None:
    generators = read_generators(torch.device("cpu"))
    assert Snapshot.unpack(Snapshot(FACTS | {"client_state": {}, "settings": {}}, generators, {}).pack()).generators
    packed = Snapshot(FACTS | {"client_state": {}, "settings": {}}, generators | change, {}).pack()
    with pytest.raises(StoreError, match="the states of random generators are damaged, or made up"):
        Snapshot.unpack(packed)


@pytest.mark.parametrize(
    "value",
    [
        {"\0tensor": ["load", [1], ""]},
        {"\0tensor": ["uint8", [3], "AAAA" * 100_000]},
        {"\0tensor": ["uint8", [-1], "!"]},
        {"\0dict": [[{}, 1]]},
        {"\0tuple": 5},
        {"\0float": []},
    ],
)
def test_a_state_that_no_commit_has_is_an_error_of_ours(value: Any) -> None:
    with pytest.raises(StoreError, match="a saved state is damaged, or made up"):
        from_plain({"x": [value]})


def test_a_tensor_beside_the_json_is_taken_once() -> None:
    """A kilobyte of text could otherwise ask for a thousand copies of it."""
    tensors: list[torch.Tensor] = []
    plain = to_plain([torch.ones(3), b"ab", torch.ones(3)], "it", "", tensors)
    beside = {str(number): tensor for number, tensor in enumerate(tensors)}
    for _ in range(2):
        values = from_plain(plain, beside)
        assert torch.equal(values[0], torch.ones(3)) and values[1] == b"ab" and torch.equal(values[0], values[2])
    for number in (0, 1):
        with pytest.raises(StoreError, match="a saved state is damaged, or made up: KeyError"):
            from_plain([plain[number], plain[number]], beside)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [{"lr": "1"}]},
        {"groups": [{"betas": [0.9, {}]}]},
        {"groups": [{"lr": 10**400}]},
        {"groups": [{"lr": 1.0}], "configured": []},
        {"members": [["a"]]},
        {"options": [{"flag": []}]},
        {"loss_scale": {"scale": 2.0, "steps": 0, "overflowed_at": -1}},
        {"loss_scale": {"scale": "2", "steps": 0, "overflowed_at": -1, "patience": 2}},
        {"settings": {"accumulation": [2]}},
        {"settings": {"micro-batch size": 0}},
        {"settings": {"samples of a step": "8"}},
    ],
)
def test_facts_that_no_step_has_are_an_error_before_an_engine_has_them(change: dict[str, Any]) -> None:
    group = {"lr": math.inf, "betas": [0.9, 0.99], "amsgrad": False, "eps": None}
    right = {"groups": [group], "configured": [group], "members": [["a"]], "settings": {"accumulation": 2, "x": "y"}}
    Snapshot.unpack(Snapshot({**FACTS, "client_state": {}, **right}, {}, {}).pack())
    packed = Snapshot({**FACTS, "client_state": {}, "settings": {}, **change}, {}, {}).pack()
    with pytest.raises(StoreError, match="the facts on a step are damaged, or made up"):
        Snapshot.unpack(packed)


POINTS_JOB = models.DROPOUT._replace(dtype="bf16", steps=6)
EPOCH = 3
"""The commit in which a process is killed, where it is not the first."""


class Point(NamedTuple):
    """Where to die: at the `count`th call of `os.<call>` for a file whose name begins so."""

    call: str
    file: str
    moment: str
    """before, halfway (through the bytes of a write) or after."""
    count: int = 1


def deadly(point: Point) -> Callable[[], None]:
    """Make the point deadly in this process from the moment that what is returned is called."""
    real, armed = getattr(os, point.call), False
    left = point.count

    def call(target: Any, *arguments: Any) -> Any:
        nonlocal left
        name = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if not armed or not os.path.basename(name).startswith(point.file):
            return real(target, *arguments)
        left -= 1
        if left:
            return real(target, *arguments)
        if point.moment == "halfway":
            data, offset = arguments
            real(target, memoryview(data)[: len(data) // 2], offset)
        elif point.moment == "after":
            real(target, *arguments)
        die()

    def arm() -> None:
        nonlocal armed
        armed = True

    setattr(os, point.call, call)
    return arm


def in_commit_of(epoch: int, point: Point) -> None:
    arm, commit = deadly(point), Store.commit

    def commit_and_die(store: Store, number: int, contents: Any) -> None:
        if number == epoch:
            arm()
        commit(store, number, contents)

    Store.commit = commit_and_die  # type: ignore[method-assign]


def in_call_of(method: str, point: Point) -> None:
    """`method` of a store."""
    arm, real = deadly(point), getattr(Store, method)

    def call(store: Store, *arguments: Any, **options: Any) -> Any:
        arm()
        return real(store, *arguments, **options)

    setattr(Store, method, call)


# -- a process that dies ------------------------------------------------------------------------------


def _train(folder: Path, log: Path, steps: int, prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    logging.disable(logging.CRITICAL)
    prepare(*arguments)
    engine = start(POINTS_JOB, DISK, folder, resume="auto")
    _steps(engine, log, steps)
    engine.destroy()


def _steps(engine: Any, log: Path, steps: int) -> None:
    with log.open("a") as lines:
        while engine.global_steps < steps:
            step = engine.global_steps
            loss = train_step(engine, POINTS_JOB, step)
            print(json.dumps([step, loss, engine.get_global_grad_norm()]), file=lines, flush=True)


def killed(folder: Path, prepare: Callable[..., None], *arguments: Any) -> None:
    """Train in a process that dies where `prepare` says."""
    dies(_train, folder, folder / "log", POINTS_JOB.steps, prepare, arguments)


def resumed(folder: Path, expected: int, unbroken: Result) -> None:
    """Go on in this process, from the step `expected`; all steps, those done twice too, are as in the unbroken run."""
    assert run_status([folder], "default").exists == (expected >= 0)
    engine = start(POINTS_JOB, DISK, folder, resume="auto")
    assert engine.global_steps == max(expected, 0)
    _steps(engine, folder / "log", POINTS_JOB.steps)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    steps_seen: dict[int, tuple[float, float]] = {}
    for line in (folder / "log").read_text().splitlines():
        step, *rest = json.loads(line)
        assert steps_seen.setdefault(step, rest) == rest, f"step {step} differs after a resume"
    steps = sorted(steps_seen)
    assert_same(unbroken, Result([steps_seen[s][0] for s in steps], [steps_seen[s][1] for s in steps], weights))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(POINTS_JOB, DISK, tmp_path_factory.mktemp("whole"))


NONE = -1
"""There is nothing to resume, and nothing in the way of a start."""

IN_COMMIT = {
    "before the data is synced": (Point("fdatasync", "states", "before"), 0),
    "when the data is synced": (Point("fdatasync", "states", "after"), 0),
    "halfway through the blob": (Point("pwrite", "blob", "halfway"), 0),
    "before the blob is synced": (Point("fsync", "blob", "before"), 0),
    "when the blob is synced": (Point("fsync", "blob", "after"), 0),
    "halfway through the record": (Point("pwrite", "commit", "halfway"), 0),
    "before the record is synced": (Point("fsync", "commit", "before"), 1),
    "when the record is synced": (Point("fsync", "commit", "after"), 1),
}
"""And whether the commit then counts."""

IN_CREATE = {
    "before the room is reserved": Point("posix_fallocate", "states", "before"),
    "when the room is reserved": Point("posix_fallocate", "states", "after"),
    "halfway through the empty records": Point("pwrite", "commit", "halfway"),
    "halfway through the manifest": Point("pwrite", "manifest", "halfway"),
    "before the manifest has its name": Point("replace", "manifest", "before"),
    "when the manifest has its name": Point("replace", "manifest", "after"),
}


KILLS = [
    *(("a start", point) for point in IN_CREATE),
    *(("the first commit", point) for point in IN_COMMIT),
    *(("the first commit", f"when {which} reserved") for which in ("the first blob is", "both blobs are")),
    *(("a commit", point) for point in IN_COMMIT),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("when", "point"), KILLS)
def test_a_kill_loses_at_most_the_commit_under_way(when: str, point: str, tmp_path: Path, unbroken: Result) -> None:
    """A start that was killed leaves a store that starts again."""
    if when == "a start":
        killed(tmp_path, in_call_of, "create", IN_CREATE[point])
        return resumed(tmp_path, NONE, unbroken)
    where, counts = IN_COMMIT.get(point, (Point("posix_fallocate", "blob", "after", 1 + ("both" in point)), 0))
    if when == "a commit":
        killed(tmp_path, in_commit_of, EPOCH, where)
        return resumed(tmp_path, EPOCH - 1 + counts, unbroken)
    count = 3 if where[:2] == ("fsync", "blob") else where.count  # the first two are of their reservation
    killed(tmp_path, in_commit_of, 0, where._replace(count=count))
    return resumed(tmp_path, 0 if counts else NONE, unbroken)


def test_while_the_run_is_removed(tmp_path: Path, unbroken: Result) -> None:
    """It has ended, and is not begun again by `"resume": "auto"`; see `test_power_cut.py` for the others."""
    killed(tmp_path, _dead_in_removal)
    status = run_status([tmp_path], "default")
    assert not status.exists and status.finished is not None and status.finished["steps"] == POINTS_JOB.steps
    start(POINTS_JOB, DISK, tmp_path).destroy(remove=True)


def _dead_in_removal() -> None:
    def remove_half(folder: Path) -> None:
        (folder / "states").unlink()
        die()

    swap_files.remove_files = remove_half  # type: ignore[assignment]
    Store.close = lambda store: (store.note_end({"steps": POINTS_JOB.steps}), store.remove())  # type: ignore


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", [0, 3, 7])
def test_an_optimizer_without_states_has_two_slots_too(when: int, tmp_path: Path) -> None:
    """In fp32 its units have weights alone, as frozen ones do: what a commit names must not be written over."""
    job = POINTS_JOB._replace(dtype="fp32", optimizer="SGD", lr=0.1, weight_decay=0.0)
    unbroken = run(job, DISK, tmp_path / "whole")
    dies(_die_in_a_write, job, tmp_path / "run", when)
    engine = start(job, DISK, tmp_path / "run", resume="must")
    first = engine.global_steps
    losses = [train_step(engine, job, step) for step in range(first, job.steps)]
    assert losses == unbroken.losses[first:]
    engine.destroy(remove=True)


def _die_in_a_write(job: Job, folder: Path, when: int) -> None:
    write, left = Store.write, when

    def deadly_write(self: Store, *arguments: object) -> object:
        nonlocal left
        if self.durable is not None and self.durable.step >= EPOCH:
            left -= 1
            if left < 0:
                die()
        return write(self, *arguments)  # type: ignore[arg-type]

    Store.write = deadly_write  # type: ignore[method-assign,assignment]
    run(job, DISK, folder)
