"""What a value is survives every form and every way: Python types, dtypes, buffers, factored and local state."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import (
    BROADCAST,
    FULL,
    ON_HOST,
    ON_ROOT,
    build,
    case,
    grid,
    live,
    on_root,
    placing,
    refused,
    shown,
    state_of,
    tensor,
    warned,
)
from hyperstate.testing.kit import Kit

DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)


def odd_values(kit: Kit) -> dict[Any, Any]:
    """State values of many types. All are equal on all ranks."""
    return {
        **{"one": 1, "yes": True, "no": False, "zero": 0, "none": None, "text": "a.b", "empty": "", "huge": -(2**70)},
        **{"real": 0.1, "nan": nan, "inf": -inf, "minus": -0.0, "wave": 1 - 2j, "raw": b"\x00\xff"},
        **{"pair": (1, 2.0), "single": (True,), "nothing": (), "list": [], "dict": {}},
        **{"deep": {"a": [{}, ()], 1: {2: (None,)}}},
        **{"number": tensor(kit, 2.5), "count": tensor(kit, 7, dtype="int64"), "vector": tensor(kit, [2.5])},
        **{"tensors": [tensor(kit, [1.0]), (tensor(kit, 3, dtype="int32"), {"x": tensor(kit, True, dtype="bool")})]},
    }


def fill(kit: Kit, values: dict[Any, Any], integer_key: bool = True) -> tuple[Any, Any]:
    """A model, sharded where there are ranks, and an optimizer that keeps `values` for one parameter."""
    model = build(kit, "plain" if kit.world == 1 else "fsdp")
    optimizer = kit.optimizer(model, "custom")
    kit.state(optimizer, kit.named(model)["odd.weight"]).update({**values, **({5: "five"} if integer_key else {})})
    return model, optimizer


@case(1, form=["sharded", "host", "full"])
@case(2, form=["sharded", "host", "full", "root"])
def python_values_keep_their_types_in_every_form_and_on_every_way(kit: Kit, form: str) -> None:
    """A tuple stays a tuple, an integer key an integer key, True is not 1, a 0-d tensor no number; empty ones stay."""
    options = {"sharded": None, "host": ON_HOST, "full": FULL, "root": ON_ROOT}[form]
    model, optimizer = fill(kit, odd_values(kit))
    expected = shown(kit, {**odd_values(kit), 5: "five"})
    given = hs.get_optim_state_dict(model, optimizer, options=options)
    if form != "root" or kit.rank == 0:
        assert expected == shown(kit, given["state"]["odd.weight"])
        assert list(odd_values(kit)) == list(given["state"]["odd.weight"])[:-1]
    other = build(kit, "plain" if kit.world == 1 else "fsdp")
    fresh = kit.optimizer(other, "custom")
    hs.set_optim_state_dict(other, fresh, given, options={"full": FULL, "root": BROADCAST}.get(form))
    assert expected == shown(kit, state_of(kit, other, fresh, "odd.weight"))


@case(1, broadcast=[False])
@case(2, broadcast=[False, True])
def python_values_keep_their_types_in_the_flat_form(kit: Kit, broadcast: bool) -> None:
    options = hs.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    model, optimizer = fill(kit, odd_values(kit), integer_key=False)
    flat = hs.get_optim_state_dict(model, optimizer, options=options)
    expected = {f"state.odd.weight.{key}": shown(kit, value) for key, value in odd_values(kit).items()}
    assert expected == {key: shown(kit, value) for key, value in flat.items() if key.startswith("state.")}
    other = build(kit, "plain" if kit.world == 1 else "fsdp")
    fresh = kit.optimizer(other, "custom")
    passed = on_root(kit, flat) if broadcast else flat
    hs.set_optim_state_dict(other, fresh, passed, options=BROADCAST if broadcast else FULL)
    assert shown(kit, odd_values(kit)) == shown(kit, state_of(kit, other, fresh, "odd.weight"))


@case(1, 2)
def group_fields_keep_their_types(kit: Kit) -> None:
    fields = {**odd_values(kit), "long": tensor(kit, [1.0, 2.0, 3.0])}
    model = build(kit, "plain" if kit.world == 1 else "fsdp")
    optimizer = kit.optimizer(model, "custom", groups=[(list(kit.named(model)), fields)])
    for options, way in ((None, FULL), (ON_HOST, FULL), (FULL, FULL), (ON_ROOT, BROADCAST)):
        given = hs.get_optim_state_dict(model, optimizer, options=options)
        other = build(kit, "plain" if kit.world == 1 else "fsdp")
        fresh = kit.optimizer(other, "custom")
        hs.set_optim_state_dict(other, fresh, given, options=way)
        actual = kit.groups(fresh)[0]
        assert shown(kit, fields) == shown(kit, {key: actual[key] for key in fields})


@case(1, dtype=DTYPES, topology=["plain"])
@case(4, dtype=DTYPES, topology=["hsdp"])
def every_dtype_goes_round_bit_for_bit(kit: Kit, dtype: str, topology: str) -> None:
    shapes = {"w": (5, 3), "v": (2,)}
    places = placing(kit, topology, shapes)
    values = {"w": [[(7 * i + 3 * j) % 5 % 2 for j in range(3)] for i in range(5)], "v": [1, 0]}

    def made(numbers: Any) -> tuple[Any, Any]:
        model = kit.with_parameters({fqn: tensor(kit, numbers[fqn], places[fqn], dtype) for fqn in shapes})
        optimizer = kit.optimizer(model, "custom")
        for fqn, param in kit.named(model).items():
            kit.state(optimizer, param)["m"] = tensor(kit, numbers[fqn], places[fqn], dtype)
        return model, optimizer

    model, optimizer = made(values)
    full = hs.get_state_dict(model, optimizer, options=FULL)
    expected = {fqn: shown(kit, tensor(kit, values[fqn], dtype=dtype)) for fqn in shapes}
    assert expected == {fqn: shown(kit, value) for fqn, value in full[0].items()}
    assert expected == {fqn: shown(kit, slots["m"]) for fqn, slots in full[1]["state"].items()}
    other, fresh = made({"w": [[0] * 3] * 5, "v": [0, 0]})
    passed = [on_root(kit, each) for each in full]
    hs.set_state_dict(other, fresh, model_state_dict=passed[0], optim_state_dict=passed[1], options=BROADCAST)
    assert live(kit, model, optimizer) == live(kit, other, fresh)


# -- buffers -----------------------------------------------------------------------------------------


@case(1, broadcast=[False])
@case(2, broadcast=[False, True])
def buffers_are_loaded_unless_they_are_not_persistent(kit: Kit, broadcast: bool) -> None:
    """S24."""

    def made(n: int) -> Any:
        model = build(kit, "plain" if kit.world == 1 else "fsdp")
        kit.add_buffer(model, "counts", tensor(kit, [n, n + 1, 2**40 + n], dtype="int64"))
        kit.add_buffer(model, "mask", tensor(kit, [[True, n > 1], [n > 1, False]], dtype="bool"))
        kit.add_buffer(model, "seen", tensor(kit, n, dtype="int64"))
        kit.add_buffer(model, "ready", tensor(kit, n > 1, dtype="bool"))
        kit.add_buffer(model, "cache", tensor(kit, [float(n)]), persistent=False)
        return model

    source, model = made(5), made(1)
    given = hs.get_model_state_dict(source, options=FULL)
    assert {"counts", "mask", "seen", "ready"} == given.keys() - set(kit.named(build(kit, "plain")))
    expected = {**live(kit, source)["model"], "cache": live(kit, model)["model"]["cache"]}
    passed = on_root(kit, given) if broadcast else given
    hs.set_model_state_dict(model, passed, options=BROADCAST if broadcast else FULL)
    assert expected == live(kit, model)["model"]


@case(2, 4)
def buffers_that_differ_between_ranks_are_the_roots_in_the_full_form(kit: Kit) -> Any:
    """Running statistics of replicas differ; the sharded form keeps each rank's own."""
    model = build(kit, "fsdp")
    kit.add_buffer(model, "mean", tensor(kit, [1.0 + kit.rank, 2.0]))
    kit.add_buffer(model, "seen", tensor(kit, 10 + kit.rank, dtype="int64"))
    own = {key: shown(kit, value) for key, value in hs.get_model_state_dict(model).items() if key in ("mean", "seen")}
    assert {key: live(kit, model)["model"][key] for key in own} == own
    full = hs.get_model_state_dict(model, options=FULL)
    assert shown(kit, tensor(kit, 10, dtype="int64")) == shown(kit, full["seen"])
    assert shown(kit, tensor(kit, [1.0, 2.0])) == shown(kit, full["mean"])
    return shown(kit, full["mean"])


@case(2)
def running_statistics_and_their_counter_reach_all_ranks(kit: Kit) -> None:
    mesh = kit.mesh((2,), ("dp",))
    source = kit.model()
    kit.train(source, kit.optimizer(source), 3)
    model = kit.shard(kit.model(seed=3), mesh)
    given = hs.get_model_state_dict(source, options=FULL)
    hs.set_model_state_dict(model, on_root(kit, given), options=BROADCAST)
    assert shown(kit, given) == shown(kit, hs.get_model_state_dict(model, options=FULL))


# -- state of other shapes ---------------------------------------------------------------------------


def factored(kit: Kit, topology: str, rows: int, columns: int, start: float) -> tuple[Any, Any]:
    """A parameter with a sharded row statistic and a column statistic that every rank keeps."""
    shapes = {"w": (rows, columns), "r": (rows,)}
    places = placing(kit, topology, shapes)
    model = kit.with_parameters({"w": tensor(kit, grid((rows, columns)), places["w"])})
    optimizer = kit.optimizer(model, "custom")
    slots = kit.state(optimizer, kit.named(model)["w"])
    slots["row"] = tensor(kit, grid((rows,), start), places["r"])
    slots["col"] = tensor(kit, grid((columns,), start + 50))
    slots["step"] = tensor(kit, 3.0)
    return model, optimizer


@case(1, topology=["plain"], fresh=[True, False])
@case(2, topology=["fsdp"], fresh=[True, False])
@case(4, topology=["fsdp", "hsdp"], fresh=[True, False])
def factored_state_has_its_own_global_shape(kit: Kit, topology: str, fresh: bool) -> None:
    """S12: rows that do not divide."""
    model, optimizer = factored(kit, topology, 7, 5, 10.0)
    full = hs.get_optim_state_dict(model, optimizer, options=FULL)
    expected = {"row": grid((7,), 10.0), "col": grid((5,), 60.0), "step": 3.0}
    expected = {key: tensor(kit, value) for key, value in expected.items()}
    assert shown(kit, expected) == shown(kit, full["state"]["w"])
    other, target = factored(kit, topology, 7, 5, 90.0)
    if fresh:
        target = kit.optimizer(other, "custom")
    hs.set_optim_state_dict(other, target, on_root(kit, full), options=BROADCAST)
    assert shown(kit, full) == shown(kit, hs.get_optim_state_dict(other, target, options=FULL))
    mine, theirs = (state_of(kit, *pair, "w") for pair in ((model, optimizer), (other, target)))
    assert shown(kit, mine["row"]) == shown(kit, theirs["row"])
    assert fresh or shown(kit, mine) == shown(kit, theirs)


@case(2)
def a_statistic_that_could_be_rows_or_columns_needs_a_registered_layout(kit: Kit) -> Any:
    model, optimizer = factored(kit, "fsdp", 6, 6, 10.0)
    full = hs.get_optim_state_dict(model, optimizer, options=FULL)
    target = kit.optimizer(model, "custom")
    text = refused(hs.AmbiguousLayoutError, hs.set_optim_state_dict, model, target, full, options=FULL)
    assert "'w'" in text and "register_state_layout" in text
    rows = tensor(kit, grid((6,)), placing(kit, "fsdp", {"r": (6,)})["r"])
    assert kit.is_sharded(rows)
    hs.register_state_layout(type(target), {"row": lambda param, shape: _rows(param), "col": "replicated"})
    hs.set_optim_state_dict(model, target, full, options=FULL)
    assert shown(kit, state_of(kit, model, optimizer, "w")) == shown(kit, state_of(kit, model, target, "w"))
    return text


def _rows(param: Any) -> Any:
    """The layout of a statistic that has one number per row of a parameter."""
    return type(param.layout)(param.layout.mesh, param.layout.splits[:1])


@case(2, 4)
def quantised_local_state_is_exact_in_the_sharded_form_and_refused_in_the_full_one(kit: Kit) -> Any:
    """S14: packed codes and scales per block, other on each rank, of sizes that do not follow the parameter."""
    place = placing(kit, "fsdp", {"w": (9, 4)})["w"]

    def made(filled: bool) -> tuple[Any, Any]:
        model = kit.with_parameters({"w": tensor(kit, grid((9, 4)), place)})
        optimizer = kit.optimizer(model, "custom")
        if filled:
            size = len(kit.content(kit.named(model)["w"]).data) // 8 + 2
            codes = tensor(kit, [(kit.rank + n) % 256 for n in range(size)], dtype="uint8")
            kit.state(optimizer, kit.named(model)["w"]).update(codes=codes, scale=tensor(kit, [kit.rank + 0.5, 2.0]))
        return model, optimizer

    model, optimizer = made(True)
    text = refused(hs.AmbiguousLayoutError, hs.get_optim_state_dict, model, optimizer, options=FULL)
    assert "'w'" in text and ("'codes'" in text or "'scale'" in text)
    hs.register_state_layout(type(optimizer), {"codes": "opaque_local", "scale": "opaque_local"})
    opaque = refused(hs.AmbiguousLayoutError, hs.get_optim_state_dict, model, optimizer, options=FULL)
    assert "opaque_local" in opaque
    given = hs.get_optim_state_dict(model, optimizer, options=ON_HOST)
    other, fresh = made(False)
    hs.set_optim_state_dict(other, fresh, given)
    assert live(kit, model, optimizer)["state"] == live(kit, other, fresh)["state"]
    return [text, opaque]


# -- local state -------------------------------------------------------------------------------------


def local_state(kit: Kit, shape: tuple[int, ...], start: float) -> tuple[Any, Any, Any]:
    """A parameter over all ranks with a plain tensor of the local shape as state; and the full value."""
    place = placing(kit, "fsdp", {"w": shape})["w"]
    model = kit.with_parameters({"w": tensor(kit, grid(shape), place)})
    optimizer = kit.optimizer(model, "custom")
    part = kit.content(tensor(kit, grid(shape, start), place))
    before = -(-shape[0] // kit.world) * kit.rank
    slots = kit.state(optimizer, kit.named(model)["w"])
    slots["m"] = kit.tensor(grid(shape, start)[before : before + part.shape[0]])
    assert part == kit.content(slots["m"])
    return model, optimizer, grid(shape, start)


@case(2, shape=[(2, 1), (6, 3)])
def a_shard_that_a_statistic_could_be_too_decides_nothing(kit: Kit, shape: list[int]) -> Any:
    """(2, 1) over two ranks leaves (1, 1), which a mean has too, (6, 3) a square, as preconditioners are: it asks."""
    model, optimizer, full = local_state(kit, tuple(shape), 10.0)
    text = refused(hs.AmbiguousLayoutError, hs.get_optim_state_dict, model, optimizer, options=FULL)
    assert "'w'" in text and "'m'" in text and "register_state_layout" in text
    with warned("'m'", "register_state_layout"):
        plain = hs.get_optim_state_dict(model, optimizer)
    assert not kit.is_sharded(plain["state"]["w"]["m"])
    hs.register_state_layout(type(optimizer), {"m": "like_param"})
    actual = hs.get_optim_state_dict(model, optimizer, options=FULL)
    assert shown(kit, tensor(kit, full)) == shown(kit, actual["state"]["w"]["m"])
    assert kit.is_sharded(hs.get_optim_state_dict(model, optimizer)["state"]["w"]["m"])
    return text


@case(2, 4, trained=[False, True])
def local_state_comes_back_in_the_form_that_the_optimizer_keeps(kit: Kit, trained: bool) -> None:
    """S13, uneven."""
    model, optimizer, full = local_state(kit, (7, 2), 10.0)
    given = hs.get_optim_state_dict(model, optimizer, options=ON_ROOT)
    if kit.rank == 0:
        assert shown(kit, tensor(kit, full)) == shown(kit, given["state"]["w"]["m"])
    other, target, _ = local_state(kit, (7, 2), 90.0)
    if not trained:
        target = kit.optimizer(other, "custom")
    form = None if trained else "local"
    hs.set_optim_state_dict(other, target, given, options=BROADCAST, state_form=form)
    assert live(kit, model, optimizer)["state"] == live(kit, other, target)["state"]
    fresh = kit.optimizer(other, "custom")
    hs.set_optim_state_dict(other, fresh, given, options=BROADCAST, state_form="sharded")
    assert kit.is_sharded(state_of(kit, other, fresh, "w")["m"])


@case(2)
def a_plain_value_that_differs_between_ranks_has_no_full_form(kit: Kit) -> Any:
    model, optimizer, _ = local_state(kit, (7, 2), 10.0)
    slots = kit.state(optimizer, kit.named(model)["w"])
    slots["m"] = tensor(kit, [1.0, 2.0, 3.0 + kit.rank])
    text = refused(hs.AmbiguousLayoutError, hs.get_optim_state_dict, model, optimizer, options=FULL)
    assert "'w'" in text and "'m'" in text
    del slots["m"]
    slots["step"] = tensor(kit, 5.0 + kit.rank)
    return [text, refused(hs.DisagreementError, hs.get_optim_state_dict, model, optimizer, options=FULL)]
