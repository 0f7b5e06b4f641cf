"""Numbers of a step reach the user's monitors, and one that fails ends nothing."""

from __future__ import annotations

import csv
import logging
import math
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.config import load_config
from offload.errors import ConfigError, NumericsError
from offload.metrics.writers import ConsoleWriter, CsvWriter, Reporter, StepRecord, cut, events, line
from tests.support.oracle import PLACEMENTS, Job, assert_same, config, run, train_step, weights_of
from tests.support.ranks.rank_pool import RankPool

DISK = ("nvme", "nvme")


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def loss(net: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + micro)
    rows = torch.randn(4, 32, generator=generator).to(next(getattr(net, "module", net).parameters()).device)
    value: torch.Tensor = net(rows).pow(2).mean()
    return value


JOB = Job(model, loss, steps=3, accumulation=2)

CSV = {"enabled": True, "job_name": "job"}


def start(
    folder: Path, job: Job = JOB, placement: tuple[str, str] = DISK, keys: Mapping[str, Any] | None = None, **more: Any
) -> offload.Engine:
    """Starts an engine that writes CSV files to `folder`/job; `keys` are top-level keys, `more` those of "offload"."""
    torch.manual_seed(job.seed)
    content = config(job, placement, folder / "swap", **more)
    content |= {"csv_monitor": {**CSV, "output_path": str(folder)}, **(keys or {})}
    return offload.initialize(model=job.model(), config=content).engine


def rows(folder: Path, event: str) -> list[tuple[int, float]]:
    """Returns the rows of an event's file after a check that the file has DeepSpeed's form."""
    with (folder / "job" / f"{event.replace('/', '_')}.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["step", event.rpartition("/")[2]]
    return [(int(samples), float(value)) for samples, value in lines]


def values(folder: Path, event: str) -> list[float]:
    return [value for _, value in rows(folder, event)]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert "offload-monitor" not in {thread.name for thread in threading.enumerate()}


__all__ = ["no_thread_stays"]  # fixtures

# -- what is measured ---------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_numbers_are_what_happened_and_no_bit_is_another(placement: tuple[str, str], tmp_path: Path) -> None:
    plain = run(JOB, placement, tmp_path / "plain")
    engine = start(tmp_path, placement=placement, keys={"wall_clock_breakdown": True}, durability="step")
    before = engine.io_bytes()
    losses, norms = [], []
    for step in range(JOB.steps):
        losses.append(train_step(engine, JOB, step))
        norms.append(engine.get_global_grad_norm())
    at_step = engine.io_bytes()
    weights = weights_of(engine)
    engine.destroy()
    assert_same(plain, plain._replace(losses=losses, norms=norms, weights=weights))
    assert rows(tmp_path, "Train/Samples/train_loss") == [(2, losses[0]), (4, losses[1]), (6, losses[2])]
    assert values(tmp_path, "Offload/grad_norm") == norms
    assert values(tmp_path, "Train/Samples/lr") == [JOB.lr] * 3
    assert values(tmp_path, "Offload/skipped_steps") == [0, 0, 0]
    assert sum(values(tmp_path, "Offload/read_bytes")) <= at_step.read - before.read
    assert sum(values(tmp_path, "Offload/written_bytes")) <= at_step.written - before.written
    gradients = sum(p.numel() for p in model().parameters()) * 4 * JOB.accumulation
    assert values(tmp_path, "Offload/gradients_bytes") == [gradients] * 3
    # The CPU uses weights in RAM where they are.
    assert (min(values(tmp_path, "Offload/uploaded_bytes")) > 0) == (placement[0] == "nvme")
    assert min(values(tmp_path, "Offload/host_peak_bytes")) > 2**20


def test_phases_lie_within_a_step_and_waits_within_phases(tmp_path: Path) -> None:
    engine = start(tmp_path, keys={"wall_clock_breakdown": True})
    for step in range(JOB.steps):
        train_step(engine, JOB, step)
        with torch.no_grad():
            JOB.loss(engine, step, 0)  # no forward of training
    engine.destroy(remove=True)
    phases = [values(tmp_path, f"Train/Samples/elapsed_time_ms_{name}") for name in ("forward", "backward", "step")]
    causes = ("reads", "updates", "commits", "memory", "uploads")
    waits = [values(tmp_path, f"Offload/wait_for_{name}_seconds") for name in causes]
    for total, *parts in zip(values(tmp_path, "Offload/seconds"), *phases, *waits, strict=True):
        assert min(parts[:3]) > 0 and min(parts) >= 0
        assert sum(parts[:3]) / 1000 <= total
        assert sum(parts[3:]) <= total
    assert sum(values(tmp_path, "Offload/update_kernels_seconds")) > 0


def test_a_loop_of_plain_torch_is_measured_but_for_its_loss(tmp_path: Path) -> None:
    engine = start(tmp_path, JOB._replace(accumulation=1), keys={"wall_clock_breakdown": True})
    for step in range(3):
        loss(engine.module, step, 0).backward()
        engine.optimizer.step()
    engine.destroy(remove=True)
    for phase in ("forward", "backward", "step"):
        assert min(values(tmp_path, f"Train/Samples/elapsed_time_ms_{phase}")) > 0
    assert [samples for samples, _ in rows(tmp_path, "Offload/grad_norm")] == [1, 2, 3]
    assert not (tmp_path / "job" / "Train_Samples_train_loss.csv").exists()


def test_a_skipped_step_is_recorded_and_one_that_raised_is_not(tmp_path: Path) -> None:
    for word, count in (("skip", 2), ("raise", 1)):
        folder = tmp_path / word
        engine = start(folder, JOB._replace(accumulation=1), on_nonfinite=word)
        engine.backward(loss(engine, 0, 0))
        engine.step()
        engine.backward(math.inf * loss(engine, 1, 0))
        if word == "raise":
            with pytest.raises(NumericsError):
                engine.step()
        else:
            engine.step()
        engine.destroy(remove=True)
        assert values(folder, "Offload/skipped_steps") == [0.0, 1.0][:count]
        assert all(map(math.isfinite, values(folder, "Offload/grad_norm")[:1]))
        assert len(rows(folder, "Offload/grad_norm")) == count


def test_the_learning_rate_is_that_of_the_step(tmp_path: Path) -> None:
    job = JOB._replace(accumulation=1)
    content = config(job, DISK, tmp_path / "swap") | {"csv_monitor": {**CSV, "output_path": str(tmp_path)}}
    engine = offload.initialize(
        model=model(),
        config=content,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ).engine
    for step in range(3):
        train_step(engine, job, step)
    engine.destroy(remove=True)
    assert values(tmp_path, "Train/Samples/lr") == [job.lr, job.lr / 2, job.lr / 3]


# -- no step twice ------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_files(tmp_path: Path) -> None:
    engine = start(tmp_path, durability={"every": 2})
    for step in range(3):
        train_step(engine, JOB, step)
    testing.abandon(engine, remove=False)
    kept = rows(tmp_path, "Train/Samples/train_loss")
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open("a") as file:
        file.write("8,0.")  # of a step that a kill has torn
    engine = start(tmp_path, durability={"every": 2}, resume="must")
    assert (engine.global_steps, engine.global_samples) == (2, 4)
    for step in range(2, 5):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    rows_found = rows(tmp_path, "Train/Samples/train_loss")
    assert rows_found[:3] == kept, "the third step has the same bits again"
    assert [samples for samples, _ in rows_found] == [2, 4, 6, 8, 10]


def test_a_run_that_starts_over_keeps_the_files_of_the_one_before(tmp_path: Path) -> None:
    for lr in (1e-3, 1e-4):
        engine = start(tmp_path, JOB._replace(lr=lr, accumulation=2 if lr == 1e-3 else 4))
        for step in range(2):
            train_step(engine, JOB._replace(accumulation=2 if lr == 1e-3 else 4), step)
        engine.destroy(remove=True)
    assert rows(tmp_path, "Train/Samples/lr") == [(4, 1e-4), (8, 1e-4)]
    old = (tmp_path / "job" / "Train_Samples_lr.csv.old").read_text().split()
    assert old == ["step,lr", "2,0.001", "4,0.001"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("step,lr\n8,1\n16,2\n", "step,lr\n8,1\n"),
        ("step,lr\r\n8,1\r\n16,2\r\n", "step,lr\r\n8,1\r\n"),
        ("step,lr\n8,1\n", "step,lr\n8,1\n"),
        ("step,lr\n8,1\n12", "step,lr\n8,1\n"),
        ("step,lr\n8,1\nno line\n9,1\n", "step,lr\n8,1\n9,1\n"),
        ("step,lr", "step,lr\n"),
        ("step,lr\n", "step,lr\n"),
        ("name,value\n16,2\n", "name,value\n16,2\n"),
        ("", ""),
        ("step,lr\n16,2\n", None),
    ],
)
def test_complete_lines_of_earlier_steps_are_kept(before: str, after: str | None, tmp_path: Path) -> None:
    path = tmp_path / "Train_Samples_lr.csv"
    path.write_text(before, newline="")
    cut(path, 16)
    if after is None:
        assert not path.exists() and path.with_name("Train_Samples_lr.csv.old").read_text() == before
    else:
        assert path.read_bytes().decode() == after
        assert [each.name for each in tmp_path.iterdir()] == [path.name]


# -- several ranks ------------------------------------------------------------------------------------


def _train_on_a_rank(folder: Path) -> tuple[bool, int]:
    engine = start(folder)
    for step in range(2):
        train_step(engine, JOB, step)
    measured = testing.inspect(engine).measures
    engine.destroy(remove=True)
    return measured, engine.global_samples


def test_rank_0_alone_writes(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_train_on_a_rank, tmp_path) == [(True, 8), (False, 8)]
    assert [samples for samples, _ in rows(tmp_path, "Train/Samples/train_loss")] == [4, 8]


# -- writers ------------------------------------------------------------------------------------------


def record(step: int, **more: float) -> StepRecord:
    return StepRecord(step, 8 * step, {"seconds": 0.5, "read_bytes": 2**20, "written_bytes": 0, "lr": 1e-3, **more})


def test_events_have_the_names_of_deepspeed() -> None:
    numbers = {"loss": 2.0, "loss_scale": 4.0, "forward_seconds": 0.5, "backward_seconds": 1.0, "step_seconds": 0.25}
    assert events(StepRecord(1, 8, {**numbers, "lr": 0.1, "grad_norm": 3.0})) == {
        "Train/Samples/train_loss": 2.0,
        "Train/Samples/loss_scale": 4.0,
        "Train/Samples/elapsed_time_ms_forward": 500.0,
        "Train/Samples/elapsed_time_ms_backward": 1000.0,
        "Train/Samples/elapsed_time_ms_step": 250.0,
        "Train/Samples/lr": 0.1,
        "Offload/grad_norm": 3.0,
    }


class Broken:
    """A writer on a disk that is full after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seen, self.closed = steps, list[int](), 0

    def write(self, record: StepRecord) -> None:
        if len(self.seen) == self.steps:
            raise OSError(28, "No space left on device")
        self.seen.append(record.step)

    def close(self) -> None:
        self.closed += 1
        raise RuntimeError("and it cannot be closed either")


def test_a_writer_that_fails_is_one_warning_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    broken, intact = Broken(2), Broken(100)
    reporter = Reporter(None, {"broken": lambda: broken, "whole": lambda: intact})
    reporter.open()
    for step in range(1, 6):
        reporter.report(record(step))
    reporter.close()
    reporter.close()
    assert (broken.seen, intact.seen) == ([1, 2], [1, 2, 3, 4, 5])
    assert (broken.closed, intact.closed) == (1, 1)
    first, last = (each.getMessage() for each in caplog.records)
    assert '"broken" stopped after step 2' in first and "No space left" in first
    assert 'closing "whole" failed' in last


@pytest.mark.cpu_only("on a device without kernels of ours a line more says so")
def test_training_goes_on_when_its_folder_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    plain = run(JOB, DISK, tmp_path / "plain")
    engine = start(tmp_path)
    (tmp_path / "job").write_text("somebody has put a file there")
    losses = [train_step(engine, JOB, step) for step in range(JOB.steps)]
    engine.destroy(remove=True)
    assert losses == plain.losses
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "csv_monitor" in warning.getMessage() and "training continues" in warning.getMessage()


class Slow(Broken):
    """A writer that writes nothing until it is told to go."""

    def __init__(self) -> None:
        super().__init__(100)
        self.go = threading.Event()

    def write(self, record: StepRecord) -> None:
        self.go.wait()
        super().write(record)


def test_a_slow_writer_has_a_bounded_number_of_records_waiting_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.pending_metrics", 2)
    slow = Slow()
    reporter = Reporter(None, {"slow": lambda: slow})
    reporter.open()
    steps = threading.Thread(target=lambda: [reporter.report(record(step)) for step in range(6)])
    steps.start()
    steps.join(0.2)
    assert steps.is_alive(), "one record is being written, two wait, and so does the next step"
    slow.go.set()
    steps.join()
    reporter.close()
    assert slow.seen == list(range(6))


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    keys = {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "board"}}
    engine = start(tmp_path, keys=keys)
    losses = [train_step(engine, JOB, 0)]
    engine.save_checkpoint(tmp_path / "saved")
    train_step(engine, JOB, 5)
    train_step(engine, JOB, 6)
    engine.load_checkpoint(tmp_path / "saved")
    losses.append(train_step(engine, JOB, 1))
    engine.destroy(remove=True)
    seen = accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    scalars = seen.Scalars("Train/Samples/train_loss")
    assert [each.step for each in scalars] == [2, 4]
    assert [each.value for each in scalars] == pytest.approx(losses)
    assert "Offload/seconds" in seen.Tags()["scalars"]


WANDB = """
import json
run = None
calls = []
class Run:
    def log(self, values, step): calls.append(("log", step, sorted(values)))
    def finish(self): calls.append(("finish",))
def init(**settings):
    if settings["project"] == "refused": raise RuntimeError("api_key not configured")
    calls.append(("init", settings))
    return Run()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of this name, which writes down what it is asked."""
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    import wandb

    yield wandb
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def test_wandb_gets_each_step_in_a_run_of_its_own(wandb: Any, tmp_path: Path) -> None:
    engine = start(tmp_path, keys={"wandb": {"enabled": True, "project": "p", "team": "t", "group": "g"}})
    train_step(engine, JOB, 0)
    train_step(engine, JOB, 1)
    engine.destroy(remove=True)
    begun, *logged, ended = wandb.calls
    assert begun == ("init", {"project": "p", "entity": "t", "group": "g", "name": None})
    assert [step for _, step, _ in logged] == [2, 4] and "Train/Samples/train_loss" in logged[0][2]
    assert ended == ("finish",)


def test_a_run_of_wandb_that_the_user_has_begun_is_used_and_left(wandb: Any, tmp_path: Path) -> None:
    wandb.run = wandb.Run()
    engine = start(tmp_path, keys={"wandb": {"enabled": True}})
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    assert [call[0] for call in wandb.calls] == ["log"]


def test_wandb_that_refuses_is_an_error_before_training(wandb: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_key.*WANDB_MODE=offline"):
        start(tmp_path, keys={"wandb": {"enabled": True, "project": "refused"}})
    assert not (tmp_path / "job").exists()
    start(tmp_path).destroy(remove=True)  # the store of that run is not in the way


# -- the line -----------------------------------------------------------------------------------------


def test_the_line_has_means_over_the_steps_since_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ConsoleWriter(2, 8, memory=True)
    for step, seconds in ((1, 1.0), (2, 3.0), (3, 0.5)):
        shown.write(record(step, seconds=seconds, loss=step, host_peak_bytes=2**30))
    assert capsys.readouterr().err.splitlines() == [
        "step 2: loss 2, lr 0.001, 2.000 s a step, 4.0 samples/s, 1.0 MiB read, 0 B written; peak of RAM 1.0 GiB"
    ]


def test_the_line_has_phases_and_what_was_waited_for() -> None:
    phases = {"forward_seconds": 0.125, "backward_seconds": 0.25, "step_seconds": 0.0}
    seen = record(4, **phases, wait_for_reads_seconds=0.0625, wait_for_updates_seconds=0.0, skipped_steps=1)
    assert line(seen, seen.values, 8, memory=False).split("; ")[1:] == [
        "forward 0.125 s, backward 0.250 s, step 0.000 s, else 0.125 s",
        "waited 0.062 s for reads",
    ]
    assert "1 skipped" in line(seen, seen.values, 8, memory=False)
    values = {**seen.values, "drive_budget_used": 1234.5, "host_given_back_bytes": 3 * 2.0**20}
    shown = line(seen._replace(values=values), values, 8, memory=False)
    assert "drive budget 1,200 times, 3.0 MiB of RAM given back" in shown
    for used, words in ((0.0, "0%"), (0.00456, "0.46%"), (0.1234, "12%"), (0.996, "100%"), (3.21, "320%")):
        values = {**seen.values, "drive_budget_used": used}
        assert f"drive budget {words}," in line(seen._replace(values=values), values, 8, memory=False)
    idle = seen._replace(values={**seen.values, "wait_for_reads_seconds": 0.0})
    assert line(idle, idle.values, 8, memory=False).endswith("; waited for nothing")


@pytest.mark.cpu_only("on a device without kernels of ours a line more says so")
def test_the_line_goes_where_somebody_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def steps(run: str) -> None:
        engine = start(tmp_path, keys={"csv_monitor": {}, "steps_per_print": 1.0}, run=run)
        train_step(engine, JOB, 0)
        engine.destroy(remove=True)

    steps("console")
    assert "step 1: loss" in capsys.readouterr().err
    with caplog.at_level(logging.INFO, "offload"):
        steps("log")
    assert any("step 1: loss" in each.getMessage() for each in caplog.records)
    with caplog.at_level(logging.WARNING, "offload"):
        caplog.clear()
        steps("silent")
    assert not caplog.records and "step 1" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "every"),
    [
        ({}, 0),
        ({"steps_per_print": 100}, 100),
        ({"steps_per_print": 1e2}, 100),
        ({"steps_per_print": math.inf}, 0),
        ({"steps_per_print": "auto", "memory_breakdown": True}, 10),
        ({"steps_per_print": None, "wall_clock_breakdown": True}, 10),
        ({"steps_per_print": math.inf, "wall_clock_breakdown": True}, 0),
    ],
)
def test_how_often_there_is_a_line(keys: dict[str, Any], every: int) -> None:
    assert load_config(keys).steps_per_line == every


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"steps_per_print": -1}, "steps_per_print.*greater than or equal to 0"),
        ({"steps_per_print": True}, "steps_per_print should be a number"),
        ({"steps_per_print": 2.5}, "steps_per_print"),
        ({"csv_monitor": {"enabled": True, "output_paht": "x"}}, 'did you mean "output_path"'),
        ({"tensorboard": {"enabled": "perhaps"}}, "tensorboard.enabled"),
        ({"wandb": {"enabled": True, "entity": "x"}}, "unknown key wandb.entity"),
    ],
)
def test_what_is_wrong_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(keys)


@pytest.mark.parametrize(("package", "what"), [("tensorboard", "offload[monitor]"), ("wandb", "wandb")])
def test_a_package_that_is_missing_is_an_error_before_training(
    package: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / package).mkdir()  # such as wandb makes where it runs
    net = model()
    with pytest.raises(ConfigError, match=re.escape(f'`pip install "{what}"`')):
        offload.initialize(model=net, config=config(JOB, DISK, tmp_path / "swap") | {package: {"enabled": True}})
    assert not (tmp_path / "swap").exists() and not next(net.parameters()).is_meta


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r'csv_monitor.*is not a folder that you may write.*"output_path"'):
        start(tmp_path, keys={"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "file")}})
    assert not (tmp_path / "swap").exists()


def test_files_lie_in_a_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = start(tmp_path, keys={"csv_monitor": {"enabled": True}}, run="mine")
    assert not Path("runs").exists(), "a run that trains nothing leaves nothing"
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    assert Path("runs/mine/Train_Samples_lr.csv").exists()


def test_a_file_of_figures_is_no_link(tmp_path: Path) -> None:
    """The default folder is in the working one, where another user may have put links under the names of the files."""
    (tmp_path / "other").write_text("step,loss\n")
    (tmp_path / "runs" / "job").mkdir(parents=True)
    (tmp_path / "runs" / "job" / "Offload_seconds.csv").symlink_to(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    with pytest.raises(OSError, match="symbolic link"):
        CsvWriter(tmp_path / "link" / "job").write(record(1))
    assert (tmp_path / "other").read_text() == "step,loss\n"
    (tmp_path / "runs" / "job" / "Offload_seconds.csv").unlink()
    CsvWriter(tmp_path / "link" / "job").write(record(1))
    assert (tmp_path / "runs" / "job" / "Offload_seconds.csv").read_text() == "step,seconds\n8,0.5\n"
