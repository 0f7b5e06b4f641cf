"""Facts in DeepSpeed's files of model states: counters, schedule, config, and what the user has added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.engine.checkpoint.foreign.contents import SavedContents, SavedCounters, SavedParameter, attributes
from offload.fileio.torch_file import StoredTensor

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
    """Returns the contents of a checkpoint of DeepSpeed.

    Args:
        model: The file of model states of rank 0.
        loss_scaler: The loss scale, as the files of the optimizer have it.
        parameters: All parameters, but other names of tied ones.
        tied: See `SavedContents`, as for those below.
        buffers: Persistent buffers.
        groups: Numbers of the optimizer's groups.
        moments: Names of its states.
    """
    steps, config = int(model.get("global_steps") or 0), model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    accumulation = config.get("gradient_accumulation_steps")
    return SavedContents(
        program=f"DeepSpeed {model.get('ds_version')}",
        parameters=parameters,
        tied=tied,
        buffers=buffers,
        groups=groups,
        moments=moments,
        # Adam and Lamb keep states of the same names, so that only the config tells them apart.
        optimizer=str((config.get("optimizer") or {}).get("type")).lower(),
        counters=SavedCounters(
            global_steps=steps,
            skipped_steps=int(model.get("skipped_steps") or 0),
            # DeepSpeed does not save its count of micro-batches. A checkpoint is saved between steps, so it follows.
            micro_steps=steps * (accumulation if isinstance(accumulation, int) else 1),
            global_samples=int(model.get("global_samples") or 0),
        ),
        scheduler=model.get("lr_scheduler"),
        loss_scale=_loss_scale(loss_scaler),
        # DeepSpeed saves the user's values among its own keys.
        theirs={key: value for key, value in model.items() if key not in _OF_DEEPSPEED},
    )


def _loss_scale(scaler: Any) -> dict[str, Any] | None:
    """Returns the state of a dynamic loss scale as `LossScaler.state` does; None for a fixed one, or none."""
    found = attributes(scaler)
    # A fixed scale is the config's in both programs.
    if not found.get("dynamic") or "cur_iter" not in found:
        return None
    return {
        "scale": float(found["cur_scale"]),
        "steps": int(found["cur_iter"]),
        "overflowed_at": int(found["last_overflow_iter"]),
        "patience": int(found["cur_hysteresis"]),
    }
