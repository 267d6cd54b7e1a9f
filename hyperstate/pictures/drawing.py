"""What a picture of a state shows, and where on the paper: mesh, regions, memory, sizes. Pure arithmetic."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..layout import Box, Layout, Mesh, Shape, whole
from ..schema import DTYPES

KINDS, REGIONS, BARS, LEAVES = 12, 64, 32, 200
"""The most kinds of tensors, regions of one, bars, and tensors in the map of sizes that are drawn."""

Regions = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes, each with the numbers of its holders."""
Rect = tuple[float, float, float, float]
"""x, y, width, height."""


@dataclass(frozen=True)
class Drawn:
    """A tensor, and who holds what of it."""

    name: str
    dtype: str
    shape: Shape
    regions: Regions

    @property
    def nbytes(self) -> int:
        """Of the full tensor."""
        return DTYPES[self.dtype][0] * prod(self.shape)


def drawn(name: str, dtype: str, shape: Shape, layout: Layout | None, ranks: Sequence[int]) -> Drawn:
    """A tensor of a layout; a plain one is held by all `ranks`."""
    regions = ((whole(shape), tuple(ranks)),) if layout is None else layout.shards(shape)
    return Drawn(name, dtype, shape, regions)


@dataclass(frozen=True)
class Kind:
    """Tensors that look alike."""

    first: Drawn
    count: int


@dataclass(frozen=True)
class Drawing:
    """What is drawn. Holders are ranks, or the files of a checkpoint."""

    title: str
    tensors: tuple[Drawn, ...]
    holders: tuple[str, ...]
    """Names by number."""
    mesh: Mesh | None = None

    @cached_property
    def kinds(self) -> list[Kind]:
        """The largest first."""
        found: dict[tuple[str, Shape, Regions], list[Drawn]] = {}
        for one in self.tensors:
            found.setdefault((one.dtype, one.shape, one.regions), []).append(one)
        kinds = [Kind(same[0], len(same)) for same in found.values()]
        return sorted(kinds, key=lambda kind: (-kind.first.nbytes * kind.count, kind.first.name))

    @cached_property
    def memory(self) -> list[int]:
        """Bytes that each holder has."""
        held = [0] * len(self.holders)
        for kind in self.kinds:
            size = DTYPES[kind.first.dtype][0] * kind.count
            for box, holders in kind.first.regions:
                for holder in holders:
                    held[holder] += size * box.size
        return held

    @property
    def holder(self) -> str:
        return "rank" if self.mesh is not None or all(name.startswith("rank ") for name in self.holders) else "file"

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Short names of the holders: files' names without the end that all of them share."""
        if self.holder != "file" or len(self.holders) < 2:
            return self.holders
        parts = [name.split("-") for name in self.holders]
        while len({part[-1] for part in parts}) == 1 and min(map(len, parts)) > 1:
            parts = [part[:-1] for part in parts]
        return tuple("-".join(part) for part in parts)

    def caption(self, kind: Kind) -> str:
        """One line about tensors that look alike."""
        one = kind.first
        more = f" and {kind.count - 1} more like it" if kind.count > 1 else ""
        copies = len(one.regions[0][1]) if one.regions else 0
        parts = f"{len(one.regions)} regions" if len(one.regions) != 1 else "whole"
        held = f"{parts}, each on {copies} {self.holder}{'s' * (copies != 1)}" if len(self.holders) > 1 else parts
        return f"{one.name}{more}: {one.dtype} {list(one.shape)}, {size(one.nbytes)}; {held}"


def size(nbytes: float) -> str:
    """Bytes in words: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def colour(number: int) -> str:
    """A colour of its own for each holder, far from its neighbours': ``#rrggbb``, light enough for black text."""
    parts = colorsys.hls_to_rgb(number * 0.618034 % 1, 0.68 - 0.1 * (number // 7 % 2), 0.6)
    return "#" + "".join(f"{round(part * 255):02x}" for part in parts)


def axes_of(one: Drawn) -> list[int]:
    """The dims that are drawn, at most two: those that are cut, then the first ones."""
    cut = [d for d in range(len(one.shape)) if len({box.start[d] for box, _ in one.regions}) > 1]
    rest = [d for d in range(len(one.shape)) if d not in cut]
    return sorted([*cut, *rest][:2])


def rect_of(one: Drawn, box: Box, width: float, height: float) -> Rect:
    """Where a region is drawn: the first drawn dim goes down, the second to the right; a single one to the right."""
    axes = axes_of(one)
    spans = [(0.0, 1.0)] * (2 - len(axes)) + [
        (box.start[d] / max(1, one.shape[d]), box.stop[d] / max(1, one.shape[d])) for d in axes
    ]
    (y0, y1), (x0, x1) = spans
    return x0 * width, y0 * height, (x1 - x0) * width, (y1 - y0) * height


def treemap(sizes: Sequence[int], place: Rect) -> list[Rect]:
    """Rectangles of areas proportional to `sizes` (falling, above 0) that fill `place`, halved again and again."""
    if not sizes:
        return []
    if len(sizes) == 1:
        return [place]
    total, half, cut = sum(sizes), 0, 0
    while cut < len(sizes) - 1 and (not cut or half + sizes[cut] / 2 < total / 2):
        half += sizes[cut]
        cut += 1
    x, y, w, h = place
    share = half / total
    if w >= h:
        parts = (x, y, w * share, h), (x + w * share, y, w * (1 - share), h)
    else:
        parts = (x, y, w, h * share), (x, y + h * share, w, h * (1 - share))
    return [*treemap(sizes[:cut], parts[0]), *treemap(sizes[cut:], parts[1])]
