"""Rank bodies: meshes whose ranks are in another order, contradicting shards, threads, inference mode."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_nets import Net, full_values, mesh_of, train

import hyperstate as hs

FULL = hs.StateDictOptions(full_state_dict=True)
BROADCAST = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def mesh_in_another_order(kit: Any, ranks: list[Any], way: str) -> None:
    """PyTorch cuts and joins by the position in the (sorted) process group: `full_tensor()` is the truth."""
    mesh = DeviceMesh("cpu", ranks)
    # Even shards: PyTorch's own gathering takes the padding off by mesh coordinate and loses rows of uneven ones.
    weight = torch.arange(16.0).view(8, 2)
    model = nn.Linear(2, 8, bias=False)
    if way == "fsdp":
        model.weight = nn.Parameter(weight.clone())
        fully_shard(model, mesh=mesh)
    else:
        model.weight = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Shard(0)] * mesh.ndim))
    assert torch.equal(weight, model.weight.full_tensor())
    assert torch.equal(weight, hs.get_model_state_dict(model, options=FULL)["weight"])
    hs.set_model_state_dict(model, {"weight": weight + 50} if kit.rank == 0 else {}, options=BROADCAST)
    assert torch.equal(weight + 50, model.weight.full_tensor())


def mesh_in_no_order(kit: Any) -> str:
    model = nn.Linear(2, 7, bias=False)
    mesh = DeviceMesh("cpu", [[0, 3], [2, 1]])
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)] * 2))
    try:
        hs.get_model_state_dict(model, options=FULL)
    except hs.UnsupportedConfigurationError as error:
        return str(error)
    raise AssertionError("not refused")


def local_tensor_of_another_shape(kit: Any) -> str:
    mesh = mesh_of((kit.world,), ("dp",))
    local = torch.ones(2 + kit.rank, 2)
    model = nn.Linear(2, 7, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((7, 2)), stride=(2, 1)))
    try:
        hs.get_model_state_dict(model, options=FULL)
    except hs.UnsupportedConfigurationError as error:
        return str(error)
    raise AssertionError("not refused")


def calls_from_two_threads(kit: Any) -> None:
    """Made in the same order on all ranks, at other times; many messages each."""
    mesh = mesh_of((kit.world,), ("dp",))
    models = [fully_shard(nn.Linear(64, 3001 + i), mesh=mesh) for i in range(2)]
    expected = [full_values(model) for model in models]
    found: dict[int, Any] = {}

    def call(i: int) -> None:
        time.sleep(kit.rank * 0.4 + i * 0.3)
        found[i] = hs.get_model_state_dict(models[i], options=FULL)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, values in enumerate(expected):
        torch.testing.assert_close(values, found[i], rtol=0, atol=0)


def inside_inference_mode(kit: Any, meta: bool) -> None:
    """What is made inside can be trained outside."""
    mesh = mesh_of((kit.world,), ("dp",))
    source = Net(0)
    stepper = torch.optim.Adam(source.parameters())
    train(source, stepper, 2)
    values, state = hs.get_state_dict(source, stepper, options=FULL)
    with torch.device("meta" if meta else "cpu"):
        model = Net(1)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.inference_mode():
        hs.set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state, options=FULL, device="cpu")
    for each in ((source, stepper), (model, optimizer)):
        train(*each, 1)
    torch.testing.assert_close(dict(source.state_dict()), full_values(model))
