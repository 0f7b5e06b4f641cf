"""Every point of `offload.testing` names a place in the package."""

from __future__ import annotations

from typing import Any

import pytest

from offload import testing


class Lookup:
    """A patcher that reads the attribute and leaves it as it is."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        getattr(target, name)


def test_a_point_names_places_that_exist() -> None:
    for point in testing.POINTS:
        testing.replace(Lookup(), point, None)


@pytest.mark.parametrize("place", ["offload.sizes:missing", "offload.missing:PAGE", "offload.missing:Store.write"])
def test_a_place_that_was_renamed_is_an_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(testing.POINTS, "size.renamed", [place])
    with pytest.raises((AttributeError, ImportError)):
        testing.replace(Lookup(), "size.renamed", None)
