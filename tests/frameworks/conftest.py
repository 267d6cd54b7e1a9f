"""Pools of real ranks, shared by all files of this folder. The framework must be there: nothing is skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperstate.testing import Pool

# Helpers shared with the rank bodies, which start by file path in processes of their own.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    with Pool("torch", 2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    with Pool("torch", 4) as pool:
        yield pool
