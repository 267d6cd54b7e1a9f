"""Models on the meta device are materialised in place, with no process group at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_nets import Net, Tied, assert_same, cloned, frozen_copy, snapshot, train

import hyperstate as hs


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}], ids=str)
def test_a_meta_model_is_materialised_in_place_where_device_says(options: Any) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    with torch.device("meta"):
        target = Net(1)
    objects = list(map(id, target.parameters()))
    fresh = torch.optim.Adam(target.parameters())
    weights, state = map(cloned, hs.get_state_dict(model, optimizer))
    chosen = hs.StateDictOptions(**options)
    hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=chosen, device="cpu")
    assert objects == list(map(id, target.parameters()))
    for one in ((model, optimizer), (target, fresh)):
        train(*one, 1, first=1)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    assert frozen_copy(weights["first.weight"]) != frozen_copy(target.first.weight)


def test_a_plain_meta_model_needs_device_and_is_untouched_without() -> None:
    with torch.device("meta"):
        target = Net(1)
    with pytest.raises(hs.HyperstateError, match="device="):
        hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(Net())))
    assert all(param.is_meta for param in target.parameters())


def test_what_stays_on_the_meta_device_is_reported() -> None:
    with torch.device("meta"):
        target = Net(1)
        target.register_buffer("scratch", torch.zeros(2), persistent=False)
    with pytest.warns(UserWarning, match="scratch"):
        hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(Net())), device="cpu")
    assert not target.first.weight.is_meta


def test_tied_meta_parameters_stay_tied() -> None:
    with torch.device("meta"):
        target = Tied(1)
    hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(Tied())), device="cpu")
    assert target.head.weight is target.embed.weight
    assert_same(snapshot(Tied()), snapshot(target))


def test_attributes_and_the_gradient_flag_survive_materialising() -> None:
    with torch.device("meta"):
        target = Net(1)
    target.first.weight.tag = "mine"
    target.first.bias.requires_grad_(False)
    hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(Net())), device="cpu")
    assert ("mine", True, False) == (
        target.first.weight.tag,
        target.first.weight.requires_grad,
        target.first.bias.requires_grad,
    )
