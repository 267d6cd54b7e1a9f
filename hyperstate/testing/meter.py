"""What a call costs this process: CPU and wall seconds, peak memory, bytes sent over TCP.

Everything is read from the kernel, so whoever does the work is measured alike. Memory and bytes are
known on Linux only; elsewhere they are None.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_TCP_INFO_BYTES, _BYTES_SENT_AT = 232, 200
"""Size of Linux' ``struct tcp_info`` up to the counters we read, and the place of ``tcpi_bytes_sent`` (since 4.19)."""


@dataclass
class Cost:
    """Of one call on one rank. `peak` is in bytes above the memory in use when the call began."""

    cpu: float = 0.0
    wall: float = 0.0
    peak: int | None = None
    sent: int | None = None


@contextmanager
def measured(together: Callable[[], object]) -> Iterator[Cost]:
    """Measure the block. `together` is a barrier of the ranks; it runs before and after, so that none waits inside."""
    cost = Cost()
    gc.collect()
    together()
    resets = _reset_peak()
    memory, sent = _memory("VmRSS"), bytes_sent()
    cpu, wall = time.process_time(), time.perf_counter()
    yield cost
    cost.cpu, cost.wall = time.process_time() - cpu, time.perf_counter() - wall
    together()  # what was still on its way has been sent now
    peak, after = _memory("VmHWM"), bytes_sent()
    if resets and memory is not None and peak is not None:
        cost.peak = max(0, peak - memory)
    if sent is not None and after is not None:
        cost.sent = sum(count - sent.get(inode, 0) for inode, count in after.items())


def bytes_sent() -> dict[int, int] | None:
    """Bytes that each of this process' TCP connections has sent so far, by the socket's inode; None if unknown."""
    try:
        numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return None
    found: dict[int, int] = {}
    for number in numbers:
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            info = _tcp_info(number) if stat.S_ISSOCK(status.st_mode) else None
            if info is not None:
                if len(info) < _BYTES_SENT_AT + 8:
                    return None
                found[status.st_ino] = int(struct.unpack_from("Q", info, _BYTES_SENT_AT)[0])
    return found


def _tcp_info(number: int) -> bytes | None:
    """The kernel's account of the socket with this file number; None if it is no TCP connection."""
    with socket.socket(fileno=os.dup(number)) as one:
        if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)


def _reset_peak() -> bool:
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _memory(name: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
