"""Codes of 8 bits that ranks send: the seconds that a CPU takes for them, and losses with and without them.

    python -m bench.codes FOLDER --steps 50

The first part quantizes and dequantizes 64M values in bf16 and in fp32, beside a copy of them. From the least of the
rounds follows the bandwidth of a network below which codes are faster: there the bytes saved take as long as the codes.
The second part trains GPT-2 and Llama of two blocks on Python's own library, byte by byte, on two ranks over gloo:
exact, and with codes of weights, of gradients and of both. All have the same initial weights and rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import offload
from bench.measure import report
from bench.moments import corpus, loss
from offload.kernels.blocks import BLOCK_FORMATS, dequantize, quantize

_NUMEL = 1 << 26
_FORM = BLOCK_FORMATS["int8"]
_SHARE = _FORM.nbytes / _FORM.values
"""Bytes of a value's code, its part of the scale included."""
WAYS = {"exact": "", "weights": "weights", "gradients": "gradients", "both": "weights gradients"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--numel", type=int, default=_NUMEL)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    given = parser.parse_args(arguments)
    rates = {str(dtype).removeprefix("torch."): _rates(dtype, given) for dtype in (torch.bfloat16, torch.float32)}
    losses = {name: {way: trained(given, name, words) for way, words in WAYS.items()} for name in MODELS if given.steps}
    found: dict[str, Any] = {"values": given.numel, "rates": rates, "steps": given.steps, "width": given.width}
    for name, each in losses.items():
        exact = each["exact"]
        found[name] = {
            way: {
                "last": round(statistics.mean(values[-5:]), 4),
                "farthest": round(max(abs(a / b - 1) for a, b in zip(values, exact, strict=True)), 5),
            }
            for way, values in each.items()
        }
    report("codes", found)


# -- seconds ------------------------------------------------------------------------------------------


def _rates(dtype: torch.dtype, given: argparse.Namespace) -> dict[str, float]:
    """Returns nanoseconds a value, and for two ranks the bandwidth, in Gbit/s, below which codes are faster."""
    values = torch.randn(given.numel).to(dtype)
    other, codes = torch.empty_like(values), torch.empty(_FORM.stored_nbytes(given.numel), dtype=torch.uint8)
    sums = torch.empty(given.numel)
    tasks: dict[str, Callable[[], Any]] = {
        "copy": lambda: other.copy_(values),
        "quantize": lambda: quantize(_FORM, values, codes),
        "dequantize": lambda: dequantize(_FORM, codes, other),
        "dequantize_to_fp32": lambda: dequantize(_FORM, codes, sums),
    }
    took: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(given.rounds + 1):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            if number:  # the first one touches the memory
                took[name].append((time.perf_counter() - begin) / given.numel * 1e9)
    found = {name: min(each) for name, each in took.items()}  # what other work takes from it is none of its own
    saved = (values.element_size() - _SHARE) / 2  # sent by each of two ranks, for each value of the whole
    # A rank makes codes of its half of the weights and values of all; of gradients codes of all, and values as many.
    weights = found["quantize"] / 2 + found["dequantize"]
    gradients = found["quantize"] + found["dequantize_to_fp32"]
    return {name: round(each, 3) for name, each in found.items()} | {
        "weights_gbit_s": round(saved / weights * 8, 2),
        "gradients_gbit_s": round(saved / gradients * 8, 2),
    }


# -- losses -------------------------------------------------------------------------------------------


def _gpt2(width: int) -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": width, "n_head": 4, "vocab_size": 256, "n_positions": 128}
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )
    return model


def _llama(width: int) -> nn.Module:
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            max_position_embeddings=128,
            use_cache=False,
        )
    )
    return model


MODELS = {"gpt2": _gpt2, "llama": _llama}


def trained(given: argparse.Namespace, name: str, words: str) -> list[float]:
    """Returns the mean loss of two ranks in each step; `words` follow `zero_quantized_` in the keys that are on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    out = given.folder / "losses.json"
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_train, args=(rank, port, given, name, words, out)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    found: list[float] = json.loads(out.read_text())
    out.unlink()
    return found


def _train(rank: int, port: int, given: argparse.Namespace, name: str, words: str, out: Path) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in here.items()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    zero = {"stage": 3, **{f"zero_quantized_{word}": True for word in words.split()}}
    engine = offload.initialize(
        model=MODELS[name](given.width),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": given.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
            "zero_optimization": zero,
            "offload": {"device": "cpu"},
        },
    )[0]
    text, chance, losses = corpus(), torch.Generator().manual_seed(rank), []
    for _ in range(given.steps):
        found = loss(engine.module, text, chance)
        engine.backward(found)
        losses.append(engine.mean(float(found.detach())))
        engine.step()
    if rank == 0:
        out.write_text(json.dumps(losses))
    engine.destroy(remove=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
