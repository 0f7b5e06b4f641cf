"""Options, configs and the JSON line that the scripts of this folder share; `offload.bench` measures."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offload
from offload import kernels
from offload.bench.configs import placed
from offload.losses import chunk_loss_of
from offload.presets import build

STEPS = 4
"""Steps of a turn: the update of the last one runs into the other engine's turn, so one would be too few."""


def settings_for(folder: Path, run: str, tier: str, **more: Any) -> dict[str, Any]:
    """Returns a config: bf16 AdamW on the CPU, weights and states on `tier`, and `more` for the "offload" block."""
    settings = placed(f"{tier}/{tier}", folder, torch.device("cpu"), batch_size=1, dtype="bf16", clip=1.0)
    settings["offload"] |= {"run": run, **more}
    return settings


def options(about: str | None, seq_len: int, rounds: int) -> argparse.ArgumentParser:
    """Returns the options of a benchmark that trains a preset in a folder; it adds its own."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=seq_len)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def engine_of(model: str, settings: dict[str, Any], chunked_loss: bool = False) -> offload.Engine:
    """Returns an engine over the preset of this name, with the model's own loss or the same in chunks of tokens."""
    with offload.init(settings):
        module = build(model)
    if chunked_loss:
        chunk_loss_of(module)
    return offload.initialize(model=module, config=settings)[0]


def report(name: str, figures: dict[str, Any]) -> None:
    """Prints `figures`, rounded, with the machine that gave them, as one JSON object on one line."""
    machine = {
        "cores": os.cpu_count(),
        "threads": kernels.thread_count(),
        "processor": platform.processor() or platform.machine(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "offload": offload.__version__,
    }
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"benchmark": name, **rounded, "machine": machine}))


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a call in a new process, so that nothing else is in the process's memory."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(send, function, arguments))
    process.start()
    send.close()
    result = receive.recv()
    process.join()
    return result


def _send(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))
