"""Whether a peer's process is still there, which MindSpore's CPU collectives tell only after 30 s.

Each rank listens on a port and accepts nothing: the kernel completes a peer's connection, and ends it when the
process ends. No thread, no message.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

CONNECT_S = 5.0
PROBE_PORT = 9
"""Any port: to connect a datagram socket sends nothing, and tells which of our addresses leads there."""


def address_towards(host: str) -> str:
    """The address of this machine on the network that `host` is on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, PROBE_PORT))
        return str(probe.getsockname()[0])


class Presence:
    """This rank's open port, and connections to those of its peers."""

    def __init__(self, address: str, world: int, find: Callable[[int], str]) -> None:
        """`find` gives a peer's address, ``host:port``."""
        self._find = find
        self._listener = socket.create_server((address, 0), backlog=world)
        self._peers: dict[int, socket.socket | None] = {}
        self.address = f"{address}:{self._listener.getsockname()[1]}"

    def meet(self, peer: int) -> None:
        """Connect to a peer, if that has not been tried yet."""
        if peer in self._peers:
            return
        self._peers[peer] = None
        host, port = self._find(peer).rsplit(":", 1)
        with contextlib.suppress(OSError):
            found = socket.create_connection((host, int(port)), timeout=CONNECT_S)
            found.setblocking(False)
            self._peers[peer] = found

    def gone(self, peer: int) -> bool:
        """Whether the process of a peer that was met has ended."""
        connection = self._peers[peer]
        if connection is None:
            return True
        try:
            return connection.recv(1) == b""  # nobody ever writes: there is nothing to read, or the end
        except BlockingIOError:
            return False
        except OSError:
            return True
