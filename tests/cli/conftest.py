"""The tests of what only PyTorch's demo has are collected where PyTorch is under test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from hyperstate.backend import installed

LIMIT_S = 240.0
"""A run of the command that takes longer has hung."""

_NAMED = [name.strip() for name in os.environ.get("HYPERSTATE_TEST_BACKEND", "").split(",") if name.strip()]
if "torch" not in (_NAMED or installed()):
    collect_ignore = ["test_demo_torch.py", "test_demo_files.py", "test_look_torch.py"]


class Done(NamedTuple):
    """A finished run of the command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def hyperstate() -> Callable[..., Done]:
    """Runs ``hyperstate`` with these words, as a user does: a process of its own, and no terminal."""

    def run(*words: object, **environment: str) -> Done:
        command = [sys.executable, "-m", "hyperstate.cli", *map(str, words)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **environment}
        )
        assert "Traceback" not in done.stdout + done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    return run
