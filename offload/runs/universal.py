"""Implementation of `offload export --format deepspeed-universal`: a run as DeepSpeed's universal checkpoint.

    <out>/latest_universal                          the tag
    <out>/<tag>/zero/<name>/fp32.pt, exp_avg.pt, …  a parameter's master and moments, each in one piece
    <out>/<tag>/zero/optimizer_state.pt             numbers of the optimizer's groups
    <out>/<tag>/…_model_states.pt                   counters, schedule and buffers, for stages 1 and 2, and for stage 3

`offload.runs.states_by_parameter` streams the states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.deepspeed import OPTIMIZER_STATE, PARAMETERS
from offload.errors import StoreError
from offload.fileio import inner_name, real_path
from offload.fileio.plain_json import from_plain
from offload.fileio.safetensors_stream import Tensor
from offload.fileio.torch_file import write_torch_file
from offload.model_io.save import arriving, check_room
from offload.runs.export import Exported, check_target
from offload.runs.states_by_parameter import StatesPlan, TrainedSource, write_states

KIND = "a universal checkpoint"
"""Name of the output, for messages."""
_VERSION = "0.19.8"
"""Version of DeepSpeed whose format the files have."""
_UNIVERSAL_VERSION = 0.4
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Stages 1 and 2 read the first of these, stage 3 the second."""


def export_universal(
    source: TrainedSource, out: Path, plan: StatesPlan, progress: Callable[[int], None] = lambda _: None
) -> Exported:
    """Writes a universal checkpoint into the folder `out`, completely or not at all.

    The source stays open; `out` must not exist, or be empty.
    """
    out = real_path(out)
    check_target(out)
    _check_names(plan)
    messages: list[str] = []

    def place(parameter: str, name: str, tensor: Tensor) -> tuple[Path, Any]:
        return folder / tag / PARAMETERS / parameter / f"{name}.pt", {"param": tensor, "cat_dim": 0}

    tag = f"global_step{source.step}"
    with arriving(out, messages.append) as folder:
        check_room(folder, plan.nbytes, out)
        (folder / tag / PARAMETERS).mkdir(parents=True)
        # All folders first: the files of experts' rows are open side by side.
        for name in plan.shapes:
            (folder / tag / PARAMETERS / name).mkdir()
        write_states(source, plan, place, progress)
        for name, steps in plan.trainable.items():
            write_torch_file(folder / tag / PARAMETERS / name / "step.pt", _count(steps))
        write_torch_file(folder / tag / PARAMETERS / OPTIMIZER_STATE, _optimizer_state(source, plan))
        for name in _MODEL_FILES:
            write_torch_file(folder / tag / name, _model_states(source, plan))
        # Written last, since DeepSpeed takes a folder with this file for a checkpoint.
        (folder / "latest_universal").write_text(tag)
    return plan.exported(out, source.step, ("latest_universal", tag), (*messages, *_notices(source, plan)))


def _check_names(plan: StatesPlan) -> None:
    """Raises `StoreError` if a parameter's name, which may come from anybody's file, cannot name a folder."""
    for name in plan.shapes:
        try:
            if inner_name(name) == OPTIMIZER_STATE:
                raise ValueError(f"{name} is another file there")
        except ValueError as error:
            raise StoreError(
                f"the parameter {name[:80]!r} cannot name a folder, and {KIND} has one for each parameter: {error}; "
                "export weights alone, without --format"
            ) from None


def _notices(source: TrainedSource, plan: StatesPlan) -> Iterator[str]:
    if len(plan.trainable) < len(plan.shapes) or source.buffers:
        yield (
            "DeepSpeed loads neither frozen weights nor buffers from a universal checkpoint: build the model with them "
            "there"
        )
    if source.progress.facts["loss_scale"] is not None:
        yield "the loss scale is not in a universal checkpoint: it begins there as the config says"


# -- small files --------------------------------------------------------------------------------------


def _count(steps: int) -> torch.Tensor:
    """Returns a number of updates in the form that most optimizers of DeepSpeed and torch count with.

    DeepSpeed's optimizers pass it to C++ as an integer, and torch's optimizers add to a tensor.
    """
    return torch.tensor(steps, dtype=torch.int64, device="cpu")


def _optimizer_state(source: TrainedSource, plan: StatesPlan) -> dict[str, Any]:
    """Returns the content of `optimizer_state.pt`: for stages 1 and 2, and under a key of its own for stage 3."""
    groups = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()} | {"params": [index]}
        for index, group in enumerate(source.progress.facts["groups"])
    ]
    steps = _count(max(plan.trainable.values(), default=0))
    return {
        "overflow": False,
        "ds_version": _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": steps}}, "param_groups": groups},
    }


def _model_states(source: TrainedSource, plan: StatesPlan) -> dict[str, Any]:
    facts = source.progress.facts
    theirs = from_plain(source.client_state)
    return {
        **(theirs if isinstance(theirs, Mapping) else {}),
        "module": dict(source.buffers),
        "buffer_names": list(source.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(plan.shapes[name])) for name in plan.trainable)],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(source.about.get("tied", {})),
        "lr_scheduler": from_plain(facts["scheduler"]),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": facts["skipped_steps"],
        "global_steps": facts["global_steps"],
        "global_samples": facts["global_samples"],
        "dp_world_size": plan.world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": _UNIVERSAL_VERSION},
    }
