"""A job whose ranks are threads of this process: who is who, messages, a shared store, and death.

Code outside any job is rank 0 of 1. Messages meet as on a device fabric: bytes move when the sender and
the receiver have both posted, straight from one buffer into the other. So a buffer that is changed
too early, or two ranks that wait for each other, go wrong here as they would there.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hyperstate.errors import HyperstateError

from .dtypes import Array

T = TypeVar("T")

GRACE_S = 5.0
"""How long the threads of a failed job may take to notice that it is over."""


class RankDied(BaseException):
    """Ends a rank at once; not an `Exception`, so that nobody handles it."""


class JobOver(BaseException):
    """Unwinds the ranks of a job that was given up."""


class JobError(HyperstateError, AssertionError):
    """Some ranks failed or did not end; the text has each one's traceback."""


@dataclass(eq=False)
class Post:
    """One side of a message: whose it is, with whom, and the bytes to read or to write."""

    rank: int
    peer: int
    data: Array
    done: bool = False
    failure: str = ""


@dataclass
class Seat:
    """What one rank has to itself."""

    rank: int
    notes: dict[str, Any] = field(default_factory=dict)
    """`Control.memory`."""
    traffic: dict[str, int] = field(default_factory=dict)
    dies_at: int = 0
    """Number of exchanges until this rank dies at the start of one; 0 for never."""
    meetings: dict[tuple[int, ...], int] = field(default_factory=dict)
    """How often this rank has met each set of ranks (`Job.meet`)."""


class Job:
    """The ranks of one run, and everything that they share."""

    def __init__(self, world: int, timeout: float, device_only: bool) -> None:
        self.world, self.timeout, self.device_only = world, timeout, device_only
        self.seats = [Seat(rank) for rank in range(world)]
        self.changed = threading.Condition()
        """Guards all that follows; notified whenever any of it changes."""
        self.store: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}
        self.gone: dict[int, str] = {}
        """Ranks that take no further part, each with the reason."""
        self.over = False
        self._sends: dict[tuple[int, int], deque[Post]] = {}
        self._recvs: dict[tuple[int, int], deque[Post]] = {}
        self._met: dict[tuple[tuple[int, ...], int], dict[int, Any]] = {}

    def wait_for(self, ready: Callable[[], T | None], timeout: float) -> T | None:
        """The first non-None result of `ready`, or None after `timeout` seconds. Called with `changed` held."""
        deadline = time.monotonic() + timeout
        while True:
            if self.over:
                raise JobOver
            found = ready()
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            self.changed.wait(min(left, threading.TIMEOUT_MAX))

    def leave(self, rank: int, reason: str) -> None:
        """Note that `rank` takes no further part. What it has posted and nobody took is lost."""
        with self.changed:
            self.gone.setdefault(rank, reason)
            self.changed.notify_all()

    # -- messages -------------------------------------------------------------------------------------

    def post(self, sends: Sequence[Post], recvs: Sequence[Post]) -> None:
        """Offer messages; those of one pair of ranks meet in the order in which each side posts them."""
        with self.changed:
            for post in recvs:
                self._recvs.setdefault((post.peer, post.rank), deque()).append(post)
            for post in sends:
                self._sends.setdefault((post.rank, post.peer), deque()).append(post)
            for way in {*((p.peer, p.rank) for p in recvs), *((p.rank, p.peer) for p in sends)}:
                self._match(way)
            self.changed.notify_all()

    def _match(self, way: tuple[int, int]) -> None:
        sends, recvs = self._sends.get(way, deque()), self._recvs.get(way, deque())
        while sends and recvs:
            sent, received = sends.popleft(), recvs.popleft()
            if sent.data.size == received.data.size:
                received.data[...] = sent.data
            else:
                text = f"rank {way[0]} sends {sent.data.size} bytes where rank {way[1]} expects {received.data.size}"
                sent.failure = received.failure = text
            sent.done = received.done = True

    def lost(self, post: Post) -> str:
        """Why `post` can never be completed; empty if it may be. Called with `changed` held."""
        if post.failure:
            return post.failure
        return "" if post.done else self.gone.get(post.peer, "")

    # -- what the toy framework itself needs ----------------------------------------------------------

    def meet(self, ranks: tuple[int, ...], value: Any) -> list[Any]:
        """The values that all of `ranks` bring to this meeting, in their order. Not counted as traffic."""
        me = rank()
        seat = self.seats[me]
        number = seat.meetings[ranks] = seat.meetings.get(ranks, 0) + 1
        with self.changed:
            there = self._met.setdefault((ranks, number), {})
            there[me] = value
            self.changed.notify_all()
            absent = self.wait_for(lambda: self._absent(ranks, there), self.timeout)
            if absent is None or absent:
                raise RuntimeError(f"rank {me} waited in vain for {absent or sorted(set(ranks) - set(there))}")
            self._met.pop((ranks, number - 1), None)  # all have left that one
        return [there[rank] for rank in ranks]

    def _absent(self, ranks: tuple[int, ...], there: dict[int, Any]) -> list[int] | None:
        """The ranks that will never come; empty if all are there; None while some may come."""
        missing = [rank for rank in ranks if rank not in there]
        return [rank for rank in missing if rank in self.gone] or ([] if not missing else None)


_current: ContextVar[tuple[Job, Seat] | None] = ContextVar("hyperstate_numpy_job", default=None)
_alone = Seat(0)


def current() -> Job | None:
    """The job that the caller is part of."""
    found = _current.get()
    return None if found is None else found[0]


def seat() -> Seat:
    """What the calling rank has to itself."""
    found = _current.get()
    return _alone if found is None else found[1]


def rank() -> int:
    """The caller's global rank; 0 outside any job."""
    return seat().rank


def world() -> int:
    """Number of ranks; 1 outside any job."""
    job = current()
    return 1 if job is None else job.world


def die() -> None:
    """End the calling rank at once, as a killed process ends."""
    job = current()
    if job is not None:
        job.leave(rank(), "it died")
    raise RankDied


def run_ranks(
    ranks: int,
    function: Callable[[int], T],
    *,
    timeout: float = 60.0,
    transfer_timeout: float = 30.0,
    device_only: bool = False,
    lost: Sequence[int] = (),
) -> list[T | None]:
    """Run `function(rank)` on `ranks` threads; the results by rank.

    Ranks in `lost` are expected to die and give None. `transfer_timeout` seconds is the job's default
    timeout of one transfer, `timeout` that of the whole run. With `device_only` the fabric moves memory of the
    simulated device alone, as NCCL and HCCL do. Raises `JobError` with every failed rank's traceback.
    """
    job = Job(ranks, transfer_timeout, device_only)
    threads = [_Rank(job, number, function) for number in range(ranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    texts = [thread.complaint(timeout, thread.seat.rank in lost) for thread in threads]
    with job.changed:
        job.over = True
        job.changed.notify_all()
    for thread in threads:
        thread.join(GRACE_S)
    if any(texts):
        raise JobError("\n".join(f"--- rank {n}:\n{text}" for n, text in enumerate(texts) if text))
    return [thread.result for thread in threads]


class _Rank(threading.Thread):
    """The thread of one rank. It inherits the caller's context (`hyperstate.use_backend`)."""

    def __init__(self, job: Job, number: int, function: Callable[[int], Any]) -> None:
        super().__init__(name=f"rank {number}", daemon=True)
        self.seat = job.seats[number]
        self.result: Any = None
        self._job, self._function, self._context = job, function, copy_context()
        self._failure = ""
        self._died = False

    def run(self) -> None:
        self._context.run(self._run)

    def _run(self) -> None:
        _current.set((self._job, self.seat))
        reason = "it failed"
        try:
            self.result = self._function(self.seat.rank)
            reason = "it has ended"
        except RankDied:
            self._died = True
        except JobOver:
            pass
        except BaseException:  # noqa: BLE001  # whatever ended the rank is reported by `run_ranks`
            self._failure = traceback.format_exc()
        self._job.leave(self.seat.rank, reason)

    def complaint(self, timeout: float, expected_to_die: bool) -> str:
        """What is wrong with how this rank ended; empty if nothing is."""
        if self.is_alive() and self.ident is not None:
            frame = sys._current_frames().get(self.ident)
            where = "".join(traceback.format_stack(frame)) if frame is not None else ""
            return f"did not end within {timeout:g} s; it was here:\n{where}"
        if expected_to_die:
            return "" if self._died else self._failure or "was expected to die, but ended"
        return "died" if self._died else self._failure
