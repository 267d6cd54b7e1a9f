"""`Fabric` and `Control` for PyTorch: the default process group, and its store."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
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

AGAIN = "The objects given may hold old and new values mixed; load them again"

Buffer = torch.Tensor
Message = tuple[int, Buffer]


def default_group() -> Any:
    """The default process group, or None if there is no job."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_group()


class TorchFabric:
    """Point-to-point messages on the default process group."""

    def __init__(self) -> None:
        self._abandoned: list[Any] = []
        self.reset_traffic()

    def rank(self) -> int:
        """This process' global rank; 0 if there is no job."""
        return dist.get_rank() if default_group() is not None else 0

    def world(self) -> int:
        """Number of ranks of the job; 1 if there is none."""
        return dist.get_world_size() if default_group() is not None else 1

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
        try:
            works = self._tagged(sends, recvs) if self.wire().type == "cpu" else self._batched(sends, recvs)
        except RuntimeError as error:
            raise TransferError(f"rank {self.rank()} can't exchange data with {_names(sends, recvs)}: {error}. {AGAIN}"
                                ) from error
        return Exchange(self, works, [*sends, *recvs])

    @staticmethod
    def _tagged(sends: Sequence[Message], recvs: Sequence[Message]) -> list[tuple[Any, str]]:
        works: list[tuple[Any, str]] = []
        for peer, buffer in recvs:
            works.append((dist.irecv(buffer, src=peer, tag=TAG), f"rank {peer}"))
        for peer, buffer in sends:
            works.append((dist.isend(buffer, dst=peer, tag=TAG), f"rank {peer}"))
        return works

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

    def wait(self, timeout: float) -> None:
        """See `hyperstate.backend.Pending`."""
        deadline = time.monotonic() + timeout
        while self._works:
            work, peer = self._works[0]
            left = max(deadline - time.monotonic(), 0.001)
            try:
                done = _wait(work, left)
            except Exception as error:
                self._fail(peer, f"{type(error).__name__}: {error}", error)
            if not done:
                self._fail(peer, f"no answer within {timeout:g} s", None)
            self._works.pop(0)
        self._messages = []

    def _fail(self, peer: str, text: str, error: Exception | None) -> NoReturn:
        # The fabric may still read and write the buffers of what it has not finished.
        self._fabric._abandoned.append((self._works, self._messages))
        self._works, self._messages = [], []
        raise TransferError(f"rank {self._fabric.rank()} lost the connection to {peer}: {text}. {AGAIN}") from error


def _wait(work: Any, seconds: float) -> bool:
    """Whether `work` is done. Raises what the fabric raises."""
    if work is None:
        return True
    if not hasattr(work, "_get_duration") or "NCCL" not in type(work).__name__.upper():
        return work.wait(timedelta(seconds=seconds)) is not False
    return True


def _names(sends: Sequence[Message], recvs: Sequence[Message]) -> str:
    peers = sorted({peer for peer, _ in (*sends, *recvs)})
    return ("rank " if len(peers) == 1 else "ranks ") + ", ".join(map(str, peers))
