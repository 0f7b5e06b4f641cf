"""Tokens a second of a model scored from its files, against its bound: `python -m bench.score FOLDER`.

The bound is the larger of two times, measured in the same run and in turns with the scoring: the bytes of the files
over the drive, read by the queue past the page cache; and the same forwards of the plain model in memory. `over_bound`
is the median of the ratios within a round. The weights are read once a round, whatever `--micro-batches` says; the
first round, which does not count, reads them three times.

`--layers N` builds a Llama of N layers of 13 million parameters in place of a preset, so that the files are many times
the budgets (`files_over_budgets`), which have room for three layers.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import transformers

import offload
from bench.measure import in_process, options, report
from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.bench.measure import median_ratio, random_ids, resident, seconds_of
from offload.losses import chunk_loss_of
from offload.presets import build
from offload.sizes import MIB

_CHUNK = 32 * MIB
"""Bytes of a request of the drive's own measurement."""
_IN_FLIGHT = 4


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=256, rounds=5)
    parser.add_argument("--micro-batches", type=int, default=8, help="batches that share a pass over the weights")
    parser.add_argument("--layers", type=int, help="layers of a Llama that is built in place of --model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    args = parser.parse_args(arguments)
    name = args.model if args.layers is None else f"llama-of-{args.layers}"
    folder = args.folder / f"bench-score-{name}-{args.dtype}"
    if not folder.is_dir():
        in_process(_write, args.model, args.layers, args.dtype, folder)
    files = sorted(folder.glob("*.safetensors"))
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    base = resident()
    model = offload.load_pretrained(transformers.AutoModelForCausalLM, folder)
    for scorer in (plain, model):
        chunk_loss_of(scorer, evaluation=True, by_row=True)
    engine = offload.inference(model, {"offload": {"device": "cpu"}})
    shape = (args.batch_size, args.seq_len)
    batches = [random_ids(shape, model.config.vocab_size, seed) for seed in range(args.micro_batches)]

    def compute() -> list[torch.Tensor]:
        with torch.no_grad():
            return [plain(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches]

    def score() -> list[torch.Tensor]:
        return engine.map(lambda ids: engine(input_ids=ids, labels=ids, use_cache=False).loss, batches)

    assert all(map(torch.equal, compute(), score())), "the scores are those of the plain model"
    read, seconds = engine.io_bytes().read, []
    for _ in range(args.rounds):
        seconds.append((seconds_of(lambda: _read(files)), seconds_of(compute), seconds_of(score)))
    drive, in_memory, scored = map(list, zip(*seconds, strict=True))
    bound = [max(pair) for pair in zip(drive, in_memory, strict=True)]
    file_nbytes, budgets = sum(path.stat().st_size for path in files), engine.host_memory + engine.device_memory
    tokens = args.batch_size * args.seq_len * args.micro_batches
    report(
        "score",
        {
            "model": name,
            "dtype": args.dtype,
            "tokens": tokens,
            "tokens_per_second": tokens / statistics.median(scored),
            "over_bound": median_ratio(scored, bound),
            "seconds": statistics.median(scored),
            "drive_seconds": statistics.median(drive),
            "compute_seconds": statistics.median(in_memory),
            "file_bytes": file_nbytes,
            "read_bytes_a_round": (engine.io_bytes().read - read) // args.rounds,
            "budgets": budgets,
            "files_over_budgets": file_nbytes / budgets,
            "rss_beyond_plain_model": resident() - base,
            "limit": engine.pass_seconds().limit,
        },
    )
    engine.destroy()


def _write(name: str, layers: int | None, dtype: str, folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    model: Any
    if layers is None:
        model = build(name)
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=8192)
        )
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _read(files: list[Path]) -> None:
    """Reads all files, past the page cache, with several requests in flight."""
    buffers = [aligned_empty(_CHUNK) for _ in range(_IN_FLIGHT)]
    with IoQueue() as queue:
        flights: list[Any] = []
        for path in files:
            with DirectFile(path, writable=False) as file:
                for number, start in enumerate(range(0, file.size(), _CHUNK)):
                    if len(flights) == _IN_FLIGHT:
                        flights.pop(0).wait()
                    part = buffers[number % _IN_FLIGHT][: min(_CHUNK, file.size() - start)]
                    flights.append(queue.read(file, start, part))
                while flights:
                    flights.pop(0).wait()


if __name__ == "__main__":
    main()
