"""What only PyTorch's demo has: the comparison itself, the costs of PyTorch's API, and real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_torch.py")
END_S = 20.0
"""How long workers may outlive the command that started them."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool("torch", 2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("nothing", None),
        ("one bit of a weight", "model head.weight"),
        ("minus zero in a moment", "optimizer head.weight exp_avg"),
        ("a counter", "optimizer head.weight step"),
        ("a missing moment", "optimizer head.weight exp_avg_sq"),
        ("a learning rate", "group of tokens.weight"),
        ("a dtype", "optimizer head.weight step"),
    ],
)
def test_the_comparison_finds_the_smallest_fault(pair: Pool, fault: str, named: str | None) -> None:
    for (check,) in pair.run(BODIES, "the_comparison_finds", timeout=60, fault=fault):
        assert check["compared"] > 100
        assert ([] if named is None else [named]) == check["differences"][:1]


def test_costs_of_both_apis_are_measured_in_one_run(hyperstate: Callable[..., Any]) -> None:
    done = hyperstate("demo", "--backend", "torch", "--json", "-")
    assert 0 == done.code
    costs = {(cost["call"], cost["by"]): cost for cost in done.json()["costs"]}
    assert {"hyperstate", "PyTorch"} == {by for _, by in costs}
    full = 4 * 3 * 6_240_843  # bytes of the parameters and AdamW's two moments
    for (call, by), cost in costs.items():
        assert cost["cpu"] > 0
        if sys.platform != "linux":
            continue
        least = full * 3 / 4 if call.startswith("full") else full * 5 / 4
        assert cost["sent"] > least * 0.95, (call, by)
        if by == "hyperstate":
            assert cost["sent"] < full * (0.85 if call.startswith("full") else 1.7), call
            assert cost["messages"] < costs[call, "PyTorch"]["messages"], call
            assert cost["peak_others"] < full / 2, call


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            state, ppid = status.rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(entry.name))
    return found


def _alive(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_stopped_leaves_no_process_behind(how: signal.Signals) -> None:
    command = [sys.executable, "-m", "hyperstate.cli", "demo", "--backend", "torch", "--json", "-"]
    # What starts the tests may ignore SIGINT (a job in the background does), and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ, start_new_session=True
    )
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 60
    while len(workers := _children(running.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert 4 == len(workers)
    running.send_signal(how)
    running.wait(timeout=END_S)
    deadline = time.monotonic() + END_S
    while (left := [worker for worker in workers if _alive(worker)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [] == left
