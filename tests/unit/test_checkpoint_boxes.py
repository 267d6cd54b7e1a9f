"""Box arithmetic of files, against sets of indices."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from hyperstate.checkpoint.boxes import offset_in, reads, share, tiling_fault
from hyperstate.layout import Box, chunk, whole

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def elements(box):
    return set(product(*(range(a, b) for a, b in zip(*box, strict=True))))


@st.composite
def boxes_in(draw, shape):
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_in(shape), max_size=6))))
def test_boxes_tile_a_tensor_exactly_if_each_element_is_in_one_of_them(case):
    shape, boxes = case
    found = [element for box in boxes for element in elements(box)]
    tiled = sorted(found) == sorted(elements(whole(shape)))
    assert tiled == (tiling_fault(shape, boxes) == "")


@given(shapes, st.data())
def test_boxes_made_by_cutting_again_and_again_tile_a_tensor(shape, data):
    boxes = [whole(shape)]
    for _ in range(data.draw(st.integers(0, 8)) if shape else 0):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(box.start[dim], box.stop[dim]))
        middle = [(*end[:dim], at, *end[dim + 1 :]) for end in (box.stop, box.start)]
        boxes += [Box(box.start, middle[0]), Box(middle[1], box.stop)]
    assert "" == tiling_fault(shape, boxes)


def test_a_tiling_that_is_wrong_is_described():
    assert "hold 6 of 8" in tiling_fault((8,), [Box((0,), (6,))])
    assert "[0:5] and [4:8] overlap" in tiling_fault((8,), [Box((0,), (5,)), Box((4,), (8,))])
    assert "outside" in tiling_fault((8,), [Box((0,), (9,))])
    assert "1 dimensions" in tiling_fault((8,), [Box((0, 0), (8, 1))])
    assert "do not come apart" in tiling_fault((400, 400), [Box((i, 0), (i + 2, 400)) for i in range(398)])
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 3)), Box((2, 1), (3, 3)), Box((1, 0), (3, 1)), Box((1, 1), (2, 2))]
    assert "" == tiling_fault((3, 3), pinwheel)


def test_many_chunks_are_checked_soon():
    rows = [Box((i, 0), (i + 1, 8)) for i in range(20_000)]
    columns = [Box((0, i), (8, i + 1)) for i in range(20_000)]
    assert "" == tiling_fault((20_000, 8), rows)
    assert "" == tiling_fault((8, 20_000), columns)
    assert "overlap" in tiling_fault((20_000, 8), [*rows, Box((5, 3), (6, 4))])


@given(
    shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape))),
    st.integers(1, 40),
    st.sampled_from([1, 4, 1 << 18]),
)
def test_runs_of_bytes_hold_the_box_each_element_once(case, limit, itemsize):
    shape, box = case
    flat = list(range(prod(shape)))
    positions = {element: i for i, element in enumerate(product(*map(range, shape)))}
    found = []
    for cover, part in reads(shape, box, itemsize, limit * itemsize):
        start = offset_in(shape, cover.start)
        run = flat[start : start + cover.size]
        assert sorted(positions[element] for element in elements(cover)) == run
        assert elements(part) <= elements(cover)
        found += sorted(elements(part))
    assert sorted(elements(box)) == sorted(found)


def test_a_narrow_box_of_long_rows_is_read_alone():
    """Rows of 8 MiB of which 1 MiB is wanted: seven eighths are left where they are."""
    found = list(reads((4, 2 << 20), Box((0, 0), (4, 1 << 18)), 4, 64 << 20))
    assert 4 * (1 << 18) == sum(read.cover.size for read in found)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from([1, 1 << 20, 1 << 22]),
)
def test_replicas_write_every_row_once_and_alike_much(rows, replicas, row_bytes):
    sizes = [n * row_bytes for n, _ in rows]
    total, position = sum(sizes), 0
    written = [0] * replicas
    for (n, _), nbytes in zip(rows, sizes, strict=True):
        box = Box((3, 0), (3 + n, 1))
        parts = [share(box, nbytes, (position, position + nbytes), total, r, replicas) for r in range(replicas)]
        assert sorted(elements(box)) == sorted(e for part in parts if part is not None for e in elements(part))
        for r, part in enumerate(parts):
            written[r] += 0 if part is None else part.size * row_bytes
        position += nbytes
    assert max(written) <= total / replicas + max(sizes)


def test_a_large_shard_is_cut_among_its_replicas():
    box = Box((0,), (10,))
    parts = [share(box, 10 << 20, (0, 10 << 20), 10 << 20, r, 4) for r in range(4)]
    assert [Box((a,), (b,)) for a, b in ((0, 2), (2, 5), (5, 7), (7, 10))] == parts
    assert (0, 3) == chunk(10, 4, 0)  # torch.chunk would give the last replica one row
