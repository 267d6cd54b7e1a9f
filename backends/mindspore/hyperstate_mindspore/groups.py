"""Collectives among some ranks, as sharded tensors and training need them: whole fresh buffers, nothing empty.

MindSpore's CPU collectives lose what is received into a view and hang on empty tensors; both are ruled out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore.communication import GlobalComm
from mindspore.mint import distributed as dist

from hyperstate.errors import TransferError

from .host import settle
from .job import presence, rank, world

Bytes = npt.NDArray[np.uint8]

_groups: dict[tuple[str, tuple[int, ...]], str] = {}
"""Groups made so far. MindSpore never frees one, and equal ranks give equal names."""


def group(ranks: Sequence[int]) -> str | None:
    """The name of a group of these ranks; None means the world. To be called by members only, by all of them."""
    members = tuple(sorted(ranks))
    if members == tuple(range(world())):
        return None
    key = (GlobalComm.WORLD_COMM_GROUP, members)
    if key not in _groups:
        _groups[key] = dist.new_group(list(members))
    return _groups[key]


def all_gather(data: Bytes, sizes: dict[int, int]) -> dict[int, Bytes]:
    """The bytes of every rank, of `sizes[rank]` bytes each (perhaps 0). All of those ranks must call.

    Raises `TransferError` if one does not: MindSpore waits MS_CPU_COMM_OP_TIMEOUT seconds (default 30).
    """
    if list(sizes) == [rank()]:
        return {rank(): data}
    longest = max(sizes.values())
    if not longest:
        return {member: data[:0] for member in sizes}
    padded = np.zeros(longest, np.uint8)
    padded[: len(data)] = data
    found = [ms.Tensor(np.zeros(longest, np.uint8)) for _ in sizes]
    settle()  # an error of the script's own operators must not be taken for ours
    dist.all_gather(found, ms.Tensor(padded), group(list(sizes)))
    return {member: _read(one, sizes)[: sizes[member]] for member, one in zip(sorted(sizes), found, strict=True)}


def all_reduce(values: npt.NDArray[Any], ranks: Sequence[int]) -> npt.NDArray[Any]:
    """The sum over `ranks`, element by element, to the bit the same on all of them. See `all_gather`."""
    if len(ranks) == 1 or not values.size:
        return values
    if values.dtype != np.float32:  # float64 has no reduction on CPU
        parts = all_gather(values.reshape(-1).view(np.uint8), dict.fromkeys(ranks, values.nbytes))
        total = sum(parts[member].view(values.dtype) for member in sorted(parts))
        return np.asarray(total).reshape(values.shape)
    reduced = ms.Tensor(values)
    settle()  # as above
    dist.all_reduce(reduced, group=group(ranks))
    return _read(reduced, ranks)


def _read(tensor: ms.Tensor, ranks: Iterable[int]) -> npt.NDArray[Any]:
    """The contents, once they have arrived: collectives return before that."""
    try:
        found: npt.NDArray[Any] = tensor.asnumpy()
    except RuntimeError as error:
        lost = _lost(ranks)
        who = f"rank {', '.join(map(str, lost))} has ended" if lost else "one of them did not come in time"
        raise TransferError(
            f"rank {rank()}: a collective of the ranks {sorted(ranks)} failed: {who} ({error}); after that MindSpore's "
            "collectives can't be trusted in this process: start it anew"
        ) from error
    return found


def _lost(ranks: Iterable[int]) -> list[int]:
    """Which of `ranks` have ended, as far as can be told."""
    lost = []
    for peer in sorted(set(ranks) - {rank()}):
        try:
            presence().meet(peer)
        except (RuntimeError, OSError):
            return [0]  # the store that tells where peers are is rank 0's
        if presence().gone(peer):
            lost.append(peer)
    return lost
