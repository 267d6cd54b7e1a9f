"""A thread beside the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self


class Aside:
    """Makes calls one after the other on a thread of its own, until the block is left.

    An executor of the standard library takes no call once the main thread has ended; a save goes on then.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="hyperstate-aside")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)
        self._thread.join()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have ``call(*arguments)`` made; its result, or what it raised, is in the future."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: call(*arguments)))
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # `result` raises it
                future.set_exception(error)
