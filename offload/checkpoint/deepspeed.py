"""Reads the files that DeepSpeed's ranks save in ZeRO stages 1, 2 and 3.

    mp_rank_00_model_states.pt                        stages 1 and 2: names, counters, buffers, 16-bit weights
    zero_pp_rank_<r>_mp_rank_00_model_states.pt       stage 3: the same of rank r, and its part of frozen weights
    [bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt    masters and moments of rank r, in flat tensors

In stages 1 and 2 a group of parameters is one flat tensor that is cut at any element, and a table lists each rank's
part. In stage 3 each parameter is cut into equal parts, the last ones padded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.foreign_contents import (
    MASTER,
    Fragment,
    SavedContents,
    SavedCounters,
    SavedParameter,
    attributes,
    check_whole,
    count_of_steps,
    fragment,
    shape_of,
    whole,
)
from offload.errors import StoreError
from offload.fileio.torch_file import StoredTensor, plain, read_torch_file
from offload.states import State

# -- model states --------------------------------------------------------------------------------------
# Facts in DeepSpeed's files of model states: counters, schedule, config, and the user's own values.


_OF_DEEPSPEED = """module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments
lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config
ds_version checkpoint_parallel_dimensions universal_checkpoint_info num_experts ds_autoep_layers
sparse_tensor_module_names""".split()
"""Keys of a file of model states that are not the user's."""


def contents_of(
    model: Mapping[str, Any],
    loss_scaler: Any,
    *,
    parameters: Mapping[str, SavedParameter],
    tied: Mapping[str, str],
    buffers: Mapping[str, StoredTensor],
    groups: Sequence[Mapping[str, Any]],
    moments: frozenset[str],
) -> SavedContents:
    """Returns the contents of a checkpoint of DeepSpeed."""
    steps, config = int(model.get("global_steps") or 0), model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    accumulation = config.get("gradient_accumulation_steps")
    scaler = attributes(loss_scaler)
    # Only a dynamic scale is saved: both programs read a fixed one from the config.
    dynamic = bool(scaler.get("dynamic")) and "cur_iter" in scaler
    loss_scale = (
        {
            "scale": float(scaler["cur_scale"]),
            "steps": int(scaler["cur_iter"]),
            "overflowed_at": int(scaler["last_overflow_iter"]),
            "patience": int(scaler["cur_hysteresis"]),
        }
        if dynamic
        else None
    )
    return SavedContents(
        program=f"DeepSpeed {model.get('ds_version')}",
        parameters=parameters,
        tied=tied,
        buffers=buffers,
        groups=groups,
        moments=moments,
        # Adam and Lamb keep states of the same names, so that only the config distinguishes them.
        optimizer=str((config.get("optimizer") or {}).get("type")).lower(),
        counters=SavedCounters(
            global_steps=steps,
            skipped_steps=int(model.get("skipped_steps") or 0),
            # DeepSpeed does not save its count of micro-batches. A save is between steps, so the count follows.
            micro_steps=steps * (accumulation if isinstance(accumulation, int) else 1),
            global_samples=int(model.get("global_samples") or 0),
        ),
        scheduler=model.get("lr_scheduler"),
        loss_scale=loss_scale,
        # DeepSpeed saves the user's values among its own keys.
        theirs={key: value for key, value in model.items() if key not in _OF_DEEPSPEED},
    )


# -- zero ----------------------------------------------------------------------------------------------


_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_PIPELINE, _EXPERTS = re.compile(r"layer_\d+-model_.*"), re.compile(r".*(expert_\d+|expp_rank)_.*")
_NAMED = 32
"""Most missing ranks that an error names."""
OFFLOADED = "offloaded_tensors"
"""Folder of the swap files that DeepSpeed copies next to its own files."""


def is_zero(folder: Path) -> bool:
    """Returns whether DeepSpeed has saved a checkpoint into `folder`."""
    return folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def model_files(folder: Path) -> dict[int, Path]:
    """Returns the files of model states by rank. In stages 1 and 2 there is one file, of rank 0."""
    names = sorted(path.name for path in folder.iterdir())
    ranks = [match[2] for pattern in (_OPTIMIZER, _MODEL) for match in map(pattern.fullmatch, names) if match]
    kinds = {
        "pipeline parallelism": any(map(_PIPELINE.fullmatch, names)),
        "experts divided among ranks": any(map(_EXPERTS.fullmatch, names)),
        "tensor parallelism": any(int(rank) for rank in ranks),
    }
    for kind, there in kinds.items():
        if there:
            raise StoreError(
                f"{folder} was saved with {kind}, which is not supported: make a model of whole layers of it with "
                "DeepSpeed (ds_to_universal joins tensors), or with the tools of the program that saved it"
            )
    matches = (_MODEL.fullmatch(name) for name in names)
    return {int(match[1] or 0): folder / match[0] for match in matches if match}


def read_zero(folder: Path, states: bool) -> SavedContents:
    """Reads all but the tensors of a checkpoint."""
    models = model_files(folder)
    matches = (_OPTIMIZER.fullmatch(path.name) for path in folder.iterdir())
    files = {int(match[1]): folder / match[0] for match in matches if match}
    model = read_torch_file(models[min(models)])
    if not files:
        raise StoreError(
            f"{folder} contains no file of a rank's optimizer states, such as zero_pp_rank_0_mp_rank_00_optim_states.pt"
            ": fetch all files of the checkpoint, or, if it was saved without ZeRO, save it with a stage of ZeRO"
        )
    # This reads the places of tensors in their files, not their values, so the files of hundreds of ranks fit in
    # memory.
    ranks = [read_torch_file(files[rank])["optimizer_state_dict"] for rank in sorted(files)]
    # DeepSpeed's optimizer for bf16 without partitioned gradients saves no stage number, and files as in stage 1.
    stage = int(plain(ranks[0].get("zero_stage", 1)))
    size = _check_ranks(folder, files, ranks[0], model, models if stage == 3 else None)
    optimizer = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    if stage == 3:
        parameters = _stage_3(folder, model, ranks, states)
        # The model states of the other ranks are needed only for their parts of frozen weights. All else is equal.
        others = range(1, size) if model.get("frozen_param_shapes") else ()
        models_of_all = [model, *(read_torch_file(models[rank]) for rank in others)]
        parameters |= _frozen_3(model, models_of_all)
    else:
        parameters = _stages_1_and_2(folder, model, ranks, states)
        # All other entries are frozen weights: they are not trained, no buffers, and not tied to another weight.
        known = {*parameters, *(model.get("buffer_names") or ()), *(model.get("shared_params") or ())}
        parameters |= {
            name: SavedParameter(tensor.shape, False, {State.WEIGHT: whole(tensor, name)})
            for name, tensor in (model.get("module") or {}).items()
            if name not in known
        }
    check_whole(parameters, folder)
    return contents_of(
        model,
        ranks[0].get("loss_scaler"),
        parameters=parameters,
        tied=dict(model.get("shared_params") or {}),
        buffers=buffers_of(model),
        groups=ranks[0][optimizer]["param_groups"],
        # All states but the count of steps: each has as many elements as its parameter.
        moments=frozenset(
            key
            for state in ranks[0][optimizer]["state"].values()
            for key, value in state.items()
            if key != "step" and value is not None
        ),
    )


def buffers_of(model: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the buffers among the weights of a file of model states."""
    module = model.get("module") or {}
    return {name: module[name] for name in model.get("buffer_names") or () if name in module}


def _check_ranks(
    folder: Path, files: Mapping[int, Path], first: Mapping[str, Any], model: Any, models: Mapping[int, Path] | None
) -> int:
    """Returns the number of ranks; raises `StoreError` if a rank's file is missing.

    Args:
        models: Files of model states by rank, if each rank has one.
    """
    # In stages 1 and 2 each group has its own count. Counts differ if experts are divided among ranks.
    count = first["partition_count"]
    size = max(count) if isinstance(count, list) else int(count)
    for what, paths in (("optimizer", files), ("model", models)):
        # One by one: a damaged file may name any number of ranks.
        ranks = (rank for rank in range(size) if paths is not None and rank not in paths)
        missing = [*itertools.islice(ranks, _NAMED)]
        if missing:
            more = ", …" if len(missing) == _NAMED else ""
            raise StoreError(
                f"{folder} lacks the files of {what} states of rank {', '.join(map(str, missing))}{more} of {size}: "
                "fetch the files of all ranks into one folder"
            )
    if not isinstance(first.get("base_optimizer_state", {}), dict) or first.get("ds_zero_partition_groups"):
        raise StoreError(
            f"{folder} was saved with elastic_checkpoint, or with experts divided among ranks, which is not supported: "
            "save it without"
        )
    if model.get("param_shapes") is None:
        raise StoreError(f"{folder} has no shapes of parameters: it was not saved by ZeRO, or by DeepSpeed before 0.3")
    return size


# -- stages 1 and 2 -----------------------------------------------------------------------------------


def _stages_1_and_2(
    folder: Path, model: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], states: bool
) -> dict[str, SavedParameter]:
    """Returns the trained parameters: fragments of the ranks' flat tensors, in the order of ranks."""
    shapes = {name: shape_of(shape) for group in model["param_shapes"] for name, shape in group.items()}
    parts: dict[str, dict[State, list[Fragment]]] = {name: {} for name in shapes}
    steps = dict.fromkeys(shapes, 0)
    for rank, saved in enumerate(ranks):
        base = saved["base_optimizer_state"]
        for group, mapping in enumerate(saved["param_slice_mappings"]):
            group_state = base["state"].get(group, {})
            # FusedAdam counts the steps of a group, and torch's optimizers count the steps of each tensor.
            count = count_of_steps(group_state.get("step"), count_of_steps(base["param_groups"][group].get("step")))
            flat = {State.WEIGHT: saved["single_partition_of_fp32_groups"][group]}
            flat |= _moments(group_state) if states else {}
            # The table has a fragment's place in this rank's tensor. In the parameter, fragments are in the order of
            # ranks.
            for name, place in mapping.items():
                start, numel = (int(attributes(place)[key]) for key in ("start", "numel"))
                for state, tensor in flat.items():
                    what = f"{state.value} of rank {rank} in {folder}"
                    parts[name].setdefault(state, []).append(fragment(tensor, start, numel, what))
                steps[name] = count
    return {name: SavedParameter(shape, True, parts[name], steps[name]) for name, shape in shapes.items()}


def _moments(group_state: Mapping[str, Any]) -> dict[State, Any]:
    known = {state.value: state for state in State}
    return {known[key]: value for key, value in group_state.items() if key in known}


# -- stage 3 ------------------------------------------------------------------------------------------


def _stage_3(
    folder: Path, model: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], states: bool
) -> dict[str, SavedParameter]:
    """Returns the trained parameters. The flat tensor of a group has an equal part of each parameter on every rank."""
    if (folder / OFFLOADED).is_dir():
        raise StoreError(
            f"{folder} was saved with the optimizer on NVMe, of which DeepSpeed copies swap files without a table of "
            'them: load it in DeepSpeed with "offload_optimizer": {"device": "cpu"} and save it again, or load the '
            "weights from save_16bit_model"
        )
    parameters: dict[str, SavedParameter] = {}
    for group, shapes in enumerate(model["param_shapes"]):
        rank_states = [saved["optimizer_state_dict"]["state"].get(group, {}) for saved in ranks]
        flats = [
            {State.WEIGHT: saved["fp32_flat_groups"][group], **(_moments(rank_state) if states else {})}
            for saved, rank_state in zip(ranks, rank_states, strict=True)
        ]
        steps, start = count_of_steps(rank_states[0].get("step")), 0
        for name, shape in shapes.items():
            parameter = SavedParameter(shape_of(shape), True, {state: [] for state in flats[0]}, steps)
            part = -(-parameter.numel // len(ranks))
            # A small parameter may end before the last ranks. Then their parts are padding only.
            for rank, flat in enumerate(flats):
                numel = max(0, min(part, parameter.numel - rank * part))
                for state, parts in parameter.states.items():
                    what = f"{state.value} of rank {rank} in {folder}"
                    parts.append(fragment(flat[state], start, numel, what))
            parameters[name] = parameter
            start += part
    return parameters


def _frozen_3(model: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, SavedParameter]]:
    """Yields each frozen parameter with its name. Every rank has an equal, flat part of the parameter."""
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        parameter = SavedParameter(shape_of(shape), False, {})
        part = -(-parameter.numel // len(models))
        parts = [
            fragment(
                rank_model["frozen_param_fragments"][name], 0, max(0, min(part, parameter.numel - rank * part)), name
            )
            for rank, rank_model in enumerate(models)
        ]
        yield name, parameter._replace(states={State.WEIGHT: parts})


# -- universal -----------------------------------------------------------------------------------------
#
# Reads universal checkpoints of DeepSpeed, which have a folder for each parameter.
#
# zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    a parameter's master and moments, in one piece
# zero/<name>/step.pt                               its number of updates, from stages 1 and 2
# zero/optimizer_state.pt                           numbers of the optimizer's groups, loss scale
# *_model_states.pt                                 as DeepSpeed's ranks have saved them


PARAMETERS, OPTIMIZER_STATE = "zero", "optimizer_state.pt"
_ENTRY = "param"
_STATES = {MASTER: State.WEIGHT} | {state.value: state for state in State if state is not State.WEIGHT}


def is_universal(folder: Path) -> bool:
    """Returns whether `folder` is a universal checkpoint."""
    return (folder / PARAMETERS / OPTIMIZER_STATE).is_file()


def read_universal(folder: Path, states: bool) -> SavedContents:
    """Reads all but the tensors of a checkpoint."""
    models = model_files(folder)
    if not models:
        raise StoreError(
            f"{folder} contains no file of model states, such as mp_rank_00_model_states.pt, with the counters and the "
            "schedule: fetch all files of the checkpoint"
        )
    model = read_torch_file(models[min(models)])
    optimizer = read_torch_file(folder / PARAMETERS / OPTIMIZER_STATE)
    # Stage 3 counts the steps once for all parameters, stages 1 and 2 once for each parameter.
    inner = optimizer.get("optimizer_state_dict") or {}
    steps = count_of_steps(inner.get("state", {}).get(0, {}).get("step"))
    shapes = {name: shape_of(shape) for group in model.get("param_shapes") or () for name, shape in group.items()}
    buffers = buffers_of(model)
    parameters = {
        path.name: _parameter(path, shapes, states, steps)
        for path in sorted((folder / PARAMETERS).iterdir())
        # DeepSpeed writes the buffers of stages 1 and 2 there too, as if they were weights.
        if path.is_dir() and path.name not in buffers
    }
    # DeepSpeed may have written files for all tied names, if it took the names from the model's state dict.
    tied = {name: first for name, first in (model.get("shared_params") or {}).items() if first in parameters}
    lost = [name for name in shapes if name not in parameters]
    if lost:
        raise StoreError(f"{folder} contains no folder {PARAMETERS}/{lost[0]}: fetch all files of the checkpoint")
    check_whole(parameters, folder)
    moments = {
        state.value for parameter in parameters.values() for state in parameter.states if state is not State.WEIGHT
    }
    for name, parameter in parameters.items():
        own = {state.value for state in parameter.states if state is not State.WEIGHT}
        # A parameter without a gradient has no moments; any other has all of them.
        if own and (absent := sorted(moments - own)):
            raise StoreError(
                f"{folder / PARAMETERS / name} contains no {absent[0]}.pt: fetch all files of the checkpoint"
            )
    return contents_of(
        model,
        optimizer.get("loss_scaler"),
        parameters={name: parameter for name, parameter in parameters.items() if name not in tied},
        tied=tied,
        buffers=buffers,
        groups=optimizer["param_groups"],
        moments=frozenset(moments),
    )


def _parameter(folder: Path, shapes: Mapping[str, tuple[int, ...]], states: bool, steps: int) -> SavedParameter:
    """Returns the parameter of a folder.

    Args:
        shapes: Shapes of the parameters that train, since stage 3 stores parameters flat.
        steps: Number of updates, for a folder that does not contain it.
    """
    tensors: dict[State, Any] = {}
    for name, state in _STATES.items():
        path = folder / f"{name}.pt"
        if (states or state is State.WEIGHT) and path.is_file():
            content = read_torch_file(path)
            # Stage 3 saves the tensor itself, the others a dict with facts about tensor parallelism.
            tensors[state] = content if isinstance(content, StoredTensor) else content[_ENTRY]
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
