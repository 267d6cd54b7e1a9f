"""Two trained models of one net, sharded over all ranks, and what rank bodies do with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch_nets import Net, assert_same, fsdp, mesh_of, snapshot, train

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
    except Exception as error:  # noqa: BLE001  (the class is part of what is compared)
        assert_same(before, snapshot(*target))
        return f"{type(error).__name__}: {error}"
    return ""
