"""A picture of a state: its mesh, which region of each tensor each rank holds, memory per rank, sizes. Pure.

As text for terminals, and as one HTML page that needs nothing else: no script, no font, no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import Mesh
from .drawing import BARS, KINDS, REGIONS, Drawing, Kind, axes_of, rect_of, size
from .page import body, page

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

Span = tuple[str, int | None]
"""Text, and the holder whose colour it has."""


@dataclass(frozen=True)
class Picture(Drawing):
    """A drawing that shows itself: text when printed, HTML in notebooks."""

    # -- text ------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self.lines())

    __repr__ = __str__

    def lines(self, width: int = 80) -> list[list[Span]]:
        """The picture as lines of coloured text, about `width` characters wide."""
        lines: list[list[Span]] = [[(self.title, None)]]
        if self.mesh is not None:
            lines += [[], *_mesh_lines(self.mesh)]
        for kind in self.kinds[:KINDS]:
            lines += [[], *self._kind_lines(kind, width)]
        if len(self.kinds) > KINDS:
            lines += [[], [(f"… and {len(self.kinds) - KINDS} more kinds of tensors", None)]]
        lines += [[], [(f"memory per {self.holder}", None)], *self._memory_lines(width)]
        return [*lines, [], [("sizes", None)], *self._size_lines(width)]

    def _kind_lines(self, kind: Kind, width: int) -> list[list[Span]]:
        one = kind.first
        lines: list[list[Span]] = [[(self.caption(kind), None)]]
        if not 1 < len(one.regions) <= REGIONS:
            return lines
        columns, rows = min(width - 2, 48), 8 if len(axes_of(one)) > 1 else 1
        cells: list[list[int]] = [[0] * columns for _ in range(rows)]
        for box, holders in one.regions:
            x, y, w, h = rect_of(one, box, columns, rows)
            for row in range(int(y), max(int(y) + 1, int(y + h))):
                for column in range(int(x), max(int(x) + 1, int(x + w))):
                    cells[min(row, rows - 1)][min(column, columns - 1)] = holders[0]
        lines += [[("  ", None), *((SYMBOLS[cell % len(SYMBOLS)], cell) for cell in row)] for row in cells]
        return lines

    def _memory_lines(self, width: int) -> list[list[Span]]:
        files = self.mesh is None and self.holder == "file"  # ranks are named by their digits, files are not
        rows = enumerate(zip(self.labels, self.memory, strict=True))
        return _bars(
            [(f"{SYMBOLS[n % len(SYMBOLS)]} {name}" if files else name, held, n) for n, (name, held) in rows], width
        )

    def _size_lines(self, width: int) -> list[list[Span]]:
        sizes = sorted(((one.name, one.nbytes) for one in self.tensors), key=lambda pair: (-pair[1], pair[0]))
        return _bars([(name, nbytes, None) for name, nbytes in sizes], width)

    # -- HTML ------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        """For notebooks: the page without its frame."""
        return body(self)

    def html(self) -> str:
        """The whole page."""
        return page(self)


def _mesh_lines(mesh: Mesh) -> list[list[Span]]:
    """The grid of ranks; the last mesh dimension goes to the right."""
    names = mesh.names or tuple(f"dim {d}" for d in range(len(mesh.shape)))
    head = ", ".join(f"{name}={n}" for name, n in zip(names, mesh.shape, strict=True))
    lines: list[list[Span]] = [[(f"mesh {head}: {len(mesh.ranks)} ranks", None)]]
    columns = mesh.shape[-1] if mesh.shape else 1
    width = len(str(max(mesh.ranks)))
    for start in range(0, min(len(mesh.ranks), 16 * columns), columns):
        row = mesh.ranks[start : start + min(columns, 16)]
        more = " …" if columns > 16 else ""
        place = mesh.coordinate(row[0]) or ()
        label = ", ".join(f"{name} {n}" for name, n in zip(names[:-1], place[:-1], strict=True))
        cells: list[Span] = [(f" {rank:>{width}} ", rank) for rank in row]
        lines.append([(f"  {label + ' ' if label else ''}", None), *cells, (more, None)])
    if len(mesh.ranks) > 16 * columns:
        lines.append([("  …", None)])
    return lines


def _bars(rows: Sequence[tuple[str, int, int | None]], width: int) -> list[list[Span]]:
    """(name, bytes, holder) as bars; beyond `BARS` the rest in a word."""
    most = max((nbytes for _, nbytes, _ in rows), default=0) or 1
    shown = rows[:BARS]
    room = min(max((len(name) for name, _, _ in shown), default=0), width // 2)
    lines: list[list[Span]] = []
    for name, nbytes, holder in shown:
        bar = "█" * round((width - room - 14) * nbytes / most)
        label = name if len(name) <= room else "…" + name[-room + 1 :]
        lines.append([(f"  {label:{room}} {size(nbytes):>10} ", None), (bar, holder)])
    if len(rows) > BARS:
        rest = [nbytes for _, nbytes, _ in rows[BARS:]]
        lines.append([(f"  … {len(rest)} more, {size(min(rest))} to {size(max(rest))} each", None)])
    return lines
