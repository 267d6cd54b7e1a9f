"""Several optimizers, and param groups that are split, merged or empty, with no process group at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_forms import moved
from torch_nets import Net, Parts, assert_same, noise, push, snapshot, train

import hyperstate as hs


def test_several_optimizers_are_one_dict() -> None:
    def build(seed: int) -> tuple[Net, list[Any]]:
        net = Net(seed)
        return net, [
            torch.optim.Adam(net.first.parameters()),
            torch.optim.SGD([*net.norm.parameters(), *net.second.parameters()], lr=0.1, momentum=0.9),
        ]

    (model, pair), (target, fresh) = build(0), build(1)
    train(model, pair, 2)
    moved((model, pair), (target, fresh))
    assert_same(snapshot(model, pair), snapshot(target, fresh))
    with pytest.raises(hs.IncompatibleStateError, match="optimizer 1, group 0, position 0"):
        hs.get_optim_state_dict(model, [pair[0], torch.optim.SGD(model.first.parameters())])


def test_e38_a_parameter_that_the_model_lacks_is_named_by_group_and_position() -> None:
    model = Net()
    stranger = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [stranger]}], lr=0.1)
    with pytest.raises(hs.IncompatibleStateError, match="group 1 .* position 0"):
        hs.get_optim_state_dict(model, optimizer)


def test_e13_groups_come_back_as_groups_and_may_be_split_otherwise() -> None:
    names = ["a", "b", "c"]

    def build(groups: list[dict[str, Any]], seed: int) -> tuple[Parts, Any]:
        model = Parts({name: noise(name, (2, 2), seed) for name in names})
        chosen = [{**g, "params": [getattr(model, n) for n in g["params"]]} for g in groups]
        return model, torch.optim.Adam(chosen, lr=0.9)

    split = [{"params": ["a"], "lr": 0.1}, {"params": ["b", "c"], "lr": 0.2}]
    model, optimizer = build(split, 0)
    push(model, optimizer, 0)
    finer = [{"params": ["c"]}, {"params": ["b"]}, {"params": ["a"]}]
    for form in ("nested", "flat"):
        target, fresh = build(finer, 1)
        moved((model, optimizer), (target, fresh), form)
        assert [0.2, 0.2, 0.1] == [group["lr"] for group in fresh.param_groups]
        target, fresh = build([{"params": names}], 1)
        with pytest.raises(hs.IncompatibleStateError, match="lr"):
            moved((model, optimizer), (target, fresh), form)
        assert (0.9, {}) == (fresh.param_groups[0]["lr"], dict(fresh.state))


def test_e46_groups_without_parameters_are_matched_in_order() -> None:
    def build(seed: int, lrs: list[float]) -> tuple[Net, Any]:
        net = Net(seed)
        groups = [{"params": [], "lr": lrs[0]}, {"params": list(net.parameters())}, {"params": [], "lr": lrs[1]}]
        return net, torch.optim.SGD(groups, lr=0.1)

    (model, optimizer), (target, fresh) = build(0, [1.0, 2.0]), build(1, [3.0, 4.0])
    moved((model, optimizer), (target, fresh))
    assert [1.0, 0.1, 2.0] == [group["lr"] for group in fresh.param_groups]
    with pytest.raises(hs.UnsupportedConfigurationError, match="group"):
        hs.get_optim_state_dict(model, optimizer, options=hs.StateDictOptions(flatten_optimizer_state_dict=True))
