"""Engines of one process share one host budget and one I/O queue, and each trains as if alone, as of DPO and PPO."""

from __future__ import annotations

import functools
import os
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload import testing
from offload.aio import IoQueue
from offload.engine.update import UpdateWorker
from offload.errors import BudgetError, UsageError
from offload.swapper.memory.host_arena import process_memory
from tests.support import models, rounding_bounds
from tests.support.oracle import (
    Job,
    PlainEngine,
    assert_same_tensors,
    config,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    weights_of,
)

DISK = ("nvme", "nvme")
JOB = models.GPT2._replace(dtype="bf16")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    assert process_memory().needed_bytes == 0, "an engine of another test is still there"


@functools.cache
def enough_for_all() -> int:
    """A budget in which one engine has all of its states in memory."""
    with tempfile.TemporaryDirectory() as folder:
        engine = start(JOB, DISK, Path(folder), host_memory=64 << 20, run="measure")
        engine.destroy(remove=True)
        return engine.host_memory


def test_one_budget_for_both(tmp_path: Path) -> None:
    """The first has all of the budget, states in memory too, until the second needs some of it."""
    alone = run(JOB, ("none", "none"), tmp_path)
    budget = enough_for_all()
    first = start(JOB, DISK, tmp_path, host_memory=budget, run="one")
    assert "has room for more" in "\n".join(first.notices)
    before = first.host_memory
    losses = [train_step(first, JOB, step) for step in range(2)]
    second = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
    assert first.host_memory + second.host_memory <= budget and first.host_memory < before
    generator = torch.get_rng_state()
    other_losses = [train_step(second, JOB, step) for step in range(JOB.steps)]
    torch.set_rng_state(generator)
    losses += [train_step(first, JOB, step) for step in range(2, JOB.steps)]
    for engine in (first, second):
        engine.destroy(remove=True)
    assert losses == other_losses == alone.losses
    assert process_memory().needed_bytes == 0


def test_the_cache_is_given_between_the_updates_of_a_thread_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that begins after the wait for updates is waited for too: its updates use the promoted states."""
    alone, budget = run(JOB, DISK, tmp_path), enough_for_all()
    first = start(JOB, DISK, tmp_path, host_memory=budget, run="one")
    losses = [train_step(first, JOB, 0)]
    thread = threading.Thread(
        target=lambda: losses.extend(train_step(first, JOB, step) for step in range(1, JOB.steps))
    )
    finish, write = UpdateWorker.finish, IoQueue.write
    waits: list[bool] = []
    updating, may_write = threading.Event(), threading.Event()

    def finish_then_train(worker: UpdateWorker, commit: bool = True) -> None:
        giving = threading.current_thread() is threading.main_thread()
        if giving and waits:
            may_write.set()
        finish(worker, commit)
        if giving:
            waits.append(commit)
            if len(waits) == 1:
                thread.start()
                assert updating.wait(60)

    def late_write(*arguments: Any, **options: Any) -> Any:
        if waits and threading.current_thread() is not threading.main_thread():
            updating.set()
            may_write.wait(60)
        return write(*arguments, **options)

    testing.replace(monkeypatch, "update.finish", finish_then_train)
    with monkeypatch.context() as late:
        testing.replace(late, "io.write", late_write)
        second = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
    thread.join()
    assert len(waits) > 1, "the step was not waited for"
    weights = weights_of(first)
    for engine in (first, second):
        engine.destroy(remove=True)
    assert losses == alone.losses
    assert_same_tensors(alone.weights, weights)


def test_one_queue_and_counts_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = []

    def queue(backend: str, **shape: int | None) -> IoQueue:
        queues.append(IoQueue(backend, **shape))
        return queues[-1]

    testing.replace(monkeypatch, "io.queue", queue)
    first = start(JOB, DISK, tmp_path, run="one")
    second = start(JOB, DISK, tmp_path, run="other")
    assert len(queues) == 1
    at_start = second.io_bytes()
    train_step(first, JOB, 0)
    assert second.io_bytes() == at_start and first.io_bytes().read > at_start.read
    first.destroy(remove=True)
    train_step(second, JOB, 0)
    second.destroy(remove=True)


def test_a_budget_that_others_have_used_up_is_an_error(tmp_path: Path) -> None:
    engine = start(JOB, ("cpu", "cpu"), tmp_path, run="one")
    need = engine.host_memory
    with pytest.raises(BudgetError, match=r"less [\d.]+ [KM]iB for other engines of this process .destroy.. frees"):
        start(JOB, ("cpu", "cpu"), tmp_path, run="other", host_memory=need, nvme_path=[])
    train_step(engine, JOB, 0)
    engine.destroy()


def test_memory_that_an_engine_gave_back_is_used_again(tmp_path: Path) -> None:
    budget = enough_for_all()
    owner = start(JOB, DISK, tmp_path, host_memory=budget, run="keeper")
    mappings = len(process_memory()._mappings)
    for _ in range(2):
        other_engine = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
        assert len(process_memory()._mappings) == mappings
        train_step(other_engine, JOB, 0)
        other_engine.destroy(remove=True)
    owner.destroy(remove=True)
    assert process_memory()._mappings == []


def test_a_forked_child_has_a_budget_of_its_own(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, run="one")
    child = os.fork()
    if child == 0:
        os._exit(0 if process_memory().needed_bytes == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process_memory().needed_bytes == engine.host_memory
    engine.destroy(remove=True)


def test_a_small_engine_takes_nothing_where_the_budget_has_room(tmp_path: Path) -> None:
    """The first keeps its cache, and its states in memory."""
    budget = enough_for_all()
    first = start(JOB, DISK, tmp_path, host_memory=2 * budget, run="one")
    before = first.host_memory
    second = start(JOB, DISK, tmp_path, host_memory=2 * budget, run="other")
    assert first.host_memory == before and before + second.host_memory <= 2 * budget
    for engine in (first, second):
        engine.destroy(remove=True)


def test_what_is_taken_stays_within_the_budget_whoever_comes_and_goes(tmp_path: Path) -> None:
    budget = 2 * enough_for_all()
    chance = random.Random(0)
    engines: list[offload.Engine] = []
    for number in range(10):
        if engines and chance.random() < 0.5:
            engines.pop(chance.randrange(len(engines))).destroy(remove=True)
        else:
            try:
                engines.append(start(JOB, DISK, tmp_path, host_memory=budget, run=f"run{number}"))
            except BudgetError:
                assert engines
        assert sum(engine.host_memory for engine in engines) <= budget
    for engine in engines:
        train_step(engine, JOB, 0)
        engine.destroy(remove=True)


def test_ctrl_c_while_a_cache_is_given_harms_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wait for the updates of the engine that gives can be interrupted."""
    budget = enough_for_all()
    first = start(JOB, DISK, tmp_path, host_memory=budget, run="one")
    train_step(first, JOB, 0)

    def interrupted(worker: UpdateWorker, commit: bool = True) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        testing.replace(patch, "update.finish", interrupted)
        start(JOB, DISK, tmp_path, host_memory=budget, run="other")
    train_step(first, JOB, 1)
    second = start(JOB, DISK, tmp_path, host_memory=budget, run="other")
    train_step(second, JOB, 0)
    train_step(first, JOB, 2)
    for engine in (first, second):
        engine.destroy(remove=True)


def test_two_threads_do_not_start_within_the_same_room(tmp_path: Path) -> None:
    budget = least_host_memory(JOB, tmp_path) + 1000
    outcomes: list[object] = []

    def begin(model: nn.Module, run: str) -> None:
        settings = config(JOB, DISK, tmp_path, host_memory=budget, run=run)
        try:
            outcomes.append(offload.initialize(model=model, config=settings)[0])
        except BudgetError as error:
            outcomes.append(error)

    # Made before: transformers replaces functions of torch.nn.init meanwhile, and two threads leave them replaced.
    models_of = {name: JOB.model() for name in ("one", "other")}
    threads = [threading.Thread(target=begin, args=(model, name)) for name, model in models_of.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engines = [each for each in outcomes if isinstance(each, offload.Engine)]
    assert len(engines) == 1 and len(outcomes) == 2
    engines[0].destroy(remove=True)


STEPS, BETA = 4, 0.5
LOGITS = 32.0
"""What a loss is of here: log-probabilities of the 32 tokens of a row, added, over the smaller losses of advantages."""


class Critic(nn.Module):
    """A value for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.gpt2().transformer
        self.value = nn.Linear(self.body.config.n_embd, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.value(self.body(input_ids=input_ids).last_hidden_state).squeeze(-1)


def frozen() -> nn.Module:
    return models.gpt2().requires_grad_(False).eval()


POLICY = Job(models.gpt2, models.language_loss, steps=STEPS, lr=1e-3)
REFERENCE = POLICY._replace(model=frozen)
CRITIC = POLICY._replace(model=Critic, lr=3e-3, clip=0.3)


def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(rows,) of whole sequences."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    return functional.log_softmax(logits, -1).gather(-1, ids[:, 1:, None].to(logits.device)).squeeze(-1).sum(-1)


def dpo_step(engines: Sequence[Any], step: int) -> float:
    policy, reference = engines
    chosen, rejected = models.tokens(step, 0), models.tokens(step, 1)
    mine = log_probabilities(policy, chosen) - log_probabilities(policy, rejected)
    with torch.no_grad():
        theirs = log_probabilities(reference, chosen) - log_probabilities(reference, rejected)
    loss = -functional.logsigmoid(BETA / 10 * (mine - theirs)).mean()
    policy.backward(loss)
    policy.step()
    return float(loss.detach())


def ppo_step(engines: Sequence[Any], step: int) -> float:
    """Old values and log-probabilities first; then two epochs over them, in which actor and critic take turns."""
    actor, critic = engines
    ids = models.tokens(step, 0)
    with torch.no_grad():
        before, values = log_probabilities(actor, ids), critic(input_ids=ids)
    rewards = (ids.to(values.device) % 7).float() / 7
    advantages = (rewards - values).mean(-1)
    losses = []
    for _ in range(2):
        ratio = ((log_probabilities(actor, ids) - before) / ids.shape[1]).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages).mean()
        error = (critic(input_ids=ids) - rewards).square().mean()  # both graphs live
        actor.backward(-gain)
        critic.backward(error)
        actor.step()
        critic.step()
        losses.append(float(gain.detach()) + float(error.detach()))
    return sum(losses)


def as_plain(job: Job) -> Any:
    if job is not REFERENCE:
        return PlainEngine(job)
    torch.manual_seed(job.seed)
    return frozen()


Step = Callable[[Sequence[Any], int], float]
LOOPS: dict[str, tuple[Step, tuple[Job, Job]]] = {
    "DPO": (dpo_step, (POLICY, REFERENCE)),
    "PPO": (ppo_step, (POLICY, CRITIC)),
}
WORKS = {
    "DPO": "a policy that trains beside a frozen reference (DPO), saved and resumed",
    "PPO": "an actor and a critic that train in turns (PPO), saved and resumed",
}
ROWS = [pytest.param(name, marks=pytest.mark.works("Engines and processes", WORKS[name], "right")) for name in LOOPS]


BUDGET = 24 << 20
"""Bytes of host memory for both."""


def begin(jobs: Sequence[Job], folder: Path, **options: Any) -> list[offload.Engine]:
    """One engine for each job, in runs of their own under one host budget."""
    return [
        start(job, DISK, folder, run=f"run{number}", host_memory=BUDGET, **options) for number, job in enumerate(jobs)
    ]


def end(engines: Sequence[offload.Engine], remove: bool = True) -> list[dict[str, torch.Tensor]]:
    weights = [weights_of(engine) for engine in engines]
    for engine in engines:
        engine.destroy(remove=remove)
    return weights


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.numeric
def test_as_pytorch_and_resumed(name: str, tmp_path: Path) -> None:
    step, jobs = LOOPS[name]
    plain = [as_plain(job) for job in jobs]
    expected = [step(plain, number) for number in range(STEPS)]

    engines = begin(jobs, tmp_path / "whole")
    assert sum(engine.host_memory for engine in engines) <= BUDGET
    losses = [step(engines, number) for number in range(STEPS)]
    worst = jobs[0]._replace(logits=LOGITS)
    rounding_bounds.same_losses(losses, expected, worst)
    rounding_bounds.same_norms([engines[0].get_global_grad_norm()], [plain[0].get_global_grad_norm()], worst)
    weights = end(engines)
    for job, mine, theirs in zip(jobs, weights, plain, strict=True):
        rounding_bounds.same_weights(
            mine, getattr(theirs, "module", theirs).state_dict(), job._replace(steps=2 * STEPS)
        )

    first = begin(jobs, tmp_path / "parts")
    beginning = [step(first, number) for number in range(3)]
    for number, engine in enumerate(first):
        engine.save_checkpoint(tmp_path / "saved" / str(number))
    end(first, remove=False)

    resumed = begin(jobs, tmp_path / "parts", resume="auto")  # the swap files
    assert beginning + [step(resumed, number) for number in range(3, STEPS)] == losses
    for mine, theirs in zip(end(resumed), weights, strict=True):
        assert_same_tensors(mine, theirs)

    loaded = begin(jobs, tmp_path / "loaded")  # the checkpoints
    for number, engine in enumerate(loaded):
        engine.load_checkpoint(tmp_path / "saved" / str(number))
    assert beginning + [step(loaded, number) for number in range(3, STEPS)] == losses
    for mine, theirs in zip(end(loaded), weights, strict=True):
        assert_same_tensors(mine, theirs)


@pytest.mark.works(
    "Engines and processes", "an engine without trainable parameters, with the config of one that trains", "right"
)
@pytest.mark.numeric
def test_an_inference_engine_has_no_states(tmp_path: Path) -> None:
    """Libraries give the reference the policy's config, with its optimizer, schedule, clip and accumulation."""
    given = config(REFERENCE._replace(accumulation=4), DISK, tmp_path, run="reference")
    given["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    torch.manual_seed(0)
    engine = offload.initialize(model=frozen(), config=given)[0]
    trained = start(POLICY, DISK, tmp_path, run="trained")
    weights = 4 * engine.parameter_count
    kept = sum(path.stat().st_blocks * 512 for path in (tmp_path / "reference").rglob("*") if path.is_file())
    assert kept < 1.5 * weights, "one slot of the weights, and nothing else"
    assert (
        testing.inspect(engine).host_arena.classes.tiles == 0
        and testing.inspect(engine).host_arena.classes.gradients == 0
    )
    assert engine.host_memory < trained.host_memory
    assert engine.get_global_grad_norm() is None and engine.global_steps == 0
    with torch.no_grad():
        loss = POLICY.loss(engine, 0, 0)
        rounding_bounds.same_losses([float(loss)], [float(POLICY.loss(trained, 0, 0))], POLICY)
    with pytest.raises(UsageError, match="does not depend on any trainable parameter"):
        engine.backward(POLICY.loss(engine, 0, 0))
    for ended in (engine, trained):
        ended.destroy(remove=True)
