"""What values are: what is put together is what was taken apart, type for type and bit for bit."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from values import Tensor, bits, values

from hyperstate.errors import InvalidStateDictError, UnsupportedConfigurationError
from hyperstate.schema import (
    DTYPES,
    TensorSpec,
    keeps_meaning,
    put_together,
    refuse_leaf,
    take_apart,
    tiny,
    tiny_skeleton,
)
from hyperstate.wire import canonical, from_wire, to_wire


def leaf_paths(skeleton):
    """Indices of the tensor leaves in a skeleton, in order."""
    if isinstance(skeleton, list):
        return [i for item in skeleton for i in leaf_paths(item)]
    if not isinstance(skeleton, dict):
        return []
    ((tag, inner),) = skeleton.items()
    if tag == "t":
        return [inner]
    if tag == "(":
        return leaf_paths(inner)
    if tag == "{":
        return [i for _, item in inner for i in leaf_paths(item)]
    return []


def there_and_back(value):
    """Through skeleton, JSON and compression."""
    tensors = []

    def leaf(item):
        assert isinstance(item, Tensor)
        tensors.append(item)
        return {"t": len(tensors) - 1}

    skeleton = take_apart(value, leaf)
    read = from_wire(to_wire(canonical(skeleton)))
    assert list(range(len(tensors))) == list(leaf_paths(read))
    return put_together(read, lambda item: tensors[item["t"]])


@given(values)
def test_a_value_comes_back_with_its_types_its_order_and_its_bits(value):
    assert bits(value) == bits(there_and_back(value))


HARD = [
    True,
    1,
    1.0,
    "1",
    (1, (2, [])),
    [1, (2,)],
    {1: "a", "1": "b", (1,): "c", None: "d", 2.5: "e"},
    {True: "a"},
    {},
    [],
    (),
    {"a": {}, "b": [[], ()], "": ""},
    {"t": 0},
    {"(": [1]},
    {"{": [[1, 2]]},
    -0.0,
    math.nan,
    struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0],
    math.inf,
    -math.inf,
    5e-324,
    complex(-0.0, math.nan),
    2**64,
    -(10**5000),
    b"",
    b"\x00\xff",
    "\ud800",
    "\x00",
]


@pytest.mark.parametrize("value", HARD, ids=map(str, range(len(HARD))))
def test_hard_values_come_back(value):
    assert bits(value) == bits(there_and_back(value))


def test_subclasses_of_plain_types_are_no_plain_values():
    """Their own behaviour would be lost: the caller's leaf function decides about them."""

    class Number(int):
        pass

    for value in (Number(3), type("D", (dict,), {})(), type("T", (tuple,), {})()):
        with pytest.raises(UnsupportedConfigurationError, match=type(value).__name__):
            take_apart([value], refuse_leaf)


def test_the_value_that_is_taken_apart_is_neither_changed_nor_kept():
    inner = [1, 2]
    value = {"a": inner}
    skeleton = take_apart(value, refuse_leaf)
    inner.append(3)
    assert {"a": [1, 2]} == put_together(skeleton, refuse_leaf)
    assert {"a": [1, 2, 3]} == value


def test_counters_of_one_element_travel_with_their_bytes():
    assert [True, True, False, False] == [tiny(TensorSpec("int64", shape)) for shape in ((), (1, 1), (0,), (2,))]
    spec = TensorSpec("float32", (1,))
    skeleton = tiny_skeleton(spec, b"\x00\x00\xc0\x7f")
    assert (spec, b"\x00\x00\xc0\x7f") == _counter(from_wire(to_wire(canonical(skeleton))))


def _counter(skeleton):
    dtype, shape, content = skeleton["T"]
    return TensorSpec(dtype, tuple(shape)), bytes.fromhex(content)


@pytest.mark.parametrize(
    "skeleton",
    [
        {},
        {"(": [], "{": []},
        {"(": 3},
        {"(": {"a": 1}},
        {"{": [[1]]},
        {"{": [[1, 2, 3]]},
        {"{": [1]},
        {"{": {"a": "b"}},
        {"{": [[[1], 2]]},
        {"{": [[{"{": []}, 2]]},
        {"f": "00"},
        {"f": "zz"},
        {"f": None},
        {"c": "00" * 15},
        {"i": "10**9"},
        {"i": 3},
        {"b": "\x00"},
        {"b": [1]},
        [{"f": 1}],
    ],
    ids=json.dumps,
)
def test_a_malformed_skeleton_is_refused(skeleton):
    with pytest.raises(InvalidStateDictError, match="malformed"):
        put_together(skeleton, refuse_leaf)


def test_a_tag_that_nobody_knows_is_the_leaf_functions_to_refuse():
    with pytest.raises(UnsupportedConfigurationError):
        put_together({"exec": "code"}, refuse_leaf)


# -- dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [
        ("float32", "bfloat16", True),
        ("bfloat16", "float64", True),
        ("int64", "float32", True),
        ("int64", "int8", True),
        ("bool", "float32", True),
        ("bool", "int8", True),
        ("float32", "complex64", True),
        ("float8_e4m3fn", "float32", True),
        ("bool", "bool", True),
        ("float32", "int64", False),
        ("complex64", "float64", False),
        ("complex64", "int8", False),
        ("int8", "bool", False),
        ("float32", "bool", False),
        ("complex64", "bool", False),
    ],
)
def test_values_are_converted_only_where_they_keep_their_meaning(source, target, allowed):
    assert allowed == keeps_meaning(source, target)


def test_dtype_sizes_are_those_of_their_names():
    for name, (size, _) in DTYPES.items():
        digits = "".join(c for c in name.split("_")[0] if c.isdigit())
        assert size == (1 if name == "bool" else int(digits) // 8)


def test_nbytes_is_that_of_the_full_tensor():
    assert 24 == TensorSpec("float64", (3, 1)).nbytes
    assert 8 == TensorSpec("complex64", ()).nbytes
    assert 0 == TensorSpec("float64", (3, 0)).nbytes
