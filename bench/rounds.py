"""What the agreement of ranks costs: `python -m bench.rounds`.

Processes of this machine meet over gloo. Measured are

* a round, an exchange of the numbers that a rank announces: where all ranks ask at once, and where one of them is late
  by `--late` seconds, which are taken off;
* a step of two models whose units all have room on the device, in turns with series of gathers and reductions, and with
  a round for each: its seconds, its rounds, and the share of the step that the calling thread spends in them, waits for
  a rank that computes longer included;
* a use of a unit that is on every device, where nothing moves: the time of a forward of tiny blocks without a graph,
  for each block, which one process has too. Bar: 50 µs more than that.

With more ranks than cores they take turns on the cores, and a round is as long as these turns.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offload
from bench.host_time import Blocks
from bench.measure import random_ids, report, seconds, settings_for
from offload.distributed.reduce_scatter import ReduceScatterAccumulator
from offload.presets import build
from offload.swapper.pager import CommonUses

_BLOCKS, _WIDTH = 24, 32


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks, with commas")
    parser.add_argument("--models", default="llama,gpt2-small", help="of llama, gpt2-tiny, gpt2-small, with commas")
    parser.add_argument("--most-trained", type=int, default=2, help="ranks up to which the models are trained")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--late", type=float, default=0.002)
    given = parser.parse_args(arguments)
    figures = {f"{count} ranks": _measured(given, int(count)) for count in given.ranks.split(",")}
    report("rounds", figures)


def _measured(given: argparse.Namespace, count: int) -> dict[str, Any]:
    """Returns what the last of `count` ranks has measured."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    receive, send = context.Pipe(duplex=False)
    processes = [context.Process(target=_rank, args=(send, given, rank, count, port)) for rank in range(count)]
    for process in processes:
        process.start()
    send.close()
    try:
        found: dict[str, Any] = receive.recv()
    finally:
        for process in processes:
            process.join()
    return found


# -- in a process of its own --------------------------------------------------------------------------


def _rank(pipe: Connection, given: argparse.Namespace, rank: int, count: int, port: int) -> None:
    """Measures everything on one rank. The last one sends the figures."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {key: str(value) for key, value in here.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        figures = _uses(given, Path(folder))
        for name in given.models.split(",") if count <= given.most_trained else []:
            figures[name] = _steps(given, name, Path(folder))
    if count > 1:
        dist.destroy_process_group()
    if rank == count - 1:
        pipe.send(figures)


def _uses(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures uses of units that are on every device, and rounds."""
    model = Blocks(_BLOCKS).to(torch.bfloat16)
    engine = offload.initialize(model=model, config=settings_for(folder, "blocks", "cpu", device_memory="64MiB"))[0]
    x = torch.randn(1, 8, _WIDTH, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def evaluate() -> None:
        with torch.no_grad():
            engine(x)

    evaluate()
    evaluate()  # from now on each rank knows that all have all
    wall = statistics.median(seconds(evaluate) for _ in range(30)) / _BLOCKS
    began = time.thread_time()
    for _ in range(30):
        evaluate()
    figures: dict[str, Any] = {
        "use_us": _us(wall),
        "use_cpu_us": _us((time.thread_time() - began) / 30 / _BLOCKS),
    }
    ranks = engine._core.components.world.ranks
    if ranks.size > 1:
        numbers = [0] * 7

        def round_of(late: float = 0.0) -> float:
            """Returns the seconds of a round; the first rank begins it `late`."""
            ranks.collect(numbers, "measure")
            if late and ranks.rank == 0:
                time.sleep(late)
            return seconds(lambda: ranks.collect(numbers, "measure"))

        took = [round_of() for _ in range(given.rounds)]
        late = [round_of(given.late) for _ in range(given.rounds // 10)]
        figures |= {
            "round_us": _us(statistics.median(took)),
            "round_least_us": _us(min(took)),
            "round_late_us": _us(statistics.median(late) - given.late),
        }
    engine.destroy(remove=True)
    return figures


def _llama() -> Any:
    """Returns a Llama of four layers, whose step takes some 20 ms."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def _steps(given: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Trains a model that has room on the device, and measures its steps and their rounds."""
    torch.manual_seed(0)
    model: Any = _llama() if name == "llama" else build(name).float()
    settings = settings_for(folder, f"rounds-{name}", "none")
    settings |= {"bf16": {"enabled": False}, "gradient_clipping": 0, "train_micro_batch_size_per_gpu": 1}
    settings["offload"]["device_memory"] = 6 * sum(each.nbytes for each in model.parameters()) + (1 << 26)
    engine = offload.initialize(model=model, config=settings)[0]
    ids = random_ids((1, 32 if name == "llama" else 256), model.config.vocab_size, 0)
    inside = _timed_rounds(engine)

    def step() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    for _ in range(3):
        step()
    turns = (True, False) if inside is not None else (True,)
    taken: dict[bool, list[tuple[float, int, float]]] = {series: [] for series in turns}
    for _ in range(given.steps):
        for series in turns:
            _allow(engine, series)
            step()  # the update of the last turn runs into it
            before, already = engine.communication(), sum(inside or ())
            took = seconds(step)
            rounds = engine.communication().since(before).agreement.collectives
            taken[series].append((took, rounds, (sum(inside or ()) - already) / took))
    engine.destroy(remove=True)
    return {("series" if series else "each use"): _row(steps) for series, steps in taken.items()}


def _row(steps: list[tuple[float, int, float]]) -> dict[str, float]:
    took, rounds, shares = zip(*steps, strict=True)
    return {
        "step_ms": round(statistics.median(took) * 1e3, 3),
        "step_least_ms": round(min(took) * 1e3, 3),
        "rounds_a_step": statistics.median(rounds),
        "share_in_rounds": round(statistics.median(shares), 4),
    }


def _allow(engine: offload.Engine, series: bool) -> None:
    """Lets the next steps begin series, or makes a round for each use and each reduction."""
    components = engine._core.components
    uses, gradients = components.pager._fetcher, components.gradients
    if isinstance(uses, CommonUses) and isinstance(gradients, ReduceScatterAccumulator):
        gradients._order._predicts = series
        possible = CommonUses._possible_series if series else lambda *_: None
        setattr(uses, "_possible_series", functools.partial(possible, uses))  # noqa: B010


def _timed_rounds(engine: offload.Engine) -> list[float] | None:
    """Returns a list to which each round from now on adds its seconds; None with one rank."""
    inside, ranks = list[float](), engine._core.components.world.ranks
    if ranks.size == 1:
        return None
    collect = ranks.collect

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return collect(*arguments)
        finally:
            inside.append(time.perf_counter() - began)

    setattr(ranks, "collect", timed)  # noqa: B010
    return inside


def _us(took: float) -> float:
    return round(took * 1e6, 1)


if __name__ == "__main__":
    main()
