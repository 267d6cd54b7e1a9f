"""`StateDictOptions` and whatever may stand for it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict
from itertools import product
from types import SimpleNamespace

import pytest

from hyperstate import HyperstateError, OptionError, OptionTypeError, StateDictOptions
from hyperstate.options import read_options

FLAGS = {
    "full_state_dict": False,
    "cpu_offload": False,
    "ignore_frozen_params": False,
    "broadcast_from_rank0": False,
    "flatten_optimizer_state_dict": False,
    "strict": True,
    "keep_submodule_prefixes": True,
}
DEFAULTS = {**FLAGS, "names": "own"}


def test_the_defaults_are_those_of_the_specification():
    assert DEFAULTS == asdict(StateDictOptions())
    assert StateDictOptions() == read_options(None)


def test_every_combination_is_accepted_but_broadcast_without_full():
    for values in product([False, True], repeat=len(FLAGS)):
        chosen = {**dict(zip(FLAGS, values, strict=True)), "names": "neutral"}
        if chosen["broadcast_from_rank0"] and not chosen["full_state_dict"]:
            with pytest.raises(OptionError, match="broadcast_from_rank0=True needs full_state_dict=True"):
                StateDictOptions(**chosen)
        else:
            assert chosen == asdict(read_options(SimpleNamespace(**chosen)))


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "yes", None], ids=repr)
def test_a_value_that_is_no_bool_is_refused_by_name(name, value):
    with pytest.raises(OptionError, match=f"StateDictOptions.{name} must be True or False, not {value!r}"):
        StateDictOptions(**{name: value})
    with pytest.raises(ValueError, match=name):
        read_options(SimpleNamespace(**{name: value}))


@pytest.mark.parametrize("name", FLAGS)
def test_an_object_with_one_of_the_attributes_has_the_defaults_for_the_rest(name):
    options = (
        SimpleNamespace(full_state_dict=True, **{name: not DEFAULTS[name], "dsd_fqn_modifiers": "_fqn_modifiers"})
        if name != "full_state_dict"
        else SimpleNamespace(full_state_dict=True)
    )
    assert {**DEFAULTS, "full_state_dict": True, name: not DEFAULTS[name]} == asdict(read_options(options))


@pytest.mark.parametrize("names", ["pytorch", "", None, True], ids=repr)
def test_names_are_own_or_neutral(names):
    with pytest.raises(OptionError, match="StateDictOptions.names must be 'own' or 'neutral', not " + repr(names)):
        read_options(SimpleNamespace(names=names))


def test_options_are_returned_as_they_are_and_can_not_be_changed():
    options = StateDictOptions(strict=False)
    assert options is read_options(options)
    with pytest.raises(FrozenInstanceError):
        options.strict = True


@pytest.mark.parametrize("options", [{}, {"strict": False}])
def test_a_mapping_is_refused_and_told_how_to_become_options(options):
    with pytest.raises(OptionTypeError, match=r"dict; pass StateDictOptions\(\*\*options\)"):
        read_options(options)


@pytest.mark.parametrize("options", [object(), True, "strict", SimpleNamespace(full_statedict=True)], ids=repr)
def test_an_object_with_none_of_the_attributes_is_a_type_error(options):
    with pytest.raises(TypeError, match="none of the attributes full_state_dict, cpu_offload"):
        read_options(options)


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="full_statedict"):
        StateDictOptions(full_statedict=True)


def test_option_errors_are_errors_of_this_library_too():
    assert issubclass(OptionError, HyperstateError)
    assert issubclass(OptionTypeError, HyperstateError)


def test_pytorchs_modifiers_of_names_are_refused():
    with pytest.raises(OptionError, match="dsd_fqn_modifiers"):
        read_options(SimpleNamespace(full_state_dict=True, dsd_fqn_modifiers="mine"))
