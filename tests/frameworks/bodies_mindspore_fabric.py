"""Rank bodies of test_mindspore_fabric.py."""

from __future__ import annotations

import time

import mindspore as ms
import numpy as np
from mindspore.mint import distributed as dist

import hyperstate as hs
from hyperstate.backend import load
from hyperstate.testing.cases.tools import BROADCAST, FULL, build, on_root
from hyperstate_mindspore import job
from hyperstate_mindspore.fabric import TAG_BYTES, Buffer

LIMIT_S = 3.0


def raised(error, call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except error as found:
        return str(found)
    raise AssertionError(f"no {error.__name__}")


def filled(nbytes, value):
    made = Buffer(nbytes)
    made.data[...] = value
    return made


def exchange_all(kit, nbytes, rounds=1):
    """Every rank sends `nbytes` of its number to every other; all rounds are under way at once."""
    fabric = load("mindspore").fabric
    peers = [rank for rank in range(kit.world) if rank != kit.rank]
    waiting = []
    for number in range(rounds):
        sends = [(peer, filled(nbytes, 10 * number + kit.rank)) for peer in peers]
        recvs = [(peer, Buffer(nbytes)) for peer in peers]
        waiting.append((number, recvs, fabric.exchange(sends, recvs)))
    for number, recvs, pending in waiting:
        pending.wait(30.0)
        for peer, buffer in recvs:
            assert [10 * number + peer] * nbytes == buffer.data.tolist(), (number, peer)


def several_rounds_are_under_way_at_once(kit, nbytes):
    exchange_all(kit, nbytes, rounds=3)
    exchange_all(kit, nbytes)


def a_slow_peer_is_waited_for(kit):
    if kit.rank == 0:
        time.sleep(3.0)
    exchange_all(kit, 1000)


def a_stray_message_of_the_script_is_an_error(kit, sent):
    """`sent`: the bytes of a message that rank 0 sends on the world group, where nobody receives it."""
    model = build(kit, "fsdp")
    given = on_root(kit, hs.get_model_state_dict(build(kit, "plain"), options=FULL))
    hs.set_model_state_dict(model, given, options=BROADCAST)
    if kit.rank == 0:
        job.enable_messages()
        dist.isend(ms.from_numpy(np.full(TAG_BYTES + sent, 7, np.uint8)), dst=1)
    text = raised(hs.TransferError, hs.set_model_state_dict, model, given, options=BROADCAST, timeout=LIMIT_S)
    again = raised(hs.TransferError, hs.set_model_state_dict, model, given, options=BROADCAST, timeout=LIMIT_S)
    return [text, again]


def what_the_script_does_wrong_is_not_taken_for_a_lost_peer(kit):
    """An operation of the script's own that fails behind its back is raised as what it is, and then it is over."""
    model = build(kit, "fsdp")
    dist.all_reduce(ms.from_numpy(np.ones(3, np.float64)))  # there is no such kernel, and nobody has noticed yet
    text = raised(Exception, hs.get_model_state_dict, model, options=FULL, timeout=LIMIT_S)
    hs.get_model_state_dict(model, options=FULL, timeout=LIMIT_S)
    return text


def keys_come_and_go(kit):
    control = load("mindspore").control
    start = time.monotonic()
    assert control.get("nowhere", 0.2) is None
    assert 0.2 <= time.monotonic() - start < 2.0
    control.set(f"mine/{kit.rank}", bytes([kit.rank, 0, 255]))
    for rank in range(kit.world):
        assert bytes([rank, 0, 255]) == control.get(f"mine/{rank}", 10.0)
    control.add("met", 1)
    while control.add("met", 0) < kit.world:
        time.sleep(0.01)
    control.delete(f"mine/{kit.rank}")
    control.add("left", 1)
    while control.add("left", 0) < kit.world:
        time.sleep(0.01)
    assert [None] * kit.world == [control.get(f"mine/{rank}", 0.0) for rank in range(kit.world)]
    control.set("empty", b"")
    assert b"" == control.get("empty", 1.0)
    assert control.memory() is control.memory()


def the_keeper_of_the_store_is_missed_at_each_call(kit):
    control = load("mindspore").control
    control.add("ready", 1)
    while control.add("ready", 0) < kit.world:
        time.sleep(0.01)
    if kit.rank == 0:
        while not control.add("seen", 0):  # until the other has left the loop above
            time.sleep(0.01)
        time.sleep(0.5)
        kit.die()
    control.add("seen", 1)
    time.sleep(2.0)
    texts = [
        raised(hs.TransferError, control.set, "key", b"value"),
        raised(hs.TransferError, control.get, "key", 1.0),
        raised(hs.TransferError, control.add, "key", 1),
    ]
    assert all("rank 0" in text for text in texts), texts
