"""A model whose files are four times as large as what may be resident is scored, and its files are read once a pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

import offload
from offload.fileio.safetensors_stream import SafetensorsWriter, Tensor
from offload.losses import chunk_loss_of
from offload.sizes import MIB, PAGE
from tests.support.processes.process_measures import DiskBytes, peak_memory, peak_rss

LAYERS = 30
IDS = [[1, 300, 17]] * 2


def config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        dtype="bfloat16",
        tie_word_embeddings=False,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
    )


def write_folder(folder: Path) -> int:
    """A Llama of random numbers in two files, made tensor by tensor; bytes of its weights."""
    folder.mkdir()
    config().save_pretrained(folder)
    with torch.device("meta"):
        named = {name: tuple(each.shape) for name, each in transformers.LlamaForCausalLM(config()).named_parameters()}
    files: dict[str, dict[str, Tensor]] = {"one.safetensors": {}, "two.safetensors": {}}
    for number, (name, shape) in enumerate(named.items()):
        files[list(files)[2 * number // len(named)]][name] = Tensor(torch.bfloat16, shape)
    generator = torch.Generator().manual_seed(0)
    for file, tensors in files.items():
        with SafetensorsWriter(folder / file, tensors, {"format": "pt"}) as writer:
            for name, tensor in tensors.items():
                writer.write_tensor(name, torch.randn(tensor.shape, generator=generator).mul_(0.02).bfloat16())
    places = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())


def score(folder: Path, budget: int) -> dict[str, Any]:
    """Losses of two rows, how far the peak RSS grew, and the bytes of the first pass by both counts."""
    warm = torch.nn.Linear(64, 64).bfloat16()
    warm(torch.ones(8, 64).bfloat16()).float().sum()
    ids = torch.tensor(IDS)
    model = offload.load_pretrained(transformers.LlamaForCausalLM, folder)
    chunk_loss_of(model, evaluation=True, by_row=True)
    base = psutil.Process().memory_info().rss
    sizes = {"device": "cpu", "host_memory": budget // 2, "device_memory": budget // 2}
    with offload.inference(model, {"offload": sizes}) as engine:
        drive = DiskBytes()
        losses = engine(input_ids=ids, labels=ids).loss
        figures = {"own": engine.io_bytes().read, "drive": drive.read, "written": drive.written}
        engine(input_ids=ids, labels=ids)
        budgets = engine.host_memory + engine.device_memory
    return {**figures, "losses": losses.tolist(), "grown": peak_rss() - base, "budgets": budgets}


def plain_losses(folder: Path) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chunk_loss_of(model, evaluation=True, by_row=True)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        losses: list[float] = model(input_ids=ids, labels=ids).loss.tolist()
    return losses


@pytest.mark.works("Without training", "files four times as large as the RAM they may take", "right")
def test_files_of_four_times_the_memory_are_scored_and_read_once(tmp_path: Path) -> None:
    nbytes = write_folder(tmp_path / "model")
    found, _ = peak_memory(score, tmp_path / "model", 40 * MIB)
    assert found["losses"] == plain_losses(tmp_path / "model")
    assert found["budgets"] <= 40 * MIB
    print(f"{nbytes / MIB:.0f} MiB of weights, {found}")
    assert found["grown"] <= nbytes / 4, "budgets, activations, and what the libraries take"
    # Whole pages: a unit shares its first and its last with its neighbours, and each file has a head of its own.
    slack = 4 * PAGE * (LAYERS + 4)
    assert nbytes <= found["own"] <= nbytes + slack
    assert abs(found["drive"] - found["own"]) <= MIB, "the drive has read that too, and little else"
    assert found["written"] == 0
