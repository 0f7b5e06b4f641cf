"""What users bring to autograd: recomputation, reuse, branches, views, exceptions, generation; always the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.errors import UsageError
from tests import models
from tests.faults import LateQueue, use_queue
from tests.oracle import Job, assert_same, config, plain_loop, run, start, train_step
from tests.test_placements import room_for

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")


def checkpointed(reentrant: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = models.gpt2_dropout()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a new name is coming; users have the old one
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model.train()

    return build


class Layers(nn.Module):
    """An embedding, three layers in a list, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.through(self.embedding(ids), ids))

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class Twice(Layers):
    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().through(super().through(hidden, ids), ids)


class Branches(Layers):
    """Other layers in every step, so that the recorded order is always wrong."""

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if (int(ids.sum()) + index) % 2:
                hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class Transposed(nn.Module):
    """Its output is a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 5))

    def forward(self) -> torch.Tensor:
        return self.weight.t()


class Views(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = Transposed()

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().through(hidden, ids) + self.transposed().sum()


class Odd(Layers):
    """An empty parameter and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().through(hidden, ids) * self.scale + self.empty.sum()


class One(nn.Module):
    """A single parameter, used by the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(61, 61))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


def half() -> nn.Module:
    return models.gpt2().half()


JOBS = {
    "checkpointed": Job(checkpointed(False), models.language_loss, accumulation=2),
    "checkpointed, reentrant": Job(checkpointed(True), models.language_loss, accumulation=2),
    "a layer used twice": Job(Twice, models.mixture_loss),
    "branches": Job(Branches, models.mixture_loss, steps=8),
    "a view of a weight": Job(Views, models.mixture_loss),
    "empty and scalar": Job(Odd, models.mixture_loss),
    "one parameter": Job(One, models.mixture_loss),
    "given in half": Job(half, models.language_loss),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", JOBS)
def test_same_bits_and_as_pytorch(name: str, dtype: str, tmp_path: Path) -> None:
    job = JOBS[name]._replace(dtype=dtype)
    in_memory = run(job, MEMORY, tmp_path / "memory")
    assert_same(in_memory, run(job, DISK, tmp_path / "disk", device_memory=room_for(job, 2)), name)
    assert in_memory.losses == pytest.approx(plain_loop(job).losses, rel=1e-5 if dtype == "fp32" else 1e-3)


def test_generation_between_steps(tmp_path: Path) -> None:
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "generating")
    losses = []
    for step in range(job.steps):
        losses.append(train_step(engine, job, step))
        engine.eval()
        prompt = torch.tensor([[1, 2, 3]])
        words = engine.module.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
        assert words.shape[1] > 3
        engine.train()
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


class Boom(Exception):
    pass


def boom(*_: object) -> None:
    raise Boom


def test_exceptions_of_the_user(tmp_path: Path) -> None:
    """In a forward, at the start of a backward, in the middle of one: training goes on with the right bits."""
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "thrown")
    inner = engine.module.transformer.h[1].mlp
    losses = []
    for step in range(job.steps):
        hook = inner.register_forward_pre_hook(boom)
        with pytest.raises(Boom):
            job.loss(engine, step, 0)
        hook.remove()
        loss = job.loss(engine, step, 0)
        loss.grad_fn.register_prehook(boom)
        with pytest.raises(Boom):
            engine.backward(loss)
        hook = inner.register_forward_hook(lambda module, inputs, output: output.register_hook(boom) and None)
        loss = job.loss(engine, step, 0)
        hook.remove()
        with pytest.raises(Boom):
            engine.backward(loss)
        engine.zero_grad()
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


class Table(nn.Module):
    """Its backward needs no weights, so a graph from before a step could add to a gradient that is being read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def test_a_graph_from_before_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding's backward needs no weights, so torch allows it; its gradient waits for the update before."""

    def losses(placement: tuple[str, str]) -> list[float]:
        engine = start(job, placement, tmp_path / placement[0])
        old = job.loss(engine, 9, 0)
        found = [train_step(engine, job, 0)]
        engine.backward(old)
        engine.step()
        found += [train_step(engine, job, step) for step in range(1, 4)]
        engine.destroy(remove=True)
        return found

    job = Job(Table, models.mixture_loss)
    expected = losses(MEMORY)
    use_queue(monkeypatch, lambda: LateQueue(0, 0.2))
    assert losses(DISK) == expected


class Shared(Layers):
    """One module in two places of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0], self.layers[1], self.layers[0]])


def test_a_module_in_two_places(tmp_path: Path) -> None:
    job = Job(Shared, models.mixture_loss)
    found = run(job, DISK, tmp_path / "disk")
    assert_same(run(job, MEMORY, tmp_path / "memory"), found, "shared")
    assert found.losses == pytest.approx(plain_loop(job).losses, rel=1e-5)


def test_the_optimizer_called_by_itself(tmp_path: Path) -> None:
    """It is the boundary too, with the same count; and a second call is refused instead of waiting for ever."""
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "called")
    for step in range(job.steps):
        engine.backward(job.loss(engine, step, 0))
        engine.optimizer.step()
        with pytest.raises(UsageError, match="0 backwards"):
            engine.optimizer.step()
    weights = engine.module.state_dict()
    engine.destroy(remove=True)
    expected = run(job, DISK, tmp_path / "plain").weights
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_state_dict_in_the_middle_of_a_forward(tmp_path: Path) -> None:
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "asked")
    engine.module.transformer.h[1].register_forward_pre_hook(lambda *_: engine.module.state_dict() and None)
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


def test_a_budget_that_a_nested_site_exceeds(tmp_path: Path) -> None:
    """The error comes from a pre-hook inside of other sites; what those hold is given back exactly once."""
    from offload.errors import BudgetError

    job = models.GPT2
    engine = start(job, DISK, tmp_path / "tight")
    pager = engine._parts.pager
    real = pager.acquire
    losses = []
    for step in range(job.steps):

        def refuse(unit: int) -> torch.Tensor:
            if unit == 3:
                raise BudgetError("no room")
            return real(unit)

        pager.acquire = refuse  # type: ignore[method-assign]
        with pytest.raises(BudgetError):
            job.loss(engine, step, 0)
        pager.acquire = real  # type: ignore[method-assign]
        assert all(entry.pins == 0 for entry in pager._entries)
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


def test_two_engines_in_one_process(tmp_path: Path) -> None:
    job = models.GPT2
    one = start(job, DISK, tmp_path / "one")
    other = start(models.DROPOUT, DISK, tmp_path / "other")
    losses = []
    for step in range(job.steps):
        losses.append(train_step(one, job, step))
        train_step(other, models.DROPOUT, step)
    one.destroy(remove=True)
    other.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "alone").losses


def test_a_model_that_does_not_train(tmp_path: Path) -> None:
    """Frozen: an engine without states, whose weights still come from the disk."""
    torch.manual_seed(0)
    model = models.gpt2().requires_grad_(False)
    with torch.no_grad():
        expected = model(input_ids=models.tokens(0, 0)).logits
    engine = offload.initialize(model=model, config=config(models.GPT2, DISK, tmp_path))[0]
    with torch.no_grad():
        assert torch.equal(engine(input_ids=models.tokens(0, 0)).logits, expected)
    engine.destroy()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
