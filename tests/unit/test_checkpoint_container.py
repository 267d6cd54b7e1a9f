"""The safetensors container: what we write, and what we refuse to read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperstate import CheckpointError
from hyperstate.checkpoint.container import ALIGNMENT, header_length, lay_out, parse
from hyperstate.schema import DTYPES


def file_of(tensors, **metadata):
    first, starts = lay_out(tensors, metadata)
    ends = [starts[name] + DTYPES[dtype][0] * _size(shape) for name, dtype, shape, _ in tensors]
    return first, starts, max(ends, default=len(first))


def _size(shape):
    size = 1
    for n in shape:
        size *= n
    return size


tensors = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    max_size=6,
).map(lambda found: [(name, dtype, shape, (1,) * len(shape)) for name, (dtype, shape) in found.items()])


@given(tensors)
def test_a_header_can_be_read_back(described):
    first, starts, size = file_of(described, mark="x")
    assert 0 == len(first) % ALIGNMENT
    parts, metadata = parse(first[8:], size, "f")
    assert starts == {name: part.start for name, part in parts.items()}
    assert "x" == metadata["mark"]
    offsets = json.loads(metadata["DCP_SHARDING_INFO"])
    for name, dtype, shape, _ in described:
        extra = len(parts[name].shape) - len(shape)
        assert shape == parts[name].shape[: len(shape)]
        assert [1] * len(shape) + [0] * extra == offsets[name]["saved_offsets"]
        assert DTYPES[dtype][0] * _size(shape) == parts[name].stop - parts[name].start
        assert 0 == (parts[name].start - len(first)) % DTYPES[parts[name].dtype][0]


def test_the_first_eight_bytes_are_the_length_of_the_header():
    first, _, size = file_of([("w", "float32", (2, 3), (0, 0))])
    assert len(first) - 8 == header_length(first[:8], size, "f")
    assert b"{" == first[8:9]


def header(**entries):
    return json.dumps(entries).encode()


def entry(start, stop, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "data", "words"),
    [
        (b"{", 0, "no JSON"),
        (b"[" * 100_000, 0, "no JSON"),
        (b"[]", 0, "no JSON object"),
        (b'{"a": 1, "a": 2}', 0, "twice"),
        (header(w=entry(0, 8)), 8, "has 8 bytes"),
        (header(w=entry(4, 8)), 8, "starts at byte"),
        (header(w=entry(0, 4), v=entry(0, 4)), 4, "starts at byte"),
        (header(w=entry(0, 4)), 8, "the file at"),
        (header(w=entry(0, 4)), 0, "the file at"),
        (header(w=entry(0, 4, dtype="F33")), 4, "malformed"),
        (header(w=entry(0, 4, shape=[-1])), 4, "malformed"),
        (header(w=entry(0, 4, shape=[1.0])), 4, "malformed"),
        (header(w=entry(0, 4, shape=[True])), 4, "malformed"),
        (header(w=entry(0, 4, shape=[1] * 65)), 4, "malformed"),
        (header(w=entry(0, 1 << 62, shape=[1 << 60])), 4, "the file at"),
        (header(w=entry(0, 1 << 200, shape=[1 << 198])), 4, "malformed"),
        (header(w=7), 4, "malformed"),
        (header(__metadata__={"a": 1}), 0, "strings"),
        (header(__metadata__=3), 0, "strings"),
    ],
)
def test_a_header_that_lies_is_refused(content, data, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        parse(content, 8 + len(content) + data, "the-file")
    assert "the-file" in str(caught.value)


@pytest.mark.parametrize(("first", "size"), [(b"", 0), (b"1234567", 7), (b"\xff" * 8, 100), (b"\x08" + b"\0" * 7, 15)])
def test_a_length_that_does_not_fit_the_file_is_refused(first, size):
    with pytest.raises(CheckpointError):
        header_length(first, size, "f")


@settings(max_examples=500)
@given(tensors, st.data())
def test_a_damaged_header_is_refused_or_stays_inside_the_file(described, data):
    first, _, size = file_of(described)
    content = bytearray(first[8:])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        parts, _ = parse(bytes(content), size, "f")
    except CheckpointError:
        return
    assert all(8 + len(content) <= part.start <= part.stop <= size for part in parts.values())
    assert sum(part.stop - part.start for part in parts.values()) <= size
