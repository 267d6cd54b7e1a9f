"""Keys of checkpoints: which parameter, group or shared value each of them names."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from hyperstate.flatten import flatten_optim_state_dict
from hyperstate.optimkeys import Named, read_keys

NAME = st.text("ab01_", min_size=1, max_size=3)
FQN = st.lists(NAME, min_size=1, max_size=3).map(".".join)
DICTS = st.dictionaries(FQN, st.dictionaries(NAME, st.just(0), min_size=1, max_size=3), min_size=1, max_size=4)


def strings(keys):
    return dict.fromkeys(keys)


def paths_of(value, path=()):
    """(path, value) of each leaf, as PyTorch's checkpoint library walks a dict."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths_of(item, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for i, item in enumerate(value):
            yield from paths_of(item, (*path, i))
    else:
        yield path, value


def joined(path):
    return ".".join(map(str, path))


@given(DICTS, st.lists(st.dictionaries(NAME, st.just(0), min_size=1), min_size=1, max_size=3))
def test_recorded_paths_decide(state, groups):
    nested = {"state": state, "param_groups": [{**group, "params": ["x"]} for group in groups]}
    paths = dict(paths_of(nested))
    assume(len({joined(path) for path in paths}) == len(paths))
    found = read_keys({joined(path): path for path in paths}, set(state))
    assert found.by_fqn is False
    assert {(one.owner, *one.path) for one in found.state} == {(fqn, key) for fqn in state for key in state[fqn]}
    assert {(one.owner, one.path) for one in found.groups} == {
        (i, (name,)) for i, group in enumerate(groups) for name in [*group, "params"]
    }


@given(DICTS, st.sampled_from(["hyperstate", "torch"]))
def test_flat_keys_are_read_as_they_were_written(state, dialect):
    groups = [{"params": list(state), "lr": 0.1, "params_scale": 2}]
    flat = flatten_optim_state_dict({"state": state, "param_groups": groups}, dialect=dialect)
    for keys in (strings(flat), {key: (key,) for key in flat}):
        found = read_keys(keys, set(state))
        assert found.by_fqn is True
        for one in found.state:
            assert one.key == f"state.{one.owner}.{joined(one.path)}"
            assert one.path[0] in state[one.owner]
        assert {(one.owner, one.path) for one in found.groups} == {
            (fqn, (name,)) for fqn in state for name in ("lr", "params_scale")
        }


@given(st.dictionaries(st.text(max_size=8), st.none() | st.lists(st.text(max_size=2) | st.integers(0, 3)).map(tuple)))
def test_any_keys_are_sorted_out_or_left_out(keys):
    found = read_keys(keys, {"a", "a.b"})
    assert {one.key for one in [*found.state, *found.groups, *found.shared]} <= set(keys)


def test_a_key_belongs_to_the_longest_known_name():
    found = read_keys(
        strings(["state.a.b.m", "state.a.m.x", "state.ab.m", "state.a", "a.b", "state.a.b"]), {"a", "a.b"}
    )
    assert [
        Named("state.a.b.m", "a.b", ("m",)),
        Named("state.a.m.x", "a", ("m", "x")),
        Named("state.a.b", "a", ("b",)),
    ] == found.state


def test_what_other_stages_own_is_left_out_whatever_form_it_is_in():
    flat = read_keys(
        strings(["param_groups.0.weight.lr", "param_groups.7.weight.lr", "state.7.weight.m"]), {"0.weight"}
    )
    assert [Named("param_groups.0.weight.lr", "0.weight", ("lr",))] == flat.groups
    assert [] == flat.state
    only_others = read_keys({"param_groups.7.weight.lr": ("param_groups.7.weight.lr",)}, {"0.weight"})
    assert ([], True, True) == (only_others.groups, only_others.by_fqn, only_others.seen)


def test_a_group_index_is_not_taken_for_a_parameter_of_that_name():
    nested = read_keys(strings(["param_groups.0.lr", "param_groups.0.params"]), {"0", "1"})
    assert [Named("param_groups.0.lr", 0, ("lr",)), Named("param_groups.0.params", 0, ("params",))] == nested.groups
    flat = read_keys(strings(["param_groups.0.lr", "param_groups.1.lr"]), {"0", "1"})
    assert [Named("param_groups.0.lr", "0", ("lr",)), Named("param_groups.1.lr", "1", ("lr",))] == flat.groups


def test_shared_state_and_foreign_keys():
    found = read_keys(strings(["global.step", "weight", "model.weight", "global"]), {"weight"})
    assert [Named("global.step", "", ("step",))] == found.shared
    assert found.seen
    assert not read_keys(strings(["weight", "state", "optim.state.weight.m"]), {"weight"}).seen


def test_a_recorded_path_that_is_not_the_keys_is_no_evidence():
    found = read_keys({"state.a.b": ("state", "a.b", "c")}, {"a"})
    assert [Named("state.a.b", "a", ("b",))] == found.state
