"""Rank bodies: FSDP2 after a forward, meta and tied models, dicts that are used twice, the checkpoint library."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_nets import (
    Net,
    Parts,
    Tied,
    assert_same,
    cloned,
    frozen_copy,
    fsdp,
    full_state,
    full_values,
    inputs,
    noise,
    push,
    snapshot,
    train,
)
from torch_pairs import BROADCAST, FULL, ROOT, build, flat_mesh, pair, refused

import hyperstate as hs


def after_a_forward_without_gradient(kit: Any) -> None:
    """FSDP2 leaves the root's parameters unsharded then: they must be resharded before anything is listed."""
    model, optimizer = build(kit)
    train(model, optimizer, 1)
    expected = snapshot(model, optimizer)
    with torch.no_grad():
        model.eval()(inputs(3, 5))
        model.train()
    state = hs.get_optim_state_dict(model, optimizer)
    assert isinstance(state["state"]["second.weight"]["exp_avg"], DTensor)
    with torch.no_grad():
        model.eval()(inputs(3, 5))
        model.train()
    weights = hs.get_model_state_dict(model)
    names = [name for name, value in weights.items() if isinstance(value, DTensor)]
    assert 6 == len(names)
    target = build(kit, 1)
    train(*target, 1)
    with torch.no_grad():
        target[0](inputs(3, 5))
    hs.set_state_dict(*target, model_state_dict=cloned(weights), optim_state_dict=cloned(state))
    assert_same(expected, snapshot(*target))
    train(model, optimizer, 1, first=1)
    train(*target, 1, first=1)
    assert_same(snapshot(model, optimizer), snapshot(*target))


def root_with_parameters_of_its_own(kit: Any) -> None:
    """The root unit's own parameters stay unsharded after a forward without gradient; they too are resharded."""

    class Rooted(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.scale = nn.Parameter(torch.randn(5))
            self.inner = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.scale)

    model = fsdp(Rooted(0), flat_mesh(kit))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    expected = frozen_copy(model.state_dict())
    with torch.no_grad():
        model(inputs(3, 5))
    found = hs.get_optim_state_dict(model, optimizer)
    assert ["scale", "inner.weight", "inner.bias"] == found["param_groups"][0]["params"]
    with torch.no_grad():
        model(inputs(3, 5))
    assert expected == frozen_copy(hs.get_model_state_dict(model))


def meta_fsdp(kit: Any, form: str) -> None:
    """A sharded model on the meta device is materialised on its mesh's device; the optimizer's references stay."""
    get, put = {"full": (FULL, FULL), "broadcast": (ROOT, BROADCAST), "sharded": (hs.StateDictOptions(),) * 2}[form]
    source = build(kit)
    train(*source, 2)
    weights, state = map(cloned, hs.get_state_dict(*source, options=get))
    with torch.device("meta"):
        bare = Net(1)
    target = fsdp(bare, flat_mesh(kit))
    fresh = torch.optim.Adam(target.parameters(), lr=0.5)
    assert all(param.is_meta for param in target.parameters())
    hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=put, device="cpu")
    assert {id(p) for p in target.parameters()} == {id(p) for g in fresh.param_groups for p in g["params"]}
    assert_same(snapshot(*source), snapshot(target, fresh))
    train(*source, 1, first=2)
    train(target, fresh, 1, first=2)
    assert_same(snapshot(*source), snapshot(target, fresh))


def tied_sharded(kit: Any) -> None:
    """Tied weights inside one FSDP unit, loaded by broadcast under the second name alone."""

    def made(seed: int) -> tuple[nn.Module, Any]:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(Tied(seed), mesh=flat_mesh(kit))
        return model, torch.optim.Adam(model.parameters())

    source, target = made(0), made(1)
    train(*source, 1)
    weights, state = map(cloned, hs.get_state_dict(*source, options=ROOT))
    weights.pop("embed.weight", None)
    hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=BROADCAST)
    assert target[0].head.weight is target[0].embed.weight
    for one in (source, target):
        train(*one, 1, first=1)
    assert_same(snapshot(*source), snapshot(*target))


def others_values_are_ignored(kit: Any) -> list[str]:
    """Under broadcast the lowest rank's values win; that others pass some too is said."""
    source, target = pair(kit)
    weights, state = map(cloned, hs.get_state_dict(*source, options=FULL))
    if kit.rank:
        weights = {name: torch.zeros_like(value) for name, value in weights.items()}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=BROADCAST)
    assert frozen_copy(full_values(source[0])) == frozen_copy(full_values(target[0]))
    assert frozen_copy(full_state(*source)) == frozen_copy(full_state(*target))
    text = refused(lambda: hs.set_model_state_dict(target[0], weights, options=BROADCAST, check_sources=True), target)
    return [*(str(one.message) for one in seen if issubclass(one.category, UserWarning)), text]


def s20_used_twice(kit: Any) -> None:
    """The same dict objects go into a plain, a DDP and a sharded model, and are as they were."""
    from torch.nn.parallel import DistributedDataParallel

    source = build(kit)
    train(*source, 1)
    weights, state = map(cloned, hs.get_state_dict(*source, options=FULL))
    before = frozen_copy((weights, state)), list(map(id, weights.values()))
    for model in (Net(3), DistributedDataParallel(Net(4)), fsdp(Net(5), flat_mesh(kit))):
        for options in (FULL, BROADCAST):
            optimizer = torch.optim.Adam(model.parameters())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hs.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
            train(model, optimizer, 1)
            assert before == (frozen_copy((weights, state)), list(map(id, weights.values())))


def e1_through_the_checkpoint_library(kit: Any, folder: str) -> None:
    """E1, S42: sharded state of a local optimizer goes through PyTorch's library with its global shape."""
    import torch.distributed.checkpoint as dcp
    from torch_optimizers import Local

    def made(seed: int) -> tuple[nn.Module, Any]:
        w = distribute_tensor(noise("w", (5, 4), seed), flat_mesh(kit), [Shard(0)], src_data_rank=None)
        model = Parts({"w": w})
        return model, Local(model.parameters())

    source, target = made(0), made(1)
    push(*source, 0)
    push(*target, 3)
    dcp.save({"optim": {"m": hs.get_optim_state_dict(*source)["state"]["w"]["m"]}}, checkpoint_id=folder)
    state = hs.get_optim_state_dict(*target)
    room = {"optim": {"m": state["state"]["w"]["m"]}}
    dcp.load(room, checkpoint_id=folder)
    assert torch.equal(source[1].state[source[0].w]["m"], target[1].state[target[0].w]["m"])
