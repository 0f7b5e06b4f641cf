"""Options of `offload train`, and their merge with a config file into one config. All functions are pure."""

from __future__ import annotations

import enum
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offload.errors import ConfigError
from offload.options import dtypes, option, switch
from offload.sizes import format_size

if TYPE_CHECKING:
    from offload.config import Config
    from offload.config.load import Batch

DEFAULT_BATCH_SIZE = 8
DEFAULT_STEPS = 200
DEFAULT_SEQ_LEN = 256
"""Tokens of a row, for models with so many positions."""
DEFAULT_WARMUP = 0.03
DEFAULT_CLIP = 1.0
DEFAULT_DECAY = 0.1
"""Weight decay of matrices; see `offload.finetune.model.decay_groups`."""


class Start(enum.Enum):
    """The starting point of training; the value of each is the default learning rate."""

    SCRATCH = 3e-4
    WEIGHTS = 2e-5
    ADAPTERS = 2e-4

    @classmethod
    def of(cls, folder: Path | None, adapters: bool = False) -> Start:
        """Returns the starting point for a model folder, or for a preset if `folder` is None."""
        if adapters:
            return cls.ADAPTERS
        has_weights = folder is not None and any(any(folder.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))
        return cls.WEIGHTS if has_weights else cls.SCRATCH


def recipe(start: Start) -> dict[str, Any]:
    """Returns the command's default optimizer and clipping as a config; the schedule is not part of it."""
    params = {"lr": start.value, "weight_decay": DEFAULT_DECAY}
    return {"optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": DEFAULT_CLIP}


def _interval(text: str) -> str | dict[str, int]:
    """Returns the value of "durability" in a config: a number is the interval of commits in steps."""
    text = str(text)  # a recipe has a number
    return {"every": int(text)} if text.isdecimal() else text


TierName = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command. None is an option that was not given: the config's value or the default applies."""

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
        is_eager=True,
    )
    """None once its values are those of the other options."""
    lora: str | None = option(
        "Train adapters by peft, the model stays as it is: r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj. "
        "[default: alpha 2 r, dropout 0, the targets that peft has for the model]",
        metavar="r=N[,…]",
    )
    load_in_4bit: bool = switch(
        "Store the frozen matrices of --lora in 4 bits (nf4): about a quarter of the bytes on disk and in RAM."
    )
    load_in_8bit: bool = switch("The same in 8 bits (int8): half of the bytes.")
    gradient_checkpointing: bool = switch(
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
    no_output: bool = switch("Write no model: what was trained is deleted after the last step.")
    push_to_hub: str | None = option(
        "Send that folder to this repository of the Hugging Face Hub after the last step, with a model card; a new "
        "repository is private.",
        "--hub-model-id",
        metavar="OWNER/NAME",
    )
    save_every: int | None = option(
        "Write the model every so many steps, too, in checkpoint-N of that folder.", "--save-steps"
    )
    data: tuple[Path, ...] = option(
        'Documents, complete in rows of --seq-len: a *.jsonl file with {"text"}, {"messages"} or {"prompt", '
        '"completion"} a line, *.parquet or *.csv with such columns, a text file, a folder of these, or a '
        "data set of the hub, OWNER/NAME[:SPLIT]; may repeat.",
        "--train-file",
        group="Data",
        default=(),
        metavar="PATH",
    )
    text: tuple[Path, ...] = option(
        "Random segments of a text file, or of a folder of *.py, *.txt, *.md; may repeat. "
        "[default: Python's own library]",
        default=(),
        metavar="PATH",
    )
    eval_data: tuple[Path, ...] = option(
        "Data to evaluate on, read as --data or --text is; may repeat. [default: every twentieth sequence, at most "
        "16, which are then not learned from]",
        "--validation-file",
        default=(),
        metavar="PATH",
    )
    train_on: Literal["assistant", "all"] = option(
        "Tokens that are learned: the assistant's of chats and the completions of prompts, or all.", default="assistant"
    )
    show_batch: bool = switch("Print the first row of the first step, with its learned tokens marked, and end there.")
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
    nvme_path: tuple[str, ...] = option(
        "Folder for swap files, one for each drive; may repeat. [default: ./swap]", default=(), metavar="PATH"
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
    durability: str | dict[str, int] | None = option(
        "step: each step survives a kill; 10: every tenth; none: half the disk, cannot be resumed. "
        "[default: step if it fits]",
        metavar="WORD|STEPS",
        parser=_interval,
    )
    drive_budget: str | None = option(
        "Bytes that may be written to each drive, as 1TB/day or 600TB/5y: fewer steps are committed.",
        metavar="SIZE/TIME",
    )
    keep: bool = switch("Keep the swap files after the last step.")
    keep_every: int | None = option(
        "Keep the state of each step that is a multiple of this, for `offload fork`. [default: none]", min=1
    )
    log: Path | None = option(
        "Write a JSON object a step. A resumed run appends to the file, a new one moves an earlier log aside. Without "
        "room on the drive training goes on, with a warning.",
        group="Logging",
    )
    report_to: tuple[str, ...] = option(
        "Write the numbers of each step to tensorboard, wandb or csv too; may repeat.", default=(), metavar="NAME"
    )
    log_every: int | None = option(
        "Print a line every so many steps. [default: every few seconds; in a terminal a progress line]",
        "--logging-steps",
    )
    trace: str | None = option(
        "Write a timeline of the run, for ui.perfetto.dev; zipped if the name ends in .gz.", metavar="<path>"
    )

    @property
    def length(self) -> int:
        return self.seq_len or DEFAULT_SEQ_LEN

    @property
    def frozen(self) -> str | None:
        """Block format of frozen weights; None for the dtype of the model."""
        return "nf4" if self.load_in_4bit else "int8" if self.load_in_8bit else None


_PATHS_OF_DATA = ("text", "data", "eval_data")


def as_record(options: Options) -> dict[str, Any]:
    """Returns the options that were given, as JSON for `from_record`, with absolute paths of what exists."""
    record = {name: value for name, value in vars(options).items() if value is not None and value != ()}
    for name in _PATHS_OF_DATA:
        # A data set of the hub has no path.
        record[name] = [str(path.absolute() if path.exists() else path) for path in getattr(options, name)]
    if options.log is not None:
        record["log"] = str(options.log.absolute())
    return {name: str(value) if isinstance(value, Path) else value for name, value in record.items()}


def from_record(record: Mapping[str, Any]) -> Options:
    """Returns the options of `as_record`, perhaps without some of them.

    Raises:
        ConfigError: `record` contains an option that this version does not know.
    """
    unknown = record.keys() - Options.__dataclass_fields__.keys()
    if unknown:
        raise ConfigError(f"the run was trained with the option {min(unknown)}, which this version does not know")
    values = {name: tuple(map(Path, record[name])) for name in _PATHS_OF_DATA if name in record}
    return Options(**{**record, **values})


FLAGS = {"nf4": "--load-in-4bit", "int8": "--load-in-8bit"}
"""The option that sets each value of `frozen`: the option's name does not follow from the field's name."""

KEYS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("offload_param", ("zero_optimization", "offload_param", "device"), "nvme"),
    ("offload_optimizer", ("zero_optimization", "offload_optimizer", "device"), "nvme"),
    ("frozen", ("offload", "frozen"), None),
    ("activations", ("offload", "activations"), None),
    ("accumulation_schedule", ("offload", "schedule"), None),
    ("weight_decay", ("optimizer", "params", "weight_decay"), DEFAULT_DECAY),
    ("grad_clip", ("gradient_clipping",), DEFAULT_CLIP),
    ("moments", ("offload", "moments"), None),
    ("master", ("offload", "master"), None),
    ("host_memory", ("offload", "host_memory"), None),
    ("device", ("offload", "device"), None),
    ("seed", ("offload", "seed"), None),
    ("run", ("offload", "run"), None),
    ("resume", ("offload", "resume"), None),
    ("durability", ("offload", "durability"), None),
    ("drive_budget", ("offload", "drive_budget"), None),
    ("keep_every", ("offload", "keep_every"), None),
    ("trace", ("offload", "trace"), None),
)
"""Option, key in the config, and default if neither sets a value."""


def merge(
    file: Mapping[str, Any] | None, options: Options, start: Start = Start.SCRATCH, world_size: int = 1
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a config file's content merged with the options, and a line for each key that an option overrides.

    Without a file, the command's defaults apply. With a file, an absent key means the same as in DeepSpeed, except:

    * The learning rate may be "auto" or absent. `start` determines its default.
    * The optimizer's type (AdamW), the ZeRO stage (3), the batch size (8) and the swap folder (./swap) have defaults.
    * "auto" for bf16.enabled means --dtype auto.
    * An absent schedule is set by `schedule`, once the number of steps is known.

    Args:
        world_size: number of ranks. With it the lines mention train_batch_size only if the options change its value.
    """
    from offload.config.blocks import spelled_number  # loads pydantic, which the help does without

    # A deep copy of plain JSON: the caller's content must not change.
    merged: dict[str, Any] = json.loads(json.dumps(dict(file or {})))
    if isinstance(params := _get(merged, ("optimizer", "params")), dict):
        params.update({name: spelled_number(value) for name, value in params.items()})
    lines: list[str] = []
    for name, path, default in (*KEYS, ("lr", ("optimizer", "params", "lr"), start.value)):
        # None is an option that was not given.
        typed, before = getattr(options, name), _get(merged, path)
        if typed is not None:
            flag = FLAGS[typed] if name == "frozen" else f"--{name.replace('_', '-')}"
            _overrule(merged, path, typed, flag, lines)
        elif default is not None and (file is None or (name == "lr" and before in (None, "auto"))):
            _set(merged, path, default)
    if options.dtype is not None:
        _merge_dtype(merged, options.dtype, lines)
    elif file is None:
        _set(merged, ("bf16", "enabled"), "auto")
    _merge_paths(merged, list(options.nvme_path), lines)
    _merge_batch(merged, options, world_size, lines)
    for name in options.report_to:
        if name not in _MONITORS:
            raise ConfigError(f"--report-to is one of {', '.join(_MONITORS)}, not {name!r:.99}")
        _set(merged, (_MONITORS[name], "enabled"), True)
    zero = merged.setdefault("zero_optimization", {})
    if isinstance(zero, dict):
        # A value that is not a block is left for `load_config` to refuse.
        zero.setdefault("stage", 3)
    merged.setdefault("optimizer", {}).setdefault("type", "AdamW")
    _merge_line(merged, lines)
    if _get(merged, ("optimizer", "params", "lr")) == 0 and merged.get("scheduler") is None:
        lines.append("a learning rate (--lr) of 0 changes no weight: the run only computes losses")
    return merged, tuple(lines)


_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv": "csv_monitor"}
"""Block of the config for each name of --report-to."""
_PATHS = (
    ("zero_optimization", "offload_optimizer", "nvme_path"),
    ("zero_optimization", "offload_param", "nvme_path"),
    ("offload", "nvme_path"),
)


def _merge_paths(merged: dict[str, Any], typed: list[str], lines: list[str]) -> None:
    """Merges the swap folders. Given paths replace all three keys; the default applies if no key is set."""
    named = {path: value for path in _PATHS if (value := _get(merged, path)) not in (None, "auto", [])}
    if typed:
        for path, value in named.items():
            # The file may name a single folder by a string. The option gives a list of one item, which means the same.
            if value not in (typed, *(typed if len(typed) == 1 else ())):
                lines.append(f"--nvme-path {' '.join(typed)} overrules {'.'.join(path)} {_format(value)}")
            _get(merged, path[:-1]).pop("nvme_path")
    if typed or not named:
        _set(merged, _PATHS[-1], typed or ["./swap"])


def _merge_dtype(merged: dict[str, Any], typed: str, lines: list[str]) -> None:
    """Merges --dtype, which sets `enabled` in both blocks, bf16 and fp16; "auto" leaves the choice to the machine."""
    bf16 = "bfloat16" if "bfloat16" in merged else "bf16"
    modes: dict[str, bool | str] = {bf16: "auto" if typed == "auto" else typed == "bf16", "fp16": typed == "fp16"}
    for mode, enabled in modes.items():
        before = _get(merged, (mode, "enabled"))
        if before not in (None, "auto", enabled):
            lines.append(f"--dtype {typed} overrules {mode}.enabled {_format(before)}")
        _set(merged, (mode, "enabled"), enabled)


def chooses_dtype(merged: Mapping[str, Any]) -> bool:
    """Returns True if the merged config leaves the dtype to the machine, by default or by an explicit "auto"."""
    return any(_get(merged, (mode, "enabled")) == "auto" for mode in ("bf16", "bfloat16"))


def _merge_batch(merged: dict[str, Any], options: Options, world_size: int, lines: list[str]) -> None:
    """Merges --batch-size (sequences in a rank's micro-batch) and --accumulation (micro-batches in a step).

    If an option was given and both keys now have a value, the file's train_batch_size follows from them and is removed.
    Otherwise train_batch_size stays.
    """
    typed = {
        "train_micro_batch_size_per_gpu": ("--batch-size", options.batch_size),
        "gradient_accumulation_steps": ("--accumulation", options.accumulation),
    }
    for key, (flag, value) in typed.items():
        if value is not None:
            _overrule(merged, (key,), value, flag, lines)
    micro, accumulation, total = (merged.get(key) not in (None, "auto") for key in (*typed, "train_batch_size"))
    if total and micro and accumulation and (flags := [flag for flag, value in typed.values() if value is not None]):
        before, (batch_size, count) = merged.pop("train_batch_size"), (merged[key] for key in typed)
        # `load_config` refuses values that are no numbers.
        numbers = isinstance(batch_size, int | float) and isinstance(count, int | float)
        if not numbers or batch_size * count * world_size != before:
            lines.append(f"{' and '.join(flags)} {_overrules(flags)} train_batch_size {_format(before)}")
    if not total and not micro:
        merged["train_micro_batch_size_per_gpu"] = DEFAULT_BATCH_SIZE


# -- the schedule -------------------------------------------------------------------------------------


def schedule(content: Mapping[str, Any], options: Options, steps: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a merged config with its learning-rate schedule, and a line if an option overrides the file's schedule.

    Either of --schedule and --warmup replaces the file's schedule completely; otherwise it stays. A file for a Trainer
    may have no schedule: the Trainer creates it. The default is a cosine after a warm-up of 3 %.
    """
    content, lines = dict(content), []
    before = content.get("scheduler")
    if options.schedule is not None or options.warmup is not None or before is None:
        content.pop("scheduler", None)
        if before is not None:
            flags = [f"--{name}" for name in ("schedule", "warmup") if getattr(options, name) is not None]
            kind = _get(before, ("type",))
            lines.append(f"{' and '.join(flags)} {_overrules(flags)} scheduler.type {_format(kind)}")
        block = _schedule(options, _get(content, ("optimizer", "params", "lr")), steps)
        return content | ({"scheduler": block} if block else {}), tuple(lines)
    kind, params = _get(content, ("scheduler", "type")), _get(content, ("scheduler", "params"))
    if str(kind).lower() in ("warmupdecaylr", "warmupcosinelr") and (params is None or isinstance(params, dict)):
        # The schedule needs the length of the training.
        if _get(params, ("total_num_steps",)) in (None, "auto"):
            content["scheduler"] = content["scheduler"] | {"params": {**(params or {}), "total_num_steps": steps}}
    return content, ()


def _overrules(flags: Sequence[str]) -> str:
    return "overrules" if len(flags) == 1 else "overrule"


def _schedule(options: Options, lr: Any, steps: int) -> dict[str, Any] | None:
    """Returns the config block of a schedule; None for a constant rate without warm-up.

    DeepSpeed's schedules use the minimum rate for the first two steps, and a rate of 0 would waste both. The minimum is
    therefore 1 / rise of the peak, where `rise` is the number of steps of the warm-up.
    """
    warmup = DEFAULT_WARMUP if options.warmup is None else options.warmup
    rise = round(warmup * steps) if warmup < 1 else int(warmup)
    if rise > steps:
        raise ConfigError(f"--warmup {rise} is more than the {steps} steps: the rate would never reach its peak")
    first = 1 / rise if rise > 1 else 1.0
    params: dict[str, Any] = {"warmup_num_steps": max(rise, 1), "warmup_type": "linear"}
    if options.schedule == "constant":
        if rise < 2:
            return None
        if isinstance(lr, int | float):  # else `load_config` refuses the learning rate
            params |= {"warmup_min_lr": first * lr, "warmup_max_lr": lr}
        return {"type": "WarmupLR", "params": params}
    ends = {"warmup_min_ratio": first, "cos_min_ratio": 0.0}
    return {"type": "WarmupCosineLR", "params": params | ends | {"total_num_steps": steps}}


_OF_LEARNING = (
    *("optimizer", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("gradient_accumulation_steps", "fp16", "bf16", "bfloat16"),
)


def settings_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a merged config that change the results, by dotted key, without the schedule."""
    blocks = {name: content[name] for name in _OF_LEARNING if name in content}
    ours = {f"offload.{name}": _get(content, ("offload", name)) for name in ("seed", "frozen")}
    return dict(_flat(blocks)) | ours | {"offload.seed": ours["offload.seed"] or 0}


def _flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _merge_line(merged: dict[str, Any], lines: list[str]) -> None:
    """Turns off the engine's print of each step: the command shows progress itself. Adds to `lines` if it was on."""
    keys_set = [key for key in ("wall_clock_breakdown", "memory_breakdown") if merged.get(key) is True]
    every = merged.get("steps_per_print")
    # The key may be absent, or infinite: DeepSpeed's users turn the engine's line off by infinity.
    if keys_set or isinstance(every, int | float):
        if isinstance(every, int | float) and 0 < every < math.inf:
            keys_set.insert(0, "steps_per_print")
        merged["steps_per_print"] = 0
    if keys_set:
        lines.append(
            f"{', '.join(keys_set)}: this command has its own progress line; numbers of each step go to tensorboard, "
            f"csv_monitor and wandb"
        )


def _get(content: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _set(content: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    # Missing blocks are created; a value that is not a block in their place is an error of the user.
    for depth, key in enumerate(path[:-1], 1):
        inner = content.get(key)
        # DeepSpeed reads "zero_optimization": true as stage 1.
        if inner is None or inner is True or inner is False:
            inner = {} if inner is None or key != "zero_optimization" else {"stage": int(inner)}
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path[:depth])} must be a block of keys, got {_format(inner)}")
        content[key] = inner
        content = inner
    content[path[-1]] = value


def _format(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _overrule(content: dict[str, Any], path: tuple[str, ...], value: Any, flag: str, lines: list[str]) -> None:
    """Sets the value of an option, and adds a line if the value replaces another."""
    before = _get(content, path)
    # Outside of the block "offload", "auto" means that the key is not set; inside, "auto" is a setting.
    unset = (None, "auto") if path[0] != "offload" else (None,)
    if before not in unset and before != value:
        lines.append(f"{flag} {_format(value)} overrules {'.'.join(path)} {_format(before)}")
    _set(content, path, value)


def keep(content: dict[str, Any]) -> tuple[str, ...]:
    """Sets the durability that `--keep` needs in `content`. Returns a line if the durability was not set before.

    An explicit "step" turns a lack of disk space into an error, while "auto" would fall back to no durability.
    """
    path = ("offload", "durability")
    durability = _get(content, path)
    if durability == "none":
        raise ConfigError("--keep and durability none exclude each other: no commit would be kept; leave one out")
    if durability not in (None, "auto") or _get(content, ("offload", "drive_budget")) is not None:
        return ()  # or a drive budget decides which steps are committed: the last one is in any case
    _set(content, path, "step")
    return ("--keep sets durability to step, since only committed steps can be exported or resumed",)


# -- option names --------------------------------------------------------------------------------------
#
# Errors about a config in the words of the command line: `--host-memory` in the place of `"host_memory"`.


_OTHERS = (
    ("lr", ("optimizer", "params", "lr")),
    ("nvme_path", ("offload", "nvme_path")),
    ("durability", ("offload", "durability", "every")),
    ("batch_size", ("train_micro_batch_size_per_gpu",)),
    ("accumulation", ("gradient_accumulation_steps",)),
)
"""Options with a merge of their own, and their key in the config."""
_WITHOUT_NAME = ("frozen",)
"""Options whose name on the command line differs from the name of their field."""
_VALUE = r'(?::\s*(?:"(?P<word>[^"]*)"|\{"every":\s*(?P<every>\d+)\}|(?P<number>[0-9.]+)))?'
_PLACE = r'(?: in (?:the |its )?(?:block )?"offload"(?: block)?| in "offload"| of the config)?'
_ASIDE = re.compile(r"(?: there)? \(offload train: [^)]*\)")
"""A note for users of the command in an error message. Once the message names options itself, the note is cut."""


def in_options(message: str, options: Options) -> str:
    """Returns the message of an error with options of the command in place of the keys that they set.

    Without a config file every value came from an option or from the command's defaults. With one, only keys whose
    option was given are replaced: the user may have written the others.
    """
    result = message
    for flag, path in _replaced(options):
        result = _pattern(path).sub(functools.partial(_spelled, flag), result)
    return result if result == message else _ASIDE.sub("", result)


def _replaced(options: Options) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, path in (*((name, path) for name, path, _ in KEYS), *_OTHERS):
        is_given = getattr(options, name) not in (None, ())
        if name not in _WITHOUT_NAME and (is_given or options.config is None):
            yield f"--{name.replace('_', '-')}", path


def _pattern(path: tuple[str, ...]) -> re.Pattern[str]:
    """Returns the pattern of a key as messages write it: dotted, or in quotes if the name alone is clear."""
    names = [rf"(?<![\w.\"]){re.escape('.'.join(path))}(?![\w.])"]
    if len(path) == 1 or (path[0] == "offload" and len(path) == 2):
        names.append(f'"{path[-1]}"')
    return re.compile(f"(?:{'|'.join(names)}){_VALUE}{_PLACE}")


def _spelled(flag: str, match: re.Match[str]) -> str:
    value = next((match[name] for name in ("word", "every", "number") if match[name] is not None), None)
    return flag if value is None else f"{flag} {value}"


# -- option checks -------------------------------------------------------------------------------------
#
# Checks of the options of `offload train`, before a file of data is read.


_LARGEST = 2**31 - 1
"""Largest number of steps, sequences or tokens. A larger one could overflow an index of numpy or torch."""


def check(options: Options) -> None:
    """Raises `ConfigError` for options that are out of range or contradict each other."""
    for name in ("steps", "batch_size", "accumulation", "seq_len", "save_every", "log_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if value is not None and value > _LARGEST:
            raise ConfigError(f"--{name.replace('_', '-')} must be at most {_LARGEST}, got {value}")
    for name in ("lr", "weight_decay", "grad_clip", "warmup", "eval_every"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"--{name.replace('_', '-')} must be a number of at least 0, got {value}")
    if options.length < 2:
        raise ConfigError("--seq-len must be at least 2: a model learns to predict the next token")
    if options.warmup is not None and options.warmup >= 1 and options.warmup % 1:
        raise ConfigError(f"--warmup must be a fraction of the steps below 1, or a number, got {options.warmup}")
    if options.epochs is not None and not (math.isfinite(options.epochs) and options.epochs > 0):
        raise ConfigError(f"--epochs must be a number above 0, got {options.epochs}")
    if options.steps is not None and options.epochs is not None:
        raise ConfigError("--steps and --epochs both set the length of the training; give one of them")
    if options.text and options.data:
        raise ConfigError("--text and --data are two ways to read: segments of text, or documents; give one of them")
    if options.eval_data and options.eval_every == 0:
        raise ConfigError("--eval-data is not used with --eval-every 0, which never evaluates; leave one of them out")
    if (
        options.log is not None
        and options.trace is not None
        and Path(options.trace).absolute() == options.log.absolute()
    ):
        raise ConfigError(f"--log and --trace need two files, got {options.log} for both")
    if options.load_in_4bit and options.load_in_8bit:
        raise ConfigError("--load-in-4bit and --load-in-8bit exclude each other; give one of them")
    if options.frozen is not None and options.lora is None:
        raise ConfigError(
            f"{FLAGS[options.frozen]} stores frozen weights in fewer bits, and without --lora none is frozen; give "
            "--lora too"
        )
    if options.no_output and options.output is not None:
        raise ConfigError(f"--no-output and --output {options.output} exclude each other; give one of them")
    if options.push_to_hub is not None and options.no_output:
        raise ConfigError("--push-to-hub sends the folder of --output, and --no-output writes none; leave one out")
    if options.save_every is not None and options.no_output:
        raise ConfigError("--save-every writes the model below --output, and --no-output writes none; leave one out")


def batch_of(config: Config, seq_len: int, world_size: int) -> Batch:
    """Returns the batch sizes of a run, after a check that the token ids of a step fit into the free memory."""
    # They load pydantic and torch, which the help does without.
    from offload.config import resolve_batch
    from offload.swapper.memory.limits import free_host_memory

    batch = resolve_batch(config, world_size)
    ids, free = batch.micro * batch.accumulation * seq_len * 8, free_host_memory()  # int64
    if ids > free:
        raise ConfigError(
            f"--batch-size, --accumulation and --seq-len give each rank token ids of {format_size(ids)} a step, and "
            f"{format_size(free)} are free; make one of them smaller"
        )
    return batch
