"""The files of the base model under adapters: names, sizes and samples, which the file of a trained adapter carries.

They are in the metadata of `adapter_model.safetensors`, so that they go where the adapter goes. A merge compares them
with the folder of the base model, which may contain another model since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from offload import records
from offload.errors import StoreError
from offload.fileio.inner_files import sampled_crc32
from offload.model_io.places import frozen_tensors

_KEY = "base_files"
_CHECK = records.rows(
    records.fields(
        {
            "name": records.text(r"[^/\0]{1,255}", "the name of a file"),
            "nbytes": records.whole(),
            "sample": records.whole(0, (1 << 32) - 1),
        }
    )
)


def base_files(model: nn.Module) -> list[dict[str, Any]]:
    """Returns, as JSON, the files from which an engine will read frozen weights under adapters of peft.

    Empty for another model, and for weights that are in memory already.
    """
    stored = frozen_tensors(model) if hasattr(model, "peft_config") else ()
    stamps = {tensor.path: tensor.stamp for tensor in stored}
    return [
        {"name": path.name, "nbytes": stamp.nbytes, "sample": sampled_crc32(path)}
        for path, stamp in sorted(stamps.items())
    ]


def as_metadata(files: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns entries for the metadata of an adapter's file."""
    return {_KEY: json.dumps(files)} if files else {}


def find_difference(metadata: Mapping[str, str], folder: Path) -> str | None:
    """Returns a sentence on the first file in `folder` that is not as the metadata of an adapter's file say.

    None if all are equal, and if the metadata name none.

    Raises:
        StoreError: The metadata are damaged, or a file cannot be read.
    """
    try:
        files = records.read(metadata.get(_KEY, "[]"), _CHECK, _KEY)
        different = next(filter(None, (_difference(folder / file["name"], file) for file in files)), None)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"the adapter's record of its base model's files cannot be compared: {error}; save the adapter again, or "
            "look at the files of the base model"
        ) from error
    return different and f"{different}: the base model is not the one that the adapter was trained on"


def _difference(path: Path, recorded: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    if (now := path.stat().st_size) != recorded["nbytes"]:
        return f"{path} has {now} bytes, expected {recorded['nbytes']}"
    return None if sampled_crc32(path) == recorded["sample"] else f"{path} has other bytes of the same size"
