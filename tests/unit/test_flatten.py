"""The flat form of an optimizer dict: what is written is read back, or refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from values import Tensor, bits, look_alikes, values

from hyperstate import flatten_optim_state_dict
from hyperstate.errors import (
    IncompatibleStateError,
    InvalidStateDictError,
    OptionError,
    UnsupportedConfigurationError,
)
from hyperstate.flatten import alike, is_flat, unflatten_optim_state_dict
from hyperstate.fqn import split_key

HARD_NAMES = ["a", "a.b", "a.b.c", "b", "b.c", "a.exp_avg", "exp_avg", "0", "0.1", "1", "", ".", "a.", ".a", "a..b"]
HARD_NAMES += ["state", "state.a", "param_group.a", "param_groups", "global", "params", "ü.weight"]

fqns = st.sampled_from(HARD_NAMES)
keys = st.sampled_from(["exp_avg", "step", *HARD_NAMES])
odd_keys = keys | st.sampled_from([0, 1, True, None, (1, 2), 0.5])
fields = st.dictionaries(keys.filter(lambda name: name != "params"), values, min_size=1, max_size=3)


@st.composite
def optimizers(draw, names=fqns, state_keys=keys, fields=fields):
    """A nested dict in which each parameter stands in one group; some have no state."""
    members = draw(st.lists(names, unique=True, min_size=1, max_size=5))
    with_state = draw(st.lists(st.sampled_from(members), unique=True))
    state = {f: draw(st.dictionaries(state_keys, values, min_size=1, max_size=3)) for f in with_state}
    homes = [draw(st.integers(0, 2)) for _ in members]
    rows = [[f for f, home in zip(members, homes, strict=True) if home == n] for n in range(3)]
    groups = [{"params": row, **draw(fields)} for row in rows if row]
    return {"state": state, "param_groups": groups}


def grouping(nested):
    return [group["params"] for group in nested["param_groups"]]


def names_in(nested):
    return {*nested["state"], *(fqn for row in grouping(nested) for fqn in row)}


# -- there and back ------------------------------------------------------------------------------------


@given(
    optimizers(
        names=st.sampled_from(["w", "net.0.weight", "net.0.bias", "0", "ü.weight"]),
        state_keys=st.sampled_from(["step", "exp_avg", "0", "", "ü"]),
    )
)
def test_a_dict_with_plain_names_always_comes_back(nested):
    flat = flatten_optim_state_dict(nested)
    assert all(isinstance(key, str) for key in flat)
    assert (bits(nested), []) == _read(flat, nested)


@given(optimizers(state_keys=odd_keys))
def test_a_dict_with_any_names_comes_back_or_is_refused(nested):
    try:
        flat = flatten_optim_state_dict(nested)
    except UnsupportedConfigurationError as error:
        assert "'" in str(error)
        assert _hard(nested)
        return
    assert (bits(nested), []) == _read(flat, nested)


def _read(flat, nested):
    again, unexpected = unflatten_optim_state_dict(flat, names_in(nested), grouping(nested))
    state = {fqn: again["state"][fqn] for fqn in nested["state"] if fqn in again["state"]}
    assert state.keys() == again["state"].keys()
    return bits({**again, "state": state}), unexpected


def _hard(nested):
    """Whether some key is no string, or two splittings of one flat key are possible."""
    names = names_in(nested)
    slots = [(fqn, key) for fqn, held in nested["state"].items() for key in held]
    slots += [(fqn, key) for group in nested["param_groups"] for fqn in group["params"] for key in group]
    return any(not isinstance(key, str) for _, key in slots) or any(
        f"{fqn}.{key}".startswith(other + ".")
        for fqn, key in slots
        for other in names
        if other != fqn and len(other) > len(fqn)
    )


@given(optimizers(state_keys=keys.filter(lambda key: "." not in key)))
def test_pytorchs_prefix_comes_back_too(nested):
    try:
        flat = flatten_optim_state_dict(nested, dialect="torch")
    except UnsupportedConfigurationError:
        assert _hard(nested)
        return
    assert not any(key.startswith("param_group.") for key in flat)
    assert (bits(nested), []) == _read(flat, nested)


@given(
    optimizers(
        names=st.sampled_from(["w", "v", "net.0.weight", "net.0.bias"]),
        state_keys=st.just("step"),
        fields=st.dictionaries(st.sampled_from("xy"), look_alikes, min_size=1),
    )
)
def test_without_an_optimizer_parameters_with_equal_fields_form_a_group(nested):
    again, _ = unflatten_optim_state_dict(flatten_optim_state_dict(nested), names_in(nested))
    expected = {}
    for group in nested["param_groups"]:
        rest = {field: value for field, value in group.items() if field != "params"}
        expected.setdefault(bits(rest, ordered=False), []).extend(group["params"])
    assert list(expected.values()) == grouping(again)
    found = [{f: v for f, v in group.items() if f != "params"} for group in again["param_groups"]]
    assert list(expected) == [bits(each, ordered=False) for each in found]


@given(optimizers())
def test_flattening_neither_changes_nor_copies(nested):
    before = bits(nested)
    held = [id(value) for slots in nested["state"].values() for value in slots.values()]
    try:
        flat = flatten_optim_state_dict(nested)
    except UnsupportedConfigurationError:
        flat = None
    assert before == bits(nested)
    if flat is not None:
        assert held == [id(value) for key, value in flat.items() if key.startswith("state.")]


# -- the written form ----------------------------------------------------------------------------------

ADAM = {
    "state": {"net.0.weight": {"step": 3, "exp_avg": Tensor(1)}},
    "param_groups": [
        {"params": ["net.0.weight"], "lr": 0.1, "betas": (0.9, 0.99)},
        {"params": ["net.0.bias", "head"], "lr": 0.2, "betas": (0.9, 0.99)},
    ],
    "global": {"beta1_power": 0.5},
}
FLAT = {
    "state.net.0.weight.step": 3,
    "state.net.0.weight.exp_avg": ADAM["state"]["net.0.weight"]["exp_avg"],
    "param_group.net.0.weight.lr": 0.1,
    "param_group.net.0.weight.betas": (0.9, 0.99),
    "param_group.net.0.bias.lr": 0.2,
    "param_group.net.0.bias.betas": (0.9, 0.99),
    "param_group.head.lr": 0.2,
    "param_group.head.betas": (0.9, 0.99),
    "global.beta1_power": 0.5,
}
NAMES = {"net.0.weight", "net.0.bias", "head"}


def test_the_flat_form_is_one_level_under_state_and_param_group():
    assert FLAT == flatten_optim_state_dict(ADAM)
    assert ADAM == unflatten_optim_state_dict(FLAT, NAMES)[0]


def test_the_torch_dialect_differs_in_the_group_prefix_alone():
    expected = {key.replace("param_group.", "param_groups."): value for key, value in FLAT.items()}
    assert expected == flatten_optim_state_dict(ADAM, dialect="torch")
    assert ADAM == unflatten_optim_state_dict(expected, NAMES)[0]


def test_an_unknown_dialect_is_refused():
    with pytest.raises(OptionError, match=r"'pytorch'.*\['hyperstate', 'torch'\]"):
        flatten_optim_state_dict(ADAM, dialect="pytorch")


def test_nested_values_stay_one_value():
    nested = {
        "state": {"w": {"blocks": {"0": {"L": [1, (2,)]}, "empty": {}}}},
        "param_groups": [{"params": ["w"], "lr": 1}],
    }
    flat = flatten_optim_state_dict(nested)
    assert nested["state"]["w"]["blocks"] is flat["state.w.blocks"]
    assert nested == unflatten_optim_state_dict(flat, {"w"})[0]


def test_a_dot_in_a_key_stands_beside_a_nested_dict_of_the_same_path():
    """PyTorch makes one key of the two, and one value is lost."""
    nested = {"state": {"w": {"a.b": 0, "a": {"b": 1}}}, "param_groups": [{"params": ["w"], "lr": 1}]}
    flat = flatten_optim_state_dict(nested)
    assert {"state.w.a.b": 0, "state.w.a": {"b": 1}, "param_group.w.lr": 1} == flat
    assert nested == unflatten_optim_state_dict(flat, {"w"})[0]


def test_an_optimizer_without_state_keeps_its_groups():
    nested = {"state": {}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    assert nested == unflatten_optim_state_dict(flatten_optim_state_dict(nested), {"w", "v"})[0]


def test_an_empty_dict_stays_empty():
    assert {} == flatten_optim_state_dict({})
    assert {} == flatten_optim_state_dict({"state": {}, "param_groups": []})


# -- what can't be written -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        (
            {"state": {}, "param_groups": [{"params": ["w"], "lr": 1}, {"params": [], "lr": 2}]},
            "param group 1 has no param",
        ),
        ({"state": {"w": {}}, "param_groups": []}, "'w' has no state and its param group has no field"),
        ({"state": {}, "param_groups": [{"params": ["w"]}]}, "'w' has no state and its param group has no field"),
        ({"state": {"w": {3: 1}}, "param_groups": []}, "3 of 'w'.*int"),
        ({"state": {0: {"step": 1}}, "param_groups": []}, "0 is named by a int.*get_optim_state_dict"),
        ({"state": {"a": {"b.c": 1}, "a.b": {"c": 2}}, "param_groups": []}, "'b.c' of 'a'.*'a.b'"),
        ({"state": {"a": {"b.c": 1}}, "param_groups": [{"params": ["a", "a.b"], "lr": 1}]}, "'b.c' of 'a'.*'a.b'"),
        ({"state": {}, "param_groups": [{"params": ["a", "a.b"], "b.lr": 1}]}, "'b.lr' of 'a'.*'a.b'"),
        ({"state": {}, "param_groups": [{"params": ["w"], "lr": 1}], "global": {5: 1}}, "5 in 'global'"),
        ({"state": {}, "param_groups": [{"params": ["w"], "lr": 1}, {"params": ["w"], "lr": 2}]}, "'param_group.w.lr'"),
    ],
    ids=range(10),
)
def test_what_the_flat_form_would_lose_or_misread_is_refused_by_name(nested, message):
    with pytest.raises(UnsupportedConfigurationError, match=message):
        flatten_optim_state_dict(nested)


def test_pytorchs_form_refuses_a_dot_in_a_state_key_but_not_in_a_field():
    nested = {"state": {"w": {"a.b": 1}}, "param_groups": [{"params": ["w"], "lr": 1}]}
    with pytest.raises(UnsupportedConfigurationError, match="'a.b' of 'w'"):
        flatten_optim_state_dict(nested, dialect="torch")
    nested = {"state": {}, "param_groups": [{"params": ["w"], "a.b": 1}]}
    assert nested == unflatten_optim_state_dict(flatten_optim_state_dict(nested, dialect="torch"), {"w"})[0]


@pytest.mark.parametrize(
    "nested",
    [
        {"state.w.step": 1},
        {"model": {}},
        {"state": {"w": 3}, "param_groups": []},
        {"state": {}, "param_groups": [{"lr": 1}]},
        {"state": {}, "param_groups": [["w"]]},
    ],
    ids=range(5),
)
def test_what_is_no_nested_optimizer_dict_is_refused(nested):
    with pytest.raises(InvalidStateDictError):
        flatten_optim_state_dict(nested)


# -- reading -------------------------------------------------------------------------------------------


def test_pytorchs_deeper_keys_become_nested_dicts():
    """As `torch.distributed.checkpoint.state_dict._flatten_optim_state_dict` writes them: every key a string."""
    flat = {
        "state.w.step": 1,
        "state.w.blocks.0.L": 2,
        "state.w.blocks.0.R": 3,
        "state.w.blocks.1": 4,
        "param_groups.w.lr": 5,
    }
    expected = {"step": 1, "blocks": {"0": {"L": 2, "R": 3}, "1": 4}}
    assert expected == unflatten_optim_state_dict(flat, {"w"})[0]["state"]["w"]


def test_our_own_keys_are_not_split_further():
    flat = {"state.w.a.b": 1, "param_group.w.lr": 5}
    assert {"a.b": 1} == unflatten_optim_state_dict(flat, {"w"})[0]["state"]["w"]
    assert {"a.b": 1} == unflatten_optim_state_dict({"state.w.a.b": 1}, {"w"})[0]["state"]["w"]


@pytest.mark.parametrize("order", [1, -1])
def test_deeper_keys_that_contradict_each_other_are_refused(order):
    flat = dict([("state.w.a", {"c": 1}), ("state.w.a.b", 2), ("param_groups.w.lr", 5)][::order])
    with pytest.raises(IncompatibleStateError, match=r"'w' has the key 'a(\.b)?' and another"):
        unflatten_optim_state_dict(flat, {"w"})


def test_a_key_belongs_to_the_longest_parameter_name_that_fits():
    flat = {"state.a.b.c": 1, "state.a.c": 2, "state.a.b": 3}
    assert {"a.b": {"c": 1}, "a": {"c": 2, "b": 3}} == unflatten_optim_state_dict(flat, {"a", "a.b"})[0]["state"]
    assert {"a": {"b.c": 1, "c": 2, "b": 3}} == unflatten_optim_state_dict(flat, {"a"})[0]["state"]


def test_both_prefixes_may_stand_in_one_dict_but_not_for_one_field():
    flat = {"param_group.a.lr": 1, "param_groups.b.lr": 1}
    assert [{"params": ["a", "b"], "lr": 1}] == unflatten_optim_state_dict(flat, {"a", "b"})[0]["param_groups"]
    with pytest.raises(IncompatibleStateError, match="'lr' of 'a' stands under both"):
        unflatten_optim_state_dict({"param_group.a.lr": 1, "param_groups.a.lr": 1}, {"a"})


UNEXPECTED = [
    "state.other.step",
    "state.w",
    "state.wx.step",
    "param_group.other.lr",
    "param_groups.other.lr",
    "step",
    "optim.w.step",
    3,
]


@pytest.mark.parametrize("key", UNEXPECTED, ids=str)
def test_a_key_of_another_model_is_an_error_when_strict_and_reported_otherwise(key):
    flat = {"state.w.step": 1, "param_group.w.lr": 2, key: 3}
    with pytest.raises(IncompatibleStateError, match="unexpected keys.*" + repr(key)):
        unflatten_optim_state_dict(flat, {"w"})
    expected = {"state": {"w": {"step": 1}}, "param_groups": [{"params": ["w"], "lr": 2}]}
    assert (expected, [key]) == unflatten_optim_state_dict(flat, {"w"}, strict=False)


def test_all_unexpected_keys_are_listed_up_to_twenty_and_the_rest_counted():
    with pytest.raises(IncompatibleStateError, match=r"'state.x0.step'.*'state.x19.step' and 5 more"):
        unflatten_optim_state_dict({f"state.x{i}.step": 0 for i in range(25)}, {"w"})


def test_an_empty_flat_dict_is_refused():
    with pytest.raises(UnsupportedConfigurationError, match="empty"):
        unflatten_optim_state_dict({}, {"w"})
    with pytest.raises(RuntimeError):
        unflatten_optim_state_dict({}, {"w"})


def test_state_without_any_field_leaves_the_groups_to_the_target():
    assert {"state": {"w": {"step": 1}}, "param_groups": []} == unflatten_optim_state_dict(
        {"state.w.step": 1}, {"w"}, [["w"]]
    )[0]


def test_ten_thousand_parameters_are_read_with_a_few_looks_each():
    """Counted, not timed: one look into the known names per dot, however many names there are."""

    class Known(set):
        looks = 0

        def __contains__(self, name):
            Known.looks += 1
            return super().__contains__(name)

    names = [f"model.layers.{i}.weight" for i in range(10_000)]
    known = Known(names)
    nested = unflatten_optim_state_dict({f"state.{name}.exp_avg": 0 for name in names}, known)[0]
    assert names == list(nested["state"])
    assert len(names) == Known.looks


# -- small parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flat", "expected"),
    [
        (FLAT, True),
        (ADAM, False),
        ({}, False),
        ({"state": {}}, False),
        ({"param_groups": []}, False),
        ({"state": {}, "state.w.step": 1}, False),
        ({"param_groups.w.lr": 1}, True),
        ({"statement.w": 1}, False),
        ({3: 1}, False),
    ],
    ids=range(9),
)
def test_a_flat_dict_is_recognised_by_its_prefixes(flat, expected):
    assert expected == is_flat(flat)


@given(st.text("a.", max_size=8), st.sets(st.text("a.", max_size=5)))
def test_split_key_finds_the_longest_known_name_before_a_dot(key, known):
    fitting = [name for name in known if key.startswith(name + ".")]
    expected = max(((n, key[len(n) + 1 :]) for n in fitting), key=lambda pair: len(pair[0]), default=None)
    assert expected == split_key(key, known)


@given(look_alikes, look_alikes)
def test_alike_is_equality_of_type_and_bits(a, b):
    assert (bits(a, ordered=False) == bits(b, ordered=False)) == alike(a, b)


@given(values)
def test_every_value_is_alike_itself(value):
    assert alike(value, value)
