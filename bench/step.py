"""A step with everything on disk against the same step in memory: `python -m bench.step FOLDER [--model NAME]`.

Bound of the bytes: 26 for each parameter (an update reads 12 and writes 12, the backward reads 2), less what stays on
the device. Bound of the time: the larger of compute (the same step in memory) and I/O (bytes over the bandwidth of
`bench.io` on the same folder). Both engines exist at once and take turns.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

import offload
from bench.measure import in_turns, median_ratio, report, settings_for
from offload.presets import build

_STEPS = 4
"""Steps of a turn: the update of the last one runs into the other engine's turn, so one would be too few."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--no-overlap", action="store_true", help="on disk, step() waits for its updates: to compare")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    disk, memory = (_engine(given, tier) for tier in ("nvme", "none"))
    vocabulary = disk.module.config.vocab_size
    ids = torch.randint(vocabulary, (given.batch_size, given.seq_len), generator=torch.Generator().manual_seed(0))

    def step(engine: offload.Engine) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    def turn(engine: offload.Engine) -> None:
        for _ in range(_STEPS):
            step(engine)

    step(disk), step(memory)  # the first step only records the order of uses
    before = disk.io_bytes()
    on_disk, in_memory = in_turns(lambda: turn(disk), lambda: turn(memory), given.rounds)
    after = disk.io_bytes()
    moved = (after.read - before.read + after.written - before.written) / (_STEPS * (given.rounds + 1))
    figures: dict[str, Any] = {
        "model": given.model,
        "parameters": disk.parameter_count,
        "tokens_per_micro_batch": given.batch_size * given.seq_len,
        "accumulation": 1,
        "overlap": not given.no_overlap,
        "host_memory": disk.host_memory,
        "device_memory": disk.device_memory,
        "seconds_on_disk": statistics.median(on_disk) / _STEPS,
        "seconds_in_memory": statistics.median(in_memory) / _STEPS,
        "memory_over_disk": median_ratio(in_memory, on_disk),
        "bytes_per_parameter": moved / disk.parameter_count,
        "gigabytes_per_second": moved * _STEPS / statistics.median(on_disk) / 1e9,
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
    with offload.init(settings):
        model = build(given.model)
    return offload.initialize(model=model, config=settings)[0]


if __name__ == "__main__":
    main()
