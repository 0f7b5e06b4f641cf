"""Every placement, budget and order of I/O has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload import testing
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import Job, assert_same, room_for, run, same_bits
from tests.support.sampling import drawn


def image_loss(model: torch.nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    images = torch.randn(2, 3, 32, 32, generator=generator).to(next(model_of(model).parameters()).dtype)
    return model(pixel_values=images, labels=torch.tensor([step % 4, micro % 4])).loss


def model_of(model: torch.nn.Module) -> torch.nn.Module:
    return getattr(model, "module", model)


JOBS = {
    "gpt2": models.GPT2,
    "gpt2-dropout": models.DROPOUT._replace(accumulation=2),
    "mixture": models.MIXTURE,
    "llama": Job(models.llama, models.language_loss),
    "mixtral": Job(models.mixtral, models.language_loss),
    "t5": Job(models.t5, models.translation_loss),
    "swin": Job(models.swin, image_loss),
    "resnet": Job(models.resnet, image_loss, buffers="same"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in JOBS for dtype in ("fp32", "bf16")])
def test_same_bits_everywhere(name: str, dtype: str, tmp_path: Path) -> None:
    job = JOBS[name]._replace(dtype=dtype)
    same_bits(job, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5", "mixture"])
def test_same_bits_with_room_for_two_units(name: str, dtype: str, tmp_path: Path) -> None:
    """The smallest device budget that can work, and the smallest host budget: units come and go all the time."""
    job = JOBS[name]._replace(dtype=dtype)
    ample = run(job, ("none", "none"), tmp_path / "memory")
    tight = run(job, ("nvme", "nvme"), tmp_path / "disk", device_memory=room_for(job, 2))
    assert_same(ample, tight, "in memory and with room for two units")


def test_durability_changes_nothing(tmp_path: Path) -> None:
    """In place or in the other slot, written through from RAM or not at all."""
    job = models.GPT2._replace(dtype="bf16")
    first = run(job, ("nvme", "nvme"), tmp_path / "a")
    for placement in drawn([("nvme", "nvme"), ("cpu", "nvme"), ("nvme", "cpu")], 1):
        assert_same(first, run(job, placement, tmp_path / "b", durability="none"), f"{placement} in place")
    for placement in drawn([("cpu", "cpu"), ("none", "none")], 1):
        assert_same(first, run(job, placement, tmp_path / "c", durability="step"), f"{placement} written through")


class Words(torch.nn.Module):
    """A tied embedding of 67 MB of moments, which a step uses first and completes last, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1 << 16, 128)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden @ self.embedding.weight[:64].T


def word_loss(model: torch.nn.Module, step: int, micro: int) -> torch.Tensor:
    words = torch.randint(64, (4,), generator=torch.Generator().manual_seed(100 * step + micro))
    return torch.nn.functional.cross_entropy(model(words), words)


def test_the_first_units_states_stay_in_memory_by_default(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The start says so, and no bit changes, with commits or without."""
    job = Job(Words, word_loss, steps=2)
    memory = run(job, ("none", "none"), tmp_path / "memory")
    for durability in ("none", "step"):
        capfd.readouterr()
        assert_same(memory, run(job, ("nvme", "nvme"), tmp_path / durability, durability=durability))
        assert "states on host and disk" in capfd.readouterr().err


def test_overlap_changes_nothing(tmp_path: Path) -> None:
    job = models.DROPOUT._replace(dtype="bf16")
    overlapped = run(job, ("nvme", "nvme"), tmp_path)
    one_by_one = run(job, ("nvme", "nvme"), tmp_path, debug={"poison": True, "overlap": False})
    assert_same(overlapped, one_by_one, "overlapped and one by one")


ORDER_JOBS = {"gpt2": models.GPT2, "mixture": models.MIXTURE, "dropout": models.DROPOUT._replace(accumulation=2)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ORDER_JOBS)
def test_late_io_changes_no_bit(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job: Job = ORDER_JOBS[name]._replace(dtype="bf16" if seed % 2 else "fp32")
    expected = run(job, ("none", "none"), tmp_path / "memory")
    use_queue(monkeypatch, lambda: LateQueue(seed, 0.01))
    result = run(job, ("nvme", "nvme"), tmp_path / "late", device_memory=room_for(job, 2))
    assert_same(expected, result, "in memory and with late I/O")


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [("cpu", "nvme"), ("nvme", "cpu"), ("cpu", "cpu"), ("none", "none")])
def test_late_writes_through(placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2._replace(dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "memory")
    use_queue(monkeypatch, lambda: LateQueue(1, 0.01))
    assert_same(expected, run(job, placement, tmp_path / "late", durability="step"), f"{placement}")


def test_tiles_that_split_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few pages, so that every unit takes many and every tensor is cut."""

    job = models.GPT2._replace(dtype="bf16")
    expected = run(job, ("none", "none"), tmp_path / "memory")
    testing.replace(monkeypatch, "size.update_tile", range(3 * 2048 * 12, 3 * 2048 * 12 + 1))
    use_queue(monkeypatch, lambda: LateQueue(2, 0.002))
    assert_same(expected, run(job, ("nvme", "nvme"), tmp_path / "tiles"), "whole and in tiles")
