"""Param groups of MindSpore optimizers: found again, restored field by field, or refused before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
from mindspore import mint, nn
from mindspore.experimental import optim
from mindspore_optimizers import bits, net, train, weights

import hyperstate as hs
from hyperstate.errors import IncompatibleStateError

FULL = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
SET = hs.StateDictOptions(full_state_dict=True)


def test_groups_of_an_optimizer_without_group_objects_are_found_again() -> None:
    cell = net(0)
    p = cell.trainable_params()
    first, rest = [p[0], p[3]], [p[1], p[2], p[4], p[5]]
    optimizer = nn.Momentum(
        [{"params": first, "lr": 0.5}, {"params": rest, "weight_decay": 0.25}, {"order_params": p}], 0.125, 0.75
    )
    groups = hs.get_optim_state_dict(cell, optimizer, options=FULL)["param_groups"]
    assert [["0.weight", "1.beta"], ["0.bias", "1.gamma", "2.weight", "2.bias"]] == [g["params"] for g in groups]
    assert [0.5, 0.125] == [float(group["lr"]) for group in groups]
    assert [0.0, 0.25] == [group["weight_decay"] for group in groups]
    assert [0.75, 0.75] == [float(group["momentum"]) for group in groups]


def test_parameters_that_weight_decay_spares_are_a_group_of_their_own() -> None:
    cell = net(0)
    optimizer = nn.Adam(cell.trainable_params(), weight_decay=0.25)
    groups = hs.get_optim_state_dict(cell, optimizer, options=FULL)["param_groups"]
    assert [(["0.weight", "0.bias", "2.weight", "2.bias"], 0.25), (["1.gamma", "1.beta"], 0.0)] == [
        (group["params"], group["weight_decay"]) for group in groups
    ]


def test_every_field_is_restored_and_parameters_keep_their_identity() -> None:
    source = net(0)
    first = nn.Adam(source.trainable_params(), 0.5, beta1=0.5, beta2=0.75, eps=0.25, weight_decay=0.125)
    target = net(1)
    second = nn.Adam(target.trainable_params())
    train(target, second, 1)
    before = {id(p) for p in second.get_parameters()}, id(second.learning_rate)
    saved = hs.get_optim_state_dict(source, first, options=FULL)
    hs.set_optim_state_dict(target, second, saved, options=SET)
    assert before == ({id(p) for p in second.get_parameters()}, id(second.learning_rate))
    assert bits(saved["param_groups"]) == bits(hs.get_optim_state_dict(target, second, options=FULL)["param_groups"])
    hs.set_model_state_dict(target, hs.get_model_state_dict(source), options=hs.StateDictOptions())
    assert train(source, first, 2) == train(target, second, 2)
    assert weights(source) == weights(target)


@pytest.mark.parametrize("kind", [optim.AdamW, mint.optim.Adam])
def test_the_learning_rate_of_a_group_stays_the_same_parameter(kind: Any) -> None:
    """MindSpore reads it from another list, too."""
    source, target = net(0), net(1)
    saved = hs.get_optim_state_dict(source, kind(source.trainable_params(), lr=0.5), options=FULL)
    optimizer = kind(target.trainable_params())
    rate = optimizer.param_groups[0]["lr"]
    hs.set_optim_state_dict(target, optimizer, saved, options=SET)
    assert rate is optimizer.param_groups[0]["lr"] is optimizer.lrs[0]
    assert 0.5 == float(rate)


def test_fields_that_the_optimizer_does_not_know_come_back() -> None:
    for kind in (nn.Adam, optim.Adam):
        cell = net(0)
        optimizer = kind(cell.trainable_params())
        state = hs.get_optim_state_dict(cell, optimizer, options=FULL)
        for group in state["param_groups"]:
            group["initial_lr"] = 0.75
        hs.set_optim_state_dict(cell, optimizer, state, options=SET)
        groups = hs.get_optim_state_dict(cell, optimizer, options=FULL)["param_groups"]
        assert [0.75] * len(groups) == [group["initial_lr"] for group in groups]


def test_weight_decay_can_go_and_come_back() -> None:
    cell = net(0)
    optimizer = nn.Adam(cell.trainable_params(), weight_decay=0.25)
    state = hs.get_optim_state_dict(cell, optimizer, options=FULL)
    for decays in ((0.0, 0.0), (0.25, 0.0), (0.0, 0.125), (0.5, 0.5), (0.25, 0.0)):
        for group, decay in zip(state["param_groups"], decays, strict=True):
            group["weight_decay"] = decay
        hs.set_optim_state_dict(cell, optimizer, state, options=SET)
        found = hs.get_optim_state_dict(cell, optimizer, options=FULL)["param_groups"]
        got = {name: group["weight_decay"] for group in found for name in group["params"]}
        assert {n: decays[n.startswith("1.")] for n in got} == got


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight_decay": 0.5}, "keeps one"),
        ({"lr": 0.5}, "keeps one for both"),
        ({"beta1": 0.5}, "keeps one for both"),
        ({"use_amsgrad": True}, "build it with True"),
        ({"maximize": True}, "can't do that"),
    ],
)
def test_fields_that_the_optimizer_can_not_have_are_refused(change: dict[str, Any], text: str) -> None:
    cell = net(0)
    optimizer = nn.Adam(cell.trainable_params(), weight_decay=0.25)
    train(cell, optimizer, 1)
    state = hs.get_optim_state_dict(cell, optimizer, options=FULL)
    state["param_groups"][1] |= change
    for slots in state["state"].values():
        slots["moment1"].asnumpy()[...] += 1
    before = bits(hs.get_optim_state_dict(cell, optimizer, options=FULL))
    with pytest.raises(IncompatibleStateError, match=text):
        hs.set_optim_state_dict(cell, optimizer, state, options=SET)
    assert before == bits(hs.get_optim_state_dict(cell, optimizer, options=FULL))
