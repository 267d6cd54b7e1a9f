"""`hyperstate demo` on the backend under test."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyperstate.cli import app as command
from hyperstate.cli.demo import Check, Cost, Outcome, join

Run = Callable[..., Any]

GOOD = Outcome(
    backend="any",
    versions="any 1",
    ranks=4,
    title="a net",
    meshes=["4-rank FSDP", "2×2 HSDP"],
    how="",
    legend="",
    costs=[Cost("a call", "hyperstate", 2**20, 3, None, None, 0.5, 0.25)],
    checks=[Check("a check", 3, []), Check("for comparison", 2, ["model a.weight"], decides=False)],
)


def report(**changed: Any) -> dict[str, Any]:
    """What one rank says."""
    cost = {"call": "a call", "by": "hyperstate", "sent": 10, "messages": 1, "peak": 5, "cpu": 0.5, "wall": 0.25}
    check = {"what": "a check", "compared": 3, "differences": [], "decides": True}
    texts = dict.fromkeys(("refused", "versions", "title", "how", "legend"), "")
    return {**texts, "meshes": ["A", "B"], "costs": [cost], "checks": [check]} | changed


def test_the_demo_reaches_its_verdict_and_writes_it_as_json(hyperstate: Run, backend_name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = hyperstate("demo", "--backend", backend_name, "--json", path)
    assert (0, "") == (done.code, done.err)
    assert "EQUAL: every value on 2×2 HSDP has the bits of 4-rank FSDP." in done.out.splitlines()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (True, backend_name, 4) == (found["equal"], found["backend"], found["ranks"])
    assert all(check["compared"] > 10 and not check["differences"] for check in found["checks"])
    moved = [cost for cost in found["costs"] if cost["by"] == "hyperstate"]
    assert 2 == len(moved)
    assert all(cost["messages"] > 0 and cost["sent"] > 100_000 and cost["wall"] > 0 for cost in moved)


def test_values_that_differ_give_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = dataclasses.replace(GOOD, checks=[Check("2 steps later", 3, ["optimizer a.weight exp_avg"])])
    codes = {}
    for outcome in (GOOD, bad):
        monkeypatch.setattr(command, "run", lambda choice, outcome=outcome: outcome)
        done = CliRunner().invoke(command.app, ["demo"])
        codes[done.exit_code] = done.output
    assert {0, 1} == codes.keys()
    assert "NOT EQUAL: 2 steps later: optimizer a.weight exp_avg" in codes[1]
    assert "NOT EQUAL" not in codes[0]


def test_one_rank_that_differs_decides_the_verdict() -> None:
    other = report(checks=[{"what": "a check", "compared": 3, "differences": ["model a"], "decides": True}])
    assert join("any", [report(), report()]).equal
    assert ["model a"] == join("any", [report(), other]).checks[0].differences
    assert not join("any", [report(), other]).equal


def test_a_check_that_compared_nothing_is_not_equal() -> None:
    nothing = {"what": "a check", "compared": 0, "differences": [], "decides": True}
    assert not join("any", [report(checks=[nothing])]).equal
    assert not join("any", [report(checks=[])]).equal


def test_costs_are_sums_over_ranks_and_the_highest_peak_of_the_others() -> None:
    high = report(costs=[{**report()["costs"][0], "peak": 9, "wall": 0.5}])
    expected = Cost("a call", "hyperstate", 30, 3, 5, 9, 1.5, 0.5)
    assert [expected] == join("any", [report(), high, report()]).costs
    unknown = report(costs=[{**report()["costs"][0], "sent": None}])
    assert join("any", [report(), unknown]).costs[0].sent is None


@pytest.mark.parametrize("words", [(), ("--help",), ("demo", "--help")])
def test_help_names_what_there_is(hyperstate: Run, words: tuple[str, ...]) -> None:
    done = hyperstate(*words, COLUMNS="200")
    text = done.out + done.err
    assert "demo" in text
    if words and words[0] == "demo":
        for option in ("--backend", "--ranks", "--model", "--checkpoint", "--fetch-example", "--json", "--timeout"):
            assert option in text


def test_version(hyperstate: Run) -> None:
    from importlib import metadata

    assert f"hyperstate {metadata.version('hyperstate-dist')}\n" == hyperstate("--version").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "3"), "an even number is needed"),
        (("--ranks", "0"), "an even number is needed"),
        (("--backend", "abacus"), "there is no backend 'abacus'"),
        (("--model", "somewhere"), "write hf:FOLDER"),
        (("--checkpoint", "a", "--fetch-example"), "--checkpoint and --fetch-example exclude each other"),
        (("--cache", "a"), "--cache goes with --fetch-example only"),
        (("--timeout", "0.01"), "no answer within 0.01 s"),
    ],
)
def test_what_can_not_run_is_refused_in_one_message(
    hyperstate: Run, backend_name: str, words: tuple[str, ...], said: str
) -> None:
    if said.startswith("no answer") and backend_name == "numpy":
        said = "did not end within 0.01 s"
    done = hyperstate("demo", *words, HYPERSTATE_BACKEND=backend_name)
    assert (2, "") == (done.code, done.out)
    assert done.err.startswith("hyperstate demo: ")
    assert said in done.err
    assert 1 == len(done.err.strip().splitlines())


def test_a_result_that_has_nowhere_to_go_is_refused_before_the_run(hyperstate: Run, tmp_path: Path) -> None:
    done = hyperstate("demo", "--json", tmp_path / "no" / "file.json")
    assert (2, "") == (done.code, done.out)
    assert f"there is no folder {tmp_path / 'no'}" in done.err


def test_a_backend_without_files_says_which_one_reads_them(hyperstate: Run, backend_name: str, tmp_path: Path) -> None:
    done = hyperstate("demo", "--backend", backend_name, "--checkpoint", tmp_path / "missing.pt")
    refusal = "--model, --checkpoint and --fetch-example need PyTorch: add --backend torch"
    expected = f"there is no file {tmp_path / 'missing.pt'}" if backend_name == "torch" else refusal
    assert (2, "", f"hyperstate demo: {expected}\n") == done
