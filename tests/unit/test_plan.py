"""Plans carried out for all ranks in one process, on byte strings: who sends what, and what arrives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, shapes

from hyperstate import plan as plans
from hyperstate.layout import Box, Layout, Mesh, replicated, row, whole
from hyperstate.plan import Move, Route, plan, to_ranks
from hyperstate.schema import DTYPES

LIMIT = 1 << 20


def elements(box):
    """The indices of a box in row-major order."""
    return list(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def numbered(shape):
    """A full tensor whose elements are all different."""
    return {index: n for n, index in enumerate(elements(whole(shape)))}


def sharded(values, layout, shape):
    """What each rank of a layout holds of a full tensor."""
    return {rank: {i: values[i] for i in elements(layout.box(shape, rank))} for rank in layout.mesh.ranks}


@dataclass
class Traffic:
    """What went over the wire."""

    sent: Counter = field(default_factory=Counter)
    """Elements by (stage, sender, receiver)."""
    messages: Counter = field(default_factory=Counter)
    """Messages by (stage, sender, receiver)."""
    received: list = field(default_factory=list)
    """(receiver, move index, element), once per arrival."""


def carry_out(moves, sources, ranks, limit=LIMIT):
    """Run the plans of all `ranks` in step. `sources[index][rank]`: element -> value. Returns targets and traffic.

    The two ends of a message must name the same regions at the same offsets, or the plan is wrong.
    """
    targets = [{rank: {} for rank in ranks} for _ in moves]
    stages = {rank: plan(moves, rank, limit) for rank in ranks}
    traffic = Traffic()
    for depth in range(max(map(len, stages.values()))):
        here = {rank: stages[rank][depth] for rank in ranks}
        before = [{rank: dict(held) for rank, held in target.items()} for target in targets]

        def read(rank, move, box, before=before):
            held = before[move.tensor] if move.route.forward else sources[move.tensor]
            return [held[rank][index] for index in elements(box)]

        def write(rank, move, box, values):
            targets[move.tensor][rank].update(zip(elements(box), values, strict=True))

        for rank, stage in here.items():
            for piece in stage.local:
                move = stage.moves[piece.move]
                write(rank, move, piece.box, read(rank, move, piece.box))
        for n in range(max(len(stage.rounds) for stage in here.values())):
            for rank in ranks:
                _deliver(here, n, rank, depth, limit, read, write, traffic)
    return targets, traffic


def _deliver(here, n, rank, depth, limit, read, write, traffic):
    """What the peers sent `rank` in round `n`."""
    senders = {r: s.rounds[n].sends[rank] for r, s in here.items() if n < len(s.rounds) and rank in s.rounds[n].sends}
    expected = here[rank].rounds[n].recvs if n < len(here[rank].rounds) else {}
    assert senders == expected
    for peer, message in senders.items():
        assert peer != rank
        assert message.packed or message.direct
        buffer, payload = bytearray(message.nbytes), 0
        for piece in message.packed:
            move = here[peer].moves[piece.move]
            data = b"".join(encode(v, move.route.dtype) for v in read(peer, move, piece.box))
            assert 0 == piece.offset % plans.ALIGNMENT
            assert bytes(len(data)) == bytes(buffer[piece.offset : piece.offset + len(data)])
            buffer[piece.offset : piece.offset + len(data)] = data
        for piece in [*message.packed, *message.direct]:
            move = here[rank].moves[piece.move]
            size = piece.box.size * itemsize(move)
            payload += size
            if piece in message.packed:
                values = decode(buffer[piece.offset : piece.offset + size], move.route.dtype)
            else:
                values = read(peer, move, piece.box)
            write(rank, move, piece.box, values)
            traffic.received += [(rank, move.tensor, index) for index in elements(piece.box)]
        assert 0 < payload <= limit
        traffic.messages[depth, peer, rank] += 1
        traffic.sent[depth, peer, rank] += payload


def itemsize(move):
    return DTYPES[move.route.dtype][0]


def encode(value, dtype):
    """A number of at least 1, so that no element looks like an unwritten byte."""
    return (value + 1).to_bytes(DTYPES[dtype][0], "little")


def decode(data, dtype):
    size = DTYPES[dtype][0]
    return [int.from_bytes(data[at : at + size], "little") - 1 for at in range(0, len(data), size)]


def moved(shape, source, target, held, dtype="int32", limit=LIMIT):
    """What the ranks of `target` hold after one move, and the traffic."""
    ranks = sorted({*source.mesh.ranks, *target.mesh.ranks})
    targets, traffic = carry_out([Move(0, Route(dtype, shape, source, target))], [held], ranks, limit)
    return {rank: targets[0][rank] for rank in target.mesh.ranks}, traffic


@st.composite
def journeys(draw, count=2):
    """A shape and several layouts of it, over ranks that overlap in part."""
    shape = draw(shapes(max_size=5))
    found = [draw(layouts(shape, ranks=range(draw(st.integers(1, 6)))))[0] for _ in range(count)]
    return shape, found


# -- laws ----------------------------------------------------------------------------------------------


@given(layouts(), st.data())
def test_gathering_what_was_sharded_gives_the_tensor_back(case, data):
    layout, shape = case
    values = numbered(shape)
    root = data.draw(st.sampled_from(layout.mesh.ranks))
    parts, _ = moved(shape, to_ranks([root], shape), layout, {root: values})
    assert sharded(values, layout, shape) == parts
    again, _ = moved(shape, layout, to_ranks([root], shape), parts)
    assert {root: values} == again


@given(journeys(count=3))
def test_resharding_twice_is_resharding_once(case):
    shape, (a, b, c) = case
    held = sharded(numbered(shape), a, shape)
    by_way_of_b, _ = moved(shape, b, c, moved(shape, a, b, held)[0])
    at_once, _ = moved(shape, a, c, held)
    assert at_once == by_way_of_b
    assert sharded(numbered(shape), c, shape) == at_once


@given(journeys())
def test_a_rank_receives_each_element_that_it_keeps_and_lacks_once_and_no_other(case):
    shape, (a, b) = case
    held = sharded(numbered(shape), a, shape)
    _, traffic = moved(shape, a, b, held)
    needed = [
        (rank, 0, index)
        for rank in b.mesh.ranks
        for index in elements(b.box(shape, rank))
        if index not in held.get(rank, {})
    ]
    assert sorted(needed) == sorted(traffic.received)


@given(journeys(count=4), st.data())
def test_many_tensors_share_messages_and_arrive_whole_under_every_limit(case, data):
    """`carry_out` compares the two ends of every message; limits cut regions at odd places."""
    shape, (a, b, c, d) = case
    dtypes = [data.draw(st.sampled_from(["float16", "int32", "complex128"])) for _ in range(3)]
    limit, direct = data.draw(st.integers(16, 200)), data.draw(st.sampled_from([1, 20, 64, plans.DIRECT_BYTES]))
    routes = [(a, b), (b, c), (a, d)]
    values = numbered(shape)
    moves = [Move(i, Route(dtypes[i], shape, *routes[i])) for i in range(3)]
    ranks = sorted({rank for layout in (a, b, c, d) for rank in layout.mesh.ranks})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "DIRECT_BYTES", direct)
        sources = [sharded(values, source, shape) for source, _ in routes]
        targets, traffic = carry_out(moves, sources, ranks, limit)
    for i, (_, target) in enumerate(routes):
        expected = sharded(values, target, shape)
        assert expected == {rank: held for rank, held in targets[i].items() if rank in target.mesh.ranks}
    for pair, count in traffic.messages.items():
        assert count <= 1 + 2 * traffic.sent[pair] // limit


@given(journeys(), st.data())
def test_ranks_that_a_tensor_does_not_concern_may_leave_it_out_of_their_list(case, data):
    """Two tensors on disjoint halves of the job: each rank plans with its own half, and the plans are those of all."""
    shape, (a, b) = case

    def shifted(layout):
        return Layout(Mesh(layout.mesh.shape, tuple(r + 10 for r in layout.mesh.ranks)), layout.splits)

    first, second = Move(0, Route("int32", shape, a, b)), Move(1, Route("int32", shape, shifted(a), shifted(b)))
    ranks = {*a.mesh.ranks, *b.mesh.ranks}
    rank = data.draw(st.sampled_from(sorted(ranks)))
    alone, together = (plan(moves, rank, LIMIT) for moves in ([first], [first, second]))
    for x, y in zip(alone, together, strict=False):
        assert (x.local, x.rounds) == (y.local, y.rounds)


# -- frugality -----------------------------------------------------------------------------------------


@given(layouts())
def test_a_full_set_for_which_every_rank_has_the_tensor_sends_nothing(case):
    layout, shape = case
    everywhere = to_ranks(layout.mesh.ranks, shape)
    for rank in layout.mesh.ranks:
        assert all(
            () == stage.rounds for stage in plan([Move(0, Route("int8", shape, everywhere, layout))], rank, LIMIT)
        )


@given(layouts(), st.data())
def test_a_tensor_that_keeps_its_layout_sends_nothing(case, data):
    layout, shape = case
    rank = data.draw(st.sampled_from(layout.mesh.ranks))
    (stage,) = plan([Move(0, Route("int8", shape, layout, layout))], rank, LIMIT)
    assert () == stage.rounds
    assert [layout.box(shape, rank)] == [piece.box for piece in stage.local] or 0 == layout.box(shape, rank).size


@given(layouts(), st.data())
def test_from_the_root_each_region_leaves_once_and_replicas_pass_it_on(case, data):
    layout, shape = case
    root = data.draw(st.sampled_from(layout.mesh.ranks))
    parts, traffic = moved(shape, to_ranks([root], shape), layout, {root: numbered(shape)})
    assert sharded(numbered(shape), layout, shape) == parts
    leaving = sum(count for (depth, sender, _), count in traffic.sent.items() if depth == 0 and sender == root)
    assert leaving <= 4 * prod(shape)
    assert all(root == sender for depth, sender, _ in traffic.sent if depth == 0)
    stages = len(plan([Move(0, Route("int32", shape, to_ranks([root], shape), layout))], root, LIMIT))
    assert (len(layout.replicas) - 1).bit_length() + 1 == stages
    # Later stages double the replicas: a rank sends its box to one other, nobody gets anything twice.
    assert all(1 == n for n in Counter((depth, sender) for depth, sender, _ in traffic.sent if depth).values())
    got = Counter(rank for rank, _, _ in traffic.received)
    for rank in layout.mesh.ranks:
        assert got[rank] in ((0,) if rank == root else (layout.box(shape, rank).size,))


def test_hsdp_on_two_times_two_sends_a_half_from_the_root_to_its_partner_and_then_across():
    hsdp = Layout(Mesh((2, 2), (0, 1, 2, 3)), ((1,),))
    _, traffic = moved((8,), to_ranks([0], (8,)), hsdp, {0: numbered((8,))}, "int8")
    assert {(0, 0, 1): 4, (1, 0, 2): 4, (1, 1, 3): 4} == dict(traffic.sent)


def test_a_full_get_on_the_root_takes_each_shard_from_one_replica_only():
    hsdp = Layout(Mesh((2, 2), (0, 1, 2, 3)), ((1,),))
    held = sharded(numbered((8,)), hsdp, (8,))
    _, traffic = moved((8,), hsdp, to_ranks([0], (8,)), held, "int8")
    assert {(0, 1, 0): 4} == dict(traffic.sent)


def test_later_stages_carry_the_dtype_that_the_target_keeps():
    target = Layout(Mesh((4, 1), (0, 1, 2, 3)), ((1,),))
    route = Route("float64", (4,), to_ranks([0], (4,)), target, "bfloat16")
    assert [("float64", False), ("bfloat16", True), ("bfloat16", True)] == [
        (part.dtype, part.forward) for part in route.staged
    ]


def test_large_regions_go_straight_and_small_ones_share_a_buffer():
    shapes_ = [(3,), (plans.DIRECT_BYTES // 4,), (5,)]
    moves = [
        Move(i, Route("int32", shape, to_ranks([0], shape), to_ranks([1], shape))) for i, shape in enumerate(shapes_)
    ]
    (stage,) = plan(moves, 1, 64 << 20)
    (one,) = stage.rounds
    message = one.recvs[0]
    assert [(0, 0), (2, 16)] == [(piece.move, piece.offset) for piece in message.packed]
    assert [1] == [piece.move for piece in message.direct]
    assert 16 + 32 == message.nbytes


def test_a_one_element_region_waits_for_the_next_message_if_its_bytes_do_not_fit():
    """2 of 64 bytes are left, and a float32 needs 4."""
    shapes_ = [((31,), "float16"), ((1,), "float32"), ((), "float32")]
    moves = [Move(i, Route(dtype, s, to_ranks([0], s), to_ranks([1], s))) for i, (s, dtype) in enumerate(shapes_)]
    (stage,) = plan(moves, 0, 64)
    sizes = [[piece.move for piece in one.sends[1].packed] for one in stage.rounds]
    assert [[0], [1, 2]] == sizes


# -- scale ---------------------------------------------------------------------------------------------


def test_one_rank_of_16384_plans_with_work_in_proportion_to_the_ranks(monkeypatch):
    """HSDP 64 × 256 from one root, and a reshard to 128 × 128: counted, not timed."""
    work = Counter()
    intersect = plans.intersect

    def counting(a, b):
        work["intersect"] += 1
        return intersect(a, b)

    monkeypatch.setattr(plans, "intersect", counting)
    ranks = tuple(range(16384))
    wide, square = (Layout(Mesh(shape, ranks), ((1,), ())) for shape in ((64, 256), (128, 128)))
    shape = (4096, 8)
    moves = [
        Move(0, Route("float32", shape, to_ranks([0], shape), wide)),
        Move(1, Route("float32", shape, wide, square)),
    ]
    stages = plan(moves, 5000, LIMIT)
    assert 1 + 6 == len(stages)
    assert work["intersect"] < 8 * len(ranks)
    # Rank 5000 has column 136 of 256 (rows 2176–2191) and column 8 of 128 (rows 256–287) of another cutting.
    resharded = [
        piece.box
        for message in (m for one in stages[0].rounds for m in one.recvs.values())
        for piece in [*message.packed, *message.direct]
        if piece.move == 1
    ]
    assert [Box((256, 0), (272, 8)), Box((272, 0), (288, 8))] == sorted(resharded)
    # Replica group 19 gets the tensor when groups 0 to 15 have it, from group 3.
    arrivals = [
        (depth, peer, piece.box)
        for depth, stage in enumerate(stages)
        for one in stage.rounds
        for peer, message in one.recvs.items()
        for piece in message.packed
        if stage.moves[piece.move].tensor == 0
    ]
    assert [(5, 136 + 3 * 256, Box((2176, 0), (2192, 8)))] == arrivals


def test_replicated_ranks_hold_everything():
    assert replicated([3, 1], 2) == to_ranks([3, 1], (4, 4))
    assert row([3, 1]) == replicated([3, 1], 2).mesh
