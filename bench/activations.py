"""What activations in tiers cost and allow, within a limit of RSS: `python -m bench.activations FOLDER`.

    speed      steps of gpt2-small whose blocks are computed again: inputs in files against inputs in memory, in turns
    fits       one step of gpt2-small within --limit, plain and in each tier: a process of its own that is killed above
    longest    the longest sequence of a Llama of 4 layers and 128k words within --small-limit, setting by setting

The bound of `speed` is 1: the same computation without the moves. Bytes of inputs are each written once and read once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import transformers

import offload
from bench.measure import in_turns, median_ratio, random_ids, report, resident, seconds, settings_for
from offload.presets import build
from offload.sizes import GIB, MIB, parse_size

_LOOK_S = 0.01
"""Seconds between two looks at a process's RSS."""
_STEP = 256
"""Lengths are found to within an eighth, in multiples of so many tokens."""


class Way(NamedTuple):
    """Settings of a step."""

    name: str
    chunked: bool = False
    activations: str | None = None
    tiles: bool = False


WAYS = (
    Way("plain"),
    Way("loss in chunks", chunked=True),
    Way("blocks computed again, inputs in memory", chunked=True, activations="cpu"),
    Way("blocks computed again, inputs in files", chunked=True, activations="nvme"),
    Way("inputs in files, MLP in tiles", chunked=True, activations="nvme", tiles=True),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("speed", "fits", "longest"), action="append")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=parse_size, default=6 * GIB)
    parser.add_argument("--small-limit", type=parse_size, default=2 * GIB)
    given = parser.parse_args(arguments)
    parts = given.only or ["speed", "fits", "longest"]
    if "speed" in parts:
        report("activations_speed", _speed(given.folder, given.batch_size, given.seq_len, given.rounds))
    if "fits" in parts:
        for way in WAYS[:4]:
            found = _within(given.limit, _gpt2_step, given.folder, way, given.batch_size, given.seq_len)
            report("activations_fit", {"way": way.name, "limit": given.limit, **found})
    if "longest" in parts:
        for way in WAYS:
            report("activations_longest", {"way": way.name, **_longest(given.folder, way, given.small_limit)})


# -- speed --------------------------------------------------------------------------------------------


def _speed(folder: Path, batch_size: int, seq_len: int, rounds: int) -> dict[str, Any]:
    """Seconds of steps with inputs in files, over those with inputs in memory."""
    engines = {name: _gpt2(folder, name, Way(name, True, name)) for name in ("device", "nvme")}
    ids = random_ids((batch_size, seq_len), 50257)
    losses: dict[str, list[float]] = {name: [] for name in engines}

    def step(name: str) -> None:
        torch.manual_seed(len(losses[name]))  # dropout is the same for both
        losses[name].append(_step(engines[name], ids))

    kept, moved = in_turns(lambda: step("device"), lambda: step("nvme"), rounds)
    peak = engines["nvme"].memory_report()["activations"]
    for engine in engines.values():
        engine.destroy(remove=True)
    return {
        "tokens": batch_size * seq_len,
        "ratio": median_ratio(moved, kept),
        "kept_s": sorted(kept)[len(kept) // 2],
        "moved_s": sorted(moved)[len(moved) // 2],
        "same_losses": losses["device"] == losses["nvme"],
        **{f"peak_{tier}": each["peak"] for tier, each in peak.items()},
    }


def _gpt2(folder: Path, run: str, way: Way) -> offload.Engine:
    """An engine over gpt2-small, all of whose states are on disk."""
    settings = settings_for(folder, f"bench-{run}", "nvme", durability="none", activations=way.activations)
    with offload.init(settings):
        model = build("gpt2-small")
    if way.chunked:
        offload.losses.chunk_loss_of(model)
    return offload.initialize(model=model, config=settings)[0]


def _step(engine: offload.Engine, ids: torch.Tensor) -> float:
    """A whole step; returns the loss."""
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


# -- processes within a limit -------------------------------------------------------------------------


def _gpt2_step(folder: Path, way: Way, batch_size: int, seq_len: int) -> dict[str, Any]:
    """Seconds of a step of gpt2-small, and its loss."""
    engine = _gpt2(folder, "fits", way)
    ids = random_ids((batch_size, seq_len), 50257)
    losses: list[float] = []
    took = seconds(lambda: losses.append(_step(engine, ids)))
    engine.destroy(remove=True)
    return {"seconds": took, "loss": losses[0]}


def _llama_step(folder: Path, way: Way, batch_size: int, seq_len: int) -> dict[str, Any]:
    """Seconds of a step of a Llama of four layers and 128k words."""
    more = {"tile_mlp": "auto"} if way.tiles else {}
    settings = settings_for(
        folder, "bench-longest", "nvme", durability="none", host_memory=384 * MIB, activations=way.activations, **more
    )
    with offload.init(settings):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=128256,
                hidden_size=256,
                intermediate_size=1024,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=1 << 20,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )
    if way.chunked:
        offload.losses.chunk_loss_of(model)
    engine = offload.initialize(model=model, config=settings)[0]
    ids = random_ids((batch_size, seq_len), 128256)
    took = seconds(lambda: _step(engine, ids))
    engine.destroy(remove=True)
    return {"seconds": took}


def _within(limit: int, function: Any, *arguments: Any) -> dict[str, Any]:
    """What `function` returns in a process of its own, with its peak of RSS; killed above the limit."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(send, function, arguments))
    process.start()
    send.close()
    watched, most = psutil.Process(process.pid), 0
    while process.is_alive():
        try:
            most = max(most, int(watched.memory_info().rss))
        except psutil.NoSuchProcess:
            break
        if most > limit:
            process.kill()
        time.sleep(_LOOK_S)
    process.join()
    if most > limit or process.exitcode != 0:
        return {"fits": False, "peak": most, "exit": process.exitcode}
    found = receive.recv()
    peak = max(most, found.pop("peak"))
    return {"fits": peak <= limit, "peak": peak, **found}


def _run(pipe: Any, function: Any, arguments: tuple[Any, ...]) -> None:
    result = function(*arguments)
    pipe.send({**result, "peak": resident("VmHWM")})


def _longest(folder: Path, way: Way, limit: int) -> dict[str, Any]:
    """The longest sequence with which a step stays within the limit, and the seconds of that step."""
    good, bad, best = 0, 0, {}
    length = 4 * _STEP
    while not bad or bad - good > max(_STEP, good // 8):
        found = _within(limit, _llama_step, folder, way, 1, length)
        if found["fits"]:
            good, best = length, found
        else:
            bad = length
        length = 2 * length if not bad else (good + bad) // 2 // _STEP * _STEP
        if bad and length <= good:
            break
    return {"tokens": good, "limit": limit, **best}


if __name__ == "__main__":
    main()
