"""A command that changes keys of a config leaves every other character of the file as it was."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from offload.config import read_json
from offload.config.edit import set_in_block

AIO = {"block_size": 4096, "queue_depth": 8}
OLDER = {"thread_count": "intra_op_parallelism"}

COMMENTED = """\
{
    // of the thesis
    "train_batch_size": 8,   # as in the paper
    "aio": {
        "queue_depth" : 2, /* why? */
        "single_submit": false  // last
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1.0e-3,}},
}
"""


def test_values_change_in_their_places_and_new_keys_follow(tmp_path: Path) -> None:
    wanted = COMMENTED.replace('"queue_depth" : 2', '"queue_depth" : 8').replace(
        '"single_submit": false  // last\n', '"single_submit": false,  // last\n        "block_size": 4096\n'
    )
    assert set_in_block(COMMENTED, "aio", AIO) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{}\n", '{\n  "aio": {\n    "block_size": 4096,\n    "queue_depth": 8\n  }\n}\n'),
        ('{"a": 1}', '{"a": 1, "aio": {"block_size": 4096, "queue_depth": 8}}'),
        ('{"a": 1,}', '{"a": 1, "aio": {"block_size": 4096, "queue_depth": 8}}'),
        ('{"a": 1 // one\n}', '{"a": 1, "aio": {"block_size": 4096, "queue_depth": 8} // one\n}'),
        ('{"aio": null}', '{"aio": {"block_size": 4096, "queue_depth": 8}}'),
        ('{\n\t"a": 1\n}', '{\n\t"a": 1,\n\t"aio": {\n\t\t"block_size": 4096,\n\t\t"queue_depth": 8\n\t}\n}'),
        ('{\n "aio": {\n }\n}', '{\n "aio": {\n   "block_size": 4096,\n   "queue_depth": 8\n }\n}'),
        (
            '\ufeff{\r\n "aio": {"queue_depth": 1}\r\n}',
            '\ufeff{\r\n "aio": {"queue_depth": 8, "block_size": 4096}\r\n}',
        ),
    ],
)
def test_what_is_new_has_the_style_of_the_file(text: str, wanted: str) -> None:
    assert set_in_block(text, "aio", AIO) == wanted


def test_an_older_name_of_a_key_is_replaced_by_the_newer_one() -> None:
    text = '{"aio": {"thread_count": 4, "block_size": 1}}'
    wanted = '{"aio": {"intra_op_parallelism": 1, "block_size": 1}}'
    assert set_in_block(text, "aio", {"intra_op_parallelism": 1}, OLDER) == wanted


def test_what_looks_like_a_key_or_a_comment_in_a_string_is_none() -> None:
    text = r'{"note": "\"aio\": {} // }", "url": "http://x", "aio": {"queue_depth": 1}}'
    assert set_in_block(text, "aio", {"queue_depth": 8}) == text.replace("1}}", "8}}")


@pytest.mark.parametrize("seed", range(20))
def test_the_file_then_contains_what_it_did_and_the_keys(seed: int, tmp_path: Path) -> None:
    """Over files of random style: each is read as its content with the new values, in the order that it had."""
    chance = random.Random(seed)
    for number in range(20):
        path = tmp_path / f"{number}.json"
        path.write_text(written(content(chance), chance), encoding="utf-8", newline="")
        before = read_json(path)
        wanted = {**before, "aio": {**(before.get("aio") or {}), **AIO}}
        text = path.read_bytes().decode()
        path.write_text(set_in_block(text, "aio", AIO), encoding="utf-8", newline="")
        after = read_json(path)
        assert after == wanted and list(after) == list(wanted), text
        assert list(after["aio"])[: len(before.get("aio") or {})] == list(before.get("aio") or {}), text


def content(chance: random.Random) -> dict[str, Any]:
    """Returns the content of a file, with or without the block."""
    blocks: list[tuple[str, Any]] = [("a", 1), ("b", [1, {"aio": 2}]), ("ü", "x, } // y"), ("c", {}), ("d", None)]
    if chance.random() < 0.8:
        keys = [("queue_depth", 1), ("single_submit", False), ("block_size", 1e6)]
        blocks.append(("aio", chance.choice([None, dict(chance.sample(keys, chance.randrange(4)))])))
    chance.shuffle(blocks)
    return dict(blocks[: chance.randrange(1, len(blocks) + 1)])


def written(value: Any, chance: random.Random, depth: int = 1) -> str:
    """Returns `value` as JSON with the liberties that a config has: comments, commas, spaces, lines."""

    def gap(lines: bool) -> str:
        comments = ["/* , } */", "// it, }\n", "# {\n"] if chance.random() < 0.3 else [""]
        return f"{chance.choice(['', ' '])}{chance.choice(comments)}" + ("\n" + "  " * depth if lines else "")

    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=chance.random() < 0.5)
    lines = chance.random() < 0.6
    items = [
        f"{json.dumps(key)}{gap(False)}:{gap(False)}{written(each, chance, depth + 1)}" for key, each in value.items()
    ]
    text = gap(lines).join(f"{item}{',' if number + 1 < len(items) else ''}" for number, item in enumerate(items))
    last = "," if items and chance.random() < 0.3 else ""
    return f"{{{gap(lines)}{text}{last}{gap(lines)}}}"
