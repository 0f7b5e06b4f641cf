"""Finds the modules whose experts are stacked: each row of their parameters is one expert, and a unit of its own.

transformers 5 stacks the experts of a layer: `gate_up_proj` is (experts, rows, columns), and a forward multiplies by
`gate_up_proj[expert]`. transformers marks such a class by a decorator, which no other module has. The loop in its
forward computes the experts that tokens visit, one after the other. The loop replaces an implementation that needs all
experts at once, but only if both are transformers' own: another implementation may compute something else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch import nn

from offload.layout.modes import RULE_LAYOUTS
from offload.layout.units import Stack, is_compiled
from offload.notices import Remark
from offload.provenance import described as described_code
from offload.provenance import is_of, method_of, mixture_of_tokens
from offload.sizes import count_of

LOOP = "eager"
"""The implementation of transformers that takes one expert after the other."""


def cut_stacks(model: nn.Module, experts: str, optimizer: str) -> tuple[tuple[Stack, ...], tuple[str, ...]]:
    """Returns the stacks of a model that are cut by expert, and lines for the user on stacks that are not."""
    all_stacks = () if experts == "whole" else find_stacks(model)
    used = other_implementations(model, all_stacks)
    for name, implementation in used.items():
        reason = _why_not_loop(model.get_submodule(name), implementation)
        if reason is not None:
            return (), (_whole(f"{reason}, which a loop over the experts may not replace"),)
    if not RULE_LAYOUTS[optimizer].elementwise:
        frozen_stacks = tuple(
            stack
            for stack in all_stacks
            if not any(model.get_parameter(name).requires_grad for name in stack.parameters)
        )
        if len(frozen_stacks) < len(all_stacks):
            return frozen_stacks, (_whole("the optimizer's rule looks at whole parameters"),)
    return all_stacks, ()


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Returns the modules of `model` whose parameters stack experts, in the model's order."""
    modules = dict(model.named_modules())
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return tuple(
        Stack(name, tuple(f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)), _rows(module))
        for name, module in modules.items()
        if _stacks_experts(module)
        and all(owners[id(parameter)] == 1 for parameter in module.parameters())
        and not _is_wrapped(name, modules)
    )


def rows_of(stacks: Sequence[Stack]) -> dict[str, int]:
    """Returns for the name of each parameter that is cut its number of experts."""
    return {name: stack.rows for stack in stacks for name in stack.parameters}


def other_implementations(model: nn.Module, stacks: Sequence[Stack]) -> dict[str, str]:
    """Returns the implementations of transformers that take all experts at once, by the module's name."""
    configs = {stack.module: getattr(model.get_submodule(stack.module), "config", None) for stack in stacks}
    named = {name: getattr(config, "_experts_implementation", None) for name, config in configs.items()}
    return {name: used for name, used in named.items() if isinstance(used, str) and used != LOOP}


def _why_not_loop(module: nn.Module, implementation: str) -> str | None:
    """Returns a clause that names the code that might give other results in a loop; None if there is no such code."""
    functions = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", {})
    used = functions.get(implementation)
    if not is_of(used, "transformers"):
        return f'"{implementation}" is {described_code(used)}'
    for name, words in (("forward", "forward"), ("_apply_gate", "gate")):
        if not is_of(own := method_of(module, name), "transformers"):
            return f"their {words} is {described_code(own)}"
    # An implementation calls an activation with the tokens of all experts, the loop with the tokens of one expert.
    return mixture_of_tokens(module)


def described(stacks: Sequence[Stack], others: Mapping[str, str], experts: str) -> tuple[str, ...]:
    """Returns lines for the user: on the experts that are units, and on the implementation that changes."""
    if not stacks:
        return ()
    count = sum(stack.rows for stack in stacks)
    used = f', in a loop in place of "{min(others.values())}", which needs all at once' if others else ""
    skipped = "; those without a token in a step are not updated" if experts == "visited" else ""
    return (Remark(f"{count_of(count, 'expert is a unit', 'experts are units')} of their own{used}{skipped}"),)


def _whole(reason: str) -> str:
    return Remark(f'experts stay in one unit with their layer, as with "experts": "whole": {reason}')


def _stacks_experts(module: nn.Module) -> bool:
    """Returns True for a module that transformers marks as stacked experts, all of whose parameters are stacks."""
    if not (hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")):
        return False
    rows = _rows(module)
    own = list(module.parameters())
    # Submodules such as a per-expert norm own parameters that are not stacked.
    return (
        rows > 1
        and any(parameter.ndim == 3 for parameter in own)
        and all(parameter.ndim > 1 and parameter.shape[0] == rows for parameter in own)
        and len(own) == len(list(module.parameters(recurse=False)))
    )


def _rows(module: nn.Module) -> int:
    rows = getattr(module, "num_experts", 0)
    return rows if isinstance(rows, int) else 0


def _is_wrapped(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Returns True if a module is, or is inside of, a compiled module or an adapter of peft for whole parameters."""
    around = [name]
    while around[-1]:
        around.append(around[-1].rpartition(".")[0])
    if any(is_compiled(modules[outer]) for outer in around):
        return True
    # Such an adapter adds its product to the whole parameter in each forward.
    return any(is_parameter_adapter(modules[outer]) for outer in around)


def is_parameter_adapter(module: nn.Module) -> bool:
    """Returns True for an adapter of peft for a whole parameter of the module inside (`target_parameters`)."""
    # peft is not imported here: if a model has such an adapter, peft is imported already.
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    return kind is not None and isinstance(module, kind)
