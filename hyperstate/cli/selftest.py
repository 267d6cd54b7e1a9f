"""Rank body of `hyperstate doctor`: does a state move between two ranks? Any backend's kit will do."""

from __future__ import annotations

from typing import Any

import hyperstate as hs
from hyperstate.testing import Kit  # loaded by its path, so no relative import


def selftest(kit: Kit) -> dict[str, Any]:
    """Shard a small net, gather it on rank 0, set it into a net of other values, and compare byte by byte."""
    mesh = kit.mesh((kit.world,), ("fsdp",))
    first, second = (kit.shard(kit.model(seed), mesh) for seed in (0, 1))
    on_root = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    broadcast = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = hs.get_model_state_dict(first, options=on_root)
    hs.set_model_state_dict(second, full, options=broadcast)
    wanted, found = kit.named(first), kit.named(second)
    # Buffers that are no part of the state dict are nobody's business here.
    names = [name for name in wanted if kit.is_sharded(wanted[name])]
    unequal = [name for name in names if kit.content(wanted[name]) != kit.content(found[name])]
    return {"compared": len(names), "unequal": unequal, "sent": kit.traffic()["bytes_sent"]}
