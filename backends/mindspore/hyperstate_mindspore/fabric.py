"""`Fabric` for MindSpore: messages on the world group, through `mindspore.mint.distributed`.

MindSpore's CPU messages have no tags, land in whole tensors only, run one after the other behind the script's back,
and wait 30 s for a peer that is dead. Hence: fresh whole buffers, a tag in front of each, sends before receives, one
synchronisation before a result is trusted, and a look at the peer's process while waiting for it.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore.mint import distributed as dist

from hyperstate.errors import TransferError

from . import job
from .control import MindSporeControl
from .host import settle

MAGIC = 0x6873
_TAG = struct.Struct("<HHIQ")
"""Our mark, the sender, the number of the message between the two ranks, its bytes: what tells a stray message."""
TAG_BYTES = _TAG.size
WATCH_S, ASK_S = 0.05, 0.5
"""How often a waiting rank looks whether the peer's process is there, and whether the peer has given up."""
GRACE_S = 1.0
"""How long a message of a process that has ended may take to come out of MindSpore's own buffers."""

Bytes = npt.NDArray[np.uint8]


class Buffer:
    """A row of bytes with room for the tag in front."""

    def __init__(self, nbytes: int) -> None:
        self.whole: Bytes = np.empty(TAG_BYTES + nbytes, np.uint8)
        self.data: Bytes = self.whole[TAG_BYTES:]
        self.nbytes = nbytes


Message = tuple[int, Buffer]


@dataclass
class _Flight:
    """The messages of one exchange."""

    sends: Sequence[Message]
    recvs: Sequence[Message]
    tags: list[bytes] = field(default_factory=list)
    """What must come, by number of the message received."""
    landing: list[Any] = field(default_factory=list)
    """Where it comes, if that is on a device."""
    kept: list[Any] = field(default_factory=list)
    """What MindSpore may still use."""

    def peers(self) -> list[int]:
        return [peer for peer, _ in (*self.sends, *self.recvs)]


class MindSporeFabric:
    """Point-to-point messages on the world group."""

    def __init__(self, control: MindSporeControl) -> None:
        self._control = control
        self._numbers: dict[tuple[str, int], int] = {}
        """Messages so far, by direction and peer."""
        self._posted: deque[tuple[int, Bytes]] = deque()
        """In MindSpore's order, on CPU: the peer of each message, and bytes that are zero until it is done."""
        self._failure = ""
        self.reset_traffic()

    def rank(self) -> int:
        """This process' global rank; 0 if there is no job."""
        return job.rank()

    def world(self) -> int:
        """Number of ranks of the job; 1 if there is none."""
        return job.world()

    def timeout(self) -> float:
        """The timeout given to `join`, in seconds."""
        return job.default_timeout()

    # -- messages -------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Exchange:
        """Start sending and receiving; empty buffers never travel."""
        flight = _Flight([one for one in sends if one[1].nbytes], [one for one in recvs if one[1].nbytes])
        self._count(flight)
        if not flight.peers():
            return Exchange(self, None)
        if self._failure:
            raise TransferError(f"{self._failure}; after that this process can exchange no more data: start it anew")
        settle()  # an error of the script's own operations must not be taken for ours
        job.enable_messages()
        for peer in dict.fromkeys(flight.peers()):
            job.presence().meet(peer)
        for peer, buffer in flight.sends:
            buffer.whole[:TAG_BYTES] = np.frombuffer(self._tag("to", self.rank(), peer, buffer), np.uint8)
        for peer, buffer in flight.recvs:
            buffer.whole[:TAG_BYTES] = 0
            flight.tags.append(self._tag("from", peer, peer, buffer))
        try:
            self._post(flight) if ms.get_context("device_target") == "CPU" else self._post_batch(flight)
        except RuntimeError as error:
            self.give_up(flight.peers(), str(error), error)
        return Exchange(self, flight)

    def _tag(self, way: str, sender: int, peer: int, buffer: Buffer) -> bytes:
        number = self._numbers[way, peer] = self._numbers.get((way, peer), 0) + 1
        return _TAG.pack(MAGIC, sender & 0xFFFF, number & 0xFFFFFFFF, buffer.nbytes)

    def _post(self, flight: _Flight) -> None:
        # A rank's operations run in order, and a send ends without the receiver's help: no two ranks block each other.
        for peer, buffer in flight.sends:
            done: Bytes = np.zeros(1, np.uint8)
            tensor, mark, one = ms.from_numpy(buffer.whole), ms.from_numpy(done), ms.from_numpy(np.ones(1, np.uint8))
            flight.kept += [tensor, mark, one, dist.isend(tensor, dst=peer), mark.copy_(one)]
            self._posted.append((peer, done))
        for peer, buffer in flight.recvs:
            tensor = ms.from_numpy(buffer.whole)
            flight.kept += [tensor, dist.irecv(tensor, src=peer)]
            self._posted.append((peer, buffer.whole[:TAG_BYTES]))

    @staticmethod
    def _post_batch(flight: _Flight) -> None:
        # Device fabrics may deadlock on single messages in both directions.
        device = ms.get_context("device_target")
        flight.landing = [ms.mint.zeros(buffer.whole.size, dtype=ms.uint8) for _, buffer in flight.recvs]
        ops = [dist.P2POp("irecv", to, peer) for to, (peer, _) in zip(flight.landing, flight.recvs, strict=True)]
        for peer, buffer in flight.sends:
            ops.append(dist.P2POp("isend", ms.from_numpy(buffer.whole).move_to(device), peer))
        flight.kept = [ops, dist.batch_isend_irecv(ops)]

    def waiting_for(self) -> int | None:
        """The peer of the message that MindSpore is busy with; None if all is done or nobody can tell."""
        while self._posted and self._posted[0][1].any():
            self._posted.popleft()
        return self._posted[0][0] if self._posted else None

    # -- lost peers -----------------------------------------------------------------------------------

    @staticmethod
    def ended(peer: int) -> bool:
        """Whether the process of a peer is gone."""
        return job.presence().gone(peer)

    def ask(self, peer: int) -> None:
        """Raise `TransferError` if the peer gave up itself."""
        if self._control.add(f"gave-up/{peer}", 0):
            reason = self._control.get(f"why/{peer}", self.timeout()) or b""
            self.give_up([peer], f"it gave up, since {reason.decode()}", None)

    def give_up(self, peers: Sequence[int], text: str, error: Exception | None) -> NoReturn:
        """Raise `TransferError` now and at each exchange to come, and let peers that wait for this rank know.

        What was posted stays posted, so that no later message can be trusted to be the one expected.
        """
        names = ("rank " if len(set(peers)) == 1 else "ranks ") + ", ".join(map(str, sorted(set(peers))))
        self._failure = f"rank {self.rank()} lost the connection to {names}: {text.partition(chr(10))[0]}"
        raised = TransferError(self._failure)
        try:
            self._control.set(f"why/{self.rank()}", self._failure.encode())
            self._control.add(f"gave-up/{self.rank()}", 1)
        except TransferError as gone:
            raised.add_note(str(gone))
        raise raised from error

    # -- counts ---------------------------------------------------------------------------------------

    def _count(self, flight: _Flight) -> None:
        counts = self._traffic
        counts["exchanges"] += 1
        counts["messages"] += len(flight.sends)
        counts["sent"] += sum(buffer.nbytes for _, buffer in flight.sends)
        counts["received"] += sum(buffer.nbytes for _, buffer in flight.recvs)

    def traffic(self) -> dict[str, int]:
        """What this rank has moved since the last reset: exchanges, messages sent, bytes sent and received."""
        return dict(self._traffic)

    def reset_traffic(self) -> None:
        """Count from zero again."""
        self._traffic = dict.fromkeys(("exchanges", "messages", "sent", "received"), 0)


class Exchange:
    """An exchange under way; it keeps its buffers alive."""

    def __init__(self, fabric: MindSporeFabric, flight: _Flight | None) -> None:
        self._fabric, self._flight = fabric, flight

    def wait(self, timeout: float) -> None:
        """See `hyperstate.backend.Pending`."""
        if self._flight is None:
            return
        waiter = _Waiter()
        watch = _Watch(self._fabric)
        deadline = time.monotonic() + timeout
        while not waiter.done.wait(WATCH_S):
            watch.look()
            if time.monotonic() >= deadline:
                self._fabric.give_up(self._suspects(), f"no answer within {timeout:g} s", None)
        if waiter.error is not None:
            self._fabric.give_up(self._suspects(), str(waiter.error), waiter.error)
        self._check(self._flight)
        self._flight = None

    def _suspects(self) -> list[int]:
        peer = self._fabric.waiting_for()
        if peer is not None:
            return [peer]
        return [] if self._flight is None else self._flight.peers()

    def _check(self, flight: _Flight) -> None:
        for (_, buffer), landed in zip(flight.recvs, flight.landing, strict=False):
            buffer.whole[...] = landed.asnumpy()
        for (peer, buffer), tag in zip(flight.recvs, flight.tags, strict=True):
            found = buffer.whole[:TAG_BYTES].tobytes()
            if found != tag:
                text = (
                    f"the message {_TAG.unpack(found)} came instead of {_TAG.unpack(tag)} (mark, sender, number, "
                    "bytes); something else was sent on the world group, or an earlier transfer failed"
                )
                self._fabric.give_up([peer], text, None)


class _Watch:
    """Looks after the peer whose message is awaited."""

    def __init__(self, fabric: MindSporeFabric) -> None:
        self._fabric = fabric
        self._peer: int | None = None
        self._asked = time.monotonic()
        self._ended = 0.0

    def look(self) -> None:
        """Raise `TransferError` if that peer's process is gone or has given up."""
        now, peer = time.monotonic(), self._fabric.waiting_for()
        if peer != self._peer:
            self._peer, self._ended = peer, 0.0
        if peer is None:
            return
        if self._fabric.ended(peer):
            self._ended = self._ended or now
            if now - self._ended >= GRACE_S:
                self._fabric.give_up([peer], "its process has ended", None)
        elif now - self._asked >= ASK_S:
            self._asked = now
            self._fabric.ask(peer)


class _Waiter(threading.Thread):
    """Waits until all that was posted is done, so that the caller can look after its peers meanwhile."""

    def __init__(self) -> None:
        super().__init__(name="hyperstate wait", daemon=True)
        self.done = threading.Event()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            settle()
        except Exception as error:  # noqa: BLE001  # the waiting caller raises it
            self.error = error
        self.done.set()
