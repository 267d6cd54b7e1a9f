"""Real ranks: modules with hooks and buffers, pending gradients, loads without traffic, other kinds of DTensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_torch_modules.py")
PATHS = ["sharded", "full", "broadcast"]


@pytest.mark.parametrize("path", PATHS)
def test_s03_all_state_arrives_while_gradients_are_pending(pool2: Pool, path: str) -> None:
    pool2.run(BODIES, "s03_pending_gradients", form=path)


@pytest.mark.parametrize("path", PATHS)
def test_s24_buffers_of_all_kinds_arrive(pool2: Pool, path: str) -> None:
    pool2.run(BODIES, "s24_buffers", form=path)


@pytest.mark.parametrize("path", PATHS)
def test_s23_modules_that_rename_their_keys_on_ranks(pool2: Pool, path: str) -> None:
    keys = pool2.run(BODIES, "s23_renaming_hooks", form=path)
    assert ["0.bias", "0.weight", "1.bias", "1.weight"] == keys[0]
    assert ([] if path == "broadcast" else keys[0]) == keys[1]


@pytest.mark.parametrize("full", [False, True])
def test_s35_adapters_on_ranks(pool2: Pool, full: bool) -> None:
    pool2.run(BODIES, "s35_adapters", full=full)


def test_a_full_load_on_every_rank_moves_no_tensor(pool4: Pool) -> None:
    for traffic in pool4.run(BODIES, "full_on_every_rank_moves_nothing"):
        assert (0, 0) == (traffic["messages"], traffic["bytes_received"])


def test_a_sharded_load_of_the_same_layout_moves_no_tensor(pool2: Pool) -> None:
    for traffic in pool2.run(BODIES, "set_equal_layouts_moves_nothing"):
        assert (0, 0) == (traffic["messages"], traffic["bytes_received"])


@pytest.mark.parametrize("path", PATHS)
def test_sharded_tensors_of_another_kind_are_known_by_structure(pool2: Pool, path: str) -> None:
    pool2.run(BODIES, "other_dtensors", form=path)


def test_values_go_from_one_kind_of_sharded_tensor_to_another(pool2: Pool) -> None:
    pool2.run(BODIES, "from_one_kind_to_the_other")
