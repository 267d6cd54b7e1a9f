"""`hyperstate demo` on MindSpore's ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LIMIT_S = 240


def demo(*words):
    command = [sys.executable, "-m", "hyperstate.cli", "demo", *words]
    environment = {**os.environ, "HYPERSTATE_BACKEND": "mindspore", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_the_demo_comes_to_its_verdict():
    done = demo("--json", "-")
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert ("mindspore", 4) == (found["backend"], found["ranks"])
    assert [(20, [])] * 2 == [(check["compared"], check["differences"]) for check in found["checks"]]
    assert ["full state, to the root", "from it into 2×2 HSDP"] == [cost["call"] for cost in found["costs"]]
    assert all(cost["messages"] > 0 for cost in found["costs"])


@pytest.mark.parametrize("words", [("--model", "hf:nowhere"), ("--checkpoint", "none.pt")])
def test_files_need_pytorch(words):
    done = demo("--ranks", "2", *words)
    assert 2 == done.returncode
    assert "need PyTorch: add --backend torch" in done.stderr
