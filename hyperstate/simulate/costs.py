"""What each operation would cost on any mesh: bytes, messages, memory and time per rank, without running it.

Ours come from the very plans that a run carries out (`traffic`). PyTorch's are arithmetic over what
``torch.distributed.checkpoint.state_dict`` of 2.13 does: an all-gather of every whole tensor to every rank, and a
broadcast of every whole tensor to every rank, each tensor for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..errors import OptionError
from ..layout import Layout, Mesh, Shape
from ..plan import Route, to_ranks
from ..schema import DTYPES
from ..transfer import IN_FLIGHT, message_limit
from .placement import Rule, check_names, layout_of
from .traffic import traffic_of

OPERATIONS = (
    "get, full on the root",
    "get, full everywhere",
    "set, broadcast from the root",
    "set, full everywhere",
    "redistribute",
)
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""State tensors that each parameter gets. Counters travel with the descriptions."""
BANDWIDTHS = (1.25e9, 12.5e9, 50e9)
"""Bytes per second and rank: 10, 100 and 400 Gbit/s."""
LATENCY_S = 20e-6


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model, or one of the optimizer's with a parameter's layout."""

    fqn: str
    dtype: str
    shape: Shape
    sharded: bool = True
    """False for one that every rank holds as a plain tensor, as buffers are."""

    @property
    def nbytes(self) -> int:
        """Of the full tensor."""
        return DTYPES[self.dtype][0] * prod(self.shape)


@dataclass(frozen=True)
class Job:
    """What to plan for."""

    tensors: Sequence[Tensor]
    source: Mesh
    target: Mesh
    rules: Sequence[Rule] = ()
    bandwidths: Sequence[float] = BANDWIDTHS
    latency: float = LATENCY_S
    """Seconds per message, one after another."""


@dataclass(frozen=True)
class Figures:
    """What one operation costs. Bytes unless said otherwise; `max` and `mean` are over ranks, `root` is rank 0."""

    operation: str
    by: str
    ranks: int
    total: int
    """All that is sent."""
    sent_root: int
    sent_max: int
    sent_mean: float
    received_root: int
    received_max: int
    received_mean: float
    messages_root: int
    messages_max: int
    messages_mean: float
    """Ours: messages that a rank sends. PyTorch's: collective calls that it makes."""
    peak_root: int
    peak_others: int
    """Memory above what was in use before, results included."""
    seconds: Mapping[str, float]
    """By bandwidth in bytes per second (as text)."""
    counted: int = 0
    """0: every rank's messages were counted. Else this many ranks stand for all in `sent_*` and `messages_*`."""


def with_optimizer(tensors: Sequence[Tensor], optimizer: str, dtype: str = "") -> list[Tensor]:
    """`tensors`, then the optimizer's state in the order of a plan. Only sharded floating tensors have some.

    Its dtype is the parameter's, or `dtype`. Raises `OptionError`.
    """
    if optimizer not in OPTIMIZERS:
        raise OptionError(f"optimizer {optimizer!r}: known are {', '.join(OPTIMIZERS)}")
    if dtype and dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r}: known are {', '.join(DTYPES)}")
    state = [
        replace(tensor, dtype=dtype or tensor.dtype)
        for tensor in tensors
        if tensor.sharded and DTYPES[tensor.dtype][1] == "float"
        for _ in OPTIMIZERS[optimizer]
    ]
    return [*tensors, *state]


def simulate(job: Job, tell: Callable[[str], None] = lambda _: None) -> list[Figures]:
    """The figures of every operation, ours and PyTorch's. `tell` hears which operation is being planned.

    get: from `job.source`; set: into `job.target`; redistribute: from one to the other, ranks counted from 0 in both.
    Raises `OptionError` for mesh dimensions whose meaning is unknown.
    """
    for mesh in (job.source, job.target):
        check_names(mesh, job.rules)
    planner = _Planner(job)
    found = []
    for operation in OPERATIONS:
        tell(operation)
        found += [planner.ours(operation), planner.torch(operation)]
    return found


class _Planner:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.routes: dict[tuple[object, ...], Route] = {}
        self.before = self._layouts(job.source)
        self.after = self._layouts(job.target)

    def _layouts(self, mesh: Mesh) -> list[Layout | None]:
        """Of each tensor; None for a plain one."""
        return [
            layout_of(mesh, tensor.fqn, tensor.shape, self.job.rules) if tensor.sharded else None
            for tensor in self.job.tensors
        ]

    # -- ours ------------------------------------------------------------------------------------------

    def ours(self, operation: str) -> Figures:
        ranks = self._ranks(operation)
        limit = message_limit(len(ranks))
        found = traffic_of(list(self._routes(operation)), limit)
        staging = IN_FLIGHT * limit * max(1, len(ranks) - 1)
        kept = self._kept(operation)

        def peak(rank: int) -> int:
            return kept(rank) + min(staging, found.sent.get(rank, 0) + found.received.get(rank, 0))

        messages = list(found.messages.values())
        counted = len(ranks) if found.exact else max(1, len(found.sent))
        return Figures(
            operation,
            "hyperstate",
            len(ranks),
            found.total,
            found.sent.get(0, 0),
            max(found.sent.values(), default=0),
            found.total / len(ranks),
            found.received.get(0, 0),
            max(found.received.values(), default=0),
            found.total / len(ranks),
            found.messages.get(0, 0),
            max(messages, default=0),
            sum(messages) / counted,
            peak(0),
            max((peak(rank) for rank in ranks[1:]), default=0),
            self._seconds(sum(found.busiest), sum(found.rounds)),
            found.sampled,
        )

    def _ranks(self, operation: str) -> range:
        source, target = len(self.job.source.ranks), len(self.job.target.ranks)
        return range(
            source if operation.startswith("get") else target if operation.startswith("set") else max(source, target)
        )

    def _routes(self, operation: str) -> Iterable[Route]:
        """One route per tensor that moves, as the getters and setters choose it."""
        everyone = self._ranks(operation)
        for tensor, before, after in zip(self.job.tensors, self.before, self.after, strict=True):
            if before is None or after is None:
                # Each rank has its own already, and what has one element travels with the descriptions.
                if operation == OPERATIONS[2] and prod(tensor.shape) != 1:
                    yield self._route(tensor, to_ranks((0,), tensor.shape), to_ranks(everyone, tensor.shape))
            elif operation == OPERATIONS[0]:
                yield self._route(tensor, before, to_ranks((0,), tensor.shape))
            elif operation == OPERATIONS[1]:
                yield self._route(tensor, before, to_ranks(before.mesh.ranks, tensor.shape))
            elif operation == OPERATIONS[2]:
                yield self._route(tensor, to_ranks((0,), tensor.shape), after)
            elif operation == OPERATIONS[3]:
                yield self._route(tensor, to_ranks(everyone, tensor.shape), after)
            else:
                yield self._route(tensor, before, after)

    def _route(self, tensor: Tensor, source: Layout, target: Layout) -> Route:
        key = (tensor.dtype, tensor.shape, source, target)
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = Route(tensor.dtype, tensor.shape, source, target)
        return route

    def _kept(self, operation: str) -> Callable[[int], int]:
        """Bytes of the values that a call leaves behind on a rank. Setters write in place."""
        if operation not in OPERATIONS[:2]:
            return lambda _: 0
        full = sum(tensor.nbytes for tensor in self.job.tensors)
        everywhere = operation == OPERATIONS[1]
        return lambda rank: full if everywhere or rank == 0 else 0

    def _seconds(self, nbytes: float, calls: int) -> dict[str, float]:
        return {f"{width:g}": nbytes / width + calls * self.job.latency for width in self.job.bandwidths}

    # -- PyTorch's -------------------------------------------------------------------------------------

    def torch(self, operation: str) -> Figures:
        """See the module. Rings: each rank sends on what it receives, so that nobody sends more than the whole."""
        ranks = len(self._ranks(operation))
        full = sum(tensor.nbytes for tensor in self.job.tensors)
        largest = max((tensor.nbytes for tensor in self.job.tensors), default=0)
        if operation in OPERATIONS[:2] or operation == OPERATIONS[4]:
            gathered = [_gathered(*pair) for pair in zip(self.job.tensors, self.before, strict=True)]
            each, calls = sum(gathered), len([nbytes for nbytes in gathered if nbytes])
            peaks = (full + largest, largest) if operation == OPERATIONS[0] else (full, full)
            total = each * len(self.job.source.ranks)
            return self._theirs(operation, ranks, total, (each, each), (each, each), calls, peaks)
        calls = len(self.job.tensors)
        if operation == OPERATIONS[2]:
            moved = full if ranks > 1 else 0
            sides = ((moved, moved), (0, moved))
            return self._theirs(operation, ranks, moved * (ranks - 1), *sides, calls, (largest, largest))
        total, sent, received = self._scattered()
        return self._theirs(operation, ranks, total, (sent, sent), (0, received), calls, (largest, largest))

    def _scattered(self) -> tuple[int, int, int]:
        """Total, root's sent and most received bytes of ``distribute_tensor``, which starts from the mesh's rank 0.

        Over replicas it broadcasts the whole tensor first, then each group scatters.
        """
        total = sent = received = 0
        for tensor, layout in zip(self.job.tensors, self.after, strict=True):
            if layout is None:
                continue
            parts = _parts(layout)
            rows = len(layout.mesh.ranks) // parts
            away = tensor.nbytes - tensor.nbytes // parts
            total += (rows - 1) * tensor.nbytes + rows * away
            sent += away + (tensor.nbytes if rows > 1 else 0)
            received += tensor.nbytes if rows > 1 else tensor.nbytes // parts * (parts > 1)
        return total, sent, received

    def _theirs(
        self,
        operation: str,
        ranks: int,
        total: int,
        sent: tuple[int, int],
        received: tuple[int, int],
        calls: int,
        peaks: tuple[int, int],
    ) -> Figures:
        mean = total / ranks
        seconds = self._seconds(max(*sent, *received), calls)
        sides = (*sent, mean, *received, mean)
        return Figures(operation, "PyTorch", ranks, total, *sides, calls, calls, float(calls), *peaks, seconds)


def _parts(layout: Layout) -> int:
    """Into how many shards a layout cuts."""
    return prod(layout.mesh.shape[d] for d in layout.used)


def _gathered(tensor: Tensor, layout: Layout | None) -> int:
    """Bytes that an all-gather brings to each rank."""
    return 0 if layout is None else tensor.nbytes - tensor.nbytes // _parts(layout)
