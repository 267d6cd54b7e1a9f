"""Rank bodies: refusals alike on all ranks, odd meshes, odd moments, meta models; faults of the predecessor."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch_nets import (
    Net,
    Parts,
    assert_same,
    cloned,
    frozen_copy,
    fsdp,
    full_state,
    full_values,
    inputs,
    mesh_of,
    noise,
    push,
    snapshot,
    train,
)

import hyperstate as hs

ROOT = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
FULL = hs.StateDictOptions(full_state_dict=True)
BROADCAST = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def flat_mesh(kit: Any) -> DeviceMesh:
    return mesh_of((kit.world,), ("dp",))


def build(kit: Any, seed: int = 0, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Adam]:
    model = fsdp(Net(seed), flat_mesh(kit))
    return model, torch.optim.Adam(model.parameters(), lr=lr)


def pair(kit: Any) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
    source, target = build(kit, 0), build(kit, 1, lr=0.5)
    train(*source, 2)
    train(*target, 1, first=5)
    return source, target


def refused(call: Any, target: tuple[Any, Any]) -> str:
    """The text of the error that `call` raises, after checking that nothing changed; empty if it raises none."""
    before = snapshot(*target)
    try:
        call()
    except Exception as error:
        assert_same(before, snapshot(*target))
        return f"{type(error).__name__}: {error}"
    return ""


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


# -- FSDP2 moments, meta models, duplicates ------------------------------------------------------------


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
    hs.set_state_dict(
        target, fresh, model_state_dict=weights, optim_state_dict=state, options=put, device="cpu"
    )
    assert {id(p) for p in target.parameters()} == {id(p) for g in fresh.param_groups for p in g["params"]}
    assert_same(snapshot(*source), snapshot(target, fresh))
    train(*source, 1, first=2)
    train(target, fresh, 1, first=2)
    assert_same(snapshot(*source), snapshot(target, fresh))


def tied_sharded(kit: Any) -> None:
    """Tied weights inside one FSDP unit, loaded by broadcast under the second name alone."""

    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x.abs().long() % 5))

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
    text = refused(
        lambda: hs.set_model_state_dict(target[0], weights, options=BROADCAST, check_sources=True), target
    )
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
        w = distribute_tensor(noise("w", (5, 2), seed), flat_mesh(kit), [Shard(0)], src_data_rank=None)
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
