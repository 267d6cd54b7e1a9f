"""A `Drawing` as HTML with drawings in SVG; nothing is loaded from anywhere. Names are escaped."""

from __future__ import annotations

from html import escape

from ..layout import Mesh
from .drawing import BARS, KINDS, LEAVES, REGIONS, Drawing, Kind, colour, rect_of, size, treemap

WIDTH = 860
CELL = 34
STYLE = """
.hyperstate{font:14px/1.45 system-ui,sans-serif;color:#1c1c1c;background:#fff;max-width:900px;padding:8px}
.hyperstate h1{font-size:20px;margin:0 0 8px}.hyperstate h2{font-size:15px;margin:18px 0 6px}
.hyperstate p{margin:8px 0 3px;overflow-wrap:anywhere}.hyperstate svg{display:block;max-width:100%;height:auto}
.hyperstate text{font:11px system-ui,sans-serif;fill:#1c1c1c}
"""


def page(picture: Drawing) -> str:
    """A document of its own."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(picture.title)}</title></head><body>{body(picture)}</body></html>\n"
    )


def body(picture: Drawing) -> str:
    """The page without its frame."""
    parts = [f"<h1>{escape(picture.title)}</h1>"]
    if picture.mesh is not None:
        parts += ["<h2>Mesh</h2>", _mesh(picture.mesh)]
    parts.append("<h2>Regions</h2>")
    for kind in picture.kinds[:KINDS]:
        parts += [f"<p>{escape(picture.caption(kind))}</p>", _regions(picture, kind)]
    if len(picture.kinds) > KINDS:
        parts.append(f"<p>… and {len(picture.kinds) - KINDS} more kinds of tensors</p>")
    parts += ["<h2>Memory</h2>", _memory(picture), "<h2>Sizes</h2>", _sizes(picture)]
    return f'<div class="hyperstate"><style>{STYLE}</style>{"".join(parts)}</div>'


def _svg(width: float, height: float, inner: list[str], label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">{"".join(inner)}</svg>'
    )


def _box(x: float, y: float, width: float, height: float, fill: str, text: str, tip: str) -> str:
    """A rectangle; of its text what fits, which is at least the end of a name."""
    label = ""
    room = int((width - 6) / 6.5)
    text = text if len(text) <= room else "…" + text[-room + 1 :] if room > 6 else ""
    if text and height > 13:
        label = f'<text x="{x + 4:.1f}" y="{y + min(height / 2 + 4, 14):.1f}">{escape(text)}</text>'
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
        f'height="{max(height, 0.5):.1f}" fill="{fill}" stroke="#fff"/>{label}</g>'
    )


def _mesh(mesh: Mesh) -> str:
    names = mesh.names or tuple(f"dim {d}" for d in range(len(mesh.shape)))
    columns = mesh.shape[-1] if mesh.shape else 1
    rows = len(mesh.ranks) // columns
    across, down = min(columns, WIDTH // CELL), min(rows, 16)
    inner = []
    for row in range(down):
        for column in range(across):
            rank = mesh.ranks[row * columns + column]
            place = mesh.coordinate(rank) or ()
            tip = f"rank {rank}: " + ", ".join(f"{name} {n}" for name, n in zip(names, place, strict=True))
            inner.append(_box(column * CELL, row * CELL, CELL, CELL, colour(rank), str(rank), tip))
    head = ", ".join(f"{name}={n}" for name, n in zip(names, mesh.shape, strict=True))
    cut = f"; the first {across * down:,} are drawn" if across * down < len(mesh.ranks) else ""
    text = (
        f"<p>{escape(head)}: {len(mesh.ranks):,} ranks; {escape(names[-1] if names else '')} goes to the right{cut}</p>"
    )
    return text + _svg(across * CELL, down * CELL, inner, f"mesh {head}")


def _regions(picture: Drawing, kind: Kind) -> str:
    one = kind.first
    if not one.regions or len(one.regions) > REGIONS:
        return ""
    height = 90 if len(one.shape) > 1 else 24
    inner = []
    for box, holders in one.regions:
        names = ", ".join(picture.labels[holder] for holder in holders[:16]) + (" …" if len(holders) > 16 else "")
        ranges = ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
        everywhere = len(one.regions) == 1 and len(holders) == len(picture.holders)
        label = "" if everywhere else names.replace("rank ", "")
        fill = "#d9d9d9" if everywhere else colour(holders[0])
        inner.append(_box(*rect_of(one, box, 420, height), fill, label, f"[{ranges}] on {names}"))
    return _svg(420, height, inner, picture.caption(kind))


def _memory(picture: Drawing) -> str:
    held = picture.memory
    most = max(held, default=0) or 1
    inner = []
    for number, (name, nbytes) in enumerate(zip(picture.labels[:BARS], held, strict=False)):
        y, length = number * 20, (WIDTH - 330) * nbytes / most
        inner.append(f'<text x="0" y="{y + 14}">{escape(name[-34:])}</text>')
        inner.append(_box(220, y + 2, length, 16, colour(number), "", f"{picture.holders[number]}: {nbytes:,} bytes"))
        inner.append(f'<text x="{228 + length:.1f}" y="{y + 14}">{size(nbytes)}</text>')
    drawn = min(len(held), BARS)
    more = (
        f"<p>… {len(held) - drawn:,} more, {size(min(held))} to {size(max(held))} each</p>" if drawn < len(held) else ""
    )
    return _svg(WIDTH, 20 * drawn, inner, "bytes held") + more


def _sizes(picture: Drawing) -> str:
    """The map of sizes: area is bytes, colour is the module at the top."""
    tensors = sorted((t for t in picture.tensors if t.nbytes), key=lambda t: (-t.nbytes, t.name))
    shown = [(one.name, one.nbytes) for one in tensors[:LEAVES]]
    if rest := tensors[LEAVES:]:
        shown = sorted([*shown, (f"{len(rest)} others", sum(t.nbytes for t in rest))], key=lambda pair: -pair[1])
    tops: dict[str, int] = {}
    inner = []
    for (name, nbytes), place in zip(shown, treemap([n for _, n in shown], (0, 0, WIDTH, 320)), strict=True):
        top = ".".join(name.split(".")[:-2][:3])
        fill = colour(tops.setdefault(top, len(tops)))
        inner.append(_box(*place, fill, name, f"{name}: {size(nbytes)}"))
    return _svg(WIDTH, 320, inner, "sizes of the tensors")
