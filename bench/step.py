"""A step with everything on disk against the same step in memory: `python -m bench.step FOLDER [--model NAME]`.

Engines take turns, each in a process of its own: one in memory, whose micro-batches pass one after the other, and one
on disk for each of `--schedules`, `--speculate`, `--durability` (`step,none` shows what a commit costs) and
`--vocabulary` (`whole,pieces`). In one process they would share host memory and teams of threads.

Bound of the bytes: 26 for each parameter (an update reads 12 and writes 12, the backward reads 2), and 4 for each
further micro-batch of the order micro_batch_major. Bound of the time: the larger of compute (the step in memory) and
I/O (the bytes that moved, over the drive's rates measured before and after the turns).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bench.measure import engine_of, options, report, settings_for
from offload.bench.measure import drive_rates, median_rates, median_ratio, random_ids, seconds_of
from offload.sizes import MIB


class Turn(NamedTuple):
    """Figures of a step of a turn."""

    seconds: float
    processor_seconds: float
    nbytes: float


class Contender:
    """An engine in a process of its own, which works only during its turns."""

    def __init__(self, arguments: argparse.Namespace, tiers: str, *order: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_take_turns, args=(child_pipe, arguments, tiers, *order))
        self._process.start()
        child_pipe.close()
        self.facts: dict[str, int] = self._pipe.recv()
        self.turns: list[Turn] = []

    def turn(self, counts: bool) -> None:
        """Makes some steps, and waits for their updates."""
        self._pipe.send(True)
        turn = self._pipe.recv()
        if counts:
            self.turns.append(turn)

    def median(self, field: str) -> float:
        """Returns the median of a figure over the turns."""
        values: list[float] = [getattr(turn, field) for turn in self.turns]
        return statistics.median(values)

    def end(self) -> None:
        """Ends the engine and its process, and removes its swap files."""
        self._pipe.send(False)
        self._process.join()


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=256, rounds=5)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--schedules", default="micro_batch_major", help="a list, with commas")
    parser.add_argument("--speculate", default="auto", help="a list of auto, true and false, with commas")
    parser.add_argument("--durability", default="auto", help="a list of auto, step, none and steps, with commas")
    parser.add_argument("--vocabulary", default="auto", help="a list of auto, whole and pieces, with commas")
    parser.add_argument("--chunked-loss", action="store_true", help="compute the loss in chunks of tokens")
    parser.add_argument("--activations", default=None, help="tier of the inputs of blocks that are computed again")
    parser.add_argument("--tiers", default="nvme,nvme", help="of weights and of states: nvme, cpu or none")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn that count")
    parser.add_argument("--host-memory", default=None, help="of an engine on disk, as in the config")
    parser.add_argument("--device-memory", default=None, help="of an engine on disk, as in the config")
    parser.add_argument("--no-overlap", action="store_true", help="on disk, step() waits for its updates: to compare")
    args = parser.parse_args(arguments)
    memory = Contender(args, "none,none", "micro_batch_major", "false", "none", "auto")
    lists = (args.schedules, args.speculate, args.durability, args.vocabulary)
    orders = list(itertools.product(*(choices.split(",") for choices in lists)))
    disk = [Contender(args, args.tiers, *order) for order in orders]
    with drive_rates([args.folder / "bench-step.rates"], 256 * MIB) as drive:
        rates = [drive()]
        for number in range(-2, args.rounds):  # the first rounds record the order of uses, and are not counted
            for contender in (memory, *disk):
                contender.turn(counts=number >= 0)
        rates.append(drive())
    figures: dict[str, Any] = {
        "model": args.model,
        "parameters": memory.facts["parameters"],
        "dtype": args.dtype,
        "tokens_per_micro_batch": args.batch_size * args.seq_len,
        "micro_batches": args.micro_batches,
        "tiers": args.tiers,
        "activations": args.activations,
        "overlap": not args.no_overlap,
        "drive": median_rates(rates)._asdict(),
        "seconds_in_memory": memory.median("seconds"),
    }
    for (schedule, speculate, durability, vocabulary), contender in zip(orders, disk, strict=True):
        nbytes, step = contender.median("nbytes"), contender.median("seconds")
        # An update reads 12 and writes 12 of the 26 bytes; the backward reads the rest.
        io = median_rates(rates).seconds(nbytes * 14 / 26, nbytes * 12 / 26)
        figures[f"{schedule}, speculate {speculate}, durability {durability}, vocabulary {vocabulary}"] = {
            "seconds": round(step, 4),
            "over_memory": round(_ratio(contender, memory, "seconds"), 3),
            "over_first": round(_ratio(contender, disk[0], "seconds"), 3),
            "processor_over_first": round(_ratio(contender, disk[0], "processor_seconds"), 3),
            "io_seconds_alone": round(io, 4),
            "bound_over_this": round(max(memory.median("seconds"), io) / step, 3),
            "bytes_per_parameter": round(nbytes / contender.facts["parameters"], 2),
            **contender.facts,
        }
    for contender in (memory, *disk):
        contender.end()
    report("step", figures)


def _ratio(contender: Contender, base: Contender, field: str) -> float:
    return median_ratio(*([getattr(turn, field) for turn in engine.turns] for engine in (contender, base)))


# -- in a process of its own --------------------------------------------------------------------------


def _take_turns(pipe: Connection, args: argparse.Namespace, *order: str) -> None:
    """Builds an engine, reports its facts, and takes a turn for each True that comes."""
    engine = engine_of(args.model, _settings(args, *order), args.chunked_loss)
    facts = {"parameters": engine.parameter_count, "host_memory": engine.host_memory}
    pipe.send({**facts, "device_memory": engine.device_memory})
    model: Any = engine.module
    ids = random_ids((args.batch_size, args.seq_len), model.config.vocab_size)
    micro_batches = [{"input_ids": ids, "labels": ids}] * args.micro_batches
    while pipe.recv():
        start, busy = sum(engine.io_bytes()), time.process_time()
        engine.train_batch(iter(micro_batches))  # its update runs into the first step that counts, as the last one out
        took = seconds_of(lambda: [engine.train_batch(iter(micro_batches)) for _ in range(args.steps)])
        engine.synchronize()
        steps = args.steps + 1
        busy = time.process_time() - busy
        pipe.send(Turn(took / args.steps, busy / steps, (sum(engine.io_bytes()) - start) / steps))
    engine.destroy(remove=True)


def _settings(
    args: argparse.Namespace, tiers: str, schedule: str, speculate: str, durability: str, vocabulary: str
) -> dict[str, Any]:
    weights, states = tiers.split(",")
    more: dict[str, Any] = {"schedule": schedule, "vocabulary": vocabulary}
    if weights == "nvme" or states == "nvme":
        more["durability"] = {"every": int(durability)} if durability.isdecimal() else durability
        more["debug"] = {"overlap": not args.no_overlap}
        more["speculate"] = {"true": True, "false": False}.get(speculate, speculate)
        optional = {name: getattr(args, name) for name in ("host_memory", "device_memory", "activations")}
        more |= {name: value for name, value in optional.items() if value}
    run = "-".join(("bench", weights, states, schedule, speculate, durability, vocabulary))
    settings = settings_for(args.folder, run, weights, **more)
    settings["zero_optimization"]["offload_optimizer"]["device"] = states
    settings["bf16"] = {"enabled": args.dtype == "bf16"}
    settings |= {"gradient_clipping": args.clip, "gradient_accumulation_steps": args.micro_batches}
    settings["train_micro_batch_size_per_gpu"] = args.batch_size
    return settings


if __name__ == "__main__":
    main()
