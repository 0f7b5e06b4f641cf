"""The command `offload train`: its options, in groups. `train_run` runs the job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offload.cli.console import BAD_INPUT, Json, errors
from offload.cli.options import dtypes, option, read_recipe, takes_options
from offload.launch.environment import rank_number

if TYPE_CHECKING:
    from offload.finetune.options import Options

TierName = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `offload train` as they are typed. None stands for an option that was not given."""

    model: str = option(
        "gpt2-tiny or -small, llama-1b, -3b, -7b, -8b, -13b, -70b, from scratch, on bytes; or a folder: "
        "config.json, tokenizer, and weights if it is to start from them; or a model of the hub, such as "
        "Qwen/Qwen3-8B, which is fetched once.",
        "--model-name-or-path",
        "--base-model",
        default="gpt2-tiny",
        group="Model",
    )
    recipe: Path | None = option(
        "YAML file with a line KEY: VALUE for options that are not given, such as `seq_len: 2048`.",
        metavar="FILE",
        callback=read_recipe,
        is_eager=True,
    )
    lora: str | None = option(
        "Train adapters by peft, the model stays as it is: r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj. "
        "[default: alpha 2 r, dropout 0, the targets that peft has for the model]",
        metavar="r=N[,…]",
    )
    load_in_4bit: bool = option(
        "Store the frozen matrices of --lora in 4 bits (nf4): about a quarter of the bytes on disk and in RAM."
    )
    load_in_8bit: bool = option("The same in 8 bits (int8): half of the bytes.")
    gradient_checkpointing: bool = option(
        "Compute activations again in backward instead of keeping them.", "--activation-checkpointing"
    )
    chunked_loss: bool | None = option(
        "Compute the loss from the logits of 1024 tokens at a time, in evaluations too; or of all tokens at once. "
        "[default: in chunks where the model allows it; a resumed run as it began]",
        name="--chunked-loss/--no-chunked-loss",
    )
    kernels: Literal["auto", "liger", "compile", "eager"] = option(
        "What the blocks run in: liger (Liger's kernels for norms, rotary positions and MLPs), compile "
        "(torch.compile of each block), eager (torch's own). auto: liger on a GPU where it is installed, else "
        "eager; a resumed run as it began.",
        default="auto",
    )
    output: Path | None = option(
        "Write the model after the last step, or its adapters, and the tokenizer, for from_pretrained; must not "
        "exist, or be empty. [default: ./RUN-output, without --keep; none for a preset on Python's own library]",
        "--output-dir",
        "--save",
        metavar="FOLDER",
    )
    no_output: bool = option("Write no model: what was trained is deleted after the last step.")
    push_to_hub: str | None = option(
        "Send that folder to this repository of the Hugging Face Hub after the last step, with a model card; a new "
        "repository is private.",
        "--hub-model-id",
        metavar="OWNER/NAME",
    )
    save_every: int | None = option(
        "Write the model every so many steps, too, in checkpoint-N of that folder.", "--save-steps"
    )
    data: list[Path] | None = option(
        'Documents, complete in rows of --seq-len: a *.jsonl file with {"text"}, {"messages"} or {"prompt", '
        '"completion"} a line, *.parquet or *.csv with such columns, a text file, a folder of these, or a '
        "data set of the hub, OWNER/NAME[:SPLIT]; may repeat.",
        "--train-file",
        group="Data",
        metavar="PATH",
    )
    text: list[Path] | None = option(
        "Random segments of a text file, or of a folder of *.py, *.txt, *.md; may repeat. "
        "[default: Python's own library]",
        metavar="PATH",
    )
    eval_data: list[Path] | None = option(
        "Data to evaluate on, read as --data or --text is; may repeat. [default: every twentieth sequence, at most "
        "16, which are then not learned from]",
        "--validation-file",
        metavar="PATH",
    )
    train_on: Literal["assistant", "all"] = option(
        "Tokens that are learned: the assistant's of chats and the completions of prompts, or all.", default="assistant"
    )
    show_batch: bool = option("Print the first row of the first step, with its learned tokens marked, and end there.")
    seq_len: int | None = option(
        "Tokens of a sequence. [default: 256, or the model's positions if it has fewer]",
        "--max-length",
        "--max-seq-length",
        "--sequence-len",
        "--cutoff-len",
        "--block-size",
    )
    steps: int | None = option(
        "Steps in all, those of a resumed run included. [default: 200]", "--max-steps", group="Steps"
    )
    epochs: float | None = option("Instead of --steps: passes over the data.", "--num-train-epochs", "--num-epochs")
    batch_size: int | None = option(
        "Sequences of a micro-batch, on each GPU. [default: 8]", "--per-device-train-batch-size", "--micro-batch-size"
    )
    accumulation: int | None = option("Micro-batches of a step. [default: 1]", "--gradient-accumulation-steps")
    lr: float | None = option(
        "Learning rate. [default: 2e-5 from weights of a folder, 2e-4 with --lora, 3e-4 from scratch]",
        "--learning-rate",
    )
    schedule: Literal["cosine", "constant"] | None = option(
        "Learning rate after the warm-up. [default: cosine]", "--lr-scheduler-type", "--lr-scheduler"
    )
    warmup: float | None = option(
        "Share of the steps, below 1, or number of steps, in which the rate rises. [default: 0.03]",
        "--warmup-ratio",
        "--warmup-steps",
    )
    weight_decay: float | None = option("Decay of matrices; biases and norms have none. [default: 0.1]")
    grad_clip: float | None = option(
        "Largest norm of a gradient; 0: any. [default: 1.0]", "--max-grad-norm", "--gradient-clipping"
    )
    eval_every: int | None = option(
        "Steps from one evaluation to the next, and after the last; 0: none. [default: a fifth of the steps]",
        "--eval-steps",
    )
    seed: int | None = option("Seed of weights, data order and dropout. [default: 0]")
    config: Path | None = option(
        "DeepSpeed JSON file, whose values replace these defaults. An option of the command line overrules the "
        "file, with a log line.",
        "--deepspeed",
        "--deepspeed-config-file",
        group="Placement",
    )
    offload_param: TierName | None = option("Tier of the weights. [default: nvme]", "--offload-param-device")
    offload_optimizer: TierName | None = option(
        "Tier of the optimizer states. [default: nvme]", "--offload-optimizer-device"
    )
    activations: Literal["device", "cpu", "nvme", "auto"] | None = option(
        "Keep only the input of each layer for the backward, in this tier, and compute the rest again."
    )
    accumulation_schedule: Literal["auto", "layer_major", "micro_batch_major"] | None = option(
        "Order of the micro-batches of a step: layer_major takes all of them through a layer before the next is "
        "fetched, micro_batch_major one after the other. [default: auto]"
    )
    nvme_path: list[str] | None = option(
        "Folder for swap files, one for each drive; may repeat. [default: ./swap]", metavar="PATH"
    )
    dtype: str | None = option(
        "Dtype of the weights; auto: bf16 if this machine multiplies it as fast as fp32, else fp32. [default: auto]",
        "--torch-dtype",
        **dtypes("auto", "bf16", "fp16", "fp32"),
    )
    moments: Literal["fp32", "bf16", "int8"] | None = option(
        "Form of the optimizer's moments; int8: a quarter of the bytes, in blocks with a scale each. [default: fp32]"
    )
    master: Literal["fp32", "bf24"] | None = option(
        "Form of the master of a bf16 weight; bf24: a byte a parameter less, rounded stochastically. [default: fp32]"
    )
    host_memory: str | None = option("Host budget, as 16GiB. [default: what is needed, within the free RAM]")
    device: str | None = option("Where to compute: auto, cpu, cuda, or another accelerator of torch. [default: auto]")
    run: str | None = option(
        "Name of the run's folder in the nvme path. [default: default]", "--run-name", group="Run and resume"
    )
    resume: Literal["never", "auto", "must", "restart"] | None = option(
        "Resume the run of that name: never, auto or must; or restart it. [default: never]"
    )
    durability: str | None = option(
        "step: each step survives a kill; 10: every tenth; none: half the disk, cannot be resumed. "
        "[default: step if it fits]",
        metavar="WORD|STEPS",
    )
    drive_budget: str | None = option(
        "Bytes that may be written to each drive, as 1TB/day or 600TB/5y: fewer steps are committed.",
        metavar="SIZE/TIME",
    )
    keep: bool = option("Keep the swap files after the last step.")
    keep_every: int | None = option(
        "Keep the state of each step that is a multiple of this, for `offload fork`. [default: none]"
    )
    log: Path | None = option(
        "Write a JSON object a step. A resumed run appends to the file, a new one moves an earlier log aside.",
        group="Logging",
    )
    report_to: list[str] | None = option(
        "Write the numbers of each step to tensorboard, wandb or csv too; may repeat.", metavar="NAME"
    )
    log_every: int | None = option(
        "Print a line every so many steps. [default: every few seconds; in a terminal a progress line]",
        "--logging-steps",
    )
    trace: Path | None = option("Write a timeline of the run, for ui.perfetto.dev; zipped if the name ends in .gz.")
    json_output: Json = False


@takes_options(TrainOptions)
def train(typed: TrainOptions) -> None:
    """Train a causal language model. Weights and optimizer states are in swap files.

    Example: offload train --model ./llama --data chats.jsonl --output ./mine --nvme-path /mnt/nvme --resume auto

    The names of Hugging Face's arguments are taken too, such as --learning_rate or --output_dir.

    Ends with 0 after the last step, 1 if training failed or swap files are damaged, 2 for invalid options, 128 plus
    its number after a signal.
    """
    # Imported on use: the module loads rich and psutil, which would slow down every other command.
    from offload.cli.commands.train_run import Output, Training

    # Set by torchrun; only the first rank prints.
    with errors(BAD_INPUT):
        rank = rank_number(os.environ, "RANK", 0)
    console = Output(stderr=typed.json_output, highlight=False, soft_wrap=True, quiet=rank > 0)
    Training(console, typed.json_output and rank == 0).go(_job_options(typed, rank))


def _job_options(typed: TrainOptions, rank: int) -> Options:
    """Returns the options in the job's form: paths as tuples, durability as in a config, a log on rank 0 only."""
    from offload.finetune.options import Options

    values: dict[str, Any] = dict(vars(typed))
    # `Options` has no such fields: they are this command's, not the job's.
    del values["json_output"], values["recipe"]
    for name in ("text", "data", "eval_data", "nvme_path", "report_to"):
        values[name] = tuple(values[name] or ())
    values["trace"] = None if typed.trace is None else str(typed.trace)
    # All ranks run this command; only one may write the log.
    values["log"] = typed.log if rank == 0 else None
    if typed.durability is not None and typed.durability.isdecimal():
        # A number is the interval of commits in steps.
        values["durability"] = {"every": int(typed.durability)}
    return Options(**values)
