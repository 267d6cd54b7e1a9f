"""Rank bodies: refusals alike on all ranks, order, disagreement and odd meshes; faults of the predecessor."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch_nets import (
    Parts,
    assert_same,
    cloned,
    frozen_copy,
    full_values,
    mesh_of,
    noise,
    push,
    snapshot,
    train,
)
from torch_pairs import BROADCAST, FULL, ROOT, build, flat_mesh, pair, refused

import hyperstate as hs

# -- one wrong thing on one rank -----------------------------------------------------------------------


def wrong_on_one_rank(kit: Any, what: str, culprit: int) -> str:
    """What one rank passes is wrong: every rank raises the same error and nothing is written anywhere."""
    source, target = pair(kit)
    mine = kit.rank == culprit
    weights, state = map(cloned, hs.get_state_dict(*source, options=FULL))
    options: Any = FULL
    if mine and what == "unexpected key":
        weights["more.weight"] = torch.zeros(2)
    elif mine and what == "missing key":
        del weights["first.bias"]
    elif mine and what == "shape":
        weights["first.bias"] = torch.zeros(1)
    elif mine and what == "dtype":
        weights["norm.num_batches_tracked"] = torch.tensor(1.5)
    elif mine and what == "state shape":
        state["state"]["first.bias"]["exp_avg"] = torch.zeros(3)
    elif mine and what == "state missing":
        del state["state"]["first.bias"]
        state["param_groups"][0]["params"].remove("first.bias")
    elif mine and what == "no state dict":
        state = {"stat": {}}
    elif mine and what == "options":
        options = {"full_state_dict": True}
    elif mine and what == "a value that is no tensor":
        weights["first.bias"] = "text"
    return refused(
        lambda: hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=options),
        target,
    )


def e30_wrong_on_the_root(kit: Any, what: str) -> str:
    """Under broadcast the root alone can be wrong: the others raise too, at once."""
    source, target = pair(kit)
    weights, state = map(cloned, hs.get_state_dict(*source, options=ROOT))
    if kit.rank == 0 and what == "unexpected key":
        weights["more.weight"] = torch.zeros(2)
    elif kit.rank == 0 and what == "shape":
        weights["first.weight"] = torch.zeros(2, 2)
    elif kit.rank == 0 and what == "sparse":
        weights["first.weight"] = torch.eye(7, 5).to_sparse()
    elif what == "nothing":
        weights, state = {}, {}
    elif kit.rank == 0 and what == "state missing":
        del state["state"]["first.bias"]
        state["param_groups"][0]["params"].remove("first.bias")
    return refused(
        lambda: hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=BROADCAST),
        target,
    )


def e30_odd_but_right_values(kit: Any) -> None:
    """A non-contiguous tensor, a sharded one and an expanded one on the root are values like any other."""
    source, target = pair(kit)
    whole = hs.get_model_state_dict(source[0], options=FULL)
    weights, state = map(cloned, hs.get_state_dict(*source, options=ROOT))
    if kit.rank == 0:
        weights["first.weight"] = weights["first.weight"].T.contiguous().T
        weights["norm.bias"] = torch.zeros(1).expand(7)
        assert not weights["first.weight"].is_contiguous()
    hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=BROADCAST)
    found = full_values(target[0])
    assert torch.equal(whole["first.weight"], found["first.weight"])
    assert torch.equal(torch.zeros(7), found["norm.bias"])


def e32_a_fresh_optimizer_is_restored(kit: Any) -> None:
    """Groups without state are something: lr arrives, and the target's state is cleared."""
    source, target = build(kit, 0, lr=0.25), build(kit, 1)
    train(*target, 1)
    weights, state = map(cloned, hs.get_state_dict(*source, options=ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=BROADCAST)
    assert (0.25, {}) == (target[1].param_groups[0]["lr"], {k: v for k, v in target[1].state.items() if v})
    assert 6 == len(report.cleared)


def full_cpu_without_broadcast(kit: Any) -> str:
    """The dict that full + cpu gave, set without broadcast: an error that says which option is meant."""
    source, target = pair(kit)
    weights, state = hs.get_state_dict(*source, options=ROOT)
    return refused(
        lambda: hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=ROOT), target
    )


# -- order, holes, disagreement ------------------------------------------------------------------------


def e27_order_of_state_differs(kit: Any) -> None:
    """Ranks fill `optimizer.state` in another order: collectives follow the agreed order, not the ranks' own."""
    source, target = pair(kit)
    model, optimizer = source
    items = list(optimizer.state.items())
    optimizer.state.clear()
    for key, slots in items if kit.rank % 2 else reversed(items):
        optimizer.state[key] = dict(reversed(slots.items())) if kit.rank == 1 else slots
    weights, state = map(cloned, hs.get_state_dict(model, optimizer, options=ROOT))
    hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=BROADCAST)
    assert_same(snapshot(*source), snapshot(*target))


def unused_on_all_ranks(kit: Any) -> None:
    """S05 on ranks: a parameter that never had a gradient has no state, before and after."""
    model, target = build(kit, 0), build(kit, 1)
    for one in (model, target):
        one[0].second.bias.requires_grad_(False)
    train(*model, 2)
    for get, put in ((ROOT, BROADCAST), (FULL, FULL), (hs.StateDictOptions(), hs.StateDictOptions())):
        target = build(kit, 1)
        weights, state = map(cloned, hs.get_state_dict(*model, options=get))
        hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=put)
        assert target[0].second.bias not in target[1].state


def state_on_one_rank_only(kit: Any) -> str:
    """One member of a mesh lost a key: the full form refuses and names it."""
    model, optimizer = build(kit)
    train(model, optimizer, 1)
    if kit.rank == 1:
        del optimizer.state[model.first.weight]["exp_avg"]
    return refused(lambda: hs.get_optim_state_dict(model, optimizer, options=FULL), (model, optimizer))


def fields_differ(kit: Any) -> str:
    model, optimizer = build(kit, lr=0.1 * (kit.rank + 1))
    return refused(lambda: hs.get_optim_state_dict(model, optimizer, options=FULL), (model, optimizer))


def partial(kit: Any, form: str) -> str:
    """A sum that is not taken yet can't be saved, in any form."""
    value = DTensor.from_local(torch.ones(3), flat_mesh(kit), [Partial()])
    model = Parts({"w": value.detach()})
    options = {"sharded": hs.StateDictOptions(), "full": FULL, "root": ROOT}[form]
    try:
        hs.get_model_state_dict(model, options=options)
    except hs.UnsupportedConfigurationError as error:
        return str(error)
    return ""


# -- meshes --------------------------------------------------------------------------------------------


def e23_sub_mesh(kit: Any) -> dict[str, Any]:
    """A parameter on ranks 2 and 3 alone, another on all: the root of each is its lowest holder."""
    half = DeviceMesh("cpu", [2, 3], mesh_dim_names=("half",))

    def made(seed: int) -> tuple[Parts, Any]:
        values = {
            "wide": distribute_tensor(noise("wide", (5, 2), seed), flat_mesh(kit), [Shard(0)], src_data_rank=None),
            "narrow": distribute_tensor(noise("narrow", (5, 3), seed), half, [Shard(0)], src_data_rank=None),
        }
        model = Parts(values if kit.rank >= 2 else {"wide": values["wide"]})
        return model, torch.optim.Adam(model.parameters())

    source, target = made(0), made(1)
    push(*source, 0)
    weights, state = map(cloned, hs.get_state_dict(*source, options=ROOT))
    hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=BROADCAST)
    assert_same(snapshot(*source), snapshot(*target))
    return {"weights": sorted(weights), "state": sorted(state.get("state", {}))}


def members_and_others(kit: Any) -> dict[str, Any]:
    """Ranks 0 and 1 hold a tensor of the mesh [2, 3] without data; a full get of all ranks finds the data."""
    half = DeviceMesh("cpu", [2, 3], mesh_dim_names=("half",))
    full = noise("w", (5, 3), 0)
    model = Parts({"w": distribute_tensor(full, half, [Shard(0)], src_data_rank=None)})
    weights = hs.get_model_state_dict(model, options=ROOT, ranks=[0, 1, 2, 3])
    target = Parts({"w": distribute_tensor(torch.zeros(5, 3), half, [Shard(0)], src_data_rank=None)})
    hs.set_model_state_dict(target, weights, options=BROADCAST, ranks=[0, 1, 2, 3])
    assert frozen_copy(model.w) == frozen_copy(target.w)
    return {name: bool(torch.equal(full, value)) for name, value in weights.items()}


def two_replicate_dimensions(kit: Any) -> None:
    """E21: a mesh with two replicated dimensions."""
    cube = mesh_of((2, 2, 1), ("a", "b", "c"))

    def made(seed: int) -> tuple[Parts, Any]:
        places = [Replicate(), Replicate(), Shard(0)]
        model = Parts({"w": distribute_tensor(noise("w", (3, 2), seed), cube, places, src_data_rank=None)})
        return model, torch.optim.Adam(model.parameters())

    source, target = made(0), made(1)
    push(*source, 0)
    weights, state = map(cloned, hs.get_state_dict(*source, options=ROOT))
    assert [["w"], []][bool(kit.rank)] == list(weights)
    hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=BROADCAST)
    assert_same(snapshot(*source), snapshot(*target))
