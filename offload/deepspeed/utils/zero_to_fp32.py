"""`deepspeed.utils.zero_to_fp32`: the exact fp32 weights of a checkpoint that an engine has written.

The checkpoint is read as by `offload export`, whatever its placement and number of ranks. As a program, `python -m
offload.deepspeed.utils.zero_to_fp32 CHECKPOINT FOLDER` takes the arguments of DeepSpeed's script of this name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.aio import IoQueue
from offload.errors import OffloadError, StoreError
from offload.fileio import atomic_write
from offload.fileio.safetensors_stream import Tensor, shard
from offload.model_io.save import ExportPlan, make_plan, shard_size, stream
from offload.model_io.source import Source
from offload.runs.export import export, open_source
from offload.runs.own_checkpoint import find_own

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
_FILE = "weights"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns the fp32 weights and the buffers of a checkpoint by the model's names, as tensors on the CPU.

    Args:
        checkpoint_dir: the folder that `save_checkpoint` received.
        tag: name of the checkpoint; the latest by default.
        exclude_frozen_parameters: True to leave out frozen parameters.
        lazy_mode: without effect: the tensors are read at once.

    Raises:
        StoreError: if there is no such checkpoint, or it is damaged.
    """
    return _state_dict(checkpoint_dir, tag, exclude_frozen_parameters, torch.float32)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Loads the fp32 weights of a checkpoint into a model on the CPU, and returns the model.

    Arguments and errors are those of `get_fp32_state_dict_from_zero_checkpoint`.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    # Moved to the CPU as in DeepSpeed, since the loaded weights are there.
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the weights of a checkpoint as files: safetensors, which are streamed, or pickles.

    Args:
        checkpoint_dir: the folder that `save_checkpoint` received.
        output_dir: the folder to write; for safetensors it must not exist or be empty.
        dtype: dtype of the weights.
        max_shard_size: upper bound of one file; None for one file.
        safe_serialization: True for safetensors, and the config of a model of transformers.
        tag: name of the checkpoint; the latest by default.
        exclude_frozen_parameters: True to leave out frozen parameters.

    Raises:
        StoreError: if there is no such checkpoint, it is damaged, or the disk has no room.
    """
    # Without a limit, a value that no model reaches.
    limit = shard_size(1 << 62 if max_shard_size is None else max_shard_size)
    if safe_serialization:
        with _opened(checkpoint_dir, tag) as (source, queue):
            plan = make_plan(source, dtype, limit, not exclude_frozen_parameters)
            export(source, Path(output_dir), plan, queue)
        return
    _pickle(_state_dict(checkpoint_dir, tag, exclude_frozen_parameters, dtype), Path(output_dir), limit)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the fp32 weights of a checkpoint; see `convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


@contextmanager
def _opened(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Iterator[tuple[Source, IoQueue]]:
    checkpoint = find_own(Path(checkpoint_dir), tag)
    if checkpoint is None:
        raise StoreError(
            f"{checkpoint_dir} contains no checkpoint of an engine: expected the folder of save_checkpoint"
        )
    with IoQueue() as queue:
        yield open_source(checkpoint, queue), queue


def _state_dict(
    checkpoint_dir: str | os.PathLike[str], tag: str | None, exclude_frozen: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns the weights of a checkpoint in a dtype, and its buffers."""
    with _opened(checkpoint_dir, tag) as (source, _):
        # With a file name, the plan includes every name of a tied weight, as `load_state_dict` expects.
        plan = make_plan(source, dtype, 1, not exclude_frozen, name=_FILE)
        # `offload export` uses the same stream, so that both read a checkpoint alike.
        memory = _Memory(plan)
        stream(source, plan, memory.put)
        return {**memory.tensors(), **{name: value.clone() for name, value in source.buffers.items()}}


class _Memory:
    """The file of a plan, in memory. `stream` calls `put`."""

    def __init__(self, plan: ExportPlan) -> None:
        self._plan = plan
        self._bytes = bytearray(plan.nbytes)

    def put(self, file: str, offset: int, data: memoryview) -> Sequence[Any]:
        self._bytes[offset : offset + len(data)] = data
        return ()

    def tensors(self) -> dict[str, torch.Tensor]:
        places, tensors = self._plan.places(), {}
        for name, tensor in self._plan.shards[_FILE].items():
            count = tensor.nbytes // tensor.dtype.itemsize
            # torch refuses an empty buffer.
            flat = (
                torch.frombuffer(self._bytes, dtype=tensor.dtype, count=count, offset=places[name].offset)
                if count
                else torch.empty(0, dtype=tensor.dtype, device="cpu")
            )
            tensors[name] = flat.view(tensor.shape)
        return tensors


def _pickle(state: dict[str, torch.Tensor], out: Path, limit: int) -> None:
    """Writes tensors as `pytorch_model.bin`, or as several such files with an index."""
    out.mkdir(parents=True, exist_ok=True)
    cut = shard({name: Tensor(value.dtype, tuple(value.shape)) for name, value in state.items()}, limit)
    # `from_pretrained` finds the files by these names.
    names = ["pytorch_model.bin"]
    if len(cut) > 1:
        names = [f"pytorch_model-{number + 1:05d}-of-{len(cut):05d}.bin" for number in range(len(cut))]
        files = {key: name for name, tensors in zip(names, cut, strict=True) for key in tensors}
        index = {"weight_map": files}
        atomic_write(out / "pytorch_model.bin.index.json", json.dumps(index, indent=2) + "\n")
    for name, tensors in zip(names, cut or [{}], strict=True):
        # Each tensor is copied, since a view would be saved with the memory of all tensors.
        torch.save({key: state[key].clone() for key in tensors}, out / name)


def main(arguments: Sequence[str]) -> None:
    """Writes the fp32 weights of a checkpoint; ends the process with 1 if that fails, with 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32", description="Writes the exact fp32 weights of a checkpoint of save_checkpoint."
    )
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint received")
    parser.add_argument("output_dir", help="the folder to write")
    parser.add_argument("--max_shard_size", default="5GB", help="upper bound of one file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, in place of pickles")
    parser.add_argument("-t", "--tag", help="name of the checkpoint; the latest by default")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out frozen parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    options = vars(parser.parse_args(arguments))
    del options["debug"]
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**options)
    except (OffloadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"the fp32 weights of {options['checkpoint_dir']} are in {options['output_dir']}")


if __name__ == "__main__":
    main(sys.argv[1:])
