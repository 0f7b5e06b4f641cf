"""The kernels of a model's blocks: torch's own, Liger's, or those that `torch.compile` makes.

    --kernels auto ─┬─► on a CPU                                               eager
                    └─► on a GPU ─┬─► Liger is installed, with the family      liger
                                  └─► else                                     eager

Kernels of one kind differ from those of another by rounding. So a run records its kind, and a resumed run keeps it.

Liger replaces norms, rotary positions and gated MLPs. Its losses are left out. The loss in chunks (`offload.losses`)
saves the same memory, and adds up the gradient of the head in fp32, where Liger's adds in the dtype of the weights. It
also leaves the forward of the model to transformers, so that evaluations and resumed runs compute as before. MLPs in
tiles and experts that are units are left out too: the engine runs their own forward.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from offload.config import Config
from offload.distributed.process_group import as_the_first
from offload.engine.compiled_blocks import compile_blocks, reason_against
from offload.engine.snapshot import Snapshot
from offload.errors import ConfigError
from offload.fileio.plain_json import from_plain
from offload.layout.experts import find_stacks
from offload.losses.causal_model import inside_adapters
from offload.swapper.store import rank_folders, run_status
from offload.swapper.store.inspection import look

Kernels = Literal["liger", "compile", "eager"]

_LINES = {
    "liger": "norms, rotary positions and MLPs run in Liger's kernels",
    "compile": "blocks run as torch.compile makes them, which the first step waits for",
    "eager": "blocks run in torch's own kernels",
}


class ChosenKernels(NamedTuple):
    """The kernels of a run."""

    kind: Kernels
    line: str | None = None
    """A sentence on the choice; None for no line."""


def choose_kernels(wanted: str, config: Config, model: nn.Module, device: torch.device) -> ChosenKernels:
    """Returns the kernels that the user wants, else those with which the run began, else those for this machine.

    With several ranks all must call this, and all receive the choice of rank 0. The model stays as it is.

    Raises:
        ConfigError: the kernels that the user wants, or with which the run began, cannot run here.
    """
    return ChosenKernels(*as_the_first(lambda: _choose(wanted, config, model, device), "choose kernels"))


def _choose(wanted: str, config: Config, model: nn.Module, device: torch.device) -> ChosenKernels:
    kind: Kernels | None = next((kind for kind in get_args(Kernels) if kind == wanted), None)
    if kind is not None:
        reason = _reason_against(kind, config, model, device)
        if reason is not None:
            raise ConfigError(f"--kernels {kind} cannot run here: {reason}; --kernels eager needs nothing")
        return ChosenKernels(kind)
    begun = _of_run(config)
    if begun is not None:
        reason = _reason_against(begun, config, model, device)
        if reason is not None:
            raise ConfigError(
                f"the run has begun with --kernels {begun}, which cannot run here: {reason}; --kernels eager continues "
                "with torch's own kernels, which round otherwise"
            )
        fresh = _automatic(config, model, device)
        return ChosenKernels(begun, None if begun == fresh.kind else f"{_LINES[begun]}, with which the run has begun")
    return _automatic(config, model, device)


def _automatic(config: Config, model: nn.Module, device: torch.device) -> ChosenKernels:
    if device.type == "cpu" and not _interpreted():
        return ChosenKernels("eager")
    no_liger = _reason_against("liger", config, model, device)
    if no_liger is None:
        return ChosenKernels("liger", f"{_LINES['liger']}; --kernels eager leaves them to torch")
    return ChosenKernels("eager", f"{_LINES['eager']}: {no_liger}")


def _of_run(config: Config) -> Kernels | None:
    """Returns the kernels with which the run began that `config` resumes; None for a new run."""
    resumes = config.offload.resume in ("auto", "must") and bool(config.drives)
    if not resumes or not run_status(config.drives, config.offload.run).exists:
        return None
    for folder in rank_folders(Path(config.drives[0]) / config.offload.run):
        for commit in look(folder).whole:
            facts = Snapshot.unpack(commit.contents).facts
            job = from_plain(facts["client_state"]).get("job")
            if not facts["global_steps"] or not isinstance(job, dict):
                return None
            # Identities of earlier versions do not record the kernels: these versions had torch's own alone.
            return next((kind for kind in get_args(Kernels) if kind == job.get("kernels")), "eager")
    return None


def _reason_against(kind: str, config: Config, model: nn.Module, device: torch.device) -> str | None:
    """Returns as a clause why kernels cannot run on a device, as far as it is known before they run; None if they can.

    What torch compiles for a CPU is left to torch to check.
    """
    if kind == "compile" and (reason := reason_against(model, config)) is not None:
        return reason
    if kind == "eager" or (kind == "compile" and device.type == "cpu"):
        return None
    if kind == "liger":
        if device.type == "cpu" and not _interpreted():
            return "Liger's kernels need a GPU"
        if importlib.util.find_spec("liger_kernel") is None:
            return "liger_kernel is not installed (pip install 'offload[liger]')"
    reason = None if _interpreted() else _reason_against_triton()
    if reason is None and kind == "liger" and _patch_of(model) is None:
        return f"Liger has no kernels for {type(inside_adapters(model)).__name__}"
    return reason


def _interpreted() -> bool:
    """Returns True if Triton interprets its kernels, which then need no GPU and no compiler."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _reason_against_triton() -> str | None:
    """Returns as a clause what Triton lacks to compile a kernel; None if it lacks nothing that is known."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))):
        return "Triton needs a C compiler, and neither gcc nor clang is on the PATH"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"Triton needs {header}, which a package such as python3-dev brings"


def _patch_of(model: nn.Module) -> Any:
    """Returns the function by which Liger patches models of this family; None without one."""
    import liger_kernel.transformers as liger

    try:
        return getattr(liger, f"apply_liger_kernel_to_{inside_adapters(model).config.model_type}", None)
    except ImportError:  # a family that this transformers does not have
        return None


def _left_out(shape: Any, own_mlp: bool) -> list[str]:
    """Returns the kernels of Liger that a model does without: those of losses, and those for other formulas.

    Liger replaces methods of modules that exist, and does not look at their settings.

    Args:
        shape: the model's config.
        own_mlp: True if the engine runs the model's own MLPs.
    """
    activation = getattr(shape, "hidden_activation", None) or getattr(shape, "hidden_act", None)
    parameters = getattr(shape, "rope_parameters", None) or {}
    tables = [table for table in (parameters, *parameters.values()) if isinstance(table, Mapping)]
    shares = [getattr(shape, "partial_rotary_factor", None), *(table.get("partial_rotary_factor") for table in tables)]
    left_out = {
        "cross_entropy": True,
        "fused_linear_cross_entropy": True,
        "swiglu": own_mlp or activation not in ("silu", "swish"),
        "geglu": own_mlp or activation != "gelu_pytorch_tanh",
        "rope": any(share not in (None, 1.0) for share in shares),
    }
    return [name for name, is_left_out in left_out.items() if is_left_out]


def apply_kernels(model: nn.Module, kind: Kernels, config: Config) -> None:
    """Makes the blocks of a model of transformers, or of peft around one, run in kernels of this kind."""
    if kind == "liger":
        patch, base = _patch_of(model), inside_adapters(model)
        known = inspect.signature(patch).parameters
        left_out = _left_out(
            base.config.get_text_config(), config.offload.tile_mlp is not False or bool(find_stacks(model))
        )
        patch(model=base, **{name: False for name in left_out if name in known})
    elif kind == "compile":
        compile_blocks(model, config, {})
