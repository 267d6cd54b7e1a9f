"""Models spread over four ranks in every way, each with its optimizer and its way to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_nets import Mlp, Net, Parts, experts, fsdp, mesh_of, noise, push, tensor_parallel, train

Train = Callable[[Any, Any, int, int], None]
"""(model, optimizer, steps, number of the first step)"""


class Kind(NamedTuple):
    """How to make a model from a seed and this rank, and how to train it."""

    model: Callable[[int, int], Any]
    train: Train


def _train(width: int) -> Train:
    return lambda model, optimizer, steps, first: train(model, optimizer, steps, first, width)


def _push(model: Any, optimizer: Any, steps: int, first: int) -> None:
    for seed in range(first, first + steps):
        push(model, optimizer, seed)


def _plain(seed: int, rank: int) -> Net:
    return Net(seed)


def _ddp(seed: int, rank: int) -> nn.Module:
    return DistributedDataParallel(Net(seed))


def _fsdp(seed: int, rank: int) -> nn.Module:
    return fsdp(Net(seed), mesh_of((4,), ("dp",)))


def _hsdp(seed: int, rank: int) -> nn.Module:
    return fsdp(Net(seed), mesh_of((2, 2), ("rep", "dp")))


def _tp(seed: int, rank: int) -> nn.Module:
    return tensor_parallel(Mlp(seed), mesh_of((4,), ("tp",)))


def _fsdp_tp(seed: int, rank: int) -> nn.Module:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    return fsdp(tensor_parallel(Mlp(seed), mesh["tp"]), mesh["dp"])


def _ep(seed: int, rank: int) -> nn.Module:
    return experts(seed, mesh_of((4,), ("all",)), mesh_of((2, 2), ("edp", "ep")))


def _pp(seed: int, rank: int) -> nn.Module:
    """Two stages of two ranks; stage k owns ``layers.k`` and nothing else."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    stage = rank // 2
    named = {
        f"layers.{stage}.weight": noise(f"w{stage}", (5, 3), seed),
        f"layers.{stage}.bias": noise(f"b{stage}", (3,), seed),
    }
    sharded = {k: distribute_tensor(v, mesh["dp"], [Shard(0)], src_data_rank=None) for k, v in named.items()}
    return Parts(sharded)


def _odd(seed: int, rank: int) -> nn.Module:
    """Uneven and empty shards, shards along every dimension, HSDP by hand, a scalar-like weight."""
    flat, grid = mesh_of((4,), ("dp",)), mesh_of((2, 2), ("rep", "dp"))
    shapes: dict[str, tuple[tuple[int, ...], Any, list[Any]]] = {
        "few.weight": ((3, 2), flat, [Shard(0)]),
        "one": ((1,), flat, [Shard(0)]),
        "cols": ((2, 7), flat, [Shard(1)]),
        "both": ((5, 5), grid, [Shard(0), Shard(1)]),
        "twice": ((7, 2), grid, [Shard(0), Shard(0)]),
        "rest": ((5,), grid["dp"], [Shard(0)]),
    }
    made = {
        name: distribute_tensor(noise(name, shape, seed), mesh, placements, src_data_rank=None)
        for name, (shape, mesh, placements) in shapes.items()
    }
    return Parts(made)


KINDS: dict[str, Kind] = {
    "plain": Kind(_plain, _train(5)),
    "ddp": Kind(_ddp, _train(5)),
    "fsdp": Kind(_fsdp, _train(5)),
    "hsdp": Kind(_hsdp, _train(5)),
    "tp": Kind(_tp, _train(6)),
    "fsdp_tp": Kind(_fsdp_tp, _train(6)),
    "ep": Kind(_ep, _push),
    "pp": Kind(_pp, _push),
    "odd": Kind(_odd, _push),
}


def build(kind: str, seed: int, rank: int, lr: float = 0.01) -> tuple[Any, torch.optim.Optimizer]:
    """A model of a kind and Adam on it, in two groups that differ in weight decay."""
    model = KINDS[kind].model(seed, rank)
    params = list(model.parameters())
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "initial_lr": 0.5}]
    return model, torch.optim.Adam([group for group in groups if group["params"]], lr=lr)
