"""MindSpore's ``.ckpt`` files, without MindSpore: there and back, and damaged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyperstate as hs
from hyperstate.checkpoint import convert
from hyperstate.checkpoint.ckpt import Ckpt
from hyperstate_numpy.kit import Kit


def written(folder, shapes):
    kit = Kit()
    values = {f"p.{i}": kit.tensor(nested(shape, float(i)), "float32") for i, shape in enumerate(shapes)}
    hs.save(folder / "own", kit.with_parameters(values))
    convert(folder / "own", folder / "c.ckpt", to="ckpt")
    return values, folder / "c.ckpt"


def nested(shape, value):
    return [nested(shape[1:], value + i) for i in range(shape[0])] if shape else value


def test_one_message_is_what_protobuf_makes(tmp_path):
    """Checkpoint{value{tag: "p.0", tensor{dims: 1, dims: 2, tensor_type: "Float32", tensor_content: 1.0f 2.0f}}}"""
    kit = Kit()
    hs.save(tmp_path / "own", kit.with_parameters({"p.0": kit.tensor([[1.0, 2.0]])}))
    convert(tmp_path / "own", tmp_path / "c.ckpt", to="ckpt")
    tensor = b"\x08\x01\x08\x02\x12\x07Float32\x1a\x08\x00\x00\x80\x3f\x00\x00\x00\x40"
    value = b"\x0a\x03p.0\x12" + bytes([len(tensor)]) + tensor
    assert b"\x0a" + bytes([len(value)]) + value == (tmp_path / "c.ckpt").read_bytes()


def test_it_comes_back(tmp_path):
    values, path = written(tmp_path, [(2, 3), (), (1,), (0, 4), (200,)])
    convert(path, tmp_path / "back")
    kit = Kit()
    target = kit.with_parameters({name: kit.tensor(nested(value.shape, 9.0)) for name, value in values.items()})
    hs.load(tmp_path / "back", target)
    for name, value in kit.named(target).items():
        assert kit.content(values[name]) == kit.content(value)


def test_a_dtype_that_it_lacks_is_refused(tmp_path):
    kit = Kit()
    hs.save(tmp_path / "own", kit.with_parameters({"p": kit.tensor([1.0], "float8_e5m2")}))
    with pytest.raises(hs.CheckpointError, match="float8_e5m2"):
        convert(tmp_path / "own", tmp_path / "c.ckpt", to="ckpt")
    assert not (tmp_path / "c.ckpt").exists()


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_is_refused_or_stays_inside_itself(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "ckpt"
    if not folder.exists():
        folder.mkdir()
        written(folder, [(2, 3), (), (5,)])
    content = bytearray((folder / "c.ckpt").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(1, len(content)))]
    (folder / "damaged.ckpt").write_bytes(content)
    try:
        origin = Ckpt(str(folder / "damaged.ckpt"))
    except hs.CheckpointError:
        return
    with origin:
        assert sum(stored.nbytes for stored in origin.contents.tensors) <= len(content)
