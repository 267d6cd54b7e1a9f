"""Ranks that are killed: before a call and in the middle of one. Survivors get an error soon, never a false success."""

from __future__ import annotations

import time
from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import BROADCAST, FULL, build, build_stepped, case, live, on_root, refused
from hyperstate.testing.kit import Kit

LIMIT_S = 2.0
"""The timeout that survivors give, in seconds."""


@case(2, lost=(1,), dead=[1])
@case(4, lost=(3,), dead=[3])
def a_rank_that_died_before_the_call_is_named_as_absent(kit: Kit, dead: int) -> Any:
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    given = on_root(kit, hs.get_model_state_dict(build(kit, "plain"), options=FULL))
    if kit.rank == dead:
        kit.die()
    text = refused(hs.AbsentRankError, hs.set_model_state_dict, model, given, options=BROADCAST, timeout=LIMIT_S)
    assert f"rank {dead}" in text
    assert before == live(kit, model, optimizer)
    return text


@case(4, lost=(0,), used=[True])
@case(2, lost=(0,), used=[False])
def the_death_of_rank_0_reaches_all(kit: Kit, used: bool) -> None:
    """Where rank 0 keeps the key-value store, nobody can be told more than that. `used`: a call was made before."""
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    if used:
        hs.get_model_state_dict(model, options=FULL)
    if kit.rank == 0:
        kit.die()
    time.sleep(0.5)
    refused(
        (hs.AbsentRankError, hs.TransferError), hs.get_optim_state_dict, model, optimizer, options=FULL, timeout=LIMIT_S
    )
    assert before == live(kit, model, optimizer)


GETTERS = ("get_model_state_dict", "get_optim_state_dict", "get_state_dict")
SETTERS = ("set_model_state_dict", "set_optim_state_dict", "set_state_dict")


@case(4, lost=(3,), call=[*GETTERS, *SETTERS])
@case(2, lost=(1,), call=["get_state_dict"])
def a_rank_that_dies_while_values_move_is_an_error_on_the_survivors(kit: Kit, call: str) -> None:
    """None of them reports success; the text says what to do."""
    model, optimizer = build_stepped(kit, "fsdp")
    given = hs.get_state_dict(*build_stepped(kit, "plain", steps=3), options=FULL)
    objects = (model,) if "model" in call else (model, optimizer)
    passed: dict[str, Any] = {}
    if call == "set_state_dict":
        passed = {"model_state_dict": on_root(kit, given[0]), "optim_state_dict": on_root(kit, given[1])}
    elif call in SETTERS:
        objects = (*objects, on_root(kit, given["optim" in call]))
    hs.get_model_state_dict(model, options=FULL)  # all are here now: `LIMIT_S` is not for ranks that are slow to start
    if kit.rank == kit.world - 1:
        kit.die(exchange=1)
    options = BROADCAST if call in SETTERS else FULL
    text = refused(hs.TransferError, getattr(hs, call), *objects, **passed, options=options, timeout=LIMIT_S)
    assert f"rank {kit.world - 1}" in text
    assert ("load" if call in SETTERS else "nothing was changed") in text
