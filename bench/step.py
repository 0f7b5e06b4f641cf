"""A step with everything on disk against the same step in memory: `python -m bench.step FOLDER [--model NAME]`.

Engines take turns, each in a process of its own: one in memory, whose micro-batches pass one after the other, and one
on disk for each of `--schedules` and `--speculate`. In one process they would share host memory and teams of threads.
Bound of the bytes: 26 for each parameter (an update reads 12 and writes 12, the backward reads 2), and 4 for each
further micro-batch of the order micro_batch_major. Bound of the time: the larger of compute (the step in memory) and
I/O (the bytes that moved, over the drive's rates measured before and after the turns).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bench.measure import engine_of, median_ratio, options, random_ids, report, seconds, settings_for
from offload.aio import bandwidths


class Turn(NamedTuple):
    """What a turn of an engine took."""

    seconds_a_step: float
    nbytes: int
    """Read and written, in all steps of the turn."""


class Facts(NamedTuple):
    """What an engine says of itself."""

    parameters: int
    host_memory: int
    device_memory: int


class Contender:
    """An engine in a process of its own, which works only during its turns."""

    def __init__(self, given: argparse.Namespace, name: str, tiers: str, schedule: str, speculate: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        run = f"{schedule}-{speculate}-{tiers.replace(',', '-')}"
        self._process = context.Process(target=_take_turns, args=(theirs, given, run, tiers, schedule, speculate))
        self._process.start()
        theirs.close()
        self.facts: Facts = self._pipe.recv()

    def turn(self) -> Turn:
        """Takes some steps, and waits for their updates."""
        self._pipe.send(True)
        turn: Turn = self._pipe.recv()
        return turn

    def end(self) -> None:
        """Ends the engine and its process, and removes its swap files."""
        self._pipe.send(False)
        self._process.join()


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
    memory = Contender(given, "memory", "none,none", "micro_batch_major", "false")
    disk = [
        Contender(given, f"{schedule}, speculate {speculate}", given.tiers, schedule, speculate)
        for schedule in given.schedules.split(",")
        for speculate in given.speculate.split(",")
    ]
    before = bandwidths([given.folder])[0]
    taken = _in_turns((memory, *disk), given.rounds)
    after = bandwidths([given.folder])[0]
    drive = ((before[0] + after[0]) / 2, (before[1] + after[1]) / 2)
    in_memory = [turn.seconds_a_step for turn in taken[memory.name]]
    figures: dict[str, Any] = {
        "model": given.model,
        "parameters": memory.facts.parameters,
        "dtype": given.dtype,
        "tokens_per_micro_batch": given.batch_size * given.seq_len,
        "micro_batches": given.micro_batches,
        "tiers": given.tiers,
        "activations": given.activations,
        "overlap": not given.no_overlap,
        "drive_read_gb_per_s": drive[0] / 1e9,
        "drive_write_gb_per_s": drive[1] / 1e9,
        "seconds_in_memory": statistics.median(in_memory),
    }
    for each in disk:
        figures[each.name] = _row(each, taken[each.name], in_memory, given.rounds * (given.steps + 1), drive)
    for each in (memory, *disk):
        each.end()
    report("step", figures)


def _in_turns(contenders: Sequence[Contender], rounds: int) -> dict[str, list[Turn]]:
    """Returns the turns of each contender, which they take one after the other in each round."""
    taken: dict[str, list[Turn]] = {each.name: [] for each in contenders}
    for counted in range(-2, rounds):  # the first rounds record the order of uses, and are not counted
        for each in contenders:
            turn = each.turn()
            if counted >= 0:
                taken[each.name].append(turn)
    return taken


def _row(
    contender: Contender, turns: Sequence[Turn], in_memory: Sequence[float], steps: int, drive: tuple[float, float]
) -> dict[str, Any]:
    """Returns the figures of an engine on disk.

    Args:
        contender: the engine.
        turns: its turns.
        in_memory: seconds of a step in memory, by round.
        steps: all steps of the turns, those that do not count too.
        drive: bytes a second that the drive reads and writes.
    """
    took = [turn.seconds_a_step for turn in turns]
    nbytes = sum(turn.nbytes for turn in turns) / steps
    io_seconds = _io_seconds(nbytes, *drive)
    bound = max(statistics.median(in_memory), io_seconds)
    return {
        "seconds": round(statistics.median(took), 4),
        "memory_over_this": round(median_ratio(in_memory, took), 3),
        "io_seconds_alone": round(io_seconds, 4),
        "bound_over_this": round(bound / statistics.median(took), 3),
        "bytes_per_parameter": round(nbytes / contender.facts.parameters, 2),
        "host_memory": contender.facts.host_memory,
        "device_memory": contender.facts.device_memory,
    }


def _io_seconds(nbytes: float, read: float, written: float) -> float:
    """Seconds of the drive for the bytes of a step, 12 of 26 of which are written, if it does one after the other."""
    return nbytes * (14 / 26 / read + 12 / 26 / written)


# -- in a process of its own --------------------------------------------------------------------------


def _take_turns(
    pipe: Connection, given: argparse.Namespace, run: str, tiers: str, schedule: str, speculate: str
) -> None:
    """Builds an engine, says so, and takes a turn for each True that comes."""
    engine = engine_of(given.model, _settings(given, run, tiers, schedule, speculate))
    pipe.send(Facts(engine.parameter_count, engine.host_memory, engine.device_memory))
    model: Any = engine.module
    ids = random_ids((given.batch_size, given.seq_len), model.config.vocab_size)
    micro_batches = [{"input_ids": ids, "labels": ids}] * given.micro_batches
    while pipe.recv():
        start = engine.io_bytes()
        engine.train_batch(iter(micro_batches))  # its update runs into the first step that counts, as the last one out
        took = seconds(lambda: [engine.train_batch(iter(micro_batches)) for _ in range(given.steps)])
        engine.synchronize()
        end = engine.io_bytes()
        nbytes = end.read + end.written - start.read - start.written
        pipe.send(Turn(took / given.steps, nbytes))
    engine.destroy(remove=True)


def _settings(given: argparse.Namespace, run: str, tiers: str, schedule: str, speculate: str) -> dict[str, Any]:
    """Returns the config of an engine."""
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
    return settings


if __name__ == "__main__":
    main()
