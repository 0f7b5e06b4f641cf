"""Micro-batches that take turns at each unit change no bit."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload import testing
from offload.activations.kept_inputs import KeptInputs
from offload.hardware import probe
from offload.hardware.probe import Probed, Rates
from offload.layout.pass_order import (
    LAYER_MAJOR,
    MICRO_BATCH_MAJOR,
    SCHEDULES,
    ScheduleChoice,
    Transfers,
    choose_schedule,
    transfers,
)
from offload.layout.units import tied_numel
from offload.swapper.memory.device import DeviceRoom
from tests.device.module import mem_get_info
from tests.support import models
from tests.support.devices.late_device import LateDevice, use_device
from tests.support.oracle import (
    Job,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    room_for,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.param_states import gpt2
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import RankPool
from tests.support.ranks.rank_pool import start as start_ranks

JOB = models.GPT2._replace(accumulation=3, steps=3)


def test_the_backward_asks_in_the_expected_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.least_kept_input", 1)
    asked: list[tuple[int, ...]] = []
    fetch = KeptInputs.fetch

    def noted(self: KeptInputs, view: Any) -> Any:
        asked.append(view.kept.wanted)
        return fetch(self, view)

    testing.replace(monkeypatch, "input.fetch", noted)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, schedule="layer_major", activations="nvme")
    for step in range(JOB.steps):
        asked.clear()
        accumulated_step(engine, JOB, step)
        if step:  # in the first step one forward runs alone, which makes reads ahead come in another order
            assert len(asked) == 9 and asked == sorted(asked)
    engine.destroy(remove=True)


class Noted(nn.Linear):
    """A block that notes which micro-batch passes it, and keeps what its first forward makes if it `caches`."""

    passed: tuple[list[tuple[int, int]]] = ([],)

    def __init__(self, number: int, caches: bool) -> None:
        super().__init__(8, 8)
        self.number, self.caches, self.scale = number, caches, {}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        micro = int(threading.current_thread().name.removeprefix("offload-micro-batch-"))
        self.passed[0].append((micro, self.number))
        if self.caches and not self.scale:
            self.scale = {"made": 1.0}
        return super().forward(hidden)


@pytest.mark.parametrize("caches", [False, True])
def test_one_forward_shows_that_micro_batches_may_take_turns(caches: bool, tmp_path: Path) -> None:
    """Unless it leaves something on a module, which may be there for good: then the second micro-batch shows it."""
    job = Job(
        lambda: nn.Sequential(*(Noted(number, caches) for number in range(2))),
        lambda model, step, micro: model(torch.ones(2, 8)).sum(),
        accumulation=3,
    )
    engine = start(job, ("cpu", "cpu"), tmp_path, schedule="layer_major")
    orders = []
    for step in range(2):
        Noted.passed[0].clear()
        accumulated_step(engine, job, step)
        orders.append(list(Noted.passed[0]))
    engine.destroy(remove=True)
    turns = [(micro, block) for block in range(2) for micro in range(3)]
    behind_one = [(0, 0), (0, 1), *((micro, block) for block in range(2) for micro in (1, 2))]
    one_by_one = [(micro, block) for micro in range(3) for block in range(2)]
    assert orders == [one_by_one if caches else behind_one, turns]


class Towers(nn.Module):
    """Two lists of blocks, with layers before, between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("before", "between", "behind")})
        self.first, self.second = (nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(2))

    def forward(self, hidden: torch.Tensor, left_out: set[int]) -> torch.Tensor:
        hidden = self.around["before"](hidden)
        for number, block in enumerate(self.first):
            hidden = hidden if number in left_out else torch.tanh(block(hidden))
        hidden = self.around["between"](hidden)
        for number, block in enumerate(self.second, 2):
            hidden = hidden if number in left_out else torch.tanh(block(hidden))
        return self.around["behind"](hidden)


@pytest.mark.parametrize("left_out", [{0}, {1}, {2}, {3}, {1, 2}, {1, 3}], ids=str)
def test_a_micro_batch_that_leaves_out_blocks_changes_no_bit(left_out: set[int], tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(8 * step + micro))
        return model(rows, left_out if micro == 2 else set()).square().mean()

    results = []
    for schedule in (MICRO_BATCH_MAJOR, LAYER_MAJOR):
        job = Job(Towers, loss, accumulation=3, steps=3)
        engine = start(job, ("cpu", "cpu"), tmp_path, schedule=schedule)
        assert engine.schedule == schedule
        results.append(trained(engine, job, accumulated_step))
        engine.destroy(remove=True)
    assert_same(*results)


@pytest.mark.parametrize("schedule", ["auto", "layer_major"])
def test_a_hook_of_the_user_keeps_the_plain_order_from_the_first_step_on_unless_turns_are_asked_for_by_name(
    schedule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features: list[torch.Tensor] = []

    def model() -> nn.Module:
        blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        blocks[0].register_forward_hook(lambda module, args, output: features.append(output.detach().clone()))
        return blocks

    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        output = model(torch.full((2, 8), micro + 1.0))
        apart.append(len(features) == step * 3 + micro + 1)
        return output.sum()

    apart: list[bool] = []
    job = Job(model, loss, accumulation=3)
    engine = start(job, ("nvme", "nvme"), tmp_path, schedule=schedule, activations="nvme")
    assert engine.schedule == LAYER_MAJOR
    for step in range(2):
        accumulated_step(engine, job, step)
    engine.destroy(remove=True)
    assert all(apart) is (schedule == "auto")
    assert caplog.text.count("a forward hook of yours on 0 may keep values between two blocks") == 1


class Keeping(nn.Linear):
    """A block that stores a value in each forward while `keeps` is true."""

    keeps = False

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.seen = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if Keeping.keeps:
            self.seen += 1
        return super().forward(hidden)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_resumed_run_keeps_its_order_and_says_so(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step of a run decides its order, since ranks add gradients by it."""
    job = Job(
        lambda: nn.Sequential(Keeping(), Keeping()),
        lambda model, step, micro: model(torch.ones(2, 8)).sum(),
        accumulation=3,
    )
    orders = []
    for life in range(3):
        monkeypatch.setattr(Keeping, "keeps", keeps if life < 1 else not keeps)
        engine = start(job, ("nvme", "nvme"), tmp_path, schedule="layer_major", resume="auto", durability="step")
        orders.append(engine.schedule)
        if life != 1:  # a life without a step forgets nothing
            accumulated_step(engine, job, engine.global_steps)
            orders.append(engine.schedule)
        engine.destroy()
    if keeps:
        assert orders == [LAYER_MAJOR, *[MICRO_BATCH_MAJOR] * 4]
        assert "as in this run so far: its first step has found a value that the model keeps" in caplog.text
    else:
        assert orders == [LAYER_MAJOR] * 5
        assert (
            "the model keeps 0.seen on a module between two blocks, where another micro-batch finds it." in caplog.text
        )


def loss_from_the_second_step_on(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """Returns a loss whose gradients are zero in the first step, which runs one micro-batch after the other."""
    return language_rows_loss(model, step, micro) * min(step, 1)


RANKS_JOB = Job(gpt2, loss_from_the_second_step_on, accumulation=4, steps=2)


def train(
    job: Job, folder: Path, schedule: str, options: dict[str, str]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start_ranks(job, ("nvme", "nvme"), folder, schedule=schedule, **options)
    losses = [accumulated_step(engine, job, step) for step in range(job.steps)]
    result = losses, weights_of(engine)
    engine.destroy(remove=True)
    return result


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "options"), [("bf16", {}), ("fp32", {"activations": "cpu"})])
def test_two_ranks_have_the_same_bits(ranks: RankPool, dtype: str, options: dict[str, str], tmp_path: Path) -> None:
    """In stage 1 each rank has all sums; in stages 2 and 3 those of one or two units at a time, by turns."""
    job = RANKS_JOB._replace(dtype=dtype)
    plain = ranks.run(train, job._replace(stage=1), tmp_path / "sums", "micro_batch_major", options)
    for stage in (2, 3):
        in_turns = ranks.run(train, job._replace(stage=stage), tmp_path / str(stage), "layer_major", options)
        for left, right in zip(plain, in_turns, strict=True):
            assert left[0] == right[0]
            assert_same_tensors(left[1], right[1])


GIB = 1 << 30
PAYS: dict[str, Any] = {
    "asked": "auto",
    "micro_batches": 8,
    "blocks": 40,
    "moves": True,
    "sends": True,
    "checkpointed": True,
    "activation_nbytes": 10 * GIB,
    "free_nbytes": 12 * GIB,
}
"""A run for which layer-major pays and fits."""


def chosen(**changes: Any) -> ScheduleChoice:
    return choose_schedule(**{**PAYS, **changes})


def test_layer_major_is_taken_where_it_saves_transfers_and_fits() -> None:
    assert chosen() == ScheduleChoice(LAYER_MAJOR, "each weight is fetched twice a step instead of 16 times")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"micro_batches": 1}, "a step has one micro-batch, so both orders are the same"),
        ({"blocks": 0}, "the model is no chain of repeated blocks"),
        ({"blocks": 1}, "the model is no chain of repeated blocks"),
        (
            {"moves": False, "sends": False},
            "all weights and gradients stay on the device, so no transfer would be saved",
        ),
        (
            {"moves": False, "checkpointed": False, "activation_nbytes": None},
            "it is unknown whether the activations of 8 micro-batches fit",
        ),
        ({"free_nbytes": 9 * GIB}, "activations of 8 micro-batches take 10.0 GiB, and 9.0 GiB is free"),
        ({"free_nbytes": -1}, "activations of 8 micro-batches take 10.0 GiB, and 0 B is free"),
        (
            {"checkpointed": False, "activation_nbytes": None},
            "it is unknown whether the activations of 8 micro-batches fit",
        ),
        (
            {"activation_nbytes": None, "tied_nbytes": 7 * GIB},
            "gradients of tied weights of 8 micro-batches take 7.0 GiB, of 12.0 GiB that is free",
        ),
    ],
)
def test_a_reason_says_why_auto_takes_the_other_order(changes: dict[str, Any], reason: str) -> None:
    assert chosen(**changes) == ScheduleChoice(MICRO_BATCH_MAJOR, reason)


@pytest.mark.parametrize("unknown", ["activation_nbytes", "free_nbytes"])
def test_blocks_that_keep_their_inputs_alone_are_trusted_to_fit(unknown: str) -> None:
    assert chosen(**{unknown: None}).schedule == LAYER_MAJOR
    assert chosen(**{unknown: None, "checkpointed": False}).schedule == MICRO_BATCH_MAJOR


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 64),
    st.integers(0, 80),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    *(st.none() | st.integers(0, 1 << 40) for _ in range(2)),
)
def test_a_wish_is_granted_where_the_model_allows_it(
    asked: str,
    micro_batches: int,
    blocks: int,
    moves: bool,
    sends: bool,
    checkpointed: bool,
    learns: bool,
    activation_nbytes: int | None,
    free_nbytes: int | None,
) -> None:
    choice = choose_schedule(
        asked=asked,
        micro_batches=micro_batches,
        blocks=blocks,
        moves=moves,
        sends=sends,
        checkpointed=checkpointed,
        learns=learns,
        activation_nbytes=activation_nbytes,
        free_nbytes=free_nbytes,
    )
    possible = micro_batches > 1 and blocks > 1
    if asked != "auto":
        assert choice.schedule == (asked if possible else MICRO_BATCH_MAJOR)
    assert choice.schedule == MICRO_BATCH_MAJOR or (possible and (moves or sends or asked == LAYER_MAJOR))
    assert not choice.after_a_step or (learns and asked == "auto" and choice.schedule == LAYER_MAJOR)
    assert choice.reason and not choice.reason.endswith(".") and "\n" not in choice.reason


def test_beside_weights_that_stay_layer_major_sends_gradients_once_where_activations_fit() -> None:
    stays = {"moves": False, "checkpointed": False}
    once = "gradients leave the device once a step instead of with each micro-batch"
    assert chosen(**stays) == ScheduleChoice(LAYER_MAJOR, once)
    assert chosen(**stays, free_nbytes=9 * GIB).schedule == MICRO_BATCH_MAJOR
    assert chosen(**stays, activation_nbytes=None, learns=True) == ScheduleChoice(LAYER_MAJOR, once, after_a_step=True)


@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_micro_batches_in_turns_fetch_each_weight_twice_and_send_each_gradient_once(
    placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape of a 7B in miniature, with room for two layers."""
    job = Job(models.llama, models.language_loss, accumulation=4, dtype="bf16")
    device = LateDevice(seed=0, lateness=0)
    use_device(monkeypatch, device, always=False)
    options: dict[str, Any] = {"schedule": "layer_major", "activations": "device", "device_memory": room_for(job, 2)}
    engine = start(job, placement, tmp_path, **options)
    nbytes = sum(parameter.numel() for parameter in engine.module.parameters()) * torch.bfloat16.itemsize
    for step in range(2):  # the first forward of all runs alone, so the second step is the first in the recorded order
        accumulated_step(engine, job, step)
    before = device.uploaded, device.downloaded
    for step in range(2, 4):
        accumulated_step(engine, job, step)
    # Beside these, the first weights of the next step may be on the device already.
    assert device.uploaded - before[0] <= 2 * 2 * nbytes + engine.device_memory
    assert 2 * nbytes <= device.downloaded - before[1] < 2 * nbytes + 1024, "gradients, and their sums of squares"
    engine.destroy(remove=True)


def test_the_bytes_of_a_step_in_either_order() -> None:
    """13B on an H200 held to 24 GiB, as measured in November 2026: 8 passes, about half of the weights kept."""
    sizes = {"weights": 26, "kept": 16, "on_disk": 0, "cached": 0, "gradient": 26, "total": 52, "added": 0}
    assert transfers(MICRO_BATCH_MAJOR, 4, **sizes) == Transfers(26 + 7 * 10, 4 * 26, 0)
    assert transfers(LAYER_MAJOR, 4, **sizes) == Transfers(26 + 10, 52, 0)
    drive = sizes | {"kept": 0, "on_disk": 26, "cached": 6, "added": 26}
    assert transfers(MICRO_BATCH_MAJOR, 4, **drive) == Transfers(8 * 26, 26 + 4 * 13, 7 * 20)
    assert transfers(LAYER_MAJOR, 4, **drive).seconds(upload=52, download=1, read=2) == 52


ASKS = "engine.train_batch(iterator), or engine.accumulate(micro_batches) and one engine.step(), takes all 3 through a"
PROBED = Probed({"gpu": "a card"}, Rates(1e9, 1e9, upload=1e6, download=1e12, fresh=1e9, by_dtype={}), (), "", 0.0)


def test_a_loop_that_runs_micro_batches_by_itself_is_told_once_what_that_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_device(monkeypatch, LateDevice(0, 0.5), always=False)
    monkeypatch.setattr(probe, "kept", lambda: PROBED)
    layered = {"schedule": "layer_major", "device_memory": room_for(JOB, 2)}
    engine = start(JOB, ("cpu", "cpu"), tmp_path, **layered)
    train_step(engine, JOB, 0)
    said = capsys.readouterr().err
    assert said.count(ASKS) == 1
    for step in (1, 2):
        train_step(engine, JOB, step)
    assert ASKS not in capsys.readouterr().err
    engine.destroy(remove=True)
    one_by_one, in_turns = (float(text) for text in re.findall(r"in ([0-9.]+) seconds or more", said))
    assert one_by_one > 1.5 * in_turns > 0


@pytest.mark.parametrize(
    ("tiers", "on_gpu", "options", "by"),
    [
        pytest.param(("cpu", "cpu"), True, {"schedule": "layer_major"}, accumulated_step, id="accumulate"),
        pytest.param(("cpu", "cpu"), True, {"schedule": "micro_batch_major"}, train_step, id="as asked"),
        pytest.param(("cpu", "cpu"), True, {}, train_step, id="blocks keep everything"),
        pytest.param(("none", "none"), True, {"schedule": "layer_major"}, train_step, id="nothing moves"),
        pytest.param(("cpu", "cpu"), False, {"schedule": "layer_major"}, train_step, id="in the memory of a CPU"),
    ],
)
def test_a_loop_that_loses_nothing_is_told_nothing(
    tiers: tuple[str, str],
    on_gpu: bool,
    options: dict[str, str],
    by: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if on_gpu:
        device = LateDevice(0, 0.5)
        device.spare = DeviceRoom(GIB, 0)  # for gradients of states on the device
        use_device(monkeypatch, device, always=False)
    engine = start(JOB, tiers, tmp_path, **options)
    by(engine, JOB, 0)
    engine.destroy(remove=True)
    assert "engine.train_batch" not in capsys.readouterr().err


UNTIED = Job(models.llama, models.language_loss)


@pytest.mark.test_device
def test_parameters_of_several_modules_are_counted_once_where_they_are_trained() -> None:
    head = models.gpt2().lm_head.weight
    assert tied_numel(models.gpt2()) == head.numel() == 128 * 64
    assert tied_numel(models.llama()) == 0
    frozen = models.gpt2().requires_grad_(False)
    assert tied_numel(frozen) == 0


@pytest.mark.test_device
@pytest.mark.parametrize(
    ("job", "full", "schedule"),
    [
        pytest.param(models.GPT2, False, LAYER_MAJOR, id="tied, room"),
        pytest.param(models.GPT2, True, MICRO_BATCH_MAJOR, id="tied, no room"),
        pytest.param(UNTIED, True, LAYER_MAJOR, id="untied"),
    ],
)
def test_auto_counts_them_for_each_micro_batch(job: Job, full: bool, schedule: str, tmp_path: Path) -> None:
    table_nbytes, total = 128 * 64 * torch.float32.itemsize, mem_get_info()[1]
    # In half of all memory, or in an eighth: some is in use, and that of activations and of the budget is left out.
    accumulation = total // table_nbytes // (2 if full else 8) + 2
    engine = start(job._replace(accumulation=accumulation), ("cpu", "cpu"), tmp_path, activations="cpu")
    try:
        assert engine.device.type == "test" and engine.schedule == schedule
    finally:
        engine.destroy(remove=True)
