"""`offload train`: its options, in groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offload.cli_machine import Json
from offload.cli_options import UNDERSCORES, Grouped, option

Home = Literal["none", "cpu", "nvme"]
_MODEL, _DATA, _STEPS = "Model", "Data", "Steps"
_PLACES, _RUN, _TOLD = "Where things lie", "Break off and go on", "What is told"


Model = Annotated[
    str,
    option(
        _MODEL,
        "--model",
        "gpt2-tiny or -small, llama-1b, -3b, -7b, -13b, -70b, from scratch, on bytes; or a folder: config.json, "
        "tokenizer, and weights if it is to start from them.",
        "--model-name-or-path",
    ),
]
LoraText = Annotated[
    str | None,
    option(
        _MODEL,
        "--lora",
        "Train adapters by peft, the model stays as it is: r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj. "
        "[default: alpha 2 r, dropout 0, the targets that peft has for the model]",
        metavar="r=N[,…]",
    ),
]
Checkpointing = Annotated[
    bool,
    option(
        _MODEL,
        "--gradient-checkpointing",
        "Compute activations again in backward instead of keeping them.",
        "--activation-checkpointing",
    ),
]
Output = Annotated[
    Path | None,
    option(
        _MODEL,
        "--output",
        "Write the model after the last step, or its adapters, and the tokenizer, for from_pretrained; must not be "
        "there, or be empty.",
        "--output-dir",
        "--save",
        metavar="FOLDER",
    ),
]
SaveEvery = Annotated[
    int | None,
    option(_MODEL, "--save-every", "Write it each so many steps, too, in checkpoint-N of that folder.", "--save-steps"),
]
Data = Annotated[
    list[Path] | None,
    option(
        _DATA,
        "--data",
        'Documents, whole in rows of --seq-len: a *.jsonl file with {"text"}, {"messages"} or {"prompt", "completion"} '
        "a line, a text file, or a folder of such; may repeat.",
        "--train-file",
        metavar="PATH",
    ),
]
Text = Annotated[
    list[Path] | None,
    option(
        _DATA,
        "--text",
        "Random stretches of a text file, or of a folder of *.py, *.txt, *.md; may repeat. "
        "[default: Python's own library]",
        metavar="PATH",
    ),
]
EvalData = Annotated[
    list[Path] | None,
    option(
        _DATA,
        "--eval-data",
        "What to evaluate on, read as --data or --text is; may repeat. [default: every twentieth sequence, at most 16, "
        "which are then not learned from]",
        "--validation-file",
        metavar="PATH",
    ),
]
SeqLen = Annotated[int, option(_DATA, "--seq-len", "Tokens of a sequence.", "--max-length", "--max-seq-length")]
Steps = Annotated[
    int | None,
    option(_STEPS, "--steps", "Steps in all, those of a resumed run included. [default: 200]", "--max-steps"),
]
Epochs = Annotated[
    float | None, option(_STEPS, "--epochs", "Instead of --steps: passes over the data.", "--num-train-epochs")
]
BatchSize = Annotated[
    int | None,
    option(
        _STEPS,
        "--batch-size",
        "Sequences of a micro-batch, on each GPU. [default: 8]",
        "--per-device-train-batch-size",
    ),
]
Accumulation = Annotated[
    int | None,
    option(_STEPS, "--accumulation", "Micro-batches of a step. [default: 1]", "--gradient-accumulation-steps"),
]
Lr = Annotated[
    float | None,
    option(
        _STEPS,
        "--lr",
        "Learning rate. [default: 2e-5 from weights of a folder, 2e-4 with --lora, 3e-4 from scratch]",
        "--learning-rate",
    ),
]
Schedule = Annotated[
    Literal["cosine", "constant"] | None,
    option(_STEPS, "--schedule", "What the rate does after its warm-up. [default: cosine]", "--lr-scheduler-type"),
]
Warmup = Annotated[
    float | None,
    option(
        _STEPS,
        "--warmup",
        "Share of the steps, below 1, or number of steps, in which the rate rises. [default: 0.03]",
        "--warmup-ratio",
        "--warmup-steps",
    ),
]
WeightDecay = Annotated[
    float | None, option(_STEPS, "--weight-decay", "Of matrices; biases and norms have none. [default: 0.1]")
]
GradClip = Annotated[
    float | None,
    option(_STEPS, "--grad-clip", "Largest norm of a gradient; 0: any. [default: 1.0]", "--max-grad-norm"),
]
EvalEvery = Annotated[
    int | None,
    option(
        _STEPS,
        "--eval-every",
        "Steps from one evaluation to the next, and after the last; 0: none. [default: a fifth of the steps]",
        "--eval-steps",
    ),
]
Seed = Annotated[int | None, option(_STEPS, "--seed", "Seed of weights, data order and dropout. [default: 0]")]
ConfigFile = Annotated[
    Path | None,
    option(
        _PLACES,
        "--config",
        "DeepSpeed JSON file, whose values count instead of these defaults. An option that is typed overrules it, with "
        "a line.",
        "--deepspeed",
    ),
]
OffloadParam = Annotated[Home | None, option(_PLACES, "--offload-param", "Home of the weights. [default: nvme]")]
OffloadOptimizer = Annotated[
    Home | None, option(_PLACES, "--offload-optimizer", "Home of the optimizer states. [default: nvme]")
]
NvmePath = Annotated[
    list[str] | None,
    option(
        _PLACES,
        "--nvme-path",
        "Folder for swap files, one for each drive; may repeat. [default: ./swap]",
        metavar="PATH",
    ),
]
WeightDtype = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"] | None,
    option(
        _PLACES,
        "--dtype",
        "Dtype of the weights; auto: bf16 where this machine multiplies it as fast as fp32, else fp32. [default: auto]",
    ),
]
HostMemory = Annotated[
    str | None,
    option(_PLACES, "--host-memory", "Host budget, as 16GiB. [default: what is needed, at most 80 % of free]"),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None, option(_PLACES, "--device", "Where to compute. [default: auto]")
]
RunName = Annotated[
    str | None, option(_RUN, "--run", "Name of the run's folder in the nvme path. [default: default]", "--run-name")
]
ResumeRun = Annotated[
    Literal["never", "auto", "must", "restart"] | None,
    option(_RUN, "--resume", "Go on with the run of that name: never, auto or must; or restart it. [default: never]"),
]
Durability = Annotated[
    str | None,
    option(
        _RUN,
        "--durability",
        "step: each step survives a kill; 10: every tenth; none: half the disk, no resume. "
        "[default: step where it fits]",
        metavar="WORD|STEPS",
    ),
]
Keep = Annotated[bool, option(_RUN, "--keep", "Keep the swap files after the last step.")]
Log = Annotated[
    Path | None,
    option(_TOLD, "--log", "Write a JSON object a step. A resumed run goes on with the file, another starts it over."),
]
LogEvery = Annotated[
    int | None,
    option(
        _TOLD,
        "--log-every",
        "Print a line each so many steps. [default: every few seconds; in a terminal one line that moves]",
        "--logging-steps",
    ),
]
Trace = Annotated[
    Path | None,
    option(_TOLD, "--trace", "Write a time line of the run, for ui.perfetto.dev; zipped where it ends in .gz."),
]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(cls=Grouped, context_settings=UNDERSCORES)(train)


def train(
    model: Model = "gpt2-tiny",
    lora: LoraText = None,
    gradient_checkpointing: Checkpointing = False,
    output: Output = None,
    save_every: SaveEvery = None,
    data: Data = None,
    text: Text = None,
    eval_data: EvalData = None,
    seq_len: SeqLen = 256,
    steps: Steps = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    accumulation: Accumulation = None,
    lr: Lr = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    weight_decay: WeightDecay = None,
    grad_clip: GradClip = None,
    eval_every: EvalEvery = None,
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
    log_every: LogEvery = None,
    trace: Trace = None,
    json_output: Json = False,
) -> None:
    """Train a causal language model on text, with weights and optimizer states in swap files.

    Example: offload train --model ./llama --data chats.jsonl --output ./mine --nvme-path /mnt/nvme --resume auto

    The names of Hugging Face's arguments are taken too, such as --learning_rate or --output_dir.

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
    from offload.finetune.options import Options

    plain = dict(typed) | {name: tuple(typed[name] or ()) for name in ("text", "data", "eval_data", "nvme_path")}
    plain["trace"] = None if plain["trace"] is None else str(plain["trace"])
    plain["log"] = plain["log"] if rank == 0 else None
    durability = plain["durability"]
    if durability is not None and durability.isdecimal():
        plain["durability"] = {"every": int(durability)}
    return Options(**plain)
