"""Real ranks: HyperParallel's sharded tensors on MindSpore are known by their structure; it is not imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_mindspore_hyperparallel.py")
FORMS = ["sharded", "full", "root"]


@pytest.mark.parametrize("form", FORMS)
def test_hyperparallels_tensors_are_known_by_structure(mindspore2: Pool, form: str) -> None:
    mindspore2.run(BODIES, "hyperparallel_tensors_are_known_by_structure", form=form)


def test_hyperparallels_addends_are_refused(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "hyperparallel_addends_are_refused")


def test_values_go_from_hyperparallels_tensors_to_our_own(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "from_hyperparallel_to_our_own")
