"""`hyperstate plan`: its figures are those of a real run; its words and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_plan.py")
SCHEMA = {
    "embed_tokens.weight": {"dtype": "float32", "shape": [1003, 520]},
    "layers.0.q_proj.weight": {"dtype": "float32", "shape": [517, 520]},
    "layers.0.q_proj.bias": {"dtype": "float32", "shape": [517]},
    "layers.0.o_proj.weight": {"dtype": "float32", "shape": [520, 517]},
    "layers.0.norm.weight": {"dtype": "float32", "shape": [520]},
    "statistics": {"dtype": "float32", "shape": [33], "sharded": False},
}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("source", "target"),
    [("fsdp=4", "dp=2,tp=2"), ("replica=2,fsdp=2", "fsdp=4"), ("dp=2,tp=2", "replica=2,fsdp=2"), ("fsdp=4", "dp=4")],
)
def test_a_run_of_four_ranks_sends_what_was_planned(
    hyperstate: Callable[..., Any], pool: Callable[[int], Pool], schema: Path, source: str, target: str
) -> None:
    done = hyperstate("plan", schema, "--from", source, "--to", target, "--optimizer", "adam", "--json", "-")
    assert (0, "") == (done.code, done.err)
    planned = {one["operation"]: one for one in done.json()["operations"] if one["by"] == "hyperstate"}
    ranks = pool(4).run(BODIES, "traffic", timeout=120, schema=SCHEMA, source=source, target=target)
    for operation, one in planned.items():
        sent, received, messages = ([rank[operation][name] for rank in ranks] for name in COUNTS)
        ran = (sum(sent), sent[0], max(sent), received[0], max(received), messages[0], max(messages))
        assert ran == tuple(one[name] for name in FIGURES), operation


COUNTS = ("bytes_sent", "bytes_received", "messages")
FIGURES = ("total", "sent_root", "sent_max", "received_root", "received_max", "messages_root", "messages_max")


def test_pytorch_s_share_is_arithmetic_over_whole_tensors(hyperstate: Callable[..., Any], schema: Path) -> None:
    done = hyperstate("plan", schema, "--from", "fsdp=4", "--json", "-")
    found = {one["operation"]: one for one in done.json()["operations"] if one["by"] == "PyTorch"}
    sharded = 4 * (1003 * 520 + 2 * 517 * 520 + 517 + 520)
    full = sharded + 4 * 33
    gather = [found["get, full on the root"][name] for name in ("sent_mean", "received_root", "received_max")]
    assert [pytest.approx(sharded * 3 / 4, abs=20)] * 3 == gather
    broadcast = found["set, broadcast from the root"]
    assert (full * 3, full, 6) == (broadcast["total"], broadcast["received_max"], broadcast["messages_max"])


def test_sixteen_thousand_ranks_are_planned_for(hyperstate: Callable[..., Any], schema: Path) -> None:
    done = hyperstate("plan", schema, "--from", "fsdp=16384", "--to", "replica=32,fsdp=64,tp=8", "--json", "-")
    assert 0 == done.code
    assert [16384] * 10 == [one["ranks"] for one in done.json()["operations"]]


def test_people_see_each_operation_and_how_tensors_lie(hyperstate: Callable[..., Any], schema: Path) -> None:
    done = hyperstate("plan", schema, "--from", "fsdp=4", "--to", "dp=2,tp=2", "--optimizer", "adam")
    assert (0, "") == (done.code, done.err)
    assert "6 tensors, 4.0 MiB, 12.1 MiB with adam" in done.out
    assert "from: fsdp=4 (4 ranks): 5 dim 0 by fsdp; 1 plain" in done.out
    assert "to:   dp=2,tp=2 (4 ranks): 3 dim 0 by tp; 1 dim 1 by tp; 1 plain; 1 replicated" in done.out
    assert 2 == done.out.count("redistribute")


def test_a_rule_of_one_s_own_decides_first(hyperstate: Callable[..., Any], schema: Path) -> None:
    words = ["plan", schema, "--from", "wild=2", "--rule", "wild:*.bias=0", "--rule", "wild:*=replicate", "--json", "-"]
    found = hyperstate(*words).json()
    assert {"replicated": 4, "dim 0 by wild": 1, "plain": 1} == found["from"]["tensors"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "pp=8"], "mesh dimension 'pp' is unknown"),
        (["--from", "fsdp"], "not of the form NAME=SIZE"),
        (["--from", "fsdp=2,fsdp=2"], "stands twice"),
        (["--from", "fsdp=16385"], "16,385 ranks; at most 16,384"),
        (["--from", "fsdp=4", "--optimizer", "lion"], "optimizer 'lion'"),
        (["--from", "fsdp=4", "--optimizer-dtype", "fp3"], "dtype 'fp3'"),
        (["--from", "fsdp=4", "--rule", "tp"], "MESH_DIMENSION:GLOB=DIM"),
        (["--from", "fsdp=4", "--bandwidth", "0"], "--bandwidth must be above 0"),
        (["--from", "fsdp=4", "--json", "none/there.json"], "there is no folder"),
    ],
)
def test_what_can_t_be_planned_is_one_line(
    hyperstate: Callable[..., Any], schema: Path, words: list[str], said: str
) -> None:
    done = hyperstate("plan", schema, *words)
    assert (2, "") == (done.code, done.out)
    assert said in done.err
    assert 1 == len(done.err.strip().splitlines())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "a schema is an object by FQN"),
        ("{", "is no JSON"),
        ("{}", "holds no tensor"),
        ('{"a": {"dtype": "float32"}}', "'a' needs dtype and shape"),
        ('{"a": {"dtype": "float31", "shape": []}}', "unknown dtype"),
        ('{"a": {"dtype": "float32", "shape": [-1]}}', "is no size"),
        ('{"a": {"dtype": "float32", "shape": [9223372036854775807]}}', "too large"),
        ('{"a": {"dtype": "float32", "shape": [], "sharded": 1}}', "sharded is true or false"),
    ],
)
def test_a_schema_that_is_none_is_refused(
    hyperstate: Callable[..., Any], tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "schema.json").write_text(content, encoding="utf-8")
    done = hyperstate("plan", tmp_path / "schema.json", "--from", "fsdp=2")
    assert (2, "") == (done.code, done.out)
    assert said in done.err


def test_a_folder_that_is_not_there_is_refused(hyperstate: Callable[..., Any], tmp_path: Path) -> None:
    done = hyperstate("plan", tmp_path / "none", "--from", "fsdp=2")
    assert 2 == done.code
    assert "no such file or folder" in done.err
