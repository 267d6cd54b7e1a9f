"""What needs one backend is collected where that one is under test."""

from __future__ import annotations

import os

CHOSEN = [name.strip() for name in os.environ.get("HYPERSTATE_TEST_BACKEND", "").split(",") if name.strip()]
collect_ignore_glob = ["test_numpy_*"] if CHOSEN and "numpy" not in CHOSEN else []
