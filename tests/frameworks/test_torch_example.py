"""examples/train_any.py on PyTorch, by the command that README.md shows."""

from __future__ import annotations

import launched


def test_the_example_prints_what_the_readme_shows() -> None:
    command, lines = launched.shown("torchrun")
    assert (0, lines) == launched.run(command)
