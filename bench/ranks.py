"""A step on several ranks, stage by stage, against DDP, FSDP2 and DeepSpeed: `python -m bench.ranks FOLDER`.

Each contender has a process for each rank, and all processes meet over gloo on this machine. Contenders take turns:
the engine in ZeRO stages 0 to 3 in memory with divided states, in stage 0 with whole states on each rank (reductions
beside the backward) and in stage 3 on disk; DistributedDataParallel; `fully_shard`; DeepSpeed in
ZeRO stages 1 to 3, where it is installed. All have the same weights, tokens and number of steps, in fp32 with AdamW,
no clip and no dropout; a micro-batch that does not end a step is not reduced where a library can leave that out. Losses
differ by roundings. Bar: 1.1 times the fastest of the others, in memory. A contender that fails is reported with its
error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
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
from bench.measure import median_ratio, options, random_ids, report, seconds, settings_for
from offload.distributed.process_group import Communication
from offload.presets import build

_ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
_PATIENCE = 300
"""Seconds that a contender may take for its start or for a turn."""


class Contestant(NamedTuple):
    """A library on one rank."""

    step: Callable[[], float]
    """Trains a step, and returns the mean loss of its micro-batches on this rank."""
    finish: Callable[[], Any]
    """Returns when all work of the steps so far is done."""
    sent: Callable[[], Communication]
    """What this rank has sent so far; nothing where it is not counted."""
    end: Callable[[], Any]


class Turn(NamedTuple):
    """A turn on one rank."""

    seconds_a_step: float
    loss: float
    """Of the last step."""
    sent: Communication
    """In the steps that count."""


class Contender:
    """The processes of one library in one round, which work only during their turns."""

    def __init__(self, given: argparse.Namespace, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name, self.error = name, ""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        pipes = [context.Pipe() for _ in range(given.ranks)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_take_turns, args=(theirs, given, name, rank, port), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def await_start(self) -> None:
        """Waits until each rank is ready, or one has failed."""
        self._hear()

    def turn(self) -> list[Turn]:
        """Returns the turn of each rank; nothing from a contender that has failed, now or before."""
        if not self.error:
            with contextlib.suppress(BrokenPipeError):  # of a process that has died, which is heard
                for pipe in self._pipes:
                    pipe.send(True)
        return self._hear()

    def _hear(self) -> list[Any]:
        """Returns what each rank says. After an error of one, all are ended, since the others would wait for it."""
        said = list[Any]()
        for pipe in self._pipes:
            if self.error:
                break
            try:
                said.append(pipe.recv() if pipe.poll(_PATIENCE) else f"no answer within {_PATIENCE} s")
            except EOFError:
                said.append("the process has died")
            if isinstance(said[-1], str):
                self.error = said[-1]
                self._kill()
        return [] if self.error else said

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def end(self) -> None:
        """Ends the processes; an engine removes its swap files."""
        for pipe in self._pipes if not self.error else []:
            pipe.send(False)
        for process in self._processes:
            process.join()


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=128, rounds=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn that count")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="a list of contenders, with commas")
    given = parser.parse_args(arguments)
    names = given.only.split(",")
    taken: dict[str, list[list[Turn]]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    for _ in range(given.rounds):
        for name in names:
            if name in errors:
                continue
            # Processes of one contender at a time: all of them at once may need more than the machine's memory.
            contender = Contender(given, name)
            contender.await_start()
            contender.turn()  # records the order of uses, and is not counted
            turns = contender.turn()
            contender.end()
            if contender.error:
                errors[name] = contender.error
            else:
                taken[name].append(turns)
    figures: dict[str, Any] = {
        "model": given.model,
        "ranks": given.ranks,
        "tokens_per_micro_batch": given.batch_size * given.seq_len,
        "micro_batches": given.micro_batches,
    }
    report("ranks", figures | _results(taken, errors, given.steps))


def _results(taken: dict[str, list[list[Turn]]], errors: dict[str, str], steps: int) -> dict[str, Any]:
    """Returns the figures of each contender, or its error, with its time over that of the fastest other library."""
    took = {name: [max(turn.seconds_a_step for turn in turns) for turns in rounds] for name, rounds in taken.items()}
    peers = [name for name in taken if name not in errors and not name.startswith("stage")]
    best = min(peers, key=lambda name: statistics.median(took[name]), default=None)
    found: dict[str, Any] = {"fastest_other": best}
    for name, rounds in taken.items():
        if name in errors:
            found[name] = {"failed": errors[name]}
            continue
        last = rounds[-1]
        row: dict[str, Any] = {
            "seconds": round(statistics.median(took[name]), 4),
            "loss": round(statistics.mean(turn.loss for turn in last), 6),
        }
        if best is not None:
            row["over_fastest_other"] = round(median_ratio(took[name], took[best]), 3)
        if name.startswith("stage"):
            row["sent_a_step"] = {
                kind: {"collectives": sent.collectives / steps, "nbytes": sent.nbytes / steps}
                for kind, sent in last[0].sent._asdict().items()
                if sent.collectives
            }
        found[name] = row
    return found


# -- in a process of its own --------------------------------------------------------------------------


def _take_turns(pipe: Connection, given: argparse.Namespace, name: str, rank: int, port: int) -> None:
    """Makes the contestant of this rank, says so, and takes a turn for each True that comes; says its error."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": given.ranks, "LOCAL_WORLD_SIZE": given.ranks}
    os.environ |= {key: str(value) for key, value in here.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // given.ranks))
    try:
        dist.init_process_group("gloo")
        contestant = CONTENDERS[name](given, _micro_batches(given, rank))
        pipe.send(True)
        while pipe.recv():
            pipe.send(_turn(contestant, given.steps))
        contestant.end()
        dist.destroy_process_group()
    except Exception as error:  # the parent reports it
        pipe.send(f"{type(error).__name__}: {error}")


def _turn(contestant: Contestant, steps: int) -> Turn:
    """Trains some steps behind one that does not count, into which the update of the last turn may run."""
    contestant.step()
    before, losses = contestant.sent(), list[float]()
    took = seconds(lambda: losses.extend(contestant.step() for _ in range(steps)))
    sent = contestant.sent().since(before)
    contestant.finish()
    return Turn(took / steps, losses[-1], sent)


def _micro_batches(given: argparse.Namespace, rank: int) -> list[dict[str, torch.Tensor]]:
    """Returns the micro-batches of each step of this rank."""
    size, vocabulary = (given.batch_size, given.seq_len), _model(given.model).config.vocab_size
    found = [random_ids(size, vocabulary, rank * given.micro_batches + n) for n in range(given.micro_batches)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def _model(name: str) -> Any:
    """Returns the model, with the same weights for each contender, in fp32 and without dropout."""
    torch.manual_seed(0)
    model = build(name).float()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _engine(stage: int, tier: str, whole: bool = False) -> Callable[..., Contestant]:
    """Returns a function that makes an engine of ours, whose ranks each hold all states if `whole`, as DDP's do.

    Otherwise states are divided, in stage 0 too.
    """

    def make(given: argparse.Namespace, micro_batches: list[dict[str, torch.Tensor]]) -> Contestant:
        settings = settings_for(given.folder, f"bench-ranks-{stage}-{tier}" + "-whole" * whole, tier)
        settings |= {"bf16": {"enabled": False}, "gradient_clipping": 0}
        settings["optimizer"]["params"] = _ADAMW
        settings["zero_optimization"]["stage"] = stage
        settings["zero_optimization"] |= {"overlap_comm": True} if whole else {"mics_shard_size": -1}
        settings["gradient_accumulation_steps"] = given.micro_batches
        settings["train_micro_batch_size_per_gpu"] = given.batch_size
        model = _model(given.model)
        # Room for all units at once, as the others have it.
        if tier == "none":
            settings["offload"]["device_memory"] = 6 * sum(each.nbytes for each in model.parameters()) + (1 << 26)
        engine = offload.initialize(model=model, config=settings)[0]
        return Contestant(
            step=lambda: float(engine.train_batch(iter(micro_batches))),
            finish=engine.synchronize,
            sent=engine.communication,
            end=lambda: engine.destroy(remove=True),
        )

    return make


def _plain(
    model: Any,
    micro_batches: list[dict[str, torch.Tensor]],
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]],
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

    return Contestant(step, finish=dist.barrier, sent=Communication, end=lambda: None)


def _ddp(given: argparse.Namespace, micro_batches: list[dict[str, torch.Tensor]]) -> Contestant:
    model = nn.parallel.DistributedDataParallel(_model(given.model))
    return _plain(model, micro_batches, model.no_sync)


def _fsdp2(given: argparse.Namespace, micro_batches: list[dict[str, torch.Tensor]]) -> Contestant:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _model(given.model), init_device_mesh("cpu", (given.ranks,))
    for blocks in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
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
    """Returns a function that makes an engine of DeepSpeed, which is imported only there."""

    def make(given: argparse.Namespace, micro_batches: list[dict[str, torch.Tensor]]) -> Contestant:
        deepspeed = importlib.import_module("deepspeed")
        params = {**_ADAMW, "torch_adam": True}
        settings = {
            "train_micro_batch_size_per_gpu": given.batch_size,
            "gradient_accumulation_steps": given.micro_batches,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": params},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 1 << 30,
        }
        model = _model(given.model)
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]

        def step() -> float:
            total = 0.0
            for batch in micro_batches:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                total += float(loss.detach()) / len(micro_batches)
            return total

        return Contestant(step, finish=dist.barrier, sent=Communication, end=lambda: None)

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
