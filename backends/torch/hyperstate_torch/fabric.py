"""`Fabric` and `Control` for PyTorch: the default process group, and its store."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hyperstate.errors import TransferError, UnsupportedConfigurationError

from .dtensors import current_device

TAG = 0x6873
"""Tag of all our messages, where the fabric has tags: the user's own point-to-point messages never mix with ours."""
NO_GROUP_TIMEOUT_S = 1800.0
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 5e-5, 0.01
QUERIES_PER_S = 20_000
"""About how many queries all waiting ranks together may put to the store."""

Buffer = torch.Tensor
Message = tuple[int, Buffer]


def default_group() -> Any:
    """The default process group, or None if there is no job."""
    return dist.GroupMember.WORLD if dist.is_available() else None


class TorchFabric:
    """Point-to-point messages on the default process group."""

    def __init__(self) -> None:
        self._abandoned: list[Any] = []
        self.reset_traffic()

    def rank(self) -> int:
        """This process' global rank; 0 if there is no job."""
        group = default_group()
        return 0 if group is None else int(group.rank())

    def world(self) -> int:
        """Number of ranks of the job; 1 if there is none."""
        group = default_group()
        return 1 if group is None else int(group.size())

    def timeout(self) -> float:
        """The default group's timeout, in seconds."""
        group = default_group()
        if group is None:
            return NO_GROUP_TIMEOUT_S
        for device in group._device_types:
            found = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
            if isinstance(found, timedelta):
                return found.total_seconds()
        return dist.distributed_c10d.default_pg_timeout.total_seconds()

    def wire(self) -> torch.device:
        """Where buffers live: on the host wherever the group reaches it, else on the current accelerator device."""
        group = default_group()
        kinds = ["cpu"] if group is None else [device.type for device in group._device_types]
        if "cpu" in kinds:
            return torch.device("cpu")
        here = torch.accelerator.current_accelerator()
        if here is None or here.type not in kinds:
            raise UnsupportedConfigurationError(
                f"the default process group moves data of {kinds} only, and this process has "
                f"{'no accelerator' if here is None else here.type}"
            )
        return current_device(here.type)

    def pins(self) -> bool:
        """Whether host buffers are pinned: only where an accelerator is in use already."""
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return here is not None and bool(torch.get_device_module(here).is_initialized())

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Exchange:
        """Start sending and receiving. Receivers are posted first; empty buffers never travel."""
        sends = [(peer, buffer) for peer, buffer in sends if buffer.numel()]
        recvs = [(peer, buffer) for peer, buffer in recvs if buffer.numel()]
        self._count(sends, recvs)
        if not sends and not recvs:
            return Exchange(self, [], [])
        if self.wire().type == "cpu":
            works = self._tagged(sends, recvs)
        else:
            try:
                works = self._batched(sends, recvs)
            except RuntimeError as error:
                raise self._refused(_names(sends, recvs), error) from error
        return Exchange(self, works, [*sends, *recvs])

    def _tagged(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[tuple[Any, str]]:
        """Each message by itself. One to a lost peer is refused at once; the other peers still get theirs."""
        works: list[tuple[Any, str]] = []
        refusals: list[tuple[str, RuntimeError]] = []
        for start, messages in ((dist.irecv, recvs), (dist.isend, sends)):
            for peer, buffer in messages:
                try:
                    works.append((start(buffer, peer, tag=TAG), f"rank {peer}"))
                except RuntimeError as error:
                    refusals.append((f"rank {peer}", error))
        if refusals:
            self._abandoned.append((works, [*sends, *recvs]))
            raise self._refused(*refusals[0]) from refusals[0][1]
        return works

    def _refused(self, peers: str, error: Exception) -> TransferError:
        return TransferError(f"rank {self.rank()} can't exchange data with {peers}: {error}")

    @staticmethod
    def _batched(sends: Sequence[Message], recvs: Sequence[Message]) -> list[tuple[Any, str]]:
        # Device fabrics have no tags and may deadlock on single messages in both directions: one batch, in order.
        ops = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in recvs]
        ops += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in sends]
        names = _names(sends, recvs)
        return [(work, names) for work in dist.batch_isend_irecv(ops)]

    def _count(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        counts = self._traffic
        counts["exchanges"] += 1
        counts["messages"] += len(sends)
        counts["sent"] += sum(buffer.numel() for _, buffer in sends)
        counts["received"] += sum(buffer.numel() for _, buffer in recvs)

    def traffic(self) -> dict[str, int]:
        """What this rank has moved since the last reset: exchanges, messages sent, bytes sent and received."""
        return dict(self._traffic)

    def reset_traffic(self) -> None:
        """Count from zero again."""
        self._traffic = dict.fromkeys(("exchanges", "messages", "sent", "received"), 0)


class Exchange:
    """An exchange under way; it keeps its buffers alive."""

    def __init__(self, fabric: TorchFabric, works: list[tuple[Any, str]], messages: list[Message]) -> None:
        self._fabric, self._works, self._messages = fabric, works, messages
        self._on_device = any(buffer.device.type != "cpu" for _, buffer in messages)

    def wait(self, timeout: float) -> None:
        """See `hyperstate.backend.Pending`."""
        deadline = time.monotonic() + timeout
        while self._works:
            work, peer = self._works[0]
            left = max(deadline - time.monotonic(), 0.001)
            try:
                done = work is None or _wait(work, left, self._on_device)
            except Exception as error:  # noqa: BLE001  # whatever the library raises, a peer was lost
                self._fail(peer, f"{type(error).__name__}: {error}", error)
            if not done:
                self._fail(peer, f"no answer within {timeout:g} s", None)
            self._works.pop(0)
        self._messages = []

    def _fail(self, peer: str, text: str, error: Exception | None) -> NoReturn:
        # The fabric may still read and write the buffers of what it has not finished.
        self._fabric._abandoned.append((self._works, self._messages))
        self._works, self._messages = [], []
        raise TransferError(f"rank {self._fabric.rank()} lost the connection to {peer}: {text}") from error


def _wait(work: Any, seconds: float, on_device: bool) -> bool:
    """Whether `work` is done. Raises what the fabric raises."""
    if on_device:
        # A device fabric's wait() may only order streams; the host must know that the data came.
        for pause in _pauses(seconds, 1):
            if work.is_completed():
                break
            time.sleep(pause)
        else:
            return False
    return work.wait(timedelta(seconds=seconds)) is not False


def _pauses(seconds: float, world: int) -> Iterator[float]:
    """Pauses between looks for something, growing with the time waited, until `seconds` have passed."""
    start = time.monotonic()
    longest = LONGEST_SLEEP_S + world / QUERIES_PER_S
    while (waited := time.monotonic() - start) < seconds:
        yield min(max(waited / 8, SHORTEST_SLEEP_S), longest, max(seconds - waited, 0.0))


def _names(sends: Sequence[Message], recvs: Sequence[Message]) -> str:
    peers = sorted({peer for peer, _ in (*sends, *recvs)})
    return ("rank " if len(peers) == 1 else "ranks ") + ", ".join(map(str, peers))


class TorchControl:
    """The default store, under a prefix and over a connection of our own."""

    def __init__(self, fabric: TorchFabric) -> None:
        self._fabric = fabric
        self._seen: Any = None
        self._own: Any = None
        self._alone: dict[str, Any] = {}
        self._notes: dict[str, dict[str, Any]] = {}
        self._note = ""

    def set(self, key: str, value: bytes) -> None:
        """Publish."""
        self._ask(lambda store: store.set(key, value))

    def get(self, key: str, timeout: float) -> bytes | None:
        """The value, waiting up to `timeout` seconds for it; None if it does not come.

        Asks again and again instead of `Store.wait`, which writes a warning to stderr for each wait that
        ends without the key (c10d `TCPStore`, torch 2.13) and blocks every other user of the connection.
        """
        if self._ask(lambda store: store.check([key])):
            return self._fetch(key)
        for pause in _pauses(timeout, self._fabric.world()):
            time.sleep(pause)
            if self._ask(lambda store: store.check([key])):
                return self._fetch(key)
        return None

    def _fetch(self, key: str) -> bytes | None:
        try:
            found: bytes = self._ask(lambda store: store.get(key))
        except TransferError:
            if self._ask(lambda store: store.check([key])):
                raise
            return None  # deleted in between
        return found

    def add(self, key: str, amount: int) -> int:
        """Atomically add to a counter that starts at 0; returns the sum."""
        return int(self._ask(lambda store: store.add(key, amount)))

    def delete(self, key: str) -> None:
        """Forget a key."""
        self._ask(lambda store: store.delete_key(key))

    def memory(self) -> dict[str, Any]:
        """This rank's notes on the store that is in use."""
        if default_group() is None:
            return self._alone
        self._ask(lambda _: None)
        return self._notes[self._note]

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._store())
        except RuntimeError as error:
            raise TransferError(
                f"rank {self._fabric.rank()} can't reach the job's key-value store ({error}); the process that keeps "
                "it, most often rank 0, is gone"
            ) from error

    def _store(self) -> Any:
        """Our view of the default store; a new one when the default group is a new one."""
        if default_group() is None:
            raise TransferError("there is no process group, so there is no key-value store")
        c10d: Any = dist.distributed_c10d
        base = c10d._get_default_store()
        if base is not self._seen:
            base.check(["hyperstate"])  # a store whose keeper is gone says so at once; to clone it would wait
            try:
                own = base.clone()  # a connection of its own: a long wait on the user's does not hold up ours
            except (AttributeError, RuntimeError):
                own = base  # a kind of store that can't be cloned
            self._own = c10d.PrefixStore("hyperstate", own)
            self._note = self._recall(self._own)
            self._seen = base
        return self._own

    def _recall(self, store: Any) -> str:
        """The name of the notes that belong to the keys in `store`.

        A group made again in the same process may find the old keys (torchrun's store outlives groups):
        then numbering must go on. Or it may find a new store under the old address: then it must not.
        """
        key = f"notes/{self._fabric.rank()}"
        if store.check([key]):
            name = str(store.get(key).decode())
            if name in self._notes:
                return name
        name = uuid.uuid4().hex
        store.set(key, name)
        self._notes[name] = {}
        return name
