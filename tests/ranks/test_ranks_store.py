"""A rank whose key-value store does not answer, as behind a cut cable, ends with an error and waits for nothing."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from offload import testing
from offload.distributed import process_group
from offload.distributed.process_group import BoundedStore, Heartbeat
from offload.errors import ConfigError, RankError

LONGEST = 0.3
SILENT = "torch's key-value store has not answered for 0.3 s"


class Cable:
    """A connection to a port that carries bytes until it is cut, and then swallows them: no end is told of it."""

    def __init__(self, port: int) -> None:
        self.cut = threading.Event()
        self._port, self._ends = port, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:  # closed
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self.cut.is_set():
                    target.sendall(data)
        except OSError:  # closed
            return

    def close(self) -> None:
        """Ends the connection, and with it a call of torch's that still waits."""
        for each in (self._listener, *self._ends):
            each.close()


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any, Cable]]:
    """torch's own store, a client of it behind a cable, and the cable."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cable = Cable(server.port)
    yield server, dist.TCPStore("127.0.0.1", cable.port, is_master=False, wait_for_workers=False), cable
    for each in cable._ends:
        each.shutdown(socket.SHUT_RDWR)  # wakes a call that waits
    cable.close()


def test_a_call_behind_a_cut_cable_ends_and_no_other_is_made(ends: tuple[Any, Any, Cable]) -> None:
    server, client, cable = ends
    store = BoundedStore(client, LONGEST)
    store.set("here", "1")
    assert store.get("here") == "1" and store.get("nowhere") is None
    cable.cut.set()
    with pytest.raises(RuntimeError, match=SILENT):
        store.get("here")
    cable.cut.clear()  # torch still waits for the answer that was lost
    with pytest.raises(RuntimeError, match=SILENT):
        store.set("later", "1")
    store.close()
    assert not server.check(["later"])


def test_an_error_of_torchs_is_that_of_the_call_and_the_next_one_is_made() -> None:
    class Refusing:
        def __init__(self) -> None:
            self.values: dict[str, bytes] = {}

        def check(self, keys: list[str]) -> bool:
            return all(key in self.values for key in keys)

        def get(self, key: str) -> bytes:
            return self.values[key]

        def set(self, key: str, value: str) -> None:
            if key == "refused":
                raise RuntimeError("broken pipe")
            self.values[key] = value.encode()

    store = BoundedStore(Refusing(), LONGEST)
    with pytest.raises(RuntimeError, match="broken pipe"):
        store.set("refused", "1")
    store.set("taken", "2")
    assert store.get("taken") == "2" and store.refusal is None
    store.close()
    with pytest.raises(RuntimeError, match="was closed"):
        store.get("taken")


def test_a_rank_that_is_cut_off_says_so_and_ends(ends: tuple[Any, Any, Cable], monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "ranks.heartbeat_store", functools.partial(BoundedStore, longest=LONGEST))
    _, client, cable = ends
    pulse = Heartbeat(client, 0, 2)
    pulse.places = [("here", 1), ("there", 1)]
    assert pulse.gone(60.0, [1]) == []
    cable.cut.set()
    assert pulse.gone(60.0, [1]) == [f"{SILENT}: this machine, or the one that serves the store, is cut off"]
    with pytest.raises(RankError, match=f"{SILENT}, so rank 0 cannot meet the other ranks"):
        pulse.meet()
    pulse.close("over")


def test_a_decision_of_rank_0_is_not_awaited_for_ever(ends: tuple[Any, Any, Cable]) -> None:
    _, client, cable = ends
    store = BoundedStore(client, LONGEST)
    assert process_group._decided(store, "choose") is None
    cable.cut.set()
    with pytest.raises(RankError, match=f"rank 0 has ended before it could choose: {SILENT}"):
        process_group._decided(store, "choose")
    store.close()


def test_a_port_that_is_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f":{port}: .*another process has this port: set MASTER_PORT to a free"):
            process_group.meet_others()
    assert not dist.is_initialized()
