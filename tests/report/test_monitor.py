"""The numbers of each step are right, cost no bit, and each step occurs once in the files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

import offload
from offload import testing
from offload.errors import NumericsError
from offload.metrics.meter import cause_of
from offload.metrics.writers import cut
from offload.timeline import Row
from tests.report.monitor_runs import CSV, DISK, JOB, loss, model, no_thread_stays, rows, start, values
from tests.support.models import GPT2
from tests.support.oracle import (
    PLACEMENTS,
    assert_same,
    config,
    least_host_memory,
    run,
    small_pieces,
    train_step,
    weights_of,
)
from tests.support.ranks.rank_pool import RankPool

__all__ = ["no_thread_stays"]  # fixtures

# -- what is measured ---------------------------------------------------------------------------------


@pytest.mark.sample(4)
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
    assert (min(values(tmp_path, "Offload/uploaded_bytes")) > 0) == (placement[0] != "none")
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


def test_without_a_breakdown_nothing_listens_inside_of_a_step(tmp_path: Path) -> None:
    engine = start(tmp_path)
    assert not testing.inspect(engine).records_spans
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    assert not (tmp_path / "job" / "Train_Samples_elapsed_time_ms_forward.csv").exists()
    assert min(values(tmp_path, "Offload/seconds")) > 0


def test_nothing_is_measured_without_a_monitor(tmp_path: Path) -> None:
    engine = start(tmp_path, keys={"csv_monitor": {"enabled": False}, "steps_per_print": math.inf})
    assert not (testing.inspect(engine).measures or testing.inspect(engine).records_spans or engine.measured)
    engine.destroy(remove=True)


def test_a_time_line_goes_on_beside_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    engine = start(tmp_path, keys={"wall_clock_breakdown": True}, trace=str(trace))
    for step in range(2):
        train_step(engine, JOB, step)
    engine.destroy(remove=True)
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    uploads = sum(span["args"]["bytes"] for span in spans if span["cat"] == "uploads")
    assert uploads >= sum(values(tmp_path, "Offload/uploaded_bytes")) > 0
    assert {"step 1", "step 2"} <= {span["name"] for span in spans}
    # The row has the model's forwards and backwards as well: of these the meter hears as phases alone.
    steps = [span["dur"] / 1000 for span in spans if span["cat"] == "compute" and span["name"].startswith("step ")]
    assert values(tmp_path, "Train/Samples/elapsed_time_ms_step") == pytest.approx(steps)


def test_every_wait_of_a_component_has_a_cause() -> None:
    room = Path(offload.__file__).parent
    found = set()
    for path in (path for folder in ("swapper", "engine", "activations") for path in room.glob(f"{folder}/**/*.py")):
        if path.name != "metrics.py":
            found |= {*re.findall(r'f?"(waits for [^"{]*)', path.read_text())}
    assert len(found) > 12
    for words in found:
        ends = {
            "waits for ": ("all updates", "the commit"),
            "waits for the ": ("read of gradients", "write of gradients"),
        }
        for end in ends.get(words, ("",)):
            assert cause_of(Row.WAITS, words + end) or cause_of(Row.WORKER, words + end), words


def test_units_that_pass_through_host_memory_in_chunks_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory has no room for two of these, so that the model's thread reads each when it needs it."""
    small_pieces(monkeypatch)
    least = least_host_memory(GPT2, tmp_path / "least")
    engine = start(tmp_path, GPT2, keys={"wall_clock_breakdown": True}, host_memory=least)
    for step in range(3):
        train_step(engine, GPT2, step)
    engine.destroy(remove=True)
    assert min(values(tmp_path, "Offload/wait_for_reads_seconds")) > 0
    assert min(values(tmp_path, "Offload/wait_for_memory_seconds")) > 0  # gradients that leave it for the drive


def test_losses_of_micro_batches_that_were_given_up_are_not_in_it(tmp_path: Path) -> None:
    engine = start(tmp_path, keys={"wall_clock_breakdown": True})
    engine.backward(1000 * loss(engine, 7, 7))
    engine.zero_grad()
    expected = train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    assert values(tmp_path, "Train/Samples/train_loss") == [expected]


def test_a_loss_that_the_user_has_divided_is_added_up(tmp_path: Path) -> None:
    engine = start(tmp_path)
    parts = []
    for micro in range(2):
        part = loss(engine, 0, micro) / 2
        engine.backward(part, scale_wrt_gas=False)
        parts.append(part.detach().clone())
        part.detach().zero_()  # what happens to it afterwards is the user's
        engine.step()
    engine.destroy(remove=True)
    assert values(tmp_path, "Train/Samples/train_loss") == [float(parts[0] + parts[1])]


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
    found = rows(tmp_path, "Train/Samples/train_loss")
    assert found[:3] == kept, "the third step has the same bits again"
    assert [samples for samples, _ in found] == [2, 4, 6, 8, 10]


def test_a_checkpoint_that_is_loaded_goes_on_with_the_files(tmp_path: Path) -> None:
    engine = start(tmp_path)
    train_step(engine, JOB, 0)
    engine.save_checkpoint(tmp_path / "saved")
    train_step(engine, JOB, 1)
    train_step(engine, JOB, 2)
    engine.load_checkpoint(tmp_path / "saved")
    train_step(engine, JOB, 1)
    engine.destroy(remove=True)
    assert [samples for samples, _ in rows(tmp_path, "Train/Samples/train_loss")] == [2, 4]
    engine = start(tmp_path)  # another process: what the files have is kept until it is known where it goes on
    engine.load_checkpoint(tmp_path / "saved")
    assert engine.global_samples == 2
    train_step(engine, JOB, 1)
    engine.destroy(remove=True)
    assert [samples for samples, _ in rows(tmp_path, "Train/Samples/train_loss")] == [2, 4]


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
