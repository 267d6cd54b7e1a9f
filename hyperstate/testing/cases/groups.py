"""Param groups, integer keys and flat dicts on their way into an optimizer."""

from __future__ import annotations

from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import (
    BROADCAST,
    FLAT,
    FULL,
    FULL_FLAT,
    LENIENT,
    SHAPES,
    build,
    build_stepped,
    case,
    close,
    live,
    on_root,
    refused,
    shown,
    state_of,
    tensor,
    truth,
    warned,
)
from hyperstate.testing.kit import Kit

NAMES = list(SHAPES)


def target(kit: Kit, kind: str = "custom", groups: Any = None) -> tuple[Any, Any]:
    """A model, sharded where there are ranks, and a fresh optimizer."""
    model = build(kit, "plain" if kit.world == 1 else "fsdp")
    return model, kit.optimizer(model, kind, groups=groups)


def group(params: list[str], **fields: Any) -> dict[str, Any]:
    return {"params": params, **fields}


def set_groups(kit: Kit, model: Any, optimizer: Any, groups: list[Any], options: Any = FULL) -> list[dict[str, Any]]:
    """Set groups and no state; the target's fields afterwards."""
    hs.set_optim_state_dict(model, optimizer, {"state": {}, "param_groups": groups}, options=options)
    return [{key: value for key, value in one.items() if key != "params"} for one in kit.groups(optimizer)]


@case(1, 2)
def groups_are_matched_by_name_however_ordered_or_split(kit: Kit) -> None:
    model, optimizer = target(kit, groups=[(NAMES[:2], {"lr": 1.0}), (NAMES[2:], {"lr": 2.0})])
    split = [group([NAMES[4]], lr=4.0), group([NAMES[1]], lr=3.0), group(NAMES[2:4], lr=4.0), group([NAMES[0]], lr=3.0)]
    assert [3.0, 4.0] == [fields["lr"] for fields in set_groups(kit, model, optimizer, split)]
    model, optimizer = target(kit, groups=[([fqn], {"lr": float(n)}) for n, fqn in enumerate(NAMES)])
    joined = [group(NAMES[2:], lr=8.0), group(NAMES[:2], lr=9.0)]
    assert [9.0, 9.0, 8.0, 8.0, 8.0] == [fields["lr"] for fields in set_groups(kit, model, optimizer, joined)]
    members = [[id(param) for param in one["params"]] for one in kit.groups(optimizer)]
    assert [[id(kit.named(model)[fqn])] for fqn in NAMES] == members


@case(1, 2)
def every_field_is_restored_and_lacking_ones_keep_the_targets(kit: Kit) -> None:
    fields = {"lr": 0.25, "initial_lr": 0.5, "flag": True, "none": None, "pair": (1, 2.0), "odd": {1: ["x"]}}
    model, optimizer = target(kit, groups=[(NAMES, {"kept": "mine", "flag": 1})])
    (actual,) = set_groups(kit, model, optimizer, [group(NAMES, **fields)])
    assert shown(kit, {**actual, **fields, "kept": "mine"}) == shown(kit, actual)


@case(1, 2)
def fields_that_choose_an_implementation_keep_the_targets_value(kit: Kit) -> None:
    flags = ("foreach", "fused", "capturable", "differentiable")
    mine = {flag: n % 2 == 0 for n, flag in enumerate(flags)}
    model, optimizer = target(kit, groups=[(NAMES, mine)])
    saved = {flag: not value for flag, value in mine.items()}
    (actual,) = set_groups(kit, model, optimizer, [group(NAMES, lr=0.25, param_names=["other"], **saved)])
    assert mine == {flag: actual[flag] for flag in flags}
    assert "param_names" not in actual and 0.25 == actual["lr"]


@case(1, 2)
def names_of_one_group_that_disagree_on_a_field_are_refused_or_warned_of(kit: Kit) -> Any:
    model, optimizer = target(kit, groups=[(NAMES, {"lr": 1.0})])
    split = [group(NAMES[:2], lr=3.0, note="first"), group(NAMES[2:], lr=4.0, note="first")]
    before = live(kit, model, optimizer)
    text = refused(hs.IncompatibleStateError, set_groups, kit, model, optimizer, split)
    assert "lr" in text and "3.0" in text and "4.0" in text
    assert before == live(kit, model, optimizer)
    with warned("lr"):
        (actual,) = set_groups(kit, model, optimizer, split, LENIENT)
    assert (3.0, "first") == (actual["lr"], actual["note"])
    return text


@case(1, 2)
def groups_without_parameters_are_matched_among_themselves_in_order(kit: Kit) -> None:
    model, optimizer = target(kit, groups=[([], {"lr": 1.0}), (NAMES, {"lr": 2.0}), ([], {"lr": 3.0})])
    saved = [group(NAMES, lr=20.0), group([], lr=10.0, note="a"), group([], lr=30.0)]
    actual = set_groups(kit, model, optimizer, saved)
    assert [10.0, 20.0, 30.0] == [fields["lr"] for fields in actual]
    assert "a" == actual[0]["note"]
    nested = hs.get_optim_state_dict(model, optimizer, options=FULL)
    assert [[], NAMES, []] == [one["params"] for one in nested["param_groups"]]
    on_the_root = hs.StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    for options in (FULL_FLAT, on_the_root):  # refused on every rank, also where the root alone would flatten
        text = refused(hs.UnsupportedConfigurationError, hs.get_optim_state_dict, model, optimizer, options=options)
        assert "group 0" in text
    model, optimizer = target(kit, groups=[([], {"lr": 1.0}), (NAMES, {"lr": 2.0}), ([], {"lr": 3.0})])
    hs.set_optim_state_dict(model, optimizer, on_root(kit, {"state": {}, "param_groups": saved}), options=BROADCAST)
    assert [10.0, 20.0, 30.0] == [one["lr"] for one in kit.groups(optimizer)]


@case(1, 2)
def tensor_fields_keep_the_targets_form(kit: Kit) -> None:
    """A number stays a number, a tensor the same tensor; the caller's own tensor is never taken over."""
    model, optimizer = target(kit, groups=[(NAMES[:2], {"lr": tensor(kit, 1.0)}), (NAMES[2:], {"lr": 1.0})])
    mine, given = kit.groups(optimizer)[0]["lr"], tensor(kit, 0.5)
    saved = [group(NAMES[:2], lr=0.25), group(NAMES[2:], lr=given, more=given)]
    first, second = set_groups(kit, model, optimizer, saved)
    assert first["lr"] is mine
    assert shown(kit, tensor(kit, 0.25)) == shown(kit, first["lr"])
    assert shown(kit, 0.5) == shown(kit, second["lr"])
    assert second["more"] is not given
    assert shown(kit, given) == shown(kit, second["more"])
    first, _ = set_groups(kit, model, optimizer, [group(NAMES[:2], lr=given), group(NAMES[2:], lr=2.0)])
    assert first["lr"] is mine and shown(kit, given) == shown(kit, mine)


@case(1, 2, number=("complex", "long", "longer"))
def a_number_that_a_tensor_field_can_not_hold_is_refused(kit: Kit, number: str) -> None:
    """On all ranks and before anything is written, also where one of them alone passes it."""
    model, optimizer = target(kit, groups=[(NAMES, {"lr": tensor(kit, 1.0)})])
    before = live(kit, model, optimizer)
    value = {"complex": 1 + 2j, "long": 2**70, "longer": -(2**3000)}[number]
    for last_alone in (False, True):
        lr = 0.5 if last_alone and kit.rank < kit.world - 1 else value
        passed = {"state": {}, "param_groups": [group(NAMES, lr=lr)]}
        errors = (hs.IncompatibleStateError, hs.DisagreementError)
        text = refused(errors, hs.set_optim_state_dict, model, optimizer, passed)
        assert "lr" in text
        assert before == live(kit, model, optimizer)


@case(2, flat=[False, True])
def groups_come_from_the_root_alone(kit: Kit, flat: bool) -> None:
    """Fault 9 of the system before: param groups were never broadcast."""
    options = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    source, stepper = build_stepped(kit, "plain")
    kit.groups(stepper)[0].update(lr=0.125 + kit.rank, note=("x", kit.rank))
    given = hs.get_optim_state_dict(source, stepper, options=FULL_FLAT if flat else FULL)
    model, optimizer = target(kit, "adam")
    hs.set_optim_state_dict(model, optimizer, on_root(kit, given), options=options)
    assert (0.125, ("x", 0)) == (kit.groups(optimizer)[0]["lr"], kit.groups(optimizer)[0]["note"])


# -- integer keys ------------------------------------------------------------------------------------


def by_integers(kit: Kit, model: Any, optimizer: Any) -> dict[str, Any]:
    """What a framework's own ``optimizer.state_dict()`` looks like: parameters numbered in the order of the groups."""
    named = {id(param): fqn for fqn, param in kit.named(model).items()}
    numbers = {id(p): n for n, p in enumerate(p for one in kit.groups(optimizer) for p in one["params"])}
    state = {n: state_of(kit, model, optimizer, named[p]) for p, n in numbers.items()}
    groups = [{**one, "params": [numbers[id(p)] for p in one["params"]]} for one in kit.groups(optimizer)]
    return {"state": state, "param_groups": groups}


@case(1, broadcast=[False])
@case(2, broadcast=[False, True])
def integer_keys_are_matched_by_the_order_of_groups(kit: Kit, broadcast: bool) -> None:
    """S40: a one-process file goes into a sharded run."""
    source, stepper = build_stepped(kit, "plain")
    kit.groups(stepper)[0]["lr"] = 0.75
    given = by_integers(kit, source, stepper)
    model, optimizer = target(kit, "adam")
    passed = on_root(kit, given) if broadcast else given
    hs.set_optim_state_dict(model, optimizer, passed, options=BROADCAST if broadcast else FULL)
    full = hs.get_optim_state_dict(model, optimizer, options=FULL)
    close(kit, truth(kit, source, stepper)[1], full["state"])
    assert 0.75 == kit.groups(optimizer)[0]["lr"]


@case(1, 2)
def integer_keys_that_do_not_fit_are_refused_with_the_way_to_names(kit: Kit) -> Any:
    source, stepper = build_stepped(kit, "plain")
    given = by_integers(kit, source, stepper)
    model, optimizer = target(kit, "adam", groups=[(NAMES[::-1], {})])
    before = live(kit, model, optimizer)
    texts = [refused(hs.IncompatibleStateError, hs.set_optim_state_dict, model, optimizer, given, options=FULL)]
    model, optimizer = target(kit, "adam", groups=[(NAMES[:2], {}), (NAMES[2:], {})])
    texts.append(refused(hs.IncompatibleStateError, hs.set_optim_state_dict, model, optimizer, given, options=FULL))
    assert all("get_optim_state_dict" in text for text in texts)
    assert before["state"] == live(kit, model, optimizer)["state"]
    return texts


# -- flat --------------------------------------------------------------------------------------------


@case(1, topology=["plain"], option=[False, True])
@case(2, topology=["fsdp"], option=[False, True])
def flat_dicts_are_recognised_with_or_without_the_option(kit: Kit, topology: str, option: bool) -> None:
    source, stepper = build_stepped(kit, "plain", steps=2)
    kit.groups(stepper)[0]["lr"] = 0.75
    nested = hs.get_optim_state_dict(source, stepper, options=FULL)
    for dialect in ("hyperstate", "torch"):
        flat = hs.flatten_optim_state_dict(nested, dialect=dialect)
        model, optimizer = target(kit, "adam")
        hs.set_optim_state_dict(model, optimizer, flat, options=FULL_FLAT if option else FULL)
        close(kit, nested["state"], hs.get_optim_state_dict(model, optimizer, options=FULL)["state"])
        assert 0.75 == kit.groups(optimizer)[0]["lr"]


@case(2)
def flat_sharded_state_goes_round(kit: Kit) -> None:
    model, optimizer = build_stepped(kit, "fsdp")
    flat = hs.get_optim_state_dict(model, optimizer, options=FLAT)
    other, fresh = target(kit, "adam")
    hs.set_optim_state_dict(other, fresh, flat, options=FLAT)
    expected, actual = live(kit, model, optimizer), live(kit, other, fresh)
    assert (expected["state"], expected["groups"]) == (actual["state"], actual["groups"])


@case(1, 2)
def flat_state_without_group_fields_keeps_the_targets_groups(kit: Kit) -> None:
    source, stepper = build_stepped(kit, "plain")
    flat = hs.get_optim_state_dict(source, stepper, options=FULL_FLAT)
    flat = {key: value for key, value in flat.items() if key.startswith("state.")}
    model, optimizer = target(kit, "adam")
    kit.groups(optimizer)[0]["lr"] = 0.875
    hs.set_optim_state_dict(model, optimizer, flat, options=FULL)
    assert 0.875 == kit.groups(optimizer)[0]["lr"]
    close(kit, truth(kit, source, stepper)[1], hs.get_optim_state_dict(model, optimizer, options=FULL)["state"])


@case(1, 2)
def optimizers_without_state_stay_without(kit: Kit) -> None:
    """S07."""
    source, stepper = build_stepped(kit, "plain", "sgd")
    kit.groups(stepper)[0]["lr"] = 0.75
    for options in (FULL, FULL_FLAT):
        given = hs.get_optim_state_dict(source, stepper, options=options)
        model, optimizer = target(kit, "sgd")
        hs.set_optim_state_dict(model, optimizer, given, options=options)
        assert not any(live(kit, model, optimizer)["state"].values())
        assert 0.75 == kit.groups(optimizer)[0]["lr"]


@case(1, 2)
def flat_keys_of_unknown_names_or_prefixes_are_unexpected(kit: Kit) -> Any:
    source, stepper = build_stepped(kit, "plain")
    flat = hs.get_optim_state_dict(source, stepper, options=FULL_FLAT)
    flat |= {"state.ghost.exp_avg": tensor(kit, [1.0, 2.0]), "scheduler.last": 3}
    model, optimizer = target(kit, "adam")
    before = live(kit, model, optimizer)
    text = refused(hs.IncompatibleStateError, hs.set_optim_state_dict, model, optimizer, flat, options=FULL)
    assert "ghost" in text and "scheduler.last" in text
    assert before == live(kit, model, optimizer)
    result = hs.set_optim_state_dict(model, optimizer, flat, options=LENIENT)
    assert ["ghost", "scheduler.last"] == sorted(result.unexpected_keys)
    assert [] == list(result.missing_keys)
    return text
