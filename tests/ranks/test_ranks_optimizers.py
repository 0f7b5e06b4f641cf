"""Every optimizer trains on several ranks: with the same bits in every placement, whole parameters among them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import IoError, OffloadError
from offload.layout.update_order import Lane
from tests.planner.test_simulate_engine import PromptQueue
from tests.support import models, rounding_bounds
from tests.support.drives.fault_injection import LateQueue
from tests.support.models import token_loss, tokens
from tests.support.modules.matrix_models import MUON, SINKGD, words_loss
from tests.support.oracle import (
    Job,
    Result,
    assert_same,
    assert_same_tensors,
    config,
    least_host_memory,
    small_pieces,
    train_step,
    trained,
)
from tests.support.ranks.rank_jobs import JOBS, my_rows
from tests.support.ranks.rank_pool import RankPool, rank_and_size, shared_pool, start, train
from tests.support.sampling import drawn

DISK = ("nvme", "nvme")
PLACES = (("none", "none"), ("nvme", "nvme"), ("cpu", "nvme"))
MIXTURE = JOBS["mixture"]._replace(model=models.Mixture, steps=2)
TRIED = {
    "fp16": MIXTURE._replace(dtype="fp16"),
    "lion, bf16": MIXTURE._replace(dtype="bf16", optimizer="Lion", lr=1e-4),
    "momentum, fp16": MIXTURE._replace(dtype="fp16", optimizer="SGD", lr=0.05, params=(("momentum", 0.9),)),
    "sgd": MIXTURE._replace(optimizer="SGD", lr=0.05),
    "adagrad": MIXTURE._replace(optimizer="Adagrad", lr=1e-2),
    "lamb": MIXTURE._replace(optimizer="Lamb", lr=1e-2),
    "lamb, bf16": MIXTURE._replace(optimizer="Lamb", lr=1e-2, dtype="bf16"),
    "lamb, fp16": MIXTURE._replace(optimizer="Lamb", lr=1e-2, dtype="fp16"),
}
LAMB = TRIED["lamb, bf16"]._replace(accumulation=2)


def slow_but(name: str, *fast: str) -> Any:
    """Marks a case as slow that is none of the fast ones."""
    return name if name in fast else pytest.param(name, marks=pytest.mark.slow)


def everywhere(job: Job, folder: Path, options: dict[str, Any], placements: list[tuple[str, str]]) -> Result:
    results = [train(job, placement, folder / "-".join(placement), **options) for placement in placements]
    for result in results[1:]:
        assert_same(results[0], result, "placements")
    return results[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TRIED)
@pytest.mark.numeric
def test_same_bits_in_some_placements(name: str, ranks: RankPool, tmp_path: Path) -> None:
    rank0, rank1 = ranks.run(everywhere, TRIED[name], tmp_path, {}, drawn(PLACES, 2))
    assert_same(rank0, rank1, "ranks")
    alone = train(TRIED[name], ("nvme", "nvme"), tmp_path / "alone")
    rounding_bounds.same_training(rank0, alone, TRIED[name], reordered=True)


def in_small_pieces(folder: Path) -> tuple[Result, Result]:
    """With memory for all, and with so little that units stream and gradients wait on disk."""
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        least = least_host_memory(LAMB, folder)
        return train(LAMB, DISK, folder / "roomy"), train(LAMB, DISK, folder / "tight", host_memory=least)


def uneven() -> nn.Module:
    """The ratio of one rank's part of a matrix alone would be far from that of the whole."""
    model = LAMB.model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[: len(parameter) // 2] *= 8
    return model


UNEVEN = LAMB._replace(model=uneven, dtype="fp32")


@pytest.mark.numeric
def test_lamb_weighs_parameters_that_are_cut(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank has a part of each large parameter, in many tiles: the ratio is that of the whole parameter."""
    alone = train(UNEVEN, DISK, tmp_path / "alone")
    for result in ranks.run(train, UNEVEN, DISK, tmp_path / "two"):
        rounding_bounds.same_training(result, alone, UNEVEN, reordered=True)
    for roomy, tight in ranks.run(in_small_pieces, tmp_path):
        assert_same(roomy, tight, "memory")


class Wide(nn.Module):
    """As `Words`, with matrices of several pages, so that borders between ranks are within them.

    Of two ranks the second has most of the divided matrix of the first block, and the first that of the second block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 72)
        up, down, flat = nn.Linear(72, 104), nn.Linear(104, 72), nn.Linear(72, 72)
        block = nn.Sequential(nn.LayerNorm(72), up, nn.Tanh(), down, flat)
        up, down, flat = nn.Linear(72, 104), nn.Linear(104, 72), nn.Linear(72, 72)
        self.blocks = nn.ModuleList([block, nn.Sequential(nn.LayerNorm(72), flat, up, nn.Tanh(), down)])
        self.lm_head = nn.Linear(72, 61, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.lm_head(hidden)  # type: ignore[no-any-return]


def rows_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    """Returns the loss of this rank's rows; the mean over the ranks is that of all rows."""
    ids = my_rows(tokens(step, micro, (4, 9), 61))
    return token_loss(model(ids), ids)


def _own(name: str, lr: float, **params: Any) -> Job:
    return Job(Wide, words_loss, 3, lr=lr, clip=0.0, optimizer=f"torch.optim.{name}", params=tuple(params.items()))


WIDE_MUON, WIDE_SINKGD = MUON._replace(model=Wide, steps=3), SINKGD._replace(model=Wide, steps=3)
MATRIX_JOBS = {
    "Muon": WIDE_MUON,
    "Muon, bf16": WIDE_MUON._replace(dtype="bf16", accumulation=2),
    "Muon, fp16": WIDE_MUON._replace(dtype="fp16"),
    "Muon, bf16 moments": WIDE_MUON._replace(dtype="bf16"),
    "SinkGD": WIDE_SINKGD,
    "SinkGD, bf16": WIDE_SINKGD._replace(dtype="bf16"),
    "Adafactor": _own("Adafactor", 1e-2),
    "Adafactor, bf16": _own("Adafactor", 1e-2)._replace(dtype="bf16", accumulation=2),
    "NAdam, fp16": _own("NAdam", 1e-3)._replace(dtype="fp16"),
}
OPTIONS: dict[str, dict[str, Any]] = {"Muon, bf16 moments": {"moments": "bf16"}}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Products of matrices have the bits of one thread, as the ranks'."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", [slow_but(name, "Muon, bf16 moments") for name in MATRIX_JOBS])
def test_the_same_rows_give_the_bits_of_one_process_in_any_placement(
    name: str, ranks: RankPool, tmp_path: Path
) -> None:
    job, options = MATRIX_JOBS[name], OPTIONS.get(name, {})
    rank0, rank1 = ranks.run(everywhere, job, tmp_path, options, drawn(PLACES, 2))
    assert_same(rank0, rank1, "ranks")
    with one_thread():
        alone = train(job, DISK, tmp_path / "alone", **options)
    assert alone.losses == rank0.losses
    assert_same_tensors(alone.weights, rank0.weights)


@pytest.mark.parametrize("name", [slow_but(name, "Muon") for name in ("Muon", "SinkGD", "Adafactor")])
@pytest.mark.numeric
def test_ranks_with_rows_of_their_own_train_as_one_process(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Gradients are added in another order, and the direction of Muon is no continuous function of them: one step."""
    job = MATRIX_JOBS[name]._replace(loss=rows_loss, steps=1)
    alone = train(job, DISK, tmp_path / "alone")
    for result in ranks.run(train, job, DISK, tmp_path / "two"):
        rounding_bounds.same_losses(result.losses, alone.losses, job)
        rounding_bounds.same_norms(result.norms, alone.norms, job)


class Half(nn.Module):
    """A unit of two matrices, of which the model uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(96, 64, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(rows)  # type: ignore[no-any-return]


def half_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
    return model(rows).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", [slow_but(name, "SinkGD") for name in ("SinkGD", "torch.optim.NAdam")])
def test_a_rank_without_a_part_takes_part(optimizer: str, tmp_path: Path) -> None:
    """Of three ranks the third has elements of the other matrix alone, which has no gradient."""
    job = Job(Half, half_loss, 3, clip=0.0, optimizer=optimizer)
    before = job.model().state_dict()["other.weight"] if torch.manual_seed(job.seed) else None
    with shared_pool(3) as three:
        results = three.run(train, job, DISK, tmp_path)
    assert before is not None and results[0].losses[-1] < results[0].losses[0]
    for result in results:
        assert_same(results[0], result, "ranks")
        assert torch.equal(result.weights["other.weight"], before)


def without_durability(job: Job, placement: tuple[str, str], folder: Path) -> Result:
    return train(job, placement, folder, durability="none")


def test_a_rank_without_states_trains_beside_one_with_states_on_a_drive(ranks: RankPool, tmp_path: Path) -> None:
    """SinkGD keeps no states of matrices, and the first rank steps all else. All ranks have a store, or none has."""
    (on_drives, rank1), in_memory = (
        ranks.run(without_durability, SINKGD._replace(stage=0, steps=2), placement, tmp_path / placement[1])
        for placement in (("cpu", "nvme"), ("cpu", "cpu"))
    )
    assert_same(on_drives, rank1, "ranks")
    assert_same(on_drives, in_memory[0], "placements")


def half_in_memory(job: Job, folder: Path) -> Result:
    """Trains with the states of the first units in memory. Reads of the others end at once, or late on the second rank.

    By its drives alone the first rank would step matrices on its drive first, the second those in memory.
    """
    rank, _ = rank_and_size()
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "io.queue", lambda *_, **__: LateQueue(0, 0.02) if rank else PromptQueue())
        torch.manual_seed(job.seed)
        given = config(job, ("none", "nvme"), folder, durability="none")
        given["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
        engine = offload.initialize(model=job.model(), config=given)[0]
        inspected = testing.inspect(engine)
        assert {inspected.update_lane(unit) for unit in range(len(inspected.trainable))} == {*Lane}
        try:
            return trained(engine, job)
        finally:
            engine.destroy(remove=True)


@pytest.mark.slow
def test_ranks_whose_drives_differ_step_matrices_in_one_order(ranks: RankPool, tmp_path: Path) -> None:
    job = MATRIX_JOBS["Muon"]
    in_memory, _ = ranks.run(train, job, ("none", "none"), tmp_path / "memory")
    for result in ranks.run(half_in_memory, job, tmp_path / "half"):
        assert_same_tensors(in_memory.weights, result.weights)


# -- states --------------------------------------------------------------------------------------------


def local_states(job: Job, folder: Path) -> tuple[int, int, bool]:
    """The elements of a state of a torch optimizer and of a weight on this rank, and whether it can be set."""
    engine = start(job, DISK, folder)
    train_step(engine, job, 0)
    weight = engine.module.get_parameter("blocks.0.3.weight")
    there = offload.safe_get_local_optimizer_state(weight, "row_var")
    mine = offload.safe_get_local_fp32_param(weight)
    engine.destroy(remove=True)
    assert there is not None and mine is not None
    return there.numel(), mine.numel(), bool(there.numel())


def test_one_rank_keeps_the_states_of_torch(ranks: RankPool, tmp_path: Path) -> None:
    rank0, rank1 = ranks.run(local_states, MATRIX_JOBS["Adafactor"], tmp_path)
    assert {rank0[0], rank1[0]} == {0, 72} and rank0[1] + rank1[1] == 72 * 104
    # The one with the most elements of the weight.
    assert (rank0[1] > rank1[1]) is (rank0[0] > rank1[0])


# -- faults --------------------------------------------------------------------------------------------


def message_of_a_failing_drive(job: Job, operation: str, folder: Path) -> str:
    """Returns this rank's error of a step in which the store of rank 1 fails to read, or to write."""
    rank, _ = rank_and_size()
    engine = start(job, DISK, folder)
    message = ""

    def fails(*_: object, **__: object) -> None:
        raise IoError("/drive/data", 0, 4096, 5)

    with pytest.MonkeyPatch.context() as patch:
        try:
            train_step(engine, job, 0)
            engine.mean(0.0)
            if rank:
                testing.settle(engine)
                testing.replace(patch, f"store.{operation}", fails)
            train_step(engine, job, 1)
        except (OffloadError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(OffloadError, OSError):
                engine.destroy()
    return message


@pytest.mark.parametrize(
    ("job", "operation"),
    [
        pytest.param(LAMB, "read", id="LAMB weighs parameters", marks=pytest.mark.slow),
        pytest.param(MATRIX_JOBS["Muon, bf16"], "write", id="another rank waits for its parts"),
    ],
)
def test_a_drive_that_fails_ends_every_rank(job: Job, operation: str, ranks: RankPool, tmp_path: Path) -> None:
    rank0, rank1 = ranks.run(message_of_a_failing_drive, job, operation, tmp_path)
    assert "/drive/data" in rank1, rank1
    assert rank0.startswith("RankError: rank 1 "), rank0
