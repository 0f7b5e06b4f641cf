"""Reads universal checkpoints of DeepSpeed, which have a folder for each parameter.

zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    a parameter's master and moments, in one piece
zero/<name>/step.pt                               its number of updates, of stages 1 and 2
zero/optimizer_state.pt                           numbers of the optimizer's groups, loss scale
*_model_states.pt                                 as DeepSpeed's ranks have saved them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from offload.engine.checkpoint.foreign.contents import (
    MASTER,
    SavedContents,
    SavedParameter,
    check_whole,
    count_of_steps,
    shape_of,
    whole,
)
from offload.engine.checkpoint.foreign.model_states import contents_of
from offload.engine.checkpoint.foreign.zero import buffers_of, model_files
from offload.errors import StoreError
from offload.fileio.torch_file import StoredTensor, read_torch_file
from offload.states import State

PARAMETERS, OPTIMIZER_STATE = "zero", "optimizer_state.pt"
_ENTRY = "param"
_STATES = {MASTER: State.WEIGHT} | {state.value: state for state in State if state is not State.WEIGHT}


def is_universal(folder: Path) -> bool:
    """Returns whether `folder` is a universal checkpoint."""
    return (folder / PARAMETERS / OPTIMIZER_STATE).is_file()


def read_universal(folder: Path, states: bool) -> SavedContents:
    """Reads all but the tensors of a checkpoint.

    Args:
        folder: The folder of one checkpoint.
        states: False if optimizer states are not needed.

    Raises:
        StoreError: If files are missing or damaged, or the checkpoint is of a kind that is not supported.
    """
    models = model_files(folder)
    if not models:
        raise StoreError(
            f"{folder} contains no file of model states, such as mp_rank_00_model_states.pt, with the counters and the "
            "schedule: fetch all files of the checkpoint"
        )
    model = read_torch_file(models[min(models)])
    optimizer = read_torch_file(folder / PARAMETERS / OPTIMIZER_STATE)
    # Stage 3 counts the steps once for all parameters, stages 1 and 2 beside each of them.
    inner = optimizer.get("optimizer_state_dict") or {}
    steps = count_of_steps(inner.get("state", {}).get(0, {}).get("step"))
    shapes = {name: shape_of(shape) for group in model.get("param_shapes") or () for name, shape in group.items()}
    buffers = buffers_of(model)
    parameters = {
        each.name: _parameter(each, shapes, states, steps)
        for each in sorted((folder / PARAMETERS).iterdir())
        # DeepSpeed writes the buffers of stages 1 and 2 there too, as if they were weights.
        if each.is_dir() and each.name not in buffers
    }
    # The tied names have files of their own where DeepSpeed took them from the model's state dict.
    tied = {name: first for name, first in (model.get("shared_params") or {}).items() if first in parameters}
    lost = [name for name in shapes if name not in parameters]
    if lost:
        raise StoreError(f"{folder} contains no folder {PARAMETERS}/{lost[0]}: fetch all files of the checkpoint")
    check_whole(parameters, folder)
    moments = {state.value for each in parameters.values() for state in each.states if state is not State.WEIGHT}
    _check_states(folder, parameters, moments)
    return contents_of(
        model,
        optimizer.get("loss_scaler"),
        parameters={name: each for name, each in parameters.items() if name not in tied},
        tied=tied,
        buffers=buffers,
        groups=optimizer["param_groups"],
        moments=frozenset(moments),
    )


def _check_states(folder: Path, parameters: Mapping[str, SavedParameter], moments: Set[str]) -> None:
    """Raises `StoreError` if a parameter has some of the moments, and not all: one without a gradient has none."""
    for name, each in parameters.items():
        own = {state.value for state in each.states if state is not State.WEIGHT}
        if own and (lost := sorted(moments - own)):
            raise StoreError(
                f"{folder / PARAMETERS / name} contains no {lost[0]}.pt: fetch all files of the checkpoint"
            )


def _parameter(folder: Path, shapes: Mapping[str, tuple[int, ...]], states: bool, steps: int) -> SavedParameter:
    """Returns the parameter of a folder.

    Args:
        folder: The folder, which has the parameter's name.
        shapes: Shapes of the parameters that train; those of stage 3 are stored flat.
        states: False if moments are not needed.
        steps: Number of updates, of parameters that do not say theirs.
    """
    tensors = dict(_tensors(folder, states))
    if State.WEIGHT not in tensors:
        raise StoreError(f"{folder} contains no {MASTER}.pt: fetch all files of the checkpoint")
    count = folder / "step.pt"
    # A parameter without a gradient has no moments, but is named with the others that train.
    return SavedParameter(
        shapes.get(folder.name, tensors[State.WEIGHT].shape),
        folder.name in shapes or len(tensors) > 1,
        {state: whole(tensor, f"{state.value} in {folder}") for state, tensor in tensors.items()},
        count_of_steps(read_torch_file(count)) if count.is_file() else steps,
    )


def _tensors(folder: Path, states: bool) -> Iterator[tuple[State, Any]]:
    """Yields the tensors in a parameter's folder by state."""
    for name, state in _STATES.items():
        path = folder / f"{name}.pt"
        if (states or state is State.WEIGHT) and path.is_file():
            found = read_torch_file(path)
            # Stage 3 saves the tensor itself, the others a dict with facts about tensor parallelism.
            tensor = found if isinstance(found, StoredTensor) else found[_ENTRY]
            yield state, tensor
