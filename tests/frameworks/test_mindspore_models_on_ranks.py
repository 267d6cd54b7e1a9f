"""Real ranks: sharded cells of all shapes go into new ones; buffers, extra state, stages of a pipeline, clashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_mindspore_models.py")
FORMS = ["sharded", "full", "root"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cell", ["wrapped", "used twice", "both"])
def test_s45_variants_on_ranks(mindspore2: Pool, cell: str, form: str) -> None:
    found = mindspore2.run(BODIES, "s45_variants_on_ranks", cell=cell, form=form, names="own")
    expected = {"wrapped": "net.0.weight", "used twice": "second.weight", "both": "net.net.first.weight"}[cell]
    assert expected in found[0]
    assert ([] if form == "root" else found[0]) == found[1]


@pytest.mark.parametrize("form", FORMS)
def test_s45_on_ranks_in_neutral_names(mindspore2: Pool, form: str) -> None:
    found = mindspore2.run(BODIES, "s45_variants_on_ranks", cell="both", form=form, names="neutral")
    assert {"net.net.norm.weight", "net.net.norm.running_mean", "net.net.norm.num_batches_tracked"} <= set(found[0])


@pytest.mark.parametrize("form", FORMS)
def test_buffers_and_extra_state_arrive_on_ranks(mindspore2: Pool, form: str) -> None:
    mindspore2.run(BODIES, "buffers_and_extra_state_arrive", form=form)


def test_stages_of_a_pipeline_keep_their_own(mindspore4: Pool) -> None:
    found = mindspore4.run(BODIES, "stages_keep_their_own")
    assert [["stage0.weight", "stage0.bias"], [], ["stage1.weight", "stage1.bias"], []] == found


def test_a_clash_on_one_rank_is_refused_on_all(mindspore2: Pool) -> None:
    first, second = mindspore2.run(BODIES, "a_clash_on_one_rank_is_refused_on_all")
    assert first == second
    assert first.startswith("IncompatibleStateError") and "rank 1" in first and "'w'" in first
