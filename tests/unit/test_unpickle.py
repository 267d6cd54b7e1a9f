"""Pickled metadata are read without pickle: what is read, what is refused, and that nothing is run."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import sys
import time
from collections import OrderedDict
from pathlib import PosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperstate.errors import CheckpointError
from hyperstate.foreign.unpickle import LIMIT, Record, loads

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
    max_leaves=30,
)


@given(PLAIN, st.integers(3, 5))
def test_plain_values_are_read_as_pickle_reads_them(value, protocol):
    assert value == loads(pickle.dumps(value, protocol), "file")


def test_shared_values_stay_shared_and_cycles_are_no_hang():
    shared = ["x"]
    found = loads(pickle.dumps((shared, shared)), "file")
    assert found[0] is found[1]
    cycle = []
    cycle.append(cycle)
    found = loads(pickle.dumps(cycle), "file")
    assert found[0] is found


def test_known_classes_become_records():
    name = "torch.distributed.checkpoint.metadata"
    data = b"\x80\x02c" + name.encode() + b"\nMetadata\n)\x81}X\x01\x00\x00\x00aK\x07sb."
    found = loads(data, "file")
    assert isinstance(found, Record)
    assert ("Metadata", (), {"a": 7}) == (found.kind, found.args, found.state)
    assert {"a": 1} == loads(pickle.dumps(OrderedDict(a=1)), "file")
    path = loads(pickle.dumps(PosixPath("/a")), "file")
    assert ("PosixPath", ("/", "a")) == (path.kind, path.args)
    assert "torch.float32" == loads(b"\x80\x02ctorch\nfloat32\n.", "file")
    assert (3, 4) == loads(b"\x80\x02ctorch\nSize\nK\x03K\x04\x86\x85R.", "file")


# -- hostile data --------------------------------------------------------------------------------------


class Runs:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "argument"),
    [(os.system, "true"), (eval, "1"), (exec, "1"), (getattr, "x"), (__import__, "os"), (open, "x")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_no_call_is_made(function, argument, protocol):
    data = pickle.dumps(Runs(function, argument), protocol)
    with pytest.raises(CheckpointError, match=r"^file: (refused|damaged) at byte \d+"):
        loads(data, "file")


@pytest.mark.parametrize(
    "module", ["os", "builtins", "torch", "torch.distributed.checkpoint.metadata", "hyper_parallel"]
)
@pytest.mark.parametrize("name", ["system", "eval", "load", "hub", "Metadata.__init__", "", "nn", "Tensor", "x" * 300])
def test_no_name_outside_the_list_is_found(module, name):
    for data in (
        b"\x80\x02c%b\n%b\n." % (module.encode(), name.encode()),
        b"\x80\x04X%b%bX%b%b\x93."
        % (struct.pack("<I", len(module)), module.encode(), struct.pack("<I", len(name)), name.encode()),
    ):
        with pytest.raises(CheckpointError, match="refused"):
            loads(data, "file")


def test_a_record_can_be_given_no_behaviour():
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for data in (
        b"\x80\x02" + name + b"}b.",  # state set on the class
        b"\x80\x02" + name + b")\x81)R.",  # an instance called
        b"\x80\x02]}b.",  # state set on a list
        b"\x80\x02" + name + b")}\x92.",  # made with keyword arguments
        b"\x80\x02K\x01Q.",  # a persistent id
        b"\x80\x02\x82\x01.",  # an extension code
        b"(itorch.distributed.checkpoint.metadata\nMetadata\n.",
        b"\x80\x05\x97.",  # an out-of-band buffer
    ):
        with pytest.raises(CheckpointError, match="refused"):
            loads(data, "file")


HUGE = (1 << 31) - 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x02X" + struct.pack("<I", HUGE) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", HUGE) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x.",
        b"\x80\x02Nr" + struct.pack("<I", HUGE) + b".",
        b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 1000 + b"t\x85R.",
        b"I" + b"9" * 5000 + b"\n.",
        b"\x80\x04" + b"]" * (1 << 21) + b".",
    ],
    ids=range(10),
)
def test_announced_sizes_allocate_nothing(data):
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"(refused|damaged) at byte"):
        loads(data, "file")
    assert time.process_time() - start < 20  # of the CPU: other work on the machine must not count


def test_data_beyond_the_limit_are_not_looked_at():
    class Long(bytes):
        def __len__(self):
            return LIMIT + 1

    with pytest.raises(CheckpointError, match="are refused"):
        loads(Long(b"."), "file")


def test_deep_nesting_is_no_recursion():
    deep = 200_000
    assert deep > sys.getrecursionlimit()
    found = loads(b"\x80\x04" + b"]" * deep + b"a" * (deep - 1) + b".", "file")
    assert 1 == len(found)
    del found
    assert () == loads(b"\x80\x04)" + b"\x85" * deep + b"0).", "file")
    with pytest.raises(CheckpointError, match="as key of a dict"):
        loads(b"\x80\x04})" + b"\x85" * deep + b"Ns.", "file")


OPCODES = b"".join(op.code.encode("latin-1") for op in pickletools.opcodes)
METADATA = (
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nq\x00)\x81q\x01}q\x02(X\x01\x00\x00\x00aK\x01X\x01\x00\x00"
    b"\x00bctorch\nfloat32\nq\x03ub."
)


def read(data):
    """Anything but a value or a `CheckpointError` is a fault."""
    try:
        loads(data, "file")
    except CheckpointError as error:
        assert str(error).startswith("file: ")


@settings(max_examples=500)
@given(st.binary(max_size=200) | st.lists(st.sampled_from(OPCODES), max_size=200).map(bytes))
def test_any_bytes_are_read_or_refused(data):
    read(data)
    read(b"\x80\x04" + data)


@settings(max_examples=500)
@given(st.integers(0, len(METADATA)), st.binary(max_size=12), st.integers(0, 12))
def test_damaged_metadata_are_read_or_refused(at, more, gone):
    read(METADATA[:at] + more + METADATA[at + gone :])
