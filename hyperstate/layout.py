"""Where the elements of a tensor live: boxes, meshes, layouts. Integers only.

Shapes, starts and stops count elements. A `Layout` stores, per tensor dimension, the mesh dimensions
that split it in the order in which they split, so that every shard is one box.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from operator import sub
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A region of a tensor: per dimension the half-open range ``start[d]:stop[d]``."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        return _difference(self.stop, self.start)

    @property
    def size(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return prod(self.shape)

    def within(self, other: Box) -> Box:
        """This box in the coordinates of `other`, which must contain it."""
        return _within(self, other)


@lru_cache(maxsize=1 << 12)
def _difference(a: Shape, b: Shape) -> Shape:
    """Many tensors of a model are cut alike, so that few differences come up again and again."""
    return tuple(map(sub, a, b))


@lru_cache(maxsize=1 << 12)
def _within(box: Box, other: Box) -> Box:
    return Box(_difference(box.start, other.start), _difference(box.stop, other.start))


def whole(shape: Shape) -> Box:
    """The box of the full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common region in the coordinates of the full tensor, or None if it has no element."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    if all(x < y for x, y in zip(start, stop, strict=True)):
        return Box(start, stop)
    return None


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Range of part `index` when `size` elements are cut as ``torch.chunk`` does: ceil-sized, trailing parts empty."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size)


@dataclass(frozen=True)
class Mesh:
    """A grid of global ranks, row-major. Equality ignores the names of the mesh dimensions."""

    shape: Shape
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None = field(default=None, compare=False)
    root: Mesh | None = field(default=None, compare=False, repr=False)
    """The mesh that this one was sliced from, if the framework records it."""

    def __post_init__(self) -> None:
        if prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a mesh of shape {self.shape} can't hold the ranks {self.ranks}")
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]  # set once above: meshes are cache keys

    @cached_property
    def _places(self) -> dict[int, Shape]:
        grid = product(*(range(n) for n in self.shape))
        return dict(zip(self.ranks, grid, strict=True))

    def coordinate(self, rank: int) -> Shape | None:
        """Place of `rank` in the grid, or None if it is no member."""
        return self._places.get(rank)

    @cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self.ranks)

    def slice(self, dims: Iterable[int], rank: int) -> tuple[int, ...]:
        """Ranks that share `rank`'s coordinate in every mesh dimension but `dims`."""
        free = set(dims)
        here = self._places[rank]
        return tuple(
            r
            for r, there in self._places.items()
            if all(d in free or a == b for d, (a, b) in enumerate(zip(here, there, strict=True)))
        )


def row(ranks: Iterable[int]) -> Mesh:
    """A one-dimensional mesh."""
    members = tuple(ranks)
    return Mesh((len(members),), members)


@dataclass(frozen=True)
class Layout:
    """Which box of a tensor each rank of a mesh holds.

    ``splits[d]`` are the mesh dimensions that split tensor dimension `d`, the first to split first.
    Mesh dimensions that appear nowhere replicate.
    """

    mesh: Mesh
    splits: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh, self.splits)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]  # set once above: layouts are cache keys

    def box(self, shape: Shape, rank: int) -> Box | None:
        """The region of `rank`, in full-tensor coordinates (perhaps without elements); None if it is no member."""
        return _box(self, shape, rank)

    def shards(self, shape: Shape) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """The distinct non-empty boxes, each with the ranks that hold it, in mesh order."""
        return _shards(self, shape)

    @cached_property
    def used(self) -> frozenset[int]:
        """Mesh dimensions that split something."""
        return frozenset(d for split in self.splits for d in split)

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The replica groups: each row holds every box once; rows and their members in mesh order."""
        free = [d for d in range(len(self.mesh.shape)) if d not in self.used]
        rows: dict[Shape, list[int]] = {}
        for rank, place in self.mesh._places.items():
            rows.setdefault(tuple(place[d] for d in free), []).append(rank)
        return tuple(tuple(ranks) for ranks in rows.values())

    def over(self, rows: Sequence[Sequence[int]]) -> Layout:
        """The same cutting over some of the replica groups."""
        kept = sorted(self.used)
        shape = (len(rows), *(self.mesh.shape[d] for d in kept))
        renumber = {d: i + 1 for i, d in enumerate(kept)}
        mesh = Mesh(shape, tuple(rank for ranks in rows for rank in ranks))
        return Layout(mesh, tuple(tuple(renumber[d] for d in split) for split in self.splits))

    def held_by(self, shape: Shape, ranks: Collection[int]) -> Layout | None:
        """This layout over the replica groups that `ranks` hold all elements of; None if there is none."""
        if self.mesh.members <= set(ranks):
            return self
        rows = [row for row in self.replicas if all(r in ranks or not _box(self, shape, r).size for r in row)]  # type: ignore[union-attr]  # members have boxes
        return self.over(rows) if rows else None


def replicated(ranks: Iterable[int], ndim: int) -> Layout:
    """Every one of `ranks` holds all of a tensor with `ndim` dimensions."""
    return Layout(row(ranks), ((),) * ndim)


@lru_cache(maxsize=1 << 16)
def _box(layout: Layout, shape: Shape, rank: int) -> Box | None:
    place = layout.mesh.coordinate(rank)
    if place is None:
        return None
    start, stop = [], []
    for size, split in zip(shape, layout.splits, strict=True):
        a, b = 0, size
        for d in split:
            lo, hi = chunk(b - a, layout.mesh.shape[d], place[d])
            a, b = a + lo, a + hi
        start.append(a)
        stop.append(b)
    return Box(tuple(start), tuple(stop))


@lru_cache(maxsize=1 << 12)
def _shards(layout: Layout, shape: Shape) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    if 0 in shape:
        return ()
    found: dict[Box, list[int]] = {}
    for rank in layout.mesh.ranks:
        box = layout.box(shape, rank)
        if box is not None and box.size:
            found.setdefault(box, []).append(rank)
    return tuple((box, tuple(ranks)) for box, ranks in found.items())


def splits_of(
    placements: Sequence[tuple[int, int] | None], mesh_shape: Shape, ndim: int
) -> tuple[tuple[int, ...], ...]:
    """Splits from one placement per mesh dimension: None replicates, ``(dim, split_factor)`` shards.

    A split factor f means that later mesh dimensions of total size f split the same tensor dimension
    first (``torch.distributed.tensor.placement_types._StridedShard``, as FSDP over TP makes it).
    Raises `ValueError` for a factor that no order of the mesh dimensions explains.
    """
    orders: list[list[int]] = [[] for _ in range(ndim)]
    for d in reversed(range(len(placements))):
        placement = placements[d]
        if placement is None:
            continue
        dim, factor = placement
        if not -ndim <= dim < ndim:
            raise ValueError(f"placement of mesh dimension {d} shards dim {dim} of a tensor with {ndim} dimensions")
        order = orders[dim % ndim]
        before = 0
        while prod(mesh_shape[e] for e in order[:before]) != factor:
            before += 1
            if before > len(order):
                raise ValueError(
                    f"placement of mesh dimension {d} has split_factor={factor}, which no order of the mesh "
                    f"dimensions of sizes {tuple(mesh_shape)} explains; redistribute the tensor to Shard({dim}) first"
                )
        order.insert(before, d)
    return tuple(map(tuple, orders))
