"""Memory of activations where ranks share each sequence: `torchrun --nproc-per-node 2 -m bench.sequence`.

Each rank trains the same Llama twice, on rows of its own and with `sequence_parallel_size` of all ranks, in ZeRO stage
3 with all states in memory. Measured is what a forward leaves for the backward, and the peak of a step, both as
resident bytes above those before the step. Bar: what whole sequences take, divided by the ranks, and a tenth of that.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import offload
from bench.measure import report
from offload.deepspeed.comm import init_distributed

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
"""Options of glibc's `mallopt`."""


def resident(field: str) -> int:
    """Returns the bytes of a field of this process's status: VmRSS, or VmHWM for their peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def trained(size: int, tokens: int, steps: int) -> dict[str, Any]:
    """Trains with `size` ranks a sequence; returns the medians over the steps, and what a rank sent in one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=tokens,
        )
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
        "offload": {"device": "cpu"},
    }
    engine = offload.initialize(model=model, config=config).engine
    torch.manual_seed(dist.get_rank() // size)
    found, before_all = [], engine.communication()
    for _ in range(steps):
        ids = torch.randint(1024, (1, tokens))
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # begins a new peak
        before, began = resident("VmRSS"), time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        kept = resident("VmRSS") - before
        engine.backward(loss)
        engine.step()
        engine.synchronize()
        found.append((kept, resident("VmHWM") - before, time.perf_counter() - began))
    sent = engine.communication().since(before_all).sequence
    engine.destroy()
    kept, peak, seconds = (statistics.median(column) for column in zip(*found, strict=True))
    return {
        "ranks_a_sequence": size,
        "forward_bytes": int(kept),
        "peak_bytes": int(peak),
        "seconds": seconds,
        "sent_bytes_a_step": sent.nbytes // steps,
    }


def main() -> None:
    """Measures both, and writes the result of the first rank to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    # Freed memory goes back at once, so that resident bytes are those in use.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 65536)
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    torch.set_num_threads(1)
    init_distributed()
    rows = [trained(size, options.tokens, options.steps) for size in (1, dist.get_world_size())]
    if dist.get_rank() == 0:
        report("sequence", {"tokens": options.tokens, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
