"""Finds the modules whose experts are stacked, and decides whether their units are experts or groups of them.

transformers 5 stacks the experts of a layer: `gate_up_proj` is (experts, rows, columns). transformers marks such a
class by a decorator, which no other module has. The loop in its forward multiplies by `gate_up_proj[expert]` for each
expert that tokens visit. Other implementations take all experts at once; the usual one makes grouped products.

    unit                products                                                                  "experts"
    an expert           the loop                                                                  each, visited
    a group of experts  grouped products, one group after the other, with the bits of all at once  grouped
    the layer           the model's own implementation                                            whole

The loop and the products by group replace another implementation only if both are transformers' own: other code may
compute something else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout.modes import RULE_LAYOUTS
from offload.layout.units import Stack, is_compiled, modules_around
from offload.notices import Remark
from offload.provenance import described as described_code
from offload.provenance import is_of, method_of, mixture_of_tokens
from offload.sizes import count_of

LOOP = "eager"
"""The implementation of transformers that takes one expert after the other."""
GROUPED = "grouped_mm"
"""The implementation of transformers that makes grouped products."""
_MOST_GROUPS = 8
"""Most groups of a layer: with the rest of the layer at most 18 uses of units in forward and backward."""


def groups_of(experts: int) -> int:
    """Returns the number of groups of a layer: the largest divisor of the number of its experts up to eight."""
    return next(count for count in range(_MOST_GROUPS, 0, -1) if experts % count == 0)


def takes_groups(experts: str, implementation: str | None, trains: bool) -> bool:
    """Returns True if the units of a layer are groups of experts, for a value of "experts".

    "auto" decides by what a unit's use costs. A use takes the host about 0.3 to 0.6 ms, in which a link moves 6 to
    12 MB: about one expert of today's models. So groups are faster once tokens visit more than half of the experts.
    With E experts, k of them for each token, t tokens visit a share of 1 - (1 - k/E)**t: half are visited by 11 tokens
    for 8 of 128, and by 35 for 10 of 512. A model that trains has more tokens than that, and one that generates has
    fewer. Also, groups keep the bits of a model that makes grouped products.

    Args:
        experts: "auto", or another value of the config.
        implementation: the model's own implementation by transformers' name; None if it has none.
        trains: True if any parameter trains.
    """
    return experts == "grouped" or (experts == "auto" and trains and implementation == GROUPED)


def cut_stacks(
    model: nn.Module, experts: str, optimizer: str, ep_size: int = 1
) -> tuple[tuple[Stack, ...], tuple[str, ...]]:
    """Returns the stacks of a model that are cut by expert or by group, and lines for the user on other stacks.

    With expert parallelism `ep_size` ranks own the experts of a layer, and all stacks are cut into one group for each.
    Raises `ConfigError` if ranks cannot own the experts.
    """
    if ep_size > 1:
        return _owned(model, optimizer, ep_size), ()
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if experts == "whole":
        return (), ()
    all_stacks = find_stacks(model)
    other_classes = sorted({type(module).__name__ for module in model.modules() if _stacks_unmarked_experts(module)})
    lines: tuple[str, ...] = ()
    if other_classes:
        lines = (_whole(f"transformers does not mark {', '.join(other_classes)} as stacked experts"),)
    all_stacks = tuple(
        stack._replace(groups=groups_of(stack.rows))
        if takes_groups(experts, _implementation(model, stack), trains)
        else stack
        for stack in all_stacks
    )
    # Products are made by group beside peft's own adapters of matrices. Another kind reads the whole parameter.
    all_stacks = tuple(
        stack
        for stack in all_stacks
        if all(
            is_of(method_of(adapter, "forward"), "peft") and adapter.num_experts > 1
            for adapter in parameter_adapters(model, stack.module)
        )
    )
    for stack in all_stacks:
        reason = _why_not_replaced(model, stack)
        if reason is not None:
            return (), (_whole(f"{reason}, which a loop over {_parts(all_stacks)} may not replace"),)
    if not RULE_LAYOUTS[optimizer].elementwise:
        frozen_stacks = tuple(
            stack
            for stack in all_stacks
            if not any(model.get_parameter(name).requires_grad for name in stack.parameters)
        )
        if len(frozen_stacks) < len(all_stacks):
            return frozen_stacks, (*lines, _whole("the optimizer's rule looks at whole parameters"))
    return all_stacks, lines


def _owned(model: nn.Module, optimizer: str, ep_size: int) -> tuple[Stack, ...]:
    """Returns all stacks of a model, each cut into `ep_size` groups of one unit."""
    stacks = tuple(stack._replace(groups=ep_size, ep_size=ep_size) for stack in expert_stacks(model, ep_size))
    reason = None if RULE_LAYOUTS[optimizer].elementwise else "the optimizer's rule looks at whole parameters"
    for stack in stacks:
        reason = reason or _why_not_replaced(model, stack)
    if reason is not None:
        raise ConfigError(
            f"expert_parallel.autoep_size is {ep_size}, and {reason}: it is for elementwise optimizers, and for "
            "experts whose code is transformers' own; leave expert_parallel out"
        )
    return stacks


def expert_stacks(model: nn.Module, size: int) -> tuple[Stack, ...]:
    """Returns the stacks of experts of a model, which `size` ranks can divide.

    Raises `ConfigError` if there are none, or they cannot be divided so.
    """
    stacks = find_stacks(model)
    if not stacks:
        raise ConfigError(
            f"expert_parallel.autoep_size is {size}, and {type(model).__name__} has no module that transformers marks "
            "as stacked experts: leave expert_parallel out"
        )
    for stack in stacks:
        if stack.rows % size:
            raise ConfigError(
                f"expert_parallel.autoep_size is {size}, which does not divide the {stack.rows} experts of "
                f"{stack.module}"
            )
    return stacks


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
        and not any(is_compiled(modules[outer]) for outer in (name, *modules_around(name)))
    )


@functools.cache
def makes_grouped_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if torch makes grouped products in a dtype on a device; some builds make them in bf16 alone."""
    from transformers.integrations.moe import _grouped_linear  # late: other models need no transformers

    weight = torch.ones(1, 16, 16, dtype=dtype, device=device)
    try:
        _grouped_linear(weight[0], weight, torch.full((1,), 16, dtype=torch.int32, device=device))
    except (RuntimeError, ValueError):
        return False
    return True


def parts_of(stacks: Sequence[Stack]) -> dict[str, int]:
    """Returns for the name of each parameter that is cut its number of units."""
    return {name: stack.parts for stack in stacks for name in stack.parameters}


def multiplies_by_part(model: nn.Module, module: str, grouped: bool) -> bool:
    """Returns True if code of ours makes the products of a module of stacked experts, in place of a loop over experts.

    For groups, and beside adapters of a stack, whose products it adds: peft adds them to the whole stack.
    """
    return grouped or bool(parameter_adapters(model, module))


def _implementation(model: nn.Module, stack: Stack) -> str | None:
    """Returns transformers' name of the implementation of a module of experts; None if it has none."""
    used = getattr(getattr(model.get_submodule(stack.module), "config", None), "_experts_implementation", None)
    return used if isinstance(used, str) else None


def _why_not_replaced(model: nn.Module, stack: Stack) -> str | None:
    """Returns a clause that names the code that might give other results part by part; None if there is none."""
    module, implementation = model.get_submodule(stack.module), _implementation(model, stack)
    functions = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", {})
    if implementation in (None, LOOP):
        if not multiplies_by_part(model, stack.module, stack.groups is not None):
            return None
    elif not is_of(used := functions.get(implementation), "transformers"):
        return f'"{implementation}" is {described_code(used)}'
    for name, words in (("forward", "forward"), ("_apply_gate", "gate")):
        if not is_of(own := method_of(module, name), "transformers"):
            return f"their {words} is {described_code(own)}"
    # An implementation calls an activation with the tokens of all experts, a loop with the tokens of one part.
    return mixture_of_tokens(module)


def described(model: nn.Module, stacks: Sequence[Stack], experts: str) -> tuple[str, ...]:
    """Returns lines for the user: on the experts or groups that are units, and on the implementation that changes."""
    lines = []
    owned = [stack for stack in stacks if stack.ep_size > 1]
    if owned:
        first = owned[0]
        lines.append(
            Remark(
                f"each rank owns {first.rows // first.ep_size} of {first.rows} experts of a layer, with grouped "
                "products, and tokens travel to the ranks of their experts (expert_parallel)"
            )
        )
    grouped = [stack for stack in stacks if stack.groups is not None and stack.ep_size == 1]
    if grouped:
        number = sum(stack.rows for stack in grouped)
        other = {_implementation(model, stack) or LOOP for stack in grouped} - {GROUPED}
        used = f', in place of "{min(other)}"' if other else ""
        count = count_of(sum(stack.parts for stack in grouped), "unit", "units")
        lines.append(Remark(f"{number} experts are {count} of their own, in groups, with grouped products{used}"))
    single = [stack for stack in stacks if stack.groups is None]
    if single:
        other = {_implementation(model, stack) or LOOP for stack in single} - {LOOP}
        used = f', in a loop in place of "{min(other)}", which needs all at once' if other else ""
        skipped = "; those without a token in a step are not updated" if experts == "visited" else ""
        count = count_of(sum(stack.rows for stack in single), "expert is a unit", "experts are units")
        lines.append(Remark(f"{count} of their own{used}{skipped}"))
    return tuple(lines)


def _parts(stacks: Sequence[Stack]) -> str:
    return "groups of experts" if any(stack.groups for stack in stacks) else "the experts"


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


def _stacks_unmarked_experts(module: nn.Module) -> bool:
    """Returns True for a module that stacks experts in a class that transformers does not mark, such as Llama-4's."""
    rows, own = _rows(module), list(module.parameters(recurse=False))
    unmarked = not (hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"))
    return unmarked and rows > 1 and any(parameter.ndim == 3 and parameter.shape[0] == rows for parameter in own)


def _rows(module: nn.Module) -> int:
    rows = getattr(module, "num_experts", 0)
    return rows if isinstance(rows, int) else 0


def parameter_adapters(model: nn.Module, name: str) -> list[Any]:
    """Returns the adapters of peft for whole parameters of a module (`target_parameters`), the innermost first."""
    return [outer for outer in map(model.get_submodule, modules_around(name)) if is_parameter_adapter(outer)]


def is_parameter_adapter(module: nn.Module) -> bool:
    """Returns True for an adapter of peft for a whole parameter of the module inside (`target_parameters`)."""
    # peft is not imported here: if a model has such an adapter, peft is imported already.
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    return kind is not None and isinstance(module, kind)
