"""`python -m offload.launch.torchrun`: torchrun with two rendezvous of our own, for `offload launch`.

torch's rendezvous for one machine (`--standalone`) listens on all interfaces without a password, and unpickles the
content of its store. So anyone who reaches the port can run code as the user. Two rendezvous replace it:

    ONE_MACHINE   ranks of one machine: a store that listens on a single address, by default 127.0.0.1. Nothing is
                  unpickled. Each start of the ranks gets a new store, without addresses of killed ranks
    SIGNED        several hosts that restart together: torch's c10d, which unpickles the hosts' common state. Here the
                  state is accepted only with a signature by the secret of this run (`SECRET`)

All other options are torchrun's. Several hosts that do not restart use torch's static rendezvous, which unpickles
nothing. If a port is taken, torchrun prints one line before any rank starts.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from offload.errors import UsageError
from offload.launch.environment import LOOPBACK_INTERFACE, ONE_MACHINE, SECRET, SIGNED

_SIGNATURE_NBYTES = hashlib.sha256().digest_size


class _OneMachine(RendezvousHandler):
    """The rendezvous ONE_MACHINE, for a single torchrun; see the module."""

    def __init__(self, run_id: str, listener: socket.socket) -> None:
        self._run_id = run_id
        self._address = listener.getsockname()[0]
        self._listener: socket.socket | None = listener

    def get_backend(self) -> str:
        return ONE_MACHINE

    @property
    def use_agent_store(self) -> bool:
        # Ranks connect to the store below. Otherwise rank 0 would open a store on all interfaces.
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        # A restart uses another port, since the agent still holds the store of the killed ranks.
        listener, self._listener = self._listener or _listen(self._address, 0), None
        port = listener.getsockname()[1]
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class SignedBackend(RendezvousBackend):
    """The state of several hosts in torch's store. Each stored value begins with its signature.

    The caller unpickles the state, so it must be verified before.
    """

    def __init__(self, inner: RendezvousBackend, secret: str) -> None:
        self._inner, self._secret = inner, secret.encode()

    @property
    def name(self) -> str:
        return SIGNED

    def get_state(self) -> tuple[bytes, Token] | None:
        state = self._inner.get_state()
        return None if state is None else (self._opened(state[0]), state[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        stored = self._inner.set_state(self._signature(state) + state, token)
        return None if stored is None else (self._opened(stored[0]), *stored[1:])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, state, "sha256")

    def _opened(self, signed: bytes) -> bytes:
        """Returns the state without its signature, after verifying the signature."""
        signature, state = signed[:_SIGNATURE_NBYTES], signed[_SIGNATURE_NBYTES:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError(
                "the meeting place of the hosts contains a state that no host of this run has signed: another process "
                f"writes to its port, or the hosts have different {SECRET}; start the run again on another "
                "--master-port, and let nobody else reach it"
            )
        return state


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        place = f"port {port} of {address or 'this machine'}"
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"{place} is taken by another process, and the ranks meet there: give a free port, --master-port N, or "
                f"end that process, which `ss -ltnp sport = :{port}` shows to its owner"
            ) from error
        raise UsageError(
            f"the ranks cannot meet at {place}: {error.strerror or error}; give an address of this machine, "
            "--master-addr, and a port from 1024 on, --master-port"
        ) from error


def _prepare(options: Any, secret: str) -> None:
    """Registers the rendezvous that the options name, and opens or checks its port."""
    address, _, port = options.rdzv_endpoint.rpartition(":")
    if options.rdzv_backend == ONE_MACHINE:
        listener = _listen(address.strip("[]"), int(port))
        if ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            # Otherwise gloo and NCCL listen on the interface of this machine's name, which is open to other machines.
            for name, interface in LOOPBACK_INTERFACE.items():
                os.environ.setdefault(name, interface)
        rendezvous_handler_registry.register(ONE_MACHINE, lambda params: _OneMachine(params.run_id, listener))
    elif options.rdzv_backend == SIGNED:
        if not secret:
            raise UsageError(
                f"hosts that restart together need the same secret in the variable {SECRET} of each: without one, "
                "whoever reaches their port could run code in them"
            )

        if "is_host=1" in options.rdzv_conf:
            _listen("", int(port)).close()

        def signed(params: RendezvousParameters) -> RendezvousHandler:
            backend, store = create_backend(params)
            return create_handler(store, SignedBackend(backend, secret), params)

        rendezvous_handler_registry.register(SIGNED, signed)
    elif options.node_rank == 0 and options.master_port is not None:
        _listen("", options.master_port).close()


def main(arguments: Sequence[str]) -> None:
    """Runs torchrun with the rendezvous of this module registered."""
    try:
        # Removed from the environment, since the ranks do not need the secret.
        _prepare(run.parse_args(arguments), os.environ.pop(SECRET, ""))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    run.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
