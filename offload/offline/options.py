"""Options that `offload score`, `offload generate` and `offload chat` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.options import argument, checked, dtypes, option
from offload.sizes import parse_device_size, parse_size


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model runs, and where. None leaves the choice to the engine."""

    model: str = argument(
        "A folder with config.json, tokenizer and safetensors; a model of the hub; an adapter; or a run.",
        metavar="MODEL",
        group="Data",
    )
    base: str | None = option(
        "Folder or hub name of an adapter's base model. [default: the one that the adapter names]", group="Data"
    )
    config: Path | None = option(
        "DeepSpeed JSON file. An option of the command line overrules it.", "--deepspeed", group="Placement"
    )
    dtype: str | None = option(
        "Dtype of the weights. Another one than the files' needs RAM for all of them. [default: that of the files]",
        **dtypes("bf16", "fp16", "fp32"),
    )
    host_memory: str | None = option(
        "Host budget, as 16GiB: more holds weights between uses. [default: what is needed]", **checked(parse_size)
    )
    device_memory: str | None = option(
        "Device budget for weights, as 8GiB, or 50%: that share stays. [default: three of the largest layer]",
        **checked(parse_device_size),
    )
    device: str | None = option("Where to compute: auto, cpu, cuda, or another accelerator of torch. [default: auto]")
