"""What setters do with values."""

from __future__ import annotations

import hyperstate as hs
from hyperstate.testing.cases.tools import (
    BROADCAST,
    FULL,
    ON_HOST,
    ON_ROOT,
    SHAPES,
    build,
    build_stepped,
    case,
    close,
    live,
    on_root,
    shown,
    state_of,
    tensor,
    truth,
)
from hyperstate.testing.kit import Kit

TOPOLOGIES = ("plain", "fsdp", "hsdp", "grid", "columns", "copies", "mix")
SHARDED = ("fsdp", "hsdp", "grid", "columns", "copies", "mix")


# -- forms of the dict -------------------------------------------------------------------------------


@case(1, topology=["plain"])
@case(2, topology=["fsdp", "grid"])
@case(4, topology=TOPOLOGIES)
def full_values_on_every_rank_travel_nowhere(kit: Kit, topology: str) -> None:
    model, optimizer = build_stepped(kit, topology)
    source, stepper = build_stepped(kit, "plain", steps=3, start=500.0)
    model_dict, optim_dict = hs.get_state_dict(source, stepper, options=FULL)
    expected = live(kit, *build_stepped(kit, topology, steps=3, start=500.0))
    kit.traffic(reset=True)
    result = hs.set_state_dict(model, optimizer, model_state_dict=model_dict, optim_state_dict=optim_dict, options=FULL)
    assert not any(kit.traffic().values())
    assert ([], [], []) == tuple(map(list, result))
    full_model, full_optim = hs.get_state_dict(model, optimizer, options=FULL)
    close(kit, model_dict, full_model)
    close(kit, optim_dict["state"], full_optim["state"])
    assert expected["groups"] == live(kit, model, optimizer)["groups"]


@case(1, topology=["plain"])
@case(2, topology=["fsdp", "plain"])
@case(4, topology=["grid"])
def live_values_may_be_passed_under_other_names(kit: Kit, topology: str) -> None:
    """The target's own values, two of a shape exchanged: each is read before it is written over."""
    shapes = {"left.weight": (4, 6), "right.weight": (4, 6)}
    model = build(kit, topology, shapes=shapes)
    optimizer = kit.optimizer(model)
    kit.fake_step(model, optimizer, seed=1)
    before = hs.get_state_dict(model, optimizer, options=FULL)
    names = dict(zip(shapes, reversed(shapes), strict=True))
    mine = hs.get_state_dict(model, optimizer)
    values = {names[fqn]: value for fqn, value in mine[0].items()}
    state = {names[fqn]: slots for fqn, slots in mine[1]["state"].items()}
    hs.set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict={**mine[1], "state": state})
    after = hs.get_state_dict(model, optimizer, options=FULL)
    close(kit, before[0], {fqn: after[0][names[fqn]] for fqn in shapes})
    close(kit, before[1]["state"], {fqn: after[1]["state"][names[fqn]] for fqn in shapes})


@case(1, topology=["plain"], trained=[False, True])
@case(2, topology=["fsdp", "grid", "plain"], trained=[False, True])
@case(4, topology=SHARDED, trained=[False, True])
def the_root_broadcasts_and_each_rank_receives_its_own_shard_alone(kit: Kit, topology: str, trained: bool) -> None:
    source, stepper = build_stepped(kit, "plain", steps=3, start=500.0)
    values, state = truth(kit, source, stepper)
    given = hs.get_state_dict(source, stepper, options=FULL)
    model, optimizer = build_stepped(kit, topology, steps=1 if trained else 0)
    kit.traffic(reset=True)
    hs.set_state_dict(
        model,
        optimizer,
        model_state_dict=on_root(kit, given[0]),
        optim_state_dict=on_root(kit, given[1]),
        options=BROADCAST,
    )
    received = kit.traffic()["bytes_received"]
    # Three tensors of float32 per parameter; entries of a packed message start at multiples of 16 bytes.
    own = [len(kit.content(param).data) // 2 for param in kit.named(model).values()]
    assert received == 0 if kit.rank == 0 else 3 * sum(own) <= received <= 3 * sum(own) + 16 * 3 * len(own)
    full_model, full_optim = hs.get_state_dict(model, optimizer, options=FULL)
    close(kit, values, full_model)
    close(kit, state, full_optim["state"])
    kit.fake_step(model, optimizer, seed=7)
    kit.fake_step(source, stepper, seed=7)
    close(kit, truth(kit, source, stepper)[0], hs.get_model_state_dict(model, options=FULL))


@case(2, nothing=["none", "empty"])
def ranks_that_pass_nothing_may_pass_none_or_an_empty_dict(kit: Kit, nothing: str) -> None:
    """S27: groups arrive too."""
    source, stepper = build_stepped(kit, "plain")
    kit.groups(stepper)[0].update(lr=0.125, initial_lr=0.25)
    given = hs.get_state_dict(source, stepper, options=FULL)
    passed = given if kit.rank == 0 else (None, None) if nothing == "none" else ({}, {})
    model = build(kit, "fsdp")
    optimizer = kit.optimizer(model)
    hs.set_state_dict(model, optimizer, model_state_dict=passed[0], optim_state_dict=passed[1], options=BROADCAST)
    assert (0.125, 0.25) == (kit.groups(optimizer)[0]["lr"], kit.groups(optimizer)[0]["initial_lr"])


@case(2, topology=["fsdp"], kind=["adam", "local", "momentum"])
@case(4, topology=SHARDED, kind=["adam", "local"])
def sharded_values_of_the_same_layout_are_taken_as_they_are(kit: Kit, topology: str, kind: str) -> None:
    model, optimizer = build_stepped(kit, topology, kind)
    expected = live(kit, model, optimizer)
    with_host = hs.get_state_dict(model, optimizer, options=ON_HOST)
    other, fresh = build_stepped(kit, topology, kind, steps=3, start=77.0)
    kit.traffic(reset=True)
    hs.set_state_dict(other, fresh, model_state_dict=with_host[0], optim_state_dict=with_host[1])
    assert not any(kit.traffic().values())
    assert expected == live(kit, other, fresh)


@case(2, source=["fsdp", "grid"], target=["fsdp", "grid", "copies"])
@case(4, source=SHARDED, target=SHARDED)
def sharded_values_of_another_layout_are_redistributed(kit: Kit, source: str, target: str) -> None:
    first, stepper = build_stepped(kit, source, steps=2, start=10.0)
    if source == "mix" or target == "mix":  # a plain value under a sharded target needs the full form
        shared = [fqn for fqn in SHAPES if kit.is_sharded(kit.named(first)[fqn])]
        shared = [f for f in shared if kit.is_sharded(kit.named(build(kit, target))[f])]
    else:
        shared = list(SHAPES)
    model = build(kit, target)
    optimizer = kit.optimizer(model)
    model_dict, optim_dict = hs.get_state_dict(first, stepper)
    model_dict = {fqn: model_dict[fqn] for fqn in shared}
    (group,) = optim_dict["param_groups"]
    optim_dict = {
        "state": {fqn: optim_dict["state"][fqn] for fqn in shared},
        "param_groups": [{**group, "params": shared}],
    }
    hs.set_state_dict(
        model,
        optimizer,
        model_state_dict=model_dict,
        optim_state_dict=optim_dict,
        options=hs.StateDictOptions(strict=shared == list(SHAPES)),
        ranks=range(kit.world),
    )
    expected_model, expected = build_stepped(kit, target, steps=2, start=10.0)
    held, wanted = live(kit, model, optimizer), live(kit, expected_model, expected)
    values, state = truth(kit, *build_stepped(kit, "plain", steps=2, start=10.0))
    actual_model, actual = hs.get_state_dict(model, optimizer, options=FULL, ranks=range(kit.world))
    close(kit, {f: values[f] for f in shared}, {f: actual_model[f] for f in shared})
    close(kit, {f: state[f] for f in shared}, actual["state"])
    for fqn in shared:  # the layouts are the target's
        for key, value in held["state"][fqn].items():
            assert wanted["state"][fqn][key][:3] == value[:3], (fqn, key)


# -- identity and aliasing ---------------------------------------------------------------------------


@case(1, topology=["plain"], kind=["adam"])
@case(2, topology=["fsdp"], kind=["adam", "local"])
def objects_keep_their_identity(kit: Kit, topology: str, kind: str) -> None:
    """Parameters, state containers, groups and tensors stay the same: references and captured graphs stay valid."""
    source, stepper = build_stepped(kit, "plain", kind, steps=3, start=50.0)
    given = hs.get_state_dict(source, stepper, options=FULL)
    model, optimizer = build_stepped(kit, topology, kind, steps=1)
    named, groups = kit.named(model), kit.groups(optimizer)
    slots = {fqn: kit.state(optimizer, param) for fqn, param in named.items()}
    tensors = {(f, k): v for f, s in slots.items() for k, v in s.items() if kit.is_tensor(v)}
    fields = list(groups)
    hs.set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=FULL)
    assert all(value is kit.named(model)[fqn] for fqn, value in named.items())
    assert groups is kit.groups(optimizer)
    assert all(old is new for old, new in zip(fields, kit.groups(optimizer), strict=True))
    for fqn, param in named.items():
        assert slots[fqn] is kit.state(optimizer, param)
    for (fqn, key), value in tensors.items():
        assert value is slots[fqn][key], (fqn, key)


@case(1, topology=["plain"], form=["full"])
@case(2, topology=["fsdp"], form=["full", "broadcast", "sharded"])
def the_callers_dict_is_neither_changed_nor_aliased(kit: Kit, topology: str, form: str) -> None:
    """S20: one dict serves two targets, and training them leaves it as it was."""
    source, stepper = build_stepped(kit, topology if form == "sharded" else "plain", steps=2, start=50.0)
    options = None if form == "sharded" else FULL
    model_dict, optim_dict = hs.get_state_dict(source, stepper, options=options or ON_HOST)
    optim_dict["state"]["dense.bias"]["extra"] = {"list": [1, (2, tensor(kit, [[2.0]]))]}
    optim_dict["param_groups"][0]["table"] = [1, [2]]
    before = shown(kit, [model_dict, optim_dict])
    objects = {fqn: id(value) for fqn, value in model_dict.items()}
    for _ in range(2):
        model = build(kit, topology)
        optimizer = kit.optimizer(model)
        root = form != "broadcast" or kit.rank == 0
        hs.set_state_dict(
            model,
            optimizer,
            model_state_dict=model_dict if root else {},
            optim_state_dict=optim_dict if root else {},
            options=BROADCAST if form == "broadcast" else options,
        )
        kit.groups(optimizer)[0]["table"][1].append(3)
        state_of(kit, model, optimizer, "dense.bias")["extra"]["list"].append(3)
        kit.fake_step(model, optimizer, seed=5)
        assert before == shown(kit, [model_dict, optim_dict])
        assert objects == {fqn: id(value) for fqn, value in model_dict.items()}


# -- trained for real --------------------------------------------------------------------------------


@case(2, kind=["adam", "local"])
@case(4, kind=["adam"], hybrid=[True])
def training_goes_on_as_if_nothing_had_happened(kit: Kit, kind: str, hybrid: bool = False) -> None:
    """Get on the root, broadcast into a fresh model and optimizer, train both on: bit for bit the same."""
    mesh = kit.mesh((2, 2), ("outer", "inner")) if hybrid else kit.mesh((kit.world,), ("dp",))
    model = kit.shard(kit.model(), mesh)
    optimizer = kit.optimizer(model, kind)
    kit.train(model, optimizer, 2)
    given = hs.get_state_dict(model, optimizer, options=ON_ROOT)
    other = kit.shard(kit.model(seed=5), mesh)
    fresh = kit.optimizer(other, kind, lr=0.5)
    form = "local" if kind == "local" else None
    hs.set_state_dict(
        other, fresh, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST, state_form=form
    )
    assert live(kit, model, optimizer) == live(kit, other, fresh)
    for each, stepper in ((model, optimizer), (other, fresh)):
        kit.train(each, stepper, 2, first=2)
    assert live(kit, model, optimizer) == live(kit, other, fresh)


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def a_pending_gradient_or_a_frozen_parameter_changes_nothing(kit: Kit, topology: str) -> None:
    """S03, S04: the state of a parameter that was trained and then frozen is restored."""
    model, optimizer = build_stepped(kit, topology)
    kit.freeze(model, "odd.weight")
    given = hs.get_optim_state_dict(model, optimizer, options=FULL)
    other = build(kit, topology)
    kit.freeze(other, "odd.weight")
    fresh = kit.optimizer(other)
    hs.set_optim_state_dict(other, fresh, given, options=FULL)
    assert live(kit, model, optimizer)["state"] == live(kit, other, fresh)["state"]
