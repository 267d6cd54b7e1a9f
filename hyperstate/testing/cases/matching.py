"""What fits and what does not: names, shapes and dtypes of the values that a setter is given."""

from __future__ import annotations

from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import (
    BROADCAST,
    FULL,
    LENIENT,
    LENIENT_BROADCAST,
    SHAPES,
    build,
    build_stepped,
    case,
    close,
    grid,
    live,
    on_root,
    placing,
    refused,
    shown,
    state_of,
    tensor,
    truth,
    warned,
)
from hyperstate.testing.kit import Kit


def nested(kit: Kit, start: float = 0.0, topology: str = "plain") -> dict[str, Any]:
    """A full model dict with the numbers of `build`."""
    places = placing(kit, topology)
    return {fqn: tensor(kit, grid(s, start + 1000.0 * n), places[fqn]) for n, (fqn, s) in enumerate(SHAPES.items())}


# -- keys, shapes, dtypes ----------------------------------------------------------------------------


@case(1, topology=["plain"], broadcast=[False])
@case(2, topology=["fsdp"], broadcast=[False, True])
def strict_lists_missing_and_unexpected_names_together(kit: Kit, topology: str, broadcast: bool) -> Any:
    model, optimizer = build_stepped(kit, topology)
    before = live(kit, model, optimizer)
    given = nested(kit, 9.0)
    del given["dense.bias"], given["odd.weight"]
    given |= {"new.weight": tensor(kit, [1.0, 2.0]), "newer.weight": tensor(kit, [1.0])}
    passed = on_root(kit, given) if broadcast else given
    text = refused(
        hs.IncompatibleStateError, hs.set_model_state_dict, model, passed, options=BROADCAST if broadcast else FULL
    )
    for fqn in ("dense.bias", "odd.weight", "new.weight", "newer.weight"):
        assert repr(fqn) in text
    assert before == live(kit, model, optimizer)
    result = hs.set_model_state_dict(model, passed, options=LENIENT_BROADCAST if broadcast else LENIENT)
    assert ["dense.bias", "odd.weight"] == sorted(result.missing_keys)
    assert ["new.weight", "newer.weight"] == sorted(result.unexpected_keys)
    full = hs.get_model_state_dict(model, options=FULL)
    assert shown(kit, given["dense.weight"]) == shown(kit, full["dense.weight"])
    after = live(kit, model, optimizer)
    assert before["model"]["dense.bias"] == after["model"]["dense.bias"]
    assert before["state"] == after["state"]
    return text


@case(1, topology=["plain"], broadcast=[False])
@case(2, topology=["fsdp"], broadcast=[False, True])
def strict_optimizer_loads_want_every_parameter_named(kit: Kit, topology: str, broadcast: bool) -> Any:
    """S06: what is missing or unexpected is named, before anything is changed; lenient loads keep what is there."""
    source, stepper = build_stepped(kit, "plain", steps=3)
    given = hs.get_optim_state_dict(source, stepper, options=FULL)
    del given["state"]["dense.bias"]
    given["param_groups"][0]["params"].remove("dense.bias")
    given["state"]["ghost"] = {"exp_avg": tensor(kit, [1.0, 2.0])}
    passed = on_root(kit, given) if broadcast else given
    model, optimizer = build_stepped(kit, topology, steps=1)
    before = live(kit, model, optimizer)
    options = BROADCAST if broadcast else FULL
    text = refused(hs.IncompatibleStateError, hs.set_optim_state_dict, model, optimizer, passed, options=options)
    assert "'dense.bias'" in text and "'ghost'" in text
    assert before == live(kit, model, optimizer)
    options = LENIENT_BROADCAST if broadcast else LENIENT
    result = hs.set_optim_state_dict(model, optimizer, passed, options=options)
    assert (["dense.bias"], ["ghost"]) == (list(result.missing_keys), list(result.unexpected_keys))
    after = live(kit, model, optimizer)
    assert before["state"]["dense.bias"] == after["state"]["dense.bias"]
    full = hs.get_optim_state_dict(model, optimizer, options=FULL)["state"]
    close(kit, given["state"]["odd.weight"], full["odd.weight"])
    return text


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def a_parameter_that_is_named_and_has_no_state_is_cleared(kit: Kit, topology: str) -> None:
    """S05: it had none in the source; that is no error when strict."""
    source, stepper = build_stepped(kit, "plain", steps=2)
    given = hs.get_optim_state_dict(source, stepper, options=FULL)
    del given["state"]["odd.bias"]
    model, optimizer = build_stepped(kit, topology, steps=1)
    with warned("odd.bias"):
        result = hs.set_optim_state_dict(model, optimizer, given, options=FULL)
    assert ([], [], ["odd.bias"]) == tuple(map(list, result))
    assert {} == state_of(kit, model, optimizer, "odd.bias")
    fresh_model = build(kit, topology)
    fresh = kit.optimizer(fresh_model)
    result = hs.set_optim_state_dict(fresh_model, fresh, given, options=FULL)
    assert ([], [], []) == tuple(map(list, result))  # nothing was there to clear
    assert {} == state_of(kit, fresh_model, fresh, "odd.bias")


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def state_keys_are_replaced_as_a_set(kit: Kit, topology: str) -> None:
    model, optimizer = build_stepped(kit, topology, "momentum")
    kit.state(optimizer, kit.named(model)["dense.bias"])["left_over"] = 3
    source, stepper = build_stepped(kit, "plain", "adam")
    given = hs.get_optim_state_dict(source, stepper, options=FULL)
    hs.set_optim_state_dict(model, optimizer, given, options=FULL)
    for fqn in SHAPES:
        assert set(given["state"][fqn]) == set(state_of(kit, model, optimizer, fqn))


@case(1, topology=["plain"], strict=[True, False])
@case(2, topology=["fsdp"], strict=[True, False])
def a_shape_mismatch_is_always_refused(kit: Kit, topology: str, strict: bool) -> None:
    """Also one that broadcasting would hide, and one of state that the target already keeps."""
    model, optimizer = build_stepped(kit, topology)
    before = live(kit, model, optimizer)
    options = hs.StateDictOptions(full_state_dict=True, strict=strict)
    for wrong in (grid((1, 4)), grid((4,)), grid((8, 1)), grid((4, 8)), 1.0):
        given = nested(kit) | {"dense.weight": tensor(kit, wrong)}
        text = refused(hs.IncompatibleStateError, hs.set_model_state_dict, model, given, options=options)
        assert "'dense.weight'" in text and "[8, 6]" in text
    state = hs.get_optim_state_dict(model, optimizer, options=FULL)
    key = next(k for k, v in state["state"]["dense.weight"].items() if kit.content(v).shape == (8, 6))
    state["state"]["dense.weight"][key] = tensor(kit, grid((8,)))
    text = refused(hs.IncompatibleStateError, hs.set_optim_state_dict, model, optimizer, state, options=options)
    assert "'dense.weight'" in text and repr(key) in text
    assert before == live(kit, model, optimizer)


@case(2, 4)
def a_plain_tensor_for_a_sharded_one_names_the_option_that_was_meant(kit: Kit) -> None:
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    text = refused(hs.IncompatibleStateError, hs.set_model_state_dict, model, nested(kit))
    assert "full_state_dict=True" in text
    full = hs.get_optim_state_dict(model, optimizer, options=FULL)
    fresh = kit.optimizer(model)
    for one in (optimizer, fresh):
        text = refused(hs.IncompatibleStateError, hs.set_optim_state_dict, model, one, full)
        assert "full_state_dict=True" in text
    assert before == live(kit, model, optimizer)


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def dtypes_are_converted_to_the_targets_and_never_against_their_meaning(kit: Kit, topology: str) -> None:
    dtypes = {"brief": "bfloat16", "single": "float32", "whole": "int64", "flag": "bool", "wave": "complex64"}
    places = placing(kit, topology, dict.fromkeys(dtypes, (4, 2)))
    zeros = [[0, 0]] * 4
    model = kit.with_parameters({k: tensor(kit, zeros, places[k], dtype) for k, dtype in dtypes.items()})
    good = {"brief": "float64", "single": "float16", "whole": "int32", "flag": "bool", "wave": "float32"}
    values = [[1, 0]] * 4
    hs.set_model_state_dict(model, {k: tensor(kit, values, dtype=dtype) for k, dtype in good.items()}, options=FULL)
    expected = {fqn: shown(kit, tensor(kit, values, places[fqn], dtype)) for fqn, dtype in dtypes.items()}
    assert expected == live(kit, model)["model"]
    for fqn, dtype in (("whole", "float32"), ("flag", "int64"), ("single", "complex64"), ("flag", "float32")):
        given = {k: tensor(kit, zeros, dtype=kind) for k, kind in {**dtypes, fqn: dtype}.items()}
        text = refused(hs.IncompatibleStateError, hs.set_model_state_dict, model, given, options=FULL)
        assert repr(fqn) in text and dtype in text
    assert expected == live(kit, model)["model"]


@case(1, topology=["plain"], fresh=[True, False])
@case(2, topology=["fsdp"], fresh=[True, False])
def state_keeps_the_checkpoints_dtype_unless_the_target_has_another(kit: Kit, topology: str, fresh: bool) -> None:
    """S15: float32 moments of bfloat16 parameters stay float32."""
    shapes = {"w": (6, 4)}
    place = placing(kit, topology, shapes)["w"]
    model = kit.with_parameters({"w": tensor(kit, grid((6, 4)), place, "bfloat16")})
    optimizer = kit.optimizer(model, "custom")
    if not fresh:
        kit.state(optimizer, kit.named(model)["w"])["m"] = tensor(kit, grid((6, 4)), place, "float16")
    given = {"state": {"w": {"m": tensor(kit, grid((6, 4), 3.0))}}, "param_groups": [{"params": ["w"], "lr": 0.5}]}
    hs.set_optim_state_dict(model, optimizer, given, options=FULL)
    actual = state_of(kit, model, optimizer, "w")["m"]
    expected = tensor(kit, grid((6, 4), 3.0), place, "float32" if fresh else "float16")
    assert shown(kit, expected) == shown(kit, actual)


# -- names -------------------------------------------------------------------------------------------


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def one_name_of_a_tied_parameter_is_enough(kit: Kit, topology: str) -> None:
    place = placing(kit, topology, {"w": (4, 3)})["w"]
    for name in ("embed.weight", "head.weight"):
        shared = tensor(kit, grid((4, 3)), place)
        model = kit.with_parameters({"embed.weight": shared, "head.weight": shared})
        optimizer = kit.optimizer(model, "momentum")
        result = hs.set_model_state_dict(model, {name: tensor(kit, grid((4, 3), 5.0))}, options=FULL)
        assert ([], [], []) == tuple(map(list, result))
        expected = shown(kit, tensor(kit, grid((4, 3), 5.0), place))
        assert {"embed.weight": expected, "head.weight": expected} == live(kit, model)["model"]
        given = {
            "state": {name: {"momentum_buffer": tensor(kit, grid((4, 3), 8.0))}},
            "param_groups": [{"params": [name], "lr": 0.5}],
        }
        hs.set_optim_state_dict(model, optimizer, given, options=FULL)
        state = state_of(kit, model, optimizer, "embed.weight")
        assert shown(kit, {"momentum_buffer": tensor(kit, grid((4, 3), 8.0), place)}) == shown(kit, state)
        assert 0.5 == kit.groups(optimizer)[0]["lr"]


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def state_follows_names_not_positions(kit: Kit, topology: str) -> None:
    """S41: square layers, so that shapes alone would not tell."""
    shapes = {"a": (4, 4), "b": (4, 4), "c": (4, 4)}
    source = build(kit, "plain", shapes=shapes)
    stepper = kit.optimizer(source)
    kit.fake_step(source, stepper)
    for options in (FULL, hs.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)):
        given = hs.get_optim_state_dict(source, stepper, options=options)
        model = build(kit, topology, shapes=shapes)
        optimizer = kit.optimizer(model, groups=[(["c", "b"], {}), (["a"], {})])
        hs.set_optim_state_dict(model, optimizer, given, options=options)
        full = hs.get_optim_state_dict(model, optimizer, options=FULL)["state"]
        close(kit, truth(kit, source, stepper)[1], full)


@case(1, topology=["plain"])
@case(2, topology=["fsdp"])
def adapters_alone_load_leniently_and_leave_the_base_as_it_is(kit: Kit, topology: str) -> None:
    """S35."""
    model = build(kit, topology)
    base = [fqn for fqn in SHAPES if not fqn.startswith("few")]
    for fqn in base:
        kit.freeze(model, fqn)
    options = hs.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    given = hs.get_model_state_dict(model, options=options)
    assert ["few.weight"] == list(given)
    other = build(kit, topology, start=300.0)
    before = live(kit, other)["model"]
    result = hs.set_model_state_dict(other, given, options=LENIENT)
    assert sorted(base) == sorted(result.missing_keys)
    after = live(kit, other)["model"]
    assert {fqn: before[fqn] for fqn in base} == {fqn: after[fqn] for fqn in base}
    assert live(kit, model)["model"]["few.weight"] == after["few.weight"]
