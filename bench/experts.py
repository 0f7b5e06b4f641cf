"""Mixtures of experts while they are paged: `python -m bench.experts host` and `python -m bench.experts drive FOLDER`.

host: host time of a micro-batch of a Qwen3-MoE of Qwen3-30B-A3B's shape with small widths (48 layers, 128 experts, 8 of
them for each token), with groups of experts and with single experts as units, beside the model without an engine.
Seconds of the calling thread's CPU time, and uses of units in a layer.

drive: seconds of a training step of a Qwen3-MoE of 8 layers and 64 experts, with everything on the drive, over those of
transformers and AdamW of torch with everything in memory.

The figures are medians over rounds, in each of which plain model and engines take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import offload
from bench.measure import report
from offload import testing
from offload.bench.configs import placed


def mixture(seed: int = 0, **settings: Any) -> Any:
    """Returns a Qwen3-MoE that makes grouped products.

    In fp32: a CPU without products in bf16 makes a kernel for each new number of tokens, which takes milliseconds.
    """
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, norm_topk_prob=True, use_cache=False, tie_word_embeddings=True, **settings
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def _settings(folder: Path, tier: str, batch_size: int, experts: str, **more: Any) -> dict[str, Any]:
    settings = placed(f"{tier}/{tier}", folder, torch.device("cpu"), batch_size=batch_size, dtype="fp32", clip=1.0)
    settings["offload"] |= {"run": experts, "experts": experts, **more}
    return settings


def _host(layers: int, rounds: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    ids = torch.randint(512, (1, 512), generator=torch.Generator().manual_seed(0))
    plain = mixture(**sizes)
    engines = {
        experts: offload.initialize(
            model=mixture(**sizes),
            # On drives, since the CPU uses weights in RAM where they are. Waits for drives are no time of the thread.
            config=_settings(folder, "nvme", 1, experts, device_memory="8MB", durability="none"),
        )[0]
        for experts in ("grouped", "each")
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *engines)}
    uses: dict[str, float] = {}
    try:
        for _ in range(rounds + 1):
            seconds["plain"].append(_thread_seconds(plain, torch.Tensor.backward, plain.zero_grad, ids))
            for name, engine in engines.items():
                pager = testing.inspect(engine).pager
                before = pager.counts().uses
                seconds[name].append(_thread_seconds(engine, engine.backward, engine.step, ids))
                uses[name] = (pager.counts().uses - before) / layers
    finally:
        for engine in engines.values():
            engine.destroy(remove=True)
    # The first round records the order of uses.
    figures = {f"{name}_seconds": statistics.median(turns[1:]) for name, turns in seconds.items()}
    figures |= {f"{name}_least_seconds": min(turns[1:]) for name, turns in seconds.items()}
    beyond_plain = {name: figures[f"{name}_seconds"] - figures["plain_seconds"] for name in engines}
    return {
        **figures,
        **{f"{name}_uses_a_layer": count for name, count in uses.items()},
        "grouped_over_each": figures["grouped_seconds"] / figures["each_seconds"],
        "grouped_over_each_beyond_plain": beyond_plain["grouped"] / beyond_plain["each"],
    }


def _thread_seconds(model: Any, backward: Callable[[torch.Tensor], Any], end: Callable[[], Any], ids: Any) -> float:
    """Seconds of a forward and a backward; `end` ends the step and does not count."""
    start = time.thread_time()
    backward(model(input_ids=ids, labels=ids).loss)
    seconds = time.thread_time() - start
    end()
    return seconds


def _drive(
    tokens: int, rounds: int, steps: int, hidden: int, ways: Sequence[str], host_memory: str | None, folder: Path
) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "moe_intermediate_size": hidden // 2,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": hidden // 8,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    }
    batch = torch.randint(512, (tokens // 512, 512), generator=torch.Generator().manual_seed(0))
    plain = mixture(**sizes)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    engines = {}
    for experts in ways:
        more = {} if host_memory is None else {"host_memory": host_memory}
        settings = _settings(folder, "nvme", len(batch), experts, **more)
        engines[experts] = offload.initialize(model=mixture(**sizes), config=settings)[0]

    def step_of_plain() -> None:
        plain(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def step_of(engine: Any) -> None:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()

    seconds: dict[str, list[Seconds]] = {name: [] for name in ("plain", *engines)}
    try:
        for _ in range(rounds + 1):
            seconds["plain"].append(_seconds(steps, step_of_plain))
            for name, engine in engines.items():
                seconds[name].append(_seconds(steps, partial(step_of, engine), engine.synchronize))
    finally:
        for engine in engines.values():
            engine.destroy(remove=True)
    figures = {"parameters": float(sum(parameter.numel() for parameter in plain.parameters()))}
    for kind in Seconds._fields:
        turns = {name: [getattr(turn, kind) for turn in of_name[1:]] for name, of_name in seconds.items()}
        figures |= {f"{name}_{kind}_seconds": statistics.median(of_kind) for name, of_kind in turns.items()}
        for name in engines if kind != "ending" else ():
            ratios = (paged / baseline for paged, baseline in zip(turns[name], turns["plain"], strict=True))
            figures[f"{name}_over_plain_{kind}"] = statistics.median(ratios)
    return figures


class Seconds(NamedTuple):
    """Seconds of a training step."""

    wall: float
    processor: float
    """Of all threads of the process."""
    ending: float
    """Of the wait for the last update of a turn, which the next forward hides in a run; divided by the turn's steps."""


def _seconds(steps: int, step: Callable[[], None], end: Callable[[], None] = lambda: None) -> Seconds:
    """Returns the seconds of a step in a turn of `steps`, the last of which ends with its update."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    ending = time.perf_counter()
    end()
    after = time.perf_counter()
    return Seconds((after - wall) / steps, (time.process_time() - processor) / steps, (after - ending) / steps)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["host", "drive"])
    parser.add_argument("folder", type=Path, nargs="?", help="a folder on the drive; default: a temporary one")
    parser.add_argument("--layers", type=int, default=48, help="of the host part")
    parser.add_argument("--hidden", type=int, default=384, help="features of the drive part")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step of the drive part")
    parser.add_argument("--experts", nargs="+", default=["grouped", "each"], help="of the drive part")
    parser.add_argument("--steps", type=int, default=2, help="of a turn of the drive part")
    parser.add_argument("--host-memory", help="host budget of the drive part; default: the engine's own")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        if options.part == "host":
            report("experts_host", {"layers": options.layers, **_host(options.layers, options.rounds, folder)})
        else:
            figures = _drive(
                options.tokens,
                options.rounds,
                options.steps,
                options.hidden,
                options.experts,
                options.host_memory,
                folder,
            )
            report("experts_drive", {"tokens": options.tokens, "hidden": options.hidden, **figures})


if __name__ == "__main__":
    main()
