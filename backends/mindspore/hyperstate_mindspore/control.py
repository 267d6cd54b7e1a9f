"""`Control` for MindSpore: the job's TCPStore.

`TCPStore.get` of a key that is not there holds Python's interpreter lock for the store's whole timeout, and `set`
returns as if all was well when the store's keeper is gone. So each key has a counter beside it: `add` tells whether
the key is there, and raises when nobody answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from hyperstate.errors import TransferError

from . import job

SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 2e-4, 0.01
QUERIES_PER_S = 5_000
"""About how many queries all waiting ranks together may put to the store."""


class MindSporeControl:
    """See `hyperstate.backend.Control`."""

    def __init__(self) -> None:
        self._alone: dict[str, Any] = {}
        self._notes: dict[str, Any] = {}

    def set(self, key: str, value: bytes) -> None:
        """Publish."""

        def publish(store: Any) -> None:
            store.set(_value(key), value)
            store.add(_count(key), 1)

        self._ask(publish)

    def get(self, key: str, timeout: float) -> bytes | None:
        """The value, waiting up to `timeout` seconds for it; None if it does not come."""
        if self._there(key):
            return self._fetch(key)
        for pause in _pauses(timeout, job.world()):
            time.sleep(pause)
            if self._there(key):
                return self._fetch(key)
        return None

    def _there(self, key: str) -> bool:
        return bool(self._ask(lambda store: store.add(_count(key), 0)) > 0)

    def _fetch(self, key: str) -> bytes:
        found: bytes = self._ask(lambda store: store.get(_value(key)))
        return found

    def add(self, key: str, amount: int) -> int:
        """Atomically add to a counter that starts at 0; returns the sum."""
        return int(self._ask(lambda store: store.add(_count(key), amount)))

    def delete(self, key: str) -> None:
        """Forget a key."""

        def forget(store: Any) -> None:
            store.delete_key(_count(key))
            store.delete_key(_value(key))

        self._ask(forget)

    def memory(self) -> dict[str, Any]:
        """This rank's notes; those of a process without a job are apart."""
        return self._notes if job.world() > 1 else self._alone

    @staticmethod
    def _ask(question: Callable[[Any], Any]) -> Any:
        if job.world() == 1:
            raise TransferError("there is no job, so there is no key-value store")
        try:
            return question(job.store())
        except RuntimeError as error:
            raise TransferError(
                f"rank {job.rank()} can't reach the job's key-value store "
                f"({str(error).splitlines()[0]}); the process that keeps it, rank 0, is gone"
            ) from error


def _value(key: str) -> str:
    return f"hyperstate/v/{key}"


def _count(key: str) -> str:
    return f"hyperstate/n/{key}"


def _pauses(seconds: float, world: int) -> Iterator[float]:
    """Pauses between looks for a key, growing with the time waited, until `seconds` have passed."""
    start = time.monotonic()
    longest = LONGEST_SLEEP_S + world / QUERIES_PER_S
    while (waited := time.monotonic() - start) < seconds:
        yield min(max(waited / 8, SHORTEST_SLEEP_S), longest, max(seconds - waited, 0.0))
