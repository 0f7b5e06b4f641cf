"""A load that keeps a part of a unit does not make damaged bytes of that part valid."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.errors import IoError
from offload.states import State
from offload.swapper.store.format import read_manifest, read_records
from tests.support.drives.fault_injection import flip_bit


class Pair(nn.Module):
    def __init__(self, both: bool, frozen: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1, 1, 6000))
        if both:
            self.b = nn.Parameter(torch.linspace(1, 2, 6000))
        self.both = both
        if frozen:
            self.frozen = nn.Parameter(torch.linspace(2, 3, 6000), requires_grad=False)

    def forward(self, factor: float) -> torch.Tensor:
        return factor * (self.a.square().sum() + (self.b.square().sum() if self.both else 0))


class Parts(nn.ModuleDict):
    """Modules that are a unit each."""

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([part(factor) for part in self.values()]).sum()


def begin(folder: Path, both: bool, frozen: bool, model: nn.Module | None = None) -> offload.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "offload": {"nvme_path": str(folder), "device": "cpu", "resume": "auto", "units": ["Pair"]},
    }
    # A copy: the model of a destroyed engine has no weights.
    return offload.initialize(model=copy.deepcopy(model) or Pair(both, frozen), config=config).engine


def step(engine: offload.Engine) -> None:
    engine.backward(engine(1e-3))
    engine.step()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("state", "frozen", "element"),
    [(State.WEIGHT, False, 9000), (State.EXP_AVG_SQ, False, 9000), (State.WEIGHT, True, 17000)],
)
@pytest.mark.parametrize("damaged", [True, False])
def test_damage_in_what_stays_is_an_error(
    state: State, frozen: bool, element: int, damaged: bool, tmp_path: Path
) -> None:
    saver = begin(tmp_path / "other", both=False, frozen=False)
    step(saver)
    saver.save_checkpoint(tmp_path / "saved")
    saver.destroy(remove=True)
    run = tmp_path / "run"
    engine = begin(run, True, frozen)
    for _ in range(2):
        step(engine)
    engine.destroy()
    rank = run / "default" / "rank0"
    record = read_records(rank / "commit").valid[0]
    place = read_manifest(rank / "manifest.json").spec.places()[0][state][record.slots[0]]
    if damaged:
        flip_bit(rank / "states", place.offset(4 * element))
    engine = begin(run, True, frozen)
    if damaged:
        with pytest.raises(IoError, match="checksum") as caught:
            engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        # While the caller still holds the exception, and with its frames the loader.
        assert caught.value is not None
        open_files = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
        assert not any(name.startswith(str(tmp_path / "saved")) for name in open_files)
        engine.destroy()
        assert read_records(rank / "commit").valid[0] == record
        assert CliRunner().invoke(app, ["verify", str(run / "default")]).exit_code == 1
    else:
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        step(engine)
        engine.destroy()
        assert CliRunner().invoke(app, ["verify", str(run / "default")]).exit_code == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("damaged", [True, False])
def test_damage_in_a_unit_that_stays_as_a_whole_is_an_error(damaged: bool, tmp_path: Path) -> None:
    """The head is a unit of its own, which the checkpoint does not contain."""
    body = {"layer": Pair(both=False, frozen=False)}
    saver = begin(tmp_path / "other", both=False, frozen=False, model=Parts(body))
    step(saver)
    saver.save_checkpoint(tmp_path / "saved")
    saver.destroy(remove=True)
    run, parts = tmp_path / "run", {**body, "head": Pair(both=False, frozen=False)}
    engine = begin(run, False, False, model=Parts(parts))
    for _ in range(2):
        step(engine)
    engine.destroy()
    rank = run / "default" / "rank0"
    record = read_records(rank / "commit").valid[0]
    place = read_manifest(rank / "manifest.json").spec.places()[1][State.EXP_AVG][record.slots[1]]
    if damaged:
        flip_bit(rank / "states", place.offset(4 * 5990))
    engine = begin(run, False, False, model=Parts(parts))
    if damaged:
        with pytest.raises(IoError, match="checksum"):
            engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        engine.destroy()
        assert read_records(rank / "commit").valid[0] == record
    else:
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        step(engine)
        engine.destroy()
    assert CliRunner().invoke(app, ["verify", str(run / "default")]).exit_code == int(damaged)
