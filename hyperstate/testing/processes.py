"""What kits whose ranks are processes share."""

from __future__ import annotations

import os
from typing import Any

DEATH = 17
"""Exit status of a rank that was told to die."""


def traffic(fabric: Any, reset: bool) -> dict[str, int]:
    """`Kit.traffic` from the counts of an adapter's fabric."""
    counts = fabric.traffic()
    if reset:
        fabric.reset_traffic()
    names = {"sent": "bytes_sent", "received": "bytes_received"}
    return {names.get(name, name): count for name, count in counts.items()}


def die(fabric: Any, exchange: int) -> None:
    """`Kit.die`: end the process, at once or in the place of the fabric's exchange of that number."""
    if not exchange:
        os._exit(DEATH)
    original, left = fabric.exchange, [exchange]

    def last_exchange(sends: Any, recvs: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os._exit(DEATH)
        return original(sends, recvs)

    fabric.exchange = last_exchange
