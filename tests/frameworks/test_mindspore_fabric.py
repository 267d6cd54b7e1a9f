"""What moves bytes between MindSpore's ranks, and the memory of MindSpore's tensors, where the suite does not look."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

import hyperstate as hs
from hyperstate.layout import Box
from hyperstate.schema import TensorSpec
from hyperstate.testing.pool import Pool
from hyperstate_mindspore import backend, host, tensors

BODIES = Path(__file__).with_name("bodies_mindspore_fabric.py")


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 300_000])
def test_several_rounds_are_under_way_at_once(mindspore4, nbytes):
    mindspore4.run(BODIES, "several_rounds_are_under_way_at_once", nbytes=nbytes)


def test_a_slow_peer_is_waited_for(mindspore4):
    mindspore4.run(BODIES, "a_slow_peer_is_waited_for")


def test_what_the_script_does_wrong_is_not_taken_for_a_lost_peer(mindspore2):
    texts = mindspore2.run(BODIES, "what_the_script_does_wrong_is_not_taken_for_a_lost_peer")
    assert all("AllReduce failed" in text and "lost" not in text for text in texts), texts


def test_keys_come_and_go(mindspore4):
    mindspore4.run(BODIES, "keys_come_and_go")


def test_the_keeper_of_the_store_is_missed_at_each_call():
    with Pool("mindspore", 2) as pool:
        pool.run(BODIES, "the_keeper_of_the_store_is_missed_at_each_call", lost=(0,))


@pytest.mark.parametrize("sent", [3, 5000])
def test_a_stray_message_of_the_script_is_an_error_and_never_data(sent):
    with Pool("mindspore", 2) as pool:  # of its own: its ranks can't exchange anything any more
        texts = pool.run(BODIES, "a_stray_message_of_the_script_is_an_error", timeout=100.0, sent=sent)
    assert all("load them again" in text for text in (texts[0][0], texts[1][0])), texts
    assert any("instead of" in text or "failed" in text for text in (texts[0][0], texts[1][0])), texts
    assert "can exchange no more data" in texts[1][1]


# -- memory --------------------------------------------------------------------------------------------


def views():
    base = ms.Tensor(np.arange(24, dtype=np.float32).reshape(4, 6))
    return {
        "whole": (base, base),
        "rows": (base, base[1:3]),
        "columns": (base, base[:, 2:5]),
        "transposed": (base, base.T),
        "scalar": (base, base[2, 3]),
        "again": (base, base.reshape(8, 3)),
    }


@pytest.mark.parametrize("name", list(views()))
def test_writing_reaches_views_which_mindspore_itself_leaves_as_they_are(name):
    base, view = views()[name]
    expected, actual = view.asnumpy() + 100, host.array_of(view)
    assert (view.asnumpy() == actual).all()
    source = ms.Tensor(expected)
    backend().tensors.copy([(view, source)])
    assert (expected == host.array_of(view)).all()
    assert expected.size == int((base.asnumpy() >= 100).sum())


def test_a_copy_converts_and_never_broadcasts():
    port = backend().tensors
    target = ms.Tensor(np.zeros(3), dtype=ms.bfloat16)
    port.copy([(target, ms.Tensor(np.array([1.0, 1.00390625, 3e38]), dtype=ms.float64))])
    assert [1.0, 1.0, 3.00405527047391e38] == [float(x) for x in target.asnumpy().astype(np.float64)]
    with pytest.raises(ValueError, match="shape"):
        port.copy([(target, ms.Tensor(np.zeros(1, np.float32)))])


@pytest.mark.parametrize("dtype", ["bool", "int16", "uint64", "bfloat16", "complex64", "float8_e4m3fn"])
def test_raw_bytes_come_back_as_a_tensor(dtype):
    port = backend().tensors
    itemsize = host.stored(dtype).itemsize
    data = bytes((7 * i) % 2 for i in range(6 * itemsize))
    made = port.from_raw(data, TensorSpec(dtype, (2, 3)), None)
    assert (dtype, (2, 3)) == (port.spec(made).dtype, port.spec(made).shape)
    assert [data] == port.raw([made])
    assert data == bytes(port.host_bytes(made))
    assert data[: 3 * itemsize] == port.raw([port.view(made, Box((0, 0), (1, 3)))])[0]


def test_a_dtype_that_mindspore_lacks_is_refused():
    with pytest.raises(hs.UnsupportedConfigurationError, match="complex32"):
        backend().tensors.empty((2,), "complex32", None)


def test_what_is_on_a_device_is_read_and_written_whole(monkeypatch):
    """No device is at hand: host tensors are taken for a device's, whose memory NumPy can't reach."""
    for module in (host, tensors):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    port = backend().tensors
    whole = ms.Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    first, second = port.view(whole, Box((0, 0), (1, 4))), port.view(whole, Box((1, 1), (3, 3)))
    inner = port.view(second, Box((1, 0), (2, 2)))
    assert [8.0 + 1, 8.0 + 2] == inner.read().ravel().tolist()
    assert first.array is None and second.array is None
    port.copy([(first, ms.Tensor(np.full((1, 4), 50.0, np.float32))), (inner, ms.Tensor(np.full((1, 2), 60.0)))])
    assert [[50, 50, 50, 50], [4, 5, 6, 7], [8, 60, 60, 11]] == whole.asnumpy().tolist()
    assert port.host_bytes(whole) is None
