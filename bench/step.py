"""A step with everything on disk against the same step in memory: `python -m bench.step FOLDER [--model NAME]`.

Bound of the bytes: 26 for each parameter (an update reads 12 and writes 12, the backward reads 2), less what stays on
the device. Bound of the time: the larger of compute (the same step in memory) and I/O (bytes over the bandwidth of
`bench.io` on the same folder). Both engines exist at once and take turns.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import offload
from bench.measure import STEPS, engine_of, in_turns, median_ratio, options, random_ids, report, settings_for


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=256, rounds=5)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--no-overlap", action="store_true", help="on disk, step() waits for its updates: to compare")
    given = parser.parse_args(arguments)
    disk, memory = (_engine(given, tier) for tier in ("nvme", "none"))
    model: Any = disk.module
    ids = random_ids((given.batch_size, given.seq_len), model.config.vocab_size)

    def step(engine: offload.Engine) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    def turn(engine: offload.Engine) -> None:
        for _ in range(STEPS):
            step(engine)

    for engine in (disk, memory):
        step(engine)  # the first step only records the order of uses
    before = disk.io_bytes()
    on_disk, in_memory = in_turns(lambda: turn(disk), lambda: turn(memory), given.rounds)
    after = disk.io_bytes()
    moved = (after.read - before.read + after.written - before.written) / (STEPS * (given.rounds + 1))
    figures: dict[str, Any] = {
        "model": given.model,
        "parameters": disk.parameter_count,
        "tokens_per_micro_batch": given.batch_size * given.seq_len,
        "accumulation": 1,
        "overlap": not given.no_overlap,
        "host_memory": disk.host_memory,
        "device_memory": disk.device_memory,
        "seconds_on_disk": statistics.median(on_disk) / STEPS,
        "seconds_in_memory": statistics.median(in_memory) / STEPS,
        "memory_over_disk": median_ratio(in_memory, on_disk),
        "bytes_per_parameter": moved / disk.parameter_count,
        "gigabytes_per_second": moved * STEPS / statistics.median(on_disk) / 1e9,
    }
    for engine in (disk, memory):
        engine.destroy(remove=True)
    report("step", figures)


def _engine(given: argparse.Namespace, tier: str) -> offload.Engine:
    more: dict[str, Any] = {}
    if tier == "nvme":
        more["debug"] = {"overlap": not given.no_overlap}
        if given.device_memory:
            more["device_memory"] = given.device_memory
    settings = settings_for(given.folder, f"bench-{tier}", tier, **more)
    return engine_of(given.model, settings)


if __name__ == "__main__":
    main()
