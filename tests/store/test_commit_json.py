"""The facts of a commit are JSON, also where a number is not finite; made-up ones are refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from offload.engine.snapshot import Snapshot, as_bytes, read_generators
from offload.errors import StoreError
from offload.fileio.plain_json import from_plain, to_plain

FACTS: dict[str, Any] = {
    **dict.fromkeys(("global_steps", "skipped_steps", "micro_steps", "global_samples"), 0),
    **{key: [] for key in ("parameter_steps", "registered", "groups", "configured")},
    **dict.fromkeys(("scheduler", "loss_scale", "data"), None),
}
"""What the facts of a step have besides."""


def strict(text: bytes) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [math.inf, [-math.inf, (1.0, math.inf)], {math.inf: {"best": -math.inf}}])
def test_infinities_come_back(value: Any) -> None:
    plain = to_plain({"mine": value}, "it", "")
    assert from_plain(strict(json.dumps(plain).encode())) == {"mine": value}
    facts = {**FACTS, "client_state": plain, "settings": {"gradient clipping": math.inf, "nan": math.nan}}
    packed = Snapshot(facts, {}, {}).pack()
    strict(bytes(packed["facts"].numpy()))
    found = Snapshot.unpack(packed).facts
    assert from_plain(found["client_state"]) == {"mine": value}
    assert found["settings"]["gradient clipping"] == math.inf and math.isnan(found["settings"]["nan"])


@pytest.mark.parametrize(
    "change",
    [
        {"torch": torch.zeros(16, dtype=torch.uint8)},
        {"torch": torch.zeros(5056)},
        {"python": as_bytes(b"[3, [1, 2], null]")},
        {"python": as_bytes(b"{")},
        {"numpy": as_bytes(b'["MT19937", [-1], 0, 0, 0.0]')},
    ],
)
def test_a_generator_that_cannot_be_restored_is_an_error_before_one_is(change: dict[str, torch.Tensor]) -> None:
    generators = read_generators(torch.device("cpu"))
    assert Snapshot.unpack(Snapshot(FACTS | {"client_state": {}, "settings": {}}, generators, {}).pack()).generators
    packed = Snapshot(FACTS | {"client_state": {}, "settings": {}}, generators | change, {}).pack()
    with pytest.raises(StoreError, match="the states of random generators are damaged, or made up"):
        Snapshot.unpack(packed)


@pytest.mark.parametrize(
    "value",
    [
        {"\0tensor": ["load", [1], ""]},
        {"\0tensor": ["uint8", [3], "AAAA" * 100_000]},
        {"\0tensor": ["uint8", [-1], "!"]},
        {"\0dict": [[{}, 1]]},
        {"\0tuple": 5},
        {"\0float": []},
    ],
)
def test_a_state_that_no_commit_has_is_an_error_of_ours(value: Any) -> None:
    with pytest.raises(StoreError, match="a saved state is damaged, or made up"):
        from_plain({"x": [value]})


def test_a_tensor_beside_the_json_is_taken_once() -> None:
    """A kilobyte of text could otherwise ask for a thousand copies of it."""
    tensors: list[torch.Tensor] = []
    plain = to_plain([torch.ones(3), b"ab", torch.ones(3)], "it", "", tensors)
    beside = {str(number): tensor for number, tensor in enumerate(tensors)}
    for _ in range(2):
        found = from_plain(plain, beside)
        assert torch.equal(found[0], torch.ones(3)) and found[1] == b"ab" and torch.equal(found[0], found[2])
    for number in (0, 1):
        with pytest.raises(StoreError, match="a saved state is damaged, or made up: KeyError"):
            from_plain([plain[number], plain[number]], beside)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [{"lr": "1"}]},
        {"groups": [{"betas": [0.9, {}]}]},
        {"groups": [{"lr": 10**400}]},
        {"groups": [{"lr": 1.0}], "configured": []},
        {"members": [["a"]]},
        {"options": [{"flag": []}]},
        {"loss_scale": {"scale": 2.0, "steps": 0, "overflowed_at": -1}},
        {"loss_scale": {"scale": "2", "steps": 0, "overflowed_at": -1, "patience": 2}},
        {"settings": {"accumulation": [2]}},
        {"settings": {"micro-batch size": 0}},
        {"settings": {"samples of a step": "8"}},
    ],
)
def test_facts_that_no_step_has_are_an_error_before_an_engine_has_them(change: dict[str, Any]) -> None:
    group = {"lr": math.inf, "betas": [0.9, 0.99], "amsgrad": False, "eps": None}
    right = {"groups": [group], "configured": [group], "members": [["a"]], "settings": {"accumulation": 2, "x": "y"}}
    Snapshot.unpack(Snapshot({**FACTS, "client_state": {}, **right}, {}, {}).pack())
    packed = Snapshot({**FACTS, "client_state": {}, "settings": {}, **change}, {}, {}).pack()
    with pytest.raises(StoreError, match="the facts on a step are damaged, or made up"):
        Snapshot.unpack(packed)
