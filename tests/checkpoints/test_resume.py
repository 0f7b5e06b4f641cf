"""A run that was killed at any moment resumes with the losses, norms and weights of the unbroken run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.engine.snapshot import write_buffer
from offload.errors import StoreError
from offload.swapper.store import run_status
from tests.support import models
from tests.support.modules.module_kinds import Layers
from tests.support.oracle import Job, assert_same, assert_same_tensors, config, kill_and_resume, run, start, train_step
from tests.support.processes import warm_process
from tests.support.sampling import drawn

DISK = ("nvme", "nvme")


@pytest.mark.parametrize(
    ("dtype", "placement", "late"),
    [
        ("bf16", DISK, 0.005),
        pytest.param("bf16", DISK, 0.0, marks=pytest.mark.slow),
        pytest.param("fp32", ("cpu", "nvme"), 0.0, marks=pytest.mark.slow),
    ],
)
def test_killed_five_times(dtype: str, placement: tuple[str, str], late: float, tmp_path: Path) -> None:
    """SIGKILL at random moments, five with `--whole`, with dropout, so that every generator must come back too."""
    job = models.DROPOUT._replace(dtype=dtype, steps=40 if late else 150, accumulation=2)
    (tmp_path / "killed").mkdir()
    killed = kill_and_resume(
        job, placement, tmp_path / "killed", kills=len(drawn(range(5), 2)), seed=len(dtype), late=late
    )
    assert_same(run(job, placement, tmp_path / "whole"), killed, "unbroken and killed")


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "cpu"), ("none", "nvme"), ("nvme", "none")])
def test_every_placement_resumes(placement: tuple[str, str], tmp_path: Path) -> None:
    """Homes above DISK are read back from the store that they were written through to."""
    job = models.DROPOUT._replace(steps=4)
    reference = run(job, placement, tmp_path / "whole", durability="step")
    first = start(job, placement, tmp_path / "parts", durability="step")
    losses = [train_step(first, job, step) for step in range(2)]
    first.destroy()
    torch.manual_seed(99)  # the generators of the first run must come from the store
    model = job.model()
    second = offload.initialize(
        model=model, config=config(job, placement, tmp_path / "parts", durability="step", resume="must")
    )[0]
    assert second.global_steps == 2
    losses += [train_step(second, job, step) for step in range(2, 4)]
    weights = second.module.state_dict()
    second.destroy(remove=True)
    assert losses == reference.losses
    assert_same_tensors(weights, reference.weights)


def test_every_step_is_there_after_destroy(tmp_path: Path) -> None:
    """A step of which only the schedule was made is finished and committed by `destroy`."""
    job = models.GPT2
    for step in range(3):
        engine = start(job, DISK, tmp_path, resume="auto")
        assert engine.global_steps == step
        train_step(engine, job, step)
        engine.destroy()
    engine = start(job, DISK, tmp_path, resume="auto")
    assert engine.global_steps == 3
    engine.destroy(remove=True)


def test_buffers_schedule_and_counts_come_back(tmp_path: Path) -> None:
    job = models.MIXTURE

    def begin(resume: str) -> offload.Engine:
        torch.manual_seed(0)

        def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

        return offload.initialize(
            model=job.model(), lr_scheduler=schedule, config=config(job, DISK, tmp_path, resume=resume)
        )[0]

    first = begin("never")
    for step in range(3):
        train_step(first, job, step)
    calls, lr = first.module.calls.clone(), first.get_lr()
    first.destroy()
    assert lr == [job.lr / 2] and int(calls) == 6
    second = begin("auto")
    assert torch.equal(second.module.calls, calls) and second.get_lr() == lr and second.micro_steps == 6
    train_step(second, job, 3)
    assert second.get_lr() == [job.lr / 4]
    second.destroy(remove=True)


def test_other_settings_are_reported(tmp_path: Path) -> None:
    start(models.GPT2, DISK, tmp_path).destroy()
    engine = start(models.GPT2._replace(lr=5e-4, clip=0.5), DISK, tmp_path, resume="auto")
    assert "gradient clipping 1.0 is now 0.5, learning rates [0.001] is now [0.0005]" in engine.notices[-1]
    engine.destroy()
    engine = start(models.GPT2._replace(lr=5e-4, clip=0.5), DISK, tmp_path, resume="auto")
    assert "settings" in engine.notices[-1], "epoch 0 is still the first run's"
    train_step(engine, models.GPT2, 0)
    engine.destroy()
    engine = start(models.GPT2._replace(lr=5e-4, clip=0.5), DISK, tmp_path, resume="auto")
    assert not any("settings" in notice.replace(str(tmp_path), "") for notice in engine.notices)
    engine.destroy(remove=True)


def test_a_leftover_is_an_error_with_the_fix(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    engine.destroy(remove=False)
    with pytest.raises(StoreError, match=r"--resume auto.*offload rm"):
        start(models.GPT2, DISK, tmp_path)


def test_a_run_that_is_removed_leaves_nothing(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    train_step(engine, models.GPT2, 0)
    engine.destroy(remove=True)
    assert list(tmp_path.iterdir()) == []
    start(models.GPT2, DISK, tmp_path, resume="auto").destroy(remove=True)


def test_a_finished_run_leaves_a_note_and_starts_over(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    train_step(engine, models.GPT2, 0)
    engine.finish({"of": "a job"})
    status = run_status([tmp_path], "default")
    assert not status.exists and status.finished is not None
    assert status.finished["steps"] == 1 and status.finished["of"] == "a job"
    assert sorted(path.name for path in (tmp_path / "default").iterdir()) == ["finished.json"]
    for resume in ("must", "auto"):
        with pytest.raises(StoreError, match="finished"):
            start(models.GPT2, DISK, tmp_path, resume=resume)
    start(models.GPT2, DISK, tmp_path).destroy()


def test_a_run_resumes_with_tiers_that_need_no_store(tmp_path: Path) -> None:
    """With more memory than it had, say: it keeps the store that it has, and goes on bit for bit."""
    job = models.GPT2
    unbroken = run(job, DISK, tmp_path / "unbroken")
    first = start(job, DISK, tmp_path)
    losses = [train_step(first, job, step) for step in range(2)]
    first.destroy()
    with pytest.raises(StoreError, match="keeps no store"):
        start(job, ("cpu", "cpu"), tmp_path, resume="auto", durability="none")
    second = start(job, ("cpu", "cpu"), tmp_path, resume="auto")
    losses += [train_step(second, job, step) for step in range(2, job.steps)]
    assert second.resumable is not None
    second.destroy(remove=True)
    assert losses == unbroken.losses


def test_schedules_that_move_the_betas(tmp_path: Path) -> None:
    job = models.GPT2

    def begin(folder: Path, resume: str) -> offload.Engine:
        torch.manual_seed(0)

        def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)

        content = config(job, DISK, folder, resume=resume)
        return offload.initialize(model=job.model(), lr_scheduler=schedule, config=content)[0]

    reference = begin(tmp_path / "whole", "never")
    expected = [train_step(reference, job, step) for step in range(6)]
    reference.destroy(remove=True)
    first = begin(tmp_path / "parts", "never")
    losses = [train_step(first, job, step) for step in range(3)]
    first.destroy()
    second = begin(tmp_path / "parts", "must")
    losses += [train_step(second, job, step) for step in range(3, 6)]
    second.destroy(remove=True)
    assert losses == expected


def test_must_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="must"):
        start(models.GPT2, DISK, tmp_path, resume="must")


def test_another_model_is_named(tmp_path: Path) -> None:
    start(models.GPT2, DISK, tmp_path).destroy()
    with pytest.raises(StoreError, match="another model"):
        start(models.MIXTURE, DISK, tmp_path, resume="auto")
    with pytest.raises(StoreError, match="mode"):
        start(models.GPT2._replace(dtype="bf16"), DISK, tmp_path, resume="auto")
    start(models.GPT2, DISK, tmp_path, resume="auto").destroy()  # and nothing was lost by trying


def test_a_run_that_is_in_use_is_refused(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    with pytest.raises(StoreError, match=str(os.getpid())):
        start(models.GPT2, DISK, tmp_path, resume="auto")
    train_step(engine, models.GPT2, 0)
    engine.destroy()


def test_an_exit_without_destroy_commits(tmp_path: Path) -> None:
    """A script that ends without `destroy` loses nothing, whatever its last call was."""
    code = (
        "from pathlib import Path; from tests.support import models\n"
        "from tests.support.oracle import start, train_step\n"
        f"engine = start(models.GPT2, ('nvme', 'nvme'), Path({str(tmp_path)!r}))\n"
        "train_step(engine, models.GPT2, 0); train_step(engine, models.GPT2, 1)\n"
    )
    done = warm_process.python(code)
    assert done.returncode == 0, done.stderr
    assert "offload rm" in done.stderr, "it says how to go on"
    engine = start(models.GPT2, DISK, tmp_path, resume="must")
    assert engine.global_steps == 2
    engine.destroy(remove=True)


def test_ctrl_c_in_the_middle_of_a_forward(tmp_path: Path) -> None:
    """The step before is whole, and training goes on in the same process with the right bits."""
    job = models.GPT2
    reference = run(job, DISK, tmp_path / "whole")
    engine = start(job, DISK, tmp_path / "cut")
    losses = []
    for step in range(job.steps):
        hook = engine.module.transformer.h[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            job.loss(engine, step, 0)
        hook.remove()
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == reference.losses


class Counting(Layers):
    """A persistent buffer that does not lie contiguously."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(12.0).view(3, 4).t())


def test_a_buffer_that_is_not_contiguous_is_committed(tmp_path: Path) -> None:
    job = Job(Counting, models.mixture_loss, steps=2)
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    engine.destroy()
    engine = start(job, DISK, tmp_path, resume="must")
    assert torch.equal(engine.module.table.cpu(), torch.arange(12.0).view(3, 4).t())
    engine.destroy(remove=True)


class Sharing(Layers):
    """Persistent buffers whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.0).expand(8))
        self.register_buffer("rows", torch.arange(3.0)[:, None].expand(3, 4))
        self.register_buffer("windows", torch.arange(8).unfold(0, 3, 1))


def test_a_buffer_whose_elements_share_memory_comes_back(tmp_path: Path) -> None:
    job = Job(Sharing, models.mixture_loss, steps=2)
    engine = start(job, DISK, tmp_path / "swap")
    train_step(engine, job, 0)
    engine.module.scale.as_strided((1,), (1,)).fill_(5)
    train_step(engine, job, 1)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()

    def assert_back(engine: offload.Engine) -> None:
        assert engine.module.scale.tolist() == [5] * 8
        assert torch.equal(engine.module.rows.cpu(), torch.arange(3.0)[:, None].expand(3, 4))
        assert torch.equal(engine.module.windows.cpu(), torch.arange(8).unfold(0, 3, 1))
        engine.destroy(remove=True)

    assert_back(start(job, DISK, tmp_path / "swap", resume="must"))
    for weights_alone in (False, True):
        engine = start(job, DISK, tmp_path / "other")
        engine.load_checkpoint(tmp_path / "saved", load_module_only=weights_alone)
        assert_back(engine)


def test_elements_that_shared_memory_and_differ_get_memory_of_their_own() -> None:
    buffer = torch.ones(1).expand(3)
    write_buffer(buffer, torch.arange(3.0))
    assert buffer.tolist() == [0, 1, 2]


def test_a_schedule_that_does_not_take_its_saved_state_is_an_error_of_ours(tmp_path: Path) -> None:
    """torch's take any dict for their state, and fail in their own code at values that somebody has made up."""

    class Steps(torch.optim.lr_scheduler.MultiStepLR):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "milestones": 7})
            self.step()

    def begin(kind: type[torch.optim.lr_scheduler.MultiStepLR]) -> offload.Engine:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        kind.__name__ = "MultiStepLR"
        settings = config(models.GPT2, DISK, tmp_path, resume="auto")
        del settings["optimizer"]
        settings.pop("scheduler", None)
        schedule = kind(optimizer, [2, 3])
        return offload.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)[0]

    engine = begin(torch.optim.lr_scheduler.MultiStepLR)
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    engine.destroy(remove=False)
    with pytest.raises(StoreError, match=r"the schedule MultiStepLR does not take its saved state \(TypeError"):
        begin(Steps)
    begin(torch.optim.lr_scheduler.MultiStepLR).destroy(remove=True)
