"""Presets have the sizes that were published."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

import offload
from offload.errors import ConfigError
from offload.presets import PRESETS, build

PUBLISHED = {
    "gpt2-tiny": 3.5e6,
    "gpt2-small": 124.44e6,
    "llama-1b": 1.236e9,
    "llama-3b": 3.213e9,
    "llama-7b": 6.738e9,
    "llama-13b": 13.016e9,
    "llama-70b": 68.977e9,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_as_published(name: str) -> None:
    with offload.init():
        model = build(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert abs(parameters / PUBLISHED[name] - 1) < 0.01
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"gpt2-smal'.*did you mean gpt2-small.*llama-70b"):
        build("gpt2-smal")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'offload\[hf\]'"):
        build("gpt2-tiny")
