"""Folders of torch.distributed.checkpoint (FSDP2's): training goes on from them here, and from ours there."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.engine.state import TrainingState
from offload.errors import StoreError
from tests.deepspeed.test_deepspeed_checkpoints import Code
from tests.model_files.fsdp_run import AFTER, BEFORE, Network, batch, changed, go_on, optimizer_of, save
from tests.support.ranks.rank_pool import RankPool


def start(folder: Path, grouped: bool = False) -> offload.Engine:
    """Returns an engine over other values than those of a checkpoint."""
    model = changed(Network())
    place = {"device": "nvme", "nvme_path": str(folder)}
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "offload": {"device": "cpu"},
    }
    optimizer = optimizer_of(model, grouped)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    return offload.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=content)[0]


def losses(engine: offload.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def run(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*map(str, arguments)])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sharded", "flat", "cut", "grouped"),
    [
        (True, False, 0, False),
        (True, True, 1, False),
        (False, False, 0, False),
        (True, True, 0, True),
        (False, False, 0, True),
    ],
)
def test_losses_go_on_as_torchs(
    sharded: bool, flat: bool, cut: int, grouped: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """Of FSDP2 on two ranks, by rows or columns, and of a plain model; from the folder and by `offload import`."""
    saved = tmp_path / "saved"
    theirs = (
        ranks.run(save, saved, sharded, flat, cut, grouped)[0] if sharded else save(saved, sharded, flat, 0, grouped)
    )
    result = run("import", saved, tmp_path / "imported")
    assert result.exit_code == 0, result.output
    for folder in (saved, tmp_path / "imported"):
        engine = start(tmp_path / "run", grouped)
        _, client_state = engine.load_checkpoint(folder)
        assert client_state == {"best": 0.25} and engine.global_steps == BEFORE
        assert losses(engine, range(BEFORE, BEFORE + AFTER)) == pytest.approx(theirs, abs=1e-5)
        engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sharded", "flat", "grouped"), [(True, False, True), (False, True, False), (False, True, True)]
)
def test_torch_goes_on_from_an_export(
    sharded: bool, flat: bool, grouped: bool, ranks: RankPool, tmp_path: Path
) -> None:
    engine = start(tmp_path / "run", grouped)
    losses(engine, range(BEFORE))
    engine.save_checkpoint(tmp_path / "saved", client_state={"best": 0.25})
    mine = losses(engine, range(BEFORE, BEFORE + AFTER))
    engine.destroy(remove=True)
    result = run("export", tmp_path / "saved", tmp_path / "out", "--format", "dcp")
    assert result.exit_code == 0, result.output
    arguments = tmp_path / "out", sharded, flat, grouped
    theirs = ranks.run(go_on, *arguments)[0] if sharded else go_on(*arguments)
    assert theirs == pytest.approx(mine, abs=1e-5)


# -- what does not fit changes nothing ----------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of a plain model."""
    folder = tmp_path_factory.mktemp("plain")
    save(folder, False, False)
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    engine = start(tmp_path_factory.mktemp("run"))
    yield engine
    engine.destroy(remove=True)


def about(folder: Path, change: Callable[[Any], None]) -> None:
    """Changes the metadata of a folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_code_in_the_metadata_is_not_executed(engine: offload.Engine, plain: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "saved"))
    about(folder, lambda metadata: setattr(metadata, "version", Code(tmp_path / "executed")))
    engine.load_checkpoint(folder)
    assert not (tmp_path / "executed").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "executed").exists(), "the code does something"


def spoil_length(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def spoil_byte(folder: Path) -> None:
    """Changes a weight."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "model.words.weight")
    file = folder / place.relative_path
    data = bytearray(file.read_bytes())
    data[place.offset + place.length // 2] ^= 4
    file.write_bytes(data)


def spoil_chunk(folder: Path) -> None:
    def repeat(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["model.words.weight"].chunks
        chunks.append(chunks[0])

    about(folder, repeat)


def spoil_path(folder: Path) -> None:
    def leave(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = f"../{place.relative_path}"

    about(folder, leave)


def spoil_form(folder: Path) -> None:
    def compress(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["zstd"]

    about(folder, compress)


def spoil_names(folder: Path) -> None:
    def rename(metadata: Any) -> None:
        metadata.planner_data["model.words.weight"] = ("elsewhere", "words.weight")

    about(folder, rename)


def spoil_pickle(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"no pickle")


def spoil_content(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps([1, 2]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_length, "is not a complete file of torch.save"),
        (spoil_byte, "does not match its checksum"),
        (spoil_chunk, "lacks elements of model.words.weight"),
        (spoil_path, "which is not in it"),
        (spoil_form, r"is compressed \(zstd\)"),
        (spoil_names, "can be the model of its optimizer"),
        (spoil_pickle, "is not a complete file of torch.save or torch.distributed.checkpoint"),
        (spoil_content, "does not have the contents of a checkpoint of torch.distributed.checkpoint"),
    ],
)
def test_what_is_damaged_or_not_supported_changes_nothing(
    spoil: Callable[[Path], None], message: str, engine: offload.Engine, plain: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "saved"))
    spoil(folder)
    before = offload.safe_get_full_fp32_param(engine.module.scale).clone()
    with pytest.raises(StoreError, match=message):
        engine.load_checkpoint(folder)
    assert (
        run("import", folder, tmp_path / "imported").exit_code == 2 and not (tmp_path / "imported" / "saved").exists()
    )
    assert torch.equal(offload.safe_get_full_fp32_param(engine.module.scale), before)


def test_weights_alone(engine: offload.Engine, plain: Path, tmp_path: Path) -> None:
    """A folder of a model without its optimizer."""
    import torch.distributed.checkpoint as dcp

    from tests.model_files.fsdp_run import quiet

    model = Network()
    with quiet():
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved")
    with pytest.raises(StoreError, match=r"contains no optimizer states.* exp_avg.*load_module_only=True"):
        engine.load_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
    assert torch.equal(offload.safe_get_full_fp32_param(engine.module.words.weight), model.words.weight)
    assert torch.equal(engine.module.norm.running_var, model.norm.running_var)


def test_groups_go_through_an_import_to_torch_again(tmp_path: Path) -> None:
    theirs = save(tmp_path / "saved", False, False, grouped=True)
    assert run("import", tmp_path / "saved", tmp_path / "imported").exit_code == 0
    result = run("export", tmp_path / "imported", tmp_path / "out", "--format", "dcp")
    assert result.exit_code == 0, result.output
    assert go_on(tmp_path / "out", False, False, True) == pytest.approx(theirs, abs=1e-6)


def test_groups_whose_parameters_are_not_named_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkpoint of an older version."""
    monkeypatch.setattr(TrainingState, "_members", lambda _: {})
    engine = start(tmp_path / "run", grouped=True)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy(remove=True)
    result = run("export", tmp_path / "saved", tmp_path / "out", "--format", "dcp")
    assert result.exit_code == 2 and "the optimizer has 2 groups of parameters" in result.output
    assert not (tmp_path / "out").exists()
