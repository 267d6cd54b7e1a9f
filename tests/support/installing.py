"""A project's entry points without an installer: what one would write of its pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path


def write_metadata(project: Path, folder: Path) -> None:
    """Make `folder`, once it is on ``sys.path``, tell of the project as installed packages do."""
    table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    place = folder / f"{table['name'].replace('-', '_')}-{table['version']}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: {table['version']}\n", encoding="utf-8"
    )
    lines = [
        line
        for group, points in table["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
