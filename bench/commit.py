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

import offload
from bench.measure import STEPS, engine_of, in_turns, median_ratio, options, random_ids, report, settings_for


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=1024, rounds=5)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args(arguments)
    wish: Any = "step" if given.every == 1 else {"every": given.every}
    durable, in_place = (_engine(given, durability) for durability in (wish, "none"))
    model: Any = durable.module
    ids = random_ids((given.batch_size, given.seq_len), model.config.vocab_size)
    busy: dict[offload.Engine, list[float]] = {durable: [], in_place: []}

    def turn(engine: offload.Engine) -> None:
        start = time.process_time()  # of all threads: other processes of the machine do not blur it
        for _ in range(STEPS):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        busy[engine].append(time.process_time() - start)

    engines = (durable, in_place)
    for engine in engines:
        turn(engine)
    before = [sum(engine.io_bytes()) for engine in engines]
    with_commits, without = in_turns(lambda: turn(durable), lambda: turn(in_place), given.rounds)
    steps = STEPS * (given.rounds + 1)
    moved = [(sum(engine.io_bytes()) - start) / steps for engine, start in zip(engines, before, strict=True)]
    folder = Path(durable.resumable or "") / "rank0"
    blob = max(len((folder / f"blob.{which}").read_bytes()) for which in (0, 1))
    figures: dict[str, Any] = {
        "model": given.model,
        "parameters": durable.parameter_count,
        "tokens_per_micro_batch": given.batch_size * given.seq_len,
        "accumulation": 1,
        "commit_every": given.every,
        "seconds_durable": statistics.median(with_commits) / STEPS,
        "seconds_in_place": statistics.median(without) / STEPS,
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
    return engine_of(given.model, settings_for(given.folder, run, "nvme", durability=durability))


if __name__ == "__main__":
    main()
