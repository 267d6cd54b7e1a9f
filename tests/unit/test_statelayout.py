"""What optimizer state is taken for: recorded layout, then the registry, then shapes, and never a guess."""

from __future__ import annotations

import pytest

from hyperstate import OptionError, register_state_layout, statelayout
from hyperstate.layout import Layout, Mesh, row
from hyperstate.schema import TensorSpec
from hyperstate.statelayout import (
    AMBIGUOUS,
    LOCAL,
    OPAQUE,
    fresh_state,
    is_sharded,
    meshes_of,
    read_state,
    rules_for,
)

PAIR = row([0, 1])
ROWS = Layout(PAIR, ((0,), ()))


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch):
    monkeypatch.setattr(statelayout, "_registry", {})


def param(shape, layout=ROWS, form=""):
    return TensorSpec("float32", shape, layout, form)


def plain(*shape):
    return TensorSpec("float32", shape)


def local(of):
    return TensorSpec("float32", of.shape, of.layout, LOCAL)


# -- the registry --------------------------------------------------------------------------------------


class Base:
    pass


class Derived(Base):
    pass


def test_subclasses_inherit_rules_and_replace_them():
    register_state_layout(Base, {"a": "like_param", "b": "replicated"})
    register_state_layout(Derived, {"b": "opaque_local"})
    assert {"a": "like_param", "b": "replicated"} == rules_for([Base], {})
    assert {"a": "like_param", "b": "opaque_local"} == rules_for([Derived], {})


def test_what_users_register_wins_over_what_the_backend_knows():
    register_state_layout(Base, {"a": "replicated"})
    known = {"a": "like_param", "c": "like_param"}
    assert {"a": "replicated", "c": "like_param"} == rules_for([Base], known)
    assert {"a": "like_param", "c": "like_param"} == known


def test_registering_a_key_again_replaces_its_rule():
    register_state_layout(Base, {"a": "replicated", "b": "replicated"})
    register_state_layout(Base, {"a": "like_param"})
    assert {"a": "like_param", "b": "replicated"} == rules_for([Base], {})


@pytest.mark.parametrize("rule", ["like-param", None, 3, "sharded"], ids=repr)
def test_an_unknown_rule_is_refused_and_nothing_is_registered(rule):
    with pytest.raises(OptionError, match=r"Base\['b'\] can't be " + repr(rule)):
        register_state_layout(Base, {"a": "replicated", "b": rule})
    assert {} == rules_for([Base], {})


# -- live state ----------------------------------------------------------------------------------------


def test_a_recorded_layout_is_believed():
    recorded = TensorSpec("float32", (4,), Layout(PAIR, ((0,),)))
    assert recorded == read_state(recorded, param((4, 3)), "replicated", 0)


@pytest.mark.parametrize(
    "of", [None, plain(2, 3), param((2, 3), Layout(PAIR, ((), ())))], ids=["none", "plain", "replicated"]
)
def test_state_of_a_parameter_that_is_not_sharded_is_what_it_looks_like(of):
    assert not is_sharded(of)
    assert plain(2, 3) == read_state(plain(2, 3), of, None, 0)


@pytest.mark.parametrize(
    ("of", "found", "rank"),
    [
        (param((7, 3)), (4, 3), 0),
        (param((5, 3)), (2, 3), 1),
        (param((1, 3)), (0, 3), 1),
        (param((4, 3)), (2, 3), 0),
    ],
    ids=["uneven", "uneven rest", "empty", "even"],
)
def test_a_tensor_of_the_local_shape_is_the_local_shard_where_no_statistic_can_be_meant(of, found, rank):
    """Uneven shards differ from rank to rank, as no replicated statistic does; (2, 3) is no reduction of (4, 3)."""
    assert local(of) == read_state(plain(*found), of, None, rank)


@pytest.mark.parametrize(
    ("shape", "layout", "found"),
    [
        ((2, 3), ROWS, (1, 3)),  # the mean over rows, kept as 1
        ((2,), Layout(PAIR, ((0,),)), (1,)),  # one element: a counter, perhaps
        ((4, 2, 3), Layout(PAIR, ((), (0,), ())), (4, 1, 3)),
    ],
    ids=str,
)
def test_a_local_shape_that_a_statistic_could_have_too_decides_nothing(shape, layout, found):
    assert AMBIGUOUS == read_state(plain(*found), param(shape, layout), None, 0).form


@pytest.mark.parametrize(("of", "found"), [(param((5, 3)), (3, 3)), (param((6, 3)), (3, 3)), (param((1, 3)), (1, 3))])
def test_a_rank_cannot_tell_its_shard_from_a_square_statistic_or_a_mean(of, found):
    """Even where other ranks' shards differ: this rank can't see them."""
    assert read_state(plain(*found), of, None, 0).form == AMBIGUOUS


@pytest.mark.parametrize("found", [(2, 3), (4,), (3,), (), (1,), (7,)], ids=str)
def test_a_tensor_of_another_shape_is_everybodys(found):
    of = param((8, 3))
    assert plain(*found) == read_state(plain(*found), of, None, 0)


def test_the_registry_decides_where_shapes_do_not():
    of, shard = param((2, 3)), plain(1, 3)
    assert local(of) == read_state(shard, of, "like_param", 0)
    assert shard == read_state(shard, of, "replicated", 0)
    assert OPAQUE == read_state(shard, of, "opaque_local", 0).form
    assert OPAQUE == read_state(plain(7), of, "opaque_local", 0).form


def test_like_param_does_not_make_a_shard_of_what_has_another_shape():
    """Rank 0 of an optimizer that keeps `exp_avg` of another parameter's shape."""
    assert plain(5, 3) == read_state(plain(5, 3), param((4, 3)), "like_param", 0)


# -- state of a fresh optimizer ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["", LOCAL])
def test_state_of_the_parameters_shape_is_laid_out_and_kept_like_the_parameter(form):
    of = param((4, 3), form=form)
    assert TensorSpec("bfloat16", (4, 3), ROWS, form) == fresh_state("bfloat16", (4, 3), of, None)
    assert TensorSpec("bfloat16", (4, 3), ROWS, form) == fresh_state("bfloat16", (4, 3), of, "like_param")


def test_counters_are_plain():
    for shape in ((), (1,), (1, 1)):
        assert plain(*shape) == fresh_state("float32", shape, param((4, 3)), None)


def test_the_registry_decides_for_a_fresh_optimizer():
    of = param((4, 3))
    assert plain(4, 3) == fresh_state("float32", (4, 3), of, "replicated")
    assert OPAQUE == fresh_state("float32", (4, 3), of, "opaque_local").form
    assert TensorSpec("float32", (4,), Layout(PAIR, ((0,),))) == fresh_state(
        "float32", (4,), of, lambda parameter, shape: Layout(parameter.layout.mesh, ((0,),))
    )
    assert plain(3) == fresh_state("float32", (3,), of, lambda parameter, shape: None)


def test_factored_moments_follow_the_dimension_that_they_keep():
    """Row means of a parameter sharded by rows are sharded, column means are everybody's."""
    of = param((8, 6))
    assert Layout(PAIR, ((0,),)) == fresh_state("float32", (8,), of, None).layout
    assert Layout(PAIR, ((0,), ())) == fresh_state("float32", (8, 1), of, None).layout
    assert Layout(PAIR, ((),)) == fresh_state("float32", (6,), of, None).layout
    assert Layout(PAIR, ((), ())) == fresh_state("float32", (1, 6), of, None).layout


def test_a_shape_that_rows_and_columns_share_is_not_guessed():
    assert AMBIGUOUS == fresh_state("float32", (6,), param((6, 6)), None).form


@pytest.mark.parametrize("shape", [(5,), (3, 8), (8, 6, 2)], ids=str)
def test_a_shape_that_nothing_explains_is_not_guessed(shape):
    assert AMBIGUOUS == fresh_state("float32", shape, param((8, 6)), None).form


def test_state_of_replicated_and_plain_parameters_is_not_cut():
    everywhere = Layout(Mesh((2,), (0, 1)), ((), ()))
    assert everywhere == fresh_state("float32", (4, 3), param((4, 3), everywhere), None).layout
    assert plain(4, 3) == fresh_state("float32", (4, 3), plain(4, 3), None)
    assert plain(5) == fresh_state("float32", (5,), plain(4, 3), None)


def test_meshes_come_once_in_order_of_appearance():
    other = row([2, 3])
    specs = [param((4, 3)), plain(2), param((4,), Layout(other, ((0,),))), param((8, 3))]
    assert [PAIR, other] == meshes_of(specs)


def rows_cut(spec, shape):
    """A rule: what has the parameter's rows is cut as they are, all else is everybody's."""
    assert spec.layout is not None
    if shape and shape[0] == spec.shape[0]:
        return Layout(spec.layout.mesh, (spec.layout.splits[0], *((),) * (len(shape) - 1)))
    return None


def test_a_function_tells_how_a_live_plain_tensor_is_laid_out():
    found = read_state(plain(2), param((4, 6)), rows_cut, 0)
    assert found == TensorSpec("float32", (4,), Layout(ROWS.mesh, ((0,),)), LOCAL)
    assert read_state(plain(6), param((4, 6)), rows_cut, 0) == plain(6)


def test_a_function_under_which_two_readings_fit_decides_nothing():
    assert read_state(plain(2), param((4, 2)), rows_cut, 0).form == AMBIGUOUS
