"""A config is a dict, a path or base64, and may have comments; what cannot be read is an error with its path."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from offload.config import load_config, read_json
from offload.errors import ConfigError


def test_comments_and_lists_of_paths(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
        // weights and states
        "zero_optimization": {"stage": 3, /* both */ "offload_param": {"device": "nvme"}}, # end
        "offload": {"nvme_path": ["/a//b", "~/c"], "run": "x",},
        }"""
    )
    assert load_config(path).drives == ("/a//b", str(Path.home() / "c"))


def test_a_mark_of_a_comment_in_a_string_is_none(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('\ufeff{"offload": {"nvme_path": ["http://a#b/*c*/", "\\"d,]"]}}', encoding="utf-8")
    assert load_config(path).drives == ("http://a#b/*c*/", '"d,]')


def test_a_config_may_come_in_base64(tmp_path: Path) -> None:
    content = {"train_batch_size": 7, "offload": {"run": "\u00ff\u00fe?>"}}
    text = json.dumps(content, ensure_ascii=False)
    safe, plain = (encode(text.encode()).decode() for encode in (base64.urlsafe_b64encode, base64.b64encode))
    assert safe != plain
    assert read_json(safe) == read_json(plain) == content
    twice = base64.b64encode(b'{"train_batch_size": 1, "train_batch_size": 2}').decode()
    for wrong, message in ((twice, "config that came in base64: .* twice"), (plain[:-1], "cannot read the config eyJ")):
        with pytest.raises(ConfigError, match=message):
            load_config(wrong)


@pytest.mark.parametrize(
    "text", ["{train_batch_size: 8}", '{"zero_optimization": {"stage": 3}\n"fp16": {}}', "stage: 3"]
)
def test_the_error_for_hjson_says_what_json_needs(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.hjson").write_text(text)
    with pytest.raises(ConfigError, match=r"not JSON: .* column \d+\. Comments and .* strings in quotes, and commas"):
        load_config(tmp_path / "ds.hjson")


def test_paths_are_strings_or_paths() -> None:
    given = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": Path("/x")}}
    given |= {"offload_optimizer": {"device": "nvme", "nvme_path": ["/y", "/x"]}}
    assert load_config({"zero_optimization": given, "offload": {"nvme_path": "/z"}}).drives == ("/y", "/x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' appears twice"),
        ('{\n "a": }', "line 2"),
        ("[]", "JSON object"),
        ("\x00", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"train_batch_size": ' + "1" * 5000 + "}", "not a config"),
    ],
)
def test_a_bad_file_is_an_error_with_its_path(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "bad.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        load_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config("\0")


@pytest.mark.parametrize("source", [5, b"ds.json", None, [("train_batch_size", 1)]])
def test_what_is_neither_a_dict_nor_a_path(source: Any) -> None:
    with pytest.raises(ConfigError, match="a dict or the path"):
        load_config(source)


def test_a_config_of_holes_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(3 << 40)
    with pytest.raises(ConfigError, match=r"cannot read the config .*: it has more than 16777216 characters"):
        load_config(tmp_path / "config.json")
