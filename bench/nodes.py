"""Two nodes of two ranks behind a slow cable: bytes over it and seconds a step, with a secondary partition and without.

    python -m bench.nodes --rate 200mbit --rounds 3 --steps 2          (as root)

The nodes are two network namespaces, and the cable between them lets `--rate` through in each direction (`tc`'s token
bucket). Bytes are those of the kernel's counters at one end, both directions and all headers included, so they are of
what the backend sends, rings and all. The model is a GPT-2 of eight blocks of a width of 256, 6.4M parameters in bf16,
in host memory, with room for one unit on the device: each block is gathered for its forward and for its backward.
Both ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import offload
from bench.measure import report

_RANKS, _NODE = 4, 2
_COUNTERS = Path("/sys/class/net/eth0/statistics")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", default="200mbit", help="of the cable, in each direction")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn that count")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        _train(given)
        return
    names = [f"node{number}-{os.getpid()}" for number in range(_RANKS // _NODE)]
    try:
        _connect(names, given.rate)
        command = [sys.executable, "-m", "bench.nodes", *(sys.argv[1:] if arguments is None else arguments), "--rank"]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", names[rank // _NODE], *command, str(rank)],
                env=os.environ | _meeting(rank),
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(_RANKS)
        ]
        output, _ = ranks[0].communicate()
        if any(process.wait() for process in ranks):
            raise SystemExit("a rank has failed")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    report("nodes", {"rate": given.rate, "micro_batches": given.micro_batches, **json.loads(output.splitlines()[-1])})


def _connect(names: list[str], rate: str) -> None:
    """Makes two namespaces whose interfaces `eth0` are the ends of one cable."""

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    ends = [f"na{os.getpid()}", f"nb{os.getpid()}"]
    run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
        run("ip", "netns", "add", name)
        run("ip", "link", "set", end, "netns", name, "name", "eth0")
        run("ip", "-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            run("ip", "-n", name, "link", "set", interface, "up")
        bucket = ("tbf", "rate", rate, "burst", "256k", "latency", "200ms")
        run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *bucket)


def _meeting(rank: int) -> dict[str, str]:
    """Returns the variables by which a rank finds the others."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % _NODE),
        "WORLD_SIZE": str(_RANKS),
        "LOCAL_WORLD_SIZE": str(_NODE),
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }


def _train(given: argparse.Namespace) -> None:
    """Takes the turns of one rank; rank 0 prints the figures as one line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[dict[str, Any]]] = {"without": [], "secondary": []}
    for _ in range(given.rounds):
        found["without"].append(_turn(given, 1))
        found["secondary"].append(_turn(given, _NODE))
    dist.destroy_process_group()
    if given.rank == 0:
        print(json.dumps({way: _summary(turns) for way, turns in found.items()}), flush=True)


def _turn(given: argparse.Namespace, node: int) -> dict[str, Any]:
    """Trains a step that does not count and `given.steps` that do, with a new engine."""
    torch.manual_seed(0)
    sizes = {"n_layer": 8, "n_embd": 256, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    engine = offload.initialize(
        model=transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False)),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": given.micro_batches,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": node,
                "stage3_max_live_parameters": 1,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            },
            "offload": {"device": "cpu"},
        },
    )[0]
    ids = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(given.rank))
    losses, begin, before, sent = [], 0.0, 0, engine.communication()
    for step in range(given.steps + 1):
        if step == 1:
            dist.barrier()
            begin, before, sent = time.perf_counter(), _crossed(), engine.communication()
        for _ in range(given.micro_batches):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        losses.append(engine.mean(float(loss.detach())))
    dist.barrier()
    seconds, crossed = time.perf_counter() - begin, _crossed() - before
    kinds = engine.communication().since(sent)
    engine.destroy(remove=True)
    return {
        "seconds": seconds / given.steps,
        "cable_mb": crossed / given.steps / 1e6,
        "loss": losses[-1],
        **{
            kind: round(getattr(kinds, kind).nbytes / given.steps / 1e6, 3)
            for kind in ("weights", "node_weights", "gradients")
        },
    }


def _crossed() -> int:
    """Returns the bytes that have passed this end of the cable, in both directions."""
    return sum(int((_COUNTERS / f"{way}_bytes").read_text()) for way in ("rx", "tx"))


def _summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of the last turn, with medians of seconds and of bytes."""
    medians = {name: round(statistics.median(turn[name] for turn in turns), 3) for name in ("seconds", "cable_mb")}
    return turns[-1] | medians | {"each": [round(turn["seconds"], 3) for turn in turns]}


if __name__ == "__main__":
    main()
