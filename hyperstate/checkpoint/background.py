"""Saving beside the training: the caller is held for the agreement and the copy to host memory alone."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace

from ..backend import Backend, Local, Tensors
from ..errors import CheckpointError, HyperstateError
from ..schema import TensorSpec
from .contents import Piece
from .saving import Job, Source


class Handle:
    """A save under way."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.error: BaseException | None = None
        """What went wrong, once it is over."""
        self.told = False
        """Whether the caller knows how it ended."""
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin. The interpreter does not end before the save does."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # `wait` raises it
                self.error = error

        # Where ranks are threads, the new thread is the same rank: it takes over the context.
        self._thread = threading.Thread(target=copy_context().run, args=(run,), name="hyperstate-save")
        self._thread.start()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is visible.

        Raises what went wrong, or `CheckpointError` if that takes more than `timeout` seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        if not self.done():
            raise CheckpointError(f"the save to {self.path} is not done after {timeout:g} s; it goes on")
        self.told = True
        if self.error is not None:
            raise self.error


class _Rank:
    """What one rank keeps from one save to the next."""

    def __init__(self) -> None:
        self.last: Handle | None = None
        self.staging: dict[tuple[str, tuple[int, ...]], list[Local]] = {}
        """Host memory by dtype and shape."""


_ranks: dict[tuple[str, int], _Rank] = {}


@atexit.register
def _tell() -> None:
    """At the end of the interpreter, when all saves are over: say which failed without anybody having heard of it."""
    for last in (rank.last for rank in _ranks.values()):
        if last is not None and not last.told and last.error is not None:
            warnings.warn(f"the save to {last.path} failed, and nobody waited for it: {last.error}", stacklevel=2)


def _rank(backend: Backend) -> _Rank:
    return _ranks.setdefault((backend.name, backend.fabric.rank()), _Rank())


def settle_last(backend: Backend) -> None:
    """Wait for the save under way, if any: there is one at a time. Raises its error if nobody has seen it."""
    last, _rank(backend).last = _rank(backend).last, None
    if last is not None and not last.told:
        try:
            last.wait()
        except HyperstateError as error:
            raise CheckpointError(f"the save before this one failed, and nobody waited for it: {error}") from error


def start(job: Job) -> Handle:
    """Copy what the job writes to host memory, and write it on another thread."""
    backend = job.call.backend
    mine = _rank(backend)
    staged = replace(job, pieces=_stage(backend.tensors, mine, job.pieces))
    mine.last = Handle(job.store.path)
    mine.last.start(staged.write)
    return mine.last


def _stage(tensors: Tensors, mine: _Rank, pieces: list[tuple[Piece, Source]]) -> list[tuple[Piece, Source]]:
    """The pieces with their bytes in host memory, which is used again by the next save."""
    free, mine.staging = mine.staging, {}
    pairs: list[tuple[Local, Local]] = []
    staged: list[tuple[Piece, Source]] = []
    for piece, source in pieces:
        if isinstance(source, bytes):
            staged.append((piece, source))
            continue
        spec = tensors.spec(source)
        assert isinstance(spec, TensorSpec)
        kind = (spec.dtype, spec.shape)
        room = free[kind].pop() if free.get(kind) else tensors.staging(spec.shape, spec.dtype)
        mine.staging.setdefault(kind, []).append(room)
        pairs.append((room, source))
        staged.append((piece, room))
    tensors.copy(pairs)
    return staged
