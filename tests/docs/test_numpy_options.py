"""What docs/options.md says to be without effect is so, on two ranks of the reference backend."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_options.py")
TEXT = (pages.ROOT / "docs" / "options.md").read_text(encoding="utf-8")


def cells() -> list[tuple[str, str]]:
    """(function, field) of each cell that says "–"."""
    found = []
    for table in re.findall(r"^\| field .*\n(?:\|.*\n)+", TEXT, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        for field, *values in rows:
            pairs = zip(head[1:], values, strict=True)
            found += [
                (name, field.strip("`")) for names, value in pairs if value[0] == "–" for name in names.split(", ")
            ]
    return [(function.strip("`"), field) for function, field in found]


def test_there_are_such_cells() -> None:
    assert ("get_optim_state_dict", "strict") in cells()
    assert ("load", "cpu_offload") in cells()


@pytest.mark.parametrize(("function", "field"), [cell for cell in cells() if cell[0] != "async_save"])
def test_a_field_that_is_said_to_change_nothing_does_so(function: str, field: str, tmp_path: Path) -> None:
    Pool("numpy", 2).run(BODIES, "a_field_changes_nothing", called=function, field=field, folder=str(tmp_path))
