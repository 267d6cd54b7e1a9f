"""What getters return, on every topology, against unsharded values."""

from __future__ import annotations

from math import prod
from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import (
    BROADCAST,
    FLAT,
    FULL,
    FULL_FLAT,
    ON_HOST,
    ON_ROOT,
    SHAPES,
    build,
    build_stepped,
    case,
    close,
    grid,
    live,
    placing,
    refused,
    shown,
    tensor,
    truth,
)
from hyperstate.testing.kit import Kit

TOPOLOGIES = ("plain", "fsdp", "hsdp", "grid", "columns", "copies", "mix")


# -- full --------------------------------------------------------------------------------------------


@case(1, topology=["plain"])
@case(2, topology=["fsdp", "copies"])
@case(4, topology=TOPOLOGIES)
def full_model_values_are_the_unsharded_ones_on_every_rank(kit: Kit, topology: str) -> Any:
    expected = shown(kit, {fqn: tensor(kit, grid(shape, 1000.0 * n)) for n, (fqn, shape) in enumerate(SHAPES.items())})
    model = build(kit, topology)
    actual = hs.get_model_state_dict(model, options=FULL)
    assert list(kit.named(model)) == list(actual)
    assert expected == shown(kit, actual)


@case(1, topology=["plain"], kind=["adam"])
@case(2, topology=["fsdp"], kind=["adam", "local"])
@case(4, topology=TOPOLOGIES, kind=["adam", "local"])
@case(4, topology=["fsdp", "mix"], kind=["sgd", "momentum"])
def full_optimizer_values_are_the_unsharded_ones_on_every_rank(kit: Kit, topology: str, kind: str) -> None:
    values, state = truth(kit, *build_stepped(kit, "plain", kind))
    model, optimizer = build_stepped(kit, topology, kind)
    actual = hs.get_optim_state_dict(model, optimizer, options=FULL)
    close(kit, state, actual["state"])
    assert [list(SHAPES)] == [group["params"] for group in actual["param_groups"]]
    close(kit, values, hs.get_model_state_dict(model, options=FULL))


@case(2, 4, kind=["adam", "local"])
@case(4, kind=["adam"], hybrid=[True])
def a_model_that_was_sharded_and_trained_gives_the_values_of_unsharded_training(
    kit: Kit, kind: str, hybrid: bool = False
) -> None:
    alone = kit.model()
    stepper = kit.optimizer(alone, kind)
    kit.train(alone, stepper, 3)
    values, state = truth(kit, alone, stepper)
    mesh = kit.mesh((2, 2), ("outer", "inner")) if hybrid else kit.mesh((kit.world,), ("dp",))
    model = kit.shard(kit.model(), mesh)
    optimizer = kit.optimizer(model, kind)
    kit.train(model, optimizer, 3)
    model_dict, optim_dict = hs.get_state_dict(model, optimizer, options=FULL)
    close(kit, values, model_dict, tolerance=1e-4)
    close(kit, state, optim_dict["state"], tolerance=1e-4)


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
@case(4, topology=TOPOLOGIES)
def full_values_on_the_host_exist_on_the_root_rank_only(kit: Kit, topology: str) -> None:
    values, state = truth(kit, *build_stepped(kit, "plain"))
    model, optimizer = build_stepped(kit, topology)
    model_dict, optim_dict = hs.get_state_dict(model, optimizer, options=ON_ROOT)
    if kit.rank:
        assert ({}, {}) == (model_dict, optim_dict)
        return
    close(kit, values, model_dict)
    close(kit, state, optim_dict["state"])
    assert all(map(kit.on_host, model_dict.values()))
    assert [list(SHAPES)] == [group["params"] for group in optim_dict["param_groups"]]


@case(4)
def each_pipeline_stage_keeps_its_entries_on_its_own_root(kit: Kit) -> None:
    """S34: what stages without rank 0 own is not thrown away, and their groups list what they root."""
    table = kit.mesh((2, 2), ("pp", "dp"))
    stage = kit.rank // 2
    names = [f"layers.{stage}.weight", f"layers.{stage}.bias"]
    full = {names[0]: grid((5, 3), 100.0 * stage), names[1]: grid((5,), 100.0 * stage + 50)}
    model = kit.with_parameters({fqn: tensor(kit, v, (table["dp"], ("S0",))) for fqn, v in full.items()})
    optimizer = kit.optimizer(model, "momentum")
    kit.fake_step(model, optimizer)
    before = {fqn: tensor(kit, v) for fqn, v in full.items()}
    model_dict, optim_dict = hs.get_state_dict(model, optimizer, options=ON_ROOT)
    if kit.rank % 2:
        assert ({}, {}) == (model_dict, optim_dict)
    else:
        assert list(before) == list(model_dict) == list(optim_dict["state"])
        assert [names] == [group["params"] for group in optim_dict["param_groups"]]
        assert [(5, 3), (5,)] == [kit.content(value).shape for value in model_dict.values()]


@case(4)
def a_name_on_several_meshes_appears_once_on_the_lowest_rank(kit: Kit) -> None:
    """A LayerNorm that both stages hold: rank 0 roots it, rank 2 roots only what is its own."""
    dp = kit.mesh((2, 2), ("pp", "dp"))["dp"]
    own = f"stage{kit.rank // 2}.weight"
    values = {"norm.weight": grid((6,)), own: grid((4, 2), 10.0)}
    model = kit.with_parameters({fqn: tensor(kit, v, (dp, ("S0",))) for fqn, v in values.items()})
    optimizer = kit.optimizer(model)
    kit.fake_step(model, optimizer)
    model_dict, optim_dict = hs.get_state_dict(model, optimizer, options=ON_ROOT, ranks=range(4))
    expected = {0: ["norm.weight", "stage0.weight"], 2: ["stage1.weight"]}.get(kit.rank, [])
    assert expected == sorted(model_dict)
    assert expected == sorted(optim_dict.get("state", {}))
    assert expected == sorted(fqn for group in optim_dict.get("param_groups", []) for fqn in group["params"])


@case(4)
def one_name_with_two_contents_has_no_flat_form(kit: Kit) -> Any:
    """Two stages that call different tensors by one name would overwrite each other in a flat dict."""
    dp = kit.mesh((2, 2), ("pp", "dp"))["dp"]
    flat = hs.StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    texts = []
    for apart in (0, 1):
        model = kit.with_parameters({"norm.weight": tensor(kit, grid((6,)), (dp, ("S0",)))})
        optimizer = kit.optimizer(model)
        kit.fake_step(model, optimizer, seed=apart * (kit.rank // 2))
        if apart:
            texts.append(
                refused(hs.DisagreementError, hs.get_optim_state_dict, model, optimizer, options=flat, ranks=range(4))
            )
        else:
            found = hs.get_optim_state_dict(model, optimizer, options=flat, ranks=range(4))
            assert (kit.rank == 0) == ("state.norm.weight.exp_avg" in found)
    assert "norm.weight" in texts[0] and "ranks" in texts[0]
    return texts


@case(4)
def parameters_may_live_on_different_meshes(kit: Kit) -> None:
    """S33: dense on all ranks, experts on half a mesh, one tensor sharded in two dims, a plain gate; there and back."""
    line, table = kit.mesh((4,), ("dp",)), kit.mesh((2, 2), ("outer", "ep"))
    values = {"dense": grid((8, 4)), "experts": grid((4, 3, 3)), "table": grid((5, 7)), "gate": grid((3,))}
    places: dict[str, Any] = {
        "dense": (line, ("S0",)),
        "experts": (table["ep"], ("S0",)),
        "table": (table, ("S0", "S1")),
        "gate": (None, ()),
    }
    model = kit.with_parameters({fqn: tensor(kit, v, places[fqn]) for fqn, v in values.items()})
    optimizer = kit.optimizer(model)
    alone = kit.with_parameters({fqn: tensor(kit, v) for fqn, v in values.items()})
    stepper = kit.optimizer(alone)
    for each in ((model, optimizer), (alone, stepper)):
        kit.fake_step(*each)
    expected, state = truth(kit, alone, stepper)
    before = live(kit, model, optimizer)
    for options, way in ((FULL, FULL), (ON_ROOT, BROADCAST), (ON_HOST, None)):
        given = hs.get_state_dict(model, optimizer, options=options)
        if options is FULL or (options is ON_ROOT and kit.rank == 0):
            close(kit, expected, given[0])
            close(kit, state, given[1]["state"])
        other = kit.with_parameters({f: tensor(kit, v, places[f]) for f, v in values.items()})
        fresh = kit.optimizer(other)
        hs.set_state_dict(other, fresh, model_state_dict=given[0], optim_state_dict=given[1], options=way)
        assert before == live(kit, other, fresh)


# -- sharded -----------------------------------------------------------------------------------------


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
@case(4, topology=TOPOLOGIES)
def the_sharded_form_needs_no_communication_and_keeps_layouts(kit: Kit, topology: str) -> None:
    model = build(kit, topology)
    places = placing(kit, topology)
    expected = {
        fqn: shown(kit, tensor(kit, grid(shape, 1000.0 * n), places[fqn]))
        for n, (fqn, shape) in enumerate(SHAPES.items())
    }
    kit.traffic(reset=True)
    for options in (None, ON_HOST):
        actual = hs.get_model_state_dict(model, options=options)
        assert expected == {fqn: shown(kit, value) for fqn, value in actual.items()}
        assert all(map(kit.on_host, actual.values())) or options is None
    assert not any(kit.traffic().values())


@case(2, topology=["fsdp"], kind=["adam", "local"])
@case(4, topology=TOPOLOGIES, kind=["adam", "local"])
def sharded_optimizer_state_has_the_layout_of_its_parameter(kit: Kit, topology: str, kind: str) -> None:
    """Local tensors of a sharded parameter come back as sharded ones: a checkpoint never takes a part for the whole."""
    model, optimizer = build_stepped(kit, topology, kind)
    held = live(kit, model, optimizer)["state"]
    for options in (None, ON_HOST):
        actual = hs.get_optim_state_dict(model, optimizer, options=options)["state"]
        for fqn, param in kit.named(model).items():
            for key, value in actual[fqn].items():
                shape = kit.content(param).shape
                # A shape that a mean or a square statistic has too tells nothing: such a plain shard stays plain
                # (values.py). A replica is whole as it is.
                like_param = kit.is_tensor(value) and kit.content(value).shape == shape
                tells = kind != "local" or not (1 in shape or shape == shape[:1] * 2)
                if like_param and tells and prod(shape) != 1 and shape != SHAPES[fqn]:
                    assert kit.is_sharded(value), (fqn, key)
                assert held[fqn][type(key).__name__, key][1:] == shown(kit, value)[1:], (fqn, key)


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def the_default_form_is_live_and_the_others_are_snapshots(kit: Kit, topology: str) -> None:
    model, optimizer = build_stepped(kit, topology)
    live_dicts = hs.get_state_dict(model, optimizer)
    copies = [hs.get_state_dict(model, optimizer, options=options) for options in (ON_HOST, FULL, ON_ROOT)]
    before, kept = shown(kit, list(live_dicts)), shown(kit, [list(pair) for pair in copies])
    kit.fake_step(model, optimizer, seed=9)
    kit.groups(optimizer)[0]["lr"] = 7.0
    assert kept == shown(kit, [list(pair) for pair in copies])
    after = shown(kit, list(live_dicts))
    assert before != after
    assert after[1][0] == shown(kit, hs.get_model_state_dict(model))


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def writing_into_a_snapshot_or_its_groups_reaches_nothing(kit: Kit, topology: str) -> None:
    model, optimizer = build_stepped(kit, topology)
    before = live(kit, model, optimizer)
    for options in (None, ON_HOST, FULL):
        model_dict, optim_dict = hs.get_state_dict(model, optimizer, options=options)
        optim_dict["param_groups"][0]["lr"] = 5.0
        optim_dict["param_groups"][0]["params"].clear()
        optim_dict["state"]["dense.weight"]["more"] = 1
        del optim_dict["state"]["dense.bias"]
        model_dict.clear()
    assert before == live(kit, model, optimizer)


# -- what is listed ----------------------------------------------------------------------------------


@case(1, 2)
def parameters_without_state_are_left_out_of_state_and_stay_in_groups(kit: Kit) -> None:
    model = build(kit, "plain" if kit.world == 1 else "fsdp")
    optimizer = kit.optimizer(model)
    before = live(kit, model, optimizer)
    for options in (None, ON_HOST, FULL):
        actual = hs.get_optim_state_dict(model, optimizer, options=options)
        assert {} == actual["state"]
        assert [list(SHAPES)] == [group["params"] for group in actual["param_groups"]]
    assert before == live(kit, model, optimizer)  # reading did not make state (S01)


@case(1, 2)
def groups_come_with_every_field(kit: Kit) -> None:
    model = build(kit, "plain" if kit.world == 1 else "fsdp")
    names = list(SHAPES)
    fields = {"lr": 0.5, "initial_lr": 0.75, "note": "head", "tags": (1, [True, None])}
    optimizer = kit.optimizer(model, groups=[(names[2:], {}), (names[:2], fields)])
    for options in (None, ON_HOST, FULL):
        groups = hs.get_optim_state_dict(model, optimizer, options=options)["param_groups"]
        assert [names[2:], names[:2]] == [group["params"] for group in groups]
        expected = [{k: v for k, v in group.items() if k != "params"} for group in kit.groups(optimizer)]
        actual = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        assert shown(kit, expected) == shown(kit, actual)
        assert shown(kit, fields) == shown(kit, {key: actual[1][key] for key in fields})


@case(2, kind=["adam", "sgd"])
def the_flat_form_has_one_level(kit: Kit, kind: str) -> None:
    model, optimizer = build_stepped(kit, "fsdp", kind)
    for nested_options, flat_options in ((None, FLAT), (FULL, FULL_FLAT)):
        nested = hs.get_optim_state_dict(model, optimizer, options=nested_options)
        flat = hs.get_optim_state_dict(model, optimizer, options=flat_options)
        (group,) = nested["param_groups"]
        expected = {f"state.{fqn}.{k}": v for fqn, slots in nested["state"].items() for k, v in slots.items()}
        expected |= {f"param_group.{fqn}.{k}": v for fqn in group["params"] for k, v in group.items() if k != "params"}
        assert shown(kit, expected) == shown(kit, flat)
        assert shown(kit, nested) == shown(kit, hs.unflatten_optim_state_dict(flat, model, optimizer))
        assert shown(kit, flat) == shown(kit, hs.flatten_optim_state_dict(nested))


@case(1, 2)
def frozen_parameters_are_left_out_of_models_only(kit: Kit) -> None:
    """S04: the state of a parameter that was trained and then frozen is kept."""
    model, optimizer = build_stepped(kit, "plain" if kit.world == 1 else "fsdp")
    kit.freeze(model, "odd.weight")
    for full in (False, True):
        options = hs.StateDictOptions(full_state_dict=full, ignore_frozen_params=True)
        model_dict, optim_dict = hs.get_state_dict(model, optimizer, options=options)
        assert [fqn for fqn in SHAPES if fqn != "odd.weight"] == list(model_dict)
        assert set(SHAPES) == set(optim_dict["state"])


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def a_tied_parameter_has_all_names_in_the_model_and_one_in_the_optimizer(kit: Kit, topology: str) -> None:
    shared = tensor(kit, grid((4, 3)), placing(kit, topology, {"a": (4, 3)})["a"])
    model = kit.with_parameters({"embed.weight": shared, "head.weight": shared})
    optimizer = kit.optimizer(model)
    kit.fake_step(model, optimizer)
    for options in (None, ON_HOST, FULL):
        model_dict, optim_dict = hs.get_state_dict(model, optimizer, options=options)
        assert ["embed.weight", "head.weight"] == list(model_dict)
        assert shown(kit, model_dict["embed.weight"]) == shown(kit, model_dict["head.weight"])
        assert ["embed.weight"] == list(optim_dict["state"])
        assert [["embed.weight"]] == [group["params"] for group in optim_dict["param_groups"]]
    kit.freeze(model, "embed.weight")
    options = hs.StateDictOptions(ignore_frozen_params=True)
    assert {} == hs.get_model_state_dict(model, options=options)  # S35: under neither name


@case(2)
def models_and_optimizers_may_come_in_parts(kit: Kit) -> None:
    line = kit.mesh((2,), ("dp",))
    parts = [kit.with_parameters({f"part{i}.weight": tensor(kit, grid((4, 2), i), (line, ("S0",)))}) for i in (0, 1)]
    optimizers = [kit.optimizer(part, lr=0.1 * (i + 1)) for i, part in enumerate(parts)]
    for part, optimizer in zip(parts, optimizers, strict=True):
        kit.fake_step(part, optimizer)
    model_dict, optim_dict = hs.get_state_dict(parts, optimizers, options=FULL)
    assert ["part0.weight", "part1.weight"] == list(model_dict) == list(optim_dict["state"])
    assert [0.1, 0.2] == [group["lr"] for group in optim_dict["param_groups"]]
