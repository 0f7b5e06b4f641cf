"""A step with everything on disk against the same step in memory: `python -m bench.step FOLDER [--model NAME]`.

All engines exist at once and take turns: one in memory, whose micro-batches pass one after the other, and one on disk
for each of `--schedules` and `--speculate`. Bound of the bytes: 26 for each parameter (an update reads 12 and writes
12, the backward reads 2), and 4 for each further micro-batch of the order micro_batch_major. Bound of the time: the
larger of compute (the step in memory) and I/O (the bytes that moved, over the drive's rates measured before and after
the turns).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, NamedTuple

import offload
from bench.measure import engine_of, median_ratio, options, random_ids, report, seconds, settings_for
from offload.aio import bandwidths


class Contender(NamedTuple):
    """An engine that takes part, and what tells it from the others."""

    name: str
    engine: offload.Engine


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=256, rounds=5)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--schedules", default="micro_batch_major", help="a list, with commas")
    parser.add_argument("--speculate", default="auto", help="a list of auto, true and false, with commas")
    parser.add_argument("--activations", default=None, help="tier of the inputs of blocks that are computed again")
    parser.add_argument("--tiers", default="nvme,nvme", help="of weights and of states: nvme, cpu or none")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn that count")
    parser.add_argument("--host-memory", default=None, help="of an engine on disk, as in the config")
    parser.add_argument("--device-memory", default=None, help="of an engine on disk, as in the config")
    parser.add_argument("--no-overlap", action="store_true", help="on disk, step() waits for its updates: to compare")
    given = parser.parse_args(arguments)
    memory = Contender("memory", _engine(given, "memory", "none,none", "micro_batch_major", "false"))
    disk = [
        Contender(
            f"{schedule}, speculate {speculate}",
            _engine(given, f"{schedule}-{speculate}", given.tiers, schedule, speculate),
        )
        for schedule in given.schedules.split(",")
        for speculate in given.speculate.split(",")
    ]
    model: Any = memory.engine.module
    ids = random_ids((given.batch_size, given.seq_len), model.config.vocab_size)
    micro_batches = [{"input_ids": ids, "labels": ids}] * given.micro_batches

    steps_of_a_turn: int = given.steps

    def turn(engine: offload.Engine) -> float:
        engine.train_batch(iter(micro_batches))  # its update runs into the first step that counts, as the last one out
        taken = seconds(lambda: [engine.train_batch(iter(micro_batches)) for _ in range(given.steps)])
        engine.synchronize()
        return taken / steps_of_a_turn

    before = bandwidths([given.folder])[0]
    taken: dict[str, list[float]] = {each.name: [] for each in (memory, *disk)}
    moved = dict.fromkeys(taken, 0)
    for counted in range(-2, given.rounds):  # the first rounds record the order of uses, and are not counted
        for name, engine in (memory, *disk):
            start = engine.io_bytes()
            took = turn(engine)
            end = engine.io_bytes()
            if counted >= 0:
                taken[name].append(took)
                moved[name] += end.read + end.written - start.read - start.written
    after = bandwidths([given.folder])[0]
    read, written = ((a + b) / 2 for a, b in zip(before, after, strict=True))
    compute = statistics.median(taken[memory.name])
    steps = given.rounds * (given.steps + 1)
    figures: dict[str, Any] = {
        "model": given.model,
        "parameters": memory.engine.parameter_count,
        "dtype": given.dtype,
        "tokens_per_micro_batch": given.batch_size * given.seq_len,
        "micro_batches": given.micro_batches,
        "tiers": given.tiers,
        "activations": given.activations,
        "overlap": not given.no_overlap,
        "drive_read_gb_per_s": read / 1e9,
        "drive_write_gb_per_s": written / 1e9,
        "seconds_in_memory": compute,
    }
    for name, engine in disk:
        io_seconds = _io_seconds(moved[name] / steps, read, written)
        figures[name] = {
            "seconds": round(statistics.median(taken[name]), 4),
            "memory_over_this": round(median_ratio(taken[memory.name], taken[name]), 3),
            "io_seconds_alone": round(io_seconds, 4),
            "bound_over_this": round(max(compute, io_seconds) / statistics.median(taken[name]), 3),
            "bytes_per_parameter": round(moved[name] / steps / engine.parameter_count, 2),
            "host_memory": engine.host_memory,
            "device_memory": engine.device_memory,
        }
    for _, engine in (memory, *disk):
        engine.destroy(remove=True)
    report("step", figures)


def _io_seconds(nbytes: float, read: float, written: float) -> float:
    """Seconds of the drive for the bytes of a step, 12 of 26 of which are written, if it does one after the other."""
    return nbytes * (14 / 26 / read + 12 / 26 / written)


def _engine(given: argparse.Namespace, run: str, tiers: str, schedule: str, speculate: str) -> offload.Engine:
    weights, states = tiers.split(",")
    more: dict[str, Any] = {"schedule": schedule}
    if weights == "nvme" or states == "nvme":
        more["debug"] = {"overlap": not given.no_overlap}
        more["speculate"] = {"true": True, "false": False}.get(speculate, speculate)
        optional = {name: getattr(given, name) for name in ("host_memory", "device_memory", "activations")}
        more |= {name: value for name, value in optional.items() if value}
    settings = settings_for(given.folder, f"bench-{run}", weights, **more)
    settings["zero_optimization"]["offload_optimizer"]["device"] = states
    settings["bf16"] = {"enabled": given.dtype == "bf16"}
    settings |= {"gradient_clipping": given.clip, "gradient_accumulation_steps": given.micro_batches}
    settings["train_micro_batch_size_per_gpu"] = given.batch_size
    return engine_of(given.model, settings)


if __name__ == "__main__":
    main()
