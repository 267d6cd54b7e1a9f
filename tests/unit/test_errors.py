"""The tree of errors, and how faults of many ranks become one error."""

from __future__ import annotations

import builtins
import inspect
import random
import re

import pytest

from hyperstate import errors
from hyperstate.errors import (
    SCREENFUL,
    DisagreementError,
    Fault,
    HyperstateError,
    IncompatibleStateError,
    OptionError,
    fault_of,
    raise_faults,
)

CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, HyperstateError) and cls is not HyperstateError
}


def test_the_tree_in_the_docstring_has_every_class_with_its_built_in_base():
    drawn = dict(re.findall(r"[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__))
    bases = {
        name: next(b.__name__ for b in cls.__mro__ if b.__module__ == builtins.__name__)
        for name, cls in CLASSES.items()
    }
    unsaid = {"UnsupportedConfigurationError": "RuntimeError"}
    assert bases == {**drawn, **{name: base for name, base in unsaid.items() if not drawn[name]}}


@pytest.mark.parametrize("name", CLASSES)
def test_each_error_survives_the_journey_between_ranks(name):
    fault = fault_of(CLASSES[name]("what was wrong"), 3)
    with pytest.raises(CLASSES[name], match="rank 3: what was wrong") as caught:
        raise_faults([fault], "set_model_state_dict()")
    assert CLASSES[name] is type(caught.value)


def test_a_foreign_exception_keeps_its_type_in_the_text():
    assert Fault(2, "HyperstateError", "KeyError: 'lr'") == fault_of(KeyError("lr"), 2)
    with pytest.raises(HyperstateError, match="rank 2: KeyError: 'lr'"):
        raise_faults([fault_of(KeyError("lr"), 2)], "call")


def test_a_kind_that_this_version_does_not_know_is_the_base_error():
    with pytest.raises(HyperstateError, match="from a newer rank"):
        raise_faults([Fault(0, "QuantumError", "from a newer rank")], "call")


def test_no_fault_is_no_error():
    assert None is raise_faults([], "call")


def test_the_text_is_the_same_in_whatever_order_faults_arrive():
    faults = [Fault(rank, "IncompatibleStateError", f"key {key}") for rank in range(3) for key in "ab"]
    texts = set()
    for seed in range(5):
        random.Random(seed).shuffle(faults)
        with pytest.raises(IncompatibleStateError) as caught:
            raise_faults([*faults, faults[0]], "call")
        texts.add(str(caught.value))
    (text,) = texts
    assert "call was refused on all participating ranks; nothing was changed" in text
    assert [f"ranks 0, 1, 2: key {k}" for k in "ab"] == [line.strip() for line in text.splitlines()[1:]]


def test_the_class_is_that_of_the_lowest_rank():
    with pytest.raises(OptionError):
        raise_faults([Fault(1, "DisagreementError", "x"), Fault(0, "OptionError", "y")], "call")
    with pytest.raises(DisagreementError):
        raise_faults([Fault(1, "DisagreementError", "x"), Fault(2, "OptionError", "y")], "call")


@pytest.mark.parametrize("count", [SCREENFUL, SCREENFUL + 1, 1000])
def test_more_than_a_screenful_is_counted(count):
    with pytest.raises(DisagreementError) as caught:
        raise_faults([Fault(rank, "DisagreementError", f"x{rank}") for rank in range(count)], "call")
    lines = str(caught.value).splitlines()[1:]
    more = [f"… and {count - SCREENFUL} more"] if count > SCREENFUL else []
    assert [f"rank {r}: x{r}" for r in range(SCREENFUL)] + more == [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([3], "rank 3"),
        ([5, 2], "ranks 2, 5"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(64), "ranks 0, 1, 2 … 63"),
    ],
)
def test_what_many_ranks_say_alike_is_said_once(ranks, named):
    with pytest.raises(OptionError) as caught:
        raise_faults([Fault(rank, "OptionError", "the same") for rank in ranks], "call")
    assert [f"{named}: the same"] == [line.strip() for line in str(caught.value).splitlines()[1:]]
