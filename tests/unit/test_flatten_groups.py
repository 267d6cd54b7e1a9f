"""Groups of a flat optimizer dict: the target's own, or those of equal fields."""

from __future__ import annotations

import math
import warnings

import pytest

from hyperstate.errors import IncompatibleStateError
from hyperstate.flatten import unflatten_optim_state_dict


def grouping(nested):
    return [group["params"] for group in nested["param_groups"]]


def test_the_targets_grouping_comes_back_whatever_the_fields_are():
    flat = {f"param_group.{fqn}.lr": 0.1 for fqn in "abcd"}
    groups = unflatten_optim_state_dict(flat, set("abcd"), [["d"], [], ["a", "c"], ["e"]])[0]["param_groups"]
    assert [["d"], [], ["a", "c"], ["b"]] == [group["params"] for group in groups]
    assert {"params": []} == groups[1]


def test_groups_with_other_learning_rates_stay_apart():
    """The predecessor made one group of all."""
    flat = {"param_group.a.lr": 1, "param_group.b.lr": 2, "param_group.c.lr": 1}
    expected = [{"params": ["a", "c"], "lr": 1}, {"params": ["b"], "lr": 2}]
    assert expected == unflatten_optim_state_dict(flat, set("abc"))[0]["param_groups"]


@pytest.mark.parametrize(
    "pair", [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ("1", 1), (None, False), ({}, [])], ids=str
)
def test_fields_that_python_calls_equal_or_empty_alike_make_groups_of_their_own(pair):
    flat = {"param_group.a.x": pair[0], "param_group.b.x": pair[1]}
    assert [["a"], ["b"]] == grouping(unflatten_optim_state_dict(flat, {"a", "b"})[0])


def test_nan_is_equal_to_itself_as_a_field():
    flat = {"param_group.a.x": math.nan, "param_group.b.x": float("nan")}
    assert [["a", "b"]] == grouping(unflatten_optim_state_dict(flat, {"a", "b"})[0])


def test_a_parameter_with_state_and_no_field_does_not_hide_the_fields_of_its_group():
    """The predecessor lost the learning rate of the whole group here."""
    flat = {"state.a.step": 1, "param_group.b.lr": 0.5}
    assert [{"params": ["a", "b"], "lr": 0.5}] == unflatten_optim_state_dict(flat, {"a", "b"}, [["a", "b"]])[0][
        "param_groups"
    ]


def test_one_target_group_with_two_values_is_an_error_when_strict_and_else_a_warning():
    flat = {"param_group.a.lr": 1, "param_group.b.lr": 2}
    with pytest.raises(IncompatibleStateError, match="param group 0 .* 'lr': 1 of 'a' and 2 of 'b'"):
        unflatten_optim_state_dict(flat, {"a", "b"}, [["a", "b"]])
    with pytest.warns(UserWarning, match="'lr': 1 of 'a' and 2 of 'b'; the first is used"):
        found = unflatten_optim_state_dict(flat, {"a", "b"}, [["a", "b"]], strict=False)
    assert [{"params": ["a", "b"], "lr": 1}] == found[0]["param_groups"]


def test_equal_fields_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat = {"param_group.a.betas": (0.9, math.nan), "param_group.b.betas": (0.9, math.nan)}
        unflatten_optim_state_dict(flat, {"a", "b"}, [["a", "b"]], strict=False)
