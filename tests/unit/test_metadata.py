"""Checkpoints of other libraries in files: what their metadata say, checked against the files; dtype names."""

from __future__ import annotations

import json
import pickle
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperstate.errors import CheckpointError, UnsupportedConfigurationError
from hyperstate.foreign.metadata import Saved, entries_of, neutral
from hyperstate.foreign.readers import read as found_by
from hyperstate.schema import DTYPES


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_known_by_the_names_of_both_frameworks(name):
    camel = name.replace("_", "").replace("bfloat", "BFloat")
    for given_name in (name, f"torch.{name}", camel[0].upper() + camel[1:], f"mindspore.{name}"):
        assert name == neutral(given_name)


@given(st.text(max_size=20))
def test_another_name_is_an_error_and_never_a_float(name):
    try:
        assert neutral(name) in DTYPES
    except UnsupportedConfigurationError as error:
        assert "unknown dtype" in str(error)
    else:
        assert name.lower().replace("torch.", "").replace("mindspore.", "").replace("_", "") in {
            known.replace("_", "") for known in DTYPES
        }


def read(reader, rank, section):
    """The entries alone."""
    return found_by(reader, rank, section).entries


# -- pickles -------------------------------------------------------------------------------------------


def short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


def record(module, name, state):
    return short(module) + short(name) + b"\x93)\x81" + state + b"b"


def table(*pairs):
    return b"}(" + b"".join(short(key) + value for key, value in pairs) + b"u"


def size(*dims):
    return short("torch") + short("Size") + b"\x93(" + b"".join(b"J" + struct.pack("<i", d) for d in dims) + b"t\x85R"


TORCH, HYPER = "torch.distributed.checkpoint.metadata", "hyper_parallel.core.checkpoint.metadata"


def metadata(module, properties, dims, paths=None):
    """What a writer pickles for one tensor "w" and one value "n"."""
    stored = record(
        module,
        "TensorStorageMetadata",
        table(("properties", record(module, "TensorProperties", properties)), ("size", dims), ("chunks", b"]")),
    )
    entries = table(("w", stored), ("n", short(module) + short("BytesStorageMetadata") + b"\x93)\x81"))
    plan = b"N" if paths is None else table(*((key, b"(" + b"".join(map(short, path)) + b"t") for key, path in paths))
    return (
        b"\x80\x04" + record(module, "Metadata", table(("state_dict_metadata", entries), ("planner_data", plan))) + b"."
    )


def in_folder(folder, data, name=".metadata", room=100):
    (folder / name).write_bytes(data)
    (folder / "data.bin").write_bytes(b"\0" * room)
    return str(folder)


def test_pytorchs_metadata_file(tmp_path):
    properties = b"(" + short("torch") + short("bfloat16") + b"\x93" + short("torch.strided") + b"\x89Nt"
    place = in_folder(tmp_path, metadata(TORCH, properties, size(2, 3), [("w", ["w"]), ("n", ["a", "b"])]))
    assert {"w": Saved("torch.bfloat16", (2, 3), ("w",)), "n": Saved(path=("a", "b"))} == read(place, 0, "model")


@pytest.mark.parametrize("name", [".metadata", ".rank3_metadata", "__3.metadata"])
def test_hyperparallels_metadata_file_perhaps_of_this_rank_alone(tmp_path, name):
    properties = table(("dtype", short("BFloat16")), ("requires_grad", b"\x88"))
    dims = b"(K\x02K\x03t"
    place = in_folder(tmp_path, metadata(HYPER, properties, dims), name)
    assert {"w": Saved("BFloat16", (2, 3)), "n": Saved()} == read(place, 3, "model")
    if name != ".metadata":
        with pytest.raises(CheckpointError, match=r"no checkpoint of a known form.*it holds: "):
            read(place, 2, "model")


def test_a_size_that_the_files_can_not_hold_is_refused(tmp_path):
    properties = table(("dtype", short("torch.float32")))
    with pytest.raises(
        CheckpointError, match=r"'w' is said to be float32\[1000, 1000, 1000\], more than the \d+ bytes"
    ):
        read(in_folder(tmp_path, metadata(HYPER, properties, size(1000, 1000, 1000))), 0, "model")
    with pytest.raises(CheckpointError, match="no tensor has"):
        read(in_folder(tmp_path, metadata(HYPER, properties, size(-1))), 0, "model")


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04N.", b"junk", pickle.dumps(print), pickle.dumps({"state_dict_metadata": 3})], ids=range(5)
)
def test_other_pickles_are_refused_by_name(tmp_path, data):
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read(in_folder(tmp_path, data), 0, "model")


def test_objects_are_read_by_structure():
    stored = SimpleNamespace(properties=SimpleNamespace(dtype="Int64"), size=[2])
    found = SimpleNamespace(state_dict_metadata={"a": stored, "b": object()}, planner_data={"a": ("x", 1), "b": [1]})
    assert {"a": Saved("Int64", (2,), ("x", 1)), "b": Saved()} == entries_of(found, "reader")


# -- safetensors ---------------------------------------------------------------------------------------

SIZES = {"F32": 4, "BF16": 2, "I64": 8}


def write(path, tensors, offsets=None):
    """A file of zeros; `tensors` are name -> (dtype, shape)."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        length = SIZES[dtype]
        for n in shape:
            length *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + length]}
        at += length
    if offsets is not None:
        sharding = {name: {"saved_offsets": place} for name, place in offsets.items()}
        header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * at)


def test_a_single_file_and_a_folder(tmp_path):
    write(tmp_path / "model.safetensors", {"w": ("F32", [2, 3]), "n": ("I64", [])})
    expected = {"w": Saved("float32", (2, 3)), "n": Saved("int64", ())}
    assert expected == read(tmp_path / "model.safetensors", 0, "model")
    assert expected == read(tmp_path, 0, "model")


def test_shards_are_put_together(tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    for rank, rows in enumerate((2, 2, 1, 0)):
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        write(folder / name, {"w": ("BF16", [rows, 3])}, {"w": [min(2 * rank, 5), 0]})
    for place in (folder, tmp_path):
        assert {"w": Saved("bfloat16", (5, 3))} == read(place, 0, "model")
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"'w' make up 9 elements of \[5, 3\]; files are missing"):
        read(folder, 0, "model")


def test_an_index_tells_the_files(tmp_path):
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", [2])})
    write(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", [3])})
    write(tmp_path / "other.safetensors", {"c": ("F32", [3])})
    index = tmp_path / "model.safetensors.index.json"
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    for place in (tmp_path, index):
        assert {"a", "b"} == read(place, 0, "model").keys()
    index.write_text(json.dumps({"weight_map": {**files, "lost": files["a"]}}))
    with pytest.raises(CheckpointError, match=r"in none of the files, such as \['lost'\]"):
        read(tmp_path, 0, "model")
    (tmp_path / files["b"]).unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        read(tmp_path, 0, "model")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ".."}}',
        "[" * 100_000,
    ],
    ids=range(9),
)
def test_a_malformed_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        read(tmp_path, 0, "model")


@pytest.mark.parametrize(
    "offsets", [{"w": [0]}, {"w": [-1, 0]}, {"w": "x"}, {"w": [1 << 70, 0]}, {"w": {}}], ids=range(5)
)
def test_malformed_offsets_are_refused(tmp_path, offsets):
    write(tmp_path / "a.safetensors", {"w": ("F32", [2, 3])}, offsets)
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read(tmp_path, 0, "model")


def test_shards_that_contradict_each_other_are_refused(tmp_path):
    write(tmp_path / "a.safetensors", {"w": ("F32", [2])}, {"w": [0]})
    for shape, dtype in (([2], "F32"), ([2], "I64"), ([2, 1], "F32")):
        write(tmp_path / "b.safetensors", {"w": (dtype, shape)}, {"w": [0] * len(shape)})
        with pytest.raises(CheckpointError, match=r"b\.safetensors: 'w'"):
            read(tmp_path, 0, "model")


@given(data=st.binary(max_size=80))
def test_any_bytes_for_a_file_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    for content in (data, struct.pack("<Q", len(data)) + data, struct.pack("<Q", 1 << 50) + data):
        path.write_bytes(content)
        try:
            assert {} == read(path, 0, "model")
        except CheckpointError as error:
            assert "model.safetensors" in str(error)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        read(tmp_path / "nowhere", 0, "model")
    with pytest.raises(CheckpointError, match="it holds: nothing"):
        read(tmp_path, 0, "model")
