"""Frozen weights of a run that trains stay in the model's own files: none is written, every read is compared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from typer.testing import CliRunner

import offload
from offload import testing
from offload.aio import IoQueue, Priority, aligned_empty
from offload.cli.main import app
from offload.errors import BudgetError, EngineFailed, IoError, OffloadError, StoreError
from offload.fileio.cache_file import Stamp
from offload.layout.memory_plan import unit_sizes
from offload.planner.memory import Room, settle
from offload.planner.predict_run import step_of
from offload.sizes import PAGE
from offload.states import State
from offload.swapper.store.inspection import look
from offload.swapper.store.model_files import FileRange, ModelFiles, arrange_in_place
from tests.support.drives.fault_injection import flip_bit
from tests.support.model_folders import llama_config
from tests.support.oracle import small_pieces
from tests.support.ranks.rank_pool import RankPool

STEPS = 3


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several files, of which some units need two or more, in bf16."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    model = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=False)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="16KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "model"))


def start(
    folder: Path,
    swap: Path,
    *,
    dtype: str = "bf16",
    tier: str = "nvme",
    targets: str | list[str] = "all-linear",
    **block: Any,
) -> offload.Engine:
    """Returns an engine that trains adapters over the model of a folder."""
    model, config = job(folder, swap, dtype=dtype, tier=tier, targets=targets, **block)
    return offload.initialize(model=model, config=config)[0]


def job(
    folder: Path,
    swap: Path,
    *,
    dtype: str = "bf16",
    tier: str = "nvme",
    targets: str | list[str] = "all-linear",
    **block: Any,
) -> tuple[Any, dict[str, Any]]:
    """Returns the model of a folder with adapters, and a config."""
    model: Any = offload.load_pretrained(transformers.AutoModelForCausalLM, folder, dtype=dtype_of(dtype))
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    disk = {"device": tier, **({"nvme_path": str(swap)} if tier == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
        "offload": {"device": "cpu", **block},
    }
    return model, config


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "bf16" else torch.float32


def step(engine: offload.Engine, number: int) -> torch.Tensor:
    ids = torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(number))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def weights(engine: offload.Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def result(engine: offload.Engine, first: int = 0) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    losses = [step(engine, number) for number in range(first, STEPS)]
    return losses, weights(engine)


def assert_equal(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def in_files(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Returns the units of a run that are in the model's own files, as its manifest describes them."""
    manifest = look(run / f"rank{rank}").manifest
    assert manifest is not None
    return [unit for unit in manifest.spec.fingerprint["units"] if unit.get("in_files")]


def test_frozen_weights_in_files_give_the_bits_of_swap_files_and_of_memory(folder: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    engine = start(folder, tmp_path / "swap")
    assert any("nothing of them is written" in line for line in engine.notices)
    from_files = result(engine)
    frozen = [name for name, each in engine.module.named_parameters() if not each.requires_grad]
    manifest = look(tmp_path / "swap" / "default" / "rank0").manifest
    assert manifest is not None and sum(manifest.spec.frozen) == 0
    named = [entry["name"] for unit in in_files(tmp_path / "swap" / "default") for entry in unit["parameters"]]
    assert sorted(named) == sorted(frozen)
    engine.destroy()
    for block in ({"frozen_files": False, "run": "copied"}, {"tier": "cpu"}):
        engine = start(folder, tmp_path / "swap", **block)
        assert not any("nothing of them is written" in line for line in engine.notices)
        assert_equal(from_files, result(engine))
        engine.destroy()
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize("resumed", [False, True])
def test_a_read_of_frozen_weights_moves_its_bytes_once(resumed: bool, tmp_path: Path) -> None:
    """It is compared by the checksums of its pages, or, in a run that resumes, by one of all its bytes."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(5 * PAGE))
    layout = arrange_in_place([(FileRange(str(path), 100, 3 * PAGE), 0)], {str(path): 5 * PAGE})
    with (
        IoQueue() as queue,
        contextlib.closing(ModelFiles([layout], {str(path): Stamp.of(os.stat(path))}, queue)) as files,
    ):
        files.scan()
        if resumed:
            files.expect(files.described(), tmp_path)
        before, buffer = queue.read_bytes, aligned_empty(layout.nbytes)
        assert files.start_read(0, 0, buffer, Priority.NORMAL).wait() == layout.nbytes
        assert bytes(buffer) == path.read_bytes()[: layout.nbytes]
        assert queue.read_bytes - before == layout.nbytes


def test_units_in_files_come_in_chunks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk begins and ends within a page of a file, and is compared too."""
    engine = start(folder, tmp_path / "whole")
    from_files = result(engine)
    engine.destroy()
    small_pieces(monkeypatch)
    engine = start(folder, tmp_path / "least", host_memory=least(folder, tmp_path / "least", "host_memory"))
    assert_equal(from_files, result(engine))
    engine.destroy()


def least(folder: Path, swap: Path, budget: str, **options: Any) -> int:
    """Returns the least bytes of a budget that a start accepts, as its error names them."""
    options[budget] = 1
    with pytest.raises(BudgetError, match="the least that works") as refused:
        start(folder, swap, **options)
    named = re.search(r"the least that works is [^(]*\((\d+) bytes\)", str(refused.value))
    assert named is not None
    return int(named[1])


def write_mixture(folder: Path) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    stacks = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **stacks)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def test_a_plan_counts_weights_in_files_as_the_run_does(tmp_path: Path) -> None:
    """The same units, in the same tiers; the plan does not know where in a page of the files a tensor begins."""
    write_mixture(tmp_path / "model")
    options: dict[str, Any] = {"dtype": "fp32", "targets": ["q_proj", "v_proj"], "durability": "step"}
    model, config = job(tmp_path / "model", tmp_path / "swap", **options)
    shape = step_of(model, config, 8, {}).shape
    planned = settle(shape.in_files().layouts, config, Room(1 << 40, 0, None))
    engine = offload.initialize(model=model, config=config)[0]
    inspected = testing.inspect(engine)
    described = [
        [(layout.name, layout.numel, layout.in_files) for layout in layouts]
        for layouts in (planned.request.layouts, inspected.layouts)
    ]
    assert described[0] == described[1] and any(in_files for _, _, in_files in described[0])
    assert planned.stored == (tmp_path / "swap" / "default" / "rank0" / "states").stat().st_size
    shares = [(layout.trainable(0, 1), layout.frozen(0, 1)) for layout in planned.request.layouts]
    sizes = unit_sizes(
        planned.request.layouts, planned.placement, shares, planned.mode, planned.request.in_place_layouts
    )
    for ours, real in zip(sizes, inspected.sizes, strict=True):
        assert (ours.name, ours.tier, ours.nbytes) == (real.name, real.tier, real.nbytes)
        assert abs(ours.shard_nbytes - real.shard_nbytes) <= PAGE * len(real.pieces)
    engine.destroy()


def test_groups_of_experts_stay_in_files(tmp_path: Path) -> None:
    """The tensors of an expert are apart in the files, and the router's loss is that of the model."""
    write_mixture(tmp_path / "model")
    results = []
    for block in ({"run": "files"}, {"run": "copied", "frozen_files": False}, {"tier": "cpu"}):
        engine = start(tmp_path / "model", tmp_path / "swap", dtype="fp32", targets=["q_proj", "v_proj"], **block)
        results.append(result(engine))
        engine.destroy()
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    units = [unit["name"] for unit in in_files(tmp_path / "swap" / "files")]
    assert len([name for name in units if "experts[" in name]) == 16


def test_adapters_leave_room_for_a_recomputed_group_in_every_step(tmp_path: Path) -> None:
    """The least device memory holds a layer's weights in files, its adapters and a group, after any history."""
    write_mixture(tmp_path / "model")
    options: dict[str, Any] = {"dtype": "fp32", "targets": ["q_proj", "v_proj"], "activations": "cpu"}
    device_memory = least(tmp_path / "model", tmp_path / "swap", "device_memory", **options, experts="grouped")
    results = []
    for block in ({"device_memory": device_memory}, {"tier": "cpu"}):
        engine = start(tmp_path / "model", tmp_path / "swap", **options, experts="grouped", **block)
        results.append(result(engine))
        engine.destroy(remove=True)
    assert_equal(results[0], results[1])


def test_weights_of_another_dtype_are_copied_and_the_first_line_says_so(folder: Path, tmp_path: Path) -> None:
    engine = start(folder, tmp_path / "swap", dtype="fp32")
    assert any("are copied to the swap files: " in line and "is stored as bfloat16" in line for line in engine.notices)
    assert not in_files(tmp_path / "swap" / "default")
    engine.destroy(remove=True)


def test_a_resumed_run_goes_on_as_an_unbroken_one_from_a_folder_that_has_moved(folder: Path, tmp_path: Path) -> None:
    engine = start(folder, tmp_path / "whole")
    unbroken = result(engine)
    engine.destroy(remove=True)
    engine = start(folder, tmp_path / "swap", durability="step")
    step(engine, 0)
    engine.destroy()
    moved = folder.rename(tmp_path / "elsewhere")
    engine = start(moved, tmp_path / "swap", durability="step", resume="must")
    losses, weights = result(engine, 1)
    assert_equal((unbroken[0][1:], unbroken[1]), (losses, weights))
    engine.destroy()
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "swap" / "default"), "--json"])
    files = json.loads(shown.output)["model_files"]
    assert files and all(Path(path).parent == moved for path in files)


def test_a_run_keeps_the_place_of_its_frozen_weights(folder: Path, tmp_path: Path) -> None:
    """A run of an earlier version, whose frozen weights are in its swap files, resumes there."""
    engine = start(folder, tmp_path, frozen_files=False, durability="step")
    step(engine, 0)
    engine.destroy()
    start(folder, tmp_path, resume="must").destroy()
    assert not in_files(tmp_path / "default")
    engine = start(folder, tmp_path, run="files", durability="step")
    step(engine, 0)
    engine.destroy()
    for block in ({"frozen_files": False}, {"tier": "cpu", "nvme_path": str(tmp_path)}):
        with pytest.raises(StoreError, match="reads frozen weights from the model's own files"):
            start(folder, tmp_path, run="files", resume="must", durability="step", **block)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def same_size(path: Path) -> None:
    flip_bit(path, path.stat().st_size - 100)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cut_short, "safetensors"),
        (lambda path: path.unlink(), "is missing"),
        (same_size, "other bytes of the same size"),
    ],
)
def test_changed_files_stop_a_resume(change: Callable[[Path], None], reason: str, folder: Path, tmp_path: Path) -> None:
    engine = start(folder, tmp_path, durability="step")
    step(engine, 0)
    engine.destroy()
    last = sorted(folder.glob("*.safetensors"))[-1]
    change(last)
    with pytest.raises((OffloadError, IoError), match=reason):
        start(folder, tmp_path, durability="step", resume="must")
    for words in ([], ["--repair"], ["--repair", "--model", str(folder)]):
        verified = CliRunner().invoke(app, ["verify", str(tmp_path / "default"), "--json", *words])
        assert verified.exit_code == 1 and str(last.name) in verified.output
        cure = "no command mends the model's own files" + ", --model neither" * ("--model" in words)
        assert f"{cure}: put them back" in verified.output
    assert CliRunner().invoke(app, ["rm", str(tmp_path / "default"), "--yes"]).exit_code == 0
    assert list(folder.iterdir())


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (slice(0), "reads base_model.* from {folder}.*, and here it is in memory already: give the model with which"),
        (slice(None), "reads frozen weights from {folder}/model-00001.*, which is missing: put the file back, or give"),
        (slice(-1, None), "reads frozen weights from {folder}/model-00005.*, which is missing: put the file back, or"),
    ],
)
def test_a_resume_without_the_models_files_names_what_is_missing(
    missing: slice, reason: str, folder: Path, tmp_path: Path
) -> None:
    """The other units are no other model."""
    engine = start(folder, tmp_path, durability="step")
    step(engine, 0)
    engine.destroy()
    _, config = job(folder, tmp_path, durability="step", resume="must")
    if lost := sorted(folder.glob("*.safetensors"))[missing]:
        for path in lost:
            path.unlink()
        with offload.init(config):
            model: Any = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(StoreError, match=f"the run default {reason.format(folder=folder)}"):
        offload.initialize(model=model, config=config)


def damage_frozen(run: Path) -> int:
    """Flips a bit of the frozen weights of each unit; returns their number."""
    files = look(run / "rank0")
    assert files.manifest is not None
    spec, slots, count = files.manifest.spec, files.commits[0].record.slots, 0
    for unit, row in enumerate(spec.places()):
        if spec.frozen[unit]:
            place = row[State.WEIGHT][slots[unit]]
            flip_bit(run / "rank0" / "states", place.offset(place.nbytes - spec.frozen[unit] + 70))
            count += 1
    return count


@pytest.mark.parametrize("block", [{"dtype": "fp32"}, {"frozen_files": False}, {"frozen": "nf4"}], ids=str)
def test_damaged_copies_of_frozen_weights_are_mended_from_the_models_files(
    block: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """As they are, cast, or coded again; by `offload verify`, which is told the folder, and by a start."""
    engine = start(folder, tmp_path / "whole", **block)
    unbroken = result(engine)
    engine.destroy(remove=True)
    engine = start(folder, tmp_path / "swap", durability="step", **block)
    step(engine, 0)
    engine.destroy()
    run = tmp_path / "swap" / "default"
    count = damage_frozen(run)
    assert count > 1
    asked = CliRunner().invoke(app, ["verify", str(run), "--repair"])
    assert asked.exit_code == 1 and "give it by --model FOLDER" in asked.stdout, "nobody knows the folder"
    folder_of_another = tmp_path / "other"
    transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=False)).to(torch.bfloat16).save_pretrained(
        folder_of_another
    )
    asked = CliRunner().invoke(app, ["verify", str(run), "--repair", "--model", str(folder_of_another), "--json"])
    report = json.loads(asked.stdout)
    assert asked.exit_code == 1 and f"{folder_of_another} does not have the damaged frozen weights" in report["next"][0]
    assert not any("--" in line for line in report["next"]), "which has been done"
    count -= report["mended"]  # norms that no training has changed
    mended = CliRunner().invoke(app, ["verify", str(run), "--repair", "--model", str(folder), "--json"])
    report = json.loads(mended.stdout)
    assert mended.exit_code == 3 and report["mended"] == count
    assert {damage["mended"] for damage in report["ranks"][0]["damages"]} == {"the model's files"}
    damage_frozen(run)
    engine = start(folder, tmp_path / "swap", durability="step", resume="must", **block)
    losses, weights = result(engine, 1)
    assert_equal((unbroken[0][1:], unbroken[1]), (losses, weights))
    engine.destroy()


def test_bytes_that_no_sample_has_seen_stop_the_first_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing.replace(monkeypatch, "size.file_sample", 8)
    engine = start(folder, tmp_path, durability="step")
    step(engine, 0)
    engine.destroy()
    same_size(sorted(folder.glob("*.safetensors"))[-1])
    engine = start(folder, tmp_path, durability="step", resume="must")
    with pytest.raises(IoError, match="use as frozen weights"):
        step(engine, 1)
    with pytest.raises(EngineFailed):
        engine.step()
    engine.destroy()


def test_a_file_with_other_places_of_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    engine = start(folder, tmp_path, durability="step")
    step(engine, 0)
    engine.destroy()
    other_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    shutil.rmtree(folder)
    other_model.save_pretrained(folder)
    with pytest.raises(StoreError, match="put the file with which the run began back"):
        start(folder, tmp_path, durability="step", resume="must")


def test_a_checkpoint_has_the_frozen_weights_and_loads_only_over_the_same(folder: Path, tmp_path: Path) -> None:
    engine = start(folder, tmp_path / "swap")
    step(engine, 0)
    engine.save_checkpoint(tmp_path / "saved")
    expected = weights(engine)
    step(engine, 1)
    engine.load_checkpoint(tmp_path / "saved")
    assert_equal(expected, weights(engine))
    engine.destroy()
    engine = start(folder, tmp_path / "swap", run="copied", frozen_files=False)
    engine.load_checkpoint(tmp_path / "saved")
    assert_equal(expected, weights(engine))
    engine.destroy()
    torch.manual_seed(5)
    folder_of_another = tmp_path / "other"
    transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=False)).to(torch.bfloat16).save_pretrained(
        folder_of_another
    )
    engine = start(folder_of_another, tmp_path / "swap", run="other")
    before = weights(engine)
    with pytest.raises(StoreError, match="other frozen weights than the model's own files"):
        engine.load_checkpoint(tmp_path / "saved")
    assert_equal(before, weights(engine))
    engine.destroy()


def test_an_export_of_adapters_is_loaded_by_peft(folder: Path, tmp_path: Path) -> None:
    """The base model's weights, which the run reads from its files, are not exported."""
    engine = start(folder, tmp_path / "swap", durability="step")
    step(engine, 0)
    engine.save_pretrained(tmp_path / "direct")
    engine.destroy()
    done = CliRunner().invoke(app, ["export", str(tmp_path / "swap" / "default"), str(tmp_path / "exported")])
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert f"an adapter of peft; its base model is {folder}, whose" in words and "from_pretrained" not in words
    direct, exported = (
        safetensors.torch.load_file(tmp_path / each / "adapter_model.safetensors") for each in ("direct", "exported")
    )
    assert_equal(direct, exported)
    configs = [json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("direct", "exported")]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] | {"auto_mapping": None} == configs[1] | {"auto_mapping": None}
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "exported")
    adapters = {name: value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert adapters and all(
        torch.equal(value, direct[name.replace(".default.", ".")]) for name, value in adapters.items()
    )


@pytest.mark.parametrize("block", [{}, {"frozen_files": False}, {"tier": "cpu"}], ids=str)
def test_an_adapter_carries_what_tells_its_base_model_from_another(
    block: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Whether weights are read from the files, copied or in memory; where the adapter goes."""
    swap, out, last = tmp_path / "swap", tmp_path / "out", sorted(folder.glob("*.safetensors"))[-1]
    options = {**block, **({} if "tier" in block else {"durability": "step"})}
    engine = start(folder, swap, **options)
    step(engine, 0)
    engine.save_pretrained(tmp_path / "saved")
    engine.destroy()
    adapters = [tmp_path / "saved"]
    out.mkdir()

    def call(*words: object) -> Any:
        return CliRunner().invoke(app, [*map(str, words)])

    if "tier" not in block:
        adapters.append(tmp_path / "exported")
        assert last.name not in call("export", swap / "default", adapters[-1]).output
    intact = last.read_bytes()
    for change, reason in (
        (Path.unlink, "is missing"),
        (cut_short, f"has {len(intact) - 1} bytes, expected {len(intact)}"),
        (same_size, "has other bytes of the same size"),
    ):
        change(last)
        for adapter in adapters:
            refused = call("merge", adapter, out / "none")
            assert refused.exit_code == 2 and f"{last} {reason}: the base model is not" in refused.output
        last.write_bytes(intact)
    for adapter in adapters:
        assert call("merge", adapter, out / adapter.name).exit_code == 0
    same_size(last)
    if "tier" not in block:
        assert f"{last} {reason}: the base model" in call("export", swap / "default", tmp_path / "again").output
        assert call("merge", tmp_path / "again", out / "again").exit_code == 2
    if "frozen_files" in block:
        # The copies are of the files with which the run began.
        engine = start(folder, swap, **options, resume="must")
        engine.save_pretrained(tmp_path / "resumed")
        engine.destroy()
        assert call("merge", tmp_path / "resumed", out / "resumed").exit_code == 2
    merged = call("merge", adapters[0], out / "given", "--base", folder)
    assert merged.exit_code == 0 and f"{last} {reason}: the base model is not" in merged.output


@pytest.mark.parametrize("place", ["moved", "hub"])
def test_an_exported_adapter_names_the_folder_of_its_base_model(place: str, folder: Path, tmp_path: Path) -> None:
    """That of the last start, and in the hub's cache the folder of the links, in which the config is."""
    if place == "hub":
        blobs = folder.rename(tmp_path / "blobs")
        folder.mkdir()
        for number, path in enumerate(list(blobs.iterdir())):
            (folder / path.name).symlink_to(path.rename(blobs / str(number)))
    engine = start(folder, tmp_path / "swap", durability="step")
    step(engine, 0)
    engine.destroy()
    if place == "moved":
        folder = folder.rename(tmp_path / "elsewhere")
        start(folder, tmp_path / "swap", durability="step", resume="must").destroy()
    done = CliRunner().invoke(app, ["export", str(tmp_path / "swap" / "default"), str(tmp_path / "exported")])
    assert done.exit_code == 0, done.output
    assert "a later one may be lost" not in done.output
    config = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    merged = CliRunner().invoke(app, ["merge", str(tmp_path / "exported"), str(tmp_path / "merged")])
    assert merged.exit_code == 0, merged.output
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "swap" / "default")]).exit_code == 0


def test_an_export_of_adapters_over_a_model_without_a_folder_is_no_model_of_transformers(tmp_path: Path) -> None:
    """All weights are there, under the names of peft's model, and load as the message says."""

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return peft.get_peft_model(
            transformers.LlamaForCausalLM(llama_config()), peft.LoraConfig(r=4, target_modules=["q_proj"])
        )

    disk = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
        "offload": {"device": "cpu", "durability": "step"},
    }
    engine = offload.initialize(model=made(0), config=config)[0]
    step(engine, 0)
    expected = weights(engine)
    engine.destroy()
    out = tmp_path / "exported"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "swap" / "default"), str(out)])
    assert done.exit_code == 0 and "under the names of peft's model, and no config" in done.output
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    model = made(1)
    missing = model.load_state_dict(safetensors.torch.load_file(out / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys
    assert_equal(expected, model.state_dict())


def test_a_run_in_part_frozen_is_exported_converted_and_verified(folder: Path, tmp_path: Path) -> None:
    model: Any = offload.load_pretrained(transformers.AutoModelForCausalLM, folder, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)
    disk = {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
        "offload": {"device": "cpu", "durability": "step"},
    }
    engine = offload.initialize(model=model, config=config)[0]
    step(engine, 0)
    engine.save_pretrained(tmp_path / "direct")
    engine.destroy()
    run = tmp_path / "swap" / "default"
    commands = (
        ["verify", str(run)],
        ["export", str(run), str(tmp_path / "exported")],
        ["convert", str(run), "--moments", "int8"],
        ["verify", f"{run}-int8"],
        ["export", f"{run}-int8", str(tmp_path / "converted")],
    )
    for command in commands:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (command, done.output)
    assert len(in_files(Path(f"{run}-int8"))) == len(in_files(run)) > 0
    for out in ("exported", "converted"):
        direct, exported = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.bfloat16).state_dict()
            for each in ("direct", out)
        )
        assert_equal(direct, exported)


# -- ranks -----------------------------------------------------------------------------------------------------


def _as_one_of_two(
    model: Path, swap: Path, first: int, last: int, frozen_files: bool = True
) -> tuple[list[Any], Any, int]:
    """Some steps of a rank whose batch is that of the other: losses, weights, and bytes written."""
    adapted, config = job(model, swap, resume="auto", durability="step", frozen_files=frozen_files)
    config["gradient_clipping"] = 0  # ranks add squares in another order
    engine = offload.initialize(model=adapted, config=config)[0]
    assert engine.global_steps == first
    queue = testing.inspect(engine).queue
    assert queue is not None
    losses = [step(engine, number) for number in range(first, last)]
    engine.synchronize()
    values, written = weights(engine), queue.written_bytes
    engine.save_checkpoint(swap / "saved")
    engine.destroy()
    return losses, values, written


def test_each_of_two_ranks_reads_its_part_and_writes_none(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """Of equal batches the mean gradient has the bits of one rank's."""
    alone = _as_one_of_two(folder, tmp_path / "alone", 0, STEPS)
    copied = ranks.run(_as_one_of_two, folder, tmp_path / "copied", 0, 1, False)
    begun = ranks.run(_as_one_of_two, folder, tmp_path / "swap", 0, 1)
    results = ranks.run(_as_one_of_two, folder, tmp_path / "swap", 1, STEPS)
    for rank, (losses, values, _) in enumerate(results):
        assert_equal((begun[rank][0] + losses, values), alone[:2])
        assert_equal(begun[rank][:2], copied[rank][:2])
        manifests = [look(tmp_path / name / "default" / f"rank{rank}").manifest for name in ("swap", "copied")]
        frozen = [sum(manifest.spec.frozen) for manifest in manifests if manifest is not None]
        assert frozen[0] == 0 < frozen[1] <= copied[rank][2] - begun[rank][2]
    run = tmp_path / "swap" / "default"
    for command in (
        ["verify", str(run)],
        ["export", str(run), str(tmp_path / "out")],
        ["verify", str(tmp_path / "swap" / "saved")],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (command, done.output)


def test_a_run_resumes_on_another_number_of_ranks(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """From one to two and back, from a folder that moves meanwhile; no frozen weight is written."""
    alone = _as_one_of_two(folder, tmp_path / "alone", 0, STEPS)
    begun = _as_one_of_two(folder, tmp_path / "swap", 0, 1)
    moved = folder.rename(tmp_path / "elsewhere")
    for losses, _, _ in (on_two := ranks.run(_as_one_of_two, moved, tmp_path / "swap", 1, 2)):
        assert_equal(begun[0] + losses, alone[0][:2])
    run = tmp_path / "swap" / "default"
    for rank in range(2):
        assert in_files(run, rank)
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
    ended = _as_one_of_two(moved, tmp_path / "swap", 2, STEPS)
    assert_equal((begun[0] + on_two[0][0] + ended[0], ended[1]), alone[:2])
    manifest = look(run / "rank0").manifest
    assert manifest is not None and sum(manifest.spec.frozen) == 0
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0


def _with_small_samples(model: Path, swap: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "size.file_sample", 8)
        _as_one_of_two(model, swap, 0, 1)


def test_damaged_files_leave_the_run_to_its_number_of_ranks(
    ranks: RankPool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that no sample has seen are compared before the new ranks record their checksums."""
    ranks.run(_with_small_samples, folder, tmp_path / "swap")
    before = {path: path.read_bytes() for path in (tmp_path / "swap" / "default").rglob("manifest.json")}
    testing.replace(monkeypatch, "size.file_sample", 8)
    last = sorted(folder.glob("*.safetensors"))[-1]
    same_size(last)
    with pytest.raises(StoreError, match=f"{last.name}, which has other bytes now"):
        start(folder, tmp_path / "swap", resume="must", durability="step")
    assert len(before) == 2 and all(path.read_bytes() == data for path, data in before.items())


def _over_other_files(models: Path, swap: Path) -> list[str]:
    engine = start(models / os.environ["RANK"], swap)
    notices = list(engine.notices)
    engine.destroy(remove=True)
    return notices


def test_ranks_with_other_files_copy_those_of_the_first(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for rank in ("0", "1"):
        shutil.copytree(folder, tmp_path / "models" / rank)
    name = next((tmp_path / "models" / "1").glob("*.safetensors"))
    name.write_bytes(name.read_bytes()[:-1] + b"\0")
    for notices in ranks.run(_over_other_files, tmp_path / "models", tmp_path / "swap"):
        assert not any("nothing of them is written" in line for line in notices)
