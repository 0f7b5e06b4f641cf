"""`offload train`: its options, in groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from offload.cli_machine import Json

Home = Literal["none", "cpu", "nvme"]
_MODEL, _DATA, _STEPS = "Model", "Data", "Steps"
_PLACES, _RUN, _TOLD = "Where things lie", "Break off and go on", "What is told"


def _option(panel: str, help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, **more)


Model = Annotated[
    str,
    _option(
        _MODEL,
        "gpt2-tiny or -small, llama-1b, -3b, -7b, -13b, -70b, from scratch, on bytes; or a folder: config.json, "
        "tokenizer, and weights if it is to start from them.",
    ),
]
LoraText = Annotated[
    str | None,
    _option(
        _MODEL,
        "Train adapters by peft, the model stays as it is: r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj. "
        "[default: alpha 2 r, dropout 0, the targets that peft has for the model]",
        metavar="r=N[,…]",
    ),
]
Checkpointing = Annotated[
    bool,
    typer.Option(
        "--activation-checkpointing",
        help="Compute activations again in backward instead of keeping them.",
        rich_help_panel=_MODEL,
    ),
]
Save = Annotated[
    Path | None,
    _option(
        _MODEL,
        "Write the model after the last step, or its adapters, and the tokenizer, for from_pretrained; must not be "
        "there, or be empty.",
        metavar="FOLDER",
    ),
]
Data = Annotated[
    list[Path] | None,
    _option(
        _DATA,
        'Documents, whole in rows of --seq-len: a *.jsonl file with {"text"}, {"messages"} or {"prompt", "completion"} '
        "a line, a text file, or a folder of such; may repeat.",
        metavar="PATH",
    ),
]
Text = Annotated[
    list[Path] | None,
    _option(
        _DATA,
        "Random stretches of a text file, or of a folder of *.py, *.txt, *.md; may repeat. "
        "[default: Python's own library]",
        metavar="PATH",
    ),
]
SeqLen = Annotated[int, _option(_DATA, "Tokens of a sequence.")]
Steps = Annotated[int, _option(_STEPS, "Steps in all, those of a resumed run included.")]
BatchSize = Annotated[int | None, _option(_STEPS, "Sequences of a step. [default: 8]")]
Lr = Annotated[float | None, _option(_STEPS, "Learning rate. [default: 3e-4]")]
Seed = Annotated[int | None, _option(_STEPS, "Seed of weights, data order and dropout. [default: 0]")]
ConfigFile = Annotated[
    Path | None, _option(_PLACES, "DeepSpeed JSON file. An option that is typed overrules it, with a line.")
]
OffloadParam = Annotated[Home | None, _option(_PLACES, "Home of the weights. [default: nvme]")]
OffloadOptimizer = Annotated[Home | None, _option(_PLACES, "Home of the optimizer states. [default: nvme]")]
NvmePath = Annotated[
    list[str] | None,
    _option(_PLACES, "Folder for swap files, one for each drive; may repeat. [default: ./swap]", metavar="PATH"),
]
WeightDtype = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"] | None,
    _option(
        _PLACES,
        "Dtype of the weights; auto: bf16 where this machine multiplies it as fast as fp32, else fp32. [default: auto]",
    ),
]
HostMemory = Annotated[
    str | None, _option(_PLACES, "Host budget, as 16GiB. [default: what is needed, at most 80 % of free]")
]
Device = Annotated[Literal["auto", "cpu", "cuda"] | None, _option(_PLACES, "Where to compute. [default: auto]")]
RunName = Annotated[str | None, _option(_RUN, "Name of the run's folder in the nvme path. [default: default]")]
ResumeRun = Annotated[
    Literal["never", "auto", "must", "restart"] | None,
    _option(_RUN, "Go on with the run of that name: never, auto or must; or restart it. [default: never]"),
]
Durability = Annotated[
    str | None,
    _option(
        _RUN,
        "step: each step survives a kill; 10: every tenth; none: half the disk, no resume. "
        "[default: step where it fits]",
        metavar="WORD|STEPS",
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the swap files after the last step.", rich_help_panel=_RUN)]
Log = Annotated[
    Path | None,
    _option(_TOLD, "Write a JSON object a step. A resumed run goes on with the file, another starts it over."),
]
Trace = Annotated[
    Path | None, _option(_TOLD, "Write a time line of the run, for ui.perfetto.dev; zipped where it ends in .gz.")
]


class Grouped(TyperCommand):
    """A command whose options are listed in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or _TOLD, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(cls=Grouped)(train)


def train(
    model: Model = "gpt2-tiny",
    lora: LoraText = None,
    activation_checkpointing: Checkpointing = False,
    save: Save = None,
    data: Data = None,
    text: Text = None,
    seq_len: SeqLen = 256,
    steps: Steps = 200,
    batch_size: BatchSize = None,
    lr: Lr = None,
    seed: Seed = None,
    config: ConfigFile = None,
    offload_param: OffloadParam = None,
    offload_optimizer: OffloadOptimizer = None,
    nvme_path: NvmePath = None,
    dtype: WeightDtype = None,
    host_memory: HostMemory = None,
    device: Device = None,
    run: RunName = None,
    resume: ResumeRun = None,
    durability: Durability = None,
    keep: Keep = False,
    log: Log = None,
    trace: Trace = None,
    json_output: Json = False,
) -> None:
    """Train a causal language model on text, with weights and optimizer states in swap files.

    Example: offload train --model ./llama --data chats.jsonl --save ./mine --nvme-path /mnt/nvme --resume auto

    Ends with 0 after the last step, 1 where training failed, 2 for options that cannot be, 128 and its number after a
    signal.
    """
    typed = {name: value for name, value in locals().items() if name != "json_output"}
    from rich.console import Console

    from offload.cli_run import Training

    rank = int(os.environ.get("RANK", "0"))  # of torchrun; the first one speaks for all
    console = Console(stderr=json_output, highlight=False, soft_wrap=True, quiet=rank > 0)
    Training(console, json_output and rank == 0).go(_options(typed, rank))


def _options(typed: Mapping[str, Any], rank: int) -> Any:
    """What was typed, as the job takes it."""
    from offload.train_options import Options

    plain = dict(typed) | {name: tuple(typed[name] or ()) for name in ("text", "data", "nvme_path")}
    plain["trace"] = None if plain["trace"] is None else str(plain["trace"])
    plain["log"] = plain["log"] if rank == 0 else None
    durability = plain["durability"]
    if durability is not None and durability.isdecimal():
        plain["durability"] = {"every": int(durability)}
    return Options(**plain)
