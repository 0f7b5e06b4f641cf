"""The facts of a commit are JSON, also where a number is not finite."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from offload.engine.training.snapshot import Snapshot
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
