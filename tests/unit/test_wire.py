"""Entries on the wire: what comes out is what went in, equal entries have equal bytes, and rubbish is refused."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, shapes
from values import any_text, bits, keys

from hyperstate.errors import InvalidStateDictError
from hyperstate.layout import Mesh
from hyperstate.merge import by_key
from hyperstate.schema import DTYPES, LEAF, Entry, TensorSpec
from hyperstate.wire import canonical, digest, from_wire, pack_entries, to_wire, unpack_entries


def unpacked(packed):
    return by_key(unpack_entries(packed, lambda entry: entry))


def sent(entries):
    """Through packing, JSON and compression."""
    return unpacked(from_wire(to_wire(canonical(pack_entries(entries)))))


@st.composite
def specs(draw):
    shape = draw(shapes())
    layout = draw(st.none() | layouts(shape).map(lambda case: case[0]))
    return TensorSpec(draw(st.sampled_from(sorted(DTYPES))), shape, layout, draw(st.sampled_from(["", "local"])))


@st.composite
def entries(draw):
    leaves = tuple(draw(st.lists(specs(), max_size=2)))
    skeleton = LEAF if len(leaves) == 1 else [{"t": i} for i in range(len(leaves))] + [draw(st.integers() | any_text)]
    return Entry(skeleton, leaves)


def test_a_key_may_be_a_number_of_five_thousand_digits():
    key = ("state", "w", 10**5000)
    assert [bits(key)] == [bits(k) for k in sent({key: Entry(None)})]


names = st.tuples(st.sampled_from(["model", "state"]), any_text) | st.tuples(st.just("state"), any_text, keys)


@given(st.dictionaries(names, entries(), max_size=5))
def test_entries_come_back_equal(held):
    read = sent(held)
    assert {bits(key): entry for key, entry in held.items()} == {bits(key): entry for key, entry in read.items()}


@given(st.dictionaries(names.filter(lambda name: "nan" not in repr(name)), entries(), max_size=5), st.randoms())
def test_equal_entries_have_equal_bytes_whatever_their_order(held, random):
    shuffled = list(held.items())
    random.shuffle(shuffled)
    assert digest(canonical(pack_entries(held))) == digest(canonical(pack_entries(dict(shuffled))))


def test_entries_of_true_one_and_one_point_zero_differ():
    assert 3 == len({Entry(True), Entry(1), Entry(1.0)})
    packed = [canonical(pack_entries({("state", "w", "k"): Entry(value)})) for value in (True, 1, 1.0)]
    assert 3 == len(set(packed))


def test_specs_differ_in_layout_and_form():
    mesh = Mesh((2,), (0, 1))
    assert TensorSpec("int8", (2,)) != TensorSpec("int8", (2,), None, "local")
    packed = pack_entries({("model", "a"): Entry(LEAF, (TensorSpec("int8", (2,)),))})
    assert [] == packed["meshes"]
    assert mesh == Mesh((2,), (0, 1), ("dp",))


def test_a_thousand_entries_alike_take_few_bytes_each():
    """Specs, layouts and meshes stand in tables."""
    spec = TensorSpec("float32", (4096, 4096))
    held = {("state", f"layers.{i}.weight", "exp_avg"): Entry(LEAF, (spec,)) for i in range(1000)}
    packed = pack_entries(held)
    assert (1, 1, 1, 1000) == tuple(len(packed[table]) for table in ("specs", "kinds", "profiles", "rows"))
    assert len(to_wire(canonical(packed))) < 12 * 1000


# -- hostile input -------------------------------------------------------------------------------------


@given(st.binary())
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(InvalidStateDictError, match="no message"):
        from_wire(data)


@pytest.mark.parametrize("text", ["", "{", "[" * 200_000, '"\\ud8', "\xff"])
def test_compressed_rubbish_is_refused(text):
    with pytest.raises(InvalidStateDictError, match="no message"):
        from_wire(zlib.compress(text.encode("latin-1")))


GOOD = {
    "meshes": [[[2], [0, 1]]],
    "layouts": [[0, [[0]]]],
    "specs": [["int8", [2], 0, ""]],
    "kinds": [[LEAF, [0]]],
    "profiles": [["model", [0]]],
    "rows": [0],
    "names": ["w"],
}


@pytest.mark.parametrize(
    "change",
    [
        {"meshes": [[[2], [0, 0]]]},
        {"meshes": [[[2]]]},
        {"meshes": 3},
        {"layouts": [[5, [[0]]]]},
        {"specs": [["float7", [2], 0, ""]]},
        {"specs": [[["int8"], [2], 0, ""]]},
        {"specs": [["int8", 2, 0, ""]]},
        {"kinds": [[LEAF, [1]]]},
        {"kinds": [LEAF]},
        {"profiles": [["model", [7]]]},
        {"profiles": [["model", 0]]},
        {"profiles": [["model", [0, {"f": ""}]]]},
        {"profiles": [["model", [0, "\0{"]]]},
        {"profiles": [[["model"], [0]]]},
        {"rows": [7]},
        {"rows": [0, 0]},
        {"names": [3]},
        {"names": ["\0[]"]},
    ],
    ids=json.dumps,
)
def test_malformed_entries_are_refused(change):
    assert 1 == len(unpacked(GOOD))
    with pytest.raises(InvalidStateDictError):
        unpacked({**GOOD, **change})


@pytest.mark.parametrize("part", sorted(GOOD))
def test_entries_without_a_table_are_refused(part):
    with pytest.raises(InvalidStateDictError, match=part):
        unpacked({name: table for name, table in GOOD.items() if name != part})
