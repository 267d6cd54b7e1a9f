"""How far a long call is, for the caller's own bar."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Progress = Callable[[int, int, str], None]
"""Called with the bytes that this rank has done, those that it has to do, and what was done last (a file's name)."""


class Meter:
    """Adds up what was done and tells it, one call at a time. What the callback raises ends the work."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._done, self._lock = 0, Lock()

    def step(self, nbytes: int, what: str) -> None:
        """Some more bytes are done."""
        if self._progress is None or not nbytes:
            return
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total, what)
