"""Pools of real ranks, shared by all files of this folder.

HYPERSTATE_TEST_BACKEND chooses the files by their names (``test_torch_…``, ``test_mindspore_…``; unset means all). A
framework that is chosen must be there: nothing is skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperstate.testing import Pool

# Helpers shared with the rank bodies, which start by file path in processes of their own.
sys.path.insert(0, str(Path(__file__).parent))

CHOSEN = [name.strip() for name in os.environ.get("HYPERSTATE_TEST_BACKEND", "").split(",") if name.strip()]
collect_ignore_glob = [f"test_{name}_*" for name in ("mindspore", "torch") if CHOSEN and name not in CHOSEN]


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    with Pool("torch", 2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    with Pool("torch", 4) as pool:
        yield pool


@pytest.fixture(scope="session")
def mindspore2() -> Iterator[Pool]:
    with Pool("mindspore", 2) as pool:
        yield pool


@pytest.fixture(scope="session")
def mindspore4() -> Iterator[Pool]:
    with Pool("mindspore", 4) as pool:
        yield pool
