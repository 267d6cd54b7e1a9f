"""Rank bodies: modules with hooks and buffers on ranks, pending gradients, loads without traffic, other DTensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_nets import (
    Net,
    Parts,
    Renaming,
    assert_same,
    cloned,
    frozen_copy,
    fsdp,
    full_values,
    inputs,
    mesh_of,
    noise,
    snapshot,
    train,
)
from torch_optimizers import Local

import hyperstate as hs

FULL = hs.StateDictOptions(full_state_dict=True)
ROOT = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
SHARDED = hs.StateDictOptions()
PATHS = {"sharded": (SHARDED, SHARDED), "full": (FULL, FULL), "broadcast": (ROOT, BROADCAST)}


def s03_pending_gradients(kit: Any, form: str) -> None:
    """A gradient is there and no step was taken: all saved state arrives, the gradient stays."""
    mesh = mesh_of((kit.world,), ("dp",))
    model, target = (fsdp(Net(seed), mesh) for seed in (0, 1))
    optimizer, fresh = (torch.optim.Adam(m.parameters(), lr=lr) for m, lr in ((model, 0.1), (target, 0.5)))
    train(model, optimizer, 2)
    target(inputs(9, 5)).square().sum().backward()
    gradients = frozen_copy([p.grad for p in target.parameters()])
    assert {} == hs.get_optim_state_dict(target, fresh)["state"]
    get, put = PATHS[form]
    weights, state = map(cloned, hs.get_state_dict(model, optimizer, options=get))
    hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=put)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    assert gradients == frozen_copy([p.grad for p in target.parameters()])


class Buffers(nn.Module):
    def __init__(self, fill: int) -> None:
        super().__init__()
        torch.manual_seed(fill)
        self.linear = nn.Linear(4, 6)
        self.register_buffer("ids", torch.full((3,), fill, dtype=torch.int64))
        self.register_buffer("flags", torch.full((2, 2), bool(fill % 2)))
        self.register_buffer("count", torch.tensor(fill))
        self.register_buffer("on", torch.tensor(bool(fill % 2)))
        self.register_buffer("scratch", torch.full((2,), float(fill)), persistent=False)


def s24_buffers(kit: Any, form: str) -> None:
    """Persistent buffers become the root's, with their dtypes; the one that is not persistent is untouched."""
    mesh = mesh_of((kit.world,), ("dp",))
    model, target = (fsdp(Buffers(fill), mesh) for fill in (3, 2))
    get, put = PATHS[form]
    hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(model, options=get)), options=put)
    expected = snapshot(model) | {"buffer scratch": frozen_copy(torch.full((2,), 2.0))}
    assert_same(expected, snapshot(target))


def s23_renaming_hooks(kit: Any, form: str) -> list[str]:
    """Keys are those of state_dict(); optimizer names those of named_parameters(); the shards load through hooks."""
    mesh = mesh_of((kit.world,), ("dp",))
    model, target = (fsdp(nn.Sequential(Renaming(seed, 5), nn.Linear(5, 3)), mesh) for seed in (0, 1))
    optimizer, fresh = (torch.optim.Adam(m.parameters(), lr=lr) for m, lr in ((model, 0.1), (target, 0.5)))
    train(model, optimizer, 1)
    get, put = PATHS[form]
    weights, state = map(cloned, hs.get_state_dict(model, optimizer, options=get))
    objects = list(map(id, target.parameters()))
    hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=put)
    assert objects == list(map(id, target.parameters()))
    for one in ((model, optimizer), (target, fresh)):
        train(*one, 1, first=1)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    return sorted(weights)


def s35_adapters(kit: Any, full: bool) -> None:
    """Only the adapter is saved and loaded; the frozen tied base keeps its bits."""

    class Adapted(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.adapter = nn.Embedding(6, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight
            self.embed.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.adapter(self.embed(x)))

    model, target = (fully_shard(Adapted(seed), mesh=mesh_of((kit.world,), ("dp",))) for seed in (0, 1))
    base = frozen_copy(target.embed.weight)
    options = hs.StateDictOptions(ignore_frozen_params=True, full_state_dict=full, strict=False)
    saved = cloned(hs.get_model_state_dict(model, options=options))
    assert ["adapter.bias", "adapter.weight"] == sorted(saved)
    hs.set_model_state_dict(target, saved, options=options)
    assert base == frozen_copy(target.embed.weight)
    assert frozen_copy(model.adapter.weight) == frozen_copy(target.adapter.weight)


def full_on_every_rank_moves_nothing(kit: Any) -> dict[str, int]:
    """Where every rank holds the full values, each takes its slice: only the verdict travels."""
    mesh = mesh_of((2, kit.world // 2), ("rep", "dp"))
    model = fsdp(Net(0), mesh)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    weights, state = hs.get_state_dict(model, optimizer, options=FULL)
    target = fsdp(Net(1), mesh)
    fresh = torch.optim.Adam(target.parameters(), lr=0.5)
    kit.traffic(reset=True)
    hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=FULL)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    return dict(kit.traffic())


def set_equal_layouts_moves_nothing(kit: Any) -> dict[str, int]:
    mesh = mesh_of((kit.world,), ("dp",))
    model, target = (fsdp(Net(seed), mesh) for seed in (0, 1))
    weights = cloned(hs.get_model_state_dict(model))
    kit.traffic(reset=True)
    hs.set_model_state_dict(target, weights)
    assert_same(snapshot(model), snapshot(target))
    return dict(kit.traffic())


# -- sharded tensors of another kind -------------------------------------------------------------------


class OtherMesh:
    """A mesh spelt as HyperParallel spells it: no `shape`, but `mesh_shape` and `rank_list`."""

    device_type = "cpu"
    mesh_dim_names = ("dp",)

    def __init__(self, world: int) -> None:
        self.mesh_shape, self.rank_list = (world,), tuple(range(world))


class OtherShard:
    def __init__(self, dim: int) -> None:
        self.dim = dim

    def is_shard(self) -> bool:
        return True

    def is_replicate(self) -> bool:
        return False

    is_partial = is_replicate


class OtherDTensor(torch.Tensor):
    """A sharded tensor that shares no base with PyTorch's, split evenly along its first dimension."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def from_local(local: torch.Tensor, mesh: OtherMesh, placements: Any) -> OtherDTensor:
        made = torch.Tensor._make_subclass(OtherDTensor, local.detach())
        made._local_tensor, made.device_mesh, made.placements = local.detach(), mesh, tuple(placements)
        return made

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # the global shape, as such classes give it
        rows, *rest = self._local_tensor.shape
        return torch.Size((rows * self.device_mesh.mesh_shape[0], *rest))

    def detach(self) -> OtherDTensor:  # type: ignore[override]  # keeps its layout
        return self.from_local(self._local_tensor, self.device_mesh, self.placements)

    def to_local(self) -> torch.Tensor:
        return self._local_tensor

    def __deepcopy__(self, memo: Any) -> OtherDTensor:
        return self.from_local(self._local_tensor.clone(), self.device_mesh, self.placements)


def other_dtensors(kit: Any, form: str) -> None:
    """Known by structure alone; fresh optimizers keep their state as plain local tensors."""
    mesh = OtherMesh(kit.world)

    def build(seed: int) -> tuple[Parts, Local, torch.Tensor]:
        full = noise("w", (6, 4), seed)
        local = full.chunk(kit.world)[kit.rank].clone()
        model = Parts({"w": OtherDTensor.from_local(local, mesh, [OtherShard(0)])})
        return model, Local(model.parameters()), full

    def step(model: Parts, optimizer: Local, seed: int) -> None:
        grad = noise("g", (6, 4), seed).chunk(kit.world)[kit.rank].clone()
        model.w.grad = OtherDTensor.from_local(grad, mesh, [OtherShard(0)])
        optimizer.step()

    def content(model: Parts, optimizer: Local) -> Any:
        return frozen_copy([model.w.to_local(), dict(optimizer.state[model.w])])

    (model, optimizer, full), (target, fresh, _) = build(0), build(1)
    whole = hs.get_model_state_dict(model, options=FULL)["w"]
    assert torch.Tensor is type(whole) and torch.equal(full, whole)
    step(model, optimizer, 0)
    get, put = PATHS[form]
    weights, state = map(cloned, hs.get_state_dict(model, optimizer, options=get))
    if form == "sharded":
        assert OtherDTensor is type(weights["w"]) and OtherDTensor is type(state["state"]["w"]["m"])
    hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=put)
    assert torch.Tensor is type(fresh.state[target.w]["m"])
    assert content(model, optimizer) == content(target, fresh)
    for one in ((model, optimizer), (target, fresh)):
        step(*one, 1)
    assert content(model, optimizer) == content(target, fresh)


def from_one_kind_to_the_other(kit: Any) -> None:
    """Full values of PyTorch's DTensors into the other kind and back."""
    source = fsdp(Net(0, sizes=(5, 4, 2)), mesh_of((kit.world,), ("dp",)))
    name = "first.weight"
    full = full_values(source)[name]
    weights = {"w": hs.get_model_state_dict(source, options=FULL)[name]}
    local = torch.zeros(4 // kit.world, 5)
    target = Parts({"w": OtherDTensor.from_local(local, OtherMesh(kit.world), [OtherShard(0)])})
    hs.set_model_state_dict(target, weights, options=FULL)
    assert torch.equal(full.chunk(kit.world)[kit.rank], target.w.to_local())
    found = hs.get_model_state_dict(target)["w"]
    assert not isinstance(found, DTensor) and (4, 5) == tuple(found.shape)
