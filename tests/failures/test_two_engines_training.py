"""Loops with two models in one process, as of DPO and PPO, train as in plain PyTorch, and resume together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload import testing
from offload.errors import UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, PlainEngine, assert_same_tensors, config, small_pieces, start, weights_of

DISK = ("nvme", "nvme")
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


JOB = Job(models.gpt2, models.language_loss, steps=STEPS, lr=1e-3)
REFERENCE = JOB._replace(model=frozen)
CRITIC = JOB._replace(model=Critic, lr=3e-3, clip=0.3)


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
    "DPO": (dpo_step, (JOB, REFERENCE)),
    "PPO": (ppo_step, (JOB, CRITIC)),
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


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


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
    found = [step(first, number) for number in range(3)]
    for number, engine in enumerate(first):
        engine.save_checkpoint(tmp_path / "saved" / str(number))
    end(first, remove=False)

    resumed = begin(jobs, tmp_path / "parts", resume="auto")  # the swap files
    assert found + [step(resumed, number) for number in range(3, STEPS)] == losses
    for mine, theirs in zip(end(resumed), weights, strict=True):
        assert_same_tensors(mine, theirs)

    loaded = begin(jobs, tmp_path / "loaded")  # the checkpoints
    for number, engine in enumerate(loaded):
        engine.load_checkpoint(tmp_path / "saved" / str(number))
    assert found + [step(loaded, number) for number in range(3, STEPS)] == losses
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
    trained = start(JOB, DISK, tmp_path, run="trained")
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
        loss = JOB.loss(engine, 0, 0)
        rounding_bounds.same_losses([float(loss)], [float(JOB.loss(trained, 0, 0))], JOB)
    with pytest.raises(UsageError, match="does not depend on any trainable parameter"):
        engine.backward(JOB.loss(engine, 0, 0))
    for each in (engine, trained):
        each.destroy(remove=True)
