"""Any value of any key is a config or a ConfigError that names the key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.config import (
    Aio,
    Block,
    Config,
    ZeroOptimization,
    load_config,
)
from offload.errors import ConfigError


def _places(model: type[Block], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key in (*model.model_fields, *model.TUNING, *model.UNSUPPORTED, *model.REFUSED, *model.OLD_NAMES, "unheard_of"):
        yield (*path, key)
    for name, field in model.model_fields.items():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, Block):
                yield from _places(inner, (*path, name))


ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        10**400,
        0.5,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "auto",
        "\0",
        "~",
        "1e400",
        b"x",
    ),
    *(
        [],
        [None],
        [1],
        ["x", "x"],
        [[]],
        {},
        {"enabled": 5},
        {"x": {"enabled": "auto"}},
        {None: 1},
        object(),
        Path("/x"),
    ),
)


def test_any_value_of_any_key_is_a_config_or_a_config_error() -> None:
    for place, value in itertools.product(_places(Config), ODD):
        content: Any = value
        for key in reversed(place):
            content = {key: content}
        if place[0] == "scheduler":
            content = {"scheduler": {"type": "WarmupLR", **content["scheduler"]}} if place[1:] else content
        try:
            config = load_config(content)
        except ConfigError as error:
            named = {**Config.OLD_NAMES, **Aio.OLD_NAMES, **ZeroOptimization.OLD_NAMES}.get(place[-1], place[-1])
            assert named in str(error) or isinstance(value, dict), f"{place}, {value!r}: not named: {error}"
        else:
            assert all("\n" not in line for line in config.notices), f"{place}, {value!r}"
