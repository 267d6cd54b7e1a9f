"""Copies between layouts, and the messages that carry them. Pure arithmetic: no tensor, no socket.

Every rank derives its own part of a plan alone. A plan runs in *stages* (a later stage may forward
what an earlier one delivered) and a stage in *rounds*: in a round each pair of ranks exchanges one
message in each direction at most, made alike by sender and receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from .layout import Box, Layout, Shape, intersect, replicated
from .schema import DTYPES

DIRECT_BYTES = 256 * 1024
"""A region at least this large goes straight between its storage and the wire."""
ALIGNMENT = 16
"""Entries of a packed message start at multiples of this many bytes."""


class Copy(NamedTuple):
    """A region, in full-tensor coordinates, that goes to or comes from `peer`."""

    peer: int
    box: Box


@dataclass(frozen=True, eq=False)
class Route:
    """From one layout to another: what the moves of many tensors have in common.

    Compared by identity: tensors that share a route are planned once.
    """

    dtype: str
    shape: Shape
    source: Layout
    target: Layout
    kept: str = ""
    """The dtype that the target keeps; empty: the same."""
    forward: bool = False
    """The source storage is what an earlier stage wrote."""

    @cached_property
    def staged(self) -> tuple[Route, ...]:
        """This route as one per stage.

        From a single rank to replicas each region leaves the source once; the replicas then double in
        each further stage, in the dtype that the first one keeps.
        """
        pairs = _staged_layouts(self.source, self.target)
        if len(pairs) == 1:
            return (self,)
        return tuple(
            Route(self.dtype if stage == 0 else self.kept or self.dtype, self.shape, source, target, "", stage > 0)
            for stage, (source, target) in enumerate(pairs)
        )

    def incoming(self, me: int) -> tuple[Copy, ...]:
        """The regions that rank `me` needs, each with the rank that has it (perhaps `me`)."""
        return incoming(self.shape, self.source, self.target, me, self.forward)

    def outgoing(self, me: int) -> tuple[Copy, ...]:
        """The regions that rank `me` sends to others, each with its receiver."""
        return outgoing(self.shape, self.source, self.target, me, self.forward)


class Move(NamedTuple):
    """One tensor's way; `tensor` is the caller's number for it."""

    tensor: int
    route: Route


class Piece(NamedTuple):
    """A region inside a message: of move `move` (position in the stage's list), at byte `offset` if packed."""

    move: int
    box: Box
    offset: int


@dataclass(slots=True)
class Message:
    """What one rank sends another in one round: one packed buffer of `nbytes`, and direct regions."""

    packed: list[Piece] = field(default_factory=list)
    direct: list[Piece] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class Round:
    """This rank's messages of one round, by peer."""

    sends: dict[int, Message] = field(default_factory=dict)
    recvs: dict[int, Message] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """This rank's part of a stage: `local` copies within its own memory, then `rounds`."""

    moves: tuple[Move, ...]
    local: tuple[Piece, ...]
    rounds: tuple[Round, ...]


def choose(holders: tuple[int, ...], target: Layout, rank: int, forward: bool) -> int:
    """Which of `holders` serves `rank`: itself, else the nearest rank (most often the same machine).

    In a forwarding stage, replica group i of the target is served by group i of the source, so that no
    rank sends more than once. (By nearness the last group would serve all.)
    """
    if forward:
        return holders[target.mesh._places[rank][0]]
    return min(holders, key=lambda holder: (abs(holder - rank), holder))


@lru_cache(maxsize=1 << 14)
def incoming(shape: Shape, source: Layout, target: Layout, me: int, forward: bool = False) -> tuple[Copy, ...]:
    """The regions that rank `me` needs, each with the rank that has it (perhaps `me`)."""
    mine = target.box(shape, me)
    if mine is None or not mine.size:
        return ()
    copies = []
    for box, holders in source.shards(shape):
        common = intersect(box, mine)
        if common is not None:
            copies.append(Copy(choose(holders, target, me, forward), common))
    return tuple(copies)


@lru_cache(maxsize=1 << 14)
def outgoing(shape: Shape, source: Layout, target: Layout, me: int, forward: bool = False) -> tuple[Copy, ...]:
    """The regions that rank `me` sends to others, each with its receiver."""
    mine = source.box(shape, me)
    if mine is None or not mine.size:
        return ()
    holders = next(ranks for box, ranks in source.shards(shape) if box == mine)
    copies = []
    for rank in target.mesh.ranks:
        box = target.box(shape, rank)
        common = intersect(mine, box) if box is not None else None
        if common is not None and rank != me and choose(holders, target, rank, forward) == me:
            copies.append(Copy(rank, common))
    return tuple(copies)


def to_ranks(ranks: Sequence[int], shape: Shape) -> Layout:
    """The layout in which each of `ranks` holds the full tensor."""
    return _to_ranks(tuple(ranks), len(shape))


@lru_cache(maxsize=1 << 10)
def _to_ranks(ranks: tuple[int, ...], ndim: int) -> Layout:
    return replicated(ranks, ndim)


@lru_cache(maxsize=1 << 12)
def _staged_layouts(source: Layout, target: Layout) -> tuple[tuple[Layout, Layout], ...]:
    rows = list(target.replicas)
    if len(source.mesh.ranks) > 1 or len(rows) == 1:
        return ((source, target),)
    root = source.mesh.ranks[0]
    rows.sort(key=lambda ranks: root not in ranks)
    pairs = [(source, target.over(rows[:1]))]
    have = 1
    while have < len(rows):
        pairs.append((target.over(rows[:have]), target.over(rows[have : 2 * have])))
        have *= 2
    return tuple(pairs)


def plan(moves: Sequence[Move], me: int, limit: int) -> list[Stage]:
    """Rank `me`'s stages for `moves`.

    `limit` is the number of payload bytes per message, the same on every rank.
    All ranks must pass the moves that concern them in one common order.
    """
    stages: list[list[Move]] = [[]] if moves else []
    for move in moves:
        parts = move.route.staged
        if parts[0] is move.route:
            stages[0].append(move)
            continue
        while len(stages) < len(parts):
            stages.append([])
        for stage, route in zip(stages, parts, strict=False):
            stage.append(Move(move.tensor, route))
    return [_plan_stage(tuple(stage), me, limit) for stage in stages]


def _plan_stage(moves: tuple[Move, ...], me: int, limit: int) -> Stage:
    local: list[Piece] = []
    recvs: dict[int, list[Piece]] = {}
    sends: dict[int, list[Piece]] = {}
    known: dict[Route, tuple[tuple[Copy, ...], tuple[Copy, ...]]] = {}
    for i, (_, route) in enumerate(moves):
        copies = known.get(route)
        if copies is None:
            copies = known[route] = (route.incoming(me), route.outgoing(me))
        for peer, box in copies[0]:
            (local if peer == me else recvs.setdefault(peer, [])).append(Piece(i, box, 0))
        for peer, box in copies[1]:
            sends.setdefault(peer, []).append(Piece(i, box, 0))
    rounds: list[Round] = []
    for pieces, side in ((sends, "sends"), (recvs, "recvs")):
        for peer in sorted(pieces):
            for n, message in enumerate(messages(pieces[peer], moves, limit)):
                while len(rounds) <= n:
                    rounds.append(Round())
                getattr(rounds[n], side)[peer] = message
    return Stage(moves, tuple(local), tuple(rounds))


def messages(pieces: Sequence[Piece], moves: Sequence[Move], limit: int) -> Iterator[Message]:
    """Cut the regions for one pair of ranks into messages of at most `limit` payload bytes."""
    message, room = Message(), limit
    sizes: dict[tuple[int, str], int] = {}  # by identity of the box: pieces of one route share it
    for piece in pieces:
        dtype = moves[piece.move].route.dtype
        nbytes = sizes.get((id(piece.box), dtype))
        if nbytes is None:
            nbytes = sizes[id(piece.box), dtype] = piece.box.size * DTYPES[dtype][0]
        if nbytes < DIRECT_BYTES and nbytes <= room:  # the usual small tensor
            room -= nbytes
            message.packed.append(Piece(piece.move, piece.box, message.nbytes))
            message.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
            continue
        itemsize = DTYPES[dtype][0]
        rest = list(_pieces(piece.box, max(1, limit // itemsize)))[::-1]
        while rest:
            box = rest.pop()
            nbytes = box.size * itemsize
            if nbytes > room:
                fits, tail = _head(box, room // itemsize, DIRECT_BYTES // itemsize)
                rest += [tail] if fits is None else [tail, fits]
                if fits is None:
                    yield message
                    message, room = Message(), limit
                continue
            room -= nbytes
            if nbytes >= DIRECT_BYTES:
                message.direct.append(Piece(piece.move, box, 0))
            else:
                message.packed.append(Piece(piece.move, box, message.nbytes))
                message.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if room < limit:
        yield message


def _pieces(box: Box, limit: int) -> Iterator[Box]:
    """`box` as boxes of at most `limit` elements, in row-major order."""
    if box.size <= limit:
        yield box
        return
    d, unit = _longest_unit(box)
    step = max(1, limit // unit)
    for a in range(box.start[d], box.stop[d], step):
        yield from _pieces(_range(box, d, a, min(a + step, box.stop[d])), limit)


def _head(box: Box, room: int, least: int) -> tuple[Box | None, Box]:
    """The first rows of `box` that fit into `room` elements, if they are at least `least`, and the rest."""
    least = max(1, least)
    if room < least:  # the only answer for a box of one element, which can't be cut
        return None, box
    d, unit = _longest_unit(box)
    rows = room // unit
    if rows * unit < least:
        return None, box
    at = box.start[d] + rows
    return _range(box, d, box.start[d], at), _range(box, d, at, box.stop[d])


def _longest_unit(box: Box) -> tuple[int, int]:
    """The first dimension longer than 1, and the elements of one slice of it."""
    d = next(d for d, length in enumerate(box.shape) if length > 1)
    return d, prod(box.shape[d + 1 :])


def _range(box: Box, d: int, start: int, stop: int) -> Box:
    return Box((*box.start[:d], start, *box.start[d + 1 :]), (*box.stop[:d], stop, *box.stop[d + 1 :]))
