"""Tests that hold both frameworks in one process. They are collected only where both are under test.

HYPERSTATE_TEST_BACKEND must name both (``torch,mindspore``), or nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

CHOSEN = {name.strip() for name in os.environ.get("HYPERSTATE_TEST_BACKEND", "").split(",") if name.strip()}
if CHOSEN and not CHOSEN >= {"torch", "mindspore"}:
    collect_ignore_glob = ["test_*"]
