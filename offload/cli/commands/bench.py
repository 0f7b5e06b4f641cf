"""`offload bench`: speed of the components and of training, each compared with a bound or a peer in the same run.

The benchmarks import torch, so each command imports its own on use: `offload --help` must stay fast.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from offload.cli.console import BAD_INPUT, FAILED, Json, echo, errors, make_table, status_line
from offload.cli.options import Command, HelpContext, takes_options
from offload.cli.signals import signals
from offload.errors import ConfigError
from offload.fileio import check_writable
from offload.notices import folder_to_make
from offload.options import argument, checked, dtypes, option, switch
from offload.sizes import format_size, parse_count, parse_size


class _Benchmarks(TyperGroup):
    context_class = HelpContext


bench = typer.Typer(
    cls=_Benchmarks,
    help="Measure components and training. Each against a bound or a peer in the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def check_plot(path: Path | None) -> None:
    """Raises `ConfigError` if a plot cannot be written to `path`, before minutes of measuring."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'offload[bench]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot: expected a file that ends in .png, .svg or .pdf, got {path}")
    check_writable(path, "--plot")


@bench.command("io", cls=Command)
def bench_io(
    paths: list[str] = typer.Argument(help="Folders, one for each drive: one file over all of them."),
    backend: list[str] | None = typer.Option(
        None,
        help="io_uring, libaio, threads; for comparison aiofiles, python-libaio. May repeat. [default: all of ours]",
    ),
    op: list[str] | None = typer.Option(None, help="write, read, mixed; may repeat. [default: all]"),
    block_size: list[str] | None = typer.Option(
        None, help="Bytes of a block; may repeat. [default: 1MiB, 4MiB]", **checked(parse_size)
    ),
    depth: list[int] | None = typer.Option(None, help="Blocks in flight; may repeat. [default: 8, 32]"),
    size: str = typer.Option("1GiB", help="Bytes of the file, and of memory.", **checked(parse_size)),
    request: str = typer.Option("16MiB", help="Bytes of one request to the queue.", **checked(parse_size)),
    rounds: int = typer.Option(3, help="Rounds; each runs all contenders in turns."),
    fio: bool = typer.Option(True, help="Run fio beside, where it is installed."),
    plot: Path | None = typer.Option(None, metavar="FILE", help="Draw the result: .png, .svg or .pdf."),
    json_output: Json = False,
) -> None:
    """Measure reads, writes and both at once on a drive, beside fio.

    Example: offload bench io /mnt/nvme --size 4GiB --block-size 2MiB --depth 32
    """
    from rich.console import Console

    # Imported on use: the module imports torch, which would slow down every other command.
    from offload.bench import io
    from offload.hardware.info import machine

    console = Console(stderr=json_output, highlight=False)
    with errors(BAD_INPUT):
        check_plot(plot)
        plan = io.make_plan(
            paths,
            backends=backend or (),
            blocks=[parse_size(size) for size in block_size or ()],
            depths=depth or (),
            operations=op or (),
            nbytes=parse_size(size),
            request_bytes=parse_size(request),
            rounds=rounds,
            with_fio=fio,
        )
    with errors(FAILED), signals(), status_line(console) as tell:
        # Signals raise here, so that the benchmark's files are removed.
        rows = io.measure(plan, tell)
    if json_output:
        print(json.dumps(io.as_json(machine(), plan, rows)), flush=True)
    else:
        titles = ("op", "backend", "block", "depth", "GB/s", "of fio", "CPU s/GB", "p50 ms", "p99 ms")
        console.print(make_table(titles, map(_io_cells, rows)))
        # `make_plan` turns fio off if fio is not installed.
        if fio and not plan.with_fio:
            console.print("fio is not installed, so there is no ratio to it (Debian: apt install fio)")
    with errors(FAILED, {"--plot": plot}):
        if plot is not None:
            io.plot(rows, plot)


def _io_cells(row: Any) -> list[str]:
    return [
        row.op,
        row.backend,
        format_size(row.block_bytes),
        str(row.depth),
        f"{row.gb_per_s:.2f}",
        "" if row.of_fio is None else f"{row.of_fio:.2f}",
        f"{row.cpu_s_per_gb:.4f}",
        # Not every backend measures latencies.
        *("" if value is None else f"{value / 1e3:.2f}" for value in (row.p50_us, row.p99_us)),
    ]


@bench.command("adam", cls=Command)
def bench_adam(
    numel: str = typer.Option("64Mi", help="Parameters, as 64Mi or 250M.", **checked(parse_count)),
    dtype: list[str] | None = typer.Option(
        None, help="Weights: bf16, fp32, fp16; may repeat. [default: bf16]", **dtypes()
    ),
    grad_dtype: list[str] | None = typer.Option(None, help="Gradients; may repeat. [default: as weights]", **dtypes()),
    moments: list[str] | None = typer.Option(None, help="fp32, bf16, int8; may repeat. [default: fp32]"),
    threads: list[int] | None = typer.Option(None, help="May repeat. [default: 1 and all cores]"),
    isa: list[str] | None = typer.Option(None, help="scalar, avx2, avx512, neon; may repeat. [default: the best]"),
    rounds: int = typer.Option(7, help="Rounds; each runs all contenders in turns."),
    plot: Path | None = typer.Option(None, metavar="FILE", help="Draw the result: .png, .svg or .pdf."),
    json_output: Json = False,
) -> None:
    """Measure the AdamW step on the CPU. Beside memory, torch, and DeepSpeed where it is installed.

    Example: offload bench adam --numel 250M --threads 1 --threads 2
    """
    from rich.console import Console

    from offload.bench import adam
    from offload.hardware.info import machine

    console = Console(stderr=json_output, highlight=False)
    with errors(BAD_INPUT):
        check_plot(plot)
        count = parse_count(numel)
        cases = adam.cases(dtype or (), grad_dtype or (), threads or (), isa or (), moments or ())
    with errors(FAILED), signals(), status_line(console) as tell:
        # Arguments are checked by now: the user's input is not the cause of a later failure.
        rows = adam.measure(count, cases, rounds, tell)
    if json_output:
        print(json.dumps(adam.as_json(machine(), rows)), flush=True)
    else:
        titles = ("", "weight", "grad", "moment", "threads", "isa", "ms", "GB/s", "of probe", "Mparam/s")
        console.print(make_table(titles, map(_adam_cells, rows)))
    with errors(FAILED, {"--plot": plot}):
        if plot is not None:
            adam.plot(rows, plot)


def _adam_cells(row: Any) -> list[str]:
    kind = [row.name, row.weight_dtype, row.grad_dtype, row.moment_dtype, str(row.threads), row.isa]
    rates = [f"{row.ms:.1f}", f"{row.gb_per_s:.1f}", f"{row.of_probe:.2f}"]
    # Parameters per millisecond / 1e3 are millions of parameters per second.
    return [*kind, *rates, f"{row.numel / row.ms / 1e3:.0f}"]


@dataclass(frozen=True, kw_only=True)
class SwapOptions:
    """Options of `offload bench swap` as they are typed. None stands for an option that was not given."""

    paths: tuple[str, ...] = argument("Folders for swap files, one for each drive.")
    units: int = option("Layers of the simulated model.", default=16)
    unit_size: str = option(
        "Bytes of a layer's weights, two for each parameter.", default="64MiB", **checked(parse_size)
    )
    compute_ms: tuple[float, ...] = option(
        "Milliseconds that a layer computes in a forward; its backward takes twice as long. May repeat. [default: 50]",
        default=(),
    )
    accumulation: int = option("Micro-batches of a step.", default=1)
    weights: str = option("Tier of the weights: none, cpu, nvme.", default="nvme")
    states: str = option("Tier of the optimizer states: none, cpu, nvme.", default="nvme")
    durability: str = option(
        "step: two slots of all states; none: one, in place; auto: step where it fits.", default="auto"
    )
    host_memory: str | None = option("Host budget. [default: what is needed]", **checked(parse_size))
    device_memory: str | None = option("Device budget. [default: three layers]", **checked(parse_size))
    overlap: bool = option(
        "Run updates beside the next forward, or before it.", default=True, name="--overlap/--no-overlap"
    )
    busy: bool = switch("Keep a core busy for compute, as on a CPU.")
    in_memory: bool | None = option(
        "Measure compute by the same model in memory, or calculate it. [default: where it fits]",
        name="--in-memory/--no-in-memory",
    )
    steps: int = option("Steps of each round that count; two before them do not.", default=4)
    rounds: int = option("Rounds; each runs all contenders in turns.", default=3)
    backend: str = option("auto, io_uring, libaio, threads.", default="auto")
    block_size: str | None = option("Bytes of a block. [default: the backend's]", **checked(parse_size))
    depth: int | None = option("Blocks in flight. [default: the backend's]")
    probe_size: str = option(
        "Bytes of the file by which the drive is measured.", default="256MiB", **checked(parse_size)
    )


_SWAP_FIELDS = (
    *("units", "steps", "rounds", "accumulation", "weights", "states", "durability"),
    *("overlap", "busy", "in_memory", "backend", "depth"),
)
"""Options that are fields of the benchmark's plan as they are typed."""


@bench.command("swap", cls=Command)
@takes_options(SwapOptions)
def bench_swap(typed: SwapOptions, json_output: Json = False) -> None:
    """Measure how much paging hides behind compute. With a drive and two budgets, without a model.

    Example: offload bench swap /mnt/nvme --units 32 --unit-size 400MiB --compute-ms 100 --compute-ms 400
    """
    from rich.console import Console

    from offload.bench import swap
    from offload.hardware.info import machine

    console = Console(stderr=json_output, highlight=False)
    with errors(BAD_INPUT):
        plan = swap.make_plan(
            typed.paths,
            unit_bytes=parse_size(typed.unit_size),
            compute_ms=typed.compute_ms,
            host_memory=_size(typed.host_memory),
            device_memory=_size(typed.device_memory),
            block_bytes=_size(typed.block_size),
            probe_bytes=parse_size(typed.probe_size),
            **{name: getattr(typed, name) for name in _SWAP_FIELDS},
        )
    with errors(FAILED), signals(), status_line(console) as tell, _engines_silent():
        # A benchmark creates swap files: signals raise, so that the files are removed.
        result = swap.measure(plan, tell)
    if json_output:
        print(json.dumps(swap.as_json(machine(), plan, result)), flush=True)
        return
    for line in swap.heading(plan, result):
        console.print(line, soft_wrap=True)
    titles = ("ms/unit", "step", "compute", "I/O", "exposed", "hidden", "hidden %", "efficiency", "B/param")
    console.print(make_table(titles, map(_swap_cells, result.rows), right=0))
    for row in result.rows:
        console.print(swap.in_words(plan, row), soft_wrap=True)


def _size(text: str | None) -> int | None:
    return None if text is None else parse_size(text)


def _swap_cells(row: Any) -> list[str]:
    seconds = (row.step_seconds, row.compute_seconds, row.io_seconds, row.exposed_seconds, row.hidden_seconds)
    # Without I/O nothing can be hidden.
    percent = "" if row.hidden_percent is None else f"{row.hidden_percent:.0f}"
    cells = [f"{row.compute_ms:g}", *(f"{value:.2f}" for value in seconds), percent]
    return [*cells, f"{row.efficiency:.2f}", f"{row.bytes_per_parameter:.1f}"]


@contextlib.contextmanager
def _engines_silent() -> Iterator[None]:
    """Keeps lines of engines below an error away: they are on a config that the user has not written.

    Those that concern the drive are in the result.
    """
    loggers = [logging.getLogger(name) for name in ("offload", "offload.notices")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of `offload bench gpu` as they are typed. None stands for an option that was not given."""

    folder: str = argument("Folder for swap files, on the drive to measure.", default=".")
    budget_minutes: float = option("Minutes that the command may take.", default=8.0)
    output: Path = option("File for all figures, as JSON.", default=Path("bench-gpu.json"), metavar="FILE")
    model: str = option("Preset whose steps are timed.", default="llama-1b")
    batch_size: int | None = option("Sequences of a step. [default: as fit, at most 8]")
    seq_len: int | None = option("Tokens of a sequence. [default: as fit, 4096 at most]")
    micro_batches: int | None = option("Micro-batches of a step. [default: as the part has]")
    loop: str = option(
        "train_batch: the engine gets all micro-batches of a step, as from Trainer; micro_batches: engine, "
        "backward and step for each; both: one after the other.",
        default="train_batch",
    )
    moments: str | None = option("fp32, bf16, int8. [default: as the part has]")
    grad_dtype: str | None = option("Sums of gradients: fp32, bf16. [default: the engine's]", **dtypes())
    steps: int = option("Timed steps of a placement, fewer where time is short.", default=8)
    nbytes: str = option("Bytes of one copy.", default="256MiB", **checked(parse_size))
    device: str = option("cuda; cpu is a rehearsal that measures nothing of interest.", default="cuda")
    only: tuple[str, ...] = option("Only parts whose names begin with this; may repeat. [default: all]", default=())


@bench.command("gpu", cls=Command)
@takes_options(GpuOptions)
def bench_gpu(typed: GpuOptions, json_output: Json = False) -> None:
    """Measure a GPU in 8 minutes. Equal bits, copies, rates and steps in all placements, up to 13B in 24 GiB.

    Needs transformers: pip install 'offload[bench]'. Writes one file that docs/benchmarks/submit.md says how to send.

    Example: offload bench gpu /mnt/nvme
    """
    with errors(BAD_INPUT):
        _check_gpu_options(typed)
        from offload.bench.gpu import __main__ as gpu
        from offload.bench.gpu.parts import judge
        from offload.bench.gpu.report import words

        settings = gpu.GpuSettings(*(getattr(typed, name) for name in gpu.GpuSettings._fields))
        settings.check(typed.only)

    def tell(line: str) -> None:
        print(line, file=sys.stderr if json_output else sys.stdout, flush=True)

    with errors(FAILED):
        folder = Path(typed.folder)
        report = gpu.measure(settings, folder, typed.budget_minutes, typed.output, typed.only, tell)
    print(json.dumps(report) if json_output else f"\n{words(report)}\n\nall figures: {typed.output}")
    raise typer.Exit(judge(report["parts"]))


_CHOICES = {
    "loop": ("train_batch", "micro_batches", "both"),
    "moments": ("fp32", "bf16", "int8"),
    "grad_dtype": ("fp32", "bf16"),
}
"""Options of `bench gpu` that take one of a few words."""


def _check_gpu_options(typed: GpuOptions) -> None:
    """Raises `ConfigError` for options that would fail after minutes of measuring."""
    if typed.device not in ("cuda", "cpu"):
        raise ConfigError(f"expected --device cuda or cpu, got {typed.device!r}")
    if not Path(typed.folder).is_dir():
        raise ConfigError(f"there is no folder {folder_to_make(typed.folder)}")
    check_writable(typed.output, "--output")
    for name, choices in _CHOICES.items():
        if getattr(typed, name) not in (None, *choices):
            raise ConfigError(
                f"expected --{name.replace('_', '-')} of {', '.join(choices)}, got {getattr(typed, name)!r}"
            )
    numbers = {"batch-size": typed.batch_size, "seq-len": typed.seq_len, "micro-batches": typed.micro_batches}
    for name, value in {**numbers, "steps": typed.steps, "nbytes": parse_size(typed.nbytes)}.items():
        if value is not None and value < 1:
            raise ConfigError(f"expected --{name} of at least 1, got {value}")
    if not typed.budget_minutes > 0:
        raise ConfigError(f"expected --budget-minutes above 0, got {typed.budget_minutes:g}")


_LEAST_WIDTH = 180
"""Columns that the table may take."""


@dataclass(frozen=True, kw_only=True)
class TrainBenchOptions:
    """Options of `offload bench train` as they are typed. None stands for an option that was not given."""

    folder: Path = argument("Folder for swap files, on the drive to measure.")
    model: str = option("Preset that is trained.", default="gpt2-small")
    batch_size: int = option("Sequences of a micro-batch.", default=1)
    seq_len: int = option("Tokens of a sequence.", default=256)
    micro_batches: int = option(
        "Micro-batches of a step; with more than one layer-major order is measured too.", default=1
    )
    dtype: str = option("bf16, fp32; auto: the one that suits this machine.", default="auto", **dtypes())
    rounds: int = option("Rounds; each runs all contenders in turns.", default=5)
    steps: int = option("Steps of a turn that count; two before them do not.", default=3)
    recompute: bool = switch("Models compute their activations again in the backward.")
    gpu_memory: str | None = option(
        "GPU memory that each contender but plain may take, as 24GiB. [default: all]", **checked(parse_size)
    )
    threads: int | None = option("Threads of each contender. [default: all cores]")
    only: tuple[str, ...] = option(
        "Only contenders whose names begin with this, and plain; may repeat. [default: all]", default=()
    )
    plot: Path | None = option("Draw the result: .png, .svg or .pdf.", metavar="FILE")


@bench.command("train", cls=Command)
@takes_options(TrainBenchOptions)
def bench_train(typed: TrainBenchOptions, json_output: Json = False) -> None:
    """Measure training beside other packages. Plain PyTorch, offload in its placements, DeepSpeed, FSDP2 and torchao.

    Contenders: plain; offload none/none, cpu/cpu, cpu/nvme, nvme/nvme (weights/states), with several micro-batches
    also cpu/cpu layer-major and nvme/nvme layer-major; deepspeed cpu/cpu, cpu/nvme,
    nvme/nvme; fsdp2 cpu; torchao cpu. All train the same model on the same tokens, and losses are compared. Needs
    transformers: pip install 'offload[bench]'.

    Example: offload bench train /mnt/nvme --model gpt2-small --only offload --only deepspeed
    """
    from rich.console import Console

    from offload.bench.train import figures, loops, plan
    from offload.hardware.info import machine

    console = Console(stderr=json_output, highlight=False)
    with errors(BAD_INPUT):
        check_plot(typed.plot)
        names = ("model", "batch_size", "seq_len", "micro_batches", "dtype", "rounds", "steps", "recompute", "threads")
        options = {name: getattr(typed, name) for name in names}
        limit = _size(typed.gpu_memory)
        checked = plan.make_plan(typed.folder, **options, gpu_memory=limit, only=typed.only)
    with errors(FAILED), signals(), status_line(console) as tell:
        # Swap files are created: signals raise, so that the files are removed and the running contender ends.
        result = loops.measure(checked, tell)
    rows = figures.make_rows(checked, result)
    if json_output:
        print(json.dumps(figures.as_json(machine(), checked, result)), flush=True)
    else:
        for line in figures.heading(checked, result.rates):
            console.print(line, soft_wrap=True)
        # A pipe would be taken for 80 columns, and a table that is too wide loses the ends of its cells.
        console.width = max(console.width, _LEAST_WIDTH)
        cells = [figures.cells(row) for row in rows if row.turns]
        console.print(make_table(figures.TITLES, cells, right=1, no_wrap=True))
        for line in figures.remarks(rows, checked.dtype):
            console.print(line, soft_wrap=True)
    with errors(FAILED, {"--plot": typed.plot}):
        if typed.plot is not None:
            figures.plot(rows, typed.plot)


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """Options of `offload bench card` as they are typed. None stands for an option that was not given."""

    folder: Path = argument("Folder for swap files, on the drive to measure.")
    gpu_memory: str | None = option("GPU memory that may be taken, as 24GiB. [default: all]", **checked(parse_size))
    minutes: float = option("Minutes that the command may take.", default=12.0)
    only: tuple[str, ...] = option(
        "Only these: models, which are presets, text, peers; may repeat. [default: all]", default=()
    )
    output: Path | None = option("Write all figures to a file, as JSON.", metavar="FILE")


@bench.command("card", cls=Command)
@takes_options(CardOptions)
def bench_card(typed: CardOptions, json_output: Json = False) -> None:
    """Write a page about this machine. Which models it trains, how fast, what limits them, and what others do.

    A row a model, as the planner places it, beside its prediction and its slowest resource; where a step's time goes;
    DeepSpeed, FSDP2 and plain PyTorch in turns; losses on text, with a SIGKILL and a resume. Without a GPU the models
    are smaller. Needs transformers: pip install 'offload[bench]'.

    Example: offload bench card /mnt/nvme --gpu-memory 24GiB
    """
    with errors(BAD_INPUT):
        if typed.output is not None:
            check_writable(typed.output, "--output")
        limit = _size(typed.gpu_memory)
        from offload.bench import card, card_page

        plan = card.check(typed.folder, limit, typed.minutes, typed.only)
    with errors(FAILED), signals():
        # Signals raise here, so that the running process ends and the swap files are removed.
        report = card.measure(plan, typed.output, lambda line: echo(line, err=True))
    if json_output:
        print(json.dumps(report), flush=True)
    else:
        echo(card_page.page(report))
    raise typer.Exit(card.judge(report))
