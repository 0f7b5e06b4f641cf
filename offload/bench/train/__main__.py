"""The process of one turn: `python -m offload.bench.train JOB FIGURES`, a job as JSON and the file for its figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from offload.bench.child_process import write_json
from offload.bench.train.loops import Trainer, deepspeed, fsdp2, ours, plain, take_turn, torchao
from offload.bench.train.plan import CONTENDERS, Contender, TrainJob

_BEGIN: dict[str, Callable[[TrainJob, Contender], Trainer]] = {
    "plain": plain,
    "offload": ours,
    "deepspeed": deepspeed,
    "fsdp2": fsdp2,
    "torchao": torchao,
}


def main(job_json: str, figures: Path) -> None:
    """Takes a turn and writes its figures, or the error that ended it, which is then raised."""
    job = TrainJob(**json.loads(job_json))
    contender = next(known for known in CONTENDERS if known.name == job.contender)
    try:
        write_json(figures, take_turn(job, lambda job: _BEGIN[contender.kind](job, contender)))
    except Exception as error:
        words = str(error).strip().partition("\n")[0]
        write_json(figures, {"error": f"{type(error).__name__}: {words}"})
        raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
