"""Objects that are registered get their states from a commit, all of them or none."""

from __future__ import annotations

from typing import Any

import pytest

from offload.engine.state import RegisteredObjects
from tests.support.processes.user_script import Counter


class Picky(Counter):
    """A counter that refuses its first state."""

    ready = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.ready:
            self.ready = True
            raise KeyError("not ready")
        super().load_state_dict(state)


def test_a_call_of_which_one_object_fails_registers_none_and_may_be_repeated() -> None:
    before = RegisteredObjects()
    before.add([Counter(1), Picky(2), Counter(3)])
    after = RegisteredObjects()
    after.restore(before.states(), may_grow=False)
    objects = [Counter(), Picky()]
    with pytest.raises(KeyError, match="not ready"):
        after.add(objects)
    assert after.states() == before.states() and not after.complete
    after.add(objects)
    assert [thing.count for thing in objects] == [1, 2] and after.states() == before.states() and not after.complete
    after.add([Counter()])
    assert after.states() == before.states() and after.complete
