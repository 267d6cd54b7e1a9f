"""Draws the pictures of docs/concepts.md, beside this file: ``python docs/images/draw.py``.

Each is what ``hyperstate visualize --mesh MESH --html FILE`` draws of a tensor or a mesh, cut out of its page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hyperstate.layout import Layout, Mesh
from hyperstate.pictures.drawing import drawn
from hyperstate.pictures.picture import Picture

HERE = Path(__file__).parent
STYLE = "<style>text{font:11px system-ui,sans-serif;fill:#1c1c1c}</style>"
LINE, TABLE = Mesh((4,), (0, 1, 2, 3), ("fsdp",)), Mesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))
TENSORS = {
    "fsdp": (LINE, ((0,), ())),
    "hsdp": (TABLE, ((1,), ())),
    "two-dims": (TABLE, ((0,), (1,))),
}
"""Mesh, and for each dim of the tensor the mesh dimensions that split it."""


def pictures() -> dict[str, str]:
    """By file name, the SVG."""
    found = {}
    for name, (mesh, splits) in TENSORS.items():
        tensor = drawn("weight", "float32", (8, 6), Layout(mesh, splits), mesh.ranks)
        page = Picture(name, (tensor,), tuple(f"rank {rank}" for rank in mesh.ranks), mesh).html()
        grid, regions, *_ = re.findall(r"<svg .*?</svg>", page)
        found[f"{name}.svg"] = regions
        found["mesh.svg"] = grid
    return {name: svg.replace(">", f">{STYLE}", 1) + "\n" for name, svg in found.items()}


if __name__ == "__main__":
    for name, svg in pictures().items():
        (HERE / name).write_text(svg, encoding="utf-8")
        sys.stdout.write(f"{HERE / name}\n")
