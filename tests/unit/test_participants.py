"""Who takes part in a call: the table of docs/participants.md, row by row, on meshes alone."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperstate.errors import ParticipantsError
from hyperstate.layout import Mesh, row
from hyperstate.participants import participants

WORLD = 8
CUBE = Mesh((2, 2, 2), tuple(range(8)), ("pp", "dp", "tp"))


def part(root, dims, rank):
    """The mesh that slicing `root` by `dims` gives on `rank`."""
    ranks = root.slice(dims, rank)
    return Mesh(tuple(root.shape[d] for d in dims), ranks, root=root)


def test_without_a_mesh_the_caller_is_alone():
    assert (3,) == participants([], 3, WORLD)


def test_full_on_the_host_of_plain_models_and_broadcasts_take_the_whole_job():
    assert tuple(range(WORLD)) == participants([], 3, WORLD, whole_job=True)
    assert tuple(range(WORLD)) == participants([row([2, 3])], 3, WORLD, whole_job=True)


def test_one_mesh_takes_its_ranks():
    assert (1, 3, 5) == participants([row([5, 1, 3])], 3, WORLD)


def test_the_mesh_that_contains_the_others_decides():
    assert (0, 1, 2, 3) == participants([row([0, 1]), Mesh((2, 2), (0, 1, 2, 3)), row([1, 3])], 1, WORLD)


def test_a_mesh_without_this_rank_does_not_count():
    assert (2, 3) == participants([row([2, 3]), row([0, 1, 4, 5])], 2, WORLD)
    assert (6,) == participants([row([2, 3])], 6, WORLD)


def test_slices_of_one_root_take_its_slice_over_all_dimensions_in_use():
    """Stage 1 of a pipeline: some entries on its dp mesh, others on its tp mesh, nothing along pp."""
    assert (4, 5, 6, 7) == participants([part(CUBE, [1], 5), part(CUBE, [2], 5)], 5, WORLD)
    assert (1, 3) == participants([part(CUBE, [1], 1)], 1, WORLD)
    assert tuple(range(8)) == participants([part(CUBE, [0], 5), part(CUBE, [1], 5), part(CUBE, [2], 5)], 5, WORLD)


def test_experts_on_a_slice_of_another_grid_of_the_same_ranks():
    grid = Mesh((2, 2), (0, 1, 2, 3))
    assert (0, 1, 2, 3) == participants([row([0, 1, 2, 3]), part(grid, [1], 2)], 2, 4)


def test_a_mesh_without_a_recorded_root_fits_into_the_root_of_the_others():
    assert (4, 5, 6, 7) == participants([part(CUBE, [1], 5), row([4, 5])], 5, WORLD)


def test_meshes_that_only_overlap_ask_for_ranks():
    with pytest.raises(ParticipantsError, match=r"rank 1 .*\[0, 1\] and \[1, 2\].*ranks="):
        participants([row([0, 1]), row([1, 2])], 1, WORLD)
    with pytest.raises(ValueError, match="ranks="):
        participants([row([0, 1]), row([1, 2])], 1, WORLD)


def test_named_ranks_win():
    assert (0, 1, 2) == participants([row([0, 1]), row([1, 2])], 1, WORLD, explicit=(2, 0, 1))
    assert (4, 5) == participants([row([4, 5])], 4, WORLD, whole_job=True, explicit=(4, 5))
    assert (3,) == participants([], 3, WORLD, explicit=(3,))


@pytest.mark.parametrize(
    ("explicit", "message"),
    [
        ((), "distinct ranks of a job of 8"),
        ((1, 1), "distinct ranks of a job of 8"),
        ((1, 8), "distinct ranks of a job of 8"),
        ((-1, 1), "distinct ranks of a job of 8"),
        ((0, 2), r"rank 1 makes the call but is not in ranks=\[0, 2\]"),
        ((1, 2), r"ranks=\[1, 2\] leaves out \[0\], which share a mesh with rank 1"),
    ],
    ids=str,
)
def test_named_ranks_must_be_a_set_with_the_caller_and_its_meshes(explicit, message):
    with pytest.raises(ParticipantsError, match=message):
        participants([row([0, 1])], 1, WORLD, explicit=explicit)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_all_participants_derive_the_same_set(shape, data):
    """Ranks whose entries live on the same kinds of slices agree, and take in every mesh of theirs."""
    count = prod(shape)
    root = Mesh(tuple(shape), tuple(data.draw(st.permutations(range(count)))))
    used = data.draw(st.lists(st.sets(st.integers(0, len(shape) - 1), min_size=1), min_size=1, max_size=3))
    meshes = {rank: [part(root, sorted(dims), rank) for dims in used] for rank in range(count)}
    for rank in range(count):
        found = participants(meshes[rank], rank, count)
        assert sorted(found) == list(found)
        assert {rank}.union(*(mesh.members for mesh in meshes[rank])) <= set(found)
        assert {found} == {participants(meshes[other], other, count) for other in found}
        assert set(root.slice(set().union(*used), rank)) == set(found)
