"""Mixtures of experts that transformers stacks, and the bytes that were moved for their units."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

import offload
from offload import testing
from offload.states import State
from tests.support.modules.mixtures import few_tokens, qwen
from tests.support.oracle import Job

DISK, CPU, MEMORY = ("nvme", "nvme"), ("cpu", "cpu"), ("none", "none")
SIXTEEN = Job(partial(qwen, 16), few_tokens, steps=4)
"""Four tokens visit at most eight of sixteen experts in a layer."""


def device_nbytes(engine: offload.Engine, title: str) -> int:
    """Returns the bytes on the device of the units whose names contain `title`."""
    layouts = testing.inspect(engine).layouts
    return sum(4 * layout.device_numel for layout in layouts if title in layout.name)


def moved(engine: offload.Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, State]]]:
    """Returns lists that receive (unit's name, state) of each read and write of the store from now on."""
    inspected = testing.inspect(engine)
    found: dict[str, list[tuple[str, State]]] = {"read": [], "write": []}

    def told(real: Any, calls: list[tuple[str, State]]) -> Any:
        def call(unit: int, state: State, *args: Any, **kwargs: Any) -> Any:
            calls.append((inspected.layouts[unit].name, state))
            return real(unit, state, *args, **kwargs)

        return call

    for way, calls in found.items():
        monkeypatch.setattr(inspected.store, way, told(getattr(inspected.store, way), calls))
    return found


def of_experts(calls: list[tuple[str, State]], *states: State) -> set[str]:
    """Returns the experts of which one of `states` has moved."""
    return {name for name, state in calls if name.endswith("]") and (not states or state in states)}


def adapted(**options: Any) -> nn.Module:
    import peft

    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(qwen(16), adapters)
