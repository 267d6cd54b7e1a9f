"""Rank bodies: `hyperstate.compat.dcp` beside PyTorch's module on a model sharded over two ranks."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as theirs
from torch_nets import Net, assert_same, cloned, frozen_copy, fsdp, mesh_of, snapshot, train, without_groups

import hyperstate.compat.dcp as ours
from hyperstate.errors import UnsupportedConfigurationError


def build(seed: int, lr: float = 0.01) -> tuple[Any, torch.optim.Adam]:
    model = fsdp(Net(seed), mesh_of((2,), ("dp",)))
    model.second.bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    train(model, optimizer, 2, first=seed * 10)
    return model, optimizer


def getters(kit: Any, options: dict[str, bool]) -> None:
    model, optimizer = build(0)
    chosen = theirs.StateDictOptions(**options)
    expected = theirs.get_state_dict(model, optimizer, options=chosen)
    found = ours.get_state_dict(model, optimizer, options=chosen)
    assert [frozen_copy(dict(one)) for one in expected] == [frozen_copy(dict(one)) for one in found]
    weights = ours.get_model_state_dict(model, options=chosen)
    assert frozen_copy(dict(expected[0])) == frozen_copy(dict(weights))
    assert frozen_copy(expected[1]) == frozen_copy(ours.get_optimizer_state_dict(model, optimizer, options=chosen))


def crossing(kit: Any, form: str) -> None:
    get, put = {
        "sharded": ({}, {}),
        "full": ({"full_state_dict": True},) * 2,
        "broadcast": (
            {"full_state_dict": True, "cpu_offload": True},
            {"full_state_dict": True, "broadcast_from_rank0": True},
        ),
        "flat": ({"flatten_optimizer_state_dict": True},) * 2,
    }[form]
    model, optimizer = build(0)
    expected = snapshot(model, optimizer)
    for getter, setter in product((ours, theirs), repeat=2):
        if form == "flat" and setter is theirs:
            continue  # PyTorch's setter fails on its own flat form; the plain tests show what is readable
        weights, state = getter.get_state_dict(model, optimizer, options=theirs.StateDictOptions(**get))
        target, fresh = build(1, lr=0.5)
        options = theirs.StateDictOptions(**put)
        # One after the other: PyTorch's set_state_dict hangs where the model's dict is empty on some ranks only.
        setter.set_optimizer_state_dict(target, fresh, cloned(state), options=options)
        setter.set_model_state_dict(target, cloned(weights), options=options)
        what = without_groups if setter is theirs else dict
        assert_same(what(expected), what(snapshot(target, fresh)))
        assert 0.01 == fresh.param_groups[0]["lr"]


def through_files(kit: Any, folder: str) -> None:
    """Saved from our dicts by PyTorch's library, loaded into our dicts of a stepped target, set: training goes on."""
    model, optimizer = build(0)
    weights, state = ours.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    target, fresh = build(1, lr=0.5)
    room = dict(zip(("model", "optim"), ours.get_state_dict(target, fresh), strict=True))
    dcp.load(room, checkpoint_id=folder)
    ours.set_state_dict(target, fresh, model_state_dict=room["model"], optim_state_dict=room["optim"])
    for one in ((model, optimizer), (target, fresh)):
        train(*one, 1, first=2)
    assert_same(without_groups(snapshot(model, optimizer)), without_groups(snapshot(target, fresh)))
    assert optimizer.param_groups[0]["lr"] == fresh.param_groups[0]["lr"]


def dotted(kit: Any) -> None:
    """A state key with a dot has no flat form that PyTorch reads: refused on all ranks, also where one gets it."""
    model, optimizer = build(0)
    optimizer.state[model.first.weight]["a.b"] = 1
    for more in ({}, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}):
        options = theirs.StateDictOptions(flatten_optimizer_state_dict=True, **more)
        for getter in (
            lambda options=options: ours.get_optimizer_state_dict(model, optimizer, options=options),
            lambda options=options: ours.get_state_dict(model, optimizer, options=options),
        ):
            with pytest.raises(UnsupportedConfigurationError, match=r"'a\.b' of 'first\.weight'.* dot in its key"):
                getter()


class App:
    """The pattern of PyTorch's tutorial: one object that a checkpoint library saves and loads by its state dict."""

    def __init__(self, functions: Any, model: Any, optimizer: Any) -> None:
        self.functions, self.model, self.optimizer = functions, model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = self.functions.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.functions.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "SGD without momentum": lambda params: torch.optim.SGD(params, lr=0.01),
}


def a_fresh_optimizer_is_loaded_as_in_the_tutorial(kit: Any, folder: str, kind: str) -> None:
    """The class is a `Stateful` by structure; a fresh optimizer gets all of its state and is never stepped."""

    def made(seed: int) -> tuple[Any, Any]:
        model = fsdp(Net(seed), mesh_of((2,), ("dp",)))
        model.second.bias.requires_grad_(False)
        return model, OPTIMIZERS[kind](model.parameters())

    model, optimizer = made(0)
    train(model, optimizer, 2)
    dcp.save({"app": App(ours, model, optimizer)}, checkpoint_id=folder)
    new, fresh = made(1)
    before = snapshot(new, fresh)
    assert not fresh.state
    ours.get_optimizer_state_dict(new, fresh)
    assert not fresh.state
    assert_same(before, snapshot(new, fresh))
    dcp.load({"app": App(ours, new, fresh)}, checkpoint_id=folder)
    assert_same(snapshot(model, optimizer), snapshot(new, fresh))
    for one in ((model, optimizer), (new, fresh)):
        train(*one, 1, first=2)
    assert_same(snapshot(model, optimizer), snapshot(new, fresh))


def an_unknown_class_says_how_to_load_it(kit: Any) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

    model = fsdp(Net(0), mesh_of((2,), ("dp",)))
    with pytest.warns(UserWarning, match="Own never stepped.*build_optim_load_template"):
        assert {} == ours.get_optimizer_state_dict(model, Own(model.parameters()))["state"]
