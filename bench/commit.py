"""What durability costs: `python -m bench.commit FOLDER [--model NAME] [--every N]`.

The same steps with everything on disk, once with a commit each step (or every N), checksums of all that is written
among it, and once with durability none, in turns. Bound: a commit adds the blob and a record of 4096 bytes to the
26 bytes a parameter, and nothing that the model waits for: it is made on the update worker, under the next forward.
"""

from __future__ import annotations

import argparse
import statistics
import time
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
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    wish: Any = "step" if given.every == 1 else {"every": given.every}
    durable, in_place = (_engine(given, durability) for durability in (wish, "none"))
    vocabulary = durable.module.config.vocab_size
    ids = torch.randint(vocabulary, (given.batch_size, given.seq_len), generator=torch.Generator().manual_seed(0))

    busy: dict[offload.Engine, list[float]] = {durable: [], in_place: []}

    def turn(engine: offload.Engine) -> None:
        start = time.process_time()  # of all threads: other processes of the machine do not blur it
        for _ in range(_STEPS):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        busy[engine].append(time.process_time() - start)

    turn(durable), turn(in_place)
    engines = (durable, in_place)
    before = [sum(engine.io_bytes()) for engine in engines]
    with_commits, without = in_turns(lambda: turn(durable), lambda: turn(in_place), given.rounds)
    steps = _STEPS * (given.rounds + 1)
    moved = [(sum(engine.io_bytes()) - start) / steps for engine, start in zip(engines, before, strict=True)]
    folder = Path(durable.resumable or "") / "rank0"
    blob = max(len((folder / f"blob.{which}").read_bytes()) for which in (0, 1))
    figures: dict[str, Any] = {
        "model": given.model,
        "parameters": durable.parameter_count,
        "tokens_per_micro_batch": given.batch_size * given.seq_len,
        "accumulation": 1,
        "commit_every": given.every,
        "seconds_durable": statistics.median(with_commits) / _STEPS,
        "seconds_in_place": statistics.median(without) / _STEPS,
        "durable_over_in_place": median_ratio(with_commits, without),
        "ratios": [round(a / b, 3) for a, b in zip(with_commits, without, strict=True)],
        "processor_durable_over_in_place": median_ratio(busy[durable][2:], busy[in_place][2:]),
        "bytes_per_parameter_in_place": moved[1] / in_place.parameter_count,
        "more_bytes": (moved[0] + (blob + 4096) / given.every) / moved[1] - 1,
    }
    for engine in engines:
        engine.destroy(remove=True)
    report("commit", figures)


def _engine(given: argparse.Namespace, durability: Any) -> offload.Engine:
    run = "bench-durable" if durability != "none" else "bench-in-place"
    settings = settings_for(given.folder, run, "nvme", durability=durability)
    with offload.init(settings):
        model = build(given.model)
    return offload.initialize(model=model, config=settings)[0]


if __name__ == "__main__":
    main()
