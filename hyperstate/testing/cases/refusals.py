"""Nothing or everything: one bad rank refuses the call on all, soon, with one text; and the next call works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import (
    BROADCAST,
    FULL,
    Errors,
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
)
from hyperstate.testing.kit import Kit

GOOD = "odd.weight"


class Broken(Mapping[str, Any]):
    """A dict whose values can't be read, as one that reads a damaged file."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("block 7 can't be read")

    def __iter__(self) -> Iterator[str]:
        return iter((GOOD,))

    def __len__(self) -> int:
        return 1


class SilentError(Exception):
    def __str__(self) -> str:
        raise self


class Silent(Broken):
    """A dict whose values can't be read, for a reason that can't be told."""

    def __getitem__(self, key: str) -> Any:
        raise SilentError


# One rank's other shape or dtype is a misfit and a disagreement; the message says both.
MISFIT = (hs.IncompatibleStateError, hs.DisagreementError)
MODEL_FAULTS: dict[str, Errors] = {
    "unexpected": hs.IncompatibleStateError,
    "missing": hs.IncompatibleStateError,
    "shape": MISFIT,
    "dtype": MISFIT,
    "value": MISFIT,
    "list": hs.InvalidStateDictError,
    "key": hs.InvalidStateDictError,
    "broken": hs.HyperstateError,
    "silent": hs.HyperstateError,
    "option": hs.OptionError,
    "mapping": hs.OptionTypeError,
    "timeout": hs.OptionError,
}
OPTIM_FAULTS: dict[str, Errors] = {
    "unexpected": hs.IncompatibleStateError,
    "missing": hs.IncompatibleStateError,
    "shape": MISFIT,
    "dtype": MISFIT,
    "number": MISFIT,
    "huge counter": MISFIT,
    "list": hs.InvalidStateDictError,
    "neither": hs.InvalidStateDictError,
    "form": hs.InvalidStateDictError,
    "broken": hs.HyperstateError,
    "option": hs.OptionError,
    "mapping": hs.OptionTypeError,
    "state_form": hs.OptionError,
    "foreign": hs.IncompatibleStateError,
}


def spoil_model(kit: Kit, fault: str, given: Any) -> Any:
    """`given`, a good full model dict, with a fault in it."""
    spoilt: dict[str, Callable[[], Any]] = {
        "unexpected": lambda: {**given, "ghost.weight": tensor(kit, [1.0])},
        "missing": lambda: {fqn: value for fqn, value in given.items() if fqn != GOOD},
        "shape": lambda: {**given, GOOD: tensor(kit, [[1.0] * 6] * 4)},
        "dtype": lambda: {**given, GOOD: tensor(kit, [[1j] * 6] * 5, dtype="complex64")},
        "value": lambda: {**given, GOOD: "text"},
        "list": lambda: list(given.items()),
        "key": lambda: {**given, 3: tensor(kit, 1.0)},
        "broken": Broken,
        "silent": Silent,
    }
    return spoilt.get(fault, lambda: given)()


def spoil_optimizer(kit: Kit, fault: str, given: Any) -> Any:
    """`given`, a good full optimizer dict of Adam's kind, with a fault in it."""
    state, (group,) = given["state"], given["param_groups"]
    key = next(k for k, v in state[GOOD].items() if kit.is_tensor(v) and kit.content(v).shape == (5, 6))
    counter = next(k for k, v in state[GOOD].items() if kit.is_tensor(v) and kit.content(v).shape == ())
    others = [fqn for fqn in group["params"] if fqn != GOOD]

    def with_value(value: Any, key: Any = key) -> Any:
        return {**given, "state": {**state, GOOD: {**state[GOOD], key: value}}}

    spoilt: dict[str, Callable[[], Any]] = {
        "unexpected": lambda: {**given, "state": {**state, "ghost": {key: tensor(kit, [1.0])}}},
        "missing": lambda: {
            "state": {fqn: state[fqn] for fqn in others},
            "param_groups": [{**group, "params": others}],
        },
        "shape": lambda: with_value(tensor(kit, [[1.0] * 6] * 4)),
        "dtype": lambda: with_value(tensor(kit, [[1j] * 6] * 5, dtype="complex64")),
        "number": lambda: with_value(2.5),
        "huge counter": lambda: with_value(10**400, counter),
        "list": lambda: [given],
        "neither": lambda: {"model": given},
        "form": lambda: {**given, "param_groups": [{"lr": 1.0}]},
        "broken": lambda: {"state": Broken(), "param_groups": []},
    }
    return spoilt.get(fault, lambda: given)()


def spoil_options(fault: str, options: Any) -> Any:
    """Options that one rank gets wrong in itself; it still asks for the same form."""
    fields = {name: getattr(options, name) for name in ("full_state_dict", "broadcast_from_rank0")}
    if fault == "option":
        return SimpleNamespace(**fields, strict="maybe")
    return options


def check_unharmed(kit: Kit, before: Any, model: Any, optimizer: Any, good: Any, options: Any) -> None:
    """Everything is as it was, and a good call by all ranks works."""
    assert before == live(kit, model, optimizer)
    hs.set_state_dict(model, optimizer, model_state_dict=good[0], optim_state_dict=good[1], options=options)
    values, state = truth(kit, *build_stepped(kit, "plain", steps=3, start=40.0))
    full = hs.get_state_dict(model, optimizer, options=FULL)
    close(kit, values, full[0])
    close(kit, state, full[1]["state"])


def good_dicts(kit: Kit) -> tuple[Any, Any]:
    return hs.get_state_dict(*build_stepped(kit, "plain", steps=3, start=40.0), options=FULL)


# -- setters -----------------------------------------------------------------------------------------


@case(2, fault=[*MODEL_FAULTS], broadcast=[False, True])
@case(4, fault=["unexpected", "shape", "broken", "option"], broadcast=[False, True])
def one_bad_rank_refuses_a_model_on_all(kit: Kit, fault: str, broadcast: bool) -> Any:
    """The bad rank: the source under broadcast (the last rank's options), else the last rank."""
    about_call = fault in ("option", "mapping", "timeout")
    bad = kit.world - 1 if about_call or not broadcast else 0
    options = BROADCAST if broadcast else FULL
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    good = good_dicts(kit)
    passed = [on_root(kit, each) if broadcast else each for each in good]
    given, mine = passed[0], options
    if kit.rank == bad:
        given = given if about_call else spoil_model(kit, fault, good[0])
        mine = spoil_options(fault, options)
    kwargs: dict[str, Any] = {"options": mine}
    if fault == "mapping" and kit.rank == bad:
        kwargs = {"options": {"full_state_dict": True}}
    if fault == "timeout" and kit.rank == bad:
        kwargs["timeout"] = float("nan")
    error = MODEL_FAULTS[fault]
    text = refused(error, hs.set_model_state_dict, model, given, **kwargs)
    assert f"rank {bad}" in text
    check_unharmed(kit, before, model, optimizer, passed, options)
    return text


@case(2, fault=[*OPTIM_FAULTS], broadcast=[False, True])
@case(4, fault=["unexpected", "shape", "broken", "foreign"], broadcast=[False, True])
def one_bad_rank_refuses_an_optimizer_on_all(kit: Kit, fault: str, broadcast: bool) -> Any:
    about_call = fault in ("option", "mapping", "state_form", "foreign")
    bad = kit.world - 1 if about_call or not broadcast else 0
    options = BROADCAST if broadcast else FULL
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    good = good_dicts(kit)
    passed = [on_root(kit, each) if broadcast else each for each in good]
    given, stepper = passed[1], optimizer
    kwargs: dict[str, Any] = {"options": options}
    if kit.rank == bad:
        given = given if about_call else spoil_optimizer(kit, fault, good[1])
        kwargs = {"options": spoil_options(fault, options)}
        if fault == "mapping":
            kwargs = {"options": {"full_state_dict": True}}
        if fault == "state_form":
            kwargs["state_form"] = "other"
        if fault == "foreign":
            stepper = kit.optimizer(build(kit, "plain"))
    text = refused(OPTIM_FAULTS[fault], hs.set_optim_state_dict, model, stepper, given, **kwargs)
    assert f"rank {bad}" in text
    check_unharmed(kit, before, model, optimizer, passed, options)
    return text


@case(2, bad=["model", "optimizer"], broadcast=[False, True])
def both_are_loaded_or_neither_is_touched(kit: Kit, bad: str, broadcast: bool) -> Any:
    options = BROADCAST if broadcast else FULL
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    good = good_dicts(kit)
    spoilt = list(good)
    if bad == "model":
        spoilt[0] = spoil_model(kit, "shape", good[0])
    else:
        spoilt[1] = spoil_optimizer(kit, "shape", good[1])
    here = 0 if broadcast else kit.world - 1
    given: Any = spoilt if kit.rank == here else ({}, {}) if broadcast else good
    text = refused(
        MISFIT,
        hs.set_state_dict,
        model,
        optimizer,
        model_state_dict=given[0],
        optim_state_dict=given[1],
        options=options,
    )
    assert repr(GOOD) in text and f"rank {here}" in text
    passed = [on_root(kit, each) if broadcast else each for each in good]
    check_unharmed(kit, before, model, optimizer, passed, options)
    return text


@case(2, 4)
def a_message_lists_the_faults_of_all_ranks(kit: Kit) -> Any:
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    given = {**good_dicts(kit)[0], f"ghost{kit.rank}": tensor(kit, [1.0])}
    text = refused(hs.IncompatibleStateError, hs.set_model_state_dict, model, given, options=FULL)
    assert all(f"'ghost{rank}'" in text for rank in range(kit.world))
    check_unharmed(kit, before, model, optimizer, good_dicts(kit), FULL)
    return text


@case(1, what=["model", "optimizer"], given=["none", "empty"])
@case(2, what=["model", "optimizer"], given=["none", "empty"])
def passing_nothing_anywhere_is_refused(kit: Kit, what: str, given: str) -> Any:
    """Fault 11 of the system before: a load from an empty dict "succeeded" with nothing."""
    model, optimizer = build_stepped(kit, "plain" if kit.world == 1 else "fsdp")
    before = live(kit, model, optimizer)
    nothing: Any = None if given == "none" else {}
    args = (model, nothing) if what == "model" else (model, optimizer, nothing)
    call = hs.set_model_state_dict if what == "model" else hs.set_optim_state_dict
    texts = [refused(hs.InvalidStateDictError, call, *args, options=options) for options in (FULL, BROADCAST, None)]
    assert "broadcast_from_rank0" in texts[0]
    check_unharmed(kit, before, model, optimizer, good_dicts(kit), FULL)
    return texts


@case(2)
def only_the_source_passing_without_broadcast_names_the_option(kit: Kit) -> Any:
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    good = good_dicts(kit)
    given = on_root(kit, good[1])
    text = refused(hs.InvalidStateDictError, hs.set_optim_state_dict, model, optimizer, given, options=FULL)
    assert "broadcast_from_rank0" in text
    check_unharmed(kit, before, model, optimizer, good, FULL)
    return text


@case(2, 4)
def groups_without_state_are_something(kit: Kit) -> None:
    model = build(kit, "fsdp")
    optimizer = kit.optimizer(model)
    groups = {"state": {}, "param_groups": [{"params": list(kit.named(model)), "lr": 0.75}]}
    hs.set_optim_state_dict(model, optimizer, on_root(kit, groups), options=BROADCAST)
    assert 0.75 == kit.groups(optimizer)[0]["lr"]
    assert {} == state_of(kit, model, optimizer, GOOD)


@case(2, 4)
def fields_that_differ_between_the_dicts_of_the_ranks_are_refused(kit: Kit) -> Any:
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    good, bad = good_dicts(kit), kit.world - 1
    (group,) = good[1]["param_groups"]
    given = {**good[1], "param_groups": [{**group, "lr": 9.0 if kit.rank == bad else 0.5}]}
    text = refused(hs.DisagreementError, hs.set_optim_state_dict, model, optimizer, given, options=FULL)
    assert f"rank {bad}" in text and "'lr'" in text
    check_unharmed(kit, before, model, optimizer, good, FULL)
    return text


# -- getters -----------------------------------------------------------------------------------------

GET_FAULTS: dict[str, type[Exception]] = {
    "option": hs.OptionError,
    "foreign": hs.IncompatibleStateError,
    "field": hs.DisagreementError,
    "counter": hs.DisagreementError,
    "absent key": hs.DisagreementError,
    "dtype": hs.DisagreementError,
    "type": hs.DisagreementError,
}


@case(2, fault=[*GET_FAULTS])
@case(4, fault=["option", "field", "absent key"])
def one_bad_rank_refuses_a_full_getter_on_all(kit: Kit, fault: str) -> Any:
    bad = kit.world - 1
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    stepper, options = optimizer, FULL
    slots = kit.state(optimizer, kit.named(model)["dense.weight"])
    kept = dict(slots)
    key = next(k for k, v in kept.items() if kit.is_tensor(v) and kit.is_sharded(v))
    if kit.rank == bad:
        options = spoil_options(fault, FULL)
        stepper = kit.optimizer(build(kit, "plain")) if fault == "foreign" else optimizer
        if fault == "field":
            kit.groups(optimizer)[0]["lr"] = 9.0
        if fault == "absent key":
            del slots[key]
    if fault == "dtype":
        mesh = kit.mesh((kit.world,), ("dp",))
        wide = kit.sharded_tensor(kit.tensor([[0.0] * 4] * 8, "float64"), mesh, ["S0"])
        slots["new"] = wide if kit.rank == bad else kept[key]
    if fault == "counter":
        slots["count"] = tensor(kit, 1.0 + (kit.rank == bad))
    if fault == "type":
        slots["flag"] = 1 if kit.rank == bad else True
    text = refused(GET_FAULTS[fault], hs.get_optim_state_dict, model, stepper, options=options)
    assert f"rank {bad}" in text
    slots.clear()
    slots.update(kept)
    kit.groups(optimizer)[0]["lr"] = 0.01
    assert before == live(kit, model, optimizer)
    state = truth(kit, *build_stepped(kit, "plain"))[1]
    close(kit, state, hs.get_optim_state_dict(model, optimizer, options=FULL)["state"])
    return text


@case(2, 4)
def different_calls_are_told_to_each_other(kit: Kit) -> Any:
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    good = good_dicts(kit)
    if kit.rank:
        text = refused(hs.DisagreementError, hs.get_optim_state_dict, model, optimizer, options=FULL)
    else:
        text = refused(hs.DisagreementError, hs.set_model_state_dict, model, good[0], options=FULL)
    assert "set_model_state_dict" in text and "get_optim_state_dict" in text
    check_unharmed(kit, before, model, optimizer, good, FULL)
    return text


@case(2, 4)
def different_options_are_told_to_each_other(kit: Kit) -> Any:
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    good = good_dicts(kit)
    strict = hs.StateDictOptions(full_state_dict=True, strict=kit.rank != 1)
    text = refused(hs.DisagreementError, hs.set_model_state_dict, model, good[0], options=strict)
    assert "strict" in text and "rank 1" in text
    check_unharmed(kit, before, model, optimizer, good, FULL)
    return text


# -- options -----------------------------------------------------------------------------------------


@case(1)
def options_that_contradict_or_are_none_are_refused(kit: Kit) -> None:
    model, optimizer = build_stepped(kit, "plain")
    before = live(kit, model, optimizer)
    lonely = SimpleNamespace(broadcast_from_rank0=True)
    for call, args in (
        (hs.get_model_state_dict, (model,)),
        (hs.get_optim_state_dict, (model, optimizer)),
        (hs.get_state_dict, (model, optimizer)),
        (hs.set_model_state_dict, (model, hs.get_model_state_dict(model))),
    ):
        text = refused(hs.OptionError, call, *args, options=lonely)
        assert "broadcast_from_rank0" in text and "full_state_dict" in text
        assert isinstance(hs.OptionError(), ValueError)
        refused(hs.OptionTypeError, call, *args, options={"full_state_dict": True})
        refused(hs.OptionTypeError, call, *args, options=SimpleNamespace(fullstatedict=True))
        refused(hs.OptionError, call, *args, options=SimpleNamespace(full_state_dict=1))
    full = hs.get_model_state_dict(model, options=SimpleNamespace(full_state_dict=True))
    assert shown(kit, full) == shown(kit, hs.get_model_state_dict(model, options=BROADCAST))
    assert before == live(kit, model, optimizer)
