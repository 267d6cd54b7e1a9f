"""The manifest: there and back, and whatever else may stand in one."""

from __future__ import annotations

import json
from contextlib import suppress
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperstate import CheckpointError
from hyperstate.checkpoint.manifest import Chunk, File, Manifest, Saved, Stored, dump, parse
from hyperstate.layout import Box
from hyperstate.schema import refuse_leaf, take_apart

FILE = "model/shard-00001-model-00001-of-00001.safetensors"
OPTIM = FILE.replace("model/", "optim/")


def example():
    tensors = (
        Stored(
            "model",
            "w",
            "float32",
            (4, 3),
            True,
            (Chunk(0, Box((0, 0), (2, 3)), 128, (7,)), Chunk(0, Box((2, 0), (4, 3)), 152, (8,))),
        ),
        Stored("optim", "state.w.exp_avg", "bfloat16", (4, 3), True, (Chunk(1, Box((0, 0), (4, 3)), 64, (9,)),)),
        Stored("model", "none", "int64", (0,), False, (Chunk(0, Box((0,), (0,)), 128, ()),)),
    )
    entries = {
        ("model", "w"): Saved({"t": 0}, (0,)),
        ("model", "none"): Saved({"t": 0}, (2,)),
        ("state", "w", "exp_avg"): Saved({"t": 0}, (1,)),
        ("state", "w", 3): Saved(take_apart({"a": (1, None)}, refuse_leaf)),
        ("state", "w", "step"): Saved({"T": ["float32", [], "0000803f"]}),
        ("global", "epoch"): Saved(4),
    }
    groups = ((("w",), take_apart({"lr": 0.1, "betas": (0.9, 0.999)}, refuse_leaf)),)
    extra = (((0, 2), take_apart({"step": 3}, refuse_leaf)), ((1,), None))
    files = (File(FILE, 176), File(OPTIM, 88))
    return Manifest("0123456789abcdef", "somebody", "neutral", files, tensors, entries, groups, {"v": "w"}, extra)


def test_a_manifest_can_be_read_back():
    assert example() == parse(dump(example()), "m")


def changed(**new):
    found = json.loads(dump(example()))
    return json.dumps({**found, **new}).encode()


def row(table, number, position, value):
    rows = json.loads(dump(example()))[table]
    rows[number][position] = value
    return changed(**{table: rows})


def chunk(**new):
    rows = json.loads(dump(example()))["tensors"]
    for position, value in new.items():
        rows[0][5][0][int(position[1:])] = value
    return changed(tensors=rows)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no manifest"),
        (b"\xff\xfe", "no manifest"),
        (row("entries", 1, 2, [0]), "one tensor to two entries"),
        (b"[" * 100_000, "no manifest"),
        (b"{}", "format"),
        (changed(format="other"), "format"),
        (changed(version=2), "version 2; this release reads version 1"),
        (changed(version=True), "version"),
        (changed(checksum="md5"), "md5"),
        (changed(id="../../x"), "hexadecimal"),
        (changed(piece=0), "pieces"),
        (changed(names="theirs"), "theirs"),
        (changed(files={}), "no list"),
        (row("files", 0, 0, "/etc/passwd"), "no name of a file"),
        (row("files", 0, 0, "model/../../x.safetensors"), "no name of a file"),
        (row("files", 0, 0, "model/a/b.safetensors"), "no name of a file"),
        (row("files", 0, 0, "model/.hidden.safetensors"), "no name of a file"),
        (row("files", 0, 0, FILE + "\n"), "no name of a file"),
        (row("files", 1, 0, FILE), "twice"),
        (row("files", 0, 1, 160), "beyond"),
        (row("files", 0, 1, -1), "no size"),
        (row("tensors", 0, 2, "float31"), "float31"),
        (row("tensors", 0, 3, [4, 4]), "12 of 16"),
        (row("tensors", 0, 3, [4]), "2|dimensions"),
        (row("tensors", 0, 3, [1 << 62] * 3), "of"),
        (row("tensors", 0, 5, []), "0 of 12"),
        (row("tensors", 1, 0, "model"), "stands in"),
        (row("tensors", 1, 1, 7), "no text"),
        (chunk(c0=5), "range"),
        (chunk(c1=[1, 0]), "overlap|of 12"),
        (chunk(c1=[3, 0], c2=[5, 3]), "outside"),
        (chunk(c3=140), "overlap at byte"),
        (chunk(c3=1 << 63), "no size"),
        (chunk(c4=[]), "checksums"),
        (row("entries", 0, 0, ["model"]), "no key"),
        (row("entries", 0, 0, ["model", {"(": [3]}]), "no key"),
        (row("entries", 0, 0, ["secret", "w"]), "no key"),
        (row("entries", 0, 2, [3]), "not listed"),
        (row("entries", 0, 1, {"t": 1}), "no checkpoint may hold"),
        (row("entries", 0, 1, {"P": "cos"}), "no checkpoint may hold"),
        (row("entries", 0, 1, {"?": "object"}), "no checkpoint may hold"),
        (row("entries", 3, 1, {"T": ["float32", [1 << 40], "00"]}), "bytes"),
        (row("groups", 0, 1, [1]), "no dict"),
        (row("extra", 0, 1, {"t": 0}), "no checkpoint may hold"),
    ],
)
def test_a_manifest_that_lies_is_refused(data, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        parse(data, "the-manifest")
    assert "the-manifest" in str(caught.value)


def places(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


PLACES = list(places(json.loads(dump(example()))))[1:]
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 200)
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.sampled_from([FILE, OPTIM, "w", "model", "float32", "../x", "t", "T", "{", "("])
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["t", "T", "{", "(", "i", "P", "?"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=500)
@given(st.lists(st.tuples(st.sampled_from(PLACES), junk), min_size=1, max_size=3))
def test_whatever_stands_in_a_manifest_it_names_no_other_file_and_no_more_bytes_than_there_are(changes):
    found = json.loads(dump(example()))
    for path, value in changes:
        found = put(found, path, value)
    try:
        manifest = parse(json.dumps(found).encode(), "m")
    except CheckpointError:
        return
    names = {file.name for file in manifest.files}
    assert all(name.count("/") == 1 and ".." not in name and name[:6] in ("model/", "optim/") for name in names)
    assert sum(tensor.nbytes for tensor in manifest.tensors) <= sum(file.size for file in manifest.files)
    for tensor in manifest.tensors:
        for part in tensor.chunks:
            assert part.start + tensor.itemsize * part.box.size <= manifest.files[part.file].size


def put(value, path, new):
    if not path:
        return new
    value = deepcopy(value)
    with suppress(KeyError, IndexError, TypeError):  # an earlier change may have removed the place
        value[path[0]] = put(value[path[0]], path[1:], new)
    return value
