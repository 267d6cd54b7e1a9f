"""Laws that hold whatever the layouts: there and back, composition, and what may travel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import (
    BROADCAST,
    FULL,
    ON_ROOT,
    build,
    build_stepped,
    case,
    close,
    grid,
    live,
    on_root,
    placing,
    shown,
    tensor,
    truth,
)
from hyperstate.testing.kit import Kit

BUCKET_VARIABLE = "HYPERSTATE_BUCKET_MIB"
ALIGNMENT = 16
"""Entries of a packed message start at multiples of this many bytes."""


def model_bytes(kit: Kit, model: Any) -> int:
    """Bytes of this rank's parameters."""
    return sum(len(kit.content(param).data) // 2 for param in kit.named(model).values())


# -- there and back ----------------------------------------------------------------------------------


@case(2, topology=["fsdp", "grid", "copies"], form=["sharded", "host", "full", "root"])
@case(4, topology=["fsdp", "hsdp", "grid", "columns", "copies", "mix"], form=["sharded", "host", "full", "root"])
def setting_what_was_got_changes_nothing(kit: Kit, topology: str, form: str) -> None:
    options = {"host": hs.StateDictOptions(cpu_offload=True), "full": FULL, "root": ON_ROOT}.get(form)
    model, optimizer = build_stepped(kit, topology)
    before = live(kit, model, optimizer)
    given = hs.get_state_dict(model, optimizer, options=options)
    setting = {"full": FULL, "root": BROADCAST}.get(form)
    for _ in range(2):
        hs.set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=setting)
        assert before == live(kit, model, optimizer)
        assert form == "sharded" or shown(kit, list(given)) == shown(
            kit, list(hs.get_state_dict(model, optimizer, options=options))
        )


@case(4, way=[("fsdp", "grid", "hsdp"), ("grid", "columns", "fsdp"), ("hsdp", "copies", "columns")])
def redistribution_by_way_of_another_layout_is_redistribution(kit: Kit, way: list[str]) -> None:
    first, between, last = way

    def load(topology: str, given: Any) -> tuple[Any, Any]:
        model = build(kit, topology, start=900.0)
        optimizer = kit.optimizer(model)
        hs.set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1])
        return model, optimizer

    given = hs.get_state_dict(*build_stepped(kit, first))
    assert live(kit, *load(last, given)) == live(kit, *load(last, hs.get_state_dict(*load(between, given))))


@case(4)
def a_run_goes_on_through_other_topologies(kit: Kit) -> None:
    """S42: 4 FSDP -> 2 x 2 HSDP -> 2 ranks -> one -> 4 ranks, a step in each; never different from one process."""
    pair = kit.mesh((2, 2), ("outer", "inner"))["inner"]
    alone, stepper = build_stepped(kit, "plain", steps=1)
    model, optimizer = build_stepped(kit, "fsdp", steps=1)
    for number, topology in enumerate(("hsdp", "pair", "plain", "fsdp"), start=1):
        here = kit.rank < {"pair": 2, "plain": 1}.get(topology, 4)
        if topology == "pair":
            shapes = {fqn: kit.content(param).shape for fqn, param in kit.named(alone).items()}
            fresh = kit.with_parameters({f: tensor(kit, grid(s), (pair, ("S0",))) for f, s in shapes.items()})
        else:
            fresh = build(kit, topology, start=900.0)
        before = {"pair": range(4), "plain": range(2), "fsdp": range(1)}.get(topology)
        leaving = before is None or kit.rank in before
        given = hs.get_state_dict(model, optimizer, options=ON_ROOT, ranks=before) if leaving else ({}, {})
        model, optimizer = fresh, kit.optimizer(fresh)
        if here:
            ranks = {"pair": range(2), "plain": range(1)}.get(topology, range(4))
            hs.set_state_dict(
                model,
                optimizer,
                model_state_dict=given[0],
                optim_state_dict=given[1],
                options=BROADCAST,
                ranks=ranks,
            )
        for each in ((alone, stepper), (model, optimizer)):
            kit.fake_step(*each, seed=number)
        if here:
            values, state = truth(kit, alone, stepper)
            full = hs.get_state_dict(model, optimizer, options=FULL, ranks=None if topology != "plain" else range(1))
            close(kit, values, full[0])
            close(kit, state, full[1]["state"])


# -- what travels ------------------------------------------------------------------------------------


@case(2, 4)
def only_the_root_receives_what_it_does_not_keep(kit: Kit) -> None:
    model, optimizer = build_stepped(kit, "fsdp")
    own, whole = model_bytes(kit, model), model_bytes(kit, build(kit, "plain"))
    slack = ALIGNMENT * 3 * len(kit.named(model)) * kit.world
    kit.traffic(reset=True)
    hs.get_state_dict(model, optimizer, options=ON_ROOT)
    received = kit.traffic(reset=True)["bytes_received"]
    assert received == 0 if kit.rank else 3 * (whole - own) <= received <= 3 * (whole - own) + slack
    hs.get_state_dict(model, optimizer, options=FULL)
    received = kit.traffic(reset=True)["bytes_received"]
    assert 3 * (whole - own) <= received <= 3 * (whole - own) + slack


@case(4)
def each_region_leaves_the_source_once_however_many_replicas(kit: Kit) -> None:
    """Broadcast to HSDP: the first replica group receives, and passes on to the other."""
    model = build(kit, "hsdp", start=900.0)
    source = build(kit, "plain")
    given = on_root(kit, hs.get_model_state_dict(source, options=FULL))
    whole = model_bytes(kit, source)
    kit.traffic(reset=True)
    hs.set_model_state_dict(model, given, options=BROADCAST)
    counts = kit.traffic()
    own, slack = model_bytes(kit, model), ALIGNMENT * 2 * len(kit.named(model))
    assert counts["bytes_received"] <= (own + slack if kit.rank else 0)
    assert counts["bytes_sent"] <= whole + slack
    assert live(kit, build(kit, "hsdp")) == live(kit, model)


@case(2, 4)
def the_number_of_messages_does_not_grow_with_the_number_of_tensors(kit: Kit) -> None:
    """S44: 400 tensors in at most 4 exchanges per call."""
    shapes = {f"layer{n}.weight": (5, 3) for n in range(400)}
    source = build(kit, "plain", shapes=shapes, scale=15.0)
    model = build(kit, "fsdp", shapes=shapes, start=7.0)
    given = hs.get_model_state_dict(source, options=FULL)
    kit.traffic(reset=True)
    calls: list[Any] = [
        lambda: hs.set_model_state_dict(model, on_root(kit, given), options=BROADCAST),
        lambda: hs.get_model_state_dict(model, options=FULL),
        lambda: hs.get_model_state_dict(model, options=ON_ROOT),
    ]
    for call in calls:
        result = call()
        counts = kit.traffic(reset=True)
        assert counts["exchanges"] <= 4
        assert counts["messages"] <= 4 * (kit.world - 1)
    assert kit.rank or shown(kit, given) == shown(kit, result)


@contextmanager
def _bucket(kit: Kit, mib: str) -> Iterator[None]:
    """The user's bucket size, on all ranks; ranks that are threads share one environment."""
    before = os.environ.get(BUCKET_VARIABLE)
    os.environ[BUCKET_VARIABLE] = mib
    model = build(kit, "fsdp", shapes={"w": (4, 1)})
    hs.get_model_state_dict(model, options=FULL)  # all ranks are here
    try:
        yield
    finally:
        hs.set_model_state_dict(model, {"w": tensor(kit, grid((4, 1)))}, options=FULL)  # all ranks are done
        if before is None:
            os.environ.pop(BUCKET_VARIABLE, None)
        else:
            os.environ[BUCKET_VARIABLE] = before


@case(2, 4, shape=[(300, 50), (40, 40)])
def the_number_of_exchanges_grows_with_bytes_over_the_bucket(kit: Kit, shape: list[int]) -> None:
    """Tensors larger than a bucket and smaller ones: the values arrive, in no more rounds than the bytes need."""
    mib = 0.125
    shapes = {f"w{n}": tuple(shape) for n in range(max(1, 400_000 // (4 * shape[0] * shape[1])))}
    places = placing(kit, "fsdp", shapes)
    with _bucket(kit, str(mib)):
        full = {fqn: tensor(kit, grid(shape, 3.0 * n)) for n, fqn in enumerate(shapes)}
        model = kit.with_parameters({fqn: tensor(kit, grid(shape), places[fqn]) for fqn in shapes})
        kit.traffic(reset=True)
        hs.set_model_state_dict(model, on_root(kit, full), options=BROADCAST)
        counts = kit.traffic(reset=True)
        moved = max(counts["bytes_sent"], counts["bytes_received"])
        # A rank's messages of one round fit into a bucket, but no message is smaller than 64 KiB.
        assert counts["exchanges"] <= 4 + moved / (mib * 2**20) * (kit.world - 1)
        assert counts["exchanges"] >= counts["bytes_received"] / (mib * 2**20 * kit.world)
        back = hs.get_model_state_dict(model, options=FULL)
        assert shown(kit, full) == shown(kit, back)
