"""Damage of a slot is mended from a true copy, or named with what is lost; an older value never takes its place."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from offload.aio import File, IoFuture
from offload.cli.commands import store as commands
from offload.cli.main import app
from offload.errors import IoError, OffloadError
from offload.runs.verify import RunChecking
from offload.sizes import PAGE
from offload.states import State
from offload.swapper.store.inspection import look
from tests.support.drives.fault_injection import LateQueue, flip_bit, use_queue
from tests.support.modules.checkpointed import Stack, square_loss
from tests.support.oracle import Job, small_pieces, start, train_step, weights_of

DISK = ("nvme", "nvme")
COMMITTED, STEPS = 3, 4


class Model(Stack):
    """A stack with a frozen block, and one that is frozen in part."""

    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)


JOB = Job(Model, square_loss, steps=STEPS, lr=1e-2, dtype="bf16")


class Calm(NamedTuple):
    """A run of three steps, which are all kept, and how it goes on."""

    folder: Path
    losses: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    folder = tmp_path_factory.mktemp("calm")
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        engine = start(JOB, DISK, folder / "swap", keep_every=1)
        losses = [train_step(engine, JOB, step) for step in range(COMMITTED)]
        engine.destroy()
        shutil.copytree(folder / "swap", folder / "on")
        rest, weights = go_on(folder / "on")
    return Calm(folder / "swap", losses + rest, weights)


def go_on(folder: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Resumes the run and trains it to its end; returns the losses from the step on at which it was resumed."""
    engine = start(JOB, DISK, folder, resume="must", **options)
    try:
        losses = [train_step(engine, JOB, step) for step in range(engine.global_steps, STEPS)]
        return losses, weights_of(engine)
    finally:
        engine.destroy(remove=False)


@pytest.fixture
def swap(calm: Calm, tmp_path: Path) -> Path:
    return Path(shutil.copytree(calm.folder, tmp_path / "swap"))


class Place(NamedTuple):
    """A byte of the states that the last commit names."""

    unit: int
    state: State
    offset: int
    """In the states file."""
    frozen: bool


def any_place(swap: Path, chance: random.Random) -> Place:
    """Draws a byte, in a frozen region as often as in another."""
    files = look(swap / "default" / "rank0")
    assert files.manifest is not None
    spec, record = files.manifest.spec, files.commits[0].record
    frozen = chance.random() < 0.5
    choices = [
        (unit, state, place.nbytes, spec.frozen[unit] if state is State.WEIGHT else 0, place)
        for unit, row in enumerate(spec.places())
        for state, slots in row.items()
        for place in [slots[record.slots[unit]]]
    ]
    unit, state, nbytes, of_frozen, place = chance.choice([c for c in choices if (c[3] if frozen else c[2] - c[3])])
    border = nbytes - of_frozen
    byte = chance.randrange(border, nbytes) if frozen else chance.randrange(border)
    return Place(unit, state, place.offset(byte), frozen)


class BadSector(LateQueue):
    """A drive on which a page cannot be read until it is written."""

    def __init__(self, path: Path, offset: int) -> None:
        super().__init__(0, 0.0)
        self._path, self._page = path, offset // PAGE * PAGE

    def _carry_out(self, operation: str, file: File, offset: int, buffer: memoryview) -> IoFuture:
        for piece in file.pieces(offset, len(buffer)):
            hit = piece.offset < self._page + PAGE and self._page < piece.offset + piece.nbytes
            if hit and os.path.samefile(piece.owner.path, self._path):
                if operation == "read":
                    raise IoError(piece.owner.path, piece.offset, piece.nbytes, 5, "read")
                self._page = -PAGE
        return super()._carry_out(operation, file, offset, buffer)


def damage(kind: str, states: Path, offset: int, chance: random.Random) -> LateQueue:
    """Damages a byte of the states, and returns the queue that reads them."""
    page = offset // PAGE * PAGE
    if kind == "bit":
        flip_bit(states, offset, 1 << chance.randrange(8))
    elif kind == "torn page":
        with states.open("r+b") as file:
            file.seek(page + PAGE // 2)
            file.write(chance.randbytes(PAGE // 2))
            os.fsync(file.fileno())
    elif kind == "cut file":
        os.truncate(states, page)
    return BadSector(states, offset if kind == "bad sector" else -PAGE)


KINDS = ("bit", "torn page", "cut file", "bad sector")
MOMENTS = ("verify", "resume", "training")


def _same(queue: LateQueue) -> LateQueue:
    return queue


def survive(seed: int, calm: Calm, folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, str, str, str]:
    """Damages a copy of the run at one place, and returns what it was and what became of it."""
    chance = random.Random(seed)
    kind, moment, copy = chance.choice(KINDS), chance.choice(MOMENTS), chance.random() < 0.5
    swap = Path(shutil.copytree(calm.folder, folder / f"{seed}"))
    run = swap / "default"
    if not copy:
        shutil.rmtree(swap / f"default@{COMMITTED}")  # only older steps are kept
    place = any_place(swap, chance)
    caplog.clear()
    queue = damage(kind, run / "rank0" / "states", place.offset, chance)
    words = f"seed {seed}: {kind} in {place}, found by {moment}"
    mendable = copy or (place.frozen and kind != "cut file")
    said = ""
    if moment == "verify":
        with closing(RunChecking(run, repair=True)) as checking:
            report = checking.run(queue)
        assert report.whole or not mendable, f"{words}: {report.lines(9)}"
        said = "\n".join(report.lines(9))
    elif moment == "resume":
        (run / "rank0" / "suspect").touch()  # as an error, or a power cut in a commit, leaves a run
    outcome = ""
    for attempt in range(2):
        with pytest.MonkeyPatch.context() as patch:
            use_queue(patch, partial(_same, queue))
            try:
                losses, weights = go_on(swap)
            except OffloadError as error:
                # Said, and never passed over. The next start compares all data first.
                assert not mendable, f"{words}: {error}"
                said += f"\n{error}"
                outcome = "named, and nothing is intact"
                queue = BadSector(run / "rank0" / "states", -PAGE if kind != "bad sector" else place.offset)
                continue
        assert losses == calm.losses[STEPS - len(losses) :], f"{words}: another loss"
        for name, value in weights.items():
            assert torch.equal(value, calm.weights[name]), f"{words}: {name}"
        assert not mendable or (attempt == 0 and len(losses) == STEPS - COMMITTED), f"{words}: a commit was lost"
        outcome = "mended" if len(losses) == STEPS - COMMITTED else "named, and the commit before is taken"
        break
    said += caplog.text
    if outcome == "mended":
        # Zeros take the place of zeros where a file is cut.
        assert "mended" in said or kind == "cut file", f"{words}: nothing was said"
    else:
        assert "damaged" in said or "cannot" in said, f"{words}: {said}"
    shutil.rmtree(swap)
    return kind, moment, "a copy" if copy else "frozen" if place.frozen else "no copy", outcome


def test_random_damage_is_mended_or_named(calm: Calm, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = Counter(survive(seed, calm, tmp_path, caplog)[-1] for seed in range(8))
    assert outcomes["mended"] and outcomes.total() == 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_random_damages(part: int, calm: Calm, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`-s` prints how many of each kind."""
    counts = Counter(survive(100 + 20 * part + seed, calm, tmp_path, caplog) for seed in range(20))
    print("\n".join(f"{count:4} {'; '.join(words)}" for words, count in sorted(counts.items())))
    assert counts.total() == 20


# -- offload verify -----------------------------------------------------------------------------------


def verify(*words: object) -> tuple[int, Any]:
    result = CliRunner().invoke(app, ["verify", *map(str, words), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout) if result.stdout else result.stderr


def digest(run: Path) -> str:
    return hashlib.sha256((run / "rank0" / "states").read_bytes()).hexdigest()


def first_place(swap: Path, state: State, frozen: bool) -> Place:
    places = (any_place(swap, random.Random(seed)) for seed in range(1000))
    return next(place for place in places if place.state is state and place.frozen is frozen)


def test_verify_mends_only_if_it_is_told_to(swap: Path) -> None:
    run = swap / "default"
    place = first_place(swap, State.EXP_AVG, False)
    flip_bit(run / "rank0" / "states", place.offset)
    before = digest(run)
    code, report = verify(run)
    assert code == 1 and report["mended"] == 0 and digest(run) == before
    (damage,) = report["ranks"][0]["damages"]
    assert damage["state"] == "exp_avg" and damage["mended"] == ""
    parameters = damage["parameters"]
    assert parameters and set(parameters) <= {name for name, _ in Model().named_parameters()}
    code, report = verify(run, "--repair")
    (damage,) = report["ranks"][0]["damages"]
    assert code == 3 and report["whole"] and report["mended"] == 1
    assert damage["mended"].endswith("default@3/rank0") and damage["parameters"] == parameters
    assert verify(run)[0] == 0 and not (run / "rank0" / "suspect").exists()
    shown = CliRunner().invoke(app, ["verify", str(run)]).output
    assert ": intact; " in shown


def test_what_no_copy_has_is_named_and_stays_as_it_is(swap: Path) -> None:
    """Kept steps of other weights are no copy."""
    run = swap / "default"
    shutil.rmtree(swap / "default@3")
    place = first_place(swap, State.WEIGHT, False)
    flip_bit(run / "rank0" / "states", place.offset)
    before = digest(run)
    for words in ((), ("--repair",)):
        code, report = verify(run, *words)
        assert code == 1 and not report["whole"] and report["mended"] == 0 and digest(run) == before
        assert report["ranks"][0]["damages"][0]["parameters"]
    shown = CliRunner().invoke(app, ["verify", str(run), "--repair"]).output
    assert "damaged: weight of " in shown and "it has values of " in shown and "damaged in 1 place" in shown


def test_a_kept_step_is_mended_from_its_run(swap: Path) -> None:
    place = first_place(swap, State.EXP_AVG_SQ, False)
    flip_bit(swap / "default@3" / "rank0" / "states", place.offset)
    assert verify(swap / "default@3")[0] == 1
    code, report = verify(swap / "default@3", "--repair")
    assert code == 3 and report["ranks"][0]["damages"][0]["mended"].endswith("default/rank0")
    assert verify(swap / "default@3")[0] == 0


def test_a_checkpoint_is_not_mended(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path / "swap")
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy(remove=True)
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "saved"), "--repair"])
    assert result.exit_code == 2 and "--repair mends runs" in result.stderr


def test_verify_reads_no_faster_than_it_is_told(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(commands, "time", clock)
    code, report = verify(swap / "default", "--rate", "1MB")
    assert code == 0 and now[0] >= report["ranks"][0]["bytes"] / 1e6 > 0
    assert CliRunner().invoke(app, ["verify", str(swap / "default"), "--rate", "0"]).exit_code == 2


# -- a live run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suspect", [False, True], ids=["by a read", "by the resume"])
def test_damage_is_mended_and_said_once_and_the_log_counts_it(
    suspect: bool, calm: Calm, swap: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = first_place(swap, State.WEIGHT, True)
    flip_bit(swap / "default" / "rank0" / "states", place.offset)
    if suspect:  # then a resume compares all data
        (swap / "default" / "rank0" / "suspect").touch()
    losses, weights = go_on(swap, log=str(swap / "log"))
    assert losses == calm.losses[COMMITTED:]
    assert all(torch.equal(value, calm.weights[name]) for name, value in weights.items())
    said = [record.message for record in caplog.records if "mended from" in record.message]
    assert len(said) == 1 and "weight of blocks." in said[0] and "slot" in said[0]
    assert suspect or "step 3" in said[0]
    lines = [json.loads(line) for line in (swap / "log").read_text().splitlines()]
    assert [line["mended"] for line in lines] == [1.0] * (STEPS - COMMITTED)


def test_a_lost_value_of_a_live_run_is_named_with_the_cure(swap: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kept in swap.glob("default@*"):
        shutil.rmtree(kept)
    place = first_place(swap, State.EXP_AVG, False)
    flip_bit(swap / "default" / "rank0" / "states", place.offset)
    with pytest.raises(OffloadError, match=r"use exp_avg of .*the bytes are damaged"):
        go_on(swap)
    (said,) = [record.message for record in caplog.records if "are lost" in record.message]
    assert "of step 3 are lost, and there is no true copy; they have values of " in said
    assert "The next start takes the commit before" in said and "offload log " in said
