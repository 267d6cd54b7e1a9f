"""What docs/names.md shows and says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mindspore import nn

from hyperstate_mindspore.names import CELLS, OPTIMIZERS

DOCUMENT = Path(__file__).parents[2] / "docs" / "names.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
LIMIT_S = 120.0


def test_the_snippet_runs() -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    done = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment
    )
    assert 0 == done.returncode, done.stderr


@pytest.mark.parametrize("table", [*CELLS.values(), *(names.state for names in OPTIMIZERS.values())])
def test_it_lists_every_rename(table: dict[str, str]) -> None:
    assert [] == [pair for pair in table.items() for name in pair if f"`{name}`" not in TEXT]


def test_what_it_says_of_defaults_is_so() -> None:
    assert 1e-7 == nn.LayerNorm((2,)).epsilon
    assert not nn.Conv2d(1, 1, 3).has_bias
    assert 4 == nn.Conv1d(2, 3, 3).weight.ndim
