"""Real ranks of MindSpore: checkpoints of uneven and of few ranks, and ranks that fail or stop in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hyperstate as hs
from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_mindspore_checkpoints.py")


@pytest.fixture(scope="module")
def mindspore3() -> Iterator[Pool]:
    with Pool("mindspore", 3) as pool:
        yield pool


def test_three_ranks_with_uneven_sizes_save_and_load(mindspore3: Pool, tmp_path: Path) -> None:
    first, *others = mindspore3.run(BODIES, "uneven", folder=str(tmp_path))
    assert [first] * 2 == others
    for name in ("1", "2"):
        hs.verify(tmp_path / name)


def test_the_ranks_of_one_mesh_save_and_load_what_lies_on_it(mindspore4: Pool, tmp_path: Path) -> None:
    files = [f"shard-0000{rank + 1}-model-00001-of-00001.safetensors" for rank in (2, 3)]
    assert [None, None, files, files] == mindspore4.run(BODIES, "sub_mesh", folder=str(tmp_path / "c"))
    hs.verify(tmp_path / "c")


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_rank_that_is_stopped_is_named_to_all_and_the_next_calls_work(
    mindspore3: Pool, tmp_path: Path, call: str
) -> None:
    assert ["AbsentRankError"] * 3 == mindspore3.run(BODIES, "stopped", folder=str(tmp_path), call=call, timeout=90)
    hs.verify(tmp_path / "c")


def test_a_rank_that_can_t_write_refuses_the_save_on_all(mindspore3: Pool, tmp_path: Path) -> None:
    first, *others = mindspore3.run(BODIES, "failing", folder=str(tmp_path))
    assert [first] * 2 == others
    assert "rank 1: OSError: [Errno 28] No space left on device" in first
