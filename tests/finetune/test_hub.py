"""Models by their names on the hub: fetched once, used from the hub's cache, and sent; from a small hub on loopback."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import ConfigError
from offload.hub import local_model
from tests.support.model_folders import make_folder, write_lines

COMMIT = "a" * 40


class Hub(http.server.ThreadingHTTPServer):
    """Answers what `huggingface_hub` asks about the model owner/tiny, and counts the questions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        self.taken: dict[str, bytes] = {}
        """Files that were sent."""
        self.full = False


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        headers, status = {"Content-Type": "application/json"}, 200
        files = {file.name: file for file in self.server.folder.iterdir()}
        if path.startswith("/api/models/owner/tiny/revision/"):
            content: Any = {"id": "owner/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        elif path.startswith("/api/models/owner/tiny/tree/"):
            content = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40}
                for name, file in files.items()
            ]
        elif path.startswith("/owner/tiny/resolve/") and (name := path.rpartition("/")[2]) in files:
            content = files[name].read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            gated = "owner/gated" in path
            content, status = {}, 403 if gated else 404
            headers["X-Error-Code"] = "GatedRepo" if gated else "RepoNotFound"
        self._answer(content, status, headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        content: dict[str, Any] = {}
        here = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            content = {"url": f"{here}/owner/mine"}
            assert json.loads(body)["visibility"] == "private"
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            content["files"] = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
        elif "/commit/" in self.path and not self.server.full:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.taken[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            content = {"commitUrl": f"{here}/owner/mine/commit/{COMMIT}", "commitOid": COMMIT}
        refused = "/commit/" in self.path and self.server.full
        self._answer(content, 403 if refused else 200, {"Content-Type": "application/json"})

    def _answer(self, content: Any, status: int, headers: dict[str, str]) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *values: Any) -> None:
        """Keeps stderr for the command."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    folder = make_folder(tmp_path / "served")
    (folder / "consolidated.safetensors").write_bytes(b"the same for another library")
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class _HttpError(Exception):
    """Stands for an error of the HTTP client, which derives from none of Python's own."""


def test_a_network_that_breaks_off_is_an_error_with_the_way_out(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def breaks_off(name: str, local_files_only: bool = False, **more: Any) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing is in the cache")
        raise _HttpError("the peer closed the connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks_off)
    with pytest.raises(
        ConfigError, match=r"cannot be fetched from the hub \(_HttpError: the peer .*hf download owner/tiny"
    ):
        local_model("owner/tiny")


def test_a_model_is_fetched_once_and_trained_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": "one, two, three"}] * 4)
    command = ["train", "--model", "owner/tiny", "--data", "rows.jsonl", "--steps", "1", "--batch-size", "1"]
    command += ["--seq-len", "16", "--eval-every", "0", "--output", "out"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    transformers.AutoModelForCausalLM.from_pretrained("out")
    assert not any("consolidated" in path for path in hub.asked)
    hub.asked.clear()
    assert (Path(local_model("owner/tiny")) / "model.safetensors").is_file() and not hub.asked


def test_an_adapter_is_sent_with_its_card_and_a_failure_loses_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": "one, two, three"}] * 4)
    command = ["train", "--model", "owner/tiny", "--data", "rows.jsonl", "--steps", "1", "--batch-size", "1"]
    command += ["--lora", "r=2,targets=all-linear", "--eval-every", "0", "--push-to-hub", "owner/mine"]
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    without = CliRunner().invoke(app, command)
    assert without.exit_code == 2 and "run: hf auth login" in without.output and not (tmp_path / "swap").exists()
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "sent to http" in result.output, result.output
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert names <= hub.taken.keys()
    card = hub.taken["README.md"].decode()
    assert "base_model: owner/tiny" in card and "rows.jsonl; 4 documents in " in card and "| loss | " in card
    # Whoever fetches the adapter finds its base model.
    assert json.loads(hub.taken["adapter_config.json"])["base_model_name_or_path"] == "owner/tiny"
    hub.full = True
    failed = CliRunner().invoke(app, [*command, "--output", "again"])
    assert (
        failed.exit_code == 1 and "to repeat that alone, run: hf upload --private owner/mine again ." in failed.stderr
    )
    assert (tmp_path / "again" / "adapter_model.safetensors").is_file()


def test_what_is_no_name_of_the_hub_stays_and_asks_nothing(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "models/llama").mkdir(parents=True)
    for name in ("gpt2-tiny", "models/llama", "./models/typo", "a/b/c", str(tmp_path)):
        assert local_model(name) == name
    assert not hub.asked


def test_what_cannot_be_fetched_is_an_error_that_says_why(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no folder owner/typo, and the hub has no model of that name"):
        local_model("owner/typo")
    with pytest.raises(ConfigError, match="its owner asks for a consent: accept it"):
        local_model("owner/gated")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"cannot be fetched from the hub \(.*hf download owner/tiny --local-dir tiny"
    ):
        local_model("owner/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(app, ["generate", "owner/tiny", "--prompt", "a"])
    assert result.exit_code != 0 and "HF_HUB_OFFLINE is set" in result.output
    assert "hf download owner/tiny" in result.output
