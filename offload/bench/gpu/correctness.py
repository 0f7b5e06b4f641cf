"""Comparison of all placements on tiny models: losses, norms and weights must equal those of none/none bit for bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import offload
from offload.bench.gpu.work import PLACEMENTS, Save, Work, config_for
from offload.bench.measure import random_ids
from offload.presets import require_transformers


class _Tiny(NamedTuple):
    """A small model: class of its config, settings of the config, and micro-batches of a step."""

    config: str
    settings: dict[str, Any]
    accumulation: int


_TINY = {
    "gpt2": _Tiny(
        "GPT2Config",
        {"n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
        1,
    ),
    "llama": _Tiny(
        "LlamaConfig",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        2,
    ),
}
"""Models by name. Each has more blocks than the device arena holds, so that weights are moved. GPT-2 has dropout and a
tied embedding."""
_VOCABULARY = 128
JOBS = tuple(f"{model} {dtype}" for model in _TINY for dtype in ("bf16", "fp32"))


class _Result(NamedTuple):
    """The numbers of a training."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def bits(
    work: Work, save: Save, jobs: Sequence[str] = JOBS, placements: Sequence[str] = PLACEMENTS, steps: int = 5
) -> None:
    """Trains each job in each placement, and compares the results with those of a separate training in none/none.

    Nothing else may use CUDA in this process before, since cuBLAS reads CUBLAS_WORKSPACE_CONFIG when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    figures: dict[str, Any] = {"steps": steps, "jobs": {}}
    try:
        for job in jobs:
            found: dict[str, Any] = {"equal": [], "different": {}, "failed": {}}
            figures["jobs"][job] = found
            expected = _train(job, "none/none", work, steps)
            for placement in placements:
                try:
                    differences = _differences(expected, _train(job, placement, work, steps))
                except Exception as error:  # the other placements can still be compared
                    found["failed"][placement] = f"{type(error).__name__}: {error}"
                else:
                    if differences:
                        found["different"][placement] = differences
                    else:
                        found["equal"].append(placement)
                save(figures)
    finally:
        torch.use_deterministic_algorithms(before)


def _train(job: str, placement: str, work: Work, steps: int) -> _Result:
    name, dtype = job.split()
    tiny = _TINY[name]
    transformers = require_transformers()
    torch.manual_seed(0)
    config = getattr(transformers, tiny.config)(**tiny.settings, vocab_size=_VOCABULARY, use_cache=False)
    # Eager attention is matrix products and a softmax, which have deterministic kernels everywhere.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    settings = config_for(placement, work, dtype, accumulation=tiny.accumulation, clip=1.0)
    settings["offload"]["debug"] = {"poison": True}
    engine = offload.initialize(model=model, config=settings)[0]
    try:
        torch.manual_seed(1)
        losses, norms = [], []
        for step in range(steps):
            for micro in range(tiny.accumulation):
                ids = random_ids((2, 32), _VOCABULARY, seed=100 * step + micro)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                losses.append(float(loss.detach()))
                engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
        weights = {key: value.cpu().clone() for key, value in engine.module.state_dict().items()}
    finally:
        engine.destroy(remove=True)
    return _Result(losses, norms, weights)


def _differences(expected: _Result, got: _Result) -> list[str]:
    """Returns the first difference of each kind in words; an empty list if all bits are equal."""
    words = []
    for what, wanted, have in (("loss", expected.losses, got.losses), ("norm", expected.norms, got.norms)):
        for index, (a, b) in enumerate(zip(wanted, have, strict=True), 1):
            if a != b:
                words.append(f"{what} {index} is {b}, not {a}")
                break
    names = [name for name, value in expected.weights.items() if not _same_bits(value, got.weights[name])]
    if names:
        words.append(f"{len(names)} of {len(expected.weights)} tensors of the state dict, the first is {names[0]}")
    return words


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(t.flatten().view(torch.uint8) for t in (one, other)))
