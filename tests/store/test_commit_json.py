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
