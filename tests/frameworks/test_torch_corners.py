"""Real ranks: meshes whose ranks are in another order, contradicting shards, threads, inference mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_torch_corners.py")


@pytest.mark.parametrize("ranks", [[3, 1, 0, 2], [[3, 1], [2, 0]], [[0, 2], [1, 3]]], ids=str)
def test_shards_on_a_mesh_in_another_order_are_joined_as_pytorch_joins_them(pool4: Pool, ranks: list[Any]) -> None:
    for way in ["by hand"] + ["fsdp"] * (not isinstance(ranks[0], list)):
        pool4.run(BODIES, "mesh_in_another_order", ranks=ranks, way=way)


def test_a_mesh_whose_rows_are_in_different_orders_is_refused(pool4: Pool) -> None:
    (text,) = set(pool4.run(BODIES, "mesh_in_no_order"))
    assert "(0, 3, 2, 1)" in text


def test_a_local_tensor_that_contradicts_its_layout_is_refused(pool2: Pool) -> None:
    (text,) = set(pool2.run(BODIES, "local_tensor_of_another_shape"))
    assert "(2, 2)" in text and "(4, 2)" in text


def test_calls_from_two_threads_do_not_mix(pool2: Pool) -> None:
    pool2.run(BODIES, "calls_from_two_threads")


@pytest.mark.parametrize("meta", [False, True])
def test_what_is_loaded_inside_inference_mode_can_be_trained_on(pool2: Pool, meta: bool) -> None:
    pool2.run(BODIES, "inside_inference_mode", meta=meta)
