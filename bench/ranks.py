"""A step on several ranks, stage by stage, against DDP, FSDP2 and DeepSpeed: `python -m bench.ranks FOLDER`.

Each contender has a process for each rank, and all processes meet over gloo on this machine. Contenders take turns:
the engine in ZeRO stages 0 to 3 in memory with divided states, in stage 0 with whole states on each rank (reductions
beside the backward) and in stage 3 on disk; DistributedDataParallel; `fully_shard`; DeepSpeed in ZeRO stages 1 to 3,
where it is installed. All have the same weights, tokens and number of steps, in fp32 with AdamW, no clip and no
dropout; a micro-batch that does not end a step is not reduced where a library can leave that out. Losses differ by
roundings. Bar: 1.1 times the fastest of the others, in memory. A contender that fails is reported with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import socket
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import offload
from bench.measure import options, report, settings_for
from offload.bench.measure import median_ratio, random_ids, seconds_of
from offload.bench.train.loops import model_of
from offload.distributed.process_group import Communication

_ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
_PATIENCE = 600
"""Seconds that a contender may take for its start and a turn."""

MicroBatches = list[dict[str, torch.Tensor]]


class Contestant(NamedTuple):
    """A library on one rank."""

    step: Callable[[], float]
    """Trains a step, and returns the mean loss of its micro-batches on this rank."""
    finish: Callable[[], Any] = dist.barrier
    """Waits until all work of the steps so far is done."""
    sent: Callable[[], Communication] = Communication
    """Returns the bytes that this rank has sent so far; nothing if they are not counted."""
    end: Callable[[], Any] = lambda: None


class Turn(NamedTuple):
    """A turn on one rank."""

    seconds: float
    """Of a step."""
    loss: float
    """Of the last step."""
    sent: Communication
    """In the steps that count."""


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=128, rounds=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn that count")
    parser.add_argument("--overlap", action="store_true", help='"overlap_comm": true in each stage of ours')
    parser.add_argument("--only", default=",".join(CONTENDERS), help="a list of contenders, with commas")
    args = parser.parse_args(arguments)
    rounds: dict[str, list[list[Turn]]] = {name: [] for name in args.only.split(",")}
    errors: dict[str, str] = {}
    for _ in range(args.rounds):
        for name in rounds:
            if name in errors:
                continue
            # Processes of one contender at a time: all contenders together may need more than the machine's memory.
            turns = _turns(args, name)
            if isinstance(turns, str):
                errors[name] = turns
            else:
                rounds[name].append(turns)
    figures = {
        "model": args.model,
        "ranks": args.ranks,
        "tokens_per_micro_batch": args.batch_size * args.seq_len,
        "micro_batches": args.micro_batches,
    }
    report("ranks", figures | _results(rounds, errors, args.steps))


def _turns(args: argparse.Namespace, name: str) -> list[Turn] | str:
    """Returns the turn of each rank of a contender. If one fails, ends the others and returns the error."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(args.ranks)]
    processes = [
        context.Process(target=_take_turn, args=(send, args, name, rank, port), daemon=True)
        for rank, (_, send) in enumerate(pipes)
    ]
    for process, (_, send) in zip(processes, pipes, strict=True):
        process.start()
        send.close()
    turns: list[Turn] = []
    for receive, _ in pipes:
        try:
            turn = receive.recv() if receive.poll(_PATIENCE) else f"no answer within {_PATIENCE} s"
        except EOFError:
            turn = "the process has died"
        if isinstance(turn, str):
            # The other ranks would wait for this one.
            for process in processes:
                process.kill()
            return turn
        turns.append(turn)
    for process in processes:
        process.join()
    return turns


def _results(rounds: dict[str, list[list[Turn]]], errors: dict[str, str], steps: int) -> dict[str, Any]:
    """Returns the figures of each contender, or its error, with its time over that of the fastest other library."""
    took = {name: [max(turn.seconds for turn in turns) for turns in row] for name, row in rounds.items()}
    peers = [name for name in rounds if name not in errors and not name.startswith("stage")]
    best = min(peers, key=lambda name: statistics.median(took[name]), default=None)
    results: dict[str, Any] = {"fastest_other": best}
    for name, row in rounds.items():
        if name in errors:
            results[name] = {"failed": errors[name]}
            continue
        results[name] = {
            "seconds": round(statistics.median(took[name]), 4),
            "loss": round(statistics.mean(turn.loss for turn in row[-1]), 6),
        }
        if best is not None:
            results[name]["over_fastest_other"] = round(median_ratio(took[name], took[best]), 3)
        results[name]["sent_a_step"] = {
            kind: {"collectives": sent.collectives / steps, "nbytes": sent.nbytes / steps}
            for kind, sent in row[-1][0].sent._asdict().items()
            if sent.collectives
        }
    return results


# -- in a process of its own --------------------------------------------------------------------------


def _take_turn(pipe: Connection, args: argparse.Namespace, name: str, rank: int, port: int) -> None:
    """Makes the contestant of this rank, and sends its turn, or its error."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "LOCAL_WORLD_SIZE": args.ranks}
    os.environ |= {key: str(value) for key, value in here.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    try:
        dist.init_process_group("gloo")
        model: Any = model_of(args.model).float()
        size, numbers = (args.batch_size, args.seq_len), range(args.micro_batches)
        ids = [random_ids(size, model.config.vocab_size, rank * args.micro_batches + number) for number in numbers]
        contestant = CONTENDERS[name](args, model, [{"input_ids": one, "labels": one} for one in ids])
        # The first steps record the order of uses; the update of the last one runs into those that count.
        for _ in range(args.steps + 2):
            contestant.step()
        before, losses = contestant.sent(), list[float]()
        took = seconds_of(lambda: losses.extend(contestant.step() for _ in range(args.steps)))
        sent = contestant.sent().since(before)
        contestant.finish()
        contestant.end()
        dist.destroy_process_group()
        pipe.send(Turn(took / args.steps, losses[-1], sent))
    except Exception as error:  # the parent reports it
        pipe.send(f"{type(error).__name__}: {error}")


def _engine(stage: int, tier: str, whole: bool = False) -> Callable[..., Contestant]:
    """Returns a function that makes an engine of ours, whose ranks hold all states if `whole`, as DDP's do."""

    def make(args: argparse.Namespace, model: Any, micro_batches: MicroBatches) -> Contestant:
        settings = settings_for(args.folder, f"bench-ranks-{stage}-{tier}" + "-whole" * whole, tier)
        settings |= {"bf16": {"enabled": False}, "gradient_clipping": 0}
        settings["optimizer"]["params"] = _ADAMW
        # Otherwise states are divided, in stage 0 too.
        settings["zero_optimization"] |= {
            "stage": stage,
            **({} if whole else {"mics_shard_size": -1}),
            **({"overlap_comm": True} if whole or args.overlap else {}),
        }
        settings["gradient_accumulation_steps"] = args.micro_batches
        settings["train_micro_batch_size_per_gpu"] = args.batch_size
        # Room for all units at once, as the others have it.
        if tier == "none":
            nbytes = sum(parameter.nbytes for parameter in model.parameters())
            settings["offload"]["device_memory"] = 6 * nbytes + (1 << 26)
        engine = offload.initialize(model=model, config=settings)[0]
        return Contestant(
            step=lambda: float(engine.train_batch(iter(micro_batches))),
            finish=engine.synchronize,
            sent=engine.communication,
            end=lambda: engine.destroy(remove=True),
        )

    return make


def _plain(
    model: Any, micro_batches: MicroBatches, no_sync: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Contestant:
    """Returns a loop of PyTorch over a model that reduces gradients in its backward, outside of `no_sync`."""
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW, fused=True)

    def step() -> float:
        total = 0.0
        for number, batch in enumerate(micro_batches, 1):
            with no_sync() if number < len(micro_batches) else contextlib.nullcontext():
                loss = model(**batch).loss / len(micro_batches)
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Contestant(step)


def _ddp(args: argparse.Namespace, model: Any, micro_batches: MicroBatches) -> Contestant:
    replica = nn.parallel.DistributedDataParallel(model)
    return _plain(replica, micro_batches, replica.no_sync)


def _fsdp2(args: argparse.Namespace, model: Any, micro_batches: MicroBatches) -> Contestant:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (args.ranks,))
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    @contextlib.contextmanager
    def no_sync() -> Any:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return _plain(model, micro_batches, no_sync)


def _deepspeed(stage: int) -> Callable[..., Contestant]:
    def make(args: argparse.Namespace, model: Any, micro_batches: MicroBatches) -> Contestant:
        deepspeed = importlib.import_module("deepspeed")
        settings = {
            "train_micro_batch_size_per_gpu": args.batch_size,
            "gradient_accumulation_steps": args.micro_batches,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {**_ADAMW, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 1 << 30,
        }
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]

        def step() -> float:
            total = 0.0
            for batch in micro_batches:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                total += float(loss.detach()) / len(micro_batches)
            return total

        return Contestant(step)

    return make


CONTENDERS: dict[str, Callable[..., Contestant]] = {
    **{f"stage {stage}": _engine(stage, "none") for stage in range(4)},
    "stage 0 whole": _engine(0, "none", whole=True),
    "stage 3 nvme": _engine(3, "nvme"),
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    **{f"deepspeed {stage}": _deepspeed(stage) for stage in (1, 2, 3)},
}

if __name__ == "__main__":
    main()
