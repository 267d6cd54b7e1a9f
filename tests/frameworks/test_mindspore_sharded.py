"""Real ranks: MindSpore's sharded tensors, cells that keep shards, and their training."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_mindspore_sharded.py")
OPTIMIZERS = ["nn.Momentum", "nn.AdamWeightDecay", "nn.Adam", "nn.SGD", "experimental.AdamW", "experimental.SGD"]
FORMS = ["sharded", "full", "root"]
DTYPES = range(8)


def test_meshes_tell_places_and_slices(mindspore4: Pool) -> None:
    mindspore4.run(BODIES, "meshes")


def test_parts_are_cut_as_torch_chunk_cuts(mindspore4: Pool) -> None:
    mindspore4.run(BODIES, "parts_are_cut_as_torch_chunk_cuts")


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_tensors_have_every_bit(mindspore4: Pool, dtype: int) -> None:
    mindspore4.run(BODIES, "full_tensors_have_every_bit", dtype=dtype)


def test_placements_change_on_one_mesh(mindspore4: Pool) -> None:
    mindspore4.run(BODIES, "placements_change")


def test_sharded_tensors_are_made_from_local_parts(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "made_from_local_parts")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sharded_training_is_the_plain_one(mindspore2: Pool, optimizer: str) -> None:
    mindspore2.run(BODIES, "sharded_training_is_the_plain_one", optimizer=optimizer, mesh="fsdp")


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp", "slice"])
def test_training_with_uneven_and_empty_parts_is_the_plain_one(mindspore4: Pool, mesh: str) -> None:
    mindspore4.run(BODIES, "sharded_training_is_the_plain_one", optimizer="nn.AdamWeightDecay", mesh=mesh)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_gradients_are_means_over_the_mesh(mindspore4: Pool, dtype: str) -> None:
    mindspore4.run(BODIES, "gradients_are_means_over_the_mesh", dtype=dtype)


def test_plans_say_what_is_sharded_and_how(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "plans_say_what_is_sharded_and_how")


def test_tied_parameters_are_sharded_once(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "tied_parameters_are_sharded_once")


def test_a_sharded_cell_can_not_be_called(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "a_sharded_cell_can_not_be_called")


def test_a_sharded_parameter_can_be_seen_as_a_sharded_tensor(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "views_of_parameters")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_s45_training_goes_on_in_a_new_sharded_cell(mindspore2: Pool, optimizer: str, form: str) -> None:
    mindspore2.run(BODIES, "s45_training_goes_on_in_a_new_sharded_cell", optimizer=optimizer, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_s45_training_goes_on_over_four_ranks(mindspore4: Pool, form: str) -> None:
    mindspore4.run(BODIES, "s45_training_goes_on_in_a_new_sharded_cell", optimizer="nn.AdamWeightDecay", form=form)


@pytest.mark.parametrize("optimizer", ["nn.Momentum", "nn.AdamWeightDecay", "experimental.AdamW"])
def test_a_plain_state_goes_into_shards_and_back(mindspore4: Pool, optimizer: str) -> None:
    mindspore4.run(BODIES, "a_plain_state_goes_into_shards_and_back", optimizer=optimizer)


def test_a_sharded_cell_without_values_gets_memory_for_its_parts_alone(mindspore4: Pool) -> None:
    mindspore4.run(BODIES, "loads_into_shards_without_values")


def test_a_lost_rank_is_named_to_the_others(mindspore4: Pool) -> None:
    found = mindspore4.run(BODIES, "a_lost_rank_is_named", lost=(3,), timeout=90)
    assert [True] * 3 == ["rank 3 has ended" in text for text in found[:3]]
