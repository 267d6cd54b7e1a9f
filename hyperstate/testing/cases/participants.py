"""Who takes part in a call, and where values come from under broadcast, row by row (docs/participants.md)."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import (
    BROADCAST,
    FULL,
    LENIENT_BROADCAST,
    ON_ROOT,
    SHAPES,
    build,
    build_stepped,
    case,
    close,
    grid,
    live,
    on_root,
    refused,
    shown,
    silent,
    tensor,
    truth,
    warned,
)
from hyperstate.testing.kit import Kit

CHECK_S = 1.5
"""The timeout that cases with an absent rank give, in seconds."""


def stage(kit: Kit, start: float = 0.0, kind: str = "adam") -> tuple[Any, Any, Any, Any]:
    """Two pipeline stages of two ranks, each with parameters of its own: mesh, model, optimizer and full values."""
    table = kit.mesh((2, 2), ("pp", "dp"))
    number = kit.rank // 2
    full = {f"stage{number}.weight": grid((5, 3), start), f"stage{number}.bias": grid((5,), start + 100)}
    model = kit.with_parameters({fqn: tensor(kit, v, (table["dp"], ("S0",))) for fqn, v in full.items()})
    return table["dp"], model, kit.optimizer(model, kind), {fqn: tensor(kit, v) for fqn, v in full.items()}


# -- alone -------------------------------------------------------------------------------------------


@case(4)
def the_caller_alone_takes_part_where_nothing_travels(kit: Kit) -> None:
    """Sharded getters; full getters and setters of plain models; flatten and unflatten: the other ranks do not call."""
    sharded, stepper = build_stepped(kit, "fsdp")
    plain, optimizer = build_stepped(kit, "plain")
    if kit.rank != 2:
        return
    values, state = truth(kit, plain, optimizer)
    assert set(SHAPES) == set(hs.get_model_state_dict(sharded))
    nested = hs.get_optim_state_dict(sharded, stepper, options=hs.StateDictOptions(cpu_offload=True))
    flat = hs.flatten_optim_state_dict(nested)
    assert shown(kit, nested) == shown(kit, hs.unflatten_optim_state_dict(flat, sharded, stepper))
    full = hs.get_state_dict(plain, optimizer, options=FULL)
    close(kit, values, full[0])
    close(kit, state, full[1]["state"])
    other = build(kit, "plain", start=9.0)
    fresh = kit.optimizer(other)
    for options in (FULL, None):
        hs.set_state_dict(other, fresh, model_state_dict=full[0], optim_state_dict=full[1], options=options)
    assert live(kit, plain, optimizer) == live(kit, other, fresh)


@case(4)
def the_caller_alone_is_refused_alone(kit: Kit) -> None:
    """It does not wait for ranks that never come."""
    model, optimizer = build_stepped(kit, "plain")
    foreign = kit.optimizer(build(kit, "plain"))
    if kit.rank != 2:
        return
    refused(hs.InvalidStateDictError, hs.set_model_state_dict, model, [1], options=FULL)
    refused(hs.InvalidStateDictError, hs.set_optim_state_dict, model, optimizer, {"model": {}}, options=FULL)
    refused(hs.IncompatibleStateError, hs.get_optim_state_dict, model, foreign, options=FULL)
    refused(hs.OptionError, hs.set_model_state_dict, model, {}, options=SimpleNamespace(strict="maybe"))


# -- the ranks of the meshes in use ------------------------------------------------------------------


@case(4, busy=[0, 1])
def one_mesh_takes_part_while_the_other_is_busy(kit: Kit, busy: int) -> None:
    """A stage gets and sets its state; the other stage does not call."""
    _, model, optimizer, full = stage(kit)
    kit.fake_step(model, optimizer)
    if kit.rank // 2 == busy:
        return
    model_dict, _ = hs.get_state_dict(model, optimizer, options=ON_ROOT)
    root = 2 * (1 - busy)
    assert (list(full) if kit.rank == root else []) == list(model_dict)
    before = live(kit, model, optimizer)
    everywhere = hs.get_state_dict(model, optimizer, options=FULL)
    hs.set_state_dict(model, optimizer, model_state_dict=everywhere[0], optim_state_dict=everywhere[1], options=FULL)
    assert before == live(kit, model, optimizer)


@case(4)
def meshes_that_cross_take_the_slice_of_their_root(kit: Kit) -> None:
    table = kit.mesh((2, 2), ("outer", "inner"))
    values = {"a": grid((5, 2)), "b": grid((3, 2), 50.0)}
    places = {"a": (table["outer"], ("S0",)), "b": (table["inner"], ("S0",))}
    model = kit.with_parameters({fqn: tensor(kit, v, places[fqn]) for fqn, v in values.items()})
    full = hs.get_model_state_dict(model, options=FULL)
    assert shown(kit, {fqn: tensor(kit, v) for fqn, v in values.items()}) == shown(kit, full)


# -- ranks= ------------------------------------------------------------------------------------------


@case(4, how=["list", "mesh"])
def ranks_names_the_trainers_of_a_job_that_has_other_ranks_too(kit: Kit, how: str) -> None:
    mesh = kit.mesh((2, 2), ("role", "dp"))["dp"]
    model, optimizer = build_stepped(kit, "plain", start=10.0 * kit.rank)
    if kit.rank >= 2:
        return
    ranks = mesh if how == "mesh" else [0, 1]
    given = hs.get_state_dict(model, optimizer, options=ON_ROOT, ranks=ranks)
    assert bool(given[0]) == bool(given[1]) == (kit.rank == 0)
    hs.set_state_dict(
        model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST, ranks=ranks
    )
    assert live(kit, *build_stepped(kit, "plain")) == live(kit, model, optimizer)


@case(4)
def a_stage_loads_from_its_own_root_and_needs_nothing_of_the_others(kit: Kit) -> None:
    """S34: rank 0 does not know the other stage's state; stages load one after the other."""
    mesh, model, optimizer, _ = stage(kit)
    kit.fake_step(model, optimizer)
    given = hs.get_state_dict(model, optimizer, options=ON_ROOT)
    before = live(kit, model, optimizer)
    _, other, fresh, _ = stage(kit, start=900.0)
    if kit.rank >= 2:
        time.sleep(0.5)
    hs.set_state_dict(other, fresh, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST, ranks=mesh)
    assert before == live(kit, other, fresh)


@case(4)
def a_rank_that_does_not_come_is_named(kit: Kit) -> Any:
    """Those that came get an error, the late rank gets the same one, nothing is changed, and the next call works."""
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    given = hs.get_state_dict(*build_stepped(kit, "plain", steps=3), options=FULL)
    if kit.rank == 2:
        time.sleep(3 * CHECK_S)
    start = time.monotonic()
    text = refused(hs.AbsentRankError, hs.set_model_state_dict, model, given[0], options=FULL, timeout=CHECK_S)
    assert time.monotonic() - start < 3 * CHECK_S
    assert "rank 2" in text and "ranks=" in text and "set_model_state_dict" in text
    assert isinstance(hs.AbsentRankError(), TimeoutError)
    assert before == live(kit, model, optimizer)
    hs.set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=FULL)
    close(kit, given[0], hs.get_model_state_dict(model, options=FULL))
    return text


@case(4)
def a_rank_that_left_out_a_call_is_told_once_and_then_keeps_step(kit: Kit) -> None:
    model, _ = build_stepped(kit, "fsdp")
    if kit.rank == 2:
        time.sleep(1.5 * CHECK_S)
    else:
        refused(hs.AbsentRankError, hs.get_model_state_dict, model, options=FULL, timeout=CHECK_S)
    text = refused(hs.AbsentRankError, hs.get_model_state_dict, model, options=FULL, timeout=CHECK_S)
    assert "rank 2" in text
    if kit.rank == 2:
        time.sleep(3 * CHECK_S)  # until the others have given up waiting for it a second time
    for _ in range(2):
        assert set(SHAPES) == set(hs.get_model_state_dict(model, options=FULL))


@case(4)
def an_absent_leader_is_named_too(kit: Kit) -> Any:
    model, _ = build_stepped(kit, "fsdp")
    if kit.rank == 0:
        time.sleep(3 * CHECK_S)
    text = refused(hs.AbsentRankError, hs.get_model_state_dict, model, options=FULL, timeout=CHECK_S)
    assert "rank 0" in text and "ranks=" in text
    assert set(SHAPES) == set(hs.get_model_state_dict(model, options=FULL))
    return text


@case(4)
def unequal_sets_are_the_same_error_on_all(kit: Kit) -> Any:
    model, optimizer = build_stepped(kit, "plain")
    before = live(kit, model, optimizer)
    ranks = [0, 1, 2] if kit.rank == 0 else [0, 1, 2, 3]
    given = on_root(kit, hs.get_model_state_dict(model))
    text = refused(hs.ParticipantsError, hs.set_model_state_dict, model, given, options=BROADCAST, ranks=ranks)
    assert "[0, 1, 2]" in text and "[0, 1, 2, 3]" in text and "ranks=" in text
    assert isinstance(hs.ParticipantsError(), ValueError)
    assert before == live(kit, model, optimizer)
    hs.set_model_state_dict(model, given, options=BROADCAST)
    return text


@case(4)
def a_rank_that_is_not_in_ranks_is_told_so(kit: Kit) -> None:
    """The members go on without it."""
    model, _ = build_stepped(kit, "plain")
    given, ranks = on_root(kit, hs.get_model_state_dict(model)), [0, 1, 2]
    if kit.rank == 3:
        text = refused(hs.ParticipantsError, hs.set_model_state_dict, model, given, options=BROADCAST, ranks=ranks)
        assert "rank 3" in text and "[0, 1, 2]" in text
    else:
        hs.set_model_state_dict(model, given, options=BROADCAST, ranks=ranks)


@case(4)
def ranks_that_leave_out_a_member_of_a_mesh_are_refused(kit: Kit) -> None:
    model, optimizer = build_stepped(kit, "fsdp")
    before = live(kit, model, optimizer)
    ranks = [0, 1, 2]
    text = refused(hs.ParticipantsError, hs.get_model_state_dict, model, options=FULL, ranks=ranks)
    assert "[0, 1, 2]" in text and "3" in text
    assert before == live(kit, model, optimizer)
    assert set(SHAPES) == set(hs.get_model_state_dict(model, options=FULL))


@case(2)
def ranks_must_be_ranks_of_the_job(kit: Kit) -> Any:
    model = build(kit, "fsdp")
    texts = [
        refused(hs.ParticipantsError, hs.get_model_state_dict, model, options=FULL, ranks=ranks)
        for ranks in ([0, 7], [0, 0, 1], [])
    ]
    texts.append(refused(hs.OptionTypeError, hs.get_model_state_dict, model, options=FULL, ranks=3.5))
    assert set(SHAPES) == set(hs.get_model_state_dict(model, options=FULL))
    return texts


@case(4)
def equal_names_of_unequal_shape_need_ranks(kit: Kit) -> Any:
    """Names that are local to a stage: within the stage they are fine, among all ranks an error."""
    mesh = kit.mesh((2, 2), ("pp", "dp"))["dp"]
    shape = (4, 2) if kit.rank < 2 else (6, 2)
    model = kit.with_parameters({"layer.weight": tensor(kit, grid(shape), (mesh, ("S0",)))})
    text = refused(hs.DisagreementError, hs.get_model_state_dict, model, options=FULL, ranks=range(4))
    assert "'layer.weight'" in text and "ranks=" in text
    full = hs.get_model_state_dict(model, options=FULL, ranks=mesh)
    assert shape == kit.content(full["layer.weight"]).shape
    return text


# -- sources under broadcast -------------------------------------------------------------------------


@case(4)
def what_others_than_the_lowest_participant_pass_is_ignored_with_a_warning(kit: Kit) -> None:
    model, optimizer = build_stepped(kit, "fsdp")
    given = hs.get_state_dict(*build_stepped(kit, "plain", start=100.0 * kit.rank), options=FULL)
    with warned("only the source's values were used"):
        hs.set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST)
    expected = hs.get_state_dict(*build_stepped(kit, "plain"), options=FULL)
    close(kit, expected[0], hs.get_model_state_dict(model, options=FULL))
    text = refused(
        hs.IncompatibleStateError, hs.set_model_state_dict, model, given[0], options=BROADCAST, check_sources=True
    )
    assert "'dense.weight'" in text and "rank 1" in text
    same = expected if kit.rank in (0, 2) else ({}, {})
    hs.set_state_dict(
        model,
        optimizer,
        model_state_dict=same[0],
        optim_state_dict=same[1],
        options=BROADCAST,
        check_sources=True,
    )
    close(kit, expected[1]["state"], hs.get_optim_state_dict(model, optimizer, options=FULL)["state"])


@case(4)
def an_entry_that_the_lowest_participant_lacks_comes_from_its_own_mesh(kit: Kit) -> None:
    """Each stage's lowest rank passes the stage's entries; one call serves both stages."""
    _, model, optimizer, _ = stage(kit)
    kit.fake_step(model, optimizer)
    given = hs.get_state_dict(model, optimizer, options=ON_ROOT)
    before = live(kit, model, optimizer)
    _, other, fresh, _ = stage(kit, start=900.0)
    with silent():
        hs.set_state_dict(other, fresh, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST)
    assert before == live(kit, other, fresh)


@case(4)
def an_entry_that_no_rank_of_its_mesh_passes_comes_from_the_lowest_that_does(kit: Kit) -> None:
    """Rank 1 holds the checkpoint of all stages."""
    _, model, _, full = stage(kit, start=900.0)
    wanted = {f"stage{n}.{part}" for n in (0, 1) for part in ("weight", "bias")}
    given = {fqn: tensor(kit, grid((5, 3) if "weight" in fqn else (5,), 7.0)) for fqn in wanted}
    hs.set_model_state_dict(model, on_root(kit, given, root=1), options=BROADCAST)
    actual = hs.get_model_state_dict(model, options=FULL)
    assert shown(kit, tensor(kit, grid((5, 3), 7.0))) == shown(kit, actual[f"stage{kit.rank // 2}.weight"])
    assert set(full) == set(actual)


@case(4)
def an_entry_that_nobody_passes_is_missing_on_all(kit: Kit) -> Any:
    model, optimizer = build_stepped(kit, "mix")
    before = live(kit, model, optimizer)
    given = hs.get_model_state_dict(build(kit, "plain", start=5.0), options=FULL) if kit.rank == 0 else {}
    given.pop("odd.bias", None)
    text = refused(hs.IncompatibleStateError, hs.set_model_state_dict, model, given, options=BROADCAST)
    assert "'odd.bias'" in text
    assert before == live(kit, model, optimizer)
    result = hs.set_model_state_dict(model, given, options=LENIENT_BROADCAST)
    assert ["odd.bias"] == list(result.missing_keys)
    assert before["model"]["odd.bias"] == live(kit, model)["model"]["odd.bias"]
    return text


@case(4)
def one_replica_passes_its_shards_and_the_other_receives(kit: Kit) -> None:
    """S28: only one replica reads; the ranks of the other pass nothing."""
    inner = kit.mesh((2, 2), ("outer", "inner"))["inner"]
    model = build(kit, "hsdp", start=300.0)
    place = (inner, ("S0",))
    given = {fqn: tensor(kit, grid(shape, 1000.0 * n), place) for n, (fqn, shape) in enumerate(SHAPES.items())}
    hs.set_model_state_dict(model, given if kit.rank < 2 else {}, ranks=range(4))
    assert live(kit, build(kit, "hsdp")) == live(kit, model)


@case(2, setter=(False, True))
@case(4, setter=(True,))
def a_model_of_no_backend_is_refused_on_all_ranks_if_the_backend_is_named(kit: Kit, setter: bool) -> None:
    """One rank passes an object that is no model. The backend is known by name, so the others hear of it."""
    model = build(kit, "fsdp")
    full = hs.get_model_state_dict(model, options=FULL)
    before = live(kit, model)
    passed = model if kit.rank != 1 else object()
    with hs.use_backend(kit.name):
        if setter:
            text = refused(hs.BackendError, hs.set_model_state_dict, passed, full, options=FULL)
        else:
            text = refused(hs.BackendError, hs.get_model_state_dict, passed, options=FULL)
        assert "rank 1" in text and "object" in text
        assert before == live(kit, model)
        hs.set_model_state_dict(model, full, options=FULL)
