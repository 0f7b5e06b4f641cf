"""What a drive changes, loses or confuses under a live run is noticed before a result of these bytes is committed."""

from __future__ import annotations

import errno
import functools
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.errors import IoError, OffloadError
from offload.states import State
from offload.swapper.store import Store
from offload.swapper.store.spill_file import SpillFile
from tests.store import test_repair
from tests.support.drives.fault_injection import use_queue
from tests.support.drives.rot import KINDS, Rot, RottingQueue
from tests.support.least_budget import budget
from tests.support.modules.checkpointed import small_inputs_move, square_loss
from tests.support.oracle import Job, small_pieces, start, train_step

DISK = ("nvme", "nvme")
FAULTS_UNTIL, STEPS = 2, 4
"""A fault comes in one of the first steps; by the last one every byte was read again, or scrubbed."""


class Model(test_repair.Model):
    depth = 4


class Deep(Model):
    """The same with so many blocks that their inputs come back from the drive."""

    depth = 10


JOB = Job(Model, square_loss, steps=STEPS, lr=1e-2, dtype="bf16", accumulation=2)
RUNS: dict[str, dict[str, Any]] = {
    "gradients spill": {"durability": "step", "host": 0.0},
    "without durability": {"durability": "none", "host": 0.0},
    "inputs move": {"durability": "step", "activations": "nvme", "host": 0.3},
}
JOBS = {"inputs move": JOB._replace(model=Deep, accumulation=1)}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    small_inputs_move(monkeypatch)


class Requests:
    """The requests of a run, each with the name of its bytes: the state, "frozen", or what is spilled."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        """Names requests from now on."""
        self.counts: Counter[tuple[str, str]] = Counter()
        self._name = threading.local()
        for name in ("_read", "write"):
            self._watch(patches, Store, name, self._of_store)
        for name in ("read", "write"):
            self._watch(patches, SpillFile, name, lambda file, key, *_: file._title(key).split(" of ")[0])

    def _of_store(self, store: Store, unit: int, state: State, _slot: int, start: int, *_: Any) -> str:
        if state is not State.WEIGHT:
            return state.value
        frozen = store.spec.frozen[unit] if store.spec.frozen else 0
        return "frozen" if start >= store._places[unit][state][0].nbytes - frozen else "weight"

    def _watch(self, patches: pytest.MonkeyPatch, owner: type, name: str, of: Callable[..., str]) -> None:
        method = getattr(owner, name)

        def named(self_: Any, *arguments: Any, **options: Any) -> Any:
            self._name.now = of(self_, *arguments)
            try:
                return method(self_, *arguments, **options)
            finally:
                self._name.now = ""

        patches.setattr(owner, name, named)

    def count(self, operation: str) -> tuple[str, str, int]:
        """Counts a request that is submitted on this thread, and returns its number among those of its kind."""
        key = (operation, getattr(self._name, "now", ""))
        self.counts[key] += 1
        return *key, self.counts[key]


def train(run: str, folder: Path, rot: Callable[[Requests], Rot]) -> tuple[list[float], OffloadError | None, Requests]:
    """Trains, and returns the losses up to the end or to an error, the error, and the requests of the first steps."""
    options = dict(RUNS[run])
    job, above = JOBS.get(run, JOB), options.pop("host")
    for budget_name, times in (("host_memory", above), ("device_memory", 0.0)):
        options |= budget(job, DISK, budget_name, times, folder, **options)
    losses, counts = list[float](), Counter[tuple[str, str]]()
    with pytest.MonkeyPatch.context() as patches:
        requests = Requests(patches)
        fault = rot(requests)
        use_queue(patches, lambda: RottingQueue(fault))
        engine = None
        try:
            engine = start(job, DISK, folder, **options)
            for step in range(STEPS):
                losses.append(train_step(engine, job, step))
                if step < FAULTS_UNTIL:
                    counts = requests.counts.copy()
            engine.destroy(remove=True)
            error = None
        except OffloadError as found:
            error = found
            if engine is not None:
                engine.destroy(remove=True)
        requests.counts = counts
        return losses, error, requests


@functools.cache
def calm(run: str) -> tuple[list[float], Counter[tuple[str, str]]]:
    """Returns the losses of a run without a fault, and the number of requests of each kind of its first steps."""
    with tempfile.TemporaryDirectory() as folder:

        def counted(requests: Requests) -> Rot:
            return Rot("bit", 0, lambda request: requests.count(request)[2] == 0, Path(folder))

        losses, error, requests = train(run, Path(folder), counted)
        assert error is None and len(losses) == STEPS
        return losses, requests.counts


def moment(run: str, seed: int) -> tuple[str, str, int, str]:
    """Returns the operation, the name of the bytes and the number of the request that meets a fault, and the fault."""
    chance = random.Random(f"{run} {seed}")
    counts = calm(run)[1]
    name = chance.choice(sorted({name for _, name in counts if name}))
    while True:
        kind = chance.choice(KINDS)
        operation = {"lost": "write", "misdirected": "write", "stale": "read"}.get(kind) or chance.choice(
            ["read", "write"]
        )
        # Frozen weights are written once: no other bytes were there before.
        if counts[operation, name] and (kind, name) != ("stale", "frozen"):
            return operation, name, chance.randint(1, counts[operation, name]), kind


def notice(run: str, seed: int, folder: Path) -> tuple[str, ...]:
    """Lets a drive rot at one moment of a run, and returns what it was."""
    operation, name, number, kind = moment(run, seed)
    faults = list[Rot]()

    def rot(requests: Requests) -> Rot:
        faults.append(Rot(kind, seed, lambda request: requests.count(request) == (operation, name, number), folder))
        return faults[0]

    folder.mkdir(parents=True, exist_ok=True)
    losses, error, _ = train(run, folder, rot)
    words = f"{run}: {kind} at {operation} {number} of {name}: {faults[0].struck}"
    assert faults[0].struck, words
    assert losses == calm(run)[0][: len(losses)], f"{words}: another loss"
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, IoError) and cause.errno == errno.EBADMSG):
        cause = cause.__cause__
    assert (cause is not None) == faults[0].was_read, f"{words}: {error}"
    return run, name, kind, "noticed" if cause is not None else "never read again"


@pytest.mark.sample(2)
@pytest.mark.parametrize(("run", "seed"), [("gradients spill", 0), ("without durability", 0), ("inputs move", 4)])
def test_rot_under_a_live_run_is_noticed(run: str, seed: int, tmp_path: Path) -> None:
    notice(run, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_rot_at_more_than_five_hundred_moments_is_noticed(part: int, tmp_path: Path) -> None:
    """`-s` prints how many of each kind; nothing reads the bytes of few again, such as those of an input in memory."""
    counts = Counter(
        notice(run, 100 * part + seed, tmp_path / run / f"{seed}") for seed in range(10, 19) for run in RUNS
    )
    print("\n".join(f"{count:4} {' '.join(words)}" for words, count in sorted(counts.items())))
    assert sum(count for words, count in counts.items() if "noticed" in words) > 20
