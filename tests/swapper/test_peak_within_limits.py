"""A hard limit is known before it kills: the sum of a start bounds the peak, and a limit below it is our error."""

from __future__ import annotations

import ctypes
import json
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

import offload
from bench.memory_limit import MemoryLimit
from offload import testing
from offload.aio.memory import release_heap
from offload.engine.setup import start
from offload.errors import BudgetError
from offload.losses import chunk_loss_of
from offload.planner.predict_run import step_of
from offload.sizes import MIB
from tests.support import models
from tests.support.oracle import processes
from tests.support.processes.memory_limit import memory_limit
from tests.support.processes.process_measures import resident
from tests.swapper.test_memory import forked

HIDDEN, TOKENS = 64, 16


def llama(words: int, tied: bool) -> Any:
    sizes = models.WIDTHS | {"hidden_size": HIDDEN, "intermediate_size": 128, "vocab_size": words}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=tied, use_cache=False))


def settings(folder: Path, dtype: str, **budgets: Any) -> dict[str, Any]:
    disk = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
        "offload": {"device": "cpu", "durability": "none", **budgets},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
    }


def train(engine: Any, words: int, tokens: int, steps: int = 2) -> None:
    for step in range(steps):
        ids = torch.randint(words, (1, tokens), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def measured(folder: str, words: int, dtype: str, tied: bool, chunked: bool, share: int) -> dict[str, int]:
    """Trains with a device budget of `1 / share` of a table, and returns the base and the sum of the start."""
    table = words * HIDDEN * (2 if dtype == "bf16" else 4)
    content = settings(Path(folder), dtype, host_memory=170 * MIB, device_memory=table // share + MIB)
    with offload.init(content):
        model = llama(words, tied)
    step = step_of(model, content, TOKENS, {}, chunked_loss=chunked)
    if chunked:
        chunk_loss_of(model)
    # Pages of libraries are the kernel's to take back. How many a first step maps differs between installations.
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    llama(64, tied).to(torch.bfloat16 if dtype == "bf16" else torch.float32)(input_ids=ids, labels=ids).loss.backward()
    release_heap(for_good=True)  # as the guard does where a limit is near
    base = resident()
    engine = start(model=model, config=content, beside=step.beside).engine
    train(engine, words, TOKENS)
    planned = engine.memory_report()["planned"]
    engine.destroy(remove=True)
    return {"base": base, "planned": sum(planned.values())}


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("words", [32_000, 128_000])
@pytest.mark.parametrize(("tied", "chunked"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("share", [1, 8])
def test_the_sum_of_a_start_bounds_the_peak(
    words: int, dtype: str, tied: bool, chunked: bool, share: int, tmp_path: Path
) -> None:
    """With whole tables, and with tables in pieces."""
    result, peak = forked(measured, str(tmp_path), words, dtype, tied, chunked, share)
    print(f"peak {(peak - result['base']) / MIB:.0f} MiB above the base, planned {result['planned'] / MIB:.0f} MiB")
    assert peak <= result["base"] + result["planned"]


def test_a_limit_below_the_sum_is_an_error_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, limit = 300 * MIB, 360 * MIB
    files = {
        "/proc/self/cgroup": "0::/outer/inner",
        "/sys/fs/cgroup/outer/memory.max": str(limit),
        "/sys/fs/cgroup/outer/memory.current": str(used),
        "/sys/fs/cgroup/outer/inner/memory.max": "max",
    }
    testing.replace(monkeypatch, "machine.system_file", lambda path: files.get(path, ""))
    folder = tmp_path / "swap"
    with offload.init(settings(folder, "bf16")):
        model = llama(262_144, tied=True)
    with pytest.raises(BudgetError, match=r"the cgroup /outer of 360\.0 MiB leaves 60\.0 MiB: 42\.\d MiB of"):
        offload.initialize(model=model, config=settings(folder, "bf16"))
    assert not folder.exists()
    for limit, in_pieces in ((500 * MIB, True), (800 * MIB, False)):
        files["/sys/fs/cgroup/outer/memory.max"] = str(limit)
        engine = offload.initialize(model=model, config=settings(folder, "bf16"))[0]
        assert sum(engine.memory_report()["planned"].values()) <= limit - used, "default budgets have shrunk"
        assert any("pieces of rows" in line for line in engine.notices) is in_pieces
        if in_pieces:
            engine.destroy(remove=True)
            with offload.init(settings(folder, "bf16")):
                model = llama(262_144, tied=True)
    files["/sys/fs/cgroup/outer/memory.current"] = str(limit - used)
    with pytest.raises(BudgetError, match="this batch has no room: the cgroup /outer"):
        train(engine, 262_144, 200, 1)
    train(engine, 262_144, 1, 1)  # a smaller batch follows
    engine.destroy(remove=True)


class Counts(ctypes.Structure):
    """See mallinfo(3)."""

    _fields_ = [(name, ctypes.c_int) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")]
    _fields_ += [(name, ctypes.c_int) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")]


def maps_large_blocks() -> bool:
    """Returns True if malloc maps a block of 8 MiB by itself, and so gives it back as soon as it is freed."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.mallinfo.restype = ctypes.c_void_p, Counts
    libc.free(ctypes.c_void_p(libc.malloc(24 << 20)))  # else a block of this size is from the heap from here on
    before = libc.mallinfo().hblks
    block = ctypes.c_void_p(libc.malloc(8 << 20))
    mapped = libc.mallinfo().hblks > before
    libc.free(block)
    return bool(mapped)


def maps_after_a_batch(folder: str, free: int) -> bool:
    """Returns `maps_large_blocks()` after a batch that has found `free` bytes of memory."""
    files = {
        "/proc/self/cgroup": "0::/outer",
        "/sys/fs/cgroup/outer/memory.max": str(1 << 40),
        "/sys/fs/cgroup/outer/memory.current": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "machine.system_file", lambda path: files.get(path, ""))
        content = settings(Path(folder), "fp32", host_memory=170 * MIB, device_memory=4 * MIB)
        engine = offload.initialize(model=llama(8192, tied=False), config=content)[0]
        files["/sys/fs/cgroup/outer/memory.max"] = str(free)
        train(engine, 8192, 256, 1)
        engine.destroy(remove=True)
    return maps_large_blocks()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo"), reason="glibc's malloc alone")
def test_malloc_keeps_no_large_block_once_a_batch_takes_most_of_what_is_free(tmp_path: Path) -> None:
    # Both budgets, gradients and the logits take 80 MiB; what malloc may keep has no room beside them.
    near, far = (forked(maps_after_a_batch, str(tmp_path), free)[0] for free in (90 * MIB, 1 << 40))
    assert near and not far


def ends(group: MemoryLimit, folder: Path, words: int, dtype: str, tokens: int, tied: bool) -> None:
    group.enter()
    content = settings(folder, dtype)
    try:
        with offload.init(content):
            model = llama(words, tied)
        train(offload.initialize(model=model, config=content)[0], words, tokens)
        how = "trained"
    except BudgetError as error:
        how = str(error)
    (folder / "end.json").write_text(json.dumps(how))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(12))
def test_any_limit_ends_in_steps_or_in_an_error(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    words, dtype, tied = draw.choice([32_000, 128_000, 262_144]), draw.choice(["fp32", "bf16"]), draw.random() < 0.5
    tokens, limit = draw.choice([4, 64, 256]), draw.randrange(200, 900) * MIB
    if psutil.virtual_memory().available < limit:
        pytest.skip(f"needs {limit / MIB:.0f} MiB of free RAM")
    with memory_limit(limit) as group:
        process = processes().Process(target=ends, args=(group, tmp_path, words, dtype, tokens, tied))
        process.start()
        process.join()
    how = json.loads((tmp_path / "end.json").read_text()) if process.exitcode == 0 else "killed"
    print(words, dtype, tied, tokens, limit // MIB, how)
    assert process.exitcode == 0, f"{words} words in {dtype}, {tokens} tokens, {limit / MIB:.0f} MiB: {how}"
