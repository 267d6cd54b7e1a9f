"""Box arithmetic of files: do chunks tile a tensor, which bytes of a chunk hold a box, who writes which part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

from ..layout import Box, Shape, intersect

SEEK_BYTES = 1 << 20
"""A gap of up to this many bytes is read and thrown away rather than skipped with another read."""
SHARE_BYTES = 4 << 20
"""A shard smaller than this is written by one of its replicas; a larger one may be shared among them."""

MAX_ENTANGLED, MAX_DEPTH = 256, 32


def tiling_fault(shape: Shape, boxes: Sequence[Box]) -> str:
    """What is wrong if `boxes` do not hold each element of a tensor of `shape` exactly once; empty if they do."""
    for box in boxes:
        if not len(box.start) == len(box.stop) == len(shape):
            return f"a chunk {_show(box)} of a tensor with {len(shape)} dimensions"
        if any(not a <= b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True)):
            return f"a chunk {_show(box)} lies outside the shape {list(shape)}"
    full = [box for box in boxes if box.size]
    covered, size = sum(box.size for box in full), prod(shape)
    return _overlap(full) or ("" if covered == size else f"its chunks hold {covered} of {size} elements")


def _overlap(boxes: Sequence[Box], depth: int = 0) -> str:
    """Which two of `boxes` (none empty) share an element; empty if none do.

    Boxes that a layout makes come apart along one dimension after the other. Others are compared pair by pair if
    they are few, and refused if they are many: that would take for ever.
    """
    if len(boxes) < 2:
        return ""
    for dim in range(len(boxes[0].start)):
        groups = _apart(boxes, dim)
        if len(groups) > 1 and depth < MAX_DEPTH:
            return next((fault for group in groups if (fault := _overlap(group, depth + 1))), "")
    if len(boxes) > MAX_ENTANGLED:
        return f"{len(boxes)} of its chunks, {_show(boxes[0])} for one, do not come apart along any dimension"
    for a, b in combinations(boxes, 2):
        if intersect(a, b) is not None:
            return f"the chunks {_show(a)} and {_show(b)} overlap"
    return ""


def _apart(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """`boxes` in groups that no range along `dim` holds together."""
    groups: list[list[Box]] = []
    reach = -1
    for box in sorted(boxes, key=lambda box: box.start[dim]):
        if box.start[dim] >= reach:
            groups.append([])
        groups[-1].append(box)
        reach = max(reach, box.stop[dim])
    return groups


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(*box, strict=True)) + "]"


class Read(NamedTuple):
    """One run of bytes of a chunk: those of the box `cover`, of which `box` is wanted. In coordinates of the chunk."""

    cover: Box
    box: Box


def reads(chunk: Shape, box: Box, itemsize: int, limit: int) -> Iterator[Read]:
    """The runs of bytes, each of about `limit` at most, that hold `box` of a row-major chunk of that shape."""
    return _cut(chunk, box, itemsize, limit, 0)


def _cut(chunk: Shape, box: Box, itemsize: int, limit: int, dim: int) -> Iterator[Read]:
    if dim == len(chunk):
        yield Read(box, box)
        return
    inner = chunk[dim + 1 :]
    row, wanted = itemsize * prod(inner), itemsize * prod(box.shape[dim + 1 :])
    whole_rows = (wanted == row or row <= SEEK_BYTES) and (row <= limit or not inner)
    step = max(1, limit // max(1, row)) if whole_rows else 1
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        part = Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))
        if whole_rows:
            cover = Box((*part.start[: dim + 1], *[0] * len(inner)), (*part.stop[: dim + 1], *inner))
            yield Read(cover, part)
        else:
            yield from _cut(chunk, part, itemsize, limit, dim + 1)


def offset_in(chunk: Shape, start: Shape) -> int:
    """Elements of a row-major chunk before `start`."""
    total = 0
    for size, index in zip(chunk, start, strict=True):
        total = total * size + index
    return total


def share(box: Box, nbytes: int, span: tuple[int, int], total: int, replica: int, replicas: int) -> Box | None:
    """The part of a shard that one of its `replicas` writes, or None; together they write it once.

    `box` has `nbytes`. The tensor takes the range `span` in the row of all tensors of its layout, `total` bytes
    long, of which each replica writes its own stretch. Small shards are not cut.
    """
    if replicas == 1:
        return box
    first, last = span
    low, high = replica * total // replicas, (replica + 1) * total // replicas
    if nbytes < SHARE_BYTES or not box.start or first == last:
        middle = (first + last) // 2
        return box if low <= middle < high or (middle >= total and replica == replicas - 1) else None
    rows = box.stop[0] - box.start[0]
    cuts = [rows * (min(max(edge, first), last) - first) // (last - first) for edge in (low, high)]
    if cuts[0] == cuts[1]:
        return None
    return Box((box.start[0] + cuts[0], *box.start[1:]), (box.start[0] + cuts[1], *box.stop[1:]))
