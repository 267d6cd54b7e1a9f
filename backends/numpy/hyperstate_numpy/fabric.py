"""`Fabric` and `Control` of the reference backend: the current job's messages and its store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

from hyperstate.errors import TransferError

from . import job
from .arrays import CPU, SIM, Tensor
from .job import Job, Post

NO_JOB_TIMEOUT_S = 60.0
COUNTS = ("exchanges", "messages", "bytes_sent", "bytes_received")
Message = tuple[int, Tensor]


class NumpyFabric:
    """See `hyperstate.backend.Fabric`. A buffer is a one-dimensional uint8 `Tensor`."""

    def rank(self) -> int:
        """The calling thread's rank; 0 if there is no job."""
        return job.rank()

    def world(self) -> int:
        """Number of ranks of the job; 1 if there is none."""
        return job.world()

    def timeout(self) -> float:
        """The job's default timeout, in seconds."""
        here = job.current()
        return NO_JOB_TIMEOUT_S if here is None else here.timeout

    def wire(self) -> str:
        """The device whose memory the fabric reaches."""
        here = job.current()
        return SIM if here is not None and here.device_only else CPU

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Exchange:
        """Start sending and receiving. Buffers must stay as they are until `wait` has returned."""
        sends = [(peer, buffer) for peer, buffer in sends if buffer.array.size]
        recvs = [(peer, buffer) for peer, buffer in recvs if buffer.array.size]
        seat, here = job.seat(), job.current()
        self._check(sends, recvs, 1 if here is None else here.world)
        if seat.dies_at:
            seat.dies_at -= 1
            if not seat.dies_at:
                job.die()
        moved = (
            1, len(sends), sum(buffer.array.size for _, buffer in sends), sum(buffer.array.size for _, buffer in recvs)
        )  # fmt: skip
        for name, amount in zip(COUNTS, moved, strict=True):
            seat.traffic[name] = seat.traffic.get(name, 0) + amount
        out = [Post(seat.rank, peer, buffer.array) for peer, buffer in sends]
        back = [Post(seat.rank, peer, buffer.array) for peer, buffer in recvs]
        if here is None or not (out or back):
            return Exchange(None, [])
        here.post(out, back)
        return Exchange(here, [*back, *out])

    def _check(self, sends: Sequence[Message], recvs: Sequence[Message], world: int) -> None:
        me, wire = self.rank(), self.wire()
        for peer, buffer in [*sends, *recvs]:
            if not 0 <= peer < world or peer == me:
                raise TransferError(f"rank {me} can't exchange data with rank {peer} in a job of {world}")
            if buffer.device != wire:
                raise TransferError(
                    f"rank {me} was given a buffer on {buffer.device!r} for rank {peer}, but this job's fabric "
                    f"moves memory of {wire!r} only"
                )
            if buffer.dtype != "uint8" or len(buffer.shape) != 1 or not buffer.array.flags.c_contiguous:
                raise TransferError(f"rank {me} was given {buffer!r} for rank {peer}, which is no row of bytes")

    def traffic(self) -> dict[str, int]:
        """What this rank has moved since the last reset: exchanges, messages sent, bytes sent and received."""
        return dict.fromkeys(COUNTS, 0) | job.seat().traffic

    def reset_traffic(self) -> None:
        """Count from zero again."""
        job.seat().traffic.clear()


class Exchange:
    """An exchange under way."""

    def __init__(self, here: Job | None, posts: list[Post]) -> None:
        self._job, self._posts = here, posts

    def wait(self, timeout: float) -> None:
        """See `hyperstate.backend.Pending`."""
        if self._job is None:
            return
        deadline = time.monotonic() + timeout
        with self._job.changed:
            for post in self._posts:
                self._wait_one(self._job, post, deadline - time.monotonic(), timeout)

    def _wait_one(self, here: Job, post: Post, left: float, timeout: float) -> None:
        outcome = here.wait_for(lambda: self._outcome(here, post), left)
        if outcome is None:
            self._fail(post, f"no answer within {timeout:g} s")
        elif outcome:
            self._fail(post, outcome)

    @staticmethod
    def _outcome(here: Job, post: Post) -> str | None:
        """None while `post` is under way, empty when it is done, else what went wrong."""
        return here.lost(post) or ("" if post.done else None)

    @staticmethod
    def _fail(post: Post, text: str) -> NoReturn:
        raise TransferError(f"rank {post.rank} lost the connection to rank {post.peer}: {text}")


class NumpyControl:
    """See `hyperstate.backend.Control`: a dict that the job's threads share."""

    def set(self, key: str, value: bytes) -> None:
        """Publish."""
        here = self._job()
        with here.changed:
            here.store[key] = bytes(value)
            here.changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes | None:
        """The value, waiting up to `timeout` seconds for it; None if it does not come."""
        here = self._job()
        with here.changed:
            return here.wait_for(lambda: here.store.get(key), timeout)

    def add(self, key: str, amount: int) -> int:
        """Atomically add to a counter that starts at 0; returns the sum."""
        here = self._job()
        with here.changed:
            here.counters[key] = here.counters.get(key, 0) + amount
            return here.counters[key]

    def delete(self, key: str) -> None:
        """Forget a key."""
        here = self._job()
        with here.changed:
            here.store.pop(key, None)
            here.counters.pop(key, None)

    def memory(self) -> dict[str, Any]:
        """The calling rank's notes; a new job starts with none."""
        return job.seat().notes

    @staticmethod
    def _job() -> Job:
        here = job.current()
        if here is None:
            raise TransferError("there is no job, so there is no key-value store")
        return here
