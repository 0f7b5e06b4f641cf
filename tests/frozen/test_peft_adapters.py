"""Adapters of peft over a model from a folder: frozen weights stay, adapters train and are saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch

import offload
from offload import testing
from offload.states import State
from tests.support import models
from tests.support.oracle import assert_same_tensors, train_step
from tests.support.pretrained_models import CAUSAL, FAMILIES, engine_of, written

pytestmark = pytest.mark.usefixtures("engines_end")


def adapted(source: Path) -> Any:
    model = offload.load_pretrained(CAUSAL, source)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def test_frozen_weights_are_copied_once_and_never_written_again(tmp_path: Path) -> None:
    given = written(tmp_path / "given", models.llama().bfloat16())
    model = adapted(tmp_path / "given")
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert adapters and not any(parameter.any() for parameter in adapters), "as peft has made them"
    job = FAMILIES["llama"].job("bf16")
    engine = engine_of(model, tmp_path / "swap", job)
    store = testing.inspect(engine).store
    assert store is not None
    writes: list[tuple[int, State, int, int]] = []
    write = store.write

    def note(unit: int, state: State, slot: int, start: int, buffer: memoryview, *rest: Any, **named: Any) -> Any:
        writes.append((unit, state, start, len(buffer)))
        return write(unit, state, slot, start, buffer, *rest, **named)

    store.write = note  # type: ignore[method-assign]
    for step in range(2):
        train_step(engine, job, step)
    testing.settle(engine, commit=False)
    trainable = [len(part) for part in testing.inspect(engine).trainable]
    assert writes and any(not part for part in trainable)
    for unit, state, start, nbytes in writes:
        itemsize = testing.inspect(engine).mode.states[state].itemsize
        assert start + nbytes <= trainable[unit] * itemsize, "what is frozen is behind that"
    state = engine.module.state_dict()
    for name, value in given.items():
        mine = next(key for key in state if key.removeprefix("base_model.model.").replace(".base_layer", "") == name)
        assert torch.equal(state[mine], value)
    assert any(state[name].any() for name in state if "lora_B" in name), "the adapters train"


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
    one, other = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("out", "theirs"))
    assert one == other and one["base_model_name_or_path"] == str(tmp_path / "given")
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
