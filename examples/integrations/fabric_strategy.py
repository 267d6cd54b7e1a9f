"""A strategy for Lightning Fabric: ``fabric.save`` and ``fabric.load`` write and read checkpoints of hyperstate.

    torchrun --nproc-per-node 2 fabric_strategy.py out 4

Start it again with more steps: it goes on from what it finds, on any number of ranks.
"""

import os
import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import hyperstate as hs


class HyperstateStrategy(ModelParallelStrategy):
    """Fabric's strategy for FSDP2 and TP, with other checkpoints: into any mesh, and without a hidden step."""

    def save_checkpoint(self, path, state, **more):
        """One model, optimizers or none, and values of the user's own, as Fabric's docs have it."""
        _refuse(more)
        model, optimizers, extra = _split(state)
        hs.save(path, model, optimizers or None, extra=extra)

    def load_checkpoint(self, path, state=None, strict=True, **more):
        """Fills `state` in place, and returns what is left over: nothing."""
        _refuse(more)
        model, optimizers, _ = _split(state)
        loaded = hs.load(path, model, optimizers or None, options=hs.StateDictOptions(strict=strict, names="neutral"))
        state.update(loaded.extra)
        return {}


def _refuse(more):
    """What Fabric can be asked for, and this strategy does not do."""
    if asked := [name for name, value in more.items() if value is not None]:
        raise TypeError(f"HyperstateStrategy has no {', '.join(asked)}")


def _split(state):
    """The model, the optimizers, and everything else of a state. (Fabric has taken its own wrappers off.)"""
    (model,) = (value for value in state.values() if isinstance(value, nn.Module))
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    known = [model, *optimizers]
    return model, optimizers, {k: v for k, v in state.items() if not any(v is one for one in known)}


def parallelize(model, mesh):
    """What Fabric asks for: here FSDP over the mesh dimension that it calls so."""
    return fully_shard(model, mesh=mesh["data_parallel"])


if __name__ == "__main__":
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = HyperstateStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if Path(sys.argv[1]).exists():
        fabric.load(sys.argv[1], state)
    while state["step"] < int(sys.argv[2]):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(state["step"]))
        loss = (model(batch) - 1).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if fabric.global_rank == 0:
            print(state["step"], f"{loss.item():.5f}")
    fabric.save(sys.argv[1], state)
