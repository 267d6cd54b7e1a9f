"""What docs/names.md says. (What it shows is run by tests/docs.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from mindspore import nn

from hyperstate_mindspore.names import CELLS, OPTIMIZERS

DOCUMENT = Path(__file__).parents[2] / "docs" / "names.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [*CELLS.values(), *(names.state for names in OPTIMIZERS.values())])
def test_it_lists_every_rename(table: dict[str, str]) -> None:
    assert [] == [pair for pair in table.items() for name in pair if f"`{name}`" not in TEXT]


def test_what_it_says_of_defaults_is_so() -> None:
    assert 1e-7 == nn.LayerNorm((2,)).epsilon
    assert not nn.Conv2d(1, 1, 3).has_bias
    assert 4 == nn.Conv1d(2, 3, 3).weight.ndim
