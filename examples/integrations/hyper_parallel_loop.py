"""A training loop of HyperParallel (on PyTorch) whose state goes through hyperstate: nothing of it is converted.

    HYPER_PARALLEL_PLATFORM=torch torchrun --nproc-per-node 2 hyper_parallel_loop.py out 4

Start it again with more steps: it goes on from what it finds, on any number of ranks that splits dim 0 evenly.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hyper_parallel import SkipDTensorDispatch, fully_shard, init_device_mesh
from torch import nn

import hyperstate as hs


def build(seed):
    """A model of HyperParallel's sharded tensors, and an optimizer that works on their local parts."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train_step(model, optimizer, step):
    """The loss of one step, on data that depend on the step alone."""
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    with SkipDTensorDispatch():
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), Path(sys.argv[1])
    model, optimizer = build(seed=0)
    first = hs.load(path, model, optimizer).extra["step"] if path.exists() else 0
    for step in range(first, int(sys.argv[2])):
        loss = train_step(model, optimizer, step)
        if rank == 0:
            print(step + 1, f"{loss:.5f}")
    hs.save(path, model, optimizer, extra={"step": int(sys.argv[2])})

    # What HyperParallel refuses: from the full state of one rank into the shards of all.
    to_root = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_root = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    weights, state = hs.get_state_dict(model, optimizer, options=to_root)
    new, fresh = build(seed=1)
    hs.set_state_dict(new, fresh, model_state_dict=weights, optim_state_dict=state, options=from_root)
    same = train_step(model, optimizer, 0) == train_step(new, fresh, 0)
    if rank == 0:
        print("goes on alike:", same, "state of shape", tuple(fresh.state[new[0].weight]["exp_avg"].shape))
    dist.destroy_process_group()
