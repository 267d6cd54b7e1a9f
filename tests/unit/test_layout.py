"""Boxes of layouts against index lists that are cut step by step, as `torch.chunk` cuts."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import layouts, meshes, shapes, splits

from hyperstate.layout import Box, Layout, Mesh, chunk, intersect, replicated, row, splits_of, whole


def chunks(items, parts):
    """`torch.chunk`'s rule on a list, empty chunks included: pieces of ceil(n / parts) until nothing is left."""
    step = max(1, -(-len(items) // parts))
    pieces = [items[at : at + step] for at in range(0, len(items), step)]
    return pieces + [[]] * (parts - len(pieces))


def owned(layout, shape, place):
    """Indices of the elements that the rank at `place` keeps: each tensor dimension is cut split after split."""
    kept = []
    for size, split in zip(shape, layout.splits, strict=True):
        indices = list(range(size))
        for mesh_dim in split:
            indices = chunks(indices, layout.mesh.shape[mesh_dim])[place[mesh_dim]]
        kept.append(indices)
    return set(product(*kept))


def elements(box):
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@given(layouts())
def test_a_rank_holds_the_elements_that_cutting_step_by_step_leaves_it(case):
    layout, shape = case
    for rank, place in zip(layout.mesh.ranks, product(*map(range, layout.mesh.shape)), strict=True):
        assert owned(layout, shape, place) == elements(layout.box(shape, rank))


@given(layouts())
def test_the_boxes_of_every_replica_group_tile_the_tensor_once(case):
    layout, shape = case
    everything = sorted(elements(whole(shape)))
    for group in layout.replicas:
        held = [index for rank in group for index in elements(layout.box(shape, rank))]
        assert everything == sorted(held)
    assert sorted(layout.mesh.ranks) == sorted(rank for group in layout.replicas for rank in group)


@given(layouts())
def test_shards_are_the_distinct_boxes_with_elements_and_all_ranks_that_hold_them(case):
    layout, shape = case
    held = {}
    for rank in layout.mesh.ranks:
        held.setdefault(frozenset(elements(layout.box(shape, rank))), []).append(rank)
    held.pop(frozenset(), None)
    assert held == {frozenset(elements(box)): list(ranks) for box, ranks in layout.shards(shape)}


@given(layouts(), st.data())
def test_a_layout_over_some_replica_groups_leaves_their_ranks_the_same_boxes(case, data):
    layout, shape = case
    chosen = data.draw(st.lists(st.sampled_from(layout.replicas), min_size=1, unique=True))
    part = layout.over(chosen)
    assert [rank for group in chosen for rank in group] == list(part.mesh.ranks)
    for rank in part.mesh.ranks:
        assert layout.box(shape, rank) == part.box(shape, rank)


@given(layouts(), st.data())
def test_ranks_hold_the_replica_groups_of_which_they_have_every_element(case, data):
    """Ranks whose boxes are empty need not be among them."""
    layout, shape = case
    ranks = data.draw(st.sets(st.sampled_from(layout.mesh.ranks)))
    everything = elements(whole(shape))
    complete = [
        group
        for group in layout.replicas
        if everything == set().union(*(elements(layout.box(shape, rank)) for rank in group if rank in ranks))
    ]
    held = layout.held_by(shape, ranks)
    assert bool(complete) == (held is not None)
    if held is not None:
        assert {rank for group in complete for rank in group} == set(held.mesh.ranks)
        assert all(layout.box(shape, rank) == held.box(shape, rank) for rank in held.mesh.ranks)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_gives_ceil_sized_parts_and_empty_ones_at_the_end(size, parts):
    expected = [(p[0], p[-1] + 1) if p else (size, size) for p in chunks(list(range(size)), parts)]
    assert expected == [chunk(size, parts, i) for i in range(parts)]


def test_a_rank_outside_the_mesh_has_no_box():
    assert None is Layout(row([2, 3]), ((0,),)).box((4,), 0)


def test_hsdp_holds_each_shard_once_per_replica():
    hsdp = Layout(Mesh((2, 2), (0, 1, 2, 3)), ((1,), ()))
    assert (Box((0, 0), (3, 4)), Box((3, 0), (5, 4))) == (hsdp.box((5, 4), 0), hsdp.box((5, 4), 1))
    assert hsdp.box((5, 4), 1) == hsdp.box((5, 4), 3)
    assert ((0, 1), (2, 3)) == hsdp.replicas


def test_fsdp_over_tp_gives_the_rows_that_pytorch_really_holds():
    """dp=3, tp=2, 7 rows: TP cuts into 4 + 3 and FSDP cuts each part, so rank 5 holds row 6 and rank 4 none."""
    layout = Layout(Mesh((3, 2), tuple(range(6))), ((1, 0),))
    rows = [list(range(b.start[0], b.stop[0])) for b in (layout.box((7,), r) for r in range(6))]
    assert [[0, 1], [4], [2, 3], [5], [], [6]] == rows


def test_a_zero_dimensional_tensor_is_one_element_on_every_rank():
    layout = replicated([4, 7], 0)
    assert ((Box((), ()), (4, 7)),) == layout.shards(())


def test_a_tensor_without_elements_has_no_shards():
    assert () == Layout(row([0, 1]), ((0,), ())).shards((4, 0))


@given(shapes(), st.data())
def test_the_intersection_of_two_boxes_has_their_common_elements(shape, data):
    def box():
        ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    a, b = box(), box()
    common = intersect(a, b)
    assert elements(a) & elements(b) == (elements(common) if common else set())
    assert common == intersect(b, a)
    if common is not None:
        assert tuple(x - y for x, y in zip(common.start, a.start, strict=True)) == common.within(a).start
        assert common.shape == common.within(a).shape


# -- meshes --------------------------------------------------------------------------------------------


@given(meshes(), st.data())
def test_a_slice_has_the_ranks_that_differ_only_in_the_free_mesh_dimensions(mesh, data):
    free = data.draw(st.sets(st.integers(0, len(mesh.shape) - 1)))
    rank = data.draw(st.sampled_from(mesh.ranks))
    here = mesh.coordinate(rank)
    expected = [
        r
        for r in mesh.ranks
        if all(a == b or d in free for d, (a, b) in enumerate(zip(here, mesh.coordinate(r), strict=True)))
    ]
    assert expected == list(mesh.slice(free, rank))
    assert prod(mesh.shape[d] for d in free) == len(expected)


@pytest.mark.parametrize(("shape", "ranks"), [((2, 2), (0, 1, 2)), ((2,), (0, 0)), ((), ())])
def test_a_mesh_needs_one_distinct_rank_per_place(shape, ranks):
    with pytest.raises(ValueError, match="mesh of shape"):
        Mesh(shape, ranks)


def test_names_and_root_of_a_mesh_are_no_part_of_its_identity():
    plain = Mesh((2,), (0, 1))
    named = Mesh((2,), (0, 1), names=("dp",), root=Mesh((2, 2), (0, 1, 2, 3)))
    assert plain == named
    assert hash(plain) == hash(named)
    assert plain != Mesh((2,), (1, 0))
    assert plain != Mesh((1, 2), (0, 1))


# -- placements ----------------------------------------------------------------------------------------


def placements_of(split_order, mesh_shape):
    """One (dim, split_factor) or None per mesh dimension, read off the order: later mesh dimensions that cut first."""
    result = [None] * len(mesh_shape)
    for dim, order in enumerate(split_order):
        for position, mesh_dim in enumerate(order):
            first = [e for e in order[:position] if e > mesh_dim]
            result[mesh_dim] = (dim, prod(mesh_shape[e] for e in first))
    return result


def explained(order, mesh_shape, placements):
    """Whether an order is what the placements say: PyTorch writes a split factor only over later mesh dimensions."""
    return placements == placements_of(order, mesh_shape)


@given(st.data())
def test_placements_written_from_an_order_are_read_back_as_that_order(data):
    mesh = data.draw(meshes())
    ndim = data.draw(st.integers(1, 3))
    order = data.draw(splits(len(mesh.shape), ndim))
    placements = placements_of(order, mesh.shape)
    found = splits_of(placements, mesh.shape, ndim)
    assert placements == placements_of(found, mesh.shape)
    if 1 not in mesh.shape:  # a mesh dimension of size 1 leaves its place in the order open, and it cuts nothing
        assert order == found
    shape = tuple(data.draw(st.integers(0, 9)) for _ in range(ndim))
    for rank in mesh.ranks:
        assert Layout(mesh, order).box(shape, rank) == Layout(mesh, found).box(shape, rank)


@given(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=3), st.data())
def test_placements_that_no_order_explains_are_refused(mesh_shape, data):
    """Against all orders, tried one by one."""
    given_ = data.draw(
        st.lists(
            st.none() | st.tuples(st.just(0), st.sampled_from([1, 2, 3, 4, 6])), min_size=len(mesh_shape), max_size=3
        )
    )
    assume(len(given_) == len(mesh_shape))
    sharded = [d for d, placement in enumerate(given_) if placement is not None]
    fitting = [o for o in orders(sharded) if explained((o,), mesh_shape, given_)]
    if fitting:
        assert (fitting[0],) == splits_of(given_, mesh_shape, 1)
        assert 1 == len(fitting)
    else:
        with pytest.raises(ValueError, match=r"split_factor=\d, which no order.*redistribute"):
            splits_of(given_, mesh_shape, 1)


def orders(items):
    if not items:
        return [()]
    return [(item, *rest) for item in items for rest in orders([i for i in items if i != item])]


def test_shards_of_one_dim_without_a_factor_cut_from_the_first_mesh_dimension_on():
    assert ((0, 1), ()) == splits_of([(0, 1), (0, 1)], (2, 2), 2)


def test_a_strided_shard_cuts_after_the_mesh_dimension_that_its_factor_names():
    assert ((1, 0),) == splits_of([(0, 2), (0, 1)], (3, 2), 1)


def test_negative_dims_count_from_the_end():
    assert ((), (0,)) == splits_of([(-1, 1)], (2,), 2)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_placement_on_a_dim_that_the_tensor_lacks_is_refused(dim):
    with pytest.raises(ValueError, match="2 dimensions"):
        splits_of([(dim, 1)], (2,), 2)
