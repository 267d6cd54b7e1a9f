"""What `extra=` of a save may hold, and how it is told where in it something has no place."""

from __future__ import annotations

import math

import pytest

import hyperstate as hs
from hyperstate.checkpoint.extra import take_extra
from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.schema import MAX_DEPTH
from hyperstate_numpy.job import run_ranks
from hyperstate_numpy.kit import Kit


def nested(levels, wrap):
    value = 1
    for _ in range(levels):
        value = wrap(value)
    return value


WRAPS = {"lists": lambda v: [v], "tuples": lambda v: (v,), "dicts": lambda v: {"k": v}}


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        (object(), "extra is of type builtins.object"),
        ({"rng": [1, 2, {3}]}, "extra['rng'][2] is of type builtins.set"),
        ({1: ({b"k": range(3)},)}, "extra[1][0][b'k'] is of type builtins.range"),
        ({"at": {frozenset(): 1}}, "the key (frozenset) of extra['at'] is of type builtins.frozenset"),
        ({(1, object()): 1}, "the key (tuple) of extra[1] is of type builtins.object"),
    ],
)
def test_what_has_no_place_in_extra_is_named_with_the_path_to_it(extra, where):
    with pytest.raises(UnsupportedConfigurationError) as caught:
        take_extra(extra)
    assert str(caught.value).startswith("extra= may hold numbers, text, bytes, None, lists, tuples and dicts")
    assert str(caught.value).endswith(where)


def itself():
    value = {"a": []}
    value["a"].append(value)
    return value


DEEP = {f"{name} too deep": nested(MAX_DEPTH + 1, wrap) for name, wrap in WRAPS.items()}
DEEP |= {f"{name} much too deep": nested(20_000, wrap) for name, wrap in WRAPS.items() if name != "tuples"}


@pytest.mark.parametrize("extra", [*DEEP.values(), itself()], ids=[*DEEP, "itself"])
def test_what_is_nested_too_deep_on_one_rank_is_refused_on_all_and_nothing_is_changed(tmp_path, extra):
    def body(rank):
        kit = Kit()
        model = kit.with_parameters({"w": kit.tensor([1.0, 2.0])})
        hs.save(tmp_path / "c", model, extra="first")
        with pytest.raises(hs.UnsupportedConfigurationError) as caught:
            hs.save(tmp_path / "c", model, extra=extra if rank else None)
        return str(caught.value), hs.load(tmp_path / "c", model).extra

    (found,) = set(run_ranks(2, body, timeout=20))
    assert "rank 1: extra=" in found[0] and "more than 100 levels deep, or holds itself" in found[0]
    assert "first" == found[1]


def same(a, b):
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return a == b and type(a) is type(b)


VALUES = {
    "nan": math.nan,
    "-inf": -math.inf,
    "large": 10**5000,
    "large negative": -(2**1024),
    "bool": True,
    "complex": 1 + 2j,
    "bytes": b"\x00\xff",
    "text": "\ud800é",
    "tuple": (1, [2], ()),
    "keys": {1: "a", "1": "b", None: "c", 1.5: "d", (1, "x"): "e", b"b": {}},
    **{f"deep {name}": nested(MAX_DEPTH, wrap) for name, wrap in WRAPS.items()},
}


@pytest.mark.parametrize("extra", VALUES.values(), ids=VALUES)
def test_values_come_back_with_their_types(tmp_path, extra):
    model = Kit().with_parameters({"w": Kit().tensor([1.0])})
    hs.save(tmp_path / "c", model, extra=extra)
    assert same(extra, hs.load(tmp_path / "c", model).extra)


def test_state_that_is_nested_too_deep_is_named_and_nothing_is_changed(tmp_path):
    kit = Kit()
    model = kit.with_parameters({"w": kit.tensor([1.0])})
    optimizer = kit.optimizer(model, "custom")
    kit.state(optimizer, kit.named(model)["w"])["history"] = nested(MAX_DEPTH + 1, WRAPS["lists"])
    with pytest.raises(hs.UnsupportedConfigurationError, match=r"w.*history.*more than 100 levels deep"):
        hs.save(tmp_path / "c", model, optimizer)
    assert not (tmp_path / "c").exists()
