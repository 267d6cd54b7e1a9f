"""Who sends how much to whom when a plan runs, for all ranks at once and without planning rank by rank.

The answer is that of `plan.plan` on every rank, message by message. Ranks of the target with equal boxes are
counted together, and pairs of ranks that exchange the same boxes share one packing. Where even that would take
too long (every rank serves every other with parts of its own shape), some senders stand for all: `Traffic.exact`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import gcd
from typing import NamedTuple

from ..layout import Box, Layout, Shape, chunk, intersect
from ..plan import Move, Piece, Route, messages
from ..schema import DTYPES

BUDGET = 1_500_000
"""Comparisons of boxes per stage after which the remaining senders are not looked at; a few seconds' worth."""
LEAST_SENDERS = 8
NEAR = 64
"""A sender that can serve no more ranks than this is matched with them one by one."""

Shapes = tuple[Shape | None, ...]
"""What one rank sends another: per route the shape of the box, or None."""


@dataclass
class Traffic:
    """Bytes and messages by rank. Figures of several stages are added up, or listed by stage."""

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    messages: dict[int, int] = field(default_factory=dict)
    """Sent."""
    total: int = 0
    """Bytes that all ranks send together."""
    busiest: list[int] = field(default_factory=list)
    """By stage: the most bytes that one rank sends or receives."""
    rounds: list[int] = field(default_factory=list)
    """By stage: messages one after another between the two ranks that exchange most."""
    sampled: int = 0
    """Senders that stood for all in some stage; 0 if every rank was counted."""

    @property
    def exact(self) -> bool:
        """Whether every rank was counted. Otherwise `sent` and `messages` have some ranks alone."""
        return not self.sampled

    def add(self, other: Traffic) -> None:
        """Take in the traffic of a further stage."""
        for mine, more in (
            (self.sent, other.sent),
            (self.received, other.received),
            (self.messages, other.messages),
        ):
            for rank, count in more.items():
                mine[rank] = mine.get(rank, 0) + count
        self.total += other.total
        self.busiest += other.busiest
        self.rounds += other.rounds
        self.sampled = max(self.sampled, other.sampled)


def traffic_of(routes: Sequence[Route], limit: int) -> Traffic:
    """The traffic of moves along `routes`, one per tensor in the order of the plan; tensors may share a route.

    `limit` is the number of payload bytes per message, as in `plan.plan`.
    """
    stages: list[list[Route]] = []
    for route in routes:
        parts = route.staged
        while len(stages) < len(parts):
            stages.append([])
        for stage, part in zip(stages, parts, strict=False):
            stage.append(part)
    found = Traffic()
    for stage in stages:
        found.add(_Stage(stage, limit).traffic())
    return found


class _Packed(NamedTuple):
    """What one pair of ranks exchanges in a stage."""

    nbytes: int
    buffers: int
    rounds: int


class _Stage:
    """The moves of one stage."""

    def __init__(self, routes: Sequence[Route], limit: int) -> None:
        self.limit = limit
        self.moves = [Move(number, route) for number, route in enumerate(routes)]
        numbers: dict[Route, int] = {}
        self.order = [numbers.setdefault(route, len(numbers)) for route in routes]
        self.routes = list(numbers)
        self.packed: dict[Shapes, _Packed] = {}
        self.result = Traffic(busiest=[0], rounds=[0])

    def traffic(self) -> Traffic:
        plain = [i for i, route in enumerate(self.routes) if not route.forward]
        if len(plain) < len(self.routes):
            self._forwarded([i for i, route in enumerate(self.routes) if route.forward])
        if plain:
            self._spread(plain)
        result = self.result
        if result.exact:
            result.total = sum(result.received.values())
        result.busiest = [max([*result.sent.values(), *result.received.values()], default=0)]
        return result

    def _note(self, sender: int, shapes: Shapes, count: int) -> int:
        """Count `count` receivers of the same boxes; returns the bytes that each receives."""
        packed = self.packed.get(shapes)
        if packed is None:
            packed = self.packed[shapes] = self._pack(shapes)
        result = self.result
        result.sent[sender] = result.sent.get(sender, 0) + count * packed.nbytes
        result.messages[sender] = result.messages.get(sender, 0) + count * packed.buffers
        result.rounds[0] = max(result.rounds[0], packed.rounds)
        return packed.nbytes

    def _pack(self, shapes: Shapes) -> _Packed:
        boxes = [None if shape is None else Box((0,) * len(shape), shape) for shape in shapes]
        pieces = [Piece(number, box, 0) for number, i in enumerate(self.order) if (box := boxes[i]) is not None]
        nbytes = buffers = rounds = 0
        for message in messages(pieces, self.moves, self.limit):
            rounds += 1
            buffers += bool(message.packed) + len(message.direct)
            nbytes += message.nbytes
            nbytes += sum(p.box.size * DTYPES[self.moves[p.move].route.dtype][0] for p in message.direct)
        return _Packed(nbytes, buffers, rounds)

    # -- later stages: replica group i of the source serves group i of the target ---------------------

    def _forwarded(self, numbers: Sequence[int]) -> None:
        pairs: dict[tuple[int, int], list[int]] = {}
        for i in numbers:
            source, target = self.routes[i].source.mesh.ranks, self.routes[i].target.mesh.ranks
            for sender, receiver in zip(source, target, strict=False):
                pairs.setdefault((sender, receiver), []).append(i)
        for (sender, receiver), active in pairs.items():
            shapes: list[Shape | None] = [None] * len(self.routes)
            for i in active:
                box = _box(self.routes[i].target, self.routes[i].shape, receiver)
                shapes[i] = None if box is None else box.shape
            if any(shape is not None for shape in shapes):
                received = self.result.received
                received[receiver] = received.get(receiver, 0) + self._note(sender, tuple(shapes), 1)

    # -- first stages: each region is served by the nearest rank that holds it ------------------------

    def _spread(self, numbers: Sequence[int]) -> None:
        targets = _Targets([self.routes[i] for i in numbers])
        kinds: dict[object, _Holders] = {}
        holders = []
        for i in numbers:
            source = self.routes[i].source
            kind = (source.mesh, source.used)
            if kind not in kinds:
                kinds[kind] = _Holders(source)
            holders.append(kinds[kind])
        senders = sorted({rank for i in numbers for rank in self.routes[i].source.mesh.ranks})
        steps = done = 0
        for sender in _scattered(senders):
            if steps > BUDGET and done >= LEAST_SENDERS:
                break
            steps += self._serve(sender, numbers, holders, targets)
            done += 1
        if done == len(senders):
            for rank, nbytes in targets.received():
                self.result.received[rank] = self.result.received.get(rank, 0) + nbytes
        else:
            self._estimate(numbers, done)

    def _serve(self, sender: int, numbers: Sequence[int], holders: Sequence[_Holders], targets: _Targets) -> int:
        """Count what one rank sends; returns the comparisons that it took."""
        boxes: list[tuple[int, int, Box]] = []  # position among `numbers`, route, box
        spans: list[tuple[int, int]] = []
        for n, i in enumerate(numbers):
            box = _box(self.routes[i].source, self.routes[i].shape, sender)
            if box is not None:
                boxes.append((n, i, box))
                spans.append(holders[n].span(sender))
        if not boxes:
            return 1
        first, last = min(a for a, _ in spans), max(b for _, b in spans)
        if last - first <= NEAR:
            profiles = {p for rank in range(first, last) if (p := targets.profile_of.get(rank)) is not None}
        else:
            profiles = {p for n, _, box in boxes for p in targets.meeting(n, box)}
        cuts = sorted({end for span in spans for end in span} | {sender, sender + 1})
        for p in profiles:
            shapes: list[Shape | None] = [None] * len(self.routes)
            for n, i, box in boxes:
                there = targets.profiles[p][n]
                common = None if there is None else intersect(box, there)
                shapes[i] = None if common is None else common.shape
            self._to_profile(sender, p, shapes, [i for _, i, _ in boxes], spans, cuts, targets)
        return len(boxes) * (1 + len(profiles))

    def _to_profile(
        self,
        sender: int,
        p: int,
        shapes: Sequence[Shape | None],
        routes: Sequence[int],
        spans: Sequence[tuple[int, int]],
        cuts: Sequence[int],
        targets: _Targets,
    ) -> None:
        members = targets.members[p]
        for start, stop in pairwise(cuts):
            if start == sender:
                continue  # what it needs itself does not travel
            a, b = bisect_left(members, start), bisect_left(members, stop)
            if a == b:
                continue
            part: list[Shape | None] = [None] * len(shapes)
            for i, (lo, hi) in zip(routes, spans, strict=True):
                if lo <= start < hi:
                    part[i] = shapes[i]
            if any(shape is not None for shape in part):
                targets.add(p, a, b, self._note(sender, tuple(part), b - a))

    def _estimate(self, numbers: Sequence[int], done: int) -> None:
        """What arrives, without the padding of messages, where not all senders were counted."""
        counts = dict.fromkeys(numbers, 0)
        for i in self.order:
            if i in counts:
                counts[i] += 1
        received = self.result.received
        for i, count in counts.items():
            route = self.routes[i]
            for rank in route.target.mesh.ranks:
                box = _box(route.target, route.shape, rank)
                if box is None:
                    continue
                own = _box(route.source, route.shape, rank)
                common = None if own is None else intersect(own, box)
                size = box.size - (0 if common is None else common.size)
                received[rank] = received.get(rank, 0) + count * size * DTYPES[route.dtype][0]
        self.result.total = sum(received.values())
        self.result.sampled = done


def _box(layout: Layout, shape: Shape, rank: int) -> Box | None:
    """What a rank holds; None for nothing."""
    return _boxes(layout, shape).get(rank)


@lru_cache(maxsize=64)
def _boxes(layout: Layout, shape: Shape) -> dict[int, Box]:
    """What each rank holds, those that hold nothing left out. (`Layout.box` caches boxes one by one, and fewer.)"""
    known: dict[Shape, Box | None] = {}
    used = sorted(layout.used)
    found = {}
    for rank in layout.mesh.ranks:
        place = layout.mesh.coordinate(rank)
        assert place is not None
        here = tuple([place[d] for d in used])
        if here not in known:
            known[here] = _box_at(layout, shape, place)
        box = known[here]
        if box is not None:
            found[rank] = box
    return found


def _box_at(layout: Layout, shape: Shape, place: Shape) -> Box | None:
    start, stop = [], []
    for size, split in zip(shape, layout.splits, strict=True):
        a, b = 0, size
        for d in split:
            lo, hi = chunk(b - a, layout.mesh.shape[d], place[d])
            a, b = a + lo, a + hi
        if a == b:
            return None
        start.append(a)
        stop.append(b)
    return Box(tuple(start), tuple(stop))


def _scattered(ranks: Sequence[int]) -> Iterator[int]:
    """All of `ranks`, first and last early, the others so that any beginning is spread over the whole."""
    count = len(ranks)
    step = max(1, int(count * 0.618))
    while gcd(step, count) != 1:
        step += 1
    seen = {0, count - 1}
    yield from [ranks[n] for n in sorted(seen)]
    yield from (ranks[n] for k in range(count) if (n := k * step % count) not in seen)


class _Holders:
    """For the ranks of a layout: which receivers find them nearest among those that hold the same box."""

    def __init__(self, layout: Layout) -> None:
        kept = sorted(layout.used)
        groups: dict[Shape, list[int]] = {}
        for rank in layout.mesh.ranks:
            place = layout.mesh.coordinate(rank)
            assert place is not None
            groups.setdefault(tuple(place[d] for d in kept), []).append(rank)
        self._spans: dict[int, tuple[int, int]] = {}
        for group in groups.values():
            group.sort()
            # A tie goes to the lower rank (`plan.choose`).
            ends = [0, *((a + b) // 2 + 1 for a, b in pairwise(group)), 1 << 62]
            self._spans.update(zip(group, pairwise(ends), strict=True))

    def span(self, rank: int) -> tuple[int, int]:
        """The half-open range of ranks that `rank` serves."""
        return self._spans[rank]


class _Targets:
    """The receiving ranks, those with equal boxes in every route together (a *profile*)."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.profiles: list[tuple[Box | None, ...]] = []
        self.members: list[list[int]] = []
        self.profile_of: dict[int, int] = {}
        numbers: dict[tuple[Box | None, ...], int] = {}
        for rank in sorted({rank for route in routes for rank in route.target.mesh.ranks}):
            boxes = tuple([_box(route.target, route.shape, rank) for route in routes])
            p = numbers.setdefault(boxes, len(numbers))
            if p == len(self.members):
                self.profiles.append(boxes)
                self.members.append([])
            self.members[p].append(rank)
            self.profile_of[rank] = p
        self._grids = [_Grid([boxes[n] for boxes in self.profiles]) for n in range(len(routes))]
        self._changes: list[list[int]] = [[0] * (len(members) + 1) for members in self.members]

    def meeting(self, n: int, box: Box) -> Iterator[int]:
        """Profiles whose box in route `n` has elements in common with `box`."""
        return self._grids[n].meeting(box)

    def add(self, p: int, start: int, stop: int, nbytes: int) -> None:
        """Members `start` to `stop` of a profile receive `nbytes` each."""
        self._changes[p][start] += nbytes
        self._changes[p][stop] -= nbytes

    def received(self) -> Iterator[tuple[int, int]]:
        """(rank, bytes)."""
        for members, changes in zip(self.members, self._changes, strict=True):
            yield from zip(members, accumulate(changes), strict=False)


class _Grid:
    """The boxes of one layout: a product of ranges per dim, so that those around a place are found by bisection."""

    def __init__(self, boxes: Sequence[Box | None]) -> None:
        self._at: dict[Shape, list[int]] = {}
        for p, box in enumerate(boxes):
            if box is not None:
                self._at.setdefault(box.start, []).append(p)
        known = [box for box in boxes if box is not None]
        ndim = len(known[0].start) if known else 0
        ranges = [sorted({(box.start[d], box.stop[d]) for box in known}) for d in range(ndim)]
        self._starts = [[start for start, _ in one] for one in ranges]
        self._stops = [[stop for _, stop in one] for one in ranges]

    def meeting(self, box: Box) -> Iterator[int]:
        near = [
            starts[bisect_right(stops, a) : bisect_left(starts, b)]
            for starts, stops, a, b in zip(self._starts, self._stops, box.start, box.stop, strict=False)
        ]
        for start in product(*near):
            yield from self._at.get(start, ())
