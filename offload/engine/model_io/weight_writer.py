"""Writing of a model's weights as files that `transformers` loads, from any source of partitions.

    source ──► `weight_stream` reads, converts, gives the bytes of each file ──► the queue writes them ──► index, config

`weight_plan` has decided names, dtypes and files before. `offload export` writes from a store or a checkpoint,
`save_pretrained` from an engine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offload.aio import DirectFile
from offload.aio.protocols import Pending, Queue
from offload.checkpoint.directory import write_new
from offload.engine.model_io.safetensors_folder import CONFIG, GENERATION, INDEX
from offload.engine.model_io.weight_plan import Plan
from offload.engine.model_io.weight_source import Source
from offload.fileio.safetensors_stream import Writer
from offload.layout.modes import dtype_name
from offload.sizes import count_of


class Files:
    """The files of a plan, created in a folder that contains none of them; durable when the context ends.

    Args:
        folder: Must exist.
        plan: Names and sizes.
        buffers: Persistent buffers of the model, which are written by the constructor.
        queue: Queue for the writes; owned by the caller.

    Raises:
        IoError: If a file cannot be written. A full disk shows before any weight is written.
    """

    def __init__(self, folder: Path, plan: Plan, buffers: Mapping[str, torch.Tensor], queue: Queue) -> None:
        self._folder, self._plan, self._queue = folder, plan, queue
        self._files: dict[str, DirectFile] = {}
        self._open = contextlib.ExitStack()
        try:
            for name, tensors in plan.shards.items():
                # The writer reserves the file and makes it durable at the end; the queue writes the weights into it.
                writer = self._open.enter_context(Writer(folder / name, tensors, plan.metadata))
                self._files[name] = self._open.enter_context(DirectFile(folder / name))
                for buffer, value in buffers.items():
                    for each in plan.buffers[buffer]:
                        if each in tensors:
                            writer.write_tensor(each, value)
        except BaseException as error:
            self._open.__exit__(type(error), error, error.__traceback__)
            raise

    def put(self, file: str, offset: int, data: memoryview) -> Sequence[Pending]:
        """Begins to write bytes of a file; see `Sink.put`."""
        return [self._queue.write(self._files[file], offset, data)]

    def _write_heads(self) -> None:
        """Writes the index and the configs."""
        plan = self._plan
        if len(plan.shards) > 1:
            total = {"total_size": plan.weights_nbytes}
            places = {name: file for file, tensors in plan.shards.items() for name in tensors}
            _write_json(self._folder / INDEX, {"metadata": total, "weight_map": dict(sorted(places.items()))})
        if plan.config is not None:
            _write_json(self._folder / CONFIG, plan.config)
        if plan.generation is not None:
            _write_json(self._folder / GENERATION, plan.generation)

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)
        if kind is None:
            # Written last, when all weights are durable: without index and config nobody takes the folder for a model.
            self._write_heads()


def notices(source: Source, plan: Plan, beyond: int) -> tuple[str, ...]:
    """Returns messages for the user about the written files.

    Args:
        source: The weights.
        plan: The plan that was written.
        beyond: Result of `stream`.
    """
    found: list[str] = []
    if beyond:
        found.append(
            f"{count_of(beyond, 'value is', 'values are')} out of the range of {dtype_name(plan.dtype)} and saved as "
            "infinite"
        )
    if source.about.get("config") is None:
        found.append("the model has no transformers config, so only weights are saved")
    elif str(source.about["class"]).startswith("Peft"):
        found.append(
            "the names are those of peft's model, which from_pretrained of transformers does not know: it would leave "
            "the weights random. For the adapter, resume the run: in Python call engine.save_pretrained(folder), or "
            "give the same command of `offload train --lora` with --resume must and --output FOLDER"
        )
    absent = sum(not segment.trainable for layout in plan.layouts for segment in layout.segments)
    if absent and not plan.frozen:
        found.append(
            f"{count_of(absent, 'frozen weight is', 'frozen weights are')} not in the files, because they were left out"
        )
    if plan.unconverted:
        found.append(
            "some weights have the names and the form that transformers 5 has in memory and loads, since their form on "
            "the hub is computed from several weights: engine.module.save_pretrained(folder) writes that, with all "
            "weights in RAM"
        )
    if plan.left_out:
        found.append(
            f"{', '.join(plan.left_out)} of the model's state_dict() is not in the files: save_checkpoint and "
            "torch.save keep what is no tensor, and engine.save_pretrained of a resumed run writes tensors"
        )
    return tuple(found)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` to a new file, readable for people."""
    write_new(path, (json.dumps(content, indent=2) + "\n").encode())
