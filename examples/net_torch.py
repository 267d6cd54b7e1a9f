"""The model of ``train_any.py`` in PyTorch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

tensor = torch.from_numpy


def join():
    """Join the job that torchrun started; returns this process' rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def build():
    """A sharded model and its optimizer."""
    model = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 5)))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model, optimizer, data):
    """One step; returns the loss of this rank's data."""
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def leave():
    """End the job."""
    dist.destroy_process_group()
