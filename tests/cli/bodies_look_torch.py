"""Rank bodies: a live PyTorch state in pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import hyperstate as hs
from hyperstate.testing import Kit


def pictures(kit: Kit) -> dict[str, Any]:
    """What a sharded model, its state dict and its optimizer's look like; the traffic of drawing them."""
    mesh: Any = kit.mesh((2,), ("fsdp",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    kit.fake_step(model, optimizer)
    state, moments = hs.get_model_state_dict(model), hs.get_optim_state_dict(model, optimizer)
    kit.traffic(reset=True)
    found = {
        "model": str(hs.visualize_sharding(model)),
        "state": str(hs.visualize_sharding(state)),
        "memory": hs.visualize_sharding(moments).memory,
        "html": hs.visualize_sharding(state)._repr_html_(),
    }
    return {**found, "sent": kit.traffic()["bytes_sent"]}
