"""What the optimizers learn: `python -m bench.optimizers learning`.

A GPT-2 of 3.5M parameters learns bytes of the source of Python's standard library, in fp32 on the CPU, in memory: with
AdamW, Muon and SinkGD of the engine, and with `torch.optim.Muon` and `torch.optim.AdamW` in a plain loop. The loss is
that of files that no run has seen, after the last step. Every optimizer has a warm-up and then a cosine, and takes the
best learning rate of its list by the first seed, in runs of a third of the steps.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import offload
from bench.measure import report
from offload.layout.optimizer_states import matrices_of
from offload.presets import build

ADAM_LR = 2e-3
"""Learning rate of what is no matrix, under Muon and SinkGD."""
RATES = {"AdamW": (1e-3, 2e-3, 4e-3), "Muon": (1e-2, 2e-2, 4e-2), "SinkGD": (1e-4, 2e-4, 4e-4)}
_WARM_UP = 0.1


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.optimizers learning")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args(arguments)
    train, held_out = _corpus()
    best, tried = {}, {}
    for name, rates in RATES.items():
        short = argparse.Namespace(**{**vars(given), "steps": given.steps // 3})
        tried[name] = {rate: round(_engine_loss(short, name, rate, 0, train, held_out), 4) for rate in rates}
        best[name] = min(tried[name], key=lambda rate: tried[name][rate])
    found = {
        name: [_engine_loss(given, name, best[name], seed, train, held_out) for seed in range(given.seeds)]
        for name in RATES
    }
    found["torch.optim.Muon"] = [_plain_loss(given, best["Muon"], seed, train, held_out) for seed in range(given.seeds)]
    report(
        "learning",
        {
            **vars(given),
            "tried": tried,
            "best": best,
            **{
                name: {
                    "losses": [round(loss, 5) for loss in losses],
                    "mean": round(statistics.mean(losses), 4),
                    "deviation": round(statistics.stdev(losses), 4) if len(losses) > 1 else None,
                }
                for name, losses in found.items()
            },
        },
    )


def _corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of the standard library's modules: nine tenths of the files to train on, and the others."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    parts = [
        b"".join(path.read_bytes() for n, path in enumerate(files) if (n % 10 == 0) is held) for held in (False, True)
    ]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, held_out


def _batches(data: torch.Tensor, given: argparse.Namespace, seed: int, count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(data) - given.seq_len, (given.batch_size,), generator=generator)
        yield torch.stack([data[start : start + given.seq_len] for start in starts.tolist()])


def _rate(step: int, steps: int) -> float:
    """Returns the fraction of the learning rate at a step."""
    warm = max(1, int(steps * _WARM_UP))
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / (steps - warm))))


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def _held_out(model: Any, given: argparse.Namespace, data: torch.Tensor) -> float:
    losses = [float(_loss(model, ids)) for ids in _batches(data, given, 12345, 16)]
    return statistics.mean(losses)


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = build("gpt2-tiny")
    return model


def _engine_loss(
    given: argparse.Namespace, name: str, rate: float, seed: int, train: torch.Tensor, held_out: torch.Tensor
) -> float:
    params: dict[str, Any] = {"lr": rate, "weight_decay": 0.1}
    if name != "AdamW":
        params["adam_lr"] = ADAM_LR
        params |= {"betas": [0.9, 0.999], "eps": 1e-8}
    config = {
        "train_micro_batch_size_per_gpu": given.batch_size,
        "gradient_clipping": 1.0,
        "optimizer": {"type": name, "params": params},
        "offload": {"device": "cpu", "run": f"learning-{name}"},
    }
    model = _model(seed)
    engine = offload.initialize(model=model, config=config)[0]
    try:

        def step(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        _train(engine, engine.optimizer, step, given, seed, train)
        engine.eval()
        return _held_out(engine, given, held_out)
    finally:
        engine.destroy(remove=True)


def _plain_loss(
    given: argparse.Namespace, rate: float, seed: int, train: torch.Tensor, held_out: torch.Tensor
) -> float:
    model = _model(seed).train()
    inner = matrices_of(model)
    named = dict(model.named_parameters())
    muon: Any = torch.optim.Muon([p for name, p in named.items() if name in inner], lr=rate, weight_decay=0.1)
    adamw: Any = torch.optim.AdamW([p for name, p in named.items() if name not in inner], lr=ADAM_LR, weight_decay=0.1)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (muon, adamw):
            each.step()
            each.zero_grad()

    _train(model, _Both(muon, adamw), step, given, seed, train)
    return _held_out(model.eval(), given, held_out)


class _Both:
    """The groups of two optimizers."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]


def _train(
    model: Any,
    optimizer: Any,
    step: Callable[[torch.Tensor], None],
    given: argparse.Namespace,
    seed: int,
    train: torch.Tensor,
) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for number, ids in enumerate(_batches(train, given, seed, given.steps)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * _rate(number, given.steps)
        step(_loss(model, ids))
