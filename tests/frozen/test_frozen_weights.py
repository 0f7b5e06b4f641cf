"""Frozen weights are stored once, read alone, and have adapters beside them."""

from __future__ import annotations

import errno
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import safetensors.torch
import torch
import transformers
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.errors import ConfigError, EngineFailed, IoError
from offload.finetune.model import Lora, adapt, parse_lora
from offload.states import State
from offload.swapper.store.inspection import look
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, flip_bit, use_queue
from tests.support.model_folders import llama_config
from tests.support.models import gpt2
from tests.support.oracle import (
    DTYPES,
    assert_same,
    assert_same_tensors,
    least_host_memory,
    room_for,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
    weights_of,
)
from tests.support.pretrained_models import CAUSAL, FAMILIES, engine_of, written
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_jobs import language_rows_loss
from tests.support.ranks.rank_pool import RankPool

DISK = ("nvme", "nvme")
JOB = models.LORA._replace(dtype="bf16")
OTHER = JOB._replace(seed=5)
"""With other frozen weights."""
BYTES = {"bf16": 12, "fp16": 14, "fp32": 12}
"""Of a trainable element, in one slot."""


def frozen_bytes(rank: Path) -> dict[str, str]:
    """What lies on disk of the frozen part of each unit, as a hash."""
    manifest = look(rank).manifest
    assert manifest is not None
    digests = {}
    with (rank / "states").open("rb") as file:
        for unit, row in zip(manifest.spec.fingerprint["units"], manifest.spec.places(), strict=True):
            (shared,) = {place.extents[-1] for place in row[State.WEIGHT]}  # both slots name it
            file.seek(shared.offset)
            digests[unit["name"]] = hashlib.sha256(file.read(shared.nbytes)).hexdigest()
    return digests


def by_formula(engine: offload.Engine, slots: int, dtype: str) -> int:
    """Bytes of the swap files: slots of what trains, and once what does not."""
    trainable = sum(len(own) for own, _ in testing.inspect(engine).shares)
    frozen = sum(len(behind) for _, behind in testing.inspect(engine).shares)
    assert trainable and frozen > 4 * trainable
    return slots * BYTES[dtype] * trainable + DTYPES[dtype].itemsize * frozen


# -- room ---------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("durability", ["step", "none"])
@pytest.mark.parametrize("dtype", BYTES)
def test_the_room_is_two_slots_of_what_trains_and_one_of_what_does_not(
    dtype: str, durability: str, tmp_path: Path
) -> None:
    engine = start(JOB._replace(dtype=dtype), DISK, tmp_path, durability=durability)
    store = testing.inspect(engine).store
    assert store is not None
    assert store._files.states.size() == by_formula(engine, 2 if durability == "step" else 1, dtype)
    engine.destroy(remove=True)


def test_a_weight_that_has_no_other_state_has_two_slots_if_it_trains(tmp_path: Path) -> None:
    """SGD in fp32 keeps nothing beside the weights: an update must not write over what the last commit names."""
    job = JOB._replace(dtype="fp32", optimizer="SGD")
    engine = start(job, DISK, tmp_path)
    trainable = [len(own) for own, _ in testing.inspect(engine).shares]
    frozen = [len(behind) for _, behind in testing.inspect(engine).shares]
    assert (tmp_path / "default" / "rank0" / "states").stat().st_size == 8 * sum(trainable) + 4 * sum(frozen)
    store = testing.inspect(engine).store
    assert store is not None
    for unit, row in enumerate(store.spec.places()):
        own = 4 * trainable[unit]
        left, right = (place.extents_of(0, own) for place in row[State.WEIGHT])
        assert not own or left != right
    train_step(engine, job, 0)
    engine.destroy(remove=True)


# -- what is read -------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_the_same_bits_wherever_they_lie(optimizer: str, tmp_path: Path) -> None:
    job = JOB._replace(optimizer=optimizer, dtype="fp32", steps=2)
    unbroken = same_bits(job, tmp_path, durability="step", device_memory=1 << 20)
    assert_same(unbroken, run(job, DISK, tmp_path / "few", device_memory=room_for(job, 2)))
    assert_same(unbroken, run(job, DISK, tmp_path / "none", durability="none", device_memory=room_for(job, 2)))


def test_frozen_units_are_streamed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a unit may begin in what trains and end in what does not."""
    unbroken = run(JOB, DISK, tmp_path / "whole")
    small_pieces(monkeypatch)
    least = least_host_memory(JOB, tmp_path / "least")
    assert_same(unbroken, run(JOB, DISK, tmp_path / "least", host_memory=least, device_memory=room_for(JOB, 1)))


# -- damage -------------------------------------------------------------------------------------------


def flip_frozen(rank: Path, unit: int) -> None:
    manifest = look(rank).manifest
    assert manifest is not None
    extent = manifest.spec.places()[unit][State.WEIGHT][0].extents[-1]
    flip_bit(rank / "states", extent.offset + extent.nbytes // 2)


def test_damage_in_them_is_found_by_verify_and_by_who_reads_them(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path)
    for step in range(3):
        train_step(engine, JOB, step)
    unit = next(n for n, (own, behind) in enumerate(testing.inspect(engine).shares) if own and behind)
    title = testing.inspect(engine).layouts[unit].name
    engine.destroy()
    verify = ["verify", str(tmp_path / "default"), "--json"]
    assert CliRunner().invoke(app, verify).exit_code == 0
    flip_frozen(tmp_path / "default" / "rank0", unit)
    with pytest.raises((EngineFailed, IoError)) as caught:
        engine = start(JOB, DISK, tmp_path, resume="must", device_memory=room_for(JOB, 2))
        try:
            for step in range(3, 6):
                train_step(engine, JOB, step)
        finally:
            engine.destroy()
    error: Any = caught.value
    while not isinstance(error, IoError):
        error = error.__cause__
    assert error.errno == errno.EBADMSG and f"use weight of {title}, slot " in str(error)
    outcome = CliRunner().invoke(app, verify)
    (damage,) = json.loads(outcome.stdout)["ranks"][0]["damages"]
    assert outcome.exit_code == 1 and (damage["state"], damage["unit"]) == ("weight", title)


# -- checkpoints and exports --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_with_other_ones_replaces_them(tmp_path: Path) -> None:
    other_engine = start(OTHER, DISK, tmp_path / "other")
    for step in range(2):
        train_step(other_engine, OTHER, step)
    other_engine.save_checkpoint(tmp_path / "saved")
    expected, weights = [train_step(other_engine, OTHER, step) for step in (2, 3)], weights_of(other_engine)
    other_engine.destroy()
    engine = start(JOB, DISK, tmp_path / "run")
    train_step(engine, JOB, 0)
    engine.load_checkpoint(tmp_path / "saved")
    rank = tmp_path / "run" / "default" / "rank0"
    assert frozen_bytes(rank) == frozen_bytes(tmp_path / "other" / "default" / "rank0")
    losses = [train_step(engine, JOB, 2)]
    engine.destroy()
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "run" / "default")]).exit_code == 0
    engine = start(JOB, DISK, tmp_path / "run", resume="must")
    losses.append(train_step(engine, JOB, 3))
    assert losses == expected
    assert_same_tensors(weights, weights_of(engine))
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("same", [True, False])
def test_a_failed_load_reports_whether_the_last_commit_is_intact(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOB if same else OTHER
    saver = start(job, DISK, tmp_path / "other")
    train_step(saver, job, 0)
    saver.save_checkpoint(tmp_path / "saved")
    saver.destroy(remove=True)
    engine = start(JOB, DISK, tmp_path / "run")
    losses = [train_step(engine, JOB, step) for step in range(2)]
    assert testing.inspect(engine).store is not None

    def fails(*_: Any) -> None:
        raise IoError("states", 0, 1, errno.EIO, "write")

    testing.settle(engine)
    monkeypatch.setattr(testing.inspect(engine).store, "commit", fails)
    with pytest.raises(IoError):
        engine.load_checkpoint(tmp_path / "saved")
    with pytest.raises(EngineFailed) as caught:
        train_step(engine, JOB, 2)
    assert ("replacing frozen weights" in str(caught.value)) is not same
    assert ("the last committed step is intact" in str(caught.value)) is same
    engine.destroy()
    monkeypatch.undo()
    assert (CliRunner().invoke(app, ["verify", str(tmp_path / "run" / "default")]).exit_code == 0) is same
    if same:
        unbroken = run(JOB, DISK, tmp_path / "whole")
        engine = start(JOB, DISK, tmp_path / "run", resume="must")
        last = [train_step(engine, JOB, step) for step in range(engine.global_steps, JOB.steps)]
        assert last == unbroken.losses[-len(last) :] and losses == unbroken.losses[:2]
        engine.destroy(remove=True)


def exported(what: Path, out: Path) -> dict[str, torch.Tensor]:
    result = CliRunner().invoke(app, ["export", str(what), str(out)])
    assert result.exit_code == 0, result.output
    files = sorted(out.glob("*.safetensors"))
    return {name: value for file in files for name, value in safetensors.torch.load_file(file).items()}


def test_an_export_of_swap_files_and_one_of_a_checkpoint_are_the_weights(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path)
    for step in range(3):
        train_step(engine, JOB, step)
    engine.save_checkpoint(tmp_path / "saved", tag="three")
    weights = weights_of(engine)
    engine.destroy()
    store = look(tmp_path / "default" / "rank0")
    assert set(store.commits[0].record.slots) == {0, 1}, "some of the newest slots are B"
    for number, what in enumerate((tmp_path / "default", tmp_path / "saved" / "three")):
        tensors = exported(what, tmp_path / f"out{number}")
        assert tensors and all(torch.equal(value, weights[name]) for name, value in tensors.items())
        assert {name for name in weights if name not in tensors} <= {"base_model.model.lm_head.weight"}


def _rows(folder: Path, first: int, last: int) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """Some steps of two ranks: mean losses, weights, and the bytes of this rank's swap files, by formula and found."""
    job = JOB._replace(loss=language_rows_loss)
    engine = rank_pool.start(job, DISK, folder, resume="auto", durability="step", device_memory=1 << 20)
    assert engine.global_steps == first
    losses = []
    for step in range(first, last):
        loss = job.loss(engine, step, 0)
        engine.backward(loss)
        losses.append(engine.mean(float(loss.detach())))
        engine.step()
    weights, formula = weights_of(engine), by_formula(engine, 2, job.dtype)
    states = folder / "default" / f"rank{engine.global_rank}" / "states"
    engine.destroy()
    return losses, weights, formula, states.stat().st_size


def test_each_of_two_ranks_stores_its_shard_once(ranks: RankPool, tmp_path: Path) -> None:
    unbroken = ranks.run(_rows, tmp_path / "whole", 0, 2)
    ranks.run(_rows, tmp_path / "run", 0, 1)
    before = [frozen_bytes(tmp_path / "run" / "default" / f"rank{rank}") for rank in (0, 1)]
    results = ranks.run(_rows, tmp_path / "run", 1, 2)
    for rank, (losses, weights, formula, nbytes) in enumerate(results):
        assert formula == nbytes
        assert losses == unbroken[rank][0][1:]
        assert_same_tensors(unbroken[rank][1], weights)
        assert frozen_bytes(tmp_path / "run" / "default" / f"rank{rank}") == before[rank]
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "run" / "default")]).exit_code == 0
    weights = exported(tmp_path / "run" / "default", tmp_path / "out")
    assert weights and all(torch.equal(value, results[0][1][name]) for name, value in weights.items())


class Recorded(LateQueue):
    """Notes where it writes."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self.writes: list[tuple[str, int, int]] = []

    def write(self, file: Any, offset: int, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        self.writes.append((Path(file.path).name, offset, memoryview(buffer).nbytes))
        return super().write(file, offset, buffer, *args, **kwargs)


class Extent(NamedTuple):
    """Bytes of a slot of a unit's weights."""

    unit: str
    slot: int
    start: int
    stop: int

    def sha(self, rank: Path) -> str:
        with (rank / "states").open("rb") as file:
            file.seek(self.start)
            return hashlib.sha256(file.read(self.stop - self.start)).hexdigest()


def extents_of(rank: Path, itemsize: int) -> tuple[list[Extent], list[Extent]]:
    """The frozen and the trainable ones; and no state has room for an element that is frozen."""
    manifest = look(rank).manifest
    assert manifest is not None
    frozen, trained = [], []
    for unit, row in zip(manifest.spec.fingerprint["units"], manifest.spec.places(), strict=True):
        middle = unit["trainable"] * itemsize
        for slot, place in enumerate(row[State.WEIGHT]):
            trained += [Extent(unit["name"], slot, at, at + n) for at, n in place.extents_of(0, middle)]
        frozen += [Extent(unit["name"], 0, at, at + n) for at, n in place.extents_of(middle, place.nbytes - middle)]
        assert len({tuple(each.extents_of(middle, place.nbytes)) for each in row[State.WEIGHT]}) == 1, "they lie once"
        for state in (State.EXP_AVG, State.EXP_AVG_SQ):
            assert (state in row) is bool(unit["trainable"]), f"{unit['name']} has {state}"
            assert all(place.nbytes == 4 * unit["trainable"] for place in row.get(state, ()))
    return frozen, trained


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["cpu", "nvme"])
def test_frozen_weights_are_read_and_never_written(
    weights: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No states, no byte that is written after the start, and the same bytes in the end; the adapters train."""
    queues: list[Recorded] = []

    def made() -> Recorded:
        queues.append(Recorded())
        return queues[-1]

    use_queue(monkeypatch, made)
    job = models.LORA._replace(dtype=dtype, steps=3, clip=0.1)
    engine = start(job, (weights, "nvme"), tmp_path, durability="step", device_memory=room_for(job, 2))
    rank = tmp_path / "default" / "rank0"
    frozen, trained = extents_of(rank, DTYPES[dtype].itemsize)
    assert any(each.unit not in {other.unit for other in trained} for each in frozen), "a unit that is all frozen"
    assert {each.unit for each in frozen} & {each.unit for each in trained}, "and one with adapters"
    before = {each: each.sha(rank) for each in frozen}
    first = weights_of(engine)
    for queue in queues:
        queue.writes.clear()
    for step in range(job.steps):
        train_step(engine, job, step)
    last = weights_of(engine)
    engine.destroy()
    written = [(at, at + nbytes) for queue in queues for name, at, nbytes in queue.writes if name == "states"]
    assert all(any(a < each.stop and each.start < b for a, b in written) for each in trained), "both slots of each"
    assert not [each for each in frozen if any(a < each.stop and each.start < b for a, b in written)]
    assert before == {each: each.sha(rank) for each in frozen}
    for name, value in last.items():
        assert torch.equal(value, first[name]) is ("lora_" not in name), name
    again = start(job, (weights, "nvme"), tmp_path, durability="step", resume="must")
    assert_same_tensors(last, again.module.state_dict())
    again.destroy(remove=True)


def test_options_are_parsed() -> None:
    assert parse_lora("r=16") == Lora(16, 32.0)
    assert parse_lora("r=4,targets=all-linear").targets == ("all-linear",)
    assert parse_lora("r=4,targets=q_proj + v_proj").targets == ("q_proj", "v_proj")
    assert parse_lora("r=4, alpha=2.5,dropout=0.05,targets=q_proj+v_proj") == Lora(4, 2.5, 0.05, ("q_proj", "v_proj"))


WRONG = {
    "": "each once and with its value",
    "16": "each once and with its value, got '16'",
    "r=4,r=8": "each once",
    "rank=4": "got 'rank=4'",
    "alpha=4": "needs a rank r",
    "r=0": "r must be a whole number of at least 1, got 0",
    "r=1.5": "r must be a whole number",
    "r=lots": "r must be a number, got lots",
    "r=4,alpha=nan": "alpha must be a number",
    "r=4,alpha=0": "alpha must be above 0",
    "r=4,targets=+": r"targets are names joined by \+, got '\+'",
    "r=4,targets=q_proj++v_proj": r"targets are names joined by \+, got",
    "r=4,targets=all-linear+q_proj": "all-linear is every linear layer and stands alone, got 'all-linear[+]q_proj'",
    "r=4,dropout=1": "dropout must be at least 0 and below 1",
}


def test_wrong_options_are_refused() -> None:
    for text in WRONG:
        print(text)
        with pytest.raises(ConfigError, match=WRONG[text]):
            parse_lora(text)


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(llama_config())


def trained(model: torch.nn.Module) -> set[str]:
    """The layers whose adapters train."""
    return {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}


def test_only_adapters_train() -> None:
    assert trained(adapt(llama(), Lora(4, 8.0))) == {"q_proj", "v_proj"}, "what peft has for a Llama"
    assert trained(adapt(llama(), Lora(4, 8.0, 0.0, ("down_proj",)))) == {"down_proj"}
    assert len(trained(adapt(llama(), Lora(4, 8.0, 0.0, ("all-linear",))))) == 7
    assert trained(adapt(gpt2(), Lora(4, 8.0))) == {"c_attn"}


def test_a_model_without_memory_gets_adapters_with_values() -> None:
    with offload.init():
        model = llama()
    torch.manual_seed(1)
    first = {name: p for name, p in adapt(model, Lora(4, 8.0)).named_parameters() if p.requires_grad}
    assert first and not any(p.is_meta for p in first.values())
    assert any(bool(p.any()) for p in first.values()) and not all(bool(p.any()) for p in first.values())


def test_a_target_that_the_model_has_not() -> None:
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM has no c_attn; its linear layers are down_proj, gate_proj"
    ):
        adapt(llama(), Lora(4, 8.0, 0.0, ("q_proj", "c_attn")))


def test_a_rank_above_that_of_every_matrix_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(
        ConfigError, match=r"r=999999999999 is more than \d+, the highest rank of a matrix of this Llama"
    ):
        adapt(llama(), parse_lora("r=999999999999"))


def test_the_layers_of_gpt2_count_as_linear() -> None:
    """They are of transformers' class Conv1D."""
    linear = {"c_attn", "c_fc", "c_proj"}
    assert trained(adapt(gpt2(), Lora(4, 8.0, 0.0, ("all-linear",)))) == linear
    with pytest.raises(ConfigError, match="has no q_proj; its linear layers are c_attn, c_fc, c_proj, lm_head, or"):
        adapt(gpt2(), Lora(4, 8.0, 0.0, ("q_proj",)))


def test_without_peft_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'offload\[hf\]'"):
        adapt(llama(), Lora(4, 8.0))


def adapted(source: Path) -> Any:
    model = offload.load_pretrained(CAUSAL, source)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@pytest.mark.usefixtures("engines_end")
def test_an_adapter_is_saved_as_peft_saves_it(tmp_path: Path) -> None:
    written(tmp_path / "given")
    job = FAMILIES["llama"].job("fp32")
    engine = engine_of(adapted(tmp_path / "given"), tmp_path / "swap", job)
    for step in range(2):
        train_step(engine, job, step)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("dear")
    engine.save_pretrained(tmp_path / "out")
    engine.module.save_pretrained(tmp_path / "theirs")  # by peft, which has all weights gathered
    engine.eval()
    expected = FAMILIES["llama"].logits(engine)
    engine.destroy(remove=True)
    ours, theirs = (
        safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "theirs")
    )
    assert_same_tensors(ours, theirs)
    assert len(ours) == 8
    left, right = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("out", "theirs"))
    assert left == right and left["base_model_name_or_path"] == str(tmp_path / "given")
    assert (tmp_path / "out" / "notes.txt").read_text() == "dear"
    base = CAUSAL.from_pretrained(tmp_path / "given")
    back = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert torch.equal(FAMILIES["llama"].logits(back), expected)
    again = peft.PeftModel.from_pretrained(
        offload.load_pretrained(CAUSAL, tmp_path / "given"), tmp_path / "out", is_trainable=True
    )
    engine = engine_of(again, tmp_path / "swap", job)
    engine.eval()
    assert torch.equal(FAMILIES["llama"].logits(engine), expected)


@pytest.mark.usefixtures("engines_end")
def test_from_pretrained_of_an_adapter_within_init_has_the_adapter(tmp_path: Path) -> None:
    written(tmp_path / "base", models.llama())
    model = peft.get_peft_model(
        CAUSAL.from_pretrained(tmp_path / "base"), peft.LoraConfig(r=4, target_modules=["q_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    expected = CAUSAL.from_pretrained(tmp_path / "adapter").state_dict()
    assert any("lora_B" in name for name in expected)
    with offload.init():
        loaded = CAUSAL.from_pretrained(tmp_path / "adapter")
    engine = engine_of(loaded, tmp_path / "swap", FAMILIES["llama"].job("fp32"))
    assert_same_tensors(engine.module.state_dict(), expected)
    engine.destroy(remove=True)
